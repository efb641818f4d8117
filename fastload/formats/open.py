"""What is at a path? → its manifest. The one place that knows which formats there are.

A format is a module of this room that says by the names of files whether a directory is of its kind, and
reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from fastload.errors import CheckpointNotFound, ManifestError
from fastload.formats import recorded, safetensors
from fastload.formats.manifest import Manifest
from fastload.formats.names import RECORD_NAME, SAVING_NAME, SUFFIX, TORCH_ENDINGS
from fastload.formats.untrusted import show
from fastload.storage.base import Storage

__all__ = ["Sight", "is_torch_file", "look", "read_manifest"]


class Format(NamedTuple):
    """One kind of directories.

    Attributes:
        is_in: Whether a directory with files of these names is one.
        read: Reads what is in it, given its names.
    """

    is_in: Callable[[Sequence[str]], bool]
    read: Callable[[Storage, Sequence[str]], Manifest]


_FORMATS = (  # the first that knows a directory reads it
    Format(recorded.is_recorded, recorded.read_recorded),
    Format(safetensors.has_files, safetensors.read_folder),
)


class Sight(IntEnum):
    """What can be seen at a path, without reading it: more is better."""

    NOTHING = 0
    DIRECTORY = 1
    UNFINISHED = 2
    CHECKPOINT = 3


def look(storage: Storage) -> Sight:
    """Looks at what is at the root of a storage."""
    names = storage.list()
    if names is None:
        return Sight.NOTHING if storage.stat("") is None else Sight.CHECKPOINT
    if SAVING_NAME in names and RECORD_NAME not in names:
        return Sight.UNFINISHED
    return Sight.CHECKPOINT if any(kind.is_in(names) for kind in _FORMATS) else Sight.DIRECTORY


def read_manifest(storage: Storage) -> Manifest:
    """Finds and reads the checkpoint at the root of a storage.

    A directory with a commit record holds the files that the record names, and no others: neither an
    index nor any other file is looked at, the headers have to match their checksums, and the metadata
    is that of the record. Else the root is one safetensors file, or a directory of them.

    Args:
        storage: Where to look; its methods are called from several threads. Of each file the header is
            read, nothing else.

    Raises:
        CheckpointNotFound: There is nothing, or a directory without safetensors files.
        IncompleteCheckpoint: It was never saved to the end, or lacks files that its record names.
        ManifestError: A header, the index or the commit record is malformed, or they contradict each
            other or the files.
        ChecksumError: The record, or a header, is not as it was written.
        StorageError: Storage failed.
    """
    names = storage.list()
    if names is not None:
        for kind in _FORMATS:
            if kind.is_in(names):
                return kind.read(storage, names)
        raise CheckpointNotFound(_without_files(storage.url, names))
    stat = storage.stat("")
    if stat is None:
        raise CheckpointNotFound(f"{storage.url}: no such checkpoint")
    return safetensors.read_file(storage, stat)


def _without_files(url: str, names: Sequence[str]) -> str:
    found = f"its {len(names)} files are {show(sorted(names))}" if names else "it has no files"
    if any(name.endswith(TORCH_ENDINGS) for name in names):
        found += " (`fastload convert` reads files of torch.save)"
    return f"{url}: no *{SUFFIX} files in this directory; {found}"


def is_torch_file(storage: Storage) -> bool:
    """Whether the root of a storage is one file with a name as torch.save's files have.

    Raises:
        CheckpointNotFound: It has the name, but there is nothing.
        ManifestError: The file is empty.
    """
    if not storage.url.endswith(TORCH_ENDINGS) or storage.list() is not None:
        return False
    found = storage.stat("")
    if found is None:
        raise CheckpointNotFound(f"{storage.url}: no such file or directory")
    if not found.nbytes:
        raise ManifestError(f"{storage.url}: the file is empty")
    return True
