"""A format of another package: directories of ``.npy`` files, each a tensor."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from math import prod

import xxhash

from fastload import FileEntry, Manifest, ManifestError, Storage, TensorEntry
from fastload.formats.reading import read_bytes

ENDING = ".npy"
DTYPES = {"<f4": ("F32", 4), "<f8": ("F64", 8), "<i8": ("I64", 8)}


class NpyFormat:
    record = ""

    def recognises(self, files: Sequence[str] | None, head: bytes) -> bool:
        if files is None:
            return head.startswith(b"\x93NUMPY")
        return any(name.endswith(ENDING) for name in files)

    def read(self, storage: Storage, files: Sequence[str] | None, *, exact: bool) -> Manifest:
        found, tensors = [], []
        for name in [""] if files is None else sorted(name for name in files if name.endswith(ENDING)):
            stat = storage.stat(name)
            assert stat is not None
            header = self._header(storage, name)
            try:
                about = ast.literal_eval(header[10:].decode())
                dtype, size = DTYPES[about["descr"]]
                shape = tuple(map(int, about["shape"]))
            except (ValueError, SyntaxError, KeyError, TypeError) as error:
                raise ManifestError(f"{name}: {error!r}") from None
            if about["fortran_order"] or len(header) + prod(shape) * size != stat.nbytes:
                raise ManifestError(f"{name}: its data are in another order, or of another length")
            entry = FileEntry(name, stat.nbytes, stat.version, xxhash.xxh3_128_hexdigest(header))
            tensor_name = name.removesuffix(ENDING) or "array"
            tensors.append(
                TensorEntry(tensor_name, dtype, shape, len(found), len(header), prod(shape) * size)
            )
            found.append(entry)
        return Manifest(storage.url, tuple(found), tuple(tensors))

    def digest(self, storage: Storage, name: str) -> str:
        return xxhash.xxh3_128_hexdigest(self._header(storage, name))

    def _header(self, storage: Storage, name: str) -> bytes:
        start = read_bytes(storage, name, 0, 10)
        return start + read_bytes(storage, name, 10, int.from_bytes(start[8:], "little"))


npy = NpyFormat()
