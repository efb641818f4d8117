"""vLLM: ``load_format="fastload"`` has all workers of an engine read a model once, together.

vLLM finds this by itself where fastload is installed, through the entry point group ``vllm.general_plugins``.
It also registers a backend of vLLM's weight transfer API; see `fastload.integrations.vllm_refresh`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from fastload.integrations.engines import (
    Source,
    Start,
    Weights,
    device_of,
    extra_of,
    path_of,
    require_loaded,
    sources_of,
    started_from,
)

__all__ = ["load_group", "register"]

_log = logging.getLogger(__name__)
_vllm_log = logging.getLogger("vllm.fastload")  # vLLM prints what is logged below its own name
_REFRESH = "fastload.integrations.vllm_refresh"


def register() -> None:
    """Makes ``load_format="fastload"`` known to vLLM; to be called once in each process, as plugins are.

    vLLM calls it at every start, whatever the load format is. So a vLLM with another interface gets a warning
    here, and an error only where this load format is asked for.
    """
    for what, make in (
        ("load_format='fastload'", _register_loader),
        ("backend 'fastload'", _register_backend),
    ):
        try:
            make()
        except Exception as error:  # vLLM lets none of them pass
            _log.warning("%s is not there: this vLLM has another interface: %s", what, error)


def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("fastload")  # type: ignore[untyped-decorator,unused-ignore]
    class FastloadModelLoader(BaseModelLoader):  # type: ignore[misc]
        """Loads weights with fastload.

        ``model_loader_extra_config`` has fields of `fastload.LoadOptions`, and ``weights``: where they are,
        if that is not where the config is.
        """

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._extra = extra_of(load_config.model_loader_extra_config)
            self._download = _of_vllm("model_executor.model_loader.weight_utils", "download_weights_from_hf")
            _of_vllm("distributed.parallel_state", "get_world_group")

        def download_model(self, model_config: Any) -> None:
            """Downloads what is neither a directory nor a URL."""
            if not self._extra.weights:
                self._path(_model(model_config), model_config.revision)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Has the model take its weights.

            Raises:
                MismatchError: The checkpoint lacks some.
            """
            sources = self._sources(model, model_config, at_start=not _is_draft(model_config))
            group = load_group(model_config, together=True)
            with Weights(sources, device_of(model), group, self._extra.options, _vllm_log) as weights:
                loaded = model.load_weights(weights)  # type: ignore[operator]
                require_loaded(model, loaded, model_config)
            started_from[model] = Start(_model(model_config), frozenset(weights.names))

        def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
            """Returns the weights that vLLM's ``reload_weights`` takes; the checkpoint is open by then."""
            start = started_from.get(model)
            at_start = start is not None and start.model == _model(model_config)
            sources = self._sources(model, model_config, at_start=at_start)
            group = load_group(model_config)
            weights = Weights(sources, device_of(model), group, self._extra.options, _vllm_log)
            weights.open_next()
            return _within(weights)

        def _sources(self, model: nn.Module, model_config: Any, *, at_start: bool) -> list[Source]:
            """Returns where weights are: the extra config says it of the model that the engine began with."""
            if at_start and self._extra.weights:
                first = self._extra.weights
            else:
                first = self._path(_model(model_config), model_config.revision)
            return sources_of(model, self._path, first)

        def _path(self, model: str, revision: str | None) -> str:
            return path_of(model, revision, self.load_config, self._download)


def _register_backend() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError:
        return  # an older vLLM has none of them
    if "fastload" not in Factory._registry:  # which has no other way to ask
        Factory.register_engine("fastload", _REFRESH, "FastloadWeightTransferEngine")


def load_group(model_config: Any, *, together: bool = False) -> Any:
    """Returns the group of workers that load a model at the same time.

    Args:
        model_config: The engine's, of this model.
        together: Whether all engines that share a world load it, as at their start.
    """
    state = import_module("vllm.distributed.parallel_state")
    if _is_draft(model_config):  # which only the last stage of a pipeline loads
        return state.get_tp_group()
    world = state.get_world_group()
    if together or world.world_size == _num_workers():
        return world
    try:
        return state.get_inner_dp_world_group()
    except (AssertionError, AttributeError):
        return state.get_tp_group()


def _num_workers() -> int:
    from vllm.config import get_current_vllm_config

    return int(get_current_vllm_config().parallel_config.world_size)


def _is_draft(model_config: Any) -> bool:
    return "draft" in (getattr(model_config, "runner", ""), getattr(model_config, "runner_type", ""))


def _within(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    with weights:
        yield from weights


def _of_vllm(module: str, name: str) -> Any:
    """Imports something of vLLM's.

    Raises:
        ImportError: This vLLM has not got it.
    """
    try:
        return getattr(import_module(f"vllm.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"load_format='fastload': this vLLM has another interface: {error}") from error


def _model(model_config: Any) -> str:
    """Returns where the weights are: not with the config, if that was copied out of an object store."""
    return getattr(model_config, "model_weights", "") or model_config.model
