"""One host's part of an in-memory checkpoint, as one of its ranks writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastload.base.memory import touch_all
from fastload.errors import FastloadError, StorageError
from fastload.ext.memory.folder import JobFolder
from fastload.storage import folders
from fastload.storage.base import DEFAULT_WRITES, Written
from fastload.storage.local_target import LocalFiles

ALIGN_BYTES = 1 << 20
"""Alignment of the cuts between two shares."""


@dataclass(frozen=True)
class HostPart:
    """The part of an in-memory checkpoint that a host keeps.

    Attributes:
        plan: Text that identifies the ranges; see `JobFolder.make`.
        heads: First bytes of each file, by name.
        nbytes: Memory in bytes for all ranks of the host.
        ranges: The ranges that this rank writes: (name, offset, length).
    """

    plan: str
    heads: Mapping[str, bytes]
    nbytes: int
    ranges: Sequence[tuple[str, int, int]]


@dataclass(frozen=True)
class Published:
    """The end of a save, which the leader sends to all hosts.

    Attributes:
        written: Ranges by file, for each rank.
        small_files: Name and content of whole files; the last one is the commit record.
    """

    written: Sequence[Mapping[str, Sequence[Sequence[int]]]]
    small_files: Sequence[tuple[str, bytes]]


class MemoryTarget:
    """Write access to this host's part of an in-memory checkpoint; see `Target`.

    Every rank prepares its own host. `publish` only keeps the small files, which are then sent to every host.

    Args:
        folder: The folder of the job on this host.
        name: Name of the checkpoint.
        url: URL of the checkpoint, for messages.
        unit: Returns `Target.align_bytes` of storage, so that shares can be flushed to it.

    Attributes:
        published: What `publish` kept, on the leader; None before.
    """

    ordered = False
    writes_at_once = DEFAULT_WRITES

    def __init__(
        self, folder: JobFolder, name: str, url: str, unit: Callable[[int], int | None] = lambda _: None
    ) -> None:
        self.url = url
        self.published: Published | None = None
        self._job = folder
        self._unit = unit
        self._name = name
        self._part: HostPart | None = None
        self._sizes: dict[str, int] = {}
        self._written = Written()
        self._opened: LocalFiles | None = None

    def expect(self, part: HostPart) -> None:
        """Sets what this host keeps; call it before `prepare` or `join`."""
        self._part = part

    def align_bytes(self, largest_bytes: int) -> int | None:
        return self._unit(largest_bytes) or ALIGN_BYTES

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        self.join({"files": files})
        return {"files": files}

    def join(self, ticket: Mapping[str, Any]) -> None:
        assert self._part is not None
        self._sizes = dict(ticket["files"])
        files = [(name, nbytes, self._part.heads[name]) for name, nbytes in ticket["files"]]
        self._job.make(self._name, self._part.plan, files, self._part.nbytes)
        self._opened = LocalFiles(
            self._job.open(self._name),
            self._job.place(self._name),
            self._written,
            directly=False,
            flags=os.O_RDWR | os.O_NONBLOCK,
        )
        self.reserve(self._part.ranges)

    @property
    def _files(self) -> LocalFiles:
        assert self._opened is not None, "prepare or join first"
        return self._opened

    def reserve(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Allocates the memory for ranges of files: (name, offset, length).

        Raises:
            StorageError: There is no room.
        """
        for name, offset, nbytes in ranges:
            with self._files.use(name, offset, nbytes) as file:
                folders.reserve_range(file, offset, nbytes)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        assert offset + len(data) <= self._sizes[name], (name, offset, len(data))
        self._files.write(name, offset, data)

    def read(self, name: str, offset: int, data: memoryview) -> None:
        """Reads a range of a file on this host.

        Raises:
            StorageError: The read failed.
        """
        with self._files.use(name, offset, len(data)) as file:
            position, left = offset, data
            touch_all([left])
            while len(left):
                count = os.preadv(file, [left], position)
                if not count:
                    raise StorageError(
                        "the file is shorter than when it was created",
                        self._files.place(name),
                        offset,
                        len(data),
                    )
                position, left = position + count, left[count:]

    def flush(self) -> dict[str, Any]:
        self._written.check()
        return {"written": self._written.to_json()}

    def publish(
        self, receipts: Sequence[Mapping[str, Any]], small_files: Sequence[tuple[str, bytes]]
    ) -> None:
        self._written.require_all(self._sizes, receipts, self.url)
        self.published = Published([receipt["written"] for receipt in receipts], list(small_files))

    def abort(self) -> None:
        self._written.fail(StorageError("the save to memory was aborted", url=self.url))
        with suppress(FastloadError):  # the next save tries again
            self._job.discard(self._name)
        self.close()

    def clean_abandoned(self) -> list[str]:
        return []

    def remove(self) -> None:
        self._job.discard(self._name)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
