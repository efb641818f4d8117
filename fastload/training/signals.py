"""Signals that ask a job to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any

from fastload.base.threads import Task

_log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Handlers of stop signals, which record them and call the previous handlers.

    Only the main thread can set handlers; in another thread this does nothing. A handler in C cannot be
    called from Python, so it stays in place. A forked child has the previous handlers.

    Args:
        on_signal: Called in a thread soon after the first signal. A handler itself can interrupt any code,
            so it must not take locks.

    Attributes:
        received: Whether a signal has arrived.
        handlers: The handlers that call `note`.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self.received = False
        self.handlers: list[_Handler] = []
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        if threading.current_thread() is not threading.main_thread():
            return
        Task(lambda: self._serve(on_signal), "fastload-signals").start()
        _open.append(self)
        for number in STOP_SIGNALS:
            _listen(self, number)

    def close(self) -> None:
        """Restores the previous handlers, once no other object uses these.

        A handler that was set on top stays.
        """
        if self in _open:
            _open.remove(self)
        _restore_handlers()
        self._queue.put(None)

    def note(self, number: int) -> None:
        """Records a signal; safe in a signal handler."""
        self.received = True
        self._queue.put(number)  # reentrant

    def _serve(self, on_signal: Callable[[], None]) -> None:
        is_logged = False
        while (number := self._queue.get()) is not None:
            if not is_logged:
                is_logged = True
                _log.info("%s: asking all ranks to save and stop", signal.Signals(number).name)
                on_signal()


_open: list[StopSignals] = []  # in this process
_forking = threading.local()


class _Handler:
    """Handler of one signal for all listeners, which may close in any order.

    A handler on top may call this one when it has no listeners any more, or in a child. It then does what
    the previous handler would have done.
    """

    def __init__(self, before: Any) -> None:
        self.before = before

    @property
    def listeners(self) -> list[StopSignals]:
        return [one for one in list(_open) if self in one.handlers]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for listener in self.listeners:
            listener.note(number)
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL and not _open:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _listen(listener: StopSignals, number: int) -> None:
    now = signal.getsignal(number)
    if now is None:
        return
    handler = now if isinstance(now, _Handler) else _Handler(now)
    listener.handlers.append(handler)
    signal.signal(number, handler)


def _restore_handlers() -> None:
    for number in STOP_SIGNALS:
        top = signal.getsignal(number)
        if isinstance(top, _Handler) and not top.listeners:
            with suppress(ValueError):  # not the main thread
                signal.signal(number, top.before)


def _before_fork() -> None:
    """Blocks signals, since Python loses those that reach a child before its first instruction."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) if _open else None


def _after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    _open.clear()
    _restore_handlers()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
