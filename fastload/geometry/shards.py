"""The boxes of a tensor on each rank of a mesh, computed from placements as torch does. Pure.

torch gives only the first element of a DTensor's shard. A shard whose rows are not adjacent has several
boxes, so the tensor is cut here placement by placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from fastload.geometry.box import Box
from fastload.geometry.ranges import join_adjacent

BY_HAND = "by hand"
"""Stands for the mesh of a tensor that the caller has cut."""
Interval = tuple[int, int]
ShardIntervals = list[list[Interval]]
"""The indexes of a shard in each dimension, as ascending intervals."""


class MeshCut(NamedTuple):
    """A cut of a tensor's dimension by one dimension of a mesh.

    Attributes:
        num_ranks: Number of shards.
        which: Number of the rank's shard.
        split_factor: Number of pieces before the cut; a shard has a part of each piece.
    """

    num_ranks: int
    which: int
    split_factor: int


def shard_intervals(
    shape: Sequence[int], mesh_shape: Sequence[int], index: Sequence[int], placements: Sequence[Any]
) -> list[ShardIntervals]:
    """Returns the possible shards of one rank of a mesh.

    There are two if a dimension is cut unevenly and more than once: torch applies the placements from left to
    right, but FSDP2 cuts last, whatever its position in nearly equal placements. torch's shard comes first.

    Args:
        shape: Shape of the complete tensor.
        mesh_shape: Number of ranks in each dimension of the mesh.
        index: Number of the rank along each dimension of the mesh.
        placements: Placement for each dimension of the mesh. One that cuts the tensor has a ``dim`` and may
            have a ``split_factor``.
    """
    cuts: list[list[MeshCut]] = [[] for _ in shape]
    for num_ranks, which, placement in zip(mesh_shape, index, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            cuts[dim].append(MeshCut(num_ranks, which, getattr(placement, "split_factor", 1)))
    complete: ShardIntervals = [[(0, size)] if size else [] for size in shape]
    by_torch = [_cut_left_first(shard, here) for shard, here in zip(complete, cuts, strict=True)]
    if not any(cut.split_factor > 1 for here in cuts for cut in here):
        return [by_torch]
    by_fsdp = [_cut_right_first(shard, here) for shard, here in zip(complete, cuts, strict=True)]
    return [by_torch] if by_fsdp == by_torch else [by_torch, by_fsdp]


def shard_boxes(shard: ShardIntervals) -> list[tuple[Box, Box]]:
    """Returns the boxes of a shard, in row-major order, none of them empty.

    Returns:
        Pairs of a box of the complete tensor and the same box in the local tensor.
    """
    return [_boxes_at(parts) for parts in product(*map(_with_places, shard))]


def local_shape(shard: ShardIntervals) -> tuple[int, ...]:
    """Returns the shape of the local tensor of a shard."""
    return tuple(sum(end - begin for begin, end in intervals) for intervals in shard)


def _cut_left_first(intervals: list[Interval], cuts: Sequence[MeshCut]) -> list[Interval]:
    for num_ranks, which, split_factor in cuts:
        pieces = [_chunk(intervals, split_factor, number) for number in range(split_factor)]
        intervals = join_adjacent(one for piece in pieces for one in _chunk(piece, num_ranks, which))
    return intervals


def _cut_right_first(intervals: list[Interval], cuts: Sequence[MeshCut]) -> list[Interval]:
    if not cuts:
        return intervals
    first, rest = cuts[0], cuts[1:]
    if first.split_factor > 1 and first.split_factor == prod(cut.num_ranks for cut in rest):
        return _chunk(_cut_right_first(intervals, rest), first.num_ranks, first.which)
    return _cut_right_first(_cut_left_first(intervals, cuts[:1]), rest)


def _chunk(intervals: Sequence[Interval], num_chunks: int, index: int) -> list[Interval]:
    """Returns a chunk of intervals as `torch.chunk` cuts them; the last ones may be short or empty."""
    chunk = -(-sum(end - begin for begin, end in intervals) // num_chunks)
    first, last = index * chunk, (index + 1) * chunk
    chunk_intervals, place = [], 0
    for begin, end in intervals:
        low, high = max(begin, begin + first - place), min(end, begin + last - place)
        if low < high:
            chunk_intervals.append((low, high))
        place += end - begin
    return chunk_intervals


def _with_places(intervals: Sequence[Interval]) -> list[tuple[int, int, int]]:
    """Returns the first index of each interval in the complete and in the local tensor, and its length."""
    placed, place = [], 0
    for begin, end in intervals:
        placed.append((begin, place, end - begin))
        place += end - begin
    return placed


def _boxes_at(parts: Sequence[tuple[int, int, int]]) -> tuple[Box, Box]:
    begins, places, sizes = zip(*parts, strict=True) if parts else ((), (), ())
    return Box(begins, sizes), Box(places, sizes)
