"""Signals that ask a job to stop, as Slurm sends them before a time limit."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any

from fastload.patience import background

__all__ = ["STOP_SIGNALS", "StopSignals"]

_log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes signals instead of dying of them, and passes them on to the handlers that were there before.

    Only the main thread may have handlers; made in another one, this does nothing. A handler of C code
    cannot be passed on to, so it is left in place.

    Args:
        tell: Called soon after the first signal, in a thread: a handler may interrupt anything, and so
            must not take a lock.

    Attributes:
        received: Whether there was one.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self.received = False
        self._before: dict[int, Any] = {}
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        if threading.current_thread() is not threading.main_thread():
            return
        background(lambda: self._serve(tell), "fastload-signals").start()
        for number in STOP_SIGNALS:
            if (before := signal.getsignal(number)) is not None:
                self._before[number] = before
                signal.signal(number, self._handle)

    def close(self) -> None:
        """Puts back the handlers that were there before, unless somebody has put others since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                with suppress(ValueError):  # not the main thread
                    signal.signal(number, before)
        self._queue.put(None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._queue.put(number)  # which may be called in the middle of another call of it
        before = self._before[number]
        if callable(before):
            before(number, frame)

    def _serve(self, tell: Callable[[], None]) -> None:
        told = False
        while (number := self._queue.get()) is not None:
            if not told:
                told = True
                _log.warning("%s: asking all ranks to save and stop", signal.Signals(number).name)
                tell()
