"""Measures how storage answers the requests of one connection: time to the first byte, and rate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from fastload.formats.manifest import FileEntry
from fastload.storage import Storage
from fastload.transfer.pace import MOST_READS

READ_BYTES = 8 << 20
_FIRST_BYTES = 1 << 20
_LEAST_BYTES = 256 << 10  # from which a rate can be told
_NUM_WAITS, _NUM_READS = 5, 3
_SLOW_S = 0.5  # of a first read; a link this slow is measured by that one


@dataclass(frozen=True)
class Answers:
    """How storage answers one request at a time.

    Attributes:
        latency_s: Time to the first byte.
        connection_bytes_per_s: Rate after it; 0 if the files are too small to tell.
    """

    latency_s: float
    connection_bytes_per_s: float

    @property
    def most_bytes_per_s(self) -> float:
        """The most that a rank reads."""
        return MOST_READS * READ_BYTES / (self.latency_s + READ_BYTES / self.connection_bytes_per_s)


def measure_answers(storage: Storage, file: FileEntry) -> Answers:
    """Reads a few ranges of a file, one after the other.

    Raises:
        StorageError: A read failed.
    """
    _read_s(storage, file, 1)  # connects
    latency_s = median(_read_s(storage, file, 1) for _ in range(_NUM_WAITS))
    nbytes = min(_FIRST_BYTES, file.nbytes)
    if nbytes < _LEAST_BYTES:
        return Answers(latency_s, 0.0)
    seconds = _read_s(storage, file, nbytes)
    if seconds < _SLOW_S:
        nbytes = min(READ_BYTES, file.nbytes)
        seconds = median(_read_s(storage, file, nbytes) for _ in range(_NUM_READS))
    return Answers(latency_s, nbytes / max(seconds - latency_s, 0.01 * seconds))


def _read_s(storage: Storage, file: FileEntry, nbytes: int) -> float:
    buffer = memoryview(bytearray(nbytes))
    began = time.perf_counter()
    storage.read_into(file.name, 0, [buffer], file.version)
    return time.perf_counter() - began
