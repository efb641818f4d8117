"""torchtitan: a checkpoint manager whose checkpoints all ranks save and load together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torchtitan
from torch import Tensor

from fastload import OptionError, SaveOptions, async_save, save, world
from fastload.formats.encoder import encode_state
from fastload.formats.names import RECORD_NAME
from fastload.formats.values import is_stateful
from fastload.geometry.dtensors import is_dtensor
from fastload.integrations.dcp import Reader
from fastload.integrations.frameworks import (
    SaveFuture,
    require_signatures,
    require_storable_states,
    step_of_all,
    unknown_version,
)

TESTED = "0.3"
try:
    from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, AsyncMode
    from torchtitan.components.checkpointer import CheckpointManager as _CheckpointManager
    from torchtitan.tools import filesystem
    from torchtitan.tools.utils import GarbageCollection
except ImportError as error:
    raise unknown_version(torchtitan, TESTED, error) from None

__all__ = ["CheckpointManager"]

_SIGNATURES = {
    "CheckpointManager.dcp_save": (
        _CheckpointManager,
        "self state_dict checkpoint_id async_mode enable_garbage_collection to_hf",
    ),
    "CheckpointManager.dcp_load": (
        _CheckpointManager,
        "self state_dict checkpoint_id from_hf from_quantized",
    ),
    "CheckpointManager._save": (_CheckpointManager, "self curr_step last_step"),
    "CheckpointManager._purge_stale_checkpoints": (_CheckpointManager, "self"),
    "CheckpointManager._should_purge": (_CheckpointManager, "self"),
    "CheckpointManager._find_load_step": (_CheckpointManager, "self folder"),
    "CheckpointManager._create_checkpoint_id": (_CheckpointManager, "self step folder"),
}

_SIGNS = (RECORD_NAME, ".metadata", "model.safetensors.index.json")  # of fastload, and of torchtitan
_PER_RANK = (MODEL, OPTIMIZER, DATALOADER)  # the states of which each rank has its own part


class CheckpointManager(_CheckpointManager):  # type: ignore[misc]
    """torchtitan's ``CheckpointManager``, with checkpoints that all ranks save and load together.

    Its ``Config`` replaces torchtitan's in the config of a training::

        config.checkpoint = CheckpointManager.Config(enable=True, interval=500, async_mode="async")

    Fields, folders, retention and schedule are torchtitan's. A checkpoint is a directory of safetensors;
    checkpoints that torchtitan wrote are loaded, too.

    Args:
        config: As for torchtitan's.
        parts: As for torchtitan's.

    Raises:
        OptionError: fastload does not know this version of torchtitan, or cannot do what the config asks for,
            or cannot store something in the state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's config, which makes this manager."""

    def __init__(self, config: Config, **parts: Any) -> None:
        if config.enable:
            _require_supported(config)
        super().__init__(config, **parts)
        if config.enable:  # what cannot be stored fails before the training
            encode_state({name: self.states[name] for name in self.states.keys() - set(_PER_RANK)})
            require_storable_states(getattr(self.states.get(OPTIMIZER), "optimizers", ()))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._last_step = curr_step
        return bool(super()._save(curr_step, last_step))

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Saves a state on all ranks; returns the future of a save in the background."""
        state = _own_part(self.sd_adapter.to_hf(state_dict) if to_hf else state_dict)
        options = SaveOptions(overwrite=True, parts=True)
        future = None
        if async_mode == AsyncMode.DISABLED:
            save(state, checkpoint_id, options=options)
        else:
            future = SaveFuture(async_save(state, checkpoint_id, options=options))
        if enable_garbage_collection:
            GarbageCollection.collect("after a checkpoint")
        return future

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads into a state on all ranks; leaves quantized weights to torchtitan."""
        if from_quantized:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        state = self.sd_adapter.to_hf(state_dict) if from_hf else state_dict
        dcp.load(state, storage_reader=Reader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(state) if from_hf else state)

    def _purge_stale_checkpoints(self) -> None:
        """Has old checkpoints deleted; `keep_latest_k` are left, with the one that is being saved.

        torchtitan counts whatever has a step in its name, also what is left of saves that were killed.
        """
        if self._should_purge():
            paths = _paths(self.folder)
            complete = {step for path, step in paths.items() if _has(path, *_SIGNS)}
            kept = sorted({*complete, self._last_step})[-self.keep_latest_k :]
            for path, step in paths.items():
                if step < kept[0]:
                    self.purge_queue.put(path)

    def _find_load_step(self, folder: str = "") -> int:
        """Returns the highest step that has a checkpoint, as rank 0 sees it; -1 if none has."""
        with step_of_all(f"looking for checkpoints in {folder or self.folder}") as finding:
            finding.answer(self._newest_step(folder) if world.get_rank() == 0 else -1)
        return int(finding.answers[0])

    def _newest_step(self, folder: str) -> int:
        theirs: int = super()._find_load_step(folder)
        paths = _paths(folder or self.folder)
        return max([theirs, *(step for path, step in paths.items() if _has(path, RECORD_NAME))])


def _require_supported(config: Any) -> None:
    require_signatures(torchtitan, TESTED, _SIGNATURES)
    if config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
        raise OptionError(
            "async_mode='async_with_pinned_mem': fastload makes the copy itself, in pinned memory where the "
            "state is on GPUs; say async_mode='async'"
        )


def _own_part(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this rank's part of a state: models, optimizers, data loaders and DTensors; on rank 0 all.

    fastload merges the parts by key.
    """
    if world.get_rank() == 0:
        return dict(states)
    parts = {
        name: value if isinstance(value, Tensor) or name in _PER_RANK else _dtensors_of(value)
        for name, value in states.items()
    }
    return {name: value for name, value in parts.items() if value is not None}


def _dtensors_of(value: Any) -> Any:
    """Returns a state without all that is no DTensor; None if there is none in it.

    Lists and tuples with DTensors are as they are: their elements have places, not keys.
    """
    if is_stateful(value):
        return _dtensors_of(value.state_dict())
    if isinstance(value, dict):
        found = {key: part for key, each in value.items() if (part := _dtensors_of(each)) is not None}
        part = copy(value)  # of the same class, with the attributes of a state dict
        part.clear()
        part.update(found)
        return part if found else None
    if isinstance(value, list | tuple):
        return value if any(_dtensors_of(each) is not None for each in value) else None
    return value if isinstance(value, Tensor) and is_dtensor(value) else None


def _paths(folder: str) -> dict[str, int]:
    """Returns the paths of the checkpoints in a directory, complete or not, with their steps."""
    if not filesystem.isdir(folder):
        return {}
    found = [(re.fullmatch(r"step-(\d+)", name), name) for name in filesystem.listdir(folder)]
    return {filesystem.join(folder, name): int(match[1]) for match, name in found if match}


def _has(path: str, *files: str) -> bool:
    return any(filesystem.isfile(filesystem.join(path, file)) for file in files)
