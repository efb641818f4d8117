"""What is where: the manifest of a checkpoint. Pure data; every rank holds the same one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import xxhash

__all__ = ["FileEntry", "Manifest", "TensorEntry"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: Name below the checkpoint's root; empty when the root is the file itself.
        nbytes: Size of the whole file in bytes.
        version: What storage said identifies this very file (see `FileStat.version`).
        header_digest: xxh3-128 of the header bytes.
    """

    name: str
    nbytes: int
    version: str
    header_digest: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors name of the dtype, such as ``BF16``.
        shape: Shape in elements of that dtype.
        file: Index into `Manifest.files`.
        offset: First byte in that file.
        nbytes: Length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """Tensors and files of one checkpoint.

    Attributes:
        url: Where the checkpoint was found.
        files: In name order.
        tensors: In the order of their bytes: by file, offset, length, then name.
        metadata: Text the writer attached (``__metadata__`` of the headers, merged).
    """

    url: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Tensors by name, in the order of `tensors`."""
        return {entry.name: entry for entry in self.tensors}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.tensors)

    def digest(self) -> str:
        """xxh3-128 of everything but the url, the same on every rank that sees the same files."""
        columns = json.dumps(self._columns(), separators=(",", ":"), sort_keys=True)
        return xxhash.xxh3_128_hexdigest(columns.encode())

    def to_bytes(self) -> bytes:
        """Packs the manifest to be sent to the other ranks."""
        return zlib.compress(json.dumps([self.url, self._columns()]).encode(), level=1)

    @classmethod
    def from_bytes(cls, packed: bytes) -> Manifest:
        """Unpacks what `to_bytes` packed."""
        url, columns = json.loads(zlib.decompress(packed))
        return cls(
            url=url,
            files=tuple(FileEntry(*row) for row in columns["files"]),
            tensors=tuple(
                TensorEntry(name, dtype, tuple(shape), file, offset, nbytes)
                for name, dtype, shape, file, offset, nbytes in columns["tensors"]
            ),
            metadata=columns["metadata"],
        )

    def _columns(self) -> dict[str, object]:
        return {
            "files": [[f.name, f.nbytes, f.version, f.header_digest] for f in self.files],
            "tensors": [[t.name, t.dtype, t.shape, t.file, t.offset, t.nbytes] for t in self.tensors],
            "metadata": dict(self.metadata),
        }
