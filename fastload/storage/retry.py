"""Retries after transient errors, for loads and saves."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fastload.errors import Interrupted, StorageError
from fastload.options import Patience
from fastload.storage.base import FileStat, Folder, Storage
from fastload.storage.local import LocalStorage, Mapped
from fastload.storage.reader import ForwardingReader

T = TypeVar("T")

FIRST_BACKOFF_S = 0.8
MAX_BACKOFF_S = 8.0


def _backoff_s(attempt: int) -> float:
    """Returns the pause after an attempt, counted from 1.

    With jitter, since ranks that failed together must not retry together; only over the upper half, so that
    four more attempts outlast an outage of 5 s.
    """
    longest = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(attempt - 1, 10))
    return random.uniform(longest / 2, longest)


def patiently(
    ask: Callable[[], T],
    is_transient: Callable[[Exception], bool],
    patience: Patience,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Makes a request, and repeats it after transient errors.

    Args:
        ask: Makes the request.
        is_transient: Whether another attempt could succeed after an error.
        patience: The number of attempts, and the time for them. Each attempt must have its own limit.
        wait: Waits a number of seconds before another attempt, or raises to stop.
    """
    deadline, attempt = time.monotonic() + patience.timeout_s, 0
    while True:
        attempt += 1
        try:
            return ask()
        except Exception as error:
            left_s, asked_s = deadline - time.monotonic(), 0.0
            vars(error)["attempts"] = attempt  # also of a library's error, which becomes a `StorageError`
            if isinstance(error, StorageError):
                asked_s = error.retry_after_s
            pause_s = asked_s + min(_backoff_s(attempt), (left_s - asked_s) / 4)
            if not is_transient(error) or attempt > patience.retries or asked_s >= left_s:
                raise
        wait(pause_s)


class PatientStorage(ForwardingReader[Storage]):
    """A storage that retries after transient errors, with jitter, until a deadline.

    Args:
        storage: The storage.
        patience: The number of attempts, and the time for them.
    """

    def __init__(self, storage: Storage, patience: Patience) -> None:
        super().__init__(storage)
        self._patience = patience
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._num_retries = 0
        self._num_requests = 0  # under way
        self._is_closed = False
        self._listing: list[str] | None = None
        self._stats: dict[str, FileStat | None] = {}

    @property
    def num_retries(self) -> int:
        return self._num_retries

    def stat(self, name: str) -> FileStat | None:
        self._stats[name] = stat = self._patiently(lambda: self._first.stat(name))
        return stat

    def list(self) -> list[str] | None:
        self._listing = names = self._patiently(self._first.list)
        return names

    def agrees_with(self, fresh: Storage) -> bool:
        if fresh.list() != self._listing:
            return False
        return all(
            fresh.stat(name) == stat and (stat is None or bool(stat.version))
            for name, stat in self._stats.items()
        )

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        return self._patiently(lambda: self._first.folders(prefix))

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        self._patiently(lambda: self._first.read_into(name, offset, buffers, version))

    def read_all(self, name: str, about: FileStat) -> bytes:
        return self._patiently(lambda: self._first.read_all(name, about))

    def map(self, name: str) -> Mapped | None:
        storage = self._first
        return self._patiently(lambda: storage.map(name)) if isinstance(storage, LocalStorage) else None

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        """Refuses new requests, and closes the storage: now, or after the last request under way."""
        with self._lock:
            self.stop()
            is_due = not (self._is_closed or self._num_requests)
            self._is_closed = True
        if is_due:
            self._first.close()

    def _patiently(self, ask: Callable[[], T]) -> T:
        with self._lock:
            self._require_running()
            self._num_requests += 1
        try:
            return patiently(ask, _is_transient, self._patience, self._wait)
        finally:
            with self._lock:
                self._num_requests -= 1
                is_last = self._is_closed and not self._num_requests
            if is_last:
                self._first.close()

    def _wait(self, pause_s: float) -> None:
        with self._lock:
            self._num_retries += 1
        self._stopped.wait(pause_s)
        self._require_running()

    def _require_running(self) -> None:
        if self._stopped.is_set():
            raise Interrupted("reading stopped because the load failed on another rank")


def _is_transient(error: Exception) -> bool:
    return isinstance(error, StorageError) and error.transient
