"""The checkpoints that a server has: complete ones below a path, and copies that are being made."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import xxhash

from fastload.errors import CheckpointError, CheckpointNotFound, FastloadError, StorageError, some_of
from fastload.formats.manifest import Manifest, is_single_file
from fastload.formats.names import (
    BIN_INDEX_NAME,
    INDEX_NAME,
    NAMES,
    RECORD_NAME,
    SEAL_NAME,
    SHARDING_NAME,
    SUFFIX,
    metadata_names,
)
from fastload.formats.open import read_manifest
from fastload.formats.sources import CopyInProgress
from fastload.options import Patience
from fastload.storage import FileStat, Folder, open_with_sibling
from fastload.storage.folders import os_errors
from fastload.storage.local import LocalStorage

_log = logging.getLogger(__name__)

_FRESH_S = 1.0
_PATIENCE = Patience()


def digest_of(manifest: Manifest) -> str:
    """Returns the digest that identifies a checkpoint, wherever it is: that of its commit record.

    Of a checkpoint of another program it covers what its seal has: files, headers, extents and checksums.
    """
    if manifest.format == "fastload":
        return manifest.record_digest
    files = [[file.name, file.nbytes, file.header_digest] for file in manifest.files]
    extents = [[extent.file, extent.offset, extent.nbytes] for extent in manifest.extents]
    digest = xxhash.xxh3_128(json.dumps([manifest.block_bytes, files, extents]).encode())
    for file in manifest.files:
        digest.update(file.checksums)
    return digest.hexdigest()


@dataclass(frozen=True)
class ServedFile:
    """A file that clients may read.

    Attributes:
        nbytes: Size in bytes.
        changed: Inode and modification time; None of a file that is still being written.
    """

    nbytes: int
    changed: tuple[int, int] | None


class Served:
    """A checkpoint that clients may read. It keeps its directory open, so a rename does not matter.

    Args:
        digest: See `digest_of`.
        folder: Path of the directory with the files.
        names: The files, by path below the checkpoint as clients ask for it.
        arriving: What is there of a copy that is being made; None if all is.

    Attributes:
        digest: As given.
        arriving: As given.
        files: The files, by path.

    Raises:
        StorageError: A file cannot be examined.
    """

    def __init__(
        self, digest: str, folder: str, names: Mapping[str, str], arriving: CopyInProgress | None = None
    ) -> None:
        self.digest = digest
        self.arriving = arriving
        self._names = names
        self._lock = threading.Lock()
        self._folder: int | None = None
        with os_errors(folder):
            self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            try:
                self.files = {path: self._examine(name) for path, name in names.items()}
            except BaseException:
                self.close()
                raise

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def has(self, path: str, begin: int, end: int) -> bool:
        """Whether a byte range of a file is there, verified."""
        return self.arriving is None or self.arriving.has(path, begin, end)

    def ranges(self) -> dict[str, list[tuple[int, int]]] | None:
        """Returns the byte ranges that are there, by path; None if all are."""
        if self.arriving is None:
            return None
        return {path: list(ranges) for path, ranges in self.arriving.ranges().items() if path in self.files}

    @contextmanager
    def open(self, path: str) -> Iterator[int | None]:
        """Opens a file for reading; yields None if it was replaced, changed or deleted.

        Raises:
            StorageError: It cannot be opened, for example since too many files are open.
        """
        number = None
        with self._lock, os_errors(self._names[path]), suppress(FileNotFoundError, NotADirectoryError):
            if self._folder is not None:
                number = os.open(self._names[path], os.O_RDONLY | os.O_NONBLOCK, dir_fd=self._folder)
        if number is None:
            yield None
            return
        try:
            yield number if _about(os.fstat(number), self.files[path]) == self.files[path] else None
        finally:
            os.close(number)

    def close(self) -> None:
        """Closes the directory; no file can be opened afterwards."""
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)

    def _examine(self, name: str) -> ServedFile:
        found = os.stat(name, dir_fd=self._folder)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{name!r} is no regular file, and cannot be served")
        about = ServedFile(found.st_size, (found.st_ino, found.st_mtime_ns))
        return about if self.arriving is None else ServedFile(about.nbytes, None)


def _about(found: os.stat_result, known: ServedFile) -> ServedFile:
    changed = None if known.changed is None else (found.st_ino, found.st_mtime_ns)
    return ServedFile(found.st_size if stat.S_ISREG(found.st_mode) else -1, changed)


class Shelf:
    """All checkpoints that a server has, by name: the path of its URL.

    Args:
        path: A checkpoint, or a directory of checkpoints, such as the root of a run; None for none.

    Raises:
        CheckpointNotFound: There is nothing at the path.
        CheckpointError: The checkpoint has no checksums, or is malformed.
        StorageError: It cannot be read.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._records: dict[str, FileStat] = {}  # of the directories below the path, by name
        self._found: dict[str, Served] = {}
        self._copies: dict[str, Served] = {}
        self._single: dict[str, Served] = {}
        self._looked_s = -_FRESH_S
        self._lock = threading.Lock()
        if path is None:
            return
        with suppress(CheckpointNotFound):
            self._single = open_checkpoint(path)
        if not self._single and not os.path.isdir(path):
            raise CheckpointNotFound(f"{path}: no such checkpoint, and no directory of checkpoints")
        if not self._single:
            self._look(path)
            self._warn(path)

    def _warn(self, root: str) -> None:
        """Names directories that a user may expect to be served."""
        with closing(LocalStorage(root)) as storage:
            left_out = [
                name
                for name, folder in storage.folders().items()
                if _record_of(folder) is None and any(file.endswith(SUFFIX) for file in folder.files)
            ]
        if left_out:
            names = some_of(left_out)
            _log.warning("%s: not served, for want of checksums: %s: run `fastload seal`", root, names)

    @property
    def is_stale(self) -> bool:
        """Whether it is time to look for new checkpoints: at most once a second."""
        is_root = self._path is not None and not self._single
        return is_root and time.monotonic() - self._looked_s >= _FRESH_S

    def look(self) -> None:
        """Looks for new checkpoints, if it is time to."""
        with self._lock:
            if self._path is not None and self.is_stale:
                self._looked_s = time.monotonic()
                try:
                    self._look(self._path)
                except StorageError as error:
                    _log.warning("%s: cannot look for new checkpoints: %s", self._path, error)

    def all(self) -> dict[str, Served]:
        """Returns the checkpoints by name."""
        return {**self._found, **self._single, **self._copies}

    def add(self, copy: Mapping[str, Served]) -> None:
        """Adds checkpoints, such as a copy that is being made, in place of those of the same names."""
        replaced = [self._copies[name] for name in copy if name in self._copies]
        self._copies = {**self._copies, **copy}
        for served in replaced:
            served.close()

    def close(self) -> None:
        """Closes all directories."""
        for served in self.all().values():
            served.close()

    def _look(self, root: str) -> None:
        """Finds the complete checkpoints directly below a directory: those with a commit record or a seal."""
        with closing(LocalStorage(root)) as storage:
            folders = storage.folders()
        own = {name: _record_of(folder) for name, folder in folders.items()}
        records = {name: record for name, record in own.items() if record is not None}
        found = dict(self._found)
        for name in [name for name in found if records.get(name) != self._records[name]]:
            found.pop(name).close()
        for name in [name for name in records if records[name] != self._records.get(name)]:
            with suppress(FastloadError):  # incomplete, damaged, or of a newer version: nothing to serve
                [found[name]] = open_checkpoint(os.path.join(root, name)).values()
        self._records, self._found = records, found


def _record_of(folder: Folder) -> FileStat | None:
    return folder.files.get(RECORD_NAME) or folder.files.get(SEAL_NAME)


def open_checkpoint(path: str) -> dict[str, Served]:
    """Returns the checkpoint at a path by its name: that of a single file, or empty."""
    with closing(open_with_sibling(path, NAMES, sibling=SEAL_NAME, patience=_PATIENCE)) as storage:
        manifest = read_manifest(storage)
        _require_checksums(manifest)
        names = _own_names(manifest, storage.list() or ())
    if is_single_file(manifest):
        folder, name = os.path.split(path)
        return {name: Served(digest_of(manifest), folder, {"": name})}
    return {"": Served(digest_of(manifest), path, names)}


def _own_names(manifest: Manifest, listing: Sequence[str]) -> dict[str, str]:
    """Returns the files of a directory that its record or seal covers, and that file: each by its path."""
    own = {RECORD_NAME}
    if manifest.format != "fastload":
        own = {SEAL_NAME, INDEX_NAME, BIN_INDEX_NAME, SHARDING_NAME, *metadata_names(listing)}
    names = [*(file.name for file in manifest.files), *sorted(own.intersection(listing))]
    return {name: name for name in names}


def open_copy(copy: CopyInProgress) -> dict[str, Served]:
    """Returns a copy that is being made, by the name that it has with clients.

    Raises:
        CheckpointError: The checkpoint has no checksums.
        StorageError: A file cannot be examined.
    """
    manifest = copy.manifest
    _require_checksums(manifest)
    if is_single_file(manifest):
        name = copy.names[""]
        return {name: Served(digest_of(manifest), copy.folder, {"": name}, copy)}
    own = _own_names(manifest, list(copy.names))
    return {os.path.basename(copy.path): Served(digest_of(manifest), copy.folder, own, copy)}


def _require_checksums(manifest: Manifest) -> None:
    if not manifest.block_bytes:
        raise CheckpointError(
            f"{manifest.url}: has no checksums, by which readers see damage: run `fastload seal` on it"
        )
