"""vLLM: with ``load_format="fastload"`` all workers of an engine read a model once, together.

vLLM finds this module through the entry point group ``vllm.general_plugins``. It also registers a backend of
vLLM's weight transfer API; see `fastload.integrations.vllm_refresh`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from fastload.integrations.engines import (
    ModelFiles,
    Start,
    Weights,
    device_of,
    require_loaded,
    started_from,
)

__all__ = ["load_group", "register"]

_log = logging.getLogger(__name__)
_vllm_log = logging.getLogger("vllm.fastload")  # vLLM prints its own loggers
_REFRESH = "fastload.integrations.vllm_refresh"


def register() -> None:
    """Registers ``load_format="fastload"`` with vLLM, which calls this once in each process.

    vLLM calls it at every start, whatever the load format. So a vLLM with another interface gets a warning
    here, and an error only if this load format is requested.
    """
    for what, make in (
        ("load_format='fastload'", _register_loader),
        ("backend 'fastload'", _register_backend),
    ):
        try:
            make()
        except Exception as error:  # which would keep vLLM from starting
            _log.warning("%s is not there: this vLLM has another interface: %s", what, error)


def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("fastload")  # type: ignore[untyped-decorator,unused-ignore]
    class FastloadModelLoader(BaseModelLoader):  # type: ignore[misc]
        """Loads weights with fastload.

        ``model_loader_extra_config`` takes fields of `fastload.LoadOptions`, and ``weights``: path or URL of
        the weights, if they are not with the config.
        """

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            download = _of_vllm("model_executor.model_loader.weight_utils", "download_weights_from_hf")
            self._files = ModelFiles(load_config, download)
            _of_vllm("distributed.parallel_state", "get_world_group")

        def download_model(self, model_config: Any) -> None:
            """Downloads the model, unless it is a directory or a URL."""
            self._files.fetch(_model(model_config), model_config.revision)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Loads the weights into the model.

            Raises:
                MismatchError: The checkpoint lacks some.
            """
            group = load_group(model_config, together=True)
            with self._open(model, model_config, group, is_first=not _is_draft(model_config)) as weights:
                loaded = model.load_weights(weights)  # type: ignore[operator]
                require_loaded(model, loaded, model_config)
            started_from[model] = Start(_model(model_config), frozenset(weights.names))

        def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
            """Returns the weights for vLLM's ``reload_weights``, with the checkpoint open."""
            start = started_from.get(model)
            is_first = start is not None and start.model == _model(model_config)
            return self._open(model, model_config, load_group(model_config), is_first=is_first).within()

        def _open(self, model: nn.Module, model_config: Any, group: Any, *, is_first: bool) -> Weights:
            path, revision = _model(model_config), model_config.revision
            sources = self._files.sources(model, path, revision, is_first=is_first)
            return Weights(sources, device_of(model), group, self._files.options, _vllm_log)


def _register_backend() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError:
        return  # an older vLLM
    if "fastload" not in Factory._registry:  # there is no public way to ask
        Factory.register_engine("fastload", _REFRESH, "FastloadWeightTransferEngine")


def load_group(model_config: Any, *, together: bool = False) -> Any:
    """Returns the group of workers that load a model at the same time.

    Args:
        model_config: The engine's config of this model.
        together: Whether all engines that share a world load it, as when they start.
    """
    state = import_module("vllm.distributed.parallel_state")
    if _is_draft(model_config):  # only the last pipeline stage loads it
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


def _of_vllm(module: str, name: str) -> Any:
    """Imports a name of vLLM.

    Raises:
        ImportError: This vLLM does not have it.
    """
    try:
        return getattr(import_module(f"vllm.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"load_format='fastload': this vLLM has another interface: {error}") from error


def _model(model_config: Any) -> str:
    """Returns the location of the weights; vLLM copies only the config out of an object store."""
    return getattr(model_config, "model_weights", "") or model_config.model
