"""Finds the format of a path, and reads its manifest.

The names of the files tell the format of a directory, the first bytes that of a single file. If no built-in
format fits, those of extensions are asked (`Format`). A built-in format is a module of this package or of
``fastload.ext.formats``, imported if it fits. It has some of::

    read_folder(storage, names, exact=…)      the manifest of a directory
    read_file(storage, name, stat, exact=…)   the manifest of a single file
    header_digest(storage, name, nbytes)      the `FileEntry.header_digest` of a file
    record_digest(storage)                    the `Manifest.record_digest` of a directory
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from fastload.base.registry import extension, extension_module, extensions
from fastload.errors import CheckpointNotFound, ManifestError, OptionError, StorageError
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
    ZIP_STARTS,
    metadata_names,
)
from fastload.formats.reading import do_at_once, read_bytes
from fastload.formats.record import is_recorded
from fastload.formats.safetensors import reader as safetensors
from fastload.formats.safetensors.header import LENGTH_BYTES
from fastload.formats.untrusted import show
from fastload.storage import FileStat, FileWithSibling, Storage

_log = logging.getLogger(__name__)

_KIND = "formats"  # of extensions
_STEPS = "step_"  # begins the names of a run's checkpoints
_EXTENSION = ""
_FOLDER_FORMATS: tuple[tuple[Callable[[Sequence[str]], bool], str], ...] = (  # the first that fits is used
    (is_recorded, "record"),
    (lambda names: bool(metadata_names(names)), "dcp.reader"),
    (
        # Files of the items and ranks of torch_checkpointing, which may look like those of a model.
        lambda names: SHARDING_NAME in names and not {INDEX_NAME, f"model{SUFFIX}"}.intersection(names),
        _EXTENSION,
    ),
    (safetensors.has_files, "safetensors.reader"),
    (
        lambda names: any(name in (BIN_NAME, BIN_INDEX_NAME) or BIN_SHARD.fullmatch(name) for name in names),
        "torch_save.folder",
    ),
)
_OWN_MODULES = ("record", "safetensors.reader")  # the others are those of an extension
_OWN_RECORD = RECORD_NAME, "record"
_RECORDS = {"dcp": (METADATA_NAME, "dcp.reader")}
_BUILT_IN = ("fastload", "safetensors", "torch", "dcp")  # `Manifest.format`
_SAFETENSORS_HEAD = bytes(LENGTH_BYTES) + b"{"
_FILE_FORMATS = ((ZIP_STARTS, "torch_save.zip_file"), (LEGACY_STARTS, "torch_save.legacy_file"))


class Format(Protocol):
    """A format of checkpoints: an object, or a module with these names."""

    record: str
    """The file that describes the others, of which `Manifest.record_digest` is; empty if there is none."""

    def recognises(self, files: Sequence[str] | None, head: bytes) -> bool:
        """Returns whether a path is of this format, without reading more of it.

        Args:
            files: The names of the files of a directory; None of a single file.
            head: The first bytes of a single file, at most 16; else empty.
        """

    def read(self, storage: Storage, files: Sequence[str] | None, *, exact: bool) -> Manifest:
        """Reads the headers.

        Args:
            storage: The directory, or the file, whose name is empty.
            files: As for `recognises`.
            exact: Whether to read every layout, instead of inferring some and adding guards.

        Returns:
            The manifest, with the tensors in the order of their bytes.

        Raises:
            ManifestError: A file is malformed.
        """

    def digest(self, storage: Storage, name: str) -> str:
        """Returns what ranks compare of their copies of a file; empty if it is malformed.

        Args:
            storage: As for `read`.
            name: The record, of which this is `Manifest.record_digest`; or without a record one of the
                files, of which it is `FileEntry.header_digest`.
        """


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
    return Sight.CHECKPOINT if _folder_reader(storage, names) is not None else Sight.DIRECTORY


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
        read = _folder_reader(storage, names)
        if read is None:
            raise CheckpointNotFound(f"{storage.url}: {_run_here(storage) or _without_files(names)}")
        manifest = read(exact=exact)
        if sealed and SEAL_NAME in names and not manifest.block_bytes:
            manifest = layer(SEAL, storage.url).read(storage, manifest, partial(read, exact=True))
        return manifest
    files = ["", SEAL_NAME] if sealed and isinstance(storage, FileWithSibling) else [""]
    stat, *seals = do_at_once(storage, [partial(storage.stat, name) for name in files])
    if stat is None:
        raise CheckpointNotFound(f"{storage.url}: {_run_here(storage) or 'no such checkpoint'}")
    read = _file_reader(storage, stat)
    manifest = read(exact=exact)
    if any(seals):
        manifest = layer(SEAL, storage.url).read(storage, manifest, partial(read, exact=True))
    return manifest


def _folder_reader(storage: Storage, names: Sequence[str]) -> Callable[..., Manifest] | None:
    """Returns the function that reads a directory, given `exact`; None if no format fits."""
    module = next((module for fits, module in _FOLDER_FORMATS if fits(names)), _EXTENSION)
    if module != _EXTENSION:
        return partial(_read_folder, module, storage, names)
    return _extension_reader(storage, names, b"")


def _read_folder(module: str, storage: Storage, names: Sequence[str], *, exact: bool) -> Manifest:
    return _module(module).read_folder(storage, names, exact=exact)  # type: ignore[no-any-return]


def _file_reader(storage: Storage, stat: FileStat) -> Callable[..., Manifest]:
    """Returns the function that reads a single file, given `exact`."""
    head = _head(storage, "", stat.nbytes)
    if (file_format := _file_format(head)) is None:
        return _extension_reader(storage, None, head) or partial(_read_unknown, storage, stat)
    return partial(file_format.read_file, storage, "", stat)


def _extension_reader(
    storage: Storage, names: Sequence[str] | None, head: bytes
) -> Callable[..., Manifest] | None:
    """Asks the formats of extensions one after the other; see `Format.recognises`.

    Returns:
        The function that reads the path, given `exact`; None if none of them recognises it.

    Raises:
        OptionError: One does that has the name of a built-in format, for which others would take it.
    """
    for name, known in extensions(_KIND).items():
        try:
            reader: Format = known.load()
        except OptionError as error:  # which the others do not need
            _log.warning("%s", error)
            continue
        if reader.recognises(names, head):
            if name in _BUILT_IN:
                message = f"{storage.url}: another package has a format {name!r}, as fastload itself"
                raise OptionError(message)
            return partial(_read_as, name, reader, storage, names)
    return None


def _read_as(
    name: str, reader: Format, storage: Storage, names: Sequence[str] | None, *, exact: bool
) -> Manifest:
    manifest = reader.read(storage, names, exact=exact)
    return manifest if manifest.format == name else replace(manifest, format=name)


def _read_unknown(storage: Storage, stat: FileStat, exact: bool) -> Manifest:
    """Reads a file that no format recognises: says why it is none of safetensors."""
    try:
        return safetensors.read_file(storage, "", stat, exact=exact)
    except ManifestError as error:
        raise ManifestError(f"{error}; it is none for {asked_formats()} either") from None


def record_name(manifest: Manifest) -> str:
    """Returns the name of the file of which `Manifest.record_digest` is.

    Raises:
        OptionError: The format of the manifest, which another rank has read, is not installed here.
    """
    if manifest.format not in _BUILT_IN:
        return format_named(manifest.format).record
    return _RECORDS.get(manifest.format, _OWN_RECORD)[0]


def digest_of(storage: Storage, manifest: Manifest, name: str) -> str:
    """Returns what the ranks compare of a file, as this one sees it.

    Args:
        storage: The checkpoint on this rank.
        manifest: Its manifest.
        name: The record, of which this is the `Manifest.record_digest`; else a file, of which it is the
            `FileEntry.header_digest`. Empty if it is missing or malformed.

    Raises:
        StorageError: Storage failed.
    """
    if manifest.format not in _BUILT_IN:
        return format_named(manifest.format).digest(storage, name)
    record, module = _RECORDS.get(manifest.format, _OWN_RECORD)
    return file_digest(storage, name) if name != record else str(_module(module).record_digest(storage))


def file_digest(storage: Storage, name: str) -> str:
    """Returns the `header_digest` of a file of a built-in format."""
    if (stat := storage.stat(name)) is None:
        return ""
    file_format = _file_format(_head(storage, name, stat.nbytes)) or safetensors
    try:
        return str(file_format.header_digest(storage, name, stat.nbytes))
    except ManifestError:
        return ""


def _head(storage: Storage, name: str, nbytes: int) -> bytes:
    """Returns the first bytes of a file, which tell its format; of safetensors, as its name tells it."""
    if (name or storage.url).endswith(SUFFIX):  # saves a request
        return _SAFETENSORS_HEAD
    return read_bytes(storage, name, 0, min(nbytes, START_BYTES))


def _file_format(head: bytes) -> Any:
    """Returns the built-in format of files that begin like this, if any."""
    for starts, module in _FILE_FORMATS:
        if head.startswith(starts):
            return _module(module)
    return safetensors if head[LENGTH_BYTES:].startswith(b"{") else None


def _module(name: str) -> Any:
    if name in _OWN_MODULES:
        return import_module(f"fastload.formats.{name}")
    return extension_module(f"formats.{name}")


def _run_here(storage: Storage) -> str:
    """Returns what to do with the directory of a `CheckpointManager`; empty if there are no steps in it."""
    try:
        folders = storage.folders(_STEPS)
    except StorageError:  # storage without listings
        return ""
    steps = [name for name, folder in folders.items() if RECORD_NAME in folder.files]
    if not steps:
        return ""
    last = max(steps, key=lambda name: (len(name), name))
    return f"this is a run: name a checkpoint in it, such as {last}; fastload ls lists them"


def _without_files(names: Sequence[str]) -> str:
    listing = f"its {len(names)} files are {show(sorted(names))}" if names else "it has no files"
    if any(name.endswith(TORCH_ENDINGS) for name in names):
        listing += ": to load a file of torch.save, name it"
    elif "latest" in names:
        listing += ": to load a checkpoint below it, name the directory of a step"
    if SHARDING_NAME in names:  # parts of tensors, which may look like complete ones
        return f"its {SHARDING_NAME} is for none of {asked_formats()}; {listing}"
    return f"no *{SUFFIX} files in this directory, and none for {asked_formats()}; {listing}"


def format_named(name: str) -> Format:
    """Returns the format of a manifest that another rank has read.

    Raises:
        OptionError: It is not installed here, or cannot be imported.
    """
    reader: Format = extension(_KIND, name, f"a checkpoint of format {name!r}")
    return reader


def asked_formats() -> str:
    """Returns which formats are asked that are not built in, for messages."""
    return f"the formats of extensions ({', '.join(extensions(_KIND)) or 'none is installed'})"
