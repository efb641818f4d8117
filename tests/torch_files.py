"""Files of torch.save made by hand: any pickle, any records, and what is wrong with them."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch


class Call:
    """What a pickle is to call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self._made = function, args, state

    def __reduce__(self) -> Any:
        return self._made


class Stored:
    """A storage in place of itself."""

    def __init__(self, key: Any, numel: Any, kind: Any = torch.FloatStorage) -> None:
        self.id = ("storage", kind, key, "cpu", numel)


def tensor(
    shape: Any, strides: Any, offset: Any = 0, *, storage: Any = None, function: Any = None, more: Any = ()
) -> Call:
    """A tensor in a storage "0" of 100 floats, whatever is said of it."""
    function = function or torch._utils._rebuild_tensor_v2
    return Call(function, storage or Stored("0", 100), offset, shape, strides, False, OrderedDict(), *more)


def pickled(state: Any, protocol: int = 2) -> bytes:
    """A pickle as torch.save's."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.id if type(value) is Stored else None

    Pickler(file, protocol).dump(state)
    return file.getvalue()


def zipped(
    data: bytes,
    records: Mapping[str, bytes] | None = None,
    *,
    prefix: str = "archive/",
    order: bytes | None = b"little",
    method: int = zipfile.ZIP_STORED,
) -> bytes:
    """A file of a pickle and storages: by default one of 100 floats."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(f"{prefix}data.pkl", data)
        if order is not None:
            archive.writestr(f"{prefix}byteorder", order)
        for name, content in {"data/0": bytes(400), "version": b"3\n", **(records or {})}.items():
            archive.writestr(prefix + name, content)
    return file.getvalue()
