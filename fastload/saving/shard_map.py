"""The shard map: which ranks hold which bytes of the tensors of a save. Pure.

Tensors are cut at the boundaries of all ranks' boxes. The same ranks, the *holders*, hold all of such a part,
a *shard*. A holder contributes the bytes of a shard in row-major order.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import xxhash

from fastload.formats.dtypes import torch_spec
from fastload.geometry.box import Box, Runs, runs_of
from fastload.saving.layout import Layout

if TYPE_CHECKING:
    from fastload.geometry.dtensors import BoxesByRank

T = TypeVar("T")

_NUM_SHOWN = 20


class MappedShard(NamedTuple):
    """A part of a tensor that the same ranks hold completely.

    Attributes:
        box: The part, in elements.
        runs: Its bytes in the tensor.
        holders: The ranks that hold it, ascending.
    """

    box: Box
    runs: Runs
    holders: Sequence[int]


class Intervals(Generic[T]):
    """Things by the ranges that they take, which may overlap.

    Args:
        ranges: Begin and end of the range of each, and the thing. Bounds are numbers, or files and offsets.
    """

    def __init__(self, ranges: Iterable[tuple[Any, Any, T]]) -> None:
        self._ranges = sorted(ranges, key=itemgetter(0))
        self._ends = list(accumulate((end for _, end, _ in self._ranges), max))

    def overlapping(self, begin: Any, end: Any) -> Iterator[T]:
        """Yields what overlaps a range, in the order in which the ranges begin."""
        for at in range(bisect_right(self._ends, begin), len(self._ranges)):
            first, last, thing = self._ranges[at]
            if first >= end:
                return
            if last > begin:
                yield thing


class TensorShards:
    """The shards of a tensor. Tensors with identical shards share one object.

    Args:
        shards: All shards.
        missing: Boxes that no rank holds.

    Attributes:
        shards: All shards, in the order of their first bytes.
        missing: As given.
    """

    def __init__(self, shards: Sequence[MappedShard], missing: Sequence[Box] = ()) -> None:
        self.shards = sorted(shards, key=lambda shard: shard.runs.start)
        self.missing = missing
        self._by_range = Intervals((shard.runs.start, shard.runs.end, shard) for shard in self.shards)

    def within(self, begin: int, end: int) -> Iterator[tuple[MappedShard, int, int]]:
        """Yields the shards in a byte range of the tensor, each with the range of its own bytes."""
        for shard in self._by_range.overlapping(begin, end):
            first, last = shard.runs.before(begin), shard.runs.before(end)
            if first < last:
                yield shard, first, last


class ShardMap:
    """The shards of all tensors of a layout.

    Args:
        layout: The files.
        num_ranks: Number of ranks.
        boxes: Name of a tensor → the boxes that each rank holds; equal ones share one object. None if every
            rank holds every tensor.

    Attributes:
        is_replicated: Whether every rank holds every tensor.
    """

    def __init__(
        self, layout: Layout, num_ranks: int, boxes: Mapping[str, BoxesByRank] | None = None
    ) -> None:
        self.is_replicated = boxes is None
        self._entries = layout.space.ranges
        self._everyone = range(num_ranks)
        self._boxes = boxes
        self._known: dict[tuple[tuple[int, ...], int, int], TensorShards] = {}
        self._known_parts: dict[tuple[tuple[int, ...], int], tuple[list[MappedShard], list[Box]]] = {}

    @classmethod
    def of(cls, layout: Layout, num_ranks: int, boxes: Mapping[str, BoxesByRank] | None) -> ShardMap:
        """Returns the last map if it is of these arguments, else a new one."""
        shard_map = next((known for known in _last[:] if known._is_of(layout, num_ranks, boxes)), None)
        if shard_map is None:
            shard_map = cls(layout, num_ranks, boxes)
            _last[:] = [shard_map]
        return shard_map

    def _is_of(self, layout: Layout, num_ranks: int, boxes: Mapping[str, BoxesByRank] | None) -> bool:
        return (
            self._entries is layout.space.ranges and len(self._everyone) == num_ranks and self._boxes == boxes
        )

    def tensor(self, number: int) -> TensorShards:
        """Returns the shards of a tensor, by its number in `Layout.space`."""
        entry = self._entries[number]
        dtype, shape = torch_spec(entry)
        boxes = None if self._boxes is None else self._boxes[entry.name]
        key = (shape, dtype.itemsize, id(boxes))  # the same for identical layers
        shards = self._known.get(key)
        if shards is None:
            shards = self._known[key] = self._cut(shape, dtype.itemsize, boxes)
        return shards

    @cached_property
    def tensors(self) -> list[TensorShards]:
        """The shards of every tensor that is not empty."""
        return [self.tensor(number) for number in range(len(self._entries))]

    def replicated(self, rank: int) -> list[tuple[int, MappedShard]]:
        """Returns the shards that a rank shares with others, each with the number of its tensor, in order."""
        shared = {
            kind: [shard for shard in kind.shards if len(shard.holders) > 1 and rank in shard.holders]
            for kind in set(self.tensors)
        }
        return [(number, shard) for number, kind in enumerate(self.tensors) for shard in shared[kind]]

    def missing(self) -> list[str]:
        """Describes boxes that no rank holds; the first ones."""
        lines: list[str] = []
        for entry, kind in zip(self._entries, self.tensors, strict=True):
            lines += [_describe_missing(box, torch_spec(entry)[1], entry.name) for box in kind.missing]
            if len(lines) >= _NUM_SHOWN:
                break
        return lines

    @cached_property
    def digest(self) -> str:
        """Identifies the map among maps of the same layout."""
        if self.is_replicated:
            return "replicated"
        numbers: dict[TensorShards, int] = {}
        of_tensors = [numbers.setdefault(kind, len(numbers)) for kind in self.tensors]
        kinds = [[[shard.box, shard.holders] for shard in kind.shards] for kind in numbers]
        return xxhash.xxh3_128_hexdigest(json.dumps([kinds, of_tensors]).encode())

    def _cut(self, shape: tuple[int, ...], itemsize: int, boxes: BoxesByRank | None) -> TensorShards:
        if boxes is None:
            box = Box.whole(shape)
            return TensorShards([MappedShard(box, runs_of(box, shape).scaled(itemsize), self._everyone)])
        key = shape, id(boxes)  # the same for tensors of a parameter and of its optimizer
        if key not in self._known_parts:
            parts = list(_cut(shape, boxes))
            held = [MappedShard(box, runs_of(box, shape), holders) for box, holders in parts if holders]
            self._known_parts[key] = held, _joined([box for box, holders in parts if not holders])
        held, missing = self._known_parts[key]
        shards = [MappedShard(box, runs.scaled(itemsize), holders) for box, runs, holders in held]
        return TensorShards(shards, missing)


_last: list[ShardMap] = []  # at most one: a training saves states of the same placements


def _cut(shape: Sequence[int], boxes_by_rank: BoxesByRank) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yields the parts of a tensor between all boundaries of boxes, each with its holders, perhaps none."""
    boxes = [(box, ranks) for of_ranks, ranks in boxes_by_rank for box in of_ranks if box.is_within(shape)]
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
    """Joins neighbours that form boxes."""
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
    """Returns offsets and sizes of a box without one dimension."""
    return (*box.offsets[:dim], *box.offsets[dim + 1 :], *box.sizes[:dim], *box.sizes[dim + 1 :])


def _describe_missing(box: Box, shape: Sequence[int], name: str) -> str:
    part = described_part(box, shape)
    subject = f"{part} of {name}" if part else name
    return f"{subject} {'are' if part and not part.startswith('row ') else 'is'} on no rank"


def described_part(box: Box, shape: Sequence[int]) -> str:
    """Describes a box of a tensor, for messages; empty for the complete tensor."""
    if box == Box.whole(shape):
        return ""
    if box.sizes[1:] == tuple(shape[1:]):
        first, num = box.offsets[0], box.sizes[0]
        return f"rows {first}-{first + num - 1}" if num > 1 else f"row {first}"
    spans = (f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"elements [{', '.join(spans)}]"
