"""The rate and the priority of a server."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import threading
from contextlib import suppress

_NICE = 10
# From the headers of Linux: ioprio_set(IOPRIO_WHO_PROCESS, this thread, IOPRIO_CLASS_IDLE << 13).
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS, _CLASS_IDLE = 1, 3 << 13
_PART_S = 0.05
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 8 << 20
_FAST_S = 0.1
FIRST_PART_BYTES = 256 << 10
"""What is sent first of a file, to a client whose speed is not known."""
_MOST_CREDIT_S = 0.1  # timers are late


class Rate:
    """Spreads what a server sends over time, over all its connections.

    Args:
        bytes_s: Bytes per second; None for no limit.
    """

    def __init__(self, bytes_s: int | None) -> None:
        self._bytes_s = bytes_s
        self._due_s = 0.0  # of the loop's clock: when the next bytes may go

    @property
    def part_bytes(self) -> int:
        """The most bytes to send at once."""
        if self._bytes_s is None:
            return _MOST_BYTES
        return min(max(int(self._bytes_s * _PART_S), _LEAST_BYTES), _MOST_BYTES)

    async def wait(self, nbytes: int) -> None:
        """Waits until so many bytes may be sent."""
        if self._bytes_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        begin_s = max(self._due_s, now_s - _MOST_CREDIT_S)
        self._due_s = begin_s + nbytes / self._bytes_s
        await asyncio.sleep(begin_s - now_s)


def next_part(part_bytes: int, took_s: float) -> int:
    """Returns how much to send next, so that a slow client takes it long before it seems to stall.

    Args:
        part_bytes: What was sent last.
        took_s: How long that took.
    """
    return 2 * part_bytes if took_s < _FAST_S else max(part_bytes // 2, _LEAST_BYTES)


def give_way() -> None:
    """Lets other threads of this host run and read before this one, which is of Linux."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE)
