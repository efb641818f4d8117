"""transformers: `from_pretrained` on all ranks, which together read every byte once.

transformers makes and shards the model, and renames, converts, casts and ties its weights. fastload replaces
only its reads of tensors and slices. A dry run without data tells which slices each rank will read.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from fastload import (
    Box,
    Checkpoint,
    CheckpointError,
    FastloadError,
    LoadOptions,
    OptionError,
    TensorEntry,
)
from fastload import open as open_checkpoint
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.steps import Step
from fastload.formats.dtypes import torch_spec
from fastload.integrations.frameworks import refuse, require_signatures, step_of_all, unknown_version
from fastload.storage import name_of

TESTED = "5.23"
try:
    from transformers import core_model_loading, modeling_utils
    from transformers.distributed import checkpoint as distributed_checkpoint
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils import logging as bars
except ImportError as error:
    raise unknown_version(transformers, TESTED, error) from None

__all__ = ["from_pretrained"]

_ADVICE = "use transformers' own from_pretrained"
_BY_NAME = ("safetensors", "fastload")  # formats whose tensors have the names that transformers expects

_PreTrained = modeling_utils.PreTrainedModel
_SIGNATURES = {
    "PreTrainedModel._load_pretrained_model": (
        _PreTrained,
        "model state_dict checkpoint_files load_config expected_keys",
    ),
    "core_model_loading.convert_and_load_state_dict_in_model": (
        core_model_loading,
        "model state_dict load_config disk_offload_index",
    ),
    "core_model_loading.set_param_for_module": (
        core_model_loading,
        "model target_name param_value loading_info hf_quantizer",
    ),
    "distributed.checkpoint.get_distributed_checkpoint_dir": (
        distributed_checkpoint,
        "pretrained_model_name_or_path subfolder gguf_file state_dict",
    ),
}


@short_tracebacks
def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    *arguments: Any,
    process_group: Any = None,
    options: LoadOptions | None = None,
    **keywords: Any,
) -> Any:
    """Does as ``model_class.from_pretrained`` on all ranks of a group, which read every byte of weights once.

    Every rank of the group calls it with the same arguments (devices may differ). transformers handles names,
    conversions, dtypes, tied and missing weights as usual. Each rank gets its shards of a sharded model
    (``distributed_config=``: tensor parallelism, FSDP2 and combinations).

    Args:
        model_class: ``AutoModel``, ``AutoModelForCausalLM``, or the class of a model.
        path: A directory that all ranks see, or a model in the cache of the hub; safetensors, or files of
            ``torch.save``.
        arguments: Further ones of ``from_pretrained``.
        process_group: As for `fastload.load`.
        options: How to load; None for the defaults.
        keywords: Further ones of ``from_pretrained``.

    Returns:
        What ``from_pretrained`` returns.

    Raises:
        OptionError: fastload does not know this version of transformers, or cannot load such a model:
            quantized, with DeepSpeed's ZeRO 3, offloaded to several devices or to disk, from GGUF, or from a
            directory with the shards of each rank. No data has moved.
        PeerError: Some ranks failed; has every cause.
        FastloadError: As for `fastload.load`.
    """
    call = _Call(name_of(path), process_group, options)
    with call.step("set-up"):
        _require_loadable(os.fspath(path), keywords)
    with call.failing_together(), _reading_for(call):
        model = model_class.from_pretrained(path, *arguments, **keywords)
    with call.step("end"):
        pass
    return model


@dataclass(frozen=True)
class _Call:
    """A call of `from_pretrained`.

    Attributes:
        path: Of the model, as messages print it.
        process_group: As for `fastload.load`.
        options: How to load; None for the defaults.
    """

    path: str
    process_group: Any
    options: LoadOptions | None

    def step(self, name: str) -> contextlib.AbstractContextManager[Step]:
        """Returns the block of a step of all ranks."""
        what = f"from_pretrained({self.path!r}): {name}"
        return step_of_all(what, process_group=self.process_group, options=self.options)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Reports an error of this rank to the others in their next step, whichever that is."""
        try:
            yield
        except FastloadError:
            raise  # raised on all ranks
        except Exception:
            with self.step("transformers"):
                raise


_current: ContextVar[_Call | None] = ContextVar("_current", default=None)


@contextlib.contextmanager
def _reading_for(call: _Call) -> Iterator[None]:
    _divert()
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def _require_loadable(path: str, keywords: Mapping[str, Any]) -> None:
    require_signatures(transformers, TESTED, _SIGNATURES)
    if "://" in path:
        raise OptionError(f"{path}: transformers reads configurations from file systems; see fastload.stage")
    reasons = {
        "gguf_file": keywords.get("gguf_file") is not None,
        "quantization_config": keywords.get("quantization_config") is not None,
        "state_dict": keywords.get("state_dict") is not None,
        "DeepSpeed's ZeRO 3": is_deepspeed_zero3_enabled(),
    }
    refuse("load", reasons, _ADVICE)
    folder = distributed_checkpoint.get_distributed_checkpoint_dir(
        path, keywords.get("subfolder", ""), None, None
    )
    if folder is not None:
        raise OptionError(f"{folder} has shards of the ranks that saved it: {_ADVICE}")


@cache
def _divert() -> None:
    """Replaces the function of transformers that reads weights; other calls to it work as before."""
    own = _PreTrained._load_pretrained_model

    def load(
        model: Any,
        state_dict: Any,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> Any:
        call = _current.get()
        if call is None or checkpoint_files is None or state_dict is not None:
            return own(model, state_dict, checkpoint_files, load_config, expected_keys)
        weights = _load(call, model, checkpoint_files, load_config)
        return own(model, weights, None, load_config, expected_keys)

    _PreTrained._load_pretrained_model = staticmethod(load)


def _load(call: _Call, model: Any, files: Sequence[str], load_config: Any) -> dict[str, Any]:
    """Returns this rank's slices of the weights in some files, which all ranks read together."""
    with call.step(f"{len(files)} files of weights"):
        _require_plain(load_config)
    weights: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        checkpoints = _open(call, files, stack)
        for checkpoint in checkpoints:
            if checkpoint.manifest.format in _BY_NAME:
                weights |= {entry.name: _RecordingTensor(entry) for entry in checkpoint.manifest.tensors}
            else:
                weights |= checkpoint.load()
        with call.step("dry run"):
            recording = {name: each for name, each in weights.items() if isinstance(each, _RecordingTensor)}
            if recording:
                _dry_run(model, weights, load_config)
            weights |= {name: _LoadedSlices(tensor) for name, tensor in recording.items()}
        for checkpoint in checkpoints:
            if checkpoint.manifest.format in _BY_NAME:
                lazy = {entry.name: weights[entry.name] for entry in checkpoint.manifest.tensors}
                boxes = {name: tensor.boxes for name, tensor in lazy.items() if tensor.boxes}
                checkpoint.read(boxes, cast=True)
                for tensor in lazy.values():
                    tensor.boxes.clear()  # frees slices as soon as transformers drops them
    return weights


def _require_plain(load_config: Any) -> None:
    if load_config.hf_quantizer is not None:
        raise OptionError(f"fastload cannot load a quantized model: {_ADVICE}")
    if "disk" in (load_config.device_map or {}).values():
        raise OptionError("fastload cannot load weights that are to stay on disk (device_map=)")


def _open(call: _Call, files: Sequence[str], stack: contextlib.ExitStack) -> list[Checkpoint]:
    """Opens some files: their directory, which may have checksums, if it has no others; else one by one."""

    def opened(path: str) -> Checkpoint:
        given: dict[str, Any] = {"process_group": call.process_group, "options": call.options}
        return stack.enter_context(open_checkpoint(path, **given))

    folder = os.path.dirname(files[0])
    with contextlib.suppress(CheckpointError):
        checkpoint = opened(folder)
        if {os.path.join(folder, file.name) for file in checkpoint.manifest.files} == set(files):
            return [checkpoint]
    return [opened(file) for file in files]


def _dry_run(model: Any, weights: Mapping[str, Any], load_config: Any) -> None:
    """Records the slices that transformers requests, on the meta device, without changing the model."""
    had_bars = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        core_model_loading.convert_and_load_state_dict_in_model(
            model=_DryRunModel(model),
            state_dict=weights,
            # Renamings have state.
            load_config=replace(load_config, weight_mapping=deepcopy(load_config.weight_mapping)),
            disk_offload_index=None,
        )
    finally:
        if had_bars:
            bars.enable_progress_bar()


class _DryRunModule:
    """A module without parameters: a dry run sets none."""

    def __getattr__(self, name: str) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        """Does nothing."""


class _DryRunModel(_DryRunModule):
    """A model with the attributes of another one, which a dry run cannot change."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_submodule(self, path: str) -> _DryRunModule:
        """Returns a module without parameters."""
        return _DryRunModule()


@dataclass
class _SliceRequest:
    """A slice of a tensor that transformers requests.

    Attributes:
        box: The slice, in elements.
        dtype: The dtype that it is cast to.
        device: The device that it goes to.
    """

    box: Box
    dtype: torch.dtype
    device: torch.device | str | int = "cpu"


class _LazyTensor:
    """A tensor of the checkpoint, with the interface of a lazy slice of safetensors."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)

    def get_shape(self) -> list[int]:
        """Returns its shape."""
        return list(self.shape)

    def _box(self, index: Any) -> Box:
        given: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        slices: list[slice] = [each for each in given if each is not ...]
        parts = [*slices, *[slice(None)] * (len(self.shape) - len(slices))]
        spans = [range(size)[part] for part, size in zip(parts, self.shape, strict=True)]
        return Box(tuple(span.start for span in spans), tuple(map(len, spans)))


class _RecordingTensor(_LazyTensor):
    """A tensor that records the requested slices."""

    def __init__(self, entry: TensorEntry) -> None:
        super().__init__(*torch_spec(entry))
        self.requests: list[_SliceRequest] = []

    def __getitem__(self, index: Any) -> Tensor:
        request = _SliceRequest(self._box(index), self.dtype)
        self.requests.append(request)
        data = torch.empty(request.box.sizes, dtype=request.dtype, device="meta").as_subclass(_RecordingSlice)
        data.request = request
        return data


class _RecordingSlice(Tensor):
    """A slice on the meta device that records the dtype and the device it goes to."""

    request: _SliceRequest
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Records device and dtype; returns a tensor without values."""
        self.request.device = self.request.device if device is None else device
        self.request.dtype = dtype or self.request.dtype
        return torch.empty(self.request.box.sizes, dtype=self.request.dtype, device="meta")


class _LoadedSlices(_LazyTensor):
    """A tensor of which the recorded slices are loaded.

    Attributes:
        boxes: The slices, and memory for them.
    """

    def __init__(self, recorded: _RecordingTensor) -> None:
        super().__init__(recorded.dtype, recorded.shape)
        self.boxes = [
            (request.box, torch.empty(request.box.sizes, dtype=request.dtype, device=request.device))
            for request in recorded.requests
        ]
        self._left: dict[Box, deque[Tensor]] = defaultdict(deque)
        for box, tensor in self.boxes:
            self._left[box].append(tensor)

    def __getitem__(self, index: Any) -> Tensor:
        box = self._box(index)
        if not self._left[box]:
            raise AssertionError(f"transformers requests {box}, unlike in the dry run")
        return self._left[box].popleft()
