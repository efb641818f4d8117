"""What this process does for all its servers and readers: its reads from origins, and who its servers are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fastload.base.threads import ProcessLock
from fastload.ext.serve.coverage import joined

_ARRIVING_S = 10.0  # from a read to the note that its bytes are verified and written


class _OriginRead(NamedTuple):
    digest: str
    name: str
    begin: int
    end: int


class OriginReads:
    """The byte ranges that this process reads from origins now, or has just read."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._until_s: dict[_OriginRead, float] = {}

    @contextmanager
    def noted(self, digest: str, name: str, begin: int, end: int) -> Iterator[None]:
        """Notes a read: while the block runs, and until its bytes have had time to be written.

        Args:
            digest: The digest of the checkpoint.
            name: The file.
            begin: First byte.
            end: The byte after the last one.
        """
        read = _OriginRead(digest, name, begin, end)
        with self._lock:
            self._until_s[read] = float("inf")
        is_read = False
        try:
            yield
            is_read = True
        finally:
            with self._lock:
                self._until_s[read] = time.monotonic() + (_ARRIVING_S if is_read else 0.0)

    def of(self, digest: str) -> dict[str, list[tuple[int, int]]]:
        """Returns the ranges of a checkpoint by name of the file."""
        now_s, found = time.monotonic(), dict[str, list[tuple[int, int]]]()
        with self._lock:
            self._until_s = {read: until_s for read, until_s in self._until_s.items() if until_s > now_s}
            for read in self._until_s:
                if read.digest == digest:
                    found.setdefault(read.name, []).append((read.begin, read.end))
        return {name: joined(ranges) for name, ranges in found.items()}


READS = OriginReads()
"""Those of this process."""

SERVERS: set[str] = set()
"""The identifiers of the servers in this process, which are no peers of it."""
