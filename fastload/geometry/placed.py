"""Which boxes of a tensor each rank of a mesh holds: placements, cut as torch cuts. Pure.

torch tells of a DTensor's shard only where it begins. Here the tensor is cut as torch does it, placement by
placement, so that a shard whose rows are not neighbours comes out as all the boxes it consists of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from fastload.geometry.box import Box

Interval = tuple[int, int]
Held = list[list[Interval]]


class Cut(NamedTuple):
    """How one dimension of a mesh cuts a dimension of a tensor.

    Attributes:
        num_ranks: How many shards it makes.
        which: The one that the rank holds.
        split_factor: How many pieces there are before; each of them is cut, and a shard has a bit of each.
    """

    num_ranks: int
    which: int
    split_factor: int


def placed_intervals(
    shape: Sequence[int], mesh_shape: Sequence[int], index: Sequence[int], placements: Sequence[Any]
) -> list[Held]:
    """Returns for each dimension which indexes one rank of a mesh holds, as ascending intervals.

    Where a dimension is cut unevenly and more than once, that depends on who did it: torch follows the
    placements from left to right; FSDP2 cuts what had been cut before it came, and its placements say about
    the same. So there may be two answers; the first is torch's.

    Args:
        shape: Of the whole tensor.
        mesh_shape: Ranks in each dimension of the mesh.
        index: Of the rank, along each dimension of the mesh.
        placements: One for each dimension of the mesh: with a ``dim``, and perhaps a ``split_factor``, if it
            cuts the tensor there.
    """
    cuts: list[list[Cut]] = [[] for _ in shape]
    for num_ranks, which, placement in zip(mesh_shape, index, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            cuts[dim].append(Cut(num_ranks, which, getattr(placement, "split_factor", 1)))
    whole: Held = [[(0, size)] if size else [] for size in shape]
    by_torch = [_cut_left_first(held, here) for held, here in zip(whole, cuts, strict=True)]
    if not any(cut.split_factor > 1 for here in cuts for cut in here):
        return [by_torch]
    by_fsdp = [_cut_right_first(held, here) for held, here in zip(whole, cuts, strict=True)]
    return [by_torch] if by_fsdp == by_torch else [by_torch, by_fsdp]


def placed_boxes(held: Held) -> list[tuple[Box, Box]]:
    """Returns the boxes that intervals in each dimension make, in row-major order, none of them empty.

    Returns:
        Pairs of a box of the whole tensor and of the box of the local one that holds it.
    """
    return [_boxes_at(parts) for parts in product(*map(_with_places, held))]


def local_shape(held: Held) -> tuple[int, ...]:
    """Returns the shape of the local tensor that holds these intervals of each dimension."""
    return tuple(sum(end - begin for begin, end in intervals) for intervals in held)


def _cut_left_first(intervals: list[Interval], cuts: Sequence[Cut]) -> list[Interval]:
    for num_ranks, which, split_factor in cuts:
        pieces = [_chunk(intervals, split_factor, number) for number in range(split_factor)]
        intervals = _joined(one for piece in pieces for one in _chunk(piece, num_ranks, which))
    return intervals


def _cut_right_first(intervals: list[Interval], cuts: Sequence[Cut]) -> list[Interval]:
    if not cuts:
        return intervals
    first, rest = cuts[0], cuts[1:]
    if first.split_factor > 1 and first.split_factor == prod(cut.num_ranks for cut in rest):
        return _chunk(_cut_right_first(intervals, rest), first.num_ranks, first.which)
    return _cut_right_first(_cut_left_first(intervals, cuts[:1]), rest)


def _chunk(intervals: Sequence[Interval], num_chunks: int, index: int) -> list[Interval]:
    """Cuts what lies in intervals as `torch.chunk` does; the last chunks may be short, or empty."""
    chunk = -(-sum(end - begin for begin, end in intervals) // num_chunks)
    first, last = index * chunk, (index + 1) * chunk
    found, place = [], 0
    for begin, end in intervals:
        low, high = max(begin, begin + first - place), min(end, begin + last - place)
        if low < high:
            found.append((low, high))
        place += end - begin
    return found


def _joined(intervals: Iterator[Interval]) -> list[Interval]:
    """Makes one of neighbours."""
    joined: list[Interval] = []
    for begin, end in intervals:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _with_places(intervals: Sequence[Interval]) -> list[tuple[int, int, int]]:
    """Returns where each interval begins in the tensor, where in the local one, and its length."""
    found, place = [], 0
    for begin, end in intervals:
        found.append((begin, place, end - begin))
        place += end - begin
    return found


def _boxes_at(parts: Sequence[tuple[int, int, int]]) -> tuple[Box, Box]:
    begins, places, sizes = zip(*parts, strict=True) if parts else ((), (), ())
    return Box(begins, sizes), Box(places, sizes)
