"""What the planners of torch.distributed.checkpoint want and have, in fastload's terms."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import prod
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
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils._pytree import tree_leaves

import fastload
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.geometry.dtensors import DTensorRanks, empty_like, is_dtensor, local_parts, with_local
from fastload.loading.outline import GAP, Outline

__all__ = ["Part", "Wanted", "bytes_of", "has_gap", "kept_of", "part_of", "unwrapped"]

_BYTES_IO = "io.BytesIO"
_Cut = tuple[Any, ...]
_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan")
_RESOLVING = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


class Wanted:
    """What a rank wants: boxes of stored tensors, and the memory for them.

    Args:
        manifest: The checkpoint.
        stored: Name of the stored tensor by that of dcp.
        planner: Whose plan it is.

    Attributes:
        boxes: By name of the stored tensor.
    """

    def __init__(self, manifest: fastload.Manifest, stored: Mapping[str, str], planner: LoadPlanner) -> None:
        self._manifest = manifest
        self._stored = stored
        self._planner = planner
        self._state: Mapping[str, Any] = planner.state_dict if isinstance(planner, DefaultLoadPlanner) else {}
        self._group = DTensorRanks(None, place="the state")
        self._planned: dict[str, set[_Cut]] = {}  # of what dcp does not know right, its default plan
        self._resolved: list[tuple[ReadItem, Tensor]] = []
        self._cast: list[tuple[Tensor, Tensor]] = []
        self._made: dict[tuple[int, int], Tensor] = {}
        self.boxes: dict[str, list[tuple[fastload.Box, Tensor]]] = {}

    def add(self, item: ReadItem) -> None:
        """Wants what an item of the plan says.

        Raises:
            OptionError: A DTensor is not what its placements say, or not what the planner takes it for.
        """
        name, stored = item.dest_index.fqn, self._stored[item.storage_index.fqn]
        whole = self._state.get(name)
        if isinstance(whole, Tensor) and is_dtensor(whole):
            self._require_fit(name, whole)
            if not self._is_known(item, whole):
                self._add_unknown(item, whole, stored)
                return
        self._planned.setdefault(name, set())
        tensor = self._planner.resolve_tensor(item)
        self._resolved.append((item, tensor))
        box = fastload.Box(tuple(item.storage_offsets), tuple(item.lengths))
        self._want(stored, box, tensor.detach())

    def add_unplanned(self) -> None:
        """Wants DTensors of which dcp knows no part on this rank, although there is one.

        Raises:
            OptionError: The planner may have left them out.
        """
        for name in sorted((self._state.keys() & self._stored.keys()) - self._planned.keys()):
            whole = self._state[name]
            if (
                isinstance(whole, Tensor)
                and is_dtensor(whole)
                and local_parts(whole)
                and not _known_cuts(whole)
            ):
                if _overrides(self._planner, DefaultLoadPlanner, *_PLANNING):
                    raise self._unknown(name, whole)
                self._want_all(whole, self._stored[name])

    def _is_known(self, item: ReadItem, whole: Any) -> bool:
        """Whether dcp knows which part of a DTensor this rank holds.

        It does not if that is in several pieces, was cut unevenly by FSDP2 after somebody else, or is on a
        mesh whose ranks do not ascend.
        """
        held = [(box.offsets, box.sizes) for box, _ in local_parts(whole)]
        if held == [(item.storage_offsets, item.lengths)] and not any(item.dest_offsets):
            return True  # as most are, and dcp takes long to say it
        return held == _known_cuts(whole)

    def _add_unknown(self, item: ReadItem, whole: Any, stored: str) -> None:
        """Wants all that this rank holds of a DTensor, whatever the item says.

        Raises:
            OptionError: The planner changes something, which would be lost.
        """
        name = item.dest_index.fqn
        if name not in self._planned:
            planned = create_read_items_for_chunk_list(name, _one_piece(whole), whole.__create_chunk_list__())
            self._planned[name] = set(map(_read_cut, planned))
            self._want_all(whole, stored)
        changes = _overrides(self._planner, DefaultLoadPlanner, *_RESOLVING)
        if changes or _read_cut(item) not in self._planned[name]:
            raise self._unknown(name, whole)

    def _want_all(self, whole: Tensor, stored: str) -> None:
        for box, part in local_parts(whole):
            self._want(stored, box, part)

    def _unknown(self, name: str, whole: Any) -> OptionError:
        kind, ranks = type(self._planner).__name__, whole.device_mesh.mesh.tolist()
        return OptionError(
            f"{name}: planner={kind} changes what is loaded, and of placements {tuple(whole.placements)} on "
            f"ranks {ranks} dcp knows other rows than this rank holds: load it without that planner"
        )

    def _require_fit(self, name: str, whole: Any) -> None:
        if problems := list(self._group.misfits(name, whole)):
            raise OptionError("; ".join(problems))

    def add_value(self, item: ReadItem, value: Any, outline: Outline) -> Any:
        """Wants the tensors in what dcp takes for a plain value, such as a tuple; returns it with memory.

        Where the state has a DTensor now, there is one of the same placements then.

        Raises:
            OptionError: It has another shape.
        """
        return self._filled(value, self._state.get(item.dest_index.fqn), item.dest_index.fqn, outline)

    def _filled(self, value: Any, target: Any, name: str, outline: Outline) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            like = target if isinstance(target, Tensor) and is_dtensor(target) else None
            known = id(value), id(like)
            if known not in self._made:
                self._made[known] = self._make(value, like, name, outline.stored_of(value))
            return self._made[known]
        if isinstance(value, dict):
            by_key = target if isinstance(target, dict) else {}
            for key, member in value.items():
                value[key] = self._filled(member, by_key.get(key), name, outline)
        elif type(value) is list or type(value) is tuple:
            targets = target[: len(value)] if isinstance(target, list | tuple) else ()
            pairs = zip_longest(value, targets)
            return type(value)(self._filled(member, one, name, outline) for member, one in pairs)
        return value

    def _make(self, meta: Tensor, like: Any, name: str, stored: str) -> Tensor:
        if like is None:
            memory = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
            self._want(stored, fastload.Box.whole(meta.shape), memory)
        else:
            self._require_fit(name, like)
            if like.shape != meta.shape:
                sizes = f"{list(like.shape)} in it, where the checkpoint has {list(meta.shape)}"
                raise OptionError(f"{name}: a DTensor of {sizes}")
            memory = empty_like(like, like.device, meta.dtype)
            for box, part in local_parts(memory):
                self._want(stored, box, part)
        made = nn.Parameter(memory, False) if isinstance(meta, nn.Parameter) else memory.detach()
        return made.requires_grad_(meta.requires_grad)

    def commit(self) -> None:
        """Does what is left once the data are there."""
        for target, source in self._cast:
            target.copy_(source)
        for item, tensor in self._resolved:
            self._planner.commit_tensor(item, tensor)

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


class Part:
    """What a rank saves.

    Args:
        planner: Whose plans they are.
        items: What the planner planned for this rank.
        flat: By flattened name, with what the planner makes of it.
        written: The names that are left in the plan of all; None where a planner of this kind leaves all.
    """

    def __init__(
        self,
        planner: DefaultSavePlanner,
        items: Sequence[WriteItem],
        flat: dict[str, Any],
        written: list[str] | None,
    ) -> None:
        self._planner = planner
        self._flat = flat
        self.names = [item.index.fqn for item in items]
        self.written = written

    def state(self, written: Sequence[Sequence[str] | None]) -> Any:
        """Returns the state to save, nested as it was.

        Args:
            written: What `written` is on each rank.
        """
        flat, mappings = self._flat, self._planner.mappings
        lists = [names for names in written if names is not None]
        if len(lists) == len(written):
            kept = {name for names in lists for name in names}
            flat = {name: value for name, value in flat.items() if name in kept}
        if not mappings:
            return flat
        nested = unflatten_state_dict(flat, {name: mappings.get(name, (name,)) for name in flat})
        is_less = len(flat) < len(self._planner.state_dict)
        if is_less and flatten_state_dict(nested)[0].keys() != flat.keys():
            return flat  # what is left out of a list would be None
        return nested


def part_of(planner: SavePlanner, local: SavePlan, final: SavePlan) -> Part:
    """Finds out what a planner is to save of this rank.

    Args:
        planner: The planner.
        local: Its plan of this rank.
        final: What has become of that.

    Raises:
        OptionError: It does not say what the state is, or plans something that cannot be kept.
    """
    kind = type(planner).__name__
    if not isinstance(planner, DefaultSavePlanner):
        raise OptionError(f"planner={kind}: Writer needs a DefaultSavePlanner, or one derived from it")
    items = _local_items(planner, local)
    flat = {name: _wrapped(value) for name, value in planner.state_dict.items()}
    if _overrides(planner, DefaultSavePlanner, "create_local_plan"):
        planned = {item.index.fqn for item in items}
        flat = {name: value for name, value in flat.items() if name in planned}
        _require_uncut(planner, items)
    makes = _overrides(planner, DefaultSavePlanner, "resolve_data", "lookup_object", "transform_object")
    for item in items:
        if makes or item.index.fqn not in flat:
            flat[item.index.fqn] = _resolved(planner, item, planner.state_dict.get(item.index.fqn))
    if not _overrides(planner, DefaultSavePlanner, *_CENTRAL):
        return Part(planner, items, flat, None)
    known = {(item.index.fqn, *_write_cut(item)) for item in items}
    for item in final.items:
        if (item.index.fqn, *_write_cut(item)) not in known:
            raise OptionError(
                f"{item.index.fqn}: planner={kind} has in the plan of all what it did not plan for this "
                "rank: plan it in create_local_plan"
            )
    return Part(planner, items, flat, sorted({item.index.fqn for item in final.items}))


_CENTRAL = tuple(
    name
    for name in ("create_global_plan", "_create_global_plan", "_dedup_save_plans", "finish_plan")
    if hasattr(DefaultSavePlanner, name)
)


def _local_items(planner: DefaultSavePlanner, local: SavePlan) -> Sequence[WriteItem]:
    """Returns what is planned for this rank; with ``enable_plan_caching``, perhaps in an earlier save."""
    if getattr(local, "usable", True):
        return local.items
    return planner._cached_save_plan[planner._cached_plans_key].items


def _require_uncut(planner: DefaultSavePlanner, items: Sequence[WriteItem]) -> None:
    """Raises if a plan has other parts of something than this rank holds."""
    cuts: dict[str, set[_Cut]] = defaultdict(set)
    for item in items:
        cuts[item.index.fqn].add(_write_cut(item))
    for name, planned in cuts.items():
        if name in planner.state_dict:
            default = create_default_local_save_plan({name: planner.state_dict[name]}, False).items
            is_whole = planned == set(map(_write_cut, default))
        else:
            is_whole = all(
                kind != WriteItemType.SHARD and sizes == whole for kind, _, sizes, whole in planned
            )
        if not is_whole:
            raise OptionError(
                f"{name}: planner={type(planner).__name__} cuts it otherwise than the state does, and Writer "
                "saves what each rank holds: make it a DTensor, or save it whole"
            )


def _write_cut(item: WriteItem) -> _Cut:
    """Returns what an item has of something: its type, offsets and sizes, and the size of the whole."""
    data = item.tensor_data
    if data is None or data.chunk is None:
        return item.type, (), (), ()
    return item.type, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)


def _known_cuts(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns what dcp takes for this rank's part of a DTensor: offsets and sizes, none of them empty."""
    chunks = [(tuple(each.offsets), tuple(each.sizes)) for each in tensor.__create_chunk_list__()]
    return [(offsets, sizes) for offsets, sizes in chunks if prod(sizes)]


def _read_cut(item: ReadItem) -> _Cut:
    """Returns which part an item has of what is stored, and of its target."""
    return tuple(item.storage_offsets), tuple(item.lengths), tuple(item.dest_offsets)


def _resolved(planner: SavePlanner, item: WriteItem, whole: Any) -> Any:
    name, data = item.index.fqn, planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO), "as the planner's interface has it"
        if data.getvalue() == bytes_of(whole).getvalue():
            return _wrapped(whole)
        try:
            return _wrapped(torch.load(io.BytesIO(data.getvalue()), weights_only=True))
        except pickle.UnpicklingError as error:
            kind = type(planner).__name__
            raise OptionError(f"{name}: planner={kind} makes of it what cannot be kept: {error}") from None
    assert isinstance(data, Tensor), "as the planner's interface has it"
    if isinstance(whole, Tensor) and is_dtensor(whole):
        return with_local(whole, data, whole.shape)
    if item.type == WriteItemType.SHARD:
        kind = type(whole).__name__
        raise OptionError(f"{name} is a {kind}: of sharded tensors DTensor only is known")
    return data


def _wrapped(value: Any) -> Any:
    """Returns what is saved of a value: of a `BytesIO`, such as trainings keep, its bytes."""
    return (_BYTES_IO, value.getvalue()) if isinstance(value, io.BytesIO) else value


def unwrapped(value: Any) -> Any:
    """Returns what was saved: the `BytesIO`, too."""
    is_pair = type(value) is tuple and [type(part) for part in value] == [str, bytes]
    return io.BytesIO(value[1]) if is_pair and value[0] == _BYTES_IO else value


def _overrides(planner: object, base: type, *names: str) -> bool:
    own = vars(planner)
    return any(name in own or getattr(type(planner), name) is not getattr(base, name) for name in names)


def kept_of(tensor: Tensor | None) -> TensorStorageMetadata | BytesStorageMetadata:
    """Returns what dcp has to know of a value: of a tensor that it is in one piece."""
    return BytesStorageMetadata() if tensor is None else _one_piece(tensor)


def _one_piece(tensor: Tensor) -> TensorStorageMetadata:
    nothing = torch.Size([0] * tensor.dim())
    chunk = ChunkStorageMetadata(offsets=nothing, sizes=tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])


def bytes_of(value: Any) -> io.BytesIO:
    """Returns a plain value as dcp's planners unpack it."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
