"""Destinations of checkpoints: what may be replaced there, and the rename that replaces it."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fastload.errors import CheckpointExists, FastloadError, OptionError
from fastload.storage import folders
from fastload.storage.base import Names
from fastload.storage.folders import closing
from fastload.storage.mounts import bucket_client
from fastload.storage.pending import DATA, NOT_FREE, OLD, Pending

_log = logging.getLogger(__name__)

_NUM_TRIES = 10  # against others that publish at the same instant
_MAX_LIST_BYTES = 1 << 30  # largest record or receipt that is read


class LocalDestination:
    """The destination of a local checkpoint. Its parent directory is opened once.

    Args:
        path: Path of the checkpoint; links are followed.
        names: Names of files of a checkpoint.
        signs: Names of files that prove that a directory is a checkpoint of fastload's, and list its files.

    Attributes:
        path: The path with links resolved.
        guard: Called with the descriptor of the directory about to be replaced; raises to refuse.
    """

    def __init__(self, path: str, names: Names, signs: Sequence[str]) -> None:
        self.path = os.path.realpath(path)
        self._given = path
        self.guard: Callable[[int], None] = lambda there: None
        self._name = os.path.basename(self.path)
        self._names = names
        self._signs = signs
        self._parent: int | None = None
        self._replaces = False  # whether a checkpoint may be replaced

    @property
    def parent(self) -> int:
        """Descriptor of the parent directory, which is created if it is missing."""
        if self._parent is None:
            parent = os.path.dirname(self.path)
            folders.make_folders(parent)
            self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        return self._parent

    def close(self) -> None:
        """Closes the parent."""
        if self._parent is not None:
            os.close(self._parent)
            self._parent = None

    def check(self, written: Sequence[str], *, overwrite: bool) -> None:
        """Checks that a new checkpoint can be published here.

        Args:
            written: Names of files of the new checkpoint.
            overwrite: Whether to replace a checkpoint.

        Raises:
            CheckpointExists: The path exists, and `overwrite` is off.
            OptionError: The path holds something other than a checkpoint, or files that would be lost or
                mixed up with the new one; or it is on a mounted bucket.
            PermissionError: The path has a link that another user may have planted.
        """
        folders.require_trusted_links(self._given)
        if client := bucket_client(self.path):
            raise OptionError(
                f"{self.path} is in a bucket that {client} mounts, where a file has only one writer, and "
                "renaming a directory copies it. Save to the bucket itself, such as s3://bucket/path; loads "
                "through the mount work"
            )
        self._replaces = overwrite
        with self._open() as there:
            if there is not None:
                self._kept(there, written)

    def take(self, pending: Pending, data: int, written: Sequence[str]) -> None:
        """Publishes a checkpoint, after `check`: renames the data of a pending directory to this path.

        Files that are not the old checkpoint's own are in both directories before the exchange, so they never
        disappear. Changes to them in the meantime are carried over after it.

        Args:
            pending: The pending directory.
            data: Descriptor of its data directory.
            written: Names of all files of the new checkpoint.

        Raises:
            CheckpointExists: As for `check`.
            OptionError: As for `check`.
            OSError: It failed, or is not durable; the old checkpoint is back in place.
        """
        old = self._rename_in(pending, data, written)
        try:
            if old:
                with closing(folders.open_folder(old, pending.folder)) as there:
                    if self._keep(there, data, written):
                        os.fsync(data)
            os.fsync(self.parent)
            os.fsync(pending.folder)
        except (OSError, FastloadError):
            # The caller learns that there is no new checkpoint, so the old one has to be there.
            if old == DATA:
                folders.exchange(DATA, pending.folder, self._name, self.parent)
            else:
                os.rename(self._name, DATA, src_dir_fd=self.parent, dst_dir_fd=pending.folder)
                pending.restore()
            raise

    def _rename_in(self, pending: Pending, data: int, written: Sequence[str]) -> str:
        """Returns the name of the old checkpoint in the pending directory; empty if there was none."""
        for _ in range(_NUM_TRIES):
            with self._open() as there:
                occupied = there is not None and bool(folders.names(there))
                if there is not None:
                    self._keep(there, data, written)
            os.fsync(data)
            with suppress(_Changed):
                return self._exchange(pending) if occupied else self._rename(pending)
        raise CheckpointExists(f"{self.path}: other processes publish there at the same time")

    def _exchange(self, pending: Pending) -> str:
        try:
            folders.exchange(DATA, pending.folder, self._name, self.parent)
            return DATA
        except FileNotFoundError:
            raise _Changed from None  # another process removed it, so the path is free
        except OSError as error:
            if error.errno not in folders.UNABLE:
                raise
        os.rename(self._name, OLD, src_dir_fd=self.parent, dst_dir_fd=pending.folder)
        try:
            self._rename(pending)
        except BaseException:
            pending.restore()
            raise
        return OLD

    def _rename(self, pending: Pending) -> str:
        try:
            # Replaces nothing but an empty directory.
            os.rename(DATA, self._name, src_dir_fd=pending.folder, dst_dir_fd=self.parent)
        except OSError as error:
            if error.errno not in NOT_FREE:
                raise
            raise _Changed from None
        return ""

    def _keep(self, there: int, data: int, written: Sequence[str]) -> bool:
        """Gives the new directory the other files of the old one, and its mode and group.

        Returns:
            Whether files were added or removed.
        """
        kept = self._kept(there, written)
        gone = set(folders.names(data)) - {*written, *kept}
        for name in gone:
            os.unlink(name, dir_fd=data)
        try:
            folders.look_like(there, data)
        except PermissionError as error:
            _log.warning("%s: cannot keep the group of the directory: %s", self.path, error.strerror)
        return folders.carry(kept, there, data) or bool(gone)

    def _kept(self, there: int, written: Sequence[str]) -> list[str]:
        """Checks that the checkpoint may be replaced; returns the names of files that are not its own."""
        kinds = folders.kinds(there)
        if not kinds:
            return []
        if not self._replaces:
            raise CheckpointExists(f"{self.path} exists: pass {self._names.to_replace} to replace it")
        signs = [name for name in self._signs if name in kinds]
        if not signs and kinds.keys().isdisjoint(self._names.others):
            raise OptionError(
                f"{self.path} has no {' or '.join(self._signs)}: "
                "overwrite=True replaces only checkpoints of fastload"
            )
        if inside := sorted(name for name, is_folder in kinds.items() if is_folder):
            raise OptionError(f"{self.path} has directories that overwrite=True would delete: {inside}")
        self.guard(there)
        of_checkpoint = self._names.own(kinds, [read_list(name, there) for name in signs])
        return kept_names(self.path, kinds, of_checkpoint, written, self._names)

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """Opens the directory at this path; None if there is none."""
        parent = self.parent  # which may be no directory, either
        try:
            there = folders.open_folder(self._name, parent)
        except FileNotFoundError:
            yield None
            return
        except NotADirectoryError:
            raise CheckpointExists(f"{self.path} is a file") from None
        with closing(there):
            yield there


class _Changed(Exception):
    """The destination changed after it was checked."""


def read_list(name: str, folder: int) -> bytes:
    """Reads a record or a receipt; empty if it cannot be read."""
    with suppress(OSError):
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_LIST_BYTES:
                return opened.read(_MAX_LIST_BYTES)
    return b""


def kept_names(
    url: str, there: Iterable[str], of_checkpoint: set[str], written: Iterable[str], names: Names
) -> list[str]:
    """Returns the names of the files that are kept when a checkpoint is replaced.

    Args:
        url: Path or URL of the checkpoint, for messages.
        there: Names of all files there.
        of_checkpoint: Names of the checkpoint's own files.
        written: Names of files of the new checkpoint.
        names: Names of files of a checkpoint.

    Raises:
        OptionError: A new file would replace one of them, or a reader take one for a part of the checkpoint.
    """
    kept = sorted(set(there) - of_checkpoint)
    written = set(written)
    if bad := [name for name in kept if name in written or name.endswith(names.part_endings)]:
        raise OptionError(
            f"{url} has other files that the new checkpoint would replace, or that a reader would take for "
            f"parts of it: {bad[:5]}: move them away"
        )
    return kept
