"""Another try for what may pass: transient errors of any storage."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastload.errors import Interrupted, StorageError
from fastload.storage.base import FileStat, Storage

__all__ = ["FIRST_BACKOFF_S", "MAX_BACKOFF_S", "PatientStorage"]

T = TypeVar("T")

FIRST_BACKOFF_S = 0.8
MAX_BACKOFF_S = 8.0


def _backoff_s(attempt: int) -> float:
    """Returns how long to wait after an attempt, the first being 1.

    Jitter, since ranks that failed together must not come back together; over the upper half only, so
    that four attempts more outlast an outage of 5 s.
    """
    longest = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempt - 1))
    return random.uniform(longest / 2, longest)


class PatientStorage:
    """A storage that tries again after transient errors, with jitter, until a deadline.

    Args:
        storage: The storage.
        retries: Further attempts at one request.
        timeout_s: Longest time in seconds for one request, all attempts and pauses included.
    """

    def __init__(self, storage: Storage, *, retries: int, timeout_s: float) -> None:
        self._storage = storage
        self._retries = retries
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._num_retries = 0

    @property
    def url(self) -> str:
        return self._storage.url

    @property
    def shared(self) -> bool:
        return self._storage.shared

    @property
    def probes(self) -> bool:
        return self._storage.probes

    @property
    def bytes_read(self) -> int:
        return self._storage.bytes_read

    @property
    def direct_bytes_read(self) -> int:
        return self._storage.direct_bytes_read

    @property
    def io(self) -> str:
        return self._storage.io

    @io.setter
    def io(self, value: str) -> None:
        self._storage.io = value

    @property
    def num_retries(self) -> int:
        """Attempts beyond the first so far."""
        return self._num_retries

    def stat(self, name: str) -> FileStat | None:
        return self._patiently(lambda: self._storage.stat(name))

    def list(self) -> list[str] | None:
        return self._patiently(self._storage.list)

    def folders(self) -> Sequence[str]:
        return self._patiently(self._storage.folders)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        self._patiently(lambda: self._storage.read_into(name, offset, buffers, version))

    def stop(self) -> None:
        """Lets what has not begun, and what waits for another try, end at once with `Interrupted`."""
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        self._storage.close()

    def _patiently(self, ask: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._timeout_s
        attempt = 0
        while not self._stopped.is_set():
            attempt += 1
            try:
                return ask()
            except StorageError as error:
                error.attempts = attempt
                if not error.transient or attempt > self._retries:
                    raise
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                pause = min(_backoff_s(attempt), left_s / 4)
            with self._lock:
                self._num_retries += 1
            self._stopped.wait(pause)
        raise Interrupted("reading stopped because the load failed elsewhere")
