"""vLLM: new weights for a running engine, all or none; the old ones stay until the new ones are verified.

There are two ways: ``collective_rpc("refresh_weights", args=(path,))``, with `WorkerExtension` as the
engine's ``worker_extension_cls``, and vLLM's weight transfer API, with ``{"backend": "fastload"}`` as the
engine's ``weight_transfer_config``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from fastload.errors import MismatchError, WorldError
from fastload.integrations.engines import (
    Source,
    Start,
    Weights,
    device_of,
    extra_of,
    require_loaded,
    started_from,
)
from fastload.integrations.vllm import load_group

__all__ = ["FastloadWeightTransferEngine", "WorkerExtension"]

_log = logging.getLogger("vllm.fastload")
_NUM_NAMED = 20


class WorkerExtension:
    """Methods for the workers of an engine: ``worker_extension_cls`` of vLLM's `EngineArgs`."""

    vllm_config: Any
    model_runner: Any

    def refresh_weights(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        """Replaces the weights of the model by those of a checkpoint; on all workers, or on none.

        Args:
            path: A path or a URL, the same on all workers.
            options: Fields of `fastload.LoadOptions`; those of the engine's loader if None.

        Raises:
            FastloadError: It failed; the weights are unchanged.
        """
        from vllm.config import set_current_vllm_config

        config = self.vllm_config
        runner = self.model_runner
        with set_current_vllm_config(config):
            if _refresh(runner.get_model(), config, config.model_config, path, options):
                for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
                    getattr(runner, forget, _nothing)()


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The arguments of ``init_weight_transfer_engine``.

    Attributes:
        options: Fields of `fastload.LoadOptions`, for all updates; those of the engine's loader if empty.
    """

    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The arguments of ``update_weights``.

    Attributes:
        path: Path or URL of a checkpoint.
    """

    path: str


class FastloadWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """A backend of vLLM's weight transfer API; each update loads one checkpoint, or nothing."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _options: Mapping[str, Any] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Stores the options."""
        extra_of(init_info.options)
        self._options = init_info.options or None

    def start_weight_update(self) -> None:
        """Does nothing: the model serves until an update is complete."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Replaces the weights of the model by those of a checkpoint; on all workers, or on none.

        Raises:
            FastloadError: It failed; the weights are unchanged.
        """
        _refresh(self.model, self.vllm_config, self.model_config, update_info.path, self._options)

    def finish_weight_update(self) -> None:
        """Does nothing: an update that returned is complete."""

    def shutdown(self) -> None:
        """Does nothing: updates leave nothing open."""


def _nothing() -> None:
    pass


def _refresh(
    model: nn.Module, config: Any, model_config: Any, path: str, options: Mapping[str, Any] | None
) -> bool:
    """Replaces the weights on all workers; returns whether it succeeded, unless this worker is to raise."""
    errors: list[BaseException] = []
    backups: list[_Backup] = []
    group = load_group(model_config)

    def attempt(step: Callable[[], None]) -> bool:
        """Does a step on all workers; returns whether it succeeded on all."""
        try:
            step()
        except Exception as error:
            errors.append(error)
        failed: list[str | None] = [None] * group.world_size
        own = f"{type(errors[-1]).__name__}: {errors[-1]}" if errors else None
        dist.all_gather_object(failed, own, group=group.cpu_group)
        if not errors:
            errors.extend(
                WorldError(f"worker {rank} failed: {text}") for rank, text in enumerate(failed) if text
            )
        return not errors

    def replace() -> None:
        given = config.load_config.model_loader_extra_config if options is None else options
        load_options = extra_of(given).options
        with Weights([Source(path)], device_of(model), group, load_options, _log) as weights:
            weights.open_next()
            _have_experts_packed(model)
            initialize_layerwise_reload(model)
            loaded = model.load_weights(weights)  # type: ignore[operator]
            for _ in weights:
                pass  # weights that the model does not use are verified, too
            _require_complete(model, weights.names)
            require_loaded(model, loaded, model_config)
        finalize_layerwise_reload(model, model_config)
        names.update(weights.names)

    names: set[str] = set()
    with torch.no_grad():
        if attempt(lambda: backups.append(_Backup(model))) and attempt(replace):
            start = started_from.get(model)
            started_from[model] = Start(start.model if start is not None else "", frozenset(names))
            return True
        while backups:
            backups.pop().restore()
    try:
        _log.error("fastload: %s: the weights are as they were: %s", path, errors[0])
        parallel = config.parallel_config
        if parallel.distributed_executor_backend == "mp" and parallel.rank < parallel.world_size - 1:
            # This executor stops reading responses after the first error, and would take the others for
            # responses to the next call. So the last worker raises for all.
            return False
        raise errors[0]
    finally:
        errors.clear()  # else error → traceback → frame → error would keep their memory alive


def _have_experts_packed(model: nn.Module) -> None:
    """Makes vLLM pack the weights of experts on CPUs again, which it does for the first ones only."""
    if device_of(model).type == "cpu":
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None


def _require_complete(model: nn.Module, names: set[str]) -> None:
    """Raises if the checkpoint lacks weights that the model was started with.

    vLLM counts a fused parameter as loaded once any of its parts is. So if a layer lacks elements, the names
    are compared with those of the first checkpoint. Padding alone, which is never loaded, is no error.

    Raises:
        MismatchError: It lacks some; names them.
    """
    start = started_from.get(model)
    missing = sorted(start.names - names) if start is not None else []
    if missing and any(map(_is_incomplete, model.modules())):
        shown = ", ".join(missing[:_NUM_NAMED]) + (", …" if len(missing) > _NUM_NAMED else "")
        what = f"the checkpoint lacks weights that the model was started with: {shown}"
        raise MismatchError(what, missing=tuple(missing))


def _is_incomplete(layer: nn.Module) -> bool:
    info = get_layerwise_info(layer)
    if not info.can_load() or not layer._parameters or is_deferred_attention_layer(layer):
        return False
    return bool(info.load_numel < info.load_numel_total)


class _Backup:
    """A copy of a model's weights in host memory, and of what its layers derived from them."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(model.modules())
        self._states = [_state(vars(layer)) for layer in self._layers]
        methods = {id(method): method for layer in self._layers if (method := _method(layer)) is not None}
        self._methods = [(method, dict(vars(method))) for method in methods.values()]
        tensors = {
            id(tensor): tensor
            for layer in self._layers
            for tensor in (*layer._parameters.values(), *layer._buffers.values())
            if tensor is not None
        }
        self._tensors = [
            (tensor, dict(vars(tensor)), tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()
        ]

    def restore(self) -> None:
        """Restores everything in place; tensors keep their addresses."""
        for layer, state in zip(self._layers, self._states, strict=True):
            get_layerwise_info(layer).reset()
            _put_back(vars(layer), state)
        for method, state in self._methods:
            _put_back(vars(method), state)
        for tensor, state, copy in self._tensors:
            _put_back(vars(tensor), state)
            if tensor.shape == copy.shape and tensor.dtype == copy.dtype:
                tensor.data.copy_(copy)
            else:
                tensor.data = copy.to(tensor.device)


def _state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the attributes of a layer, its dicts and sets, but not their members."""
    copied = dict(state)
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        copied[name] = copied[name].copy()
    return copied


def _put_back(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    state.clear()
    state.update(saved)


def _method(layer: nn.Module) -> Any:
    """Returns the method that processes the weights of a layer, and may hold some; None without one."""
    method = getattr(layer, "quant_method", None)
    return method if hasattr(method, "__dict__") and not isinstance(method, nn.Module) else None
