"""Lays out a file of torch.save before its tensors are loaded. Pure, identical on all ranks.

``torch.load(weights_only=True)`` reads it. Tensors have no gaps, and each has a storage of its own.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fastload.errors import OptionError
from fastload.ext.formats.torch_save.archive import (
    ALIGNMENT,
    END,
    END_64,
    ENTRY,
    FULL_4,
    LOCAL,
    LOCATOR_64,
    PADDING,
    ZipRecord,
)
from fastload.ext.formats.torch_save.state import TYPED_STORAGES
from fastload.ext.formats.torch_save.unpickle import pickled_calls, unpickle
from fastload.formats.decoder import decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import TensorEntry
from fastload.formats.state import leaves
from fastload.geometry.box import row_major

_MOST_NAMES = 20
_WIDE = struct.Struct("<2H2Q")
_VERSION = 45  # of the zip format: with sizes of 64 bits
_EPOCH = 0x21  # the first of January 1980, before which zip knows no time
_TYPED = {dtype: getattr(torch, name) for name, dtype in TYPED_STORAGES.items()}
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


@dataclass(frozen=True)
class TorchLayout:
    """The layout of every byte of a file.

    Attributes:
        small: The records of everything but tensors, with their contents.
        tensors: The records of tensors, by name.
        nbytes: Length of the file up to its directory.
    """

    small: tuple[tuple[ZipRecord, bytes], ...]
    tensors: Mapping[str, ZipRecord]
    nbytes: int

    def frame(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """Yields the offsets and bytes of everything but tensors.

        Args:
            checksums: CRC-32 of each tensor's bytes, by its name.
        """
        yield from ((record.offset, content) for record, content in self.small)
        sums = [(record, crc32(content)) for record, content in self.small]
        sums += [(record, checksums[name]) for name, record in self.tensors.items()]
        yield from ((record.header, _local_header(record, checksum)) for record, checksum in sums)
        yield self.nbytes, _directory_text(sums, self.nbytes)


def lay_out_torch(
    structure: Any, entries: Sequence[TensorEntry], strides: Mapping[str, Sequence[int]]
) -> TorchLayout:
    """Returns the layout of a state in a file.

    Args:
        structure: The structure of the state; None for a dict of the tensors by name.
        entries: The tensors that were stored.
        strides: Strides of tensors without gaps, in elements, by name; the others are row-major.

    Raises:
        OptionError: ``torch.load(weights_only=True)`` does not read some value of the state.
    """
    arrays = [saved.name for saved in leaves(structure) if saved.kind == "ndarray"]
    if arrays:
        names = ", ".join(arrays[:_MOST_NAMES])
        what = f"{len(arrays)} NumPy arrays, which torch.load(weights_only=True) does not read"
        raise OptionError(f"the state holds {what}: {names}")
    stand_ins: dict[str, Tensor] = {}
    for entry in entries:
        dtype, shape = torch_spec(entry)
        of_entry = strides.get(entry.name, row_major(shape))
        stand_ins[entry.name] = torch.empty_strided(shape, of_entry, dtype=dtype, device="meta")
    state = decode_state(structure, stand_ins) if structure is not None else stand_ins
    keys = {stand_in.untyped_storage()._cdata: str(key) for key, stand_in in enumerate(stand_ins.values())}
    small, at = [], 0
    for name, content in (("data.pkl", _pickled(state, keys)), ("byteorder", b"little"), ("version", b"3\n")):
        record = _place(f"archive/{name}", at, len(content))
        small.append((record, content))
        at = record.offset + record.nbytes
    tensors = {}
    for key, entry in enumerate(entries):
        record = tensors[entry.name] = _place(f"archive/data/{key}", at, entry.nbytes)
        at = record.offset + record.nbytes
    return TorchLayout(tuple(small), tensors, at)


class _Storage:
    """A stand-in for a storage, which the pickler replaces by its id."""

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


def _place(name: str, header: int, nbytes: int) -> ZipRecord:
    """Returns a record at an offset, with its data aligned as by torch.

    Args:
        name: Its name.
        header: Where its local header begins.
        nbytes: Length of its data.
    """
    least = header + LOCAL.size + len(name) + PADDING.size + (_WIDE.size if nbytes >= FULL_4 else 0)
    return ZipRecord(name, header, -(-least // ALIGNMENT) * ALIGNMENT, nbytes)


def _local_header(record: ZipRecord, checksum: int) -> bytes:
    """Returns the bytes from `ZipRecord.header` to its data.

    Args:
        record: The record.
        checksum: CRC-32 of its data.
    """
    wide = _WIDE.pack(1, 16, record.nbytes, record.nbytes) if record.nbytes >= FULL_4 else b""
    rest = record.offset - record.header - LOCAL.size - len(record.name) - len(wide) - PADDING.size
    extra = wide + PADDING.pack(b"FB", rest) + b"Z" * rest
    size = min(record.nbytes, FULL_4)
    about = (_VERSION, 0, 0, 0, _EPOCH, checksum, size, size, len(record.name), len(extra))
    return LOCAL.pack(b"PK\3\4", *about) + record.name.encode() + extra


def _directory_text(checksums: Sequence[tuple[ZipRecord, int]], start: int) -> bytes:
    """Returns the central directory and the end records, those for 64 bits included.

    Args:
        checksums: All records, with the CRC-32 of their data.
        start: Where it begins in the archive.
    """
    text = b"".join(_directory_entry(record, checksum) for record, checksum in checksums)
    count, nbytes = len(checksums), len(text)
    wide = END_64.pack(b"PK\6\6", END_64.size - 12, _VERSION, _VERSION, 0, 0, count, count, nbytes, start)
    locator = LOCATOR_64.pack(b"PK\6\7", 0, start + nbytes, 1)
    few, length, at = min(count, 0xFFFF), min(nbytes, FULL_4), min(start, FULL_4)
    return text + wide + locator + END.pack(b"PK\5\6", 0, 0, few, few, length, at, 0)


def _directory_entry(record: ZipRecord, checksum: int) -> bytes:
    is_wide = max(record.nbytes, record.header) >= FULL_4
    extra = struct.pack("<2H3Q", 1, 24, record.nbytes, record.nbytes, record.header) if is_wide else b""
    size, header = (FULL_4, FULL_4) if is_wide else (record.nbytes, record.header)
    about = (_VERSION, _VERSION, 0, 0, 0, _EPOCH, checksum, size, size, len(record.name), len(extra))
    return ENTRY.pack(b"PK\1\2", *about, 0, 0, 0, 0, header) + record.name.encode() + extra


def join_crcs(first: int, second: int, length: int) -> int:
    """Returns the CRC-32 of two runs of bytes, one behind the other.

    Args:
        first: That of the first run.
        second: That of the second.
        length: Of the second, in bytes.
    """
    return _product(_power(8 * length), first) ^ second


@lru_cache(maxsize=1024)  # tensors are alike
def _power(exponent: int) -> int:
    """Returns a power of x modulo the polynomial of CRC-32, by repeated squaring.

    Source: M. Adler's ``crc32_combine`` in zlib.
    """
    if not exponent:
        return 1 << 31
    half = _power(exponent // 2)
    square = _product(half, half)
    return _product(square, 1 << 30) if exponent % 2 else square


def _product(one: int, other: int) -> int:
    """Returns the product of two polynomials modulo that of CRC-32; the highest bit is that of x^0."""
    total = 0
    for bit in range(31, -1, -1):
        if other >> bit & 1:
            total ^= one
        one = one >> 1 ^ (0xEDB88320 if one & 1 else 0)
    return total
