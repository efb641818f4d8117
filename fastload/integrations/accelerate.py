"""accelerate: ``save_state`` and ``load_state`` of an Accelerator, on all ranks together."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import xxhash

import fastload
from fastload import IncompleteCheckpoint, LoadOptions, SaveOptions, world
from fastload.formats.names import RECORD_NAME
from fastload.integrations.frameworks import (
    BackgroundSave,
    is_fastload_checkpoint,
    live_state,
    refuse,
    require_signatures,
    require_storable_states,
    state_to_save,
    step_of_all,
    unknown_version,
    unsupported_tensors,
)

TESTED = "1.15"
try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise unknown_version(accelerate, TESTED, error) from None

__all__ = ["attach"]

FOLDER = "fastload"
"""Directory, within that of a state, with the checkpoint of models and optimizers."""

_SIGNATURES = {
    "Accelerator.save_state": (Accelerator, "self output_dir safe_serialization save_model_func_kwargs"),
    "Accelerator.load_state": (Accelerator, "self input_dir load_kwargs load_model_func_kwargs"),
    "Accelerator.end_training": (Accelerator, "self"),
    "Accelerator.register_save_state_pre_hook": (Accelerator, "self hook"),
    "Accelerator.register_load_state_pre_hook": (Accelerator, "self hook"),
}
_DIGEST_KEY = "accelerate"
"""Key of the digest of accelerate's own files, in the metadata of the checkpoint."""
_RANK_0_FILES = ("random_states_0.pkl", "scheduler*.bin", "sampler*.bin", "custom_checkpoint_*.pkl")
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def attach(
    accelerator: Accelerator,
    *,
    in_background: bool = False,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> None:
    """Makes ``save_state`` and ``load_state`` save and load models and optimizers on all ranks together.

    These are in the directory ``fastload`` of a state. Schedulers, random states, samplers and registered
    objects are saved and loaded as before, and so are states that were saved without fastload. Call it once,
    after the program has registered its own hooks.

    With ``automatic_checkpoint_naming``, ``load_state()`` takes the newest complete state, removes newer
    ones, whose save was cut off, and continues the numbers from there.

    Args:
        accelerator: The Accelerator to change.
        in_background: Whether ``save_state`` returns as soon as each rank has copied its share of models and
            optimizers. The next ``save_state``, ``load_state`` or ``end_training`` waits for it, and raises
            its errors.
        save_options: How to save; None for the defaults.
        load_options: How to load; None for the defaults.

    Raises:
        OptionError: fastload does not know this version of accelerate, or cannot save what it uses: FSDP 1,
            DeepSpeed, Megatron-LM, XLA, quantized weights, ``save_on_each_node``.
    """
    require_signatures(accelerate, TESTED, _SIGNATURES)
    state = accelerator.state
    plugin: Any = getattr(state, "fsdp_plugin", None)
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    classes = ", ".join(filter(None, map(unsupported_tensors, accelerator._models)))
    reasons = {
        str(accelerator.distributed_type.value): accelerator.distributed_type in _REFUSED,
        "FSDP 1 (set fsdp_version=2)": is_fsdp and plugin.fsdp_version != 2,
        f"weights of {classes}": bool(classes),
        "save_on_each_node": accelerator.project_configuration.save_on_each_node,
    }
    refuse("save the state of an Accelerator", reasons)
    require_storable_states(prepared.optimizer for prepared in accelerator._optimizers)
    states = _StateMethods(accelerator, in_background, save_options, load_options)
    accelerator.save_state = states.save
    accelerator.load_state = states.load
    accelerator.end_training = states.end


class _StateMethods:
    """Replacements for methods of an Accelerator, which call the original ones."""

    def __init__(
        self,
        accelerator: Accelerator,
        in_background: bool,
        save_options: SaveOptions | None,
        load_options: LoadOptions | None,
    ) -> None:
        self._accelerator = accelerator
        self._own_save, self._own_load = accelerator.save_state, accelerator.load_state
        self._own_end = accelerator.end_training
        self._in_background = in_background
        self._saves = BackgroundSave(save_options)
        self._load_options = load_options

    def save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Does as ``Accelerator.save_state``."""
        self._saves.wait()
        found: list[tuple[list[Any], str]] = []

        def take(models: list[Any], weights: list[Any], folder: str) -> None:
            # A hook that saves a model itself has removed the model's weights.
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
        with step_of_all(f"looking at {folder}") as step:
            step.answer(_digest_of(folder) if world.get_rank() == 0 else "")
        metadata = {_DIGEST_KEY: step.answers[0]}
        self._saves.save(state, path, in_background=self._in_background, metadata=metadata)
        return location

    def load(self, input_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """Does as ``Accelerator.load_state``."""
        self._saves.wait()
        folder = self._newest() if input_dir is None else os.path.expanduser(input_dir)
        path = os.path.join(folder or "", FOLDER)
        if folder is None or not is_fastload_checkpoint(path):
            self._own_load(folder, *arguments, **keywords)
            return
        with fastload.open(path, options=self._load_options) as checkpoint:
            self._require_one_save(folder, checkpoint.metadata.get(_DIGEST_KEY))
            models, optimizers = self._load_rest(folder, *arguments, **keywords)
            into = {
                "models": [live_state(model) for model in models],
                "optimizers": [optimizer.optimizer for optimizer in optimizers],
            }
            checkpoint.load(into=into)

    def end(self) -> None:
        """Does as ``Accelerator.end_training``, once the last save is durable."""
        self._saves.wait()
        self._own_end()

    def _require_one_save(self, folder: str, digest: str | None) -> None:
        """Raises unless accelerate's files were saved together with the checkpoint."""
        with step_of_all(f"looking at {folder}", options=self._load_options):
            if world.get_rank() == 0 and digest not in (None, _digest_of(folder)):
                raise IncompleteCheckpoint(
                    f"{folder}: the files of accelerate and {FOLDER}/ are not of the same save: a later one "
                    f"was cut off, or made without fastload (to load that one, remove {FOLDER}/)"
                )

    def _load_rest(self, *arguments: Any, **keywords: Any) -> tuple[list[Any], list[Any]]:
        """Has accelerate load all but models and optimizers; returns these."""
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
        """Hides optimizers from the Accelerator; with FSDP also models, which it saves before any hook."""
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

    def _newest(self) -> str | None:
        """Returns the newest complete state with an automatic name, which the next save follows; or None.

        Newer ones, whose save was cut off, are removed: they would count for ``total_limit``.
        """
        configuration = self._accelerator.project_configuration
        if not configuration.automatic_checkpoint_naming:
            return None
        parent = os.path.join(self._accelerator.project_dir or "", "checkpoints")
        with step_of_all(f"looking for the newest state in {parent}", options=self._load_options) as step:
            step.answer(_take_newest(parent) if world.get_rank() == 0 else None)
        if step.answers[0] is None:
            return None
        number, folder = step.answers[0]
        configuration.iteration = number + 1
        return str(folder)


def _take_newest(parent: str) -> tuple[int, str] | None:
    """Returns number and path of the newest complete state with an automatic name; removes newer ones."""
    names = os.listdir(parent) if os.path.isdir(parent) else []
    numbers = {name: int(match[1]) for name in names if (match := re.search(r"(\d+)$", name))}
    folders = [os.path.join(parent, name) for name in sorted(numbers, key=numbers.__getitem__)]
    complete = [number for number, folder in enumerate(folders) if _has_models(folder)]
    if not complete:
        return None
    for folder in folders[complete[-1] + 1 :]:
        shutil.rmtree(folder)
    newest = folders[complete[-1]]
    return numbers[os.path.basename(newest)], newest


def _has_models(folder: str) -> bool:
    """Whether a state has its models: completely from fastload, or from accelerate alone."""
    own = Path(folder, FOLDER)
    return (own / RECORD_NAME).is_file() if own.exists() else any(Path(folder).glob("*model*"))


def _digest_of(folder: str) -> str:
    """Returns the xxh3-128 of the files in the directory of a state that only rank 0 of accelerate writes."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for pattern in _RANK_0_FILES for path in Path(folder).glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()
