"""Plain values as JSON: numbers, texts and the like, each restored exactly and with its type.

Values that JSON has (None, bool, finite floats, small integers, texts) are themselves. Any other value is an
object with one key, the *tag*, such as ``{"int": "0x20000000000000"}``. So an object is never a dict of the
state, and nothing has to be escaped.

JSON of a checkpoint is untrusted: `decode_value` raises `ValueError`, `TypeError` or `OverflowError` for
nodes that `encode_value` cannot make, and makes nothing larger than the text of the node.
"""

from __future__ import annotations

import base64
import importlib
import math
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import torch

from fastload.errors import CheckpointError

MAX_DEPTH = 100  # of containers in containers
BARE_NAME = "tensor"  # of a tensor without a path: the complete state
BYTES_IO = "io.BytesIO"  # marks the bytes of a `BytesIO` in states of DCP, in a tuple of both

_MAX_SAME_HASH = 256  # keys of one dict, each compared with all before it

_MAX_INT = 1 << 53  # smaller integers survive readers that parse every number as a double

# By `numpy.dtype.str`, without objects, texts, and dtypes whose bytes depend on the machine (longdouble).
NUMPY_DTYPES = {"|b1", "|i1", "|u1"} | {
    order + kind for order in "<>" for kind in "i2 i4 i8 u2 u4 u8 f2 f4 f8 c8 c16".split()
}

# The factories of a defaultdict by name.
FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, int, float, set)}

# The types of JSON values that are neither arrays nor objects.
SCALARS = frozenset({type(None), bool, int, float, str})

_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype
}


class NotPlain(TypeError):
    """A value is of a type that cannot be saved."""


class Unknown(ValueError):
    """A newer fastload or torch may know a value."""


def import_numpy() -> Any:
    """Returns NumPy.

    Raises:
        CheckpointError: It is not installed.
    """
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise CheckpointError(
            f"the checkpoint holds NumPy values, NumPy cannot be imported: {error}: pip install numpy"
        ) from None


def encode_value(value: Any) -> Any:
    """Returns a plain value as JSON.

    Raises:
        NotPlain: It is not a plain value.
    """
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.str in NUMPY_DTYPES:
        return {"numpy": [value.dtype.str, value.tobytes().hex()]}
    raise NotPlain(f"{type(value).__qualname__} is not a plain value")


def decode_value(node: Any) -> Any:
    """Returns the value that `encode_value` made JSON of.

    Raises:
        ValueError: The JSON is none of a plain value (also `TypeError` and `OverflowError`), or `Unknown`.
        CheckpointError: It needs NumPy, which is not installed.
    """
    if type(node) in SCALARS:
        return node
    if type(node) is not dict or len(node) != 1:
        raise ValueError("not a plain value")
    ((tag, payload),) = node.items()
    decode = _DECODERS.get(tag)
    if decode is None:
        raise Unknown(f"unknown tag {tag[:40]!r}: update fastload")
    return decode(payload)


def crowded(keys: Collection[Hashable]) -> str:
    """Returns why a dict or a set of some keys would take quadratic time to build; empty if it would not.

    Numbers, and tuples of numbers, can be chosen with equal hashes.
    """
    if len(keys) <= _MAX_SAME_HASH or max(Counter(map(hash, keys)).values()) <= _MAX_SAME_HASH:
        return ""
    return f"more than {_MAX_SAME_HASH} of its keys have the same hash"


def is_stateful(value: Any) -> bool:
    """Whether a value saves and restores itself, as torch's ``Stateful`` does; a class does not."""
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(map(callable, methods))


class Attribute(str):
    """A step of a path that is an attribute, not a key."""


def show_path(path: Iterable[Any]) -> str:
    """Returns a path as an expression, for messages."""
    steps = (f".{key}" if type(key) is Attribute else f"[{show_key(key)}]" for key in path)
    return "state" + "".join(steps)


def show_key(key: Any) -> str:
    """Returns a key for a message, shortened."""
    try:
        text = repr(key)
    except ValueError:  # an integer of very many digits
        text = key_text(key)
    return text if len(text) <= 200 else f"{text[:200]}..."


def tensor_name(prefix: str, key: Any) -> str:
    """Returns the name of a tensor under a key, given that of its container with a dot."""
    return prefix + (key if type(key) is str and key.isascii() else key_text(key))


def key_text(key: Any) -> str:
    """Returns a key as part of a tensor's name: valid Unicode, and the same in every process."""
    if type(key) is str:
        return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()
    if type(key) is int:
        return str(key) if abs(key) < 1 << 64 else hex(key)  # Python refuses very many decimal digits
    if type(key) is tuple:
        return f"({', '.join(map(key_text, key))})"
    return repr(key) if type(key) is bytes else str(key)


def num_chars(value: Any) -> int:
    """Returns an upper estimate of the characters of a plain value in JSON, or in a name."""
    if isinstance(value, str):
        return len(value) if value.isascii() else 6 * len(value)  # as \uXXXX
    if isinstance(value, bytes | bytearray):
        return 4 * len(value)  # as \xXX
    if type(value) is int:
        return value.bit_length() // 3
    if type(value) is tuple:
        return sum(map(num_chars, value))
    return 0


# From here on: type → JSON, then tag → value


def _same(value: Any) -> Any:
    return value


def _encode_int(value: int) -> Any:
    return value if -_MAX_INT < value < _MAX_INT else {"int": hex(value)}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates: JSON's own escapes may join two of them
        return {"str": value.encode("utf-8", "surrogatepass").hex()}
    return value


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): _same,
    bool: _same,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: lambda value: {"complex": [_encode_float(value.real), _encode_float(value.imag)]},
    bytes: lambda value: {"bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"bytearray": base64.b64encode(value).decode()},
    range: lambda value: {"range": [_encode_int(part) for part in (value.start, value.stop, value.step)]},
    slice: lambda value: {"slice": [encode_value(part) for part in (value.start, value.stop, value.step)]},
    torch.Size: lambda value: {"Size": [_encode_int(size) for size in value]},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
}


def _text(payload: Any, pattern: str) -> str:
    if type(payload) is not str or re.fullmatch(pattern, payload, re.ASCII) is None:
        raise ValueError(f"not of the form {pattern}")
    return payload


def list_of(payload: Any) -> list[Any]:
    """Returns a payload that has to be a list."""
    if type(payload) is not list:
        raise ValueError("not a list")
    return payload


def _decode_int(payload: Any) -> int:
    return int(_text(payload, r"-?0x[0-9a-f]+"), 16)


def _decode_float(payload: Any) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(_text(payload, r"[0-9a-f]{16}")))
    return float(value)


def _decode_complex(payload: Any) -> complex:
    real, imag = (_typed(part, float) for part in list_of(payload))
    return complex(real, imag)


def _decode_numpy(payload: Any) -> Any:
    dtype, data = list_of(payload)
    if dtype not in NUMPY_DTYPES:
        raise ValueError("not a number of NumPy")
    (value,) = import_numpy().frombuffer(bytes.fromhex(_text(data, r"([0-9a-f]{2})+")), dtype)
    return value


def _decode_base64(payload: Any) -> bytes:
    return base64.b64decode(_text(payload, r"[A-Za-z0-9+/]*={0,2}"), validate=True)


def _decode_range(payload: Any) -> range:
    start, stop, step = (_typed(part, int) for part in list_of(payload))
    return range(start, stop, step)


def _decode_slice(payload: Any) -> slice:
    start, stop, step = map(decode_value, list_of(payload))
    return slice(start, stop, step)


def _typed(node: Any, wanted: type) -> Any:
    value = decode_value(node)
    if type(value) is not wanted:
        raise ValueError(f"not of type {wanted.__name__}")
    return value


def _decode_dtype(payload: Any) -> torch.dtype:
    if payload not in _DTYPES:
        raise Unknown(
            f"torch {torch.__version__} has no such dtype as {payload[:40]!r}: it needs a newer torch"
        )
    return _DTYPES[payload]


def _decode_device(payload: Any) -> torch.device:
    try:
        return torch.device(_text(payload, r"[a-z]+(:[0-9]{1,3})?"))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "str": lambda payload: bytes.fromhex(_text(payload, r"([0-9a-f]{2})*")).decode("utf-8", "surrogatepass"),
    "complex": _decode_complex,
    "bytes": _decode_base64,
    "bytearray": lambda payload: bytearray(_decode_base64(payload)),
    "range": _decode_range,
    "slice": _decode_slice,
    "Size": lambda payload: torch.Size([_typed(size, int) for size in list_of(payload)]),
    "dtype": _decode_dtype,
    "device": _decode_device,
    "numpy": _decode_numpy,
}
