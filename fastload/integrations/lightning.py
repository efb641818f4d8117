"""Lightning: strategies whose checkpoints all ranks save and load together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning
import torch

from fastload import LoadOptions, OptionError, SaveOptions, load
from fastload import open as open_checkpoint
from fastload.formats.encoder import encode_state
from fastload.integrations.background import BackgroundSave
from fastload.integrations.host import (
    is_ours,
    live_state,
    odd_tensors,
    refuse,
    require_layout,
    state_to_save,
    unknown,
)

TESTED = "2.6"
try:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.apply_func import apply_to_collection
except ImportError as error:
    raise unknown(lightning, TESTED, error) from None

__all__ = ["DDPStrategy", "ModelParallelStrategy"]

_SEAMS = {
    "Strategy.save_checkpoint": (Strategy, "self checkpoint filepath storage_options"),
    "Strategy.remove_checkpoint": (Strategy, "self filepath"),
    "Strategy.load_checkpoint": (Strategy, "self checkpoint_path weights_only"),
    "Strategy.lightning_module_state_dict": (Strategy, "self"),
    "Strategy.optimizer_state": (Strategy, "self optimizer"),
    "Strategy.teardown": (Strategy, "self"),
    "ModelCheckpoint.file_exists": (ModelCheckpoint, "self filepath trainer"),
}
_BIG = ("state_dict", "optimizer_states")  # of which each rank has its part

_Base: Any = object


class _Together(_Base):  # type: ignore[misc]
    """What the strategies have in common; goes before one of Lightning's.

    Args:
        in_background: Whether a save returns as soon as each rank has copied its share; else it returns once
            the checkpoint is durable. What is removed for a new checkpoint is removed once that is durable.
        save_options: How to save; None for the defaults.
        load_options: How to load; None for the defaults.
        arguments: Those of Lightning's strategy.

    Raises:
        OptionError: This Lightning is laid out in another way.
    """

    def __init__(
        self,
        *arguments: Any,
        in_background: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        **keywords: Any,
    ) -> None:
        require_layout(lightning, TESTED, _SEAMS)
        if keywords.pop("save_distributed_checkpoint", True) is not True:
            raise OptionError("save_distributed_checkpoint: what fastload saves is split and whole, always")
        super().__init__(*arguments, **keywords)
        self._in_background = in_background
        self._load_options = load_options
        self._saves = BackgroundSave(save_options or SaveOptions())

    def setup(self, trainer: pl.Trainer) -> None:
        """Does as Lightning's strategy, and refuses what could not be saved later."""
        _require_plain(self, trainer)
        super().setup(trainer)
        _require_known(self, trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.file_exists = partial(self._is_taken, callback)

    def _is_taken(self, callback: ModelCheckpoint, filepath: Any, trainer: pl.Trainer) -> bool:
        """Whether a checkpoint is there, or about to be: two callbacks may think of the same name."""
        is_there = type(callback).file_exists(callback, filepath, trainer)
        return bool(self.broadcast(is_there or os.fspath(filepath) == self._saves.path))

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the module; its buffers are those of rank 0."""
        assert self.lightning_module is not None
        return state_to_save(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the state of an optimizer; what is sharded stays so."""
        return _bare(optimizer).state_dict()  # type: ignore[no-any-return]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Saves what Lightning has put together; what is neither model nor optimizer as rank 0 has it."""
        big = {key: checkpoint[key] for key in _BIG if key in checkpoint}
        rest = {key: value for key, value in checkpoint.items() if key not in _BIG}
        # Copies, for what shares memory on rank 0 would not where it is broadcast to.
        rest = apply_to_collection(rest, torch.Tensor, lambda tensor: tensor.detach().cpu().clone())
        path, rest = self.broadcast((os.fspath(filepath), rest))
        state = {key: (big if key in big else rest)[key] for key in checkpoint}
        self._saves.begin(state, path, storage_options=storage_options)
        # A job that Slurm requeues may be gone soon.
        if not self._in_background or os.path.basename(path).startswith("hpc_ckpt_"):
            self._saves.wait()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint, once what is being saved is durable."""
        self._saves.afterwards(lambda: _remove(os.fspath(filepath)))

    def teardown(self) -> None:
        """Waits until what was saved is durable."""
        try:
            self._saves.wait()
        finally:
            super().teardown()

    # Loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint on all ranks; one that fastload did not save is loaded as Lightning does."""
        path = os.fspath(self.broadcast(checkpoint_path))
        self._saves.wait()
        if not is_ours(path):
            return super().load_checkpoint(path, weights_only)  # type: ignore[no-any-return]
        return self._load(path)

    def _load(self, path: str) -> dict[str, Any]:
        return load(path, options=self._load_options)  # type: ignore[no-any-return]


class DDPStrategy(_Together, _DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy``, with checkpoints that all ranks save and load together.

    To be used as it is::

        Trainer(strategy=DDPStrategy(in_background=True), callbacks=[ModelCheckpoint(save_last=True)])

    A checkpoint is a directory of safetensors, by the name that ``ModelCheckpoint`` gives it; ``.ckpt`` files
    of Lightning are loaded, too. See `_Together` for arguments of its own.
    """


class ModelParallelStrategy(_Together, _ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), likewise.

    What is sharded is saved as it is, by the ranks that hold it, and loaded on any other mesh, in place.
    """

    def _load(self, path: str) -> dict[str, Any]:
        assert self.lightning_module is not None
        optimizers = [_bare(optimizer) for optimizer in self.optimizers]
        with open_checkpoint(path, options=self._load_options) as checkpoint:
            structure: Any = checkpoint.manifest.structure
            keys = structure["dict"][::2]
            into: dict[str, Any] = {key: None for key in keys if key not in _BIG}
            into["state_dict"] = live_state(self.lightning_module)
            has_all = bool(optimizers) and "optimizer_states" in keys
            if has_all:
                into["optimizer_states"] = optimizers
            checkpoint.load(into=into, strict=has_all and self.lightning_module.strict_loading)
        return {key: into[key] for key in keys if key not in _BIG}


def _bare(optimizer: Any) -> Any:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _remove(path: str) -> None:
    files = get_filesystem(path)
    if files.exists(path):
        files.rm(path, recursive=True)


def _require_plain(strategy: Any, trainer: pl.Trainer) -> None:
    """Refuses what is known before the model is wrapped and the optimizers are made."""
    io = strategy._checkpoint_io
    odd = odd_tensors(strategy.lightning_module)
    reasons = {
        f"{type(io).__name__}: fastload takes the place of a CheckpointIO": type(io)
        not in (type(None), TorchCheckpointIO),
        f"weights of {odd}": bool(odd),
        "quantized weights": "Bitsandbytes" in type(trainer.precision_plugin).__name__,
    }
    refuse("save a training", reasons)


def _require_known(strategy: Any, trainer: pl.Trainer) -> None:
    shards = any(hasattr(_bare(optimizer), "consolidate_state_dict") for optimizer in strategy.optimizers)
    refuse("save a training", {"optimizers that shard their states themselves": shards})
    if trainer.state.fn == TrainerFn.FITTING:
        _describe_rest(trainer)


def _describe_rest(trainer: pl.Trainer) -> None:
    """Finds before the training what could not be saved of hyperparameters and of callbacks.

    Raises:
        OptionError: Some cannot; it names them.
    """
    parts: dict[str, Mapping[str, Any]] = {"callbacks": call._call_callbacks_state_dict(trainer)}
    for part in (trainer.lightning_module, trainer.datamodule):
        if part is not None and part.hparams:
            is_plain = isinstance(part.hparams, dict)
            parts[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams) if is_plain else part.hparams
    encode_state(parts)
