"""A tensor within its storage, as torch's pickles name it, and what they call dtypes and storages."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from fastload.errors import ManifestError
from fastload.formats.pickled import Global
from fastload.formats.untrusted import is_size, show

__all__ = ["DTYPES", "StorageRef", "StoredTensor"]

DTYPES = {Global("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype}
# torch names a storage after its dtype in C; "torch.storage" has the one that is nothing but bytes.
_STORAGE_DTYPES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
        "Untyped": torch.uint8,
        "_Untyped": torch.uint8,
        "QInt8": torch.qint8,  # these are refused later on, by their names
        "QUInt8": torch.quint8,
        "QInt32": torch.qint32,
        "QUInt4x2": torch.quint4x2,
        "QUInt2x4": torch.quint2x4,
    }.items()
}
_STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")


class StorageRef(NamedTuple):
    """A storage that a tensor lies in.

    Attributes:
        key: What its bytes are called.
        dtype: Of its elements; uint8 if it has only bytes.
        numel: Number of elements.
        offset: Of its first element in what has that key, in elements.
    """

    key: str
    dtype: torch.dtype
    numel: int
    offset: int = 0

    @classmethod
    def of(cls, persistent_id: Any, where: str) -> StorageRef:
        """Reads the persistent id of a storage.

        Args:
            persistent_id: As the pickle has it.
            where: What it is in, for messages.

        Raises:
            ManifestError: It is not that of a storage.
        """
        if type(persistent_id) is tuple and len(persistent_id) in (5, 6):
            name, kind, key, _, numel, *views = persistent_id
            is_known = type(kind) is Global and kind.module in _STORAGE_MODULES
            dtype = _STORAGE_DTYPES.get(kind.name) if is_known else None
            if name == "storage" and dtype is not None and type(key) is str and is_size(numel):
                if views in ([], [None]):
                    return cls(key, dtype, numel)
                if type(views[0]) is tuple and len(views[0]) == 3 and all(map(is_size, views[0][1:])):
                    _, offset, size = views[0]  # as torch once kept storages that were parts of others
                    if offset + size <= numel:
                        return cls(key, dtype, size, offset)
        raise ManifestError(f"{where}: {show(persistent_id)} is no storage")


class StoredTensor(NamedTuple):
    """A tensor, as a pickle describes it: within its storage, its elements at different places.

    Attributes:
        storage: What its bytes are called.
        dtype: Of its elements.
        offset: Of its first element in the storage, in elements.
        shape: In elements.
        strides: In elements.
        requires_grad: As it was.
        is_parameter: Whether it was a Parameter.
    """

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    is_parameter: bool = False

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return not prod(self.shape)
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Elements from its first to its last in the storage."""
        if not prod(self.shape):
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def shares_elements(self) -> bool:
        """Whether elements share memory in another way than by a stride of 0."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride:
                if stride <= reach:
                    return self.span > 0
                reach += (size - 1) * stride
        return False
