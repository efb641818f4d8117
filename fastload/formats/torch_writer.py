"""A file as torch.save writes it, laid out before a byte of a tensor is there: pure, the same on every rank.

``torch.load(weights_only=True)`` reads it. Tensors are contiguous, each in a storage of its own.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import TensorEntry
from fastload.formats.state import leaves, rebuild
from fastload.formats.torch_save.unpickle import pickled_calls, unpickle

__all__ = ["Placed", "TorchLayout", "join_crcs", "lay_out_torch"]

_MOST_NAMES = 20
_ALIGNMENT = 64
_FULL_4 = 0xFFFFFFFF
_VERSION = 45  # of the zip format: with sizes of 64 bits
_EPOCH = 0x21  # the first of January 1980, before which zip knows no time
_LOCAL, _ENTRY = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64, _WIDE, _PADDING = struct.Struct("<4sLQL"), struct.Struct("<2H2Q"), struct.Struct("<2sH")
_TYPED = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
# Besides plain values and tensors.
_READ_BY_TORCH = {
    f"{kind.__module__}.{kind.__qualname__}" for kind in (OrderedDict, Counter, set, bytearray, complex)
} | {
    "torch.Size",
    "torch.device",
    "_codecs.encode",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
}


class Placed(NamedTuple):
    """A record of the file.

    Attributes:
        name: Its name.
        header: Where its local header begins.
        data: Where its data begin.
        nbytes: Their length.
    """

    name: str
    header: int
    data: int
    nbytes: int


@dataclass(frozen=True)
class TorchLayout:
    """What every byte of a file is.

    Attributes:
        small: The records that are no tensors, with what is in them.
        tensors: Those that are, by name of the tensor.
        nbytes: Length of the file up to its directory.
    """

    small: tuple[tuple[Placed, bytes], ...]
    tensors: Mapping[str, Placed]
    nbytes: int

    def frame(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """Yields all bytes that are not a tensor's, each with where it goes.

        Args:
            checksums: CRC-32 of each tensor's bytes, by its name.
        """
        sums = [(placed, crc32(content)) for placed, content in self.small]
        sums += [(placed, checksums[name]) for name, placed in self.tensors.items()]
        yield from ((placed.data, content) for placed, content in self.small)
        yield from ((placed.header, _local_header(placed, checksum)) for placed, checksum in sums)
        entries = [_entry(placed, checksum) for placed, checksum in sums]
        text = b"".join(entries)
        yield self.nbytes, text + _end(len(entries), self.nbytes, len(text))


def lay_out_torch(structure: Any, entries: Sequence[TensorEntry]) -> TorchLayout:
    """Lays a state out in a file.

    Args:
        structure: The state, as `fastload.formats.state` has it; None for a dict of the tensors by name.
        entries: The tensors that were stored.

    Raises:
        OptionError: Something in the state is not what ``torch.load(weights_only=True)`` reads.
    """
    arrays = [saved.name for saved in leaves(structure) if saved.kind == "ndarray"]
    if arrays:
        names = ", ".join(arrays[:_MOST_NAMES])
        what = f"{len(arrays)} NumPy arrays, which torch.load(weights_only=True) does not read"
        raise OptionError(f"the state holds {what}: {names}")
    stand_ins: dict[str, Tensor] = {}
    for entry in entries:
        dtype, shape = torch_spec(entry)
        stand_ins[entry.name] = torch.empty(shape, dtype=dtype, device="meta")
    state = rebuild(structure, stand_ins) if structure is not None else stand_ins
    keys = {stand_in.untyped_storage()._cdata: str(key) for key, stand_in in enumerate(stand_ins.values())}
    small, at = [], 0
    for name, content in (("data.pkl", _pickled(state, keys)), ("byteorder", b"little"), ("version", b"3\n")):
        placed = _place(name, at, len(content))
        small.append((placed, content))
        at = placed.data + placed.nbytes
    tensors = {}
    for key, entry in enumerate(entries):
        placed = tensors[entry.name] = _place(f"data/{key}", at, entry.nbytes)
        at = placed.data + placed.nbytes
    return TorchLayout(tuple(small), tensors, at)


class _Storage:
    """Stands in for a storage, until the pickler asks for its id."""

    def __init__(self, *fields: Any) -> None:
        self.fields = ("storage", *fields)


def _pickled(state: Any, keys: Mapping[int, str]) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.fields if type(value) is _Storage else None

        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return NotImplemented
            if isinstance(value, torch.nn.Parameter):
                return torch._utils._rebuild_parameter, (value.data, value.requires_grad, OrderedDict())
            key, shape, strides = keys[value.untyped_storage()._cdata], tuple(value.shape), value.stride()
            kind = _TYPED.get(value.dtype)
            about: tuple[Any, ...] = (0, shape, strides, value.requires_grad, OrderedDict())
            if kind is not None:
                storage = _Storage(kind, key, "cpu", value.numel())
                return torch._utils._rebuild_tensor_v2, (storage, *about)
            storage = _Storage(torch.UntypedStorage, key, "cpu", value.nbytes)
            return torch._utils._rebuild_tensor_v3, (storage, *about, value.dtype)

    file = io.BytesIO()
    Pickler(file, 2).dump(state)
    data = file.getvalue()
    for what in pickled_calls(unpickle(data, "what is to be saved")):
        if str(what) not in _READ_BY_TORCH:
            raise OptionError(f"the state holds {what}, which torch.load(weights_only=True) does not read")
    return data


# The archive


def _place(name: str, header: int, nbytes: int) -> Placed:
    """Places a record: the data are aligned as torch does it."""
    name = f"archive/{name}"
    least = header + _LOCAL.size + len(name) + _PADDING.size + (_WIDE.size if nbytes >= _FULL_4 else 0)
    return Placed(name, header, -(-least // _ALIGNMENT) * _ALIGNMENT, nbytes)


def _local_header(placed: Placed, checksum: int) -> bytes:
    wide = _WIDE.pack(1, 16, placed.nbytes, placed.nbytes) if placed.nbytes >= _FULL_4 else b""
    rest = placed.data - placed.header - _LOCAL.size - len(placed.name) - len(wide) - _PADDING.size
    extra = wide + _PADDING.pack(b"FB", rest) + b"Z" * rest
    size = min(placed.nbytes, _FULL_4)
    about = (_VERSION, 0, 0, 0, _EPOCH, checksum, size, size, len(placed.name), len(extra))
    return _LOCAL.pack(b"PK\3\4", *about) + placed.name.encode() + extra


def _entry(placed: Placed, checksum: int) -> bytes:
    is_wide = max(placed.nbytes, placed.header) >= _FULL_4
    extra = struct.pack("<2H3Q", 1, 24, placed.nbytes, placed.nbytes, placed.header) if is_wide else b""
    size, header = (_FULL_4, _FULL_4) if is_wide else (placed.nbytes, placed.header)
    about = (_VERSION, _VERSION, 0, 0, 0, _EPOCH, checksum, size, size, len(placed.name), len(extra))
    return _ENTRY.pack(b"PK\1\2", *about, 0, 0, 0, 0, header) + placed.name.encode() + extra


def _end(count: int, start: int, nbytes: int) -> bytes:
    """Returns what stands behind the directory: in 64 bits, and as far as they suffice in fewer."""
    wide = _END_64.pack(b"PK\6\6", _END_64.size - 12, _VERSION, _VERSION, 0, 0, count, count, nbytes, start)
    locator = _LOCATOR_64.pack(b"PK\6\7", 0, start + nbytes, 1)
    few, length, at = min(count, 0xFFFF), min(nbytes, _FULL_4), min(start, _FULL_4)
    return wide + locator + _END.pack(b"PK\5\6", 0, 0, few, few, length, at, 0)


# Checksums of what several ranks have written


def join_crcs(first: int, second: int, length: int) -> int:
    """Returns the CRC-32 of two runs of bytes, one behind the other.

    Args:
        first: That of the first run.
        second: That of the second.
        length: Of the second, in bytes.
    """
    return _apply(_zeros(length), first) ^ second


def _apply(matrix: Sequence[int], vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


@lru_cache(maxsize=1024)  # tensors are alike
def _zeros(length: int) -> tuple[int, ...]:
    """Returns what so many zero bytes do to a checksum, as a matrix over the field of two elements.

    Source: M. Adler's ``crc32_combine`` in zlib, by repeated squaring.
    """
    if length == 0:
        return tuple(1 << row for row in range(32))
    if length == 1:
        bit = (0xEDB88320, *(1 << row for row in range(31)))
        for _ in range(3):
            bit = tuple(_apply(bit, row) for row in bit)
        return bit
    half = _zeros(length // 2)
    whole = tuple(_apply(half, row) for row in half)
    return tuple(_apply(_zeros(1), row) for row in whole) if length % 2 else whole
