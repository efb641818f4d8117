"""Lightning: strategies whose checkpoints all ranks save and load together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import lightning
import torch
from torch.nn.parameter import is_lazy

from fastload import FastloadError, LoadOptions, OptionError, SaveOptions, load
from fastload import open as open_checkpoint
from fastload.formats.encoder import encode_state
from fastload.geometry.dtensors import is_dtensor, local_of
from fastload.integrations.directory_save import replace
from fastload.integrations.frameworks import (
    BackgroundSave,
    is_fastload_checkpoint,
    live_state,
    refuse,
    require_signatures,
    require_storable_states,
    unknown_version,
    unsupported_tensors,
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
except ImportError as error:
    raise unknown_version(lightning, TESTED, error) from None

__all__ = ["DDPStrategy", "ModelParallelStrategy"]

_SIGNATURES = {
    "Strategy.save_checkpoint": (Strategy, "self checkpoint filepath storage_options"),
    "Strategy.remove_checkpoint": (Strategy, "self filepath"),
    "Strategy.load_checkpoint": (Strategy, "self checkpoint_path weights_only"),
    "Strategy.lightning_module_state_dict": (Strategy, "self"),
    "Strategy.optimizer_state": (Strategy, "self optimizer"),
    "Strategy.teardown": (Strategy, "self"),
    "ModelCheckpoint.file_exists": (ModelCheckpoint, "self filepath trainer"),
    "ModelCheckpoint._link_checkpoint": (ModelCheckpoint, "trainer filepath linkpath"),
}
_SHARDED = ("state_dict", "optimizer_states")  # the keys whose values differ between ranks

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_Base: Any = object


class _CollectiveStrategy(_Base):  # type: ignore[misc]
    """Base class in front of a strategy of Lightning: all ranks save and load its checkpoints together.

    Args:
        in_background: Whether a save returns as soon as each rank has copied its share; else it returns once
            the checkpoint is durable. Old checkpoints are removed once the new one is durable.
        save_options: How to save; None for the defaults.
        load_options: How to load; None for the defaults.
        arguments: Those of Lightning's strategy.

    Raises:
        OptionError: fastload does not know this version of Lightning.
    """

    def __init__(
        self,
        *arguments: Any,
        in_background: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        **keywords: Any,
    ) -> None:
        require_signatures(lightning, TESTED, _SIGNATURES)
        if keywords.pop("save_distributed_checkpoint", True) is not True:
            raise OptionError(
                "save_distributed_checkpoint=False: fastload always writes one sharded checkpoint; leave the "
                "option out"
            )
        super().__init__(*arguments, **keywords)
        self._in_background = in_background
        self._load_options = load_options
        self._saves = BackgroundSave(save_options)
        self._callbacks: list[ModelCheckpoint] = []

    def setup(self, trainer: pl.Trainer) -> None:
        """Does as Lightning's strategy; refuses a training that could not be saved later."""
        _require_supported_model(self, trainer)
        super().setup(trainer)
        _require_supported_state(self, trainer)
        self._callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        for callback in self._callbacks:
            callback.file_exists = partial(self._is_taken, callback)
            callback._link_checkpoint = self._link_checkpoint

    def _is_taken(self, callback: ModelCheckpoint, filepath: Any, trainer: pl.Trainer) -> bool:
        """Whether a checkpoint exists, or is being saved: two callbacks may choose the same name."""
        exists = type(callback).file_exists(callback, filepath, trainer)
        return bool(self.broadcast(exists or os.fspath(filepath) == self._saves.path))

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the module, sharded as it is."""
        assert self.lightning_module is not None
        return live_state(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the state of an optimizer, sharded as it is."""
        return _bare(optimizer).state_dict()  # type: ignore[no-any-return]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint; all in it but parameters, DTensors and optimizers has rank 0's values."""
        assert self.lightning_module is not None
        parts = _Parts(self.lightning_module)
        outline = parts.taken_from(checkpoint)
        self._saves.wait()
        aside = _set_link_aside(os.fspath(filepath)) if self.is_global_zero else ""
        problems, self._saves.problems = self._saves.problems, []
        path, outline, problems = self.broadcast((os.fspath(filepath), outline, problems))
        if problems:
            raise FastloadError("; ".join(problems))
        state = parts.put_into(outline)
        ends_soon = os.path.basename(path).startswith("hpc_ckpt_")  # Slurm requeues the job
        in_background = self._in_background and not ends_soon
        self._saves.save(state, path, in_background=in_background, storage_options=storage_options)
        if aside:
            self._saves.once_durable(f"removing {aside}", partial(os.unlink, aside))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint, once the save under way is durable; moves links to it on to newer ones."""
        path = os.fspath(filepath)
        path = path if "://" in path else os.path.abspath(path)
        links = {
            os.path.abspath(one.last_model_path): os.path.abspath(one._last_checkpoint_saved)
            for one in self._callbacks
            if one.save_last == "link" and one.last_model_path and one._last_checkpoint_saved
        }
        self._saves.once_durable(f"removing {path}", partial(_remove, path, links))

    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        """Makes a link to a checkpoint, once it is durable."""
        target, link = os.path.abspath(filepath), os.path.abspath(linkpath)
        if target != link:
            self._saves.once_durable(f"linking {link}", partial(_link, target, link))
        self.barrier()

    def teardown(self) -> None:
        """Waits until the last save is durable."""
        try:
            self._saves.wait()
        finally:
            super().teardown()

    # Loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint on all ranks; leaves those that fastload did not save to Lightning."""
        path = os.fspath(self.broadcast(checkpoint_path))
        self._saves.wait()
        if not is_fastload_checkpoint(path):
            return super().load_checkpoint(path, weights_only)  # type: ignore[no-any-return]
        return self._load(path)

    def _load(self, path: str) -> dict[str, Any]:
        return load(path, options=self._load_options)  # type: ignore[no-any-return]


class DDPStrategy(_CollectiveStrategy, _DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy``, with checkpoints that all ranks save and load together.

    Use it as in::

        Trainer(strategy=DDPStrategy(in_background=True), callbacks=[ModelCheckpoint(save_last=True)])

    A checkpoint is a directory of safetensors, under the name that ``ModelCheckpoint`` gives it. Lightning's
    ``.ckpt`` files are loaded, too. See `_CollectiveStrategy` for its own arguments.
    """


class ModelParallelStrategy(_CollectiveStrategy, _ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), likewise.

    The ranks that hold a shard save it; any other mesh loads it in place.
    """

    def _load(self, path: str) -> dict[str, Any]:
        assert self.lightning_module is not None
        optimizers = [_bare(optimizer) for optimizer in self.optimizers]
        with open_checkpoint(path, options=self._load_options) as checkpoint:
            structure: Any = checkpoint.manifest.structure
            keys = structure["dict"][::2]
            into: dict[str, Any] = {key: None for key in keys if key not in _SHARDED}
            into["state_dict"] = live_state(self.lightning_module)
            has_optimizers = bool(optimizers) and "optimizer_states" in keys
            if has_optimizers:
                into["optimizer_states"] = optimizers
            checkpoint.load(into=into, strict=has_optimizers and self.lightning_module.strict_loading)
        return {key: into[key] for key in keys if key not in _SHARDED}


class _OfEachRank:
    """Stands for what every rank has itself, in a checkpoint that rank 0 broadcasts."""


class _Parts:
    """What each rank has itself of a checkpoint: parameters and DTensors, wherever they are, and optimizers.

    Args:
        module: The module whose parameters these are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parameters = (local_of(one) for one in module.parameters() if not is_lazy(one))
        self._addresses = {one.data_ptr() for one in parameters} - {0}
        self._own: dict[tuple[Any, ...], Any] = {}

    def taken_from(self, checkpoint: Mapping[str, Any]) -> Any:
        """Returns a checkpoint without this rank's parts, with copies of all other tensors on the CPU."""
        self._own = {(key,): checkpoint[key] for key in checkpoint if key == "optimizer_states"}
        return _mapped({**checkpoint, **{key: _OfEachRank() for (key,) in self._own}}, self._take)

    def put_into(self, outline: Any) -> Any:
        """Returns the checkpoint that rank 0 has broadcast, with this rank's parts.

        A part that this rank lacks is left out, which the save refuses on all ranks.
        """
        return _mapped(outline, self._put)

    def _take(self, path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_plain = type(value) in _PLAIN and value.layout is torch.strided
        if is_dtensor(value) or (is_plain and value.data_ptr() in self._addresses):
            self._own[path] = value
            return _OfEachRank()
        # A copy: tensors that share memory on rank 0 would not on the ranks that they are broadcast to.
        return value.detach().resolve_conj().resolve_neg().cpu().clone()

    def _put(self, path: tuple[Any, ...], value: Any) -> Any:
        return self._own.get(path, value) if isinstance(value, _OfEachRank) else value


def _mapped(value: Any, change: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Returns a copy of nested dicts, lists and tuples, with other values in them.

    Args:
        value: The outermost of them, or a value in them.
        change: Returns a new value, given its path and the old one.
        path: The keys and indexes of the value.
    """
    if isinstance(value, dict):
        found = copy(value)  # with the attributes of a state dict
        for key, each in value.items():
            found[key] = _mapped(each, change, (*path, key))
        return found
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change, (*path, index)) for index, each in enumerate(value))
    return change(path, value)


def _bare(optimizer: Any) -> Any:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _remove(path: str, links: Mapping[str, str]) -> None:
    """Removes a checkpoint or a link.

    Args:
        path: The checkpoint.
        links: Links to checkpoints → what they are to point to if theirs is removed.
    """
    for link, newest in links.items():
        if os.path.islink(link) and os.path.realpath(link) == os.path.realpath(path):
            _link(newest, link)
    files = get_filesystem(path)
    if os.path.islink(path):
        os.unlink(path)
    elif files.exists(path):
        files.rm(path, recursive=True)


def _set_link_aside(path: str) -> str:
    """Renames a link that a checkpoint replaces; until that is durable, ``"last"`` finds the link.

    Returns:
        The new name, also if an earlier training left such a link; empty if there is none.
    """
    stem, suffix = os.path.splitext(path)
    aside = f"{stem}-linked{suffix}"
    if os.path.islink(path):
        os.replace(path, aside)
    return aside if os.path.islink(aside) else ""


def _link(target: str, link: str) -> None:
    """Makes a link, in place of a link or a directory of its name."""
    folder, name = os.path.split(link)
    pending = os.path.join(folder, f".{name}.fastload-link")
    if os.path.lexists(pending):
        os.unlink(pending)
    os.symlink(os.path.relpath(target, folder), pending)
    if os.path.isdir(link) and not os.path.islink(link):
        replace(pending, link)
    else:
        os.replace(pending, link)


def _require_supported_model(strategy: Any, trainer: pl.Trainer) -> None:
    """Raises for models and plugins that cannot be saved, before the model is wrapped."""
    io = strategy._checkpoint_io
    classes = unsupported_tensors(strategy.lightning_module)
    reasons = {
        f"{type(io).__name__}: fastload takes the place of a CheckpointIO": type(io)
        not in (type(None), TorchCheckpointIO),
        f"weights of {classes}": bool(classes),
        "quantized weights": "Bitsandbytes" in type(trainer.precision_plugin).__name__,
    }
    refuse("save a training", reasons)


def _require_supported_state(strategy: Any, trainer: pl.Trainer) -> None:
    shards = any(hasattr(_bare(optimizer), "consolidate_state_dict") for optimizer in strategy.optimizers)
    refuse("save a training", {"optimizers that shard their states themselves": shards})
    if trainer.state.fn == TrainerFn.FITTING:
        require_storable_states(map(_bare, strategy.optimizers))
        _require_storable_rest(trainer)


def _require_storable_rest(trainer: pl.Trainer) -> None:
    """Raises for hyperparameters and states of callbacks that cannot be stored.

    Raises:
        OptionError: It names them.
    """
    parts: dict[str, Mapping[str, Any]] = {"callbacks": call._call_callbacks_state_dict(trainer)}
    for part in (trainer.lightning_module, trainer.datamodule):
        if part is not None and part.hparams:
            is_plain = isinstance(part.hparams, dict)
            parts[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams) if is_plain else part.hparams
    encode_state(parts)
