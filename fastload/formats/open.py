"""Finds the format of a path, and reads its manifest.

A format is a module or package in this one. The names of the files tell the format of a directory, the first
bytes that of a single file. Modules of formats are imported when they are needed. They have some of::

    read_folder(storage, names, exact=…)      the manifest of a directory
    read_file(storage, name, stat, exact=…)   the manifest of a single file
    header_digest(storage, name, nbytes)      the `FileEntry.header_digest` of a file
    record_digest(storage)                    the `Manifest.record_digest` of a directory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from importlib import import_module
from typing import Any

from fastload.errors import CheckpointNotFound, ManifestError
from fastload.formats.layers import SEAL, layer
from fastload.formats.manifest import Manifest
from fastload.formats.names import (
    BIN_INDEX_NAME,
    BIN_NAME,
    BIN_SHARD,
    INDEX_NAME,
    LEGACY_STARTS,
    METADATA_NAME,
    RECORD_NAME,
    SAVING_NAME,
    SEAL_NAME,
    SHARDING_NAME,
    START_BYTES,
    SUFFIX,
    TORCH_ENDINGS,
    ZERO_FILE,
    ZIP_STARTS,
    metadata_names,
)
from fastload.formats.reading import do_at_once, read_bytes
from fastload.formats.record import is_recorded
from fastload.formats.safetensors import reader as safetensors
from fastload.formats.untrusted import show
from fastload.storage import FileWithSibling, Storage

_FOLDER_FORMATS: tuple[tuple[Callable[[Sequence[str]], bool], str], ...] = (  # the first that fits is used
    (is_recorded, "record"),
    (lambda names: bool(metadata_names(names)), "dcp.reader"),
    (
        lambda names: SHARDING_NAME in names and not {INDEX_NAME, f"model{SUFFIX}"}.intersection(names),
        "torch_checkpointing",
    ),
    (safetensors.has_files, "safetensors.reader"),
    (lambda names: any(map(ZERO_FILE.fullmatch, names)), "deepspeed"),
    (
        lambda names: any(name in (BIN_NAME, BIN_INDEX_NAME) or BIN_SHARD.fullmatch(name) for name in names),
        "torch_save.folder",
    ),
)
_OWN_RECORD = RECORD_NAME, "record"
_RECORDS = {
    "dcp": (METADATA_NAME, "dcp.reader"),
    "torch_checkpointing": (SHARDING_NAME, "torch_checkpointing"),
}
_FILE_FORMATS = ((ZIP_STARTS, "torch_save.zip_file"), (LEGACY_STARTS, "torch_save.legacy_file"))


class Sight(IntEnum):
    """What a listing of a path shows. Higher values are better."""

    NOTHING = 0
    DIRECTORY = 1
    UNFINISHED = 2
    CHECKPOINT = 3


def look(storage: Storage) -> Sight:
    """Lists the root of a storage."""
    names = storage.list()
    if names is None:
        return Sight.NOTHING if storage.stat("") is None else Sight.CHECKPOINT
    if SAVING_NAME in names and RECORD_NAME not in names:
        return Sight.UNFINISHED
    return Sight.CHECKPOINT if any(fits(names) for fits, _ in _FOLDER_FORMATS) else Sight.DIRECTORY


def read_manifest(storage: Storage, *, exact: bool = False, sealed: bool = True) -> Manifest:
    """Reads the manifest of the checkpoint at the root of a storage.

    A directory with a commit record holds the files that the record names: other files are ignored, headers
    have to match their checksums, and the metadata are those of the record. Else the root is a single file,
    or a directory of files of one format, with checksums if there is a seal.

    Args:
        storage: The storage; its methods are called from several threads. Only headers are read.
        exact: Whether to read every layout, instead of inferring some and adding guards.
        sealed: Whether to use the seal, if there is one.

    Raises:
        CheckpointNotFound: There is nothing, or a directory without a checkpoint.
        IncompleteCheckpoint: Its save never finished, or files that its record names are missing.
        ManifestError: A header, the index or the commit record is malformed, or they contradict each other or
            the files.
        ChecksumError: The record, the seal or a header is damaged.
        StorageError: Storage failed.
    """
    names = storage.list()
    if names is not None:
        for fits, module in _FOLDER_FORMATS:
            if fits(names):
                manifest = _module(module).read_folder(storage, names, exact=exact)
                if sealed and SEAL_NAME in names and not manifest.block_bytes:
                    read_exactly = partial(_module(module).read_folder, storage, names, exact=True)
                    manifest = layer(SEAL, storage.url).read(storage, manifest, read_exactly)
                return manifest  # type: ignore[no-any-return]
        raise CheckpointNotFound(_without_files(storage.url, names))
    files = ["", SEAL_NAME] if sealed and isinstance(storage, FileWithSibling) else [""]
    stat, *seals = do_at_once(storage, [partial(storage.stat, name) for name in files])
    if stat is None:
        raise CheckpointNotFound(f"{storage.url}: no such checkpoint")
    file_format = _file_format(storage, "", stat.nbytes)
    manifest = file_format.read_file(storage, "", stat, exact=exact)
    if any(seals):
        read_exactly = partial(file_format.read_file, storage, "", stat, exact=True)
        manifest = layer(SEAL, storage.url).read(storage, manifest, read_exactly)
    return manifest  # type: ignore[no-any-return]


def record_digest(storage: Storage, manifest: Manifest) -> str:
    """Returns the `Manifest.record_digest` of a checkpoint on this rank; empty if it has none.

    Raises:
        StorageError: Storage failed.
    """
    _, module = _RECORDS.get(manifest.format, _OWN_RECORD)
    return _module(module).record_digest(storage)  # type: ignore[no-any-return]


def record_name(manifest: Manifest) -> str:
    """Returns the name of the file that `record_digest` is of."""
    return _RECORDS.get(manifest.format, _OWN_RECORD)[0]


def header_digest(storage: Storage, name: str, nbytes: int) -> str:
    """Returns the `FileEntry.header_digest` of a file on this rank; empty if it is malformed.

    Raises:
        StorageError: Storage failed.
    """
    try:
        return str(_file_format(storage, name, nbytes).header_digest(storage, name, nbytes))
    except ManifestError:
        return ""


def _file_format(storage: Storage, name: str, nbytes: int) -> Any:
    if not (name or storage.url).endswith(SUFFIX):  # only safetensors files have this name: saves a request
        head = read_bytes(storage, name, 0, min(nbytes, START_BYTES))
        for starts, module in _FILE_FORMATS:
            if head.startswith(starts):
                return _module(module)
    return safetensors


def _module(name: str) -> Any:
    return import_module(f"fastload.formats.{name}")


def _without_files(url: str, names: Sequence[str]) -> str:
    found = f"its {len(names)} files are {show(sorted(names))}" if names else "it has no files"
    if any(name.endswith(TORCH_ENDINGS) for name in names):
        found += ": to load a file of torch.save, name it"
    elif "latest" in names:
        found += ": to load a checkpoint of DeepSpeed, name the directory of a step"
    return f"{url}: no *{SUFFIX} files in this directory; {found}"
