"""The storage that `dcp.save` writes to."""

from __future__ import annotations

import io
import json
import logging
import pickle
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import fastload
from fastload.base.tracebacks import short_tracebacks
from fastload.errors import OptionError
from fastload.formats.names import DCP_NAMES
from fastload.formats.values import BYTES_IO
from fastload.geometry.dtensors import is_dtensor, local_of, with_local
from fastload.integrations.dcp.common import Cut, DcpStorage, Path, done, overrides, pickled
from fastload.integrations.frameworks import step_of_all
from fastload.options import SaveOptions, chosen_options
from fastload.saving import save as saving
from fastload.saving.call import make_call
from fastload.storage.process import warn_once

_log = logging.getLogger(__name__)
_PLAIN = (Tensor, nn.Parameter)


@short_tracebacks
class Writer(DcpStorage, StorageWriter):
    """A storage for `dcp.save` and `dcp.async_save`: makes the checkpoint that `fastload.save` would make.

    The ranks that hold the same bytes share the writing. The files are plain safetensors, with checksums and
    a commit record. The checkpoint appears as a whole once all ranks have written. As with dcp, it replaces
    an older one of fastload or dcp at the same path.

    Args:
        path: The directory to make, a local path or a URL; None if dcp is given a ``checkpoint_id=``.
        process_group: The one that dcp is given.
        no_dist: Whether dcp is given ``no_dist=True``.
        metadata: As for `fastload.save`.
        storage_options: As for `fastload.save`.
        options: How to save; None for the defaults. An existing checkpoint is replaced, unless they have
            ``overwrite=False``.

    Attributes:
        report: What the last save did; None before it.
    """

    _call = "dcp.save"

    def __init__(
        self,
        path: Path | None = None,
        *,
        process_group: Any = None,
        no_dist: bool = False,
        metadata: Mapping[str, str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__(path, process_group, no_dist=no_dist, storage_options=storage_options)
        self._metadata = metadata
        self._options = chosen_options(options, SaveOptions)
        self._local_plan = SavePlan([])
        self._has_collectives = True
        self.report: fastload.SaveReport | None = None

    def storage_meta(self) -> StorageMeta:
        """Returns the path of the checkpoint."""
        return StorageMeta(checkpoint_id=self._path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks what can be checked before dcp plans.

        Raises:
            OptionError: There is no path.
        """
        self._required_path()
        self._has_collectives = kwargs.get("use_collectives", True)
        if self._has_collectives and self._meets_training():
            warn_once(
                _log,
                "dcp.async_save runs its collectives in the background, in the default process group over "
                "Gloo. If training communicates in this group meanwhile, the job hangs: give dcp.async_save "
                "and Writer a process_group= of their own, torch.distributed.new_group(backend='gloo')",
            )

    def _meets_training(self) -> bool:
        """Whether collectives of this save could meet those of training."""
        if threading.current_thread() is threading.main_thread() or not dist.is_initialized():
            return False
        is_default = self._process_group in (None, dist.group.WORLD)
        return is_default and dist.get_world_size() > 1 and dist.get_backend() == "gloo"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged; remembers it, since the final one may leave out what others write."""
        self._local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans unchanged.

        Raises:
            WorldError: dcp plans for another number of ranks than this storage was given.
        """
        if self._has_collectives:
            self._require_size(len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Saves, on all ranks.

        Raises:
            OptionError: fastload cannot store something in the state, or cannot follow the planner.
            FastloadError: As for `fastload.save`.
        """
        group, path, options = self._group(), self._required_path(), self._options
        what = f"saving to {path}: the state"
        with step_of_all(what, process_group=group, options=options) as step:
            planned = _planned_state(planner, self._local_plan, plan)
            step.answer([xxhash.xxh3_128_hexdigest(json.dumps(planned.names).encode()), planned.written])
        digests, written = zip(*step.answers, strict=True)
        has_parts = not self._has_collectives or len(set(digests)) > 1
        call = make_call(
            path,
            group,
            self._metadata,
            self._storage_options,
            replace(options, parts=options.parts or has_parts, overwrite=options.overwrite is not False),
            names=DCP_NAMES,
        )
        state = planned.state(written)
        del planned  # it has copies of what other ranks write
        self.report = None  # not that of an earlier save, if this one raises
        self.report = saving.save(call, state)
        return done([_result(item) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the checkpoint exists."""


def _result(item: WriteItem) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=item.tensor_storage_size() or 0, storage_data=None)


@dataclass(frozen=True)
class _PlannedState:
    """The state that a planner saves of this rank.

    Attributes:
        planner: The planner.
        names: The names in its plan for this rank.
        flat: Flattened name → value, as the planner resolves it.
        written: The names in the final plan; None if this class of planner leaves out none.
    """

    planner: DefaultSavePlanner
    names: list[str]
    flat: dict[str, Any]
    written: list[str] | None

    def state(self, written: Sequence[Sequence[str] | None]) -> Any:
        """Returns the state to save, nested as it was.

        Args:
            written: `written` of each rank.
        """
        flat, mappings = self.flat, self.planner.mappings
        lists = [names for names in written if names is not None]
        if len(lists) == len(written):
            final = {name for names in lists for name in names}
            flat = {name: value for name, value in flat.items() if name in final}
        if not mappings:
            return flat
        nested = unflatten_state_dict(flat, {name: mappings.get(name, (name,)) for name in flat})
        has_less = len(flat) < len(self.planner.state_dict)
        if has_less and flatten_state_dict(nested)[0].keys() != flat.keys():
            return flat  # an element left out of a list would become None
        return nested


_CENTRAL_PLANNING = tuple(
    name
    for name in ("create_global_plan", "_create_global_plan", "_dedup_save_plans", "finish_plan")
    if hasattr(DefaultSavePlanner, name)
)


def _planned_state(planner: SavePlanner, local: SavePlan, final: SavePlan) -> _PlannedState:
    """Returns the state that a planner saves of this rank.

    Args:
        planner: The planner.
        local: Its plan for this rank.
        final: The plan that came back from the coordinator.

    Raises:
        OptionError: The planner does not expose the state, or plans something that cannot be stored.
    """
    kind = type(planner).__name__
    if not isinstance(planner, DefaultSavePlanner):
        raise OptionError(f"planner={kind}: Writer needs a DefaultSavePlanner, or one derived from it")
    items = _local_items(planner, local)
    names = [item.index.fqn for item in items]
    flat = {name: _storable(value) for name, value in planner.state_dict.items()}
    if overrides(planner, DefaultSavePlanner, "create_local_plan"):
        planned = set(names)
        flat = {name: value for name, value in flat.items() if name in planned}
    for name, value in flat.items():
        if isinstance(value, Tensor) and hasattr(local_of(value), "__tensor_flatten__"):
            what = type(local_of(value)).__name__
            raise OptionError(
                f"{name} is a {what}, of several tensors, which DCP plans as one: fastload.save"
            )
    resolves = overrides(planner, DefaultSavePlanner, "resolve_data", "lookup_object", "transform_object")
    by_name: dict[str, list[WriteItem]] = defaultdict(list)
    for item in items:
        by_name[item.index.fqn].append(item)
    for name, of_name in by_name.items():
        if _is_cut(planner, name, of_name):
            flat[name] = _shard_of(planner, of_name)
        elif resolves or name not in flat:
            flat[name] = _resolved(planner, of_name[-1], planner.state_dict.get(name))
    for name in [name for name, value in flat.items() if hasattr(value, "local_shards")]:
        del flat[name]  # it has no shard on this rank
    if not overrides(planner, DefaultSavePlanner, *_CENTRAL_PLANNING):
        return _PlannedState(planner, names, flat, None)
    known = {(item.index.fqn, *_write_cut(item)) for item in items}
    for item in final.items:
        if (item.index.fqn, *_write_cut(item)) not in known:
            raise OptionError(
                f"{item.index.fqn}: planner={kind} has in the plan of all what it did not plan for this "
                "rank: plan it in create_local_plan"
            )
    return _PlannedState(planner, names, flat, sorted({item.index.fqn for item in final.items}))


def _local_items(planner: DefaultSavePlanner, local: SavePlan) -> Sequence[WriteItem]:
    """Returns the items planned for this rank; with ``enable_plan_caching``, perhaps by an earlier save."""
    if getattr(local, "usable", True):
        return local.items
    return planner._cached_save_plan[planner._cached_plans_key].items


def _is_cut(planner: DefaultSavePlanner, name: str, items: Sequence[WriteItem]) -> bool:
    """Whether a planner writes boxes of a tensor other than a DTensor has, or of one that is no DTensor."""
    value = planner.state_dict.get(name)
    if isinstance(value, Tensor) and (is_dtensor(value) or type(value) in _PLAIN):
        if not overrides(planner, DefaultSavePlanner, "create_local_plan"):
            return False
        default = create_default_local_save_plan({name: value}, False).items
        return set(map(_write_cut, items)) != set(map(_write_cut, default))
    return any(item.type == WriteItemType.SHARD for item in items)


def _shard_of(planner: DefaultSavePlanner, items: Sequence[WriteItem]) -> fastload.Shard:
    """Returns the boxes of a tensor that a planner writes."""
    shape: tuple[int, ...] = ()
    boxes = []
    for item in items:
        data, tensor = item.tensor_data, planner.resolve_data(item)
        assert data is not None, "the planner's interface requires it"
        assert isinstance(tensor, Tensor), "likewise"
        shape = tuple(data.size)
        boxes.append((fastload.Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), tensor))
    return fastload.Shard.of_boxes(boxes, shape)


def _write_cut(item: WriteItem) -> Cut:
    """Returns the part that an item covers: its type, offsets and sizes, and the full size."""
    data = item.tensor_data
    if data is None or data.chunk is None:
        return item.type, (), (), ()
    return item.type, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)


def _resolved(planner: SavePlanner, item: WriteItem, value: Any) -> Any:
    """Returns what a planner saves in place of a value of the state."""
    name, data = item.index.fqn, planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO), "the planner's interface requires it"
        if data.getvalue() == pickled(value).getvalue():
            return _storable(value)
        try:
            return _storable(torch.load(io.BytesIO(data.getvalue()), weights_only=True))
        except pickle.UnpicklingError as error:
            kind = type(planner).__name__
            raise OptionError(f"{name}: planner={kind} makes of it what cannot be kept: {error}") from None
    assert isinstance(data, Tensor), "the planner's interface requires it"
    if isinstance(value, Tensor) and is_dtensor(value):
        return with_local(value, data, value.shape)
    return data


def _storable(value: Any) -> Any:
    """Returns a value that fastload can store: of a `BytesIO`, which trainings often have, its bytes."""
    return (BYTES_IO, value.getvalue()) if isinstance(value, io.BytesIO) else value
