"""Which ranks hold which bytes of the files, where not all hold the same. Pure.

A tensor is cut where the boxes of any rank end. Of each *cell* that comes of it all bytes are held by the
same ranks, its *holders*; laid end to end in row-major order they are what one of these contributes.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from fastload.formats.dtypes import torch_spec
from fastload.geometry.box import Box, Runs, runs_of
from fastload.saving.layout import Layout

if TYPE_CHECKING:
    from fastload.formats.dtensors import BoxesByRank

__all__ = ["Cell", "Holdings"]

_NUM_SHOWN = 20


class Cell(NamedTuple):
    """A part of a tensor that some ranks hold, as a whole.

    Attributes:
        box: Which part.
        runs: Where its bytes lie in the tensor.
        holders: Those ranks, ascending.
    """

    box: Box
    runs: Runs
    holders: tuple[int, ...]


class _Cells(NamedTuple):
    """The cells of a tensor, in the order of their first bytes, and how far they and those before reach."""

    cells: tuple[Cell, ...]
    reaches: list[int]

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> _Cells:
        """Puts cells in order."""
        ordered = tuple(sorted(cells, key=lambda cell: cell.runs.start))
        return cls(ordered, list(accumulate((cell.runs.end for cell in ordered), max)))


class Holdings:
    """What all ranks hold of the tensors of a layout.

    Args:
        layout: The files.
        boxes: By name of the tensor, what each rank holds of it; one object for what is equal.

    Attributes:
        missing: Says which boxes are on no rank, of the first ones.
    """

    def __init__(self, layout: Layout, boxes: Mapping[str, BoxesByRank]) -> None:
        self.missing: list[str] = []
        self._kinds: list[_Cells] = []
        self._kind_of: list[int] = []
        known: dict[tuple[tuple[int, ...], int, int], tuple[int, list[Box]]] = {}
        for entry in layout.space.extents:
            dtype, shape = torch_spec(entry)
            key = (shape, dtype.itemsize, id(boxes[entry.name]))  # the same for layers that are alike
            if key not in known:
                cells = [(box, holders) for box, holders in _cut(shape, boxes[entry.name])]
                known[key] = len(self._kinds), _joined([box for box, holders in cells if not holders])
                held = (
                    Cell(box, runs_of(box, shape).scaled(dtype.itemsize), holders)
                    for box, holders in cells
                    if holders
                )
                self._kinds.append(_Cells.of(held))
            kind, missing = known[key]
            self._kind_of.append(kind)
            if len(self.missing) < _NUM_SHOWN:
                self.missing += [_lack(box, shape, entry.name) for box in missing]

    def cells(self, tensor: int) -> tuple[Cell, ...]:
        """Returns the cells of a tensor that has bytes, by its number in `Layout.space`, in order."""
        return self._kinds[self._kind_of[tensor]].cells

    def shared(self, rank: int) -> list[tuple[int, Cell]]:
        """Returns the cells that a rank and others hold, each with the number of its tensor, in order."""
        of_kind = [
            [cell for cell in cells if len(cell.holders) > 1 and rank in cell.holders]
            for cells, _ in self._kinds
        ]
        return [(number, cell) for number, kind in enumerate(self._kind_of) for cell in of_kind[kind]]

    def within(self, tensor: int, begin: int, end: int) -> Iterator[tuple[Cell, int, int]]:
        """Yields what cells of a tensor have in a range of its bytes: where that begins and ends in each."""
        cells, reaches = self._kinds[self._kind_of[tensor]]
        for at in range(bisect_right(reaches, begin), len(cells)):
            runs = cells[at].runs
            if runs.start >= end:
                return
            first, last = runs.before(begin), runs.before(end)
            if first < last:
                yield cells[at], first, last

    def kind(self, tensor: int) -> int:
        """Returns a number that tensors with the same cells share."""
        return self._kind_of[tensor]

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of who holds what."""
        kinds = [[[cell.box, cell.holders] for cell in cells] for cells, _ in self._kinds]
        return xxhash.xxh3_128_hexdigest(json.dumps([kinds, self._kind_of]).encode())


def _cut(shape: Sequence[int], held: BoxesByRank) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yields the parts of a tensor that no box of any rank cuts, with the ranks that have them, or none."""
    boxes = [(box, ranks) for of_ranks, ranks in held for box in of_ranks if box.is_within(shape)]
    bounds = [
        sorted(
            {0, size}
            | {bound for box, _ in boxes for bound in (box.offsets[dim], box.offsets[dim] + box.sizes[dim])}
        )
        for dim, size in enumerate(shape)
    ]
    holders: dict[tuple[int, ...], set[int]] = {}
    for box, ranks in boxes:
        spans = (
            range(bisect_left(of_dim, offset), bisect_left(of_dim, offset + size))
            for of_dim, offset, size in zip(bounds, box.offsets, box.sizes, strict=True)
        )
        for place in product(*spans):
            holders.setdefault(place, set()).update(ranks)
    parts = [list(pairwise(of_dim)) for of_dim in bounds]
    for place in product(*(range(len(of_dim)) for of_dim in parts)):
        edges = [of_dim[at] for of_dim, at in zip(parts, place, strict=True)]
        box = Box(tuple(begin for begin, _ in edges), tuple(end - begin for begin, end in edges))
        yield box, tuple(sorted(holders.get(place, ())))


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Joins neighbours, as far as they make boxes."""
    joined = list(boxes)
    for dim in reversed(range(len(boxes[0].sizes) if boxes else 0)):
        parts, joined = joined, []
        for box in sorted(parts, key=lambda box: (_without(box, dim), box.offsets[dim])):
            last = joined[-1] if joined else None
            end = last.offsets[dim] + last.sizes[dim] if last is not None else -1
            if last is not None and _without(last, dim) == _without(box, dim) and end == box.offsets[dim]:
                sizes = (*last.sizes[:dim], last.sizes[dim] + box.sizes[dim], *last.sizes[dim + 1 :])
                joined[-1] = last._replace(sizes=sizes)
            else:
                joined.append(box)
    return sorted(joined)


def _without(box: Box, dim: int) -> tuple[int, ...]:
    """Returns a box but for one dimension."""
    return (*box.offsets[:dim], *box.offsets[dim + 1 :], *box.sizes[:dim], *box.sizes[dim + 1 :])


def _lack(box: Box, shape: Sequence[int], name: str) -> str:
    if box == Box.whole(shape):
        return f"{name} is on no rank"
    if box.sizes[1:] == tuple(shape[1:]):
        first, num = box.offsets[0], box.sizes[0]
        rows = f"rows {first}-{first + num - 1} of {name} are" if num > 1 else f"row {first} of {name} is"
        return f"{rows} on no rank"
    spans = (f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"elements [{', '.join(spans)}] of {name} are on no rank"
