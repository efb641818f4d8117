"""What of a tensor this rank holds: the boxes of a DTensor, and the views of its local tensor that they are.

torch tells of a DTensor's shard only where it begins. Here the tensor is cut as torch does it, placement by
placement, so that a shard whose rows are not neighbours comes out as all the boxes it consists of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastload.geometry.box import Box

__all__ = [
    "Group",
    "empty_like",
    "is_dtensor",
    "local_of",
    "local_parts",
    "local_shape",
    "narrowed",
    "placed_boxes",
    "placed_intervals",
]

Interval = tuple[int, int]
Held = list[list[Interval]]

_PLAIN = (Tensor, nn.Parameter)


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
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[Held]:
    """Returns for each dimension which indexes one rank of a mesh holds, as ascending intervals.

    Where a dimension is cut unevenly and more than once, that depends on who did it: torch follows the
    placements from left to right; FSDP2 cuts what had been cut before it came, and its placements say about
    the same. So there may be two answers; the first is torch's.

    Args:
        shape: Of the whole tensor.
        mesh_shape: Ranks in each dimension of the mesh.
        coordinate: Of the rank, in the mesh.
        placements: One for each dimension of the mesh: with a ``dim``, and perhaps a ``split_factor``, if it
            cuts the tensor there.
    """
    cuts: list[list[Cut]] = [[] for _ in shape]
    for num_ranks, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            cuts[dim].append(Cut(num_ranks, index, getattr(placement, "split_factor", 1)))
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


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is torch's DTensor; nothing is imported to find out."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Returns the memory that this rank has of a tensor: of a plain one, itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()  # type: ignore[attr-defined,no-any-return]


def local_parts(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """Returns what this rank holds of a tensor: boxes of it, not empty, each with a view of where it is.

    Of a plain tensor that is one part, the whole, even if it is empty.
    """
    if not is_dtensor(tensor):
        return [(Box.whole(tensor.shape), tensor)]
    local = local_of(tensor)
    return [
        (box, narrowed(local, within)) for held in _readings(tensor)[:1] for box, within in placed_boxes(held)
    ]


def _readings(tensor: Any) -> list[Held]:
    """Returns what this rank may hold of a DTensor, given the shape of its local one.

    One answer, if it can be told; none if this rank has no place in the mesh.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    local = tuple(local_of(tensor).shape)
    return _fitting(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tensor.placements, local)


@lru_cache(maxsize=4096)  # layers are alike
def _fitting(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
    local: tuple[int, ...],
) -> list[Held]:
    """Returns those of `placed_intervals` that fit the shape of a local tensor."""
    found = placed_intervals(shape, mesh_shape, coordinate, placements)
    if not prod(local):
        return [held for held in found if not prod(local_shape(held))][:1]
    return [held for held in found if local_shape(held) == local]


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Returns a view of a tensor that is a box of it."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def empty_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a DTensor with the placements of another, and uninitialized memory of its own.

    Raises:
        MemoryError: The device or the host has not that much memory.
    """
    try:
        with torch.no_grad():
            return torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        why = str(error).split("\n", 1)[0]
        shape = list(local_of(tensor).shape)
        raise MemoryError(f"cannot allocate {shape} {dtype or tensor.dtype} on {device}: {why}") from None


class Group:
    """The ranks that load together, and so what they can fill.

    Args:
        ranks: Their numbers in torch's default group; None if there is no torch.distributed.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        self._ranks = None if ranks is None else frozenset(ranks)
        self._outside: dict[Any, list[int]] = {}

    def misfits(self, name: str, tensor: Any) -> Iterator[str]:
        """Says why a tensor that is distributed over ranks cannot be loaded into; nothing of plain ones.

        Args:
            name: What to call it.
            tensor: The tensor.
        """
        if type(tensor) in _PLAIN:
            return
        if hasattr(tensor, "local_shards"):
            yield (
                f"{name}: into= has a {type(tensor).__name__}, as FSDP1 makes them: "
                "use fully_shard (FSDP2), or load a full state dict on all ranks"
            )
        elif is_dtensor(tensor):
            yield from self._dtensor_misfits(name, tensor)
        elif hasattr(tensor, "to_local"):
            yield f"{name}: into= has a {type(tensor).__name__}: of sharded tensors DTensor only is known"

    def _dtensor_misfits(self, name: str, tensor: Any) -> Iterator[str]:
        unplaced = [str(one) for one in tensor.placements if not _is_placed(one)]
        if unplaced:
            yield (
                f"{name}: into= has a DTensor with placement {', '.join(unplaced)}, of which no rank holds "
                "a part: redistribute it to Replicate() or Shard(...) first"
            )
            return
        if outside := self._outside_of(tensor.device_mesh):
            yield (
                f"{name}: into= has a DTensor on a mesh with ranks {_some(outside)}, which take no part in "
                "this load: load with a group= of all of them"
            )
        local = local_of(tensor)
        num_readings = len(_readings(tensor))
        if type(local) not in _PLAIN:
            yield f"{name}: into= has a DTensor whose local tensor is a {type(local).__name__}"
        elif num_readings != 1 and tensor.device_mesh.get_coordinate() is not None:
            why = "do not say which part of" if num_readings else "do not give that of"
            yield (
                f"{name}: into= has a DTensor with a local tensor of shape {list(local.shape)}; its "
                f"placements {tuple(tensor.placements)} {why} {list(tensor.shape)}: shard it evenly"
            )

    def _outside_of(self, mesh: Any) -> list[int]:
        if self._ranks is None:
            return []
        if mesh not in self._outside:
            self._outside[mesh] = sorted(set(mesh.mesh.flatten().tolist()) - self._ranks)
        return self._outside[mesh]


def _is_placed(placement: Any) -> bool:
    if placement.is_partial():
        return False
    return placement.is_replicate() or getattr(placement, "dim", None) is not None


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, …" if len(ranks) > 8 else shown
