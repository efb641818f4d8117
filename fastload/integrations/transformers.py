"""transformers: `from_pretrained` on all ranks, which together read every byte once.

transformers makes the model, shards it, renames, converts, casts and ties its weights, all by itself. Only
where it would read a tensor, or a slice of one, it gets what the ranks have read together. Which slices those
are it says beforehand, in a rehearsal without data.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    world,
)
from fastload import open as open_checkpoint
from fastload.formats.dtypes import torch_spec
from fastload.integrations.host import refuse, require_layout, unknown

TESTED = "5.23"
try:
    from transformers import core_model_loading, modeling_utils
    from transformers.distributed import checkpoint as distributed_checkpoint
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils import logging as bars
except ImportError as error:
    raise unknown(transformers, TESTED, error) from None

__all__ = ["from_pretrained"]

_ADVICE = "use transformers' own from_pretrained"
_BY_NAME = ("safetensors", "fastload")  # formats in which tensors have the names that transformers looks for

_PreTrained = modeling_utils.PreTrainedModel
_SEAMS = {
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


def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    *arguments: Any,
    process_group: Any = None,
    options: LoadOptions | None = None,
    **keywords: Any,
) -> Any:
    """Does as ``model_class.from_pretrained`` on all ranks of a group; they read every byte of weights once.

    Every rank of the group has to call it, with the same arguments (devices may differ). Names, conversions,
    dtypes, tied weights and what is missing are as transformers has them. Of a model that is sharded
    (``distributed_config=``: tensor parallelism, FSDP2 and all that go with them) each rank gets its shards.

    Args:
        model_class: ``AutoModel``, ``AutoModelForCausalLM``, or the class of a model.
        path: A directory that all ranks see, or what is in the cache of the hub; safetensors, or files of
            ``torch.save``.
        arguments: Further ones of ``from_pretrained``.
        process_group: As for `fastload.load`.
        options: How to load; None for the defaults.
        keywords: Further ones of ``from_pretrained``.

    Returns:
        What ``from_pretrained`` returns.

    Raises:
        OptionError: This transformers is laid out in another way; or the model is one that it cannot load:
            quantized, with DeepSpeed's ZeRO 3, spread over several devices or to disk, from GGUF, or from a
            directory with shards of its ranks. No data have moved.
        PeerError: Some ranks failed, before data moved or while they did; with every cause.
        FastloadError: As for `fastload.load`.
    """
    call = _Call(os.fspath(path), process_group, options)
    call.agree("set-up", lambda: _require_loadable(call.path, keywords))
    with call.failing_together(), _reading_for(call):
        model = model_class.from_pretrained(path, *arguments, **keywords)
    call.agree("end", lambda: None)
    return model


@dataclass(frozen=True)
class _Call:
    """A call of `from_pretrained`.

    Attributes:
        path: Of the model.
        process_group: As for `fastload.load`.
        options: How to load; None for the defaults.
    """

    path: str
    process_group: Any
    options: LoadOptions | None

    def agree(self, step: str, work: Callable[[], Any]) -> None:
        """Does some work on all ranks; raises on all if it fails on one.

        Raises:
            FastloadError: It failed on some rank.
        """
        what = f"from_pretrained({self.path!r}): {step}"
        timeout_s = self.options.timeout_s if self.options is not None else LoadOptions().timeout_s
        world.agree(self.process_group, what, work, timeout_s=timeout_s)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Brings what only this rank raises to the next meeting of all, whichever that is."""
        try:
            yield
        except FastloadError:
            raise  # on all ranks
        except Exception as error:
            problem = error

            def fail() -> None:
                raise problem

            self.agree("transformers", fail)


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
    require_layout(transformers, TESTED, _SEAMS)
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
    """Has transformers ask here for the weights of a model; of calls that are not from here it reads them."""
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
    """Returns what stands for the weights in some files: this rank's slices of them, read by all ranks."""
    call.agree(f"{len(files)} files of weights", lambda: _require_plain(load_config))
    weights: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        checkpoints = _open(call, files, stack)
        for checkpoint in checkpoints:
            if checkpoint.manifest.format in _BY_NAME:
                weights |= {entry.name: _Asked(entry) for entry in checkpoint.manifest.tensors}
            else:
                weights |= checkpoint.load()

        def prepare() -> None:
            if any(isinstance(tensor, _Asked) for tensor in weights.values()):
                _rehearse(model, weights, load_config)
            for name, tensor in weights.items():
                weights[name] = _Delivered(tensor) if isinstance(tensor, _Asked) else tensor

        call.agree("rehearsal", prepare)
        for checkpoint in checkpoints:
            if checkpoint.manifest.format in _BY_NAME:
                lazy = {entry.name: weights[entry.name] for entry in checkpoint.manifest.tensors}
                boxes = {name: tensor.boxes for name, tensor in lazy.items() if tensor.boxes}
                checkpoint.read(boxes, cast=True)
                for tensor in lazy.values():
                    tensor.boxes.clear()  # what has been handed on is not to be kept
    return weights


def _require_plain(load_config: Any) -> None:
    if load_config.hf_quantizer is not None:
        raise OptionError(f"fastload cannot load a quantized model: {_ADVICE}")
    if "disk" in (load_config.device_map or {}).values():
        raise OptionError("fastload cannot load weights that are to stay on disk (device_map=)")


def _open(call: _Call, files: Sequence[str], stack: contextlib.ExitStack) -> list[Checkpoint]:
    """Opens some files: by their folder, where it has no others and perhaps checksums, or one by one."""

    def opened(path: str) -> Checkpoint:
        given: dict[str, Any] = {"process_group": call.process_group, "options": call.options}
        return stack.enter_context(open_checkpoint(path, **given))

    folder = os.path.dirname(files[0])
    with contextlib.suppress(CheckpointError):
        whole = opened(folder)
        if {os.path.join(folder, file.name) for file in whole.manifest.files} == set(files):
            return [whole]
    return [opened(file) for file in files]


def _rehearse(model: Any, weights: Mapping[str, Any], load_config: Any) -> None:
    """Has transformers ask for its slices, on the meta device and without anything coming of it."""
    had_bars = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        core_model_loading.convert_and_load_state_dict_in_model(
            model=_Onlooker(model),
            state_dict=weights,
            # Renamings remember what they have met.
            load_config=replace(load_config, weight_mapping=deepcopy(load_config.weight_mapping)),
            disk_offload_index=None,
        )
    finally:
        if had_bars:
            bars.enable_progress_bar()


class _Sink:
    """What a rehearsal takes for a module: it has nothing, so nothing is put there."""

    def __getattr__(self, name: str) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        """Does nothing."""


class _Onlooker(_Sink):
    """What a rehearsal takes for the model: it knows what the model knows, and nothing happens to it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_submodule(self, path: str) -> _Sink:
        """Returns where parameters of any module go."""
        return _Sink()


@dataclass
class _Want:
    """A slice of a tensor that transformers asks for, and where it puts it.

    Attributes:
        box: Which, in elements.
        dtype: Of what it puts there.
        device: Where.
    """

    box: Box
    dtype: torch.dtype
    device: torch.device | str | int = "cpu"


class _Lazy:
    """What stands for a tensor of the checkpoint, as a slice of safetensors does."""

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


class _Asked(_Lazy):
    """A tensor that notes what is asked of it."""

    def __init__(self, entry: TensorEntry) -> None:
        super().__init__(*torch_spec(entry))
        self.wants: list[_Want] = []

    def __getitem__(self, index: Any) -> Tensor:
        want = _Want(self._box(index), self.dtype)
        self.wants.append(want)
        return _Promise.of(want)


class _Promise(Tensor):
    """A slice on the meta device that notes where it is to go."""

    want: _Want
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, want: _Want) -> _Promise:
        """Returns one of such a slice."""
        promise = torch.empty(want.box.sizes, dtype=want.dtype, device="meta").as_subclass(cls)
        promise.want = want
        return promise

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Notes where it goes; returns a tensor without values."""
        self.want.device = self.want.device if device is None else device
        self.want.dtype = dtype or self.want.dtype
        return torch.empty(self.want.box.sizes, dtype=self.want.dtype, device="meta")


class _Delivered(_Lazy):
    """A tensor of which those slices are here that were asked for.

    Attributes:
        boxes: The slices, and memory for them.
    """

    def __init__(self, asked: _Asked) -> None:
        super().__init__(asked.dtype, asked.shape)
        self.boxes = [
            (want.box, torch.empty(want.box.sizes, dtype=want.dtype, device=want.device))
            for want in asked.wants
        ]
        self._left: dict[Box, deque[Tensor]] = defaultdict(deque)
        for box, tensor in self.boxes:
            self._left[box].append(tensor)

    def __getitem__(self, index: Any) -> Tensor:
        box = self._box(index)
        if not self._left[box]:
            raise AssertionError(f"transformers asks for {box}, as it did not when it rehearsed")
        return self._left[box].popleft()
