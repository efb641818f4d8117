"""A copy of a checkpoint that is being made on this host: what a dead predecessor got done is kept."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fastload.errors import CheckpointExists, FastloadError, StorageError
from fastload.storage import folders, leftovers
from fastload.storage.local_target import LocalTarget, os_errors
from fastload.storage.names import Names
from fastload.storage.site import read_list

__all__ = ["LocalCopy"]

_JOURNAL = "journal"


class LocalCopy(LocalTarget):
    """Write access that outlives its process: the next one that makes the same copy goes on with it.

    Its pending directory has a name that follows from what is copied, and holds a journal too. As long as
    nobody goes on with it, it is what any dead save leaves behind, and cleaned away by the next one.

    Args are those of `LocalTarget`.
    """

    def __init__(self, path: str, names: Names, *, io: str) -> None:
        super().__init__(path, names, io=io)
        self._journal: int | None = None

    @property
    def _signs(self) -> tuple[str, ...]:
        return (self._names.record, self._names.receipt)

    @property
    def data_path(self) -> str:
        """Where the files are gathered."""
        return self._place("")

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
        self._sizes = dict(files)
        if not overwrite:
            self._site.guard = self._require_unchanged
        try:
            with os_errors(self._path):
                self._site.check(list(self._sizes), overwrite=overwrite or damaged)
            with os_errors(os.path.dirname(self._path)):
                data = self._hold(leftovers.resume(self._path, self._site.parent, identity))
            self.clean_abandoned()
            for file, nbytes in files:
                with os_errors(self._place(file), 0, nbytes):
                    _make_room(file, nbytes, data)
            return self._open_journal()
        except FastloadError:
            self.abort()
            raise

    def files(self) -> list[dict[str, Any]]:
        """Returns how the files are now, for the receipt: so they stay unless somebody changes them."""
        assert self._data is not None
        found = {name: os.stat(name, dir_fd=self._data) for name in self._sizes}
        return [
            {"name": name, "nbytes": each.st_size, "mtime_ns": each.st_mtime_ns}
            for name, each in found.items()
        ]

    def _require_unchanged(self, there: int) -> None:
        """Refuses to replace a copy that is not as it was left, but for what happens to bytes by themselves.

        A file that was written to has another time or size than its receipt says; one that rotted has not.
        """
        try:
            files = json.loads(read_list(self._names.receipt, there))["files"]
            changed = [file["name"] for file in files if _is_changed(there, **file)]
        except (ValueError, TypeError, KeyError, RecursionError):
            changed = [self._names.receipt]
        if changed:
            raise CheckpointExists(
                f"{self._path} is a copy of this checkpoint that was changed since: {changed[:5]}: "
                "to replace it, ask for overwrite=True (--overwrite)"
            )

    def note(self, entries: bytes) -> None:
        """Adds to the journal."""
        assert self._journal is not None
        path = os.path.join(self._pending_path, _JOURNAL)
        with self._noted(), os_errors(path):
            if os.write(self._journal, entries) != len(entries):
                raise StorageError(os.strerror(errno.ENOSPC), url=path)

    def close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        super().close()

    def _open_journal(self) -> bytes:
        assert self._held is not None
        with os_errors(os.path.join(self._pending_path, _JOURNAL)):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._journal = folders.open_file(_JOURNAL, self._held.folder, flags)
            with os.fdopen(os.dup(self._journal), "rb") as file:
                return file.read()


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
