"""The boxes of a tensor on each rank: of a DTensor by its placements, of a `BoxedTensor` as it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations, product
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import xxhash
from torch import Tensor, nn

from fastload.geometry.box import Box
from fastload.geometry.shards import BY_HAND, local_shape, shard_boxes, shard_intervals

BoxesByRank = tuple[tuple[tuple[Box, ...], tuple[int, ...]], ...]
"""The boxes of a tensor on each rank: distinct shards, without empty boxes, each with all of its ranks."""

_PLAIN = (Tensor, nn.Parameter)


class BoxedTensor(Tensor):
    """A tensor that stands for a complete one, and has memory for boxes of it, such as a `fastload.Shard`.

    Attributes:
        boxes: The boxes, each with its tensor, as `Checkpoint.read` takes them.
    """

    boxes: Sequence[tuple[Box, Tensor]]

    def as_real(self) -> BoxedTensor:
        """Views complex numbers as pairs, with a dimension more."""
        raise NotImplementedError


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is torch's DTensor; imports nothing to find out."""
    return type(tensor) not in _PLAIN and _is_dtensor_type(type(tensor))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor stands for one that several ranks hold: a DTensor or a `BoxedTensor`."""
    return type(tensor) not in _PLAIN and (isinstance(tensor, BoxedTensor) or _is_dtensor_type(type(tensor)))


@lru_cache(maxsize=64)  # called several times for each tensor
def _is_dtensor_type(kind: type) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor, and a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local_of(tensor)
    local: Any = tensor.to_local().detach()  # type: ignore[attr-defined]
    # What `redistribute(async_op=True)` gives until it is used.
    return local.wait() if hasattr(local, "trigger_wait") else local  # type: ignore[no-any-return]


def mesh_of(tensor: Any) -> str:
    """Returns a text for the mesh of a DTensor, the same for equal meshes; empty for a plain tensor."""
    if isinstance(tensor, BoxedTensor):
        return BY_HAND
    return _order_of(tensor.device_mesh).text if is_dtensor(tensor) else ""


def local_parts(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """Returns the non-empty boxes of a tensor on this rank, each with a view of the local tensor.

    A plain tensor has one box, the complete tensor, even if it is empty.
    """
    if isinstance(tensor, BoxedTensor):
        return [(box, part) for box, part in tensor.boxes if box.numel]
    if not is_dtensor(tensor):
        return [(Box.whole(tensor.shape), tensor)]
    local = local_of(tensor)
    return [(box, narrowed(local, within)) for parts in _readings(tensor, local)[:1] for box, within in parts]


def _readings(tensor: Any, local: Tensor) -> list[list[tuple[Box, Box]]]:
    """Returns the possible shards of a DTensor on this rank, given its local tensor; see `shard_boxes`.

    There is one unless the placements are ambiguous, and none if this rank is not in the mesh.
    """
    return _fitting(_order_of(tensor.device_mesh), tensor.shape, tensor.placements, local.shape)


@lru_cache(maxsize=4096)  # layers are alike
def _fitting(
    order: _Order, shape: tuple[int, ...], placements: tuple[Any, ...], local: tuple[int, ...]
) -> list[list[tuple[Box, Box]]]:
    """Returns those of `shard_intervals` that fit the shape of a local tensor, as boxes."""
    if order.here is None:
        return []
    readings = shard_intervals(shape, order.shape, order.here, placements)
    if not prod(local):
        fitting = [shard for shard in readings if not prod(local_shape(shard))][:1]
    else:
        fitting = [shard for shard in readings if local_shape(shard) == local]
    return [shard_boxes(shard) for shard in fitting]


@dataclass(frozen=True, eq=False)
class _Order:
    """The order of the ranks of a mesh in their process groups.

    torch sorts the ranks of each process group, and `full_tensor`, `distribute_tensor` and FSDP2 follow that
    order. A coordinate follows the order in the mesh instead.

    Attributes:
        shape: The shape of the mesh.
        ranks: The ranks in the order of the mesh, as nested lists.
        indexes: For each dimension, the number in its group of the rank at each coordinate.
        mixed: Pairs of dimensions: along the second one, the order along the first one changes.
        ascends: Whether ranks ascend along each dimension, so that numbers in groups equal coordinates.
        here: The numbers of this rank in its groups; None if it is not in the mesh.
    """

    shape: tuple[int, ...]
    ranks: Any
    indexes: tuple[Any, ...]
    mixed: frozenset[tuple[int, int]]
    ascends: bool
    here: tuple[int, ...] | None

    def index_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers in its groups of the rank at a coordinate."""
        return tuple(_at(numbers, coordinate) for numbers in self.indexes)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Returns the rank at a coordinate."""
        return _at(self.ranks, coordinate)

    @cached_property
    def text(self) -> str:
        """The ranks in the order of the mesh; short, and the same for equal meshes."""
        return xxhash.xxh3_64_hexdigest(str(self.ranks).encode())


_ORDERS: WeakKeyDictionary[Any, _Order] = WeakKeyDictionary()
_last_order: list[tuple[ref[Any], _Order]] = []  # at most one, since a mesh takes long to hash


def _order_of(mesh: Any) -> _Order:
    for known, order in _last_order[:]:
        if known() is mesh:
            return order
    of_mesh = _ORDERS.get(mesh)
    if of_mesh is None:
        of_mesh = _ORDERS[mesh] = _find_order(mesh)
    _last_order[:] = [(ref(mesh), of_mesh)]
    return of_mesh


def _find_order(mesh: Any) -> _Order:
    ranks = mesh.mesh
    numbers = [ranks.argsort(dim).argsort(dim) for dim in range(ranks.dim())]
    mixed = frozenset(
        (one, other)
        for one, other in permutations(range(ranks.dim()), 2)
        if not torch.equal(numbers[one], numbers[one].narrow(other, 0, 1).expand_as(ranks))
    )
    indexes = tuple(index.tolist() for index in numbers)
    ascends = all(torch.equal(index, index.sort(dim).values) for dim, index in enumerate(numbers))
    coordinate = mesh.get_coordinate()
    here = None if coordinate is None else tuple(_at(index, coordinate) for index in indexes)
    return _Order(tuple(mesh.shape), ranks.tolist(), indexes, mixed, ascends, here)


def _at(nested: Any, coordinate: Sequence[int]) -> int:
    for index in coordinate:
        nested = nested[index]
    rank: int = nested
    return rank


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Returns a view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def empty_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an uninitialized DTensor with the placements of another one.

    Raises:
        MemoryError: The device or the host has too little memory.
    """
    try:
        with torch.no_grad():
            return torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        why = str(error).split("\n", 1)[0]
        shape = list(local_of(tensor).shape)
        raise MemoryError(f"cannot allocate {shape} {dtype or tensor.dtype} on {device}: {why}") from None


def with_local(tensor: Any, local: Tensor, shape: Sequence[int]) -> Any:
    """Returns a DTensor with the mesh and the placements of another one; of a plain tensor, `local`.

    Args:
        tensor: The other tensor.
        local: The local tensor.
        shape: Shape of the complete tensor.
    """
    if not is_dtensor(tensor):
        return local
    stride = torch.empty(tuple(shape), device="meta").stride()
    given = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return type(tensor).from_local(local, tensor.device_mesh, tensor.placements, **given)


class DTensorRanks:
    """The ranks that load or save DTensors together.

    Args:
        ranks: The ranks in torch's default group; None without torch.distributed.
        place: Name of the argument with the tensors, for messages.
        call: ``load`` or ``save``, for messages.
    """

    def __init__(self, ranks: Sequence[int] | None, *, place: str = "into=", call: str = "load") -> None:
        self._ranks = None if ranks is None else frozenset(ranks)
        self._place = place
        self._call = call
        self._members = tuple(ranks or ())
        self._outside: dict[Any, list[int]] = {}
        self._groups: dict[int, str] = {}
        self._fitting: dict[tuple[Any, ...], Any] = {}  # kind of DTensor → its mesh, whose id is in the kind

    def boxes_of_all(self, tensor: Any) -> BoxesByRank | None:
        """Returns the boxes of a sharded tensor on all ranks; None if only those ranks know them."""
        if isinstance(tensor, BoxedTensor):
            return None
        return _boxes_of_all(_order_of(tensor.device_mesh), tensor.shape, tensor.placements, self._members)

    def misfits(self, name: str, tensor: Any) -> Iterator[str]:
        """Yields why a tensor that is distributed over ranks cannot be loaded or saved.

        Args:
            name: Name of the tensor.
            tensor: The tensor; nothing for a plain one.
        """
        if type(tensor) in _PLAIN:
            return
        if is_dtensor(tensor):
            sharded: Any = tensor
            mesh, local = sharded.device_mesh, local_of(sharded)
            key = (id(mesh), sharded.shape, sharded.placements, type(local), local.shape)
            if key not in self._fitting:  # layers are alike
                problems = list(self._dtensor_misfits(name, sharded, local))
                if not problems:
                    self._fitting[key] = mesh
                yield from problems
        elif hasattr(tensor, "local_shards"):
            yield (
                f"{name}: {self._place} has a {type(tensor).__name__}, as FSDP1 makes them: "
                f"use fully_shard (FSDP2), or {self._call} a full state dict on all ranks"
            )
        elif hasattr(tensor, "to_local"):
            kind = type(tensor).__name__
            yield f"{name}: {self._place} has a {kind}: DTensor is the only supported sharded tensor"

    def _dtensor_misfits(self, name: str, tensor: Any, local: Tensor) -> Iterator[str]:
        mesh = tensor.device_mesh
        unplaced = [str(one) for one in tensor.placements if not _is_placed(one)]
        if unplaced:
            yield (
                f"{name}: {self._place} has a DTensor with placement {', '.join(unplaced)}, of which no rank "
                "holds a part: redistribute it to Replicate() or Shard(...) first"
            )
            return
        if outside := self._outside_of(mesh):
            yield (
                f"{name}: {self._place} has a DTensor on a mesh with ranks {_some(outside)}, which take no "
                f"part in this {self._call}: {self._call} with a process_group= of all of them"
            )
        if problem := self._groups_of(mesh) or _disorder(tensor.shape, mesh, tensor.placements):
            yield f"{name}: {self._place} has a DTensor on a mesh {problem}"
            return
        num_readings = len(_readings(tensor, local))
        if type(local) not in _PLAIN:
            kind = type(local).__name__
            yield (
                f"{name}: {self._place} has a DTensor whose local tensor is a {kind}: only plain local "
                "tensors are supported"
            )
        elif num_readings != 1 and _order_of(mesh).here is not None:
            why = "are ambiguous for" if num_readings else "do not match it for"
            yield (
                f"{name}: {self._place} has a DTensor with a local tensor of shape {list(local.shape)}; its "
                f"placements {tuple(tensor.placements)} {why} the shape {list(tensor.shape)}: shard it evenly"
            )

    def _groups_of(self, mesh: Any) -> str:
        groups = self._groups.get(id(mesh))  # meshes of other groups may be equal
        if groups is None:
            groups = self._groups[id(mesh)] = _other_groups(mesh)
        return groups

    def _outside_of(self, mesh: Any) -> list[int]:
        if self._ranks is None:
            return []
        outside = self._outside.get(mesh)
        if outside is None:
            outside = self._outside[mesh] = sorted(set(mesh.mesh.flatten().tolist()) - self._ranks)
        return outside


@lru_cache(maxsize=4096)  # equal layers share one object, also from call to call
def _boxes_of_all(
    order: _Order, shape: tuple[int, ...], placements: tuple[Any, ...], members: tuple[int, ...]
) -> BoxesByRank | None:
    """Returns the boxes of a DTensor on all ranks of a group, given its members in torch's default group."""
    numbers = {member: rank for rank, member in enumerate(members)}
    coordinates = list(product(*map(range, order.shape)))
    if {order.rank_at(coordinate) for coordinate in coordinates} != numbers.keys():
        return None
    ranks_by_boxes: dict[tuple[Box, ...], list[int]] = {}
    for coordinate in coordinates:
        readings = shard_intervals(shape, order.shape, order.index_at(coordinate), placements)
        if len(readings) > 1:
            return None
        boxes = tuple(box for box, _ in shard_boxes(readings[0]))
        ranks_by_boxes.setdefault(boxes, []).append(numbers[order.rank_at(coordinate)])
    return tuple((boxes, tuple(sorted(ranks))) for boxes, ranks in ranks_by_boxes.items())


def _disorder(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> str:
    """Returns why `full_tensor` contradicts placements on a mesh; empty if it does not."""
    order = _order_of(mesh)
    if order.ascends:
        return ""
    cuts = {dim: one.dim for dim, one in enumerate(placements) if getattr(one, "dim", None) is not None}
    if order.mixed.intersection(permutations(cuts, 2)):
        why = (
            "which ascend along some lines and not along others: full_tensor() is not the same on all of them"
        )
    elif len(set(cuts.values())) < len(cuts) and not _has_same_shapes(
        order, tuple(shape), mesh.shape, placements
    ):
        # full_tensor expects shards of the sizes that follow from coordinates.
        why = "which do not ascend, and cut a dimension more than once, unevenly: full_tensor() fails there"
    else:
        return ""
    return f"of ranks {order.ranks}, {why}. Make the mesh with sorted ranks"


def _has_same_shapes(
    order: _Order, shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]
) -> bool:
    """Whether the shard of each rank has the same shape by its numbers in groups as by its coordinate."""
    for coordinate in product(*map(range, mesh_shape)):
        index = order.index_at(coordinate)
        if index != coordinate:
            one, other = (shard_intervals(shape, mesh_shape, at, placements)[0] for at in (index, coordinate))
            if local_shape(one) != local_shape(other):
                return False
    return True


def _other_groups(mesh: Any) -> str:
    """Returns why the process groups of a mesh do not fit its ranks; empty if they do."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ""
    try:
        place = tuple(mesh.get_local_rank(dim) for dim in range(mesh.ndim))
    except RuntimeError:  # it has no groups
        place = tuple(coordinate)
    order = _order_of(mesh)
    if place == (expected := order.index_at(coordinate)):
        return ""
    return (
        f"of ranks {order.ranks}, whose process groups have them in another order: this one has the numbers "
        f"{list(place)} in them, not {list(expected)}"
    )


def _is_placed(placement: Any) -> bool:
    if placement.is_partial():
        return False
    return placement.is_replicate() or getattr(placement, "dim", None) is not None


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, …" if len(ranks) > 8 else shown
