"""The `Trainer` of transformers, with checkpoints that all ranks save and load together."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor

from fastload import LoadOptions, PerRank, SaveOptions, load, random_state, world
from fastload import open as open_checkpoint
from fastload.integrations.directory_save import REPLACED, DirectorySave, clear_pending
from fastload.integrations.frameworks import (
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
from fastload.options import chosen_options

TESTED = "5.23"
try:
    from transformers import PreTrainedModel, Trainer
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
except ImportError as error:
    raise unknown_version(transformers, TESTED, error) from None

__all__ = ["TrainerMixin", "named_weights"]

_log = logging.getLogger(__name__)

TRAINING_STATE = "training_state"
"""Directory, within the checkpoint of the weights, with all else that a training needs to resume."""

_SIGNATURES = {
    "Trainer.create_optimizer": (Trainer, "self model"),
    "Trainer._save_checkpoint": (Trainer, "self model trial"),
    "Trainer._load_from_checkpoint": (Trainer, "self resume_from_checkpoint model"),
    "Trainer._load_best_model": (Trainer, "self"),
    "Trainer._load_optimizer_and_scheduler": (Trainer, "self checkpoint"),
    "Trainer._load_scaler": (Trainer, "self checkpoint"),
    "Trainer._load_rng_state": (Trainer, "self checkpoint"),
    "Trainer._finalize_training": (Trainer, "self trial num_train_samples start_time"),
    "Trainer._get_output_dir": (Trainer, "self trial"),
    "Trainer.store_flos": (Trainer, "self"),
}

_Base: Any = object


class TrainerMixin(_Base):  # type: ignore[misc]
    """A base class in front of ``Trainer``: all ranks save and load its checkpoints together.

    Use it as in::

        class MyTrainer(TrainerMixin, Trainer):
            pass

    A checkpoint is the directory that ``Trainer`` makes: for ``from_pretrained``, with
    ``trainer_state.json``; of a ``PeftModel``, with the files of its adapters alone. Its directory
    ``training_state`` has all else that a training needs to resume. The checkpoint appears as a whole, once
    it is durable. With `saves_in_background` training goes on meanwhile, and ``on_save`` may be called
    before. ``resume_from_checkpoint``, ``save_total_limit``, ``load_best_model_at_end`` and
    ``save_only_model`` work as in ``Trainer``, and checkpoints of a plain ``Trainer`` can be resumed.

    Attributes:
        saves_in_background: Whether training goes on as soon as each rank has copied its share.
        save_options: How to save; None for the defaults.
        load_options: How to load; None for the defaults.

    Raises:
        OptionError: fastload does not know this version of the Trainer, or cannot save what it uses: FSDP 1,
            DeepSpeed, quantized models, TPUs and other accelerators, ``save_on_each_node``, adapters that are
            not those of a ``PeftModel``.
    """

    saves_in_background: bool = False
    save_options: SaveOptions | None = None
    load_options: LoadOptions | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._pending: DirectorySave | None = None
        self._own_random_states: Any = None
        self._cleared: set[str] = set()
        _require_supported(self)

    def create_optimizer(self, model: Any = None) -> Any:
        """Does as ``Trainer``; refuses an optimizer whose states could not be saved later."""
        optimizer = super().create_optimizer(model)
        require_storable_states([getattr(optimizer, "optimizer", optimizer)])  # what accelerate wraps
        return optimizer

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = self._get_output_dir(trial=trial)
        if self._pending is not None and self._pending.is_running and self.args.should_save:
            _log.warning("%s is not saved yet, and the next one is due: waiting", self._pending.path)
        self._end_save()
        if folder not in self._cleared:
            self._cleared.add(folder)
            with step_of_all(f"clearing {folder}"):
                if world.get_rank() == 0:
                    clear_pending(folder, PREFIX_CHECKPOINT_DIR)
        self._note_best(folder)
        model = self._bare_model()
        state = state_to_save(model)
        adapters = _adapters_of(model)
        states: dict[str, Any] = {
            folder: _adapter_integration().tensors_of(model, name, state) for folder, name in adapters.items()
        } or {"": named_weights(model, state)}
        if not self.args.save_only_model:
            states[TRAINING_STATE] = self._training_state(random_state())
        path = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self._pending = DirectorySave(
            path,
            states,
            adapters=adapters,
            add_files=partial(self._add_files, self._state_to_save()),
            on_publish=partial(self._rotate, folder, self.state.best_model_checkpoint),
            process_group=None,
            options=self.save_options,
        )
        if not self.saves_in_background or self.args.push_to_hub:
            self._end_save()
        if self.args.push_to_hub:
            self._push_from_checkpoint(path)

    def _end_save(self) -> None:
        """Waits until the last save is durable; raises its error on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _note_best(self, folder: str) -> None:
        step = self.state.best_global_step
        if step:
            best = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{step}")
            if step == self.state.global_step or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def _state_to_save(self) -> Any:
        """Returns a copy of the state of the Trainer and its callbacks."""
        if self.args.should_save:
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    states = self.state.stateful_callbacks
                    name = type(callback).__name__
                    if isinstance(states[name], list):
                        states[name].append(callback.state())
                    else:
                        states[name] = callback.state()
        return deepcopy(self.state)

    def _add_files(self, state: Any, folder: str) -> None:
        model = self._bare_model()
        for below, name in _adapters_of(model).items():
            _adapter_integration().save_config(model, name, os.path.join(folder, below))
        if isinstance(model, PreTrainedModel):
            config = deepcopy(model.config)
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
            if model.is_remote_code():
                transformers.dynamic_module_utils.custom_object_save(model, folder, config=config)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))
        state.save_to_json(os.path.join(folder, "trainer_state.json"))

    def _rotate(self, folder: str, best: str | None) -> None:
        rotate_checkpoints(
            output_dir=folder,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=best,
            use_mtime=True,
        )

    def _training_state(self, random_states: Any) -> dict[str, Any]:
        """Returns what a training needs to resume besides its weights, to be saved or restored."""
        state = {
            "optimizer": self.optimizer.optimizer,
            "scheduler": self.lr_scheduler,
            "random_states": random_states,
        }
        scaler = getattr(self.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        self._end_save()
        return super()._finalize_training(trial, num_train_samples, start_time)

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not is_fastload_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._load_weights(resume_from_checkpoint, self._bare_model(model))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not is_fastload_checkpoint(best):
            super()._load_best_model()
            return
        self._load_weights(best, self._bare_model())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_fastload_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = os.path.join(checkpoint, TRAINING_STATE)
        if not is_fastload_checkpoint(folder):
            return  # save_only_model
        parts = self._training_state(PerRank(None))  # to be set later, once the Trainer has skipped batches
        # Like the Trainer, on another number of ranks go on without the random states.
        options = replace(chosen_options(self.load_options, LoadOptions), per_rank_mismatch="skip")
        load(folder, into=parts, strict=False, options=options)
        self._own_random_states = parts["random_states"].value

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_fastload_checkpoint(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_fastload_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)
        elif self._own_random_states is not None:
            # Older checkpoints call the state of torch on the CPU "cpu".
            states = {"torch": self._own_random_states.get("cpu"), **self._own_random_states}
            random_state().load_state_dict(states)

    def _load_weights(self, path: str, model: Any) -> None:
        if adapters := _adapters_of(model):
            for folder, name in adapters.items():
                path_of = os.path.join(path, folder)
                _adapter_integration().load(model, path_of, adapter_name=name, options=self.load_options)
            return
        weights = _untied(model, live_state(model))
        with open_checkpoint(path, options=self.load_options) as checkpoint:
            # transformers takes a second to make its table of names, which the same names do not need.
            has_names = weights.keys() <= checkpoint.manifest.by_name.keys()
            checkpoint.load(into=weights if has_names else _renamed(model, weights))

    def _bare_model(self, model: Any = None) -> Any:
        return self.accelerator.unwrap_model(
            model if model is not None else self.model, keep_torch_compile=False
        )


def _require_supported(trainer: Any) -> None:
    require_signatures(transformers, TESTED, _SIGNATURES)
    model, plugin = trainer.model, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    adapters = _adapters_of(model)
    names = ", ".join(map(repr, adapters.values()))
    classes, kind = unsupported_tensors(model), trainer.args.device.type
    reasons = {
        "FSDP 1 (set fsdp_version: 2)": plugin is not None and plugin.fsdp_version != 2,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "adapters of PreTrainedModel.add_adapter (use peft.get_peft_model)": _has_own_adapters(model),
        f"adapters named {names}: one has to be named 'default'": bool(names) and "" not in adapters,
        f"adapters named {names}: they become names of directories, of which {TRAINING_STATE!r} and "
        f"{REPLACED!r} are taken": any(map(_is_no_name, adapters)),
        "quantized models": getattr(model, "is_quantized", False),
        f"weights of {classes}": bool(classes),
        "save_on_each_node": trainer.args.save_on_each_node,
        f"devices of type {kind}": kind not in {"cpu", *_accelerator()},
    }
    refuse("save a training", reasons)


def _has_own_adapters(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _adapter_integration() -> Any:
    """Returns the integration of PEFT, which only a model with adapters needs."""
    return import_module("fastload.integrations.peft")


def _adapters_of(model: Any) -> dict[str, str]:
    """Returns the adapters of a model of PEFT by the directories below that of a checkpoint."""
    if not hasattr(model, "peft_config") or _has_own_adapters(model):
        return {}
    return {_adapter_integration().folder_of(name): name for name in model.peft_config}


def _is_no_name(folder: str) -> bool:
    return folder in (".", "..", TRAINING_STATE, REPLACED) or os.sep in folder


def named_weights(model: Any, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights in the state of a model, under the names that ``save_pretrained`` gives them.

    If it would split or merge weights, all have their names in the model, which ``from_pretrained`` knows as
    well. Of tied weights there is one.
    """
    return _renamed(model, _untied(model, state))


def _untied(model: Any, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights to save, of tied ones the first, under their names in the model."""
    weights = dict(state)
    if isinstance(model, PreTrainedModel):
        for name in model._keys_to_ignore_on_save or ():
            weights.pop(name, None)
        for tied, source in model.all_tied_weights_keys.items():
            if tied in weights and source in weights and _is_same(weights[tied], weights[source]):
                del weights[tied]
    return weights


def _renamed(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(model, PreTrainedModel):
        return dict(weights)
    return {renamed: weights[name] for name, renamed in _saved_names(model, weights).items()}


def _saved_names(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, str]:
    outlines = {name: torch.empty(tensor.shape, device="meta") for name, tensor in weights.items()}
    names = {id(outline): name for name, outline in outlines.items()}
    reverted = revert_weight_conversion(model, outlines)
    if {id(outline) for outline in reverted.values()} != names.keys():
        return {name: name for name in weights}
    return {names[id(outline)]: renamed for renamed, outline in reverted.items()}


def _is_same(one: Tensor, other: Tensor) -> bool:
    local, other_local = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
    return local.data_ptr() == other_local.data_ptr() and one.shape == other.shape


def _accelerator() -> set[str]:
    """Returns the type of the accelerator of this process; empty without one."""
    device = torch.accelerator.current_accelerator()
    return set() if device is None or not torch.accelerator.is_available() else {device.type}
