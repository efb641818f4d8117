"""Tensor subclasses by torch's protocol, ``__tensor_flatten__`` and ``__tensor_unflatten__``.

Their inner tensors are stored under the name of the outer one: ``exp_avg.codes``, ``exp_avg.scale``. All
else is JSON: the class, the context that it returns with its inner tensors, size and strides. Classes are
loaded by a closed list only, which `allow` extends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastload.base.tracebacks import short_tracebacks
from fastload.errors import OptionError
from fastload.formats.values import NotPlain, Unknown, decode_value, encode_value, list_of, show_key

_HOW = "fastload.ext.subclasses.allow(…) adds a class to the list"

_QUANTIZATION, _COMMON = "torchao.quantization", "torchao.quantization.quantize_.common"
_MX = "torchao.prototype.mx_formats"
# By package and name, since modules move between versions: the module to import it from, or the class itself.
_allowed: dict[str, str | type] = {
    "torchao.OptimState4bit": "torchao.optim.subclass_4bit",
    "torchao.OptimState8bit": "torchao.optim.subclass_8bit",
    "torchao.OptimStateFp8": "torchao.optim.subclass_fp8",
    "torchao.Float8Tensor": _QUANTIZATION,
    "torchao.Int4PlainInt32Tensor": _QUANTIZATION,
    "torchao.Int4Tensor": _QUANTIZATION,
    "torchao.Int4TilePackedTo4dTensor": _QUANTIZATION,
    "torchao.Int8Tensor": _QUANTIZATION,
    "torchao.IntxUnpackedToInt8Tensor": _QUANTIZATION,
    "torchao.MXTensor": f"{_MX}.mx_tensor",
    "torchao.NVFP4Tensor": f"{_MX}.nvfp4_tensor",
    # What these have as attributes.
    "torchao.Float8MMConfig": "torchao.float8.inference",
    "torchao.KernelPreference": _COMMON,
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
}

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
        if not is_traceable_wrapper_subclass(value) or value.is_nested:
            return None
        names, context = value.__tensor_flatten__()
        kind = "Parameter" if isinstance(value, nn.Parameter) else "Tensor"
        header = {
            "class": _name_on_list(type(value)),
            "context": _encode(context),
            "size": list(value.shape),
            "stride": list(value.stride()),
            "kind": f"{kind}+grad" if value.requires_grad else kind,
        }
        return header, {name: getattr(value, name) for name in names}

    def decode(self, header: Any, parts: Mapping[str, Any]) -> Any:
        try:
            found = _class_of(header["class"], Tensor)
            size, stride = torch.Size(_sizes(header["size"])), _sizes(header["stride"])
            tensor = found.__tensor_unflatten__(parts, _decode(header["context"]), size, stride)
            kind, _, grad = header["kind"].partition("+")
            if kind == "Parameter":
                return nn.Parameter(tensor, requires_grad=bool(grad))
            return tensor.requires_grad_() if grad else tensor
        except ValueError:
            raise
        except Exception as error:  # of any type, with parts and a context that do not fit the class
            raise ValueError(f"{show_key(header)}: {type(error).__name__}: {error}") from None

    def parts(self, value: Any, header: Any) -> Mapping[str, Any] | None:
        encoded = self.encode(value)
        if encoded is None or type(header) is not dict:
            return None
        own, parts = encoded
        return parts if all(own[key] == header.get(key) for key in ("class", "context", "size")) else None


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
    if not issubclass(found, base):
        raise ValueError(f"{name} is no {base.__name__}")
    return found


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _sizes(node: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in list_of(node)):
        raise ValueError("not sizes")
    return tuple(node)


# Contexts: plain values, in lists, tuples and dicts, with enums and records


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return {kind.__name__: [_encode(member) for member in value]}
    if kind is dict:
        return {"dict": [[_encode(key), _encode(member)] for key, member in value.items()]}
    if isinstance(value, Enum):
        return {"enum": [_name_on_list(kind), value.name]}
    if _is_record(kind):
        names = getattr(kind, "_fields", None) or [each.name for each in fields(value) if each.init]
        return {"record": [_name_on_list(kind), [[name, _encode(getattr(value, name))] for name in names]]}
    return encode_value(value)


def _decode(node: Any) -> Any:
    if type(node) is not dict or len(node) != 1:
        return decode_value(node)
    ((tag, payload),) = node.items()
    if tag in ("list", "tuple"):
        return (list if tag == "list" else tuple)(map(_decode, list_of(payload)))
    if tag == "dict":
        return {_decode(key): _decode(member) for key, member in list_of(payload)}
    if tag == "enum":
        name, member = list_of(payload)
        return _class_of(name, Enum).__members__[member]
    if tag == "record":
        name, members = list_of(payload)
        kind = _class_of(name, object)
        if not _is_record(kind):
            raise ValueError(f"{name} is no record")
        return kind(**{field: _decode(member) for field, member in list_of(members)})
    return decode_value(node)
