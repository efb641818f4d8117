"""A copy of a checkpoint that is being made on this host: what a dead predecessor got done is kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress

from fastload.errors import FastloadError, StorageError
from fastload.storage import staging
from fastload.storage.local_target import LocalTarget, os_errors
from fastload.storage.target import RECORD_NAME

__all__ = ["STAGED_NAME", "LocalCopy"]

STAGED_NAME = ".fastload-stage.json"
"""What a staged copy holds next to its files: which checkpoint it is a copy of."""

_JOURNAL = "journal"


class LocalCopy(LocalTarget):
    """Write access that outlives its process: the next one that makes the same copy goes on with it.

    Its staging directory has a name that follows from what is copied, and holds a journal too. As long as
    nobody goes on with it, it is what any dead save leaves behind, and cleaned away by the next one.

    Args are those of `LocalTarget`.
    """

    _signs = (RECORD_NAME, STAGED_NAME)

    def __init__(self, path: str, *, io: str) -> None:
        super().__init__(path, io=io)
        self._journal: int | None = None

    @property
    def data_path(self) -> str:
        """Where the files are gathered."""
        return self._data("")

    def resume(self, files: Sequence[tuple[str, int]], identity: str, *, overwrite: bool) -> bytes:
        """Makes room for the files, or finds them as a predecessor left them; removes what others left.

        Args:
            files: Name and size in bytes of each.
            identity: 16 hex digits, the same for the same copy only.
            overwrite: Whether a checkpoint that is there may be replaced.

        Returns:
            What was noted in the journal so far. That the bytes are there has still to be proven.

        Raises:
            CheckpointExists: There is something at the path, and `overwrite` is off.
            OptionError: What is there is nobody's checkpoint, so it is not replaced.
            StorageError: There is no room, or no permission, or somebody makes the same copy just now.
        """
        parent, name = os.path.split(self._path)
        self._sizes = dict(files)
        try:
            with os_errors(parent):
                staging.make_folders(parent)
            self._check_free(overwrite=overwrite)
            with os_errors(parent):
                self._staging, self._owner = staging.resume(parent, name, identity)
            self.clean_abandoned()
            for file, nbytes in files:
                with os_errors(self._data(file), 0, nbytes):
                    self._make_room(self._data(file), nbytes)
            return self._open_journal()
        except FastloadError:
            self.abort()
            raise

    def note(self, entries: bytes) -> None:
        """Adds to the journal."""
        assert self._journal is not None
        path = os.path.join(self._staging, _JOURNAL)
        with self._noted(), os_errors(path):
            if os.write(self._journal, entries) != len(entries):
                raise StorageError(os.strerror(errno.ENOSPC), url=path)

    def close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        super().close()

    def _make_room(self, path: str, nbytes: int) -> None:
        with suppress(FileNotFoundError):
            if os.stat(path).st_size == nbytes:
                return
            os.unlink(path)
        staging.reserve(path, nbytes)

    def _open_journal(self) -> bytes:
        path = os.path.join(self._staging, _JOURNAL)
        with os_errors(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._journal = os.open(path, flags, 0o666)
            with os.fdopen(os.dup(self._journal), "rb") as file:
                return file.read()
