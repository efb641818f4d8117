"""What the planners of torch.distributed.checkpoint want and have, in fastload's terms."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlanner,
    ReadItem,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.utils._pytree import tree_leaves, tree_map_only

import fastload
from fastload.errors import OptionError
from fastload.formats.dtensors import is_dtensor, local_parts, with_local
from fastload.formats.dtypes import torch_spec
from fastload.loading.outline import GAP, Outline

__all__ = ["Wanted", "bytes_of", "has_gap", "kept_of", "state_of", "unwrapped"]

_BYTES_IO = "io.BytesIO"


class Wanted:
    """What a rank wants: boxes of stored tensors, and the memory for them.

    Args:
        manifest: The checkpoint.
        stored: Name of the stored tensor by that of dcp.

    Attributes:
        boxes: By name of the stored tensor.
    """

    def __init__(self, manifest: fastload.Manifest, stored: Mapping[str, str]) -> None:
        self._manifest = manifest
        self._stored = stored
        self._sharded: set[str] = set()
        self._resolved: list[tuple[ReadItem, Tensor]] = []
        self._cast: list[tuple[Tensor, Tensor]] = []
        self._made: dict[int, Tensor] = {}
        self.boxes: dict[str, list[tuple[fastload.Box, Tensor]]] = {}

    def add(self, item: ReadItem, planner: LoadPlanner) -> None:
        """Wants what an item of the plan says.

        Raises:
            OptionError: The planner cannot say what that is.
        """
        name = item.dest_index.fqn
        whole = _whole(planner, name)
        if is_dtensor(whole):
            # Not what the plan says: of shards in several pieces dcp knows the first only.
            if name not in self._sharded:
                self._sharded.add(name)
                for box, part in local_parts(whole):
                    self._want(self._stored[item.storage_index.fqn], box, part)
            return
        tensor = planner.resolve_tensor(item)
        self._resolved.append((item, tensor))
        box = fastload.Box(tuple(item.storage_offsets), tuple(item.lengths))
        self._want(self._stored[item.storage_index.fqn], box, tensor.detach())

    def add_value(self, value: Any, outline: Outline) -> Any:
        """Wants the tensors in what dcp takes for a plain value, such as a tuple; returns it with memory."""

        def made(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._made:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self._want(outline.stored_of(tensor), fastload.Box.whole(tensor.shape), memory)
                is_parameter = isinstance(tensor, nn.Parameter)
                like = nn.Parameter(memory, False) if is_parameter else memory.detach()
                self._made[id(tensor)] = like.requires_grad_(tensor.requires_grad)
            return self._made[id(tensor)]

        return tree_map_only(Tensor, made, value)

    def commit(self, planner: LoadPlanner) -> None:
        """Does what is left once the data are there."""
        for target, source in self._cast:
            target.copy_(source)
        for item, tensor in self._resolved:
            planner.commit_tensor(item, tensor)

    def _want(self, stored: str, box: fastload.Box, tensor: Tensor) -> None:
        entry = self._manifest.by_name[stored]
        dtype, shape = torch_spec(entry)
        if len(shape) == len(box.sizes) + 1:  # complex128, as pairs
            pairs = torch.empty((*box.sizes, 2), dtype=dtype, device=tensor.device)
            self._cast.append((tensor, torch.view_as_complex(pairs)))
            box, tensor = fastload.Box((*box.offsets, 0), (*box.sizes, 2)), pairs
        elif tensor.dtype != dtype or tensor.is_conj() or tensor.is_neg():
            stand_in = torch.empty(box.sizes, dtype=dtype, device=tensor.device)
            self._cast.append((tensor, stand_in))
            tensor = stand_in
        self.boxes.setdefault(stored, []).append((box, tensor))


def has_gap(value: Any) -> bool:
    """Whether something in a value cannot be loaded."""
    return any(leaf is GAP for leaf in tree_leaves(value))


def state_of(planner: SavePlanner, items: Sequence[WriteItem]) -> Any:
    """Returns the state that a planner is to save: nested as it was, with what the planner makes of it.

    Raises:
        OptionError: It does not say what the state is.
    """
    if not isinstance(planner, DefaultSavePlanner):
        kind = type(planner).__name__
        raise OptionError(f"planner={kind}: Writer needs a DefaultSavePlanner, or one derived from it")
    flat = {name: _wrapped(value) for name, value in planner.state_dict.items()}
    if _overrides(planner, DefaultSavePlanner, "resolve_data", "lookup_object", "transform_object"):
        for item in items:
            flat[item.index.fqn] = _resolved(planner, item, flat.get(item.index.fqn))
    return unflatten_state_dict(flat, planner.mappings) if planner.mappings else flat


def _resolved(planner: SavePlanner, item: WriteItem, whole: Any) -> Any:
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO), "as the planner's interface has it"
        data.seek(0)
        return _wrapped(torch.load(data, weights_only=True))
    assert isinstance(data, Tensor), "as the planner's interface has it"
    if isinstance(whole, Tensor) and is_dtensor(whole):
        return with_local(whole, data, whole.shape)
    if item.type == WriteItemType.SHARD:
        kind = type(whole).__name__
        raise OptionError(f"{item.index.fqn} is a {kind}: of sharded tensors DTensor only is known")
    return data


def _wrapped(value: Any) -> Any:
    """Returns what is saved of a value: of a `BytesIO`, such as trainings keep, its bytes."""
    return (_BYTES_IO, value.getvalue()) if isinstance(value, io.BytesIO) else value


def unwrapped(value: Any) -> Any:
    """Returns what was saved: the `BytesIO`, too."""
    is_wrapped = isinstance(value, tuple) and len(value) == 2 and value[0] == _BYTES_IO
    return io.BytesIO(value[1]) if is_wrapped else value


def _whole(planner: LoadPlanner, name: str) -> Any:
    """Returns the tensor that items of a plan are parts of; None if a planner has its own way to it."""
    if not isinstance(planner, DefaultLoadPlanner):
        return None
    whole = planner.state_dict.get(name)
    if not _overrides(planner, DefaultLoadPlanner, "resolve_tensor", "lookup_tensor", "transform_tensor"):
        return whole if isinstance(whole, Tensor) else None
    if isinstance(whole, Tensor) and is_dtensor(whole) and _is_strided(whole):
        raise OptionError(
            f"{name}: planner={type(planner).__name__} changes how tensors are found, and of placements "
            f"{tuple(whole.placements)} dcp knows the first piece of each shard only"  # type: ignore[attr-defined]
        )
    return None


def _overrides(planner: object, base: type, *names: str) -> bool:
    return any(getattr(type(planner), name) is not getattr(base, name) for name in names)


def _is_strided(tensor: Any) -> bool:
    return any(getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements)


def kept_of(tensor: Tensor | None) -> TensorStorageMetadata | BytesStorageMetadata:
    """Returns what dcp has to know of a value: of a tensor that it is in one piece."""
    if tensor is None:
        return BytesStorageMetadata()
    nothing = torch.Size([0] * tensor.dim())
    chunk = ChunkStorageMetadata(offsets=nothing, sizes=tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])


def bytes_of(value: Any) -> io.BytesIO:
    """Returns a plain value as dcp's planners unpack it."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
