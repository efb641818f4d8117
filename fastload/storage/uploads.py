"""How the large files of a checkpoint get to an object store: here as streams, each from one rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastload.errors import StorageError
from fastload.storage.bucket import Bucket, Keys, Writer

__all__ = ["NUM_REQUESTS", "Streams", "Uploads"]

NUM_REQUESTS = 8
"""How many files are begun, published or given up at the same time."""


class Uploads(Protocol):
    """The uploads of one save, on one rank. Errors are those of the library.

    Attributes:
        ordered: As of a target.
    """

    @property
    def ordered(self) -> bool: ...

    def align_bytes(self, largest_bytes: int) -> int | None:
        """Says where a file may be cut, as a target does; a write gets no more than that."""
        ...

    def begin(self, keys: Keys, sizes: Mapping[str, int]) -> dict[str, str]:
        """Begins them, on the coordinator; returns what names them, by file. If it fails, none is left."""
        ...

    def join(self, keys: Keys, sizes: Mapping[str, int], uploads: Mapping[str, str]) -> None:
        """Takes part in what the coordinator began."""
        ...

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Uploads a range of a file; from any thread, several at once."""
        ...

    def end(self, name: str) -> None:
        """Makes what this rank wrote of a file durable."""
        ...

    def receipt(self) -> dict[str, Any]:
        """Returns what `publish` has to know of this rank, in JSON types."""
        ...

    def publish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        """Makes a file appear under its name, once all ranks have uploaded it."""
        ...

    def give_up(self, name: str, uploads: Mapping[str, str]) -> None:
        """Ends uploads to the checkpoint of that name, which will not be finished."""
        ...

    def give_up_old(self, age_s: float) -> list[str]:
        """Ends uploads beside the checkpoint that are that old and have no owner; returns their URLs."""
        ...

    def close(self) -> None:
        """Releases connections."""
        ...


class Streams:
    """Each file is one object that one rank writes from its first byte to its last, and that is renamed.

    To rename is the store's business: no byte comes here.

    Args:
        bucket: The store.
        timeout_s: Longest time in seconds that a write waits for those before it.
    """

    ordered = True

    def __init__(self, bucket: Bucket, *, timeout_s: float) -> None:
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._keys = Keys("", "")
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def align_bytes(self, largest_bytes: int) -> int | None:
        return None

    def begin(self, keys: Keys, sizes: Mapping[str, int]) -> dict[str, str]:
        self._keys = keys
        return {}

    def join(self, keys: Keys, sizes: Mapping[str, int], uploads: Mapping[str, str]) -> None:
        self._keys = keys

    def write(self, name: str, offset: int, data: memoryview) -> None:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = _Stream(self._bucket.writer(self._keys.pending(name)))
            stream = self._streams[name]
        stream.write(offset, data, self._timeout_s)

    def end(self, name: str) -> None:
        if name in self._streams:
            self._streams[name].close()

    def receipt(self) -> dict[str, Any]:
        return {}

    def publish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        self._bucket.move(self._keys.pending(name), self._keys.published(name))

    def give_up(self, name: str, uploads: Mapping[str, str]) -> None:
        pass  # what is not closed is nowhere, and the rest is pending

    def give_up_old(self, age_s: float) -> list[str]:
        return []

    def close(self) -> None:
        self._streams.clear()


class _Stream:
    """Puts the writes of one object, which come from several threads, in order."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._position = 0
        self._turn = threading.Condition()

    def write(self, offset: int, data: memoryview, timeout_s: float) -> None:
        """Writes what begins there, once what comes before it is written."""
        with self._turn:
            if not self._turn.wait_for(lambda: self._position >= offset, timeout_s):
                raise StorageError(f"the bytes before it did not come within {timeout_s:.0f} s")
            assert self._position == offset, (self._position, offset)
            self._writer.write(data)
            self._position += len(data)
            self._turn.notify_all()

    def close(self) -> None:
        """Ends the object, which is there then."""
        self._writer.close()
