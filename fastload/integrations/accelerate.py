"""accelerate: ``save_state`` and ``load_state`` of an Accelerator, on all ranks together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import xxhash

import fastload
from fastload import IncompleteCheckpoint, LoadOptions, SaveHandle, SaveOptions, async_save, save, world
from fastload.integrations.host import (
    is_ours,
    live_state,
    odd_tensors,
    refuse,
    require_layout,
    state_to_save,
    unknown,
)

TESTED = "1.15"
try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise unknown(accelerate, TESTED, error) from None

__all__ = ["attach"]

FOLDER = "fastload"
"""The checkpoint of models and optimizers, in the directory of a state."""

_SEAMS = {
    "Accelerator.save_state": (Accelerator, "self output_dir safe_serialization save_model_func_kwargs"),
    "Accelerator.load_state": (Accelerator, "self input_dir load_kwargs load_model_func_kwargs"),
    "Accelerator.register_save_state_pre_hook": (Accelerator, "self hook"),
    "Accelerator.register_load_state_pre_hook": (Accelerator, "self hook"),
}
_BESIDE = "accelerate"
"""Name of the digest of what is beside the checkpoint, in its metadata."""
_OF_RANK_0 = ("random_states_0.pkl", "scheduler*.bin", "sampler*.bin", "custom_checkpoint_*.pkl")
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def attach(
    accelerator: Accelerator,
    *,
    in_background: bool = False,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> None:
    """Has ``save_state`` and ``load_state`` save and load models and optimizers by all ranks together.

    They are in the directory ``fastload`` of a state; schedulers, random states, samplers and registered
    objects are saved and loaded as before, and so are states that were saved without fastload. To be called
    once, after hooks of the program's own are registered.

    Args:
        accelerator: It.
        in_background: Whether ``save_state`` returns as soon as each rank has copied its share of models and
            optimizers; what goes wrong later is raised by the next ``save_state`` or ``load_state``.
        save_options: How to save; None for the defaults.
        load_options: How to load; None for the defaults.

    Raises:
        OptionError: This accelerate is laid out in another way, or uses what fastload cannot save: FSDP 1,
            DeepSpeed, Megatron-LM, XLA, quantized weights, ``save_on_each_node``.
    """
    require_layout(accelerate, TESTED, _SEAMS)
    state = accelerator.state
    plugin: Any = getattr(state, "fsdp_plugin", None)
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    odd = ", ".join(filter(None, map(odd_tensors, accelerator._models)))
    reasons = {
        str(accelerator.distributed_type.value): accelerator.distributed_type in _REFUSED,
        "FSDP 1 (set fsdp_version=2)": is_fsdp and plugin.fsdp_version != 2,
        f"weights of {odd}": bool(odd),
        "save_on_each_node": accelerator.project_configuration.save_on_each_node,
    }
    refuse("save the state of an Accelerator", reasons)
    states = _States(accelerator, in_background, save_options or SaveOptions(), load_options)
    accelerator.save_state = states.save
    accelerator.load_state = states.load


class _States:
    """What an Accelerator does instead, and on top of what it did."""

    def __init__(
        self,
        accelerator: Accelerator,
        in_background: bool,
        save_options: SaveOptions,
        load_options: LoadOptions | None,
    ) -> None:
        self._accelerator = accelerator
        self._own_save, self._own_load = accelerator.save_state, accelerator.load_state
        self._in_background = in_background
        self._save_options = replace(save_options, overwrite=True)
        self._load_options = load_options
        self._handle: SaveHandle | None = None

    def save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Does as ``Accelerator.save_state``."""
        self._settle()
        found: list[tuple[list[Any], str]] = []

        def take(models: list[Any], weights: list[Any], folder: str) -> None:
            # Hooks that save a model themselves have taken its weights out.
            found.append((models if len(weights) == len(models) else models[: len(weights)], folder))
            weights.clear()

        hook = self._accelerator.register_save_state_pre_hook(take)
        try:
            with self._hidden() as (all_models, optimizers):
                location = self._own_save(output_dir, *arguments, **keywords)
        finally:
            hook.remove()
        models, folder = found[0]
        state = {
            "models": [state_to_save(model) for model in all_models or models],
            "optimizers": [optimizer.optimizer.state_dict() for optimizer in optimizers],
        }
        path = os.path.join(folder, FOLDER)
        metadata = {_BESIDE: _digest_of(folder)} if self._accelerator.is_main_process else None
        if self._in_background:
            self._handle = async_save(state, path, metadata=metadata, options=self._save_options)
        else:
            save(state, path, metadata=metadata, options=self._save_options)
        return location

    def load(self, input_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """Does as ``Accelerator.load_state``."""
        self._settle()
        folder = self._folder(input_dir)
        path = os.path.join(folder, FOLDER)
        if not is_ours(path):
            self._own_load(input_dir, *arguments, **keywords)
            return
        with fastload.open(path, options=self._load_options) as checkpoint:
            self._require_one_save(folder, checkpoint.metadata.get(_BESIDE))
            models, optimizers = self._load_rest(input_dir, *arguments, **keywords)
            into = {
                "models": [live_state(model) for model in models],
                "optimizers": [optimizer.optimizer for optimizer in optimizers],
            }
            checkpoint.load(into=into)

    def _require_one_save(self, folder: str, digest: str | None) -> None:
        """Raises unless rank 0 finds that what is beside a checkpoint was saved with it."""

        def look() -> None:
            if self._accelerator.is_main_process and digest not in (None, _digest_of(folder)):
                raise IncompleteCheckpoint(
                    f"{folder}: the files of accelerate and {FOLDER}/ are not of the same save: a later one "
                    f"was cut off, or made without fastload (to load that one, remove {FOLDER}/)"
                )

        options = self._load_options or LoadOptions()
        world.agree(None, f"looking at {folder}", look, timeout_s=options.timeout_s)

    def _load_rest(self, *arguments: Any, **keywords: Any) -> tuple[list[Any], list[Any]]:
        """Has accelerate load what is its own; returns the models and the optimizers, which are left."""
        found: list[Any] = []

        def take(models: list[Any], folder: str) -> None:
            found.extend(models)
            models.clear()

        hook = self._accelerator.register_load_state_pre_hook(take)
        try:
            with self._hidden() as (all_models, optimizers):
                self._own_load(*arguments, **keywords)
        finally:
            hook.remove()
        return all_models or found, optimizers

    @contextmanager
    def _hidden(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Hides optimizers from the Accelerator, and models if it would save them before any hook (FSDP)."""
        accelerator = self._accelerator
        models, optimizers = accelerator._models, accelerator._optimizers
        is_fsdp = accelerator.distributed_type == DistributedType.FSDP
        accelerator._optimizers = []
        if is_fsdp:
            accelerator._models = []
        try:
            yield models if is_fsdp else [], optimizers
        finally:
            accelerator._models, accelerator._optimizers = models, optimizers

    def _folder(self, input_dir: str | None) -> str:
        configuration = self._accelerator.project_configuration
        if input_dir is not None or not configuration.automatic_checkpoint_naming:
            return os.path.expanduser(input_dir or "")
        folder = os.path.join(self._accelerator.project_dir, "checkpoints")
        numbers = {
            int(match[1]): name for name in os.listdir(folder) if (match := re.search(r"(\d+)$", name))
        }
        return os.path.join(folder, numbers[max(numbers)]) if numbers else folder

    def _settle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


def _digest_of(folder: str) -> str:
    """xxh3-128 of the files that accelerate's rank 0 alone writes in the directory of a state."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for pattern in _OF_RANK_0 for path in Path(folder).glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()
