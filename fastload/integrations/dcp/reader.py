"""The storage that `dcp.load` reads from."""

from __future__ import annotations

import io
import json
import logging
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
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    StorageReader,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future
from torch.utils._pytree import tree_leaves

import fastload
from fastload.base.tracebacks import short_tracebacks
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.values import BYTES_IO
from fastload.geometry.dtensors import DTensorRanks, empty_like, is_dtensor, local_parts
from fastload.integrations.dcp.common import Cut, DcpStorage, Path, done, overrides, pickled
from fastload.loading.selection import GAP, Outline
from fastload.options import LoadOptions, chosen_options

_log = logging.getLogger(__name__)

_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan")
_RESOLVING = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


@short_tracebacks
class Reader(DcpStorage, StorageReader):
    """A storage for `dcp.load`: reads whatever `fastload.load` loads, directories that dcp wrote included.

    dcp's planner decides what each rank loads; bytes that several ranks need are read once. Names are
    dcp's: paths joined by dots. Tensors stored in another dtype are cast, as dcp does. Values that cannot be
    loaded, such as arrays that dcp has pickled, are left out, with a warning that names them.

    Args:
        path: A local path or a URL; None if dcp is given a ``checkpoint_id=``.
        process_group: The one that dcp is given.
        no_dist: Whether dcp is given ``no_dist=True``.
        storage_options: As for `fastload.load`.
        options: How to load; None for the defaults.
    """

    _call = "dcp.load"

    def __init__(
        self,
        path: Path | None = None,
        *,
        process_group: Any = None,
        no_dist: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        super().__init__(path, process_group, no_dist=no_dist, storage_options=storage_options)
        self._options = chosen_options(options, LoadOptions)
        self._checkpoint: fastload.Checkpoint | None = None
        self._values: dict[str, Any] = {}
        self._outline: Outline | None = None
        self._stored: dict[str, str] = {}

    @property
    def report(self) -> fastload.LoadReport | None:
        """What the last load did; None before it."""
        return self._checkpoint.report if self._checkpoint is not None else None

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Takes another path, if dcp has one."""
        super().reset(checkpoint_id)
        self._close()

    def read_metadata(self) -> Metadata:
        """Opens the checkpoint on all ranks, and describes its contents to dcp.

        Raises:
            FastloadError: As for `fastload.open`.
        """
        self._close()
        self._checkpoint = fastload.open(
            self._required_path(),
            process_group=self._group(),
            storage_options=self._storage_options,
            options=self._options,
        )
        self._outline = outline = self._checkpoint.outline()
        state = outline.state if isinstance(outline.state, dict) else {"state": outline.state}
        everything, paths = flatten_state_dict(state)
        flat = {name: value for name, value in everything.items() if not _has_gap(value)}
        if gaps := everything.keys() - flat.keys():
            why = "; ".join(dict.fromkeys(outline.left_out))
            _log.warning("%s: left out: %s (%s)", self._path, ", ".join(sorted(gaps)), why)
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor) and value.is_meta}
        self._values = {name: _restored(value) for name, value in flat.items() if name not in tensors}
        self._stored = {name: outline.stored_of(tensor) for name, tensor in tensors.items()}
        return Metadata(
            {name: _one_chunk(tensors[name]) if name in tensors else BytesStorageMetadata() for name in flat},
            planner_data=paths,
            storage_meta=StorageMeta(checkpoint_id=self._path),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Packs the plan that dcp sends to the coordinator and back."""
        return packed(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged.

        Raises:
            WorldError: dcp plans for another number of ranks than this storage was given.
        """
        self._require_size(len(plans))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plans of all ranks request; on all ranks.

        Raises:
            FastloadError: As for `fastload.load`.
        """
        assert self._checkpoint is not None, "read_metadata comes before"
        assert self._outline is not None, "likewise"
        values: list[tuple[ReadItem, Any]] = []
        with self._checkpoint as checkpoint:
            targets = _LoadTargets(checkpoint.manifest, self._stored, planner)
            for item in plan.items:
                if item.type == LoadItemType.TENSOR:
                    targets.add(item)
                else:
                    value = self._values[item.storage_index.fqn]
                    values.append((item, targets.add_value(item, value, self._outline)))
            targets.add_unplanned()
            checkpoint.read(targets.boxes, cast=True)
            targets.commit()
        for item, value in values:
            planner.load_bytes(item, pickled(value))
        return done(None)

    def _close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()


class _LoadTargets:
    """The boxes of stored tensors that a rank loads, and the memory they go to.

    Args:
        manifest: The checkpoint.
        stored: dcp's name of a tensor → its name in the checkpoint.
        planner: The planner that made the plan.

    Attributes:
        boxes: Name in the checkpoint → boxes and memory.
    """

    def __init__(self, manifest: fastload.Manifest, stored: Mapping[str, str], planner: LoadPlanner) -> None:
        self._manifest = manifest
        self._stored = stored
        self._planner = planner
        self._state: Mapping[str, Any] = planner.state_dict if isinstance(planner, DefaultLoadPlanner) else {}
        self._group = DTensorRanks(None, place="the state")
        self._planned: dict[str, set[Cut]] = {}  # dcp's default plan of the DTensors that it plans wrongly
        self._resolved: list[tuple[ReadItem, Tensor]] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []  # of complex tensors that are stored as pairs
        self._allocated: dict[tuple[int, int], Tensor] = {}
        self.boxes: dict[str, list[tuple[fastload.Box, Tensor]]] = {}

    def add(self, item: ReadItem) -> None:
        """Adds an item of the plan.

        Raises:
            OptionError: A DTensor disagrees with its placements, or with the planner.
        """
        name, stored = item.dest_index.fqn, self._stored[item.storage_index.fqn]
        target = self._state.get(name)
        if isinstance(target, Tensor) and is_dtensor(target):
            self._require_fit(name, target)
            if not self._is_planned_right(item, target):
                self._add_shards(item, target, stored)
                return
        self._planned.setdefault(name, set())
        tensor = self._planner.resolve_tensor(item)
        self._resolved.append((item, tensor))
        box = fastload.Box(tuple(item.storage_offsets), tuple(item.lengths))
        self._add(stored, box, tensor.detach())

    def add_unplanned(self) -> None:
        """Adds DTensors for which dcp plans nothing on this rank, although the rank holds a shard.

        Raises:
            OptionError: The planner may have left them out on purpose.
        """
        for name in sorted((self._state.keys() & self._stored.keys()) - self._planned.keys()):
            target = self._state[name]
            is_sharded = isinstance(target, Tensor) and is_dtensor(target)
            if is_sharded and local_parts(target) and not _known_cuts(target):
                if overrides(self._planner, DefaultLoadPlanner, *_PLANNING):
                    raise self._misplanned(name, target)
                self._add_all(target, self._stored[name])

    def _is_planned_right(self, item: ReadItem, target: Any) -> bool:
        """Whether dcp knows which part of a DTensor this rank holds.

        It does not for a shard in several pieces, one that FSDP2 cuts unevenly on top of another sharding, or
        a mesh whose ranks do not ascend.
        """
        held = [(box.offsets, box.sizes) for box, _ in local_parts(target)]
        if held == [(item.storage_offsets, item.lengths)] and not any(item.dest_offsets):
            return True  # the common case; dcp's own answer takes long
        return held == _known_cuts(target)

    def _add_shards(self, item: ReadItem, target: Any, stored: str) -> None:
        """Adds all that this rank holds of a DTensor, in place of a wrong item.

        Raises:
            OptionError: The planner changes something, which would be lost.
        """
        name = item.dest_index.fqn
        if name not in self._planned:
            planned = create_read_items_for_chunk_list(
                name, _one_chunk(target), target.__create_chunk_list__()
            )
            self._planned[name] = set(map(_read_cut, planned))
            self._add_all(target, stored)
        changes = overrides(self._planner, DefaultLoadPlanner, *_RESOLVING)
        if changes or _read_cut(item) not in self._planned[name]:
            raise self._misplanned(name, target)

    def _add_all(self, target: Tensor, stored: str) -> None:
        for box, shard in local_parts(target):
            self._add(stored, box, shard)

    def _misplanned(self, name: str, target: Any) -> OptionError:
        kind, ranks = type(self._planner).__name__, target.device_mesh.mesh.tolist()
        return OptionError(
            f"{name}: planner={kind} changes what is loaded, and of placements {tuple(target.placements)} on "
            f"ranks {ranks} dcp knows other rows than this rank holds: load it without that planner"
        )

    def _require_fit(self, name: str, target: Any) -> None:
        if problems := list(self._group.misfits(name, target)):
            raise OptionError("; ".join(problems))

    def add_value(self, item: ReadItem, value: Any, outline: Outline) -> Any:
        """Adds the tensors within a value that is plain to dcp, such as a tuple.

        Returns:
            The value with memory for its tensors: DTensors of the same placements where the state has
            DTensors.

        Raises:
            OptionError: Such a DTensor has another shape.
        """
        return self._allocate_in(value, self._state.get(item.dest_index.fqn), item.dest_index.fqn, outline)

    def _allocate_in(self, value: Any, target: Any, name: str, outline: Outline) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            like = target if isinstance(target, Tensor) and is_dtensor(target) else None
            key = id(value), id(like)
            if key not in self._allocated:
                self._allocated[key] = self._allocate(value, like, name, outline.stored_of(value))
            return self._allocated[key]
        if isinstance(value, dict):
            by_key = target if isinstance(target, dict) else {}
            for key, member in value.items():
                value[key] = self._allocate_in(member, by_key.get(key), name, outline)
        elif type(value) is list or type(value) is tuple:
            targets = target[: len(value)] if isinstance(target, list | tuple) else ()
            pairs = zip_longest(value, targets)
            return type(value)(self._allocate_in(member, one, name, outline) for member, one in pairs)
        return value

    def _allocate(self, meta: Tensor, like: Any, name: str, stored: str) -> Tensor:
        if like is None:
            memory = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
            self._add(stored, fastload.Box.whole(meta.shape), memory)
        else:
            self._require_fit(name, like)
            if like.shape != meta.shape:
                sizes = f"{list(like.shape)} in it, where the checkpoint has {list(meta.shape)}"
                raise OptionError(f"{name}: a DTensor of {sizes}")
            memory = empty_like(like, like.device, meta.dtype)
            self._add_all(memory, stored)
        tensor = nn.Parameter(memory, False) if isinstance(meta, nn.Parameter) else memory.detach()
        return tensor.requires_grad_(meta.requires_grad)

    def commit(self) -> None:
        """Copies complex numbers out of pairs, and tells the planner."""
        for target, source in self._pairs:
            target.copy_(source)
        for item, tensor in self._resolved:
            self._planner.commit_tensor(item, tensor)

    def _add(self, stored: str, box: fastload.Box, tensor: Tensor) -> None:
        entry = self._manifest.by_name[stored]
        dtype, shape = torch_spec(entry)
        if len(shape) == len(box.sizes) + 1:  # complex128, stored as pairs
            box = fastload.Box((*box.offsets, 0), (*box.sizes, 2))
            if tensor.is_complex() and not (tensor.is_conj() or tensor.is_neg()):
                tensor = torch.view_as_real(tensor)
            else:
                pairs = torch.empty(box.sizes, dtype=dtype, device=tensor.device)
                self._pairs.append((tensor, torch.view_as_complex(pairs)))
                tensor = pairs
        self.boxes.setdefault(stored, []).append((box, tensor))


def _has_gap(value: Any) -> bool:
    return any(leaf is GAP for leaf in tree_leaves(value))


def _restored(value: Any) -> Any:
    """Returns a plain value as it was saved: `BytesIO` objects are stored as marked bytes."""
    is_pair = type(value) is tuple and [type(part) for part in value] == [str, bytes]
    return io.BytesIO(value[1]) if is_pair and value[0] == BYTES_IO else value


def _one_chunk(tensor: Tensor) -> TensorStorageMetadata:
    """Returns dcp's metadata of a tensor that is stored in one chunk."""
    offsets = torch.Size([0] * tensor.dim())
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])


def _known_cuts(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the part of a DTensor that this rank holds according to dcp: offsets and sizes, none empty."""
    chunks = [(tuple(each.offsets), tuple(each.sizes)) for each in tensor.__create_chunk_list__()]
    return [(offsets, sizes) for offsets, sizes in chunks if prod(sizes)]


def _read_cut(item: ReadItem) -> Cut:
    return tuple(item.storage_offsets), tuple(item.lengths), tuple(item.dest_offsets)


class PackedPlan(LoadPlan):
    """A plan whose items stay packed until they are used.

    dcp sends the plan of each rank to the coordinator and back. To pickle it item by item is the longest
    step of a small load, and few planners look at the plans of other ranks.

    Args:
        items: As of a `LoadPlan`.
        storage_data: Likewise.
        planner_data: Likewise.

    Attributes:
        packed_items: The packed items; None once they were used, and perhaps changed.
    """

    packed_items: bytes | None

    def __init__(self, items: list[ReadItem], storage_data: Any = None, planner_data: Any = None) -> None:
        super().__init__(items, storage_data, planner_data)

    @property
    def items(self) -> list[ReadItem]:
        """What to read."""
        if self.packed_items is not None:
            self.items = _unpack(self.packed_items)
        return self._items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        self._items, self.packed_items = items, None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles packed items as they are."""
        rest = (self.storage_data, self.planner_data)
        if self.packed_items is None:
            return PackedPlan, (self._items, *rest)
        return _packed_plan, (self.packed_items, *rest)


def packed(plan: LoadPlan) -> LoadPlan:
    """Returns a plan with packed items; the plan itself if it has items of classes other than dcp's own."""
    is_plain = all(
        type(item) is ReadItem
        and all(type(index) is MetadataIndex and type(index.fqn) is str for index in _indices(item))
        for item in plan.items
    )
    return _packed_plan(_pack(plan.items), plan.storage_data, plan.planner_data) if is_plain else plan


def _packed_plan(packed_items: bytes, storage_data: Any, planner_data: Any) -> PackedPlan:
    plan = PackedPlan([], storage_data, planner_data)
    plan.packed_items = packed_items
    return plan


def _indices(item: ReadItem) -> tuple[MetadataIndex, MetadataIndex]:
    return item.dest_index, item.storage_index


def _pack(items: Sequence[ReadItem]) -> bytes:
    rows = [
        (
            item.type.value,
            [(index.fqn, index.offset, index.index) for index in _indices(item)],
            (item.dest_offsets, item.storage_offsets, item.lengths),
        )
        for item in items
    ]
    return json.dumps(rows).encode()


def _unpack(packed_items: bytes) -> list[ReadItem]:
    items = []
    for kind, indices, sizes in json.loads(packed_items):
        dest, storage = (MetadataIndex(*index) for index in indices)
        dest_offsets, storage_offsets, lengths = map(torch.Size, sizes)
        items.append(ReadItem(LoadItemType(kind), dest, dest_offsets, storage, storage_offsets, lengths))
    return items
