"""A copy of a checkpoint that is being made on this host: what a dead predecessor got done is kept."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastload.errors import CheckpointExists, FastloadError, StorageError
from fastload.storage import folders, leftovers
from fastload.storage.local_files import LocalFiles, os_errors
from fastload.storage.local_target import LocalTarget
from fastload.storage.names import Names
from fastload.storage.pending import Pending
from fastload.storage.site import read_list
from fastload.storage.target import Written

__all__ = ["LocalCopy"]

_JOURNAL = "journal"


class LocalCopy:
    """Write access that outlives its process: the next one that makes the same copy goes on with it.

    It is a local target of which the pending directory has a name that follows from what is copied, and
    holds a journal too. As long as nobody goes on with it, that is what any dead save leaves behind, and
    cleaned away by the next one.

    Args:
        path: Where the copy will be; symbolic links in it are followed.
        names: What files of a checkpoint are called.
        io: ``auto``, ``buffered`` or ``direct``.
    """

    def __init__(self, path: str, names: Names, *, io: str) -> None:
        self._receipt_name = names.receipt
        self._target = LocalTarget(path, names, io=io, signs=(names.record, names.receipt))
        self._sizes: dict[str, int] = {}
        self._files: LocalFiles | None = None
        self._journal: _Journal | None = None

    @property
    def url(self) -> str:
        """Where the copy will be."""
        return self._target.url

    @property
    def data_path(self) -> str:
        """Where the files are gathered."""
        assert self._files is not None
        return self._files.place("")

    def resume(
        self, files: Sequence[tuple[str, int]], identity: str, *, overwrite: bool, damaged: bool = False
    ) -> bytes:
        """Makes room for the files, or finds them as a predecessor left them; removes what others left.

        Args:
            files: Name and size in bytes of each.
            identity: 16 hex digits, the same for the same copy only.
            overwrite: Whether a checkpoint that is there may be replaced.
            damaged: Whether a copy that is there may be, if all that is wrong with it is damage.

        Returns:
            What was noted in the journal so far. That the bytes are there has still to be proven.

        Raises:
            CheckpointExists: There is something at the path, and `overwrite` is off; or somebody changed it.
            OptionError: What is there is nobody's checkpoint, so it is not replaced.
            StorageError: There is no room, or no permission, or somebody makes the same copy just now.
        """
        site = self._target.site
        self._sizes = dict(files)
        if not overwrite:
            site.guard = self._require_unchanged
        try:
            with os_errors(self.url):
                site.check(list(self._sizes), overwrite=overwrite or damaged)
            with os_errors(os.path.dirname(self.url)):
                pending = leftovers.resume(self.url, site.parent, identity)
                self._files = self._target.hold(pending, self._sizes)
            self._target.clean_abandoned()
            for file, nbytes in files:
                with os_errors(self._files.place(file), 0, nbytes):
                    _make_room(file, nbytes, self._files.folder)
            self._journal = _Journal(pending, self._target.written)
            return self._journal.read()
        except FastloadError:
            self.abort()
            raise

    def files(self) -> list[dict[str, Any]]:
        """Returns how the files are now, for the receipt: so they stay unless somebody changes them."""
        assert self._files is not None
        found = {name: os.stat(name, dir_fd=self._files.folder) for name in self._sizes}
        return [
            {"name": name, "nbytes": each.st_size, "mtime_ns": each.st_mtime_ns}
            for name, each in found.items()
        ]

    def _require_unchanged(self, there: int) -> None:
        """Refuses to replace a copy that is not as it was left, but for what happens to bytes by themselves.

        A file that was written to has another time or size than its receipt says; one that rotted has not.
        """
        try:
            files = json.loads(read_list(self._receipt_name, there))["files"]
            changed = [file["name"] for file in files if _is_changed(there, **file)]
        except (ValueError, TypeError, KeyError, RecursionError):
            changed = [self._receipt_name]
        if changed:
            raise CheckpointExists(
                f"{self.url} is a copy of this checkpoint that was changed since: {changed[:5]}: "
                "to replace it, ask for overwrite=True (--overwrite)"
            )

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Writes a range, as a target does."""
        self._target.write(name, offset, data)

    def note(self, entries: bytes) -> None:
        """Adds to the journal."""
        assert self._journal is not None
        self._journal.add(entries)

    def flush(self) -> dict[str, Any]:
        """Makes what was written durable, as a target does; returns the receipt."""
        return self._target.flush()

    def publish(
        self,
        receipts: Sequence[Mapping[str, Any]],
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
    ) -> None:
        """Makes the copy exist, as a target does."""
        self._target.publish(receipts, small_files, overwrite=overwrite)

    def abort(self) -> None:
        """Gives up, and removes what is pending; never raises."""
        self._target.abort()
        self.close()

    def close(self) -> None:
        """Lets go of what is pending, for the next one that makes the same copy."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._target.close()


class _Journal:
    """What is noted of a copy, in its pending directory.

    Args:
        pending: The directory.
        written: Where errors are noted.
    """

    def __init__(self, pending: Pending, written: Written) -> None:
        self._path = os.path.join(pending.path, _JOURNAL)
        self._written = written
        with os_errors(self._path):
            self._file = folders.open_file(_JOURNAL, pending.folder, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def read(self) -> bytes:
        with os_errors(self._path), os.fdopen(os.dup(self._file), "rb") as file:
            return file.read()

    def add(self, entries: bytes) -> None:
        with self._written.noted(), os_errors(self._path):
            if os.write(self._file, entries) != len(entries):
                raise StorageError(os.strerror(errno.ENOSPC), url=self._path)

    def close(self) -> None:
        os.close(self._file)


def _make_room(name: str, nbytes: int, folder: int) -> None:
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size == nbytes:
            return
        os.unlink(name, dir_fd=folder)
    folders.reserve(name, nbytes, folder)


def _is_changed(folder: int, name: str, nbytes: int, mtime_ns: int) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False  # nothing is lost with it
    return not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_mtime_ns) != (nbytes, mtime_ns)
