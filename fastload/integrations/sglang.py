"""SGLang: a model loader with which all ranks of an engine read a model once, together.

``sgl.Engine(model_path=…, load_format=FastloadModelLoader)``. Written against the interfaces that SGLang
publishes (a class as ``load_format``, `DefaultModelLoader`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastload.integrations.engines import ModelFiles, Source, Weights, device_of, require_loaded

try:
    from sglang.srt.distributed import get_world_group
    from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import download_weights_from_hf
except ImportError as error:
    raise ImportError(
        f"FastloadModelLoader: SGLang is not installed, or has another interface: {error}"
    ) from error

__all__ = ["FastloadModelLoader"]

_log = logging.getLogger(__name__)


class FastloadModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads weights with fastload.

    ``model_loader_extra_config`` takes fields of `fastload.LoadOptions`, and ``weights``: path or URL of the
    weights, if they are not with the config.

    Args:
        load_config: As SGLang passes it to the class given as ``load_format``.
    """

    def __init__(self, load_config: Any) -> None:
        BaseModelLoader.__init__(self, load_config)  # the default loader refuses other options
        self._files = ModelFiles(load_config, download_weights_from_hf)
        self._weights: Weights | None = None

    def download_model(self, model_config: Any) -> None:
        """Downloads the model, unless it is a directory or a URL."""
        self._files.fetch(model_config.model_path, model_config.revision)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Makes the model and loads its weights, as the default loader does.

        Raises:
            MismatchError: The checkpoint lacks some.
        """
        try:
            model: nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)
        return model

    def _get_all_weights(self, model_config: Any, model: nn.Module) -> Weights:
        is_draft = getattr(model_config, "is_draft_model", False)
        path, revision = model_config.model_path, model_config.revision
        sources = self._files.sources(model, path, revision, is_first=not is_draft)
        self._weights = Weights(sources, device_of(model), self._group, self._files.options, _log)
        if not is_draft:  # a draft gets some weights of the target model
            _check_loaded(model, model_config)
        return self._weights

    def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, Tensor]]:
        """Returns new weights for a running engine, in host memory."""
        found = Source(self._files.path(source.model_or_path, source.revision), source.prefix)
        return Weights([found], torch.device("cpu"), self._group, self._files.options, _log).within()

    @property
    def _group(self) -> Any:
        """SGLang's group for this load: one pipeline stage, if stages load on their own."""
        group = getattr(self.load_config, "load_group", None)
        return group if hasattr(group, "cpu_group") else get_world_group()

    def _close(self, error: BaseException | None) -> None:
        if self._weights is not None:
            self._weights.__exit__(type(error) if error is not None else None, error, None)
            self._weights = None


def _check_loaded(model: Any, model_config: Any) -> None:
    """Wraps the next `load_weights` of a model in a check, since the default loader drops its result."""

    def load_weights(weights: Any) -> Any:
        del model.load_weights  # this wrapper
        loaded = model.load_weights(weights)
        require_loaded(model, loaded, model_config)
        return loaded

    model.load_weights = load_weights
