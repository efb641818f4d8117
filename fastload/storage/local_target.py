"""A new checkpoint on this host's file systems: pending beside its place, then renamed into it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from fastload.errors import FastloadError, StorageError
from fastload.storage import folders, leftovers, pending
from fastload.storage.local_files import LocalFiles, os_errors
from fastload.storage.mounts import IN_MEMORY_TYPES, file_system_type, is_network
from fastload.storage.names import Names
from fastload.storage.pending import Pending
from fastload.storage.site import Site
from fastload.storage.target import Written

__all__ = ["LocalTarget"]

_ALIGN_BYTES = (
    64 << 10
)  # the longest pages there are, for O_DIRECT; more would have more of the shards travel


class LocalTarget:
    """Write access through the operating system.

    Args:
        path: Where the checkpoint will be; symbolic links in it are followed.
        names: What files of a checkpoint are called.
        io: ``auto``, ``buffered`` or ``direct``.
        signs: Names of files that tell what may be replaced from anything else; by default the record.

    Attributes:
        site: That place.
        written: The account of what this rank wrote.
    """

    ordered = False

    def __init__(self, path: str, names: Names, *, io: str, signs: Sequence[str] = ()) -> None:
        self.site = Site(path, names, signs or (names.record,))
        self.written = Written()
        self._io = io
        self._sizes: dict[str, int] = {}
        self._pending: Pending | None = None  # by the rank that made it
        self._files: LocalFiles | None = None

    @property
    def url(self) -> str:
        return self.site.path

    @property
    def shared(self) -> bool:
        return is_network(self._kind)

    @cached_property
    def _kind(self) -> str:
        return file_system_type(self.url)

    def align_bytes(self, largest_bytes: int) -> int | None:
        return _ALIGN_BYTES

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        try:
            with os_errors(self.url):
                self.site.check([name for name, _ in files], overwrite=overwrite)
            self.clean_abandoned()
            with os_errors(os.path.dirname(self.url)):
                held = pending.begin(self.url, self.site.parent)
                gathered = self.hold(held, dict(files))
            for name, nbytes in files:
                with os_errors(gathered.place(name), 0, nbytes):
                    folders.reserve(name, nbytes, gathered.folder)
        except FastloadError:
            self.abort()
            raise
        return {"pending": held.path, "files": self._sizes}

    def hold(self, held: Pending, sizes: Mapping[str, int]) -> LocalFiles:
        """Gathers the files in a pending directory of this process's, which is this target's from now on.

        Args:
            held: The directory.
            sizes: Of the files, in bytes.

        Raises:
            OSError: It cannot be opened.
        """
        self._pending = held
        return self._gather(held.open_data(), held.path, sizes)

    def join(self, ticket: Mapping[str, Any]) -> None:
        path = ticket["pending"]
        with os_errors(path):
            self._gather(pending.open_data(path), path, ticket["files"])

    def _gather(self, folder: int, path: str, sizes: Mapping[str, int]) -> LocalFiles:
        auto = self._io == "auto" and self._kind not in IN_MEMORY_TYPES and not self.shared
        self._sizes = dict(sizes)
        self._files = LocalFiles(
            folder, os.path.join(path, pending.DATA), self.written, directly=auto or self._io == "direct"
        )
        return self._files

    def write(self, name: str, offset: int, data: memoryview) -> None:
        assert offset + len(data) <= self._sizes[name], (name, offset, len(data))
        assert self._files is not None
        self._files.write(name, offset, data)

    def flush(self) -> dict[str, Any]:
        self.written.check()
        assert self._files is not None
        self._files.finish()
        return {"written": self.written.to_json()}

    def publish(
        self,
        receipts: Sequence[Mapping[str, Any]],
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
    ) -> None:
        self.written.require_all(self._sizes, receipts, self.url)
        assert self._pending is not None
        assert self._files is not None
        for name, content in small_files:
            self._files.put(name, content)
        names = [*self._sizes, *(name for name, _ in small_files)]
        with os_errors(self.url):
            self.site.take(self._pending, self._files.folder, names, overwrite=overwrite)
        self._release()

    def abort(self) -> None:
        self.written.fail(StorageError("the save was given up", url=self.url))
        self._release()
        self.close()

    def _release(self) -> None:
        """Removes the pending directory, if this rank made it, and only then lets go of its lock."""
        held, self._pending = self._pending, None
        if held is not None:
            with suppress(OSError):  # who cleans next gets another chance
                held.discard()
            held.close()

    def clean_abandoned(self) -> list[str]:
        return leftovers.clean_abandoned(os.path.dirname(self.url))

    def remove(self) -> None:
        with os_errors(self.url):
            try:
                pending.remove(self.url, self.site.parent)
            finally:
                self.site.close()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        held, self._pending = self._pending, None
        if held is not None:
            held.close()
        self.site.close()
