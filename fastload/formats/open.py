"""Finds out which format a path has, and reads its manifest.

A format is a module or package next to this one. It tells by the names of files whether a directory is of its
kind, and reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from importlib import import_module
from typing import Any, NamedTuple

from fastload.errors import CheckpointNotFound
from fastload.formats.manifest import Manifest
from fastload.formats.names import (
    BIN_INDEX_NAME,
    BIN_NAME,
    RECORD_NAME,
    SAVING_NAME,
    SUFFIX,
    TORCH_ENDINGS,
    metadata_names,
)
from fastload.formats.reading import read_bytes
from fastload.formats.record import is_recorded
from fastload.formats.safetensors import reader as safetensors
from fastload.formats.untrusted import show
from fastload.storage.base import Storage


class FolderFormat(NamedTuple):
    """One kind of directories.

    Attributes:
        is_in: Whether a directory with files of these names is one.
        module: In this package; its ``read_folder(storage, names, exact=…)`` reads what is in it.
    """

    is_in: Callable[[Sequence[str]], bool]
    module: str


class FileFormat(NamedTuple):
    """One kind of single files.

    Attributes:
        starts: How they begin.
        module: In this package; its ``read_file(storage, name, stat, exact=…)`` reads what is in one, and its
            ``header_digest(storage, name, nbytes)`` returns its `FileEntry.header_digest`.
    """

    starts: tuple[bytes, ...]
    module: str


_FOLDER_FORMATS = (  # the first that knows a directory reads it
    FolderFormat(is_recorded, "record"),
    FolderFormat(lambda names: bool(metadata_names(names)), "dcp.reader"),
    FolderFormat(safetensors.has_files, "safetensors.reader"),
    FolderFormat(lambda names: BIN_NAME in names or BIN_INDEX_NAME in names, "torch_save.folder"),
)
_FILE_FORMATS = (
    FileFormat((b"PK\3\4", b"PK\5\6"), "torch_save.zip_file"),
    FileFormat((b"\x80\x02\x8a\nl\xfc\x9cF",), "torch_save.legacy_file"),
    FileFormat((b"",), "safetensors.reader"),
)
_HEAD_BYTES = 8


class Sight(IntEnum):
    """What a listing of a path shows; more is better."""

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
    return Sight.CHECKPOINT if any(kind.is_in(names) for kind in _FOLDER_FORMATS) else Sight.DIRECTORY


def read_manifest(storage: Storage, *, exact: bool = False) -> Manifest:
    """Finds and reads the checkpoint at the root of a storage.

    A directory with a commit record holds the files that the record names, and no others: neither an
    index nor any other file is looked at, the headers have to match their checksums, and the metadata
    is that of the record. Else the root is one file, of safetensors or of torch.save, or a directory of
    such files.

    Args:
        storage: Where to look; its methods are called from several threads. Of each file the header is
            read, nothing else.
        exact: Whether to read every layout, instead of inferring some and adding guards.

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
        for kind in _FOLDER_FORMATS:
            if kind.is_in(names):
                return _module(kind.module).read_folder(storage, names, exact=exact)  # type: ignore[no-any-return]
        raise CheckpointNotFound(_without_files(storage.url, names))
    stat = storage.stat("")
    if stat is None:
        raise CheckpointNotFound(f"{storage.url}: no such checkpoint")
    single = _file_format(storage, "", stat.nbytes)
    return _module(single.module).read_file(storage, "", stat, exact=exact)  # type: ignore[no-any-return]


def record_digest(storage: Storage, manifest: Manifest) -> str:
    """Returns the `Manifest.record_digest` of a checkpoint as it is on this rank; empty if it has none.

    Raises:
        StorageError: Storage failed.
    """
    module = "dcp.reader" if manifest.format == "dcp" else "record"
    return _module(module).record_digest(storage)  # type: ignore[no-any-return]


def header_digest(storage: Storage, name: str, nbytes: int) -> str:
    """Returns the `FileEntry.header_digest` of a file as it is on this rank; empty if it has none.

    Raises:
        StorageError: Storage failed.
    """
    kind = _file_format(storage, name, nbytes)
    return _module(kind.module).header_digest(storage, name, nbytes)  # type: ignore[no-any-return]


def _file_format(storage: Storage, name: str, nbytes: int) -> FileFormat:
    if (name or storage.url).endswith(SUFFIX):  # nothing else is called so, and a request is saved
        return _FILE_FORMATS[-1]
    head = read_bytes(storage, name, 0, min(nbytes, _HEAD_BYTES))
    return next(kind for kind in _FILE_FORMATS if head.startswith(kind.starts))


def _module(name: str) -> Any:
    return import_module(f"fastload.formats.{name}")


def _without_files(url: str, names: Sequence[str]) -> str:
    found = f"its {len(names)} files are {show(sorted(names))}" if names else "it has no files"
    if any(name.endswith(TORCH_ENDINGS) for name in names):
        found += ": to load a file of torch.save, name it"
    return f"{url}: no *{SUFFIX} files in this directory; {found}"
