"""Copies that another process can continue."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from fastload.errors import CheckpointExists, FastloadError
from fastload.storage import folders, pending
from fastload.storage.base import Names
from fastload.storage.destination import read_list
from fastload.storage.folders import os_errors
from fastload.storage.local_target import LocalTarget
from fastload.storage.pending import OWNER, Pending
from fastload.storage.process import Owner

_JOURNAL = "journal"


class LocalCopy(LocalTarget):
    """A resumable copy of a checkpoint: another process can continue it.

    The name of the pending directory follows from the source, and a journal in it records progress. Until
    another process continues it, it is an orphan like any other, which the next save removes.

    Args:
        path: Path of the copy; symbolic links are followed.
        names: Names of files of a checkpoint.
        io: ``auto``, ``buffered`` or ``direct``.
    """

    def __init__(self, path: str, names: Names, *, io: str) -> None:
        super().__init__(path, names, io=io, signs=(names.record, names.receipt))
        self._receipt_name = names.receipt
        self._to_replace = names.to_replace
        self._journal: int | None = None

    @property
    def data_path(self) -> str:
        """Path of the pending data directory."""
        return self._gathered.place("")

    def resume(
        self, files: Sequence[tuple[str, int]], identity: str, *, overwrite: bool, damaged: bool = False
    ) -> bytes:
        """Continues a copy that a dead process left, or begins one; removes other orphans.

        Args:
            files: Name and size in bytes of each.
            identity: 16 hex digits that identify the source.
            overwrite: Whether to replace a checkpoint.
            damaged: Whether to replace a copy whose bytes are damaged, but were not modified.

        Returns:
            The journal so far. The caller verifies the bytes that it lists.

        Raises:
            CheckpointExists: The path exists, and `overwrite` is off; or a user changed the copy.
            OptionError: The path holds something other than a checkpoint.
            StorageError: There is no space, or no permission, or another process makes the same copy.
        """
        if not overwrite:
            self.destination.guard = self._require_unchanged
        try:
            with os_errors(self.url):
                self.destination.check([name for name, _ in files], overwrite=overwrite or damaged)
            directory = self._hold(lambda: _resume(self.url, self.destination.parent, identity), files)
            self.clean_abandoned()
            self._reserve()
            with os_errors(directory.path):
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
                self._journal = folders.open_file(_JOURNAL, directory.folder, flags)
                with open(self._journal, "rb", closefd=False) as journal:
                    return journal.read()
        except FastloadError:
            self.abort()
            raise

    def note(self, entries: bytes) -> None:
        """Appends to the journal."""
        assert self._journal is not None
        assert self._pending is not None
        with self.written.noted(), os_errors(os.path.join(self._pending.path, _JOURNAL)):
            if os.write(self._journal, entries) != len(entries):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def state_of_files(self) -> list[dict[str, Any]]:
        """Returns size and modification time of the files, for the receipt."""
        found = {name: os.stat(name, dir_fd=self._gathered.folder) for name in self._sizes}
        return [
            {"name": name, "nbytes": each.st_size, "mtime_ns": each.st_mtime_ns}
            for name, each in found.items()
        ]

    def _require_unchanged(self, there: int) -> None:
        """Refuses to replace a copy that a user changed.

        A file that was written to differs from its receipt in time or size; one with silent damage does not.
        """
        try:
            files = json.loads(read_list(self._receipt_name, there))["files"]
            changed = [file["name"] for file in files if _is_changed(there, **file)]
        except (ValueError, TypeError, KeyError, RecursionError):
            changed = [self._receipt_name]
        if changed:
            raise CheckpointExists(
                f"{self.url} is a copy of this checkpoint that was changed since: {changed[:5]}: "
                f"pass {self._to_replace} to replace it"
            )

    def close(self) -> None:
        """Releases the pending directory, for another process to continue."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        super().close()


def _resume(path: str, parent: int, token: str) -> Pending:
    """Creates a pending directory with a given token, or takes over that of a dead process.

    The name can be guessed: if another user has it, the directory gets a random name.

    Args:
        path: Path of the checkpoint.
        parent: Descriptor of its parent directory.
        token: 16 hex digits.

    Returns:
        The directory, with the data that the dead process left.

    Raises:
        OSError: ``EBUSY`` if a running process holds it.
    """
    place = pending.hidden_path(path, token, parent)
    network = pending.is_on_network(os.path.dirname(path))
    return pending.insist(lambda: _make_or_take_over(place, path, parent, network), place)


def _make_or_take_over(place: str, path: str, parent: int, network: bool) -> Pending | None:
    try:
        return pending.make(place, path, parent)
    except FileExistsError:
        pass
    try:
        taken = pending.take_over(place, parent, network)
    except FileNotFoundError:
        return None
    except OSError as error:
        pending.leave_alone(place, str(error.strerror))
        return pending.begin(path, parent)
    if taken is None:
        if (other := _owner_of(place, parent)) is not None:
            why = f"in use by {other}; hosts that share this path cannot each have a copy there"
            raise OSError(errno.EBUSY, why, place)
        return None
    with ExitStack() as closing:
        closing.callback(taken.close)
        taken.restore()
        if taken.move_in():
            closing.pop_all()
            return taken
    return None


def _owner_of(place: str, parent: int) -> Owner | None:
    with (
        suppress(OSError),
        folders.closing(folders.open_folder(os.path.basename(place), parent)) as folder,
    ):
        return Owner.parse(folders.read_small(OWNER, folder))
    return None


def _is_changed(folder: int, name: str, nbytes: int, mtime_ns: int) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False  # without data, nothing is lost
    return not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_mtime_ns) != (nbytes, mtime_ns)
