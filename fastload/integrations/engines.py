"""What the loaders of inference engines share: paths of weights, and weights for a model."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import fastload
from fastload.errors import MismatchError, OptionError
from fastload.options import LoadOptions

__all__ = [
    "Extra",
    "ModelFiles",
    "Source",
    "Start",
    "Weights",
    "device_of",
    "extra_of",
    "require_loaded",
    "started_from",
]

_PATTERNS = ["*.safetensors"]


@dataclass(frozen=True)
class Start:
    """The checkpoint that a model was first loaded from.

    Attributes:
        model: The engine's name for it.
        names: Names of its weights.
    """

    model: str
    names: frozenset[str]


started_from: WeakKeyDictionary[nn.Module, Start] = WeakKeyDictionary()
"""The first checkpoint of each model of this process."""


@dataclass(frozen=True)
class Source:
    """A checkpoint with weights of a model.

    Attributes:
        path: A directory, a file or a URL.
        prefix: Added in front of each name.
    """

    path: str
    prefix: str = ""


@dataclass(frozen=True)
class Extra:
    """The extra config of an engine's loader.

    Attributes:
        options: How to load.
        weights: Path or URL of the weights; empty if they are with the config.
    """

    options: LoadOptions
    weights: str = ""


def extra_of(extra: Any) -> Extra:
    """Parses the extra config of an engine's loader.

    Args:
        extra: A dict with fields of `LoadOptions`, such as ``{"staging_bytes": "1GiB"}``, and ``weights``; or
            None.

    Raises:
        OptionError: It has other keys, or bad values.
    """
    given = dict(extra or {}) if isinstance(extra or {}, Mapping) else {str(extra): None}
    known = {field.name for field in fields(LoadOptions)} - {"on_report", "progress"} | {"weights"}
    if unknown := sorted(given.keys() - known):
        raise OptionError(
            f"model_loader_extra_config has {', '.join(unknown)}: fastload knows {', '.join(sorted(known))}"
        )
    weights = given.pop("weights", "")
    if not isinstance(weights, str):
        raise OptionError(f"model_loader_extra_config: weights={weights!r}: must be a path or a URL")
    return Extra(LoadOptions(**given), weights)


class ModelFiles:
    """The weights of an engine's models: where the extra config says, or in files that the engine downloads.

    Args:
        load_config: The engine's, with the extra config of its loader and the download directory.
        download: The engine's ``download_weights_from_hf``.

    Attributes:
        options: How to load.

    Raises:
        OptionError: The extra config has unknown keys, or bad values.
    """

    def __init__(self, load_config: Any, download: Callable[..., str]) -> None:
        extra = extra_of(load_config.model_loader_extra_config)
        self.options = extra.options
        self._weights = extra.weights
        self._load_config = load_config
        self._download = download

    def fetch(self, model: str, revision: str | None) -> None:
        """Downloads a model if need be, unless its weights are elsewhere."""
        if not self._weights:
            self.path(model, revision)

    def path(self, model: str, revision: str | None) -> str:
        """Returns the path or URL of a model, downloaded if need be.

        Args:
            model: Its name, path or URL.
            revision: The revision to download.
        """
        if "://" in model or os.path.exists(model):
            return model
        config = self._load_config
        return self._download(
            model, config.download_dir, _PATTERNS, revision, ignore_patterns=config.ignore_patterns
        )

    def sources(self, module: nn.Module, model: str, revision: str | None, *, is_first: bool) -> list[Source]:
        """Returns the sources of a model's weights, its ``secondary_weights`` included.

        Args:
            module: Each of its ``secondary_weights`` has a ``model_or_path``, a ``revision`` and a
                ``prefix``.
            model: As for `path`.
            revision: Likewise.
            is_first: Whether it is the engine's first model, whose weights the extra config may name.
        """
        sources = [Source(self._weights if is_first and self._weights else self.path(model, revision))]
        for one in getattr(module, "secondary_weights", ()):
            found, folder = self.path(one.model_or_path, one.revision), getattr(one, "subfolder", None)
            sources.append(Source(f"{found.rstrip('/')}/{folder}" if folder else found, one.prefix))
        return sources


def require_loaded(model: nn.Module, loaded: Any, model_config: Any) -> None:
    """Raises if the checkpoint lacks a parameter of a model, by the rule of vLLM's default loader.

    Models that do not report what they loaded are not checked, nor quantized ones: those have parameters
    that no checkpoint has, as layers with a ``process_weights_after_loading`` may.

    Args:
        model: The model.
        loaded: Names of the loaded parameters, as its ``load_weights`` returned them.
        model_config: The engine's, which says whether the model is quantized.

    Raises:
        MismatchError: It lacks some; names them.
    """
    if not isinstance(loaded, Set) or getattr(model_config, "quantization", None) is not None:
        return
    missing = {name for name, _ in model.named_parameters()} - loaded
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False) or hasattr(method, "process_weights_after_loading"):
            missing -= {f"{name}.{own}" if name else own for own, _ in module.named_parameters()}
    if missing:
        shown = ", ".join(sorted(missing)[:20]) + (", …" if len(missing) > 20 else "")
        what = f"the model has parameters that the checkpoint lacks: {shown}"
        raise MismatchError(what, missing=tuple(sorted(missing)))


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's parameters; that of meta tensors is the CPU."""
    devices = {parameter.device for parameter in model.parameters()}
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


class Weights(Iterator[tuple[str, Tensor]]):
    """The weights of all sources, on all ranks of a group; each byte is read once.

    Its context manager ends the load on all ranks if one fails.

    Args:
        sources: The checkpoints, opened one after the other.
        device: Device of the tensors.
        group: The engine's group of ranks, with ``cpu_group``, ``device_group`` and ``rank_in_group``.
        options: How to load.
        log: Receives a summary on the first rank.

    Attributes:
        names: Names of the weights returned so far.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        device: torch.device,
        group: Any,
        options: LoadOptions,
        log: logging.Logger,
    ) -> None:
        self._device = device
        self._is_first = group.rank_in_group == 0
        self._group = group.cpu_group if self._device.type == "cpu" else group.device_group
        self._sources = deque(sources)
        self._options = options
        self._log = log
        self._open = ExitStack()
        self._prefix = ""
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())
        self.names: set[str] = set()

    def __next__(self) -> tuple[str, Tensor]:
        while True:
            try:
                name, tensor = next(self._tensors)
            except StopIteration:
                self._open.close()
                if not self._sources:
                    raise
                self.open_next()
            else:
                name = self._prefix + name
                self.names.add(name)
                return name, tensor

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sources.clear()
        self._open.__exit__(kind, error, trace)

    def open_next(self) -> None:
        """Opens the next source. Call it first to find out whether the first source exists."""
        began, source = time.perf_counter(), self._sources.popleft()
        checkpoint = self._open.enter_context(
            fastload.open(source.path, process_group=self._group, options=self._options)
        )
        self._open.callback(self._log_report, checkpoint, began)
        self._prefix = source.prefix
        self._tensors = self._open.enter_context(checkpoint.tensors(device=self._device, borrow=True))

    def within(self) -> Iterator[tuple[str, Tensor]]:
        """Returns an iterator that holds the context while it runs. The first source is open by then."""
        self.open_next()

        def iterate() -> Iterator[tuple[str, Tensor]]:
            with self:
                yield from self

        return iterate()

    def _log_report(self, checkpoint: fastload.Checkpoint, began: float) -> None:
        report = checkpoint.report
        if report is None or not self._is_first:
            return
        seconds = time.perf_counter() - began
        self._log.info(
            "fastload: %s: %.3f GB in %.2f s (%.2f GB/s), read %.2f times from storage (%s: %s)",
            *(report.url, report.bytes_wanted / 1e9, seconds, report.bytes_wanted / 1e9 / max(seconds, 1e-9)),
            *(report.read_amplification, report.strategy, report.why),
        )
