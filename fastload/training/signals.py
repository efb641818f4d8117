"""Signals that ask a job to stop, and worker processes that outlive them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context, resource_tracker
from queue import SimpleQueue
from types import FrameType
from typing import Any, ClassVar

from fastload.base.tasks import Task
from fastload.errors import OptionError

_log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes signals instead of dying of them, and passes them on to the handlers that were there before.

    Only the main thread may have handlers; made in another one, this does nothing. A handler of C code
    cannot be passed on to, so it is left in place. A forked child has what was there before.

    Args:
        tell: Called soon after the first signal, in a thread: a handler may interrupt anything, and so
            must not take a lock.

    Attributes:
        received: Whether there was one.
        handlers: What calls `note`.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self.received = False
        self.handlers: list[_Handler] = []
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        if threading.current_thread() is not threading.main_thread():
            return
        Task(lambda: self._serve(tell), "fastload-signals").start()
        _open.append(self)
        for number in STOP_SIGNALS:
            _listen(self, number)

    def close(self) -> None:
        """Puts back the handlers that were there before, once nobody else needs this one.

        Not where somebody has put another handler on top since.
        """
        if self in _open:
            _open.remove(self)
        _put_back()
        self._queue.put(None)

    def note(self, number: int) -> None:
        """Takes a signal; a handler may call it at any time."""
        self.received = True
        self._queue.put(number)  # which may be called in the middle of another call of it

    def _serve(self, tell: Callable[[], None]) -> None:
        warned = False
        while (number := self._queue.get()) is not None:
            if not warned:
                warned = True
                _log.warning("%s: asking all ranks to save and stop", signal.Signals(number).name)
                tell()


_open: list[StopSignals] = []  # of this process
_forking = threading.local()


class _Handler:
    """Handles one signal for all that listen while it is on top, so they may end in any order.

    Whoever has put another handler on top may go on to call this one when nobody listens any more, or in a
    child: it then does what would have been done without it.
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


def _put_back() -> None:
    for number in STOP_SIGNALS:
        top = signal.getsignal(number)
        if isinstance(top, _Handler) and not top.listeners:
            with suppress(ValueError):  # not the main thread
                signal.signal(number, top.before)


def _before_fork() -> None:
    """Holds signals back: Python forgets those that reach a child before it runs."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) if _open else None


def _after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    _open.clear()
    _put_back()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def worker_context(method: str | None = None) -> context.BaseContext:
    """Returns a multiprocessing context whose processes end neither of SIGTERM nor of SIGUSR1.

    Their parent's SIGTERM excepted, with which a DataLoader ends what does not end by itself::

        loader = DataLoader(data, num_workers=8, multiprocessing_context=fastload.worker_context())

    What they start in turn has the two signals blocked: ``kill`` ends it, ``terminate`` does not.

    Args:
        method: ``fork``, ``spawn`` or ``forkserver``; None for what is the default here.

    Raises:
        OptionError: There is no such method.
    """
    name = method if method is not None else multiprocessing.get_start_method()
    if name not in _CONTEXTS:
        raise OptionError(f"method={method!r}: must be one of {', '.join(_CONTEXTS)}")
    if name != "fork":  # else there is none
        with _held_back():
            resource_tracker.ensure_running()
    return _CONTEXTS[name]


@contextmanager
def _held_back() -> Iterator[None]:
    """Lets what is started meanwhile begin with the signals blocked: a process that still starts is deaf."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_parent(parent_pid: int | None) -> None:
    """Takes the blocked signals, for ever: a handler would not learn who has sent them."""
    while True:
        came = signal.sigwaitinfo(STOP_SIGNALS)
        if came.si_signo == signal.SIGTERM and came.si_pid == parent_pid:
            os._exit(0)  # as torch's own handler does, in the middle of whatever the worker is at


class _Sheltered:
    """What the processes of all three methods have in common."""

    def start(self) -> None:
        with _held_back():
            super().start()  # type: ignore[misc]

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        threading.Thread(target=_heed_parent, args=(parent.pid,), name="fastload-heed", daemon=True).start()
        super().run()  # type: ignore[misc]


class _Fork(_Sheltered, context.ForkProcess):
    pass


class _Spawn(_Sheltered, context.SpawnProcess):
    pass


class _ForkServer(_Sheltered, context.ForkServerProcess):
    pass


class _ForkContext(context.ForkContext):
    Process: ClassVar[type] = _Fork


class _SpawnContext(context.SpawnContext):
    Process: ClassVar[type] = _Spawn


class _ForkServerContext(context.ForkServerContext):
    Process: ClassVar[type] = _ForkServer


_CONTEXTS = {"fork": _ForkContext(), "spawn": _SpawnContext(), "forkserver": _ForkServerContext()}
