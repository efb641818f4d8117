"""SGLang: a model loader that has all ranks of an engine read a model once, together.

``sgl.Engine(model_path=…, load_format=FastloadModelLoader)``. Written against the interfaces that SGLang
publishes (a class as ``load_format``, `DefaultModelLoader`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastload.integrations.engines import Weights, options_of, path_of, require_loaded, sources_of

try:
    from sglang.srt.distributed import get_world_group
    from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import download_weights_from_hf
except ImportError as error:
    raise ImportError(
        f"FastloadModelLoader: SGLang is not installed, or has another interface: {error}"
    ) from error

__all__ = ["FastloadModelLoader"]


class FastloadModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads weights with fastload; ``model_loader_extra_config`` has fields of `fastload.LoadOptions`.

    Args:
        load_config: As SGLang passes it to a class that is its ``load_format``.
    """

    def __init__(self, load_config: Any) -> None:
        BaseModelLoader.__init__(self, load_config)  # the default one knows no options but its own
        self._options = options_of(load_config.model_loader_extra_config)
        self._weights: Weights | None = None

    def download_model(self, model_config: Any) -> None:
        """Downloads what is neither a directory nor a URL."""
        self._path(model_config.model_path, model_config.revision)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Makes the model and has it take its weights, as the default loader does.

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
        first = self._path(model_config.model_path, model_config.revision)
        sources = sources_of(model, self._path, first)
        self._weights = Weights(sources, model, get_world_group(), self._options)
        if not getattr(model_config, "is_draft_model", False):  # which gets some of the target model's
            _check_loaded(model, model_config)
        return self._weights

    def _close(self, error: BaseException | None) -> None:
        if self._weights is not None:
            self._weights.__exit__(type(error) if error is not None else None, error, None)
            self._weights = None

    def _path(self, model: str, revision: str | None) -> str:
        return path_of(model, revision, self.load_config, download_weights_from_hf)


def _check_loaded(model: Any, model_config: Any) -> None:
    """Has a model's next `load_weights` check what it loaded; the default loader drops what it returns."""

    def load_weights(weights: Any) -> Any:
        del model.load_weights  # this one, which hides the model's own
        loaded = model.load_weights(weights)
        require_loaded(model, loaded, model_config)
        return loaded

    model.load_weights = load_weights
