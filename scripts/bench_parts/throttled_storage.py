"""Storage of fixed bandwidth that all processes of a machine share: ``throttled:///path`` for fsspec.

It serves local files, but every byte waits for its turn on one link, whoever asks and however often:
what is in the page cache costs as much as what is not. The link keeps count, so that a benchmark need
not believe what a loader says of itself.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import struct
import threading
import time
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

_PIECE_BYTES = 256 << 10  # several readers take turns at this grain
_CREDIT_S = 0.01  # a reader that wakes up late by this much finds that the link went on without it


class Link:
    """A link of fixed bandwidth, and what went over it; its state is a small file that processes map.

    Args:
        path: The file, made if it is not there.
        bytes_per_s: Bandwidth.
    """

    _STATE = struct.Struct("=dqq")  # next free time by CLOCK_MONOTONIC, data bytes, header bytes

    def __init__(self, path: str, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._descriptor, self._STATE.size)
        self._state = mmap.mmap(self._descriptor, self._STATE.size)
        self._lock = threading.Lock()  # flock tells processes apart, not threads

    def book(self, data_bytes: int, header_bytes: int) -> float:
        """Takes the next turn; returns when its last byte is through, by CLOCK_MONOTONIC."""
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                free, data, header = self._STATE.unpack_from(self._state)
                free = max(free, time.monotonic() - _CREDIT_S)
                free += (data_bytes + header_bytes) / self._bytes_per_s
                self._STATE.pack_into(self._state, 0, free, data + data_bytes, header + header_bytes)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return free

    def counts(self) -> tuple[int, int]:
        """Returns the data bytes and the header bytes that went over the link so far."""
        _, data, header = self._STATE.unpack_from(self._state)
        return data, header


class ThrottledFiles(AbstractFileSystem):
    """Local files behind a `Link`; set `link` before use.

    Attributes:
        link: The link.
        data_starts: Where the data of each file starts, to count headers apart.
    """

    protocol = "throttled"
    link: ClassVar[Link]
    data_starts: ClassVar[dict[str, int]] = {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Returns size and kind of a file or directory; metadata is free of charge."""
        path = self._strip_protocol(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "type": kind, "size": os.stat(path).st_size}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists a directory."""
        path = self._strip_protocol(path)
        names = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        return [self.info(name) for name in names] if detail else names

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Reads a range of a file; it takes as long as the link says."""
        path = self._strip_protocol(path)
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            first, last = start or 0, size if end is None else min(end, size)
            data = io.BytesIO(bytes(max(0, last - first)))  # getvalue() returns this without a copy
            with data.getbuffer() as view:
                for begin in range(0, len(view), _PIECE_BYTES):
                    self._deliver(file.fileno(), path, first + begin, view[begin : begin + _PIECE_BYTES])
        return data.getvalue()

    def _deliver(self, descriptor: int, path: str, offset: int, piece: memoryview) -> None:
        header_bytes = min(len(piece), max(0, self.data_starts.get(path, 0) - offset))
        due = self.link.book(len(piece) - header_bytes, header_bytes)
        os.preadv(descriptor, [piece], offset)
        pause = due - time.monotonic()
        if pause > 0:
            time.sleep(pause)


fsspec.register_implementation("throttled", ThrottledFiles, clobber=True)
