"""Tensor subclasses by torch's protocol, ``__tensor_flatten__`` and ``__tensor_unflatten__``.

Their inner tensors are stored under the name of the outer one: ``exp_avg.codes``, ``exp_avg.scale``. All
else is JSON: the class, the context that it returns with its inner tensors, size and strides. Classes are
loaded by a closed list only, which `allow` extends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastload.base.tracebacks import short_tracebacks
from fastload.errors import OptionError
from fastload.formats.values import NotPlain, Unknown, decode_value, encode_value, list_of, show_key
from fastload.geometry.box import row_major
from fastload.geometry.dtensors import is_dtensor, local_of, local_parts, with_local

_HOW = "fastload.ext.subclasses.allow(…) adds a class to the list"

_QUANTIZATION, _COMMON = "torchao.quantization", "torchao.quantization.quantize_.common"
_MX = "torchao.prototype.mx_formats"
_FLOAT8, _TRAINING = "torchao.float8", "torchao.prototype.quantized_training"
# By package and name, since modules move between versions: the module to import it from, or the class itself.
_allowed: dict[str, str | type] = {
    "torchao.OptimState4bit": "torchao.optim.subclass_4bit",
    "torchao.OptimState8bit": "torchao.optim.subclass_8bit",
    "torchao.OptimStateFp8": "torchao.optim.subclass_fp8",
    "torchao.BitNetTrainingLinearWeight": _TRAINING,
    "torchao.Float8Tensor": _QUANTIZATION,
    "torchao.Int4PlainInt32Tensor": _QUANTIZATION,
    "torchao.Int4Tensor": _QUANTIZATION,
    "torchao.Int4TilePackedTo4dTensor": _QUANTIZATION,
    "torchao.Int8MixedPrecisionTrainingLinearWeight": _TRAINING,
    "torchao.Int8QuantizedTrainingLinearWeight": _TRAINING,
    "torchao.Int8Tensor": _QUANTIZATION,
    "torchao.IntxUnpackedToInt8Tensor": _QUANTIZATION,
    "torchao.MXTensor": f"{_MX}.mx_tensor",
    "torchao.NVFP4Tensor": f"{_MX}.nvfp4_tensor",
    "torchao.WeightWithDynamicFloat8CastTensor": f"{_FLOAT8}.fsdp_utils",
    # What these have as attributes.
    "torchao.Float8MMConfig": f"{_FLOAT8}.inference",
    "torchao.Int8MixedPrecisionTrainingConfig": _TRAINING,
    "torchao.KernelPreference": _COMMON,
    "torchao.LinearMMConfig": f"{_FLOAT8}.float8_training_tensor",
    "torchao.MappingType": _QUANTIZATION,
    "torchao.PerAxis": _QUANTIZATION,
    "torchao.PerGroup": _QUANTIZATION,
    "torchao.PerRow": _QUANTIZATION,
    "torchao.PerTensor": _QUANTIZATION,
    "torchao.QuantizeTensorToFloat8Kwargs": "torchao.quantization.quantize_.workflows",
    "torchao.QuantizeTensorToInt8Kwargs": "torchao.quantization.quantize_.workflows",
    "torchao.QuantizeTensorToMXKwargs": f"{_MX}.mx_tensor",
    "torchao.QuantizeTensorToNVFP4Kwargs": f"{_MX}.nvfp4_tensor",
    "torchao.ScaleCalculationMode": f"{_MX}.config",
    "torchao.ScaledMMConfig": f"{_FLOAT8}.float8_training_tensor",
}

# The inner tensors that all shards of a tensor have, and the classes with their own size in their context.
_REPLICATED = {"torchao.OptimState4bit": ("qmap",), "torchao.OptimState8bit": ("qmap",)}
_WITH_SIZE = {"torchao.OptimState4bit"}
# An inner tensor that is computed from the others before each step, and again where it is None.
_DERIVED = {
    "torchao.BitNetTrainingLinearWeight": "_precomputed_scale",
    "torchao.WeightWithDynamicFloat8CastTensor": "_precomputed_scale",
}

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "Size": torch.Size}
_LOCAL = "_local_tensor"

_Class = TypeVar("_Class", bound=type)


@short_tracebacks
def allow(kind: _Class) -> _Class:
    """Adds a class to those that a checkpoint may name; to be called before a save and before a load.

    The classes of torchao are on the list already. Also a class decorator::

        @fastload.ext.subclasses.allow
        class TwoPartTensor(torch.Tensor): ...

    Args:
        kind: A tensor subclass with ``__tensor_flatten__`` and ``__tensor_unflatten__``; or an enum, a
            dataclass or a named tuple that its context holds. Checkpoints name it by its package and its
            name, so both stay.

    Raises:
        OptionError: It is none of these, or another one of this name is on the list.
    """
    if not (isinstance(kind, type) and (issubclass(kind, Tensor | Enum) or _is_record(kind))):
        raise OptionError(f"{kind!r} is no tensor subclass, enum, dataclass or named tuple")
    name = _name_of(kind)
    if _allowed.setdefault(name, kind) is not kind:
        raise OptionError(f"another class called {name} is on the list")
    return kind


class _TensorSubclasses:
    """A `ValueCodec`."""

    def encode(self, value: Any) -> tuple[Any, Mapping[str, Any]] | None:
        is_sharded = isinstance(value, Tensor) and is_dtensor(value)
        local = getattr(value, _LOCAL) if is_sharded else value  # as it is: `detach` may make another one
        if not is_traceable_wrapper_subclass(local) or getattr(local, "is_nested", False):
            return None
        found = _name_on_list(type(local))
        names, context = local.__tensor_flatten__()
        parts = {name: getattr(local, name) for name in names if name != _DERIVED.get(found)}
        if is_sharded:
            parts = {name: _as_shard(value, local.shape, part, found, name) for name, part in parts.items()}
        kind = "Parameter" if isinstance(value, nn.Parameter) else "Tensor"
        header = {
            "class": found,
            "context": _encode(context, local.shape, found),
            "size": list(value.shape),
            "stride": list(value.stride()),
            "kind": f"{kind}+grad" if value.requires_grad else kind,
        }
        return header, parts

    def decode(self, header: Any, parts: Mapping[str, Any]) -> Any:
        try:
            found = _class_of(header["class"], Tensor)
            size, stride = torch.Size(_sizes(header["size"])), _sizes(header["stride"])
            if len(stride) != len(size):
                raise ValueError(f"{len(stride)} strides for {len(size)} dimensions")
            sharded = next((part for part in parts.values() if is_dtensor(part)), None)
            if sharded is None:
                context = _decode(header["context"], size)
                tensor = _require_size(found.__tensor_unflatten__(parts, context, size, stride), size)
            else:
                here = torch.Size(_size_of_shard(size, sharded))
                locals_ = {name: local_of(part) for name, part in parts.items()}
                context = _decode(header["context"], here)
                local = found.__tensor_unflatten__(locals_, context, here, row_major(here))
                tensor = _with_shard(sharded, _require_size(local, here), size, stride)
            kind, _, grad = header["kind"].partition("+")
            if kind == "Parameter":
                return nn.Parameter(tensor, requires_grad=bool(grad))
            return tensor.requires_grad_() if grad else tensor
        except ValueError:
            raise
        except Exception as error:  # of any type, with parts and a context that do not fit the class
            raise ValueError(f"{show_key(header)}: {type(error).__name__}: {error}") from None

    def shards(self, header: Any, shapes: Mapping[str, Sequence[int]], like: Tensor) -> Mapping[str, Tensor]:
        if type(header) is not dict or header.get("size") != list(like.shape):
            return {}
        local, found = local_of(like), {}
        for name, shape in shapes.items():
            if (size := _scaled(shape, like.shape, local.shape, like)) and not _is_whole(
                str(header.get("class")), name, shape
            ):
                stand_in = torch.empty((), device=local.device).expand(size)
                found[name] = with_local(like, stand_in, shape)
        return found

    def parts(self, value: Any, header: Any) -> Mapping[str, Any] | None:
        encoded = self.encode(value)
        if encoded is None or type(header) is not dict:
            return None
        own, parts = encoded
        if any(own[key] != header.get(key) for key in ("class", "context", "size")):
            return None
        if derived := _DERIVED.get(own["class"]):  # that of the values which are replaced
            setattr(getattr(value, _LOCAL) if is_dtensor(value) else value, derived, None)
        return parts


codec = _TensorSubclasses()


def _name_of(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def _name_on_list(kind: type) -> str:
    """Returns the name of a class.

    Raises:
        NotPlain: It is not on the list.
    """
    name = _name_of(kind)
    try:
        is_listed = _class_of(name, object) is kind
    except ValueError:
        is_listed = False
    if not is_listed:
        raise NotPlain(f"it is not on the list of classes that a checkpoint may name: {_HOW}")
    return name


def _class_of(name: Any, base: type) -> Any:
    """Returns a class on the list.

    Raises:
        ValueError: There is none of this name, or it cannot be imported.
    """
    found = _allowed.get(name) if type(name) is str else None
    if found is None:
        raise Unknown(f"the class {show_key(name)} is not on the list of those that are loaded: {_HOW}")
    if isinstance(found, str):
        try:
            found = getattr(import_module(found), name.partition(".")[2])
        except (ImportError, AttributeError) as error:
            raise Unknown(f"the class {name} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{name} is no {base.__name__}")
    return found


def _require_size(tensor: Tensor, size: torch.Size) -> Tensor:
    """Raises `ValueError` for a tensor of another size, such as that of its inner tensors."""
    if tensor.shape != size:
        raise ValueError(f"its size is {list(size)}, but that of its inner tensors {list(tensor.shape)}")
    return tensor


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _sizes(node: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in list_of(node)):
        raise ValueError("not sizes")
    return tuple(node)


# Shards: each inner tensor is cut as the outer one is


def _is_whole(found: str, name: str, shape: Sequence[int]) -> bool:
    """Whether each shard of a tensor has the same inner tensor."""
    return name in _REPLICATED.get(found, ()) or prod(shape) == 1


def _cut_dims(tensor: Any) -> set[int]:
    return {placement.dim for placement in tensor.placements if not placement.is_replicate()}


def _scaled(
    shape: Sequence[int], outer: Sequence[int], other: Sequence[int], sharded: Tensor
) -> list[int] | None:
    """Returns the shape of an inner tensor when the outer one has another shape; None if that is unknown.

    An inner tensor has the dimensions along which the outer one is cut. Or it has one dimension, for blocks
    of the elements of the outer one, which is cut along its first dimension.

    Args:
        shape: Shape of the inner tensor, with
        outer: the shape of the outer one.
        other: The other shape of the outer one, such as that of a shard.
        sharded: The outer one, or one with its placements.
    """
    dims, numel = _cut_dims(sharded), prod(outer)
    if len(shape) > max(dims, default=-1) and all(shape[dim] == outer[dim] for dim in dims):
        return [other[dim] if dim in dims else size for dim, size in enumerate(shape)]
    if dims != {0} or len(shape) != 1 or not numel:
        return None
    length, rest = divmod(prod(other) * shape[0], numel)
    return None if rest else [length]


def _as_shard(value: Any, local: torch.Size, part: Tensor, found: str, name: str) -> Tensor:
    """Returns a DTensor whose shard is an inner tensor of the shard of another one.

    Raises:
        NotPlain: It is unknown how the inner tensor is cut.
    """
    if _is_whole(found, name, part.shape):
        return part
    shape = _scaled(part.shape, local, value.shape, value)
    if shape is not None:
        sharded: Tensor = with_local(value, part, shape)
        if local_parts(sharded):
            return sharded
    raise NotPlain(
        f"its inner tensor {name} of shape {list(part.shape)} is not cut as the shard {list(local)} of "
        f"{list(value.shape)} is: shard it evenly, along its first dimension"
    )


def _size_of_shard(size: Sequence[int], part: Tensor) -> list[int]:
    """Returns the shape of the shard of an outer tensor, given an inner one as a DTensor."""
    local, dims = local_of(part), _cut_dims(part)
    if part.dim() > max(dims, default=-1) and all(part.shape[dim] == size[dim] for dim in dims):
        return [local.shape[dim] if dim in dims else each for dim, each in enumerate(size)]
    return [size[0] * local.numel() // part.numel(), *size[1:]]


def _with_shard(like: Any, local: Tensor, size: torch.Size, stride: Sequence[int]) -> Any:
    """Returns a DTensor of a shard, which `DTensor.from_local` would replace by a view."""
    stand_in = with_local(
        like, torch.empty((), dtype=local.dtype, device=local.device).expand(local.shape), size
    )
    names, context = stand_in.__tensor_flatten__()
    inner = {name: getattr(stand_in, name) for name in names}
    return type(like).__tensor_unflatten__({**inner, _LOCAL: local}, context, size, stride)


# Contexts: plain values, in lists, tuples and dicts, with enums and records


def _encode(value: Any, size: torch.Size, found: str) -> Any:
    """Encodes a context, in which the size of the tensor stands for that of any shard of it."""
    kind = type(value)
    has_size = kind is torch.Size or (found in _WITH_SIZE and kind in _SEQUENCES.values())
    if has_size and tuple(value) == size:
        return {"size": kind.__name__}
    if kind is list or kind is tuple:
        return {kind.__name__: [_encode(member, size, found) for member in value]}
    if kind is dict:
        items = value.items()
        return {"dict": [[_encode(key, size, found), _encode(member, size, found)] for key, member in items]}
    if isinstance(value, Enum):
        return {"enum": [_name_on_list(kind), value.name]}
    if _is_record(kind):
        names = getattr(kind, "_fields", None) or [each.name for each in fields(value) if each.init]
        members = [[name, _encode(getattr(value, name), size, found)] for name in names]
        return {"record": [_name_on_list(kind), members]}
    return encode_value(value)


def _decode(node: Any, size: torch.Size) -> Any:
    if type(node) is not dict or len(node) != 1:
        return decode_value(node)
    ((tag, payload),) = node.items()
    if tag == "size":
        return _SEQUENCES[payload](size)
    if tag in ("list", "tuple"):
        return _SEQUENCES[tag](_decode(member, size) for member in list_of(payload))
    if tag == "dict":
        return {_decode(key, size): _decode(member, size) for key, member in list_of(payload)}
    if tag == "enum":
        name, member = list_of(payload)
        return _class_of(name, Enum).__members__[member]
    if tag == "record":
        name, members = list_of(payload)
        kind = _class_of(name, object)
        if not _is_record(kind):
            raise ValueError(f"{name} is no record")
        return kind(**{field: _decode(member, size) for field, member in list_of(members)})
    return decode_value(node)
