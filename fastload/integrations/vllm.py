"""vLLM: ``load_format="fastload"`` has all workers of an engine read a model once, together.

vLLM finds this by itself where fastload is installed, through the entry point group ``vllm.general_plugins``.
Written against the interfaces that vLLM publishes (`register_model_loader`, `BaseModelLoader`).
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from torch import nn

from fastload.integrations.engines import Weights, options_of, path_of, require_loaded, sources_of

__all__ = ["register"]

_log = logging.getLogger(__name__)


def register() -> None:
    """Makes ``load_format="fastload"`` known to vLLM; to be called once in each process, as plugins are.

    vLLM calls it at every start, whatever the load format is. So a vLLM with another interface gets a warning
    here, and an error only where this load format is asked for.
    """
    try:
        _register()
    except Exception as error:  # vLLM lets none of them pass
        _log.warning("load_format='fastload' is not there: this vLLM has another interface: %s", error)


def _register() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("fastload")  # type: ignore[untyped-decorator,unused-ignore]
    class FastloadModelLoader(BaseModelLoader):  # type: ignore[misc]
        """Loads weights with fastload; ``model_loader_extra_config`` has fields of `fastload.LoadOptions`."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._options = options_of(load_config.model_loader_extra_config)
            self._world = _of_vllm("distributed.parallel_state", "get_world_group")
            self._download = _of_vllm("model_executor.model_loader.weight_utils", "download_weights_from_hf")

        def download_model(self, model_config: Any) -> None:
            """Downloads what is neither a directory nor a URL."""
            self._path(_model(model_config), model_config.revision)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Has the model take its weights.

            Raises:
                MismatchError: The checkpoint lacks some.
            """
            first = self._path(_model(model_config), model_config.revision)
            sources = sources_of(model, self._path, first)
            with Weights(sources, model, self._world(), self._options) as weights:
                loaded = model.load_weights(weights)  # type: ignore[operator]
                require_loaded(model, loaded, model_config)

        def _path(self, model: str, revision: str | None) -> str:
            return path_of(model, revision, self.load_config, self._download)


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
