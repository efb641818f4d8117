"""torch.distributed.checkpoint: a storage that reads once across replicas, and writes plain safetensors.

Existing code changes one argument::

    dcp.save(state, storage_writer=Writer("/checkpoints/step_100"))
    dcp.load(state, storage_reader=Reader("/checkpoints/step_100"))

Both are collective, beside the collectives that dcp itself makes. Where dcp is given a ``process_group=`` or
``no_dist=True``, they have to be given the same: dcp does not tell its storages.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import fastload
from fastload.errors import OptionError, WorldError
from fastload.formats.names import DCP_NAMES
from fastload.integrations.dcp_planners import Part, Wanted, bytes_of, has_gap, kept_of, part_of, unwrapped
from fastload.integrations.dcp_plans import packed
from fastload.loading.outline import Outline
from fastload.options import LoadOptions, SaveOptions
from fastload.saving import save as saving
from fastload.saving.call import make_call
from fastload.saving.handle import SaveHandle

__all__ = ["Reader", "Writer"]

_log = logging.getLogger(__name__)

Path = str | os.PathLike[str]


class Reader(StorageReader):
    """What `dcp.load` reads from: whatever `fastload.load` loads, directories that dcp has written included.

    Its planner decides what each rank wants; what several ranks want is read once. Names are those that dcp
    gives: paths, joined by dots. Tensors of another dtype than stored are cast, as dcp does. What cannot be
    loaded, such as arrays that dcp has pickled, is as if it were not there, and a warning names it.

    Args:
        path: A local path or a URL; None if dcp is given a ``checkpoint_id=``.
        process_group: The one that dcp is given.
        no_dist: Whether dcp is given ``no_dist=True``.
        storage_options: As for `fastload.load`.
        options: How to load; None for the defaults.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        process_group: Any = None,
        no_dist: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self._path = path
        self._group = process_group
        self._no_dist = no_dist
        self._storage_options = storage_options
        self._options = options
        self._checkpoint: fastload.Checkpoint | None = None
        self._values: dict[str, Any] = {}
        self._outline: Outline | None = None
        self._stored: dict[str, str] = {}

    @property
    def report(self) -> fastload.LoadReport | None:
        """What the last load did; None before it."""
        return self._checkpoint.report if self._checkpoint is not None else None

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Takes another path, if there is one."""
        self._path = checkpoint_id if checkpoint_id is not None else self._path
        self._close()

    def read_metadata(self) -> Metadata:
        """Opens the checkpoint, on all ranks, and says what is in it, as dcp has it.

        Raises:
            FastloadError: As for `fastload.open`.
        """
        self._close()
        self._checkpoint = fastload.open(
            _required(self._path),
            process_group=_group(self._group, no_dist=self._no_dist),
            storage_options=self._storage_options,
            options=self._options,
        )
        self._outline = outline = self._checkpoint.outline()
        state = outline.state if isinstance(outline.state, dict) else {"state": outline.state}
        everything, paths = flatten_state_dict(state)
        flat = {name: value for name, value in everything.items() if not has_gap(value)}
        if gaps := everything.keys() - flat.keys():
            why = "; ".join(dict.fromkeys(outline.left_out))
            _log.warning("%s: left out: %s (%s)", self._path, ", ".join(sorted(gaps)), why)
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor) and value.is_meta}
        self._values = {name: unwrapped(value) for name, value in flat.items() if name not in tensors}
        self._stored = {name: outline.stored_of(tensor) for name, tensor in tensors.items()}
        return Metadata(
            {name: kept_of(tensors.get(name)) for name in flat},
            planner_data=paths,
            storage_meta=StorageMeta(checkpoint_id=self._path),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: it is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Packs what dcp sends to the coordinator and back."""
        return packed(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leaves the plans as they are.

        Raises:
            WorldError: They are of other ranks than these.
        """
        _require_size(len(plans), self._group, no_dist=self._no_dist, call="dcp.load", storage="Reader")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads, on all ranks, what the plans of all want.

        Raises:
            FastloadError: As for `fastload.load`.
        """
        assert self._checkpoint is not None, "read_metadata comes before"
        assert self._outline is not None, "likewise"
        values: list[tuple[ReadItem, Any]] = []
        with self._checkpoint as checkpoint:
            wanted = Wanted(checkpoint.manifest, self._stored, planner)
            for item in plan.items:
                if item.type == LoadItemType.TENSOR:
                    wanted.add(item)
                else:
                    value = self._values[item.storage_index.fqn]
                    values.append((item, wanted.add_value(item, value, self._outline)))
            wanted.add_unplanned()
            checkpoint.read(wanted.boxes)
            wanted.commit()
        for item, value in values:
            planner.load_bytes(item, bytes_of(value))
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether it is a path; asked by nobody, since dcp chooses among its own storages only."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()


class Writer(StorageWriter):
    """What `dcp.save` and `dcp.async_save` write to: the checkpoint that `fastload.save` makes of the state.

    The ranks that hold the same share the writing; the files are plain safetensors, with checksums and a
    commit record. It exists once all ranks have written, as a whole. An older one at the same path, which
    fastload or dcp saved, is replaced, as dcp does.

    Args:
        path: The directory to make, a local path or a URL; None if dcp is given a ``checkpoint_id=``.
        process_group: The one that dcp is given.
        no_dist: Whether dcp is given ``no_dist=True``.
        metadata: As for `fastload.save`.
        storage_options: As for `fastload.save`.
        options: How to save; None for the defaults. What is there is replaced, unless they have
            ``overwrite=False``.
    """

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
        self._path = path
        self._group = process_group
        self._no_dist = no_dist
        self._metadata = metadata
        self._storage_options = storage_options
        self._options = options if options is not None else SaveOptions()
        self._local = SavePlan([])
        self._is_apart = False
        self.report: fastload.SaveReport | None = None

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Takes another path, if there is one."""
        self._path = checkpoint_id if checkpoint_id is not None else self._path

    def storage_meta(self) -> StorageMeta:
        """Returns where the checkpoint is going to be."""
        return StorageMeta(checkpoint_id=self._path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks what can be checked before anything is planned.

        Raises:
            OptionError: There is no path.
        """
        _required(self._path)
        self._is_apart = not kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keeps the plan: the one that comes back has what this rank would write."""
        self._local = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leaves the plans as they are.

        Raises:
            WorldError: The plans are of other ranks than these.
        """
        if not self._is_apart:
            _require_size(len(plans), self._group, no_dist=self._no_dist, call="dcp.save", storage="Writer")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Saves, on all ranks.

        Raises:
            OptionError: The state holds what fastload cannot keep, or the planner is of another kind, or
                plans what cannot be saved.
            FastloadError: As for `fastload.save`.
        """
        group = _group(self._group, no_dist=self._no_dist)
        parts: list[Part] = []

        def collect() -> tuple[str, list[str] | None]:
            parts.append(part := part_of(planner, self._local, plan))
            return xxhash.xxh3_128_hexdigest(json.dumps(part.names).encode()), part.written

        path, options = _required(self._path), self._options
        what = f"saving to {path}: the state"
        answers = fastload.world.agree(group, what, collect, timeout_s=options.timeout_s)
        has_parts = self._is_apart or len({names for names, _ in answers}) > 1
        call = make_call(
            path,
            group,
            self._metadata,
            self._storage_options,
            replace(options, parts=options.parts or has_parts, overwrite=options.overwrite is not False),
            raise_earlier=SaveHandle.raise_unseen,
            names=DCP_NAMES,
        )
        self.report = saving.save(call, parts.pop().state([written for _, written in answers]))
        call.tell(self.report)
        return _done([_result(item) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the checkpoint is there."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether it is a path; asked by nobody, since dcp chooses among its own storages only."""
        return isinstance(checkpoint_id, str | os.PathLike)


def _result(item: WriteItem) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=item.tensor_storage_size() or 0, storage_data=None)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _required(path: Path | None) -> Path:
    if path is None:
        raise OptionError("there is no path: give it to the storage, or dcp a checkpoint_id=")
    return path


def _require_size(num_plans: int, group: Any, *, no_dist: bool, call: str, storage: str) -> None:
    size = 1 if no_dist or not dist.is_initialized() else dist.get_world_size(group)
    if num_plans != size:
        raise WorldError(
            f"{call} is made by {num_plans} ranks, its {storage} by {size}: give the {storage} the same "
            "process_group=, or no_dist=True"
        )


def _group(process_group: Any, *, no_dist: bool) -> Any:
    """Returns the group of those that dcp lets take part; None for all there are."""
    if not no_dist or not dist.is_initialized() or dist.get_world_size() == 1:
        return process_group
    return _alone(dist.group.WORLD)


@cache
def _alone(default_group: Any) -> Any:
    """Makes a group of this process alone, which needs nobody else."""
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
