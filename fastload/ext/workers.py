"""Worker processes that survive the signals that ask a job to stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, resource_tracker
from typing import ClassVar

from fastload.errors import OptionError
from fastload.training.signals import STOP_SIGNALS


def worker_context(method: str | None = None) -> context.BaseContext:
    """Returns a multiprocessing context whose processes survive SIGTERM and SIGUSR1.

    Only SIGTERM from their parent ends them; a DataLoader ends workers in this way::

        loader = DataLoader(data, num_workers=8, multiprocessing_context=fastload.worker_context())

    Processes that they start have both signals blocked: ``kill`` ends them, ``terminate`` does not.

    Args:
        method: ``fork``, ``spawn`` or ``forkserver``; None for the default of the system.

    Raises:
        OptionError: There is no such method.
    """
    name = method if method is not None else multiprocessing.get_start_method()
    if name not in _CONTEXTS:
        raise OptionError(f"method={method!r}: must be one of {', '.join(_CONTEXTS)}")
    if name != "fork":  # which has no resource tracker
        with _blocked_signals():
            resource_tracker.ensure_running()
    return _CONTEXTS[name]


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks the signals in the block, also in processes that it starts, until they can receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_with_parent(parent_pid: int | None) -> None:
    """Receives the blocked signals in a loop, since a handler does not get the sender."""
    while True:
        received = signal.sigwaitinfo(STOP_SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent_pid:
            os._exit(0)  # at once, as torch's own handler does


class _SignalSafeProcess:
    """The common part of the processes of all three start methods."""

    def start(self) -> None:
        with _blocked_signals():
            super().start()  # type: ignore[misc]

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        threading.Thread(
            target=_exit_with_parent, args=(parent.pid,), name="fastload-parent", daemon=True
        ).start()
        super().run()  # type: ignore[misc]


class _Fork(_SignalSafeProcess, context.ForkProcess):
    pass


class _Spawn(_SignalSafeProcess, context.SpawnProcess):
    pass


class _ForkServer(_SignalSafeProcess, context.ForkServerProcess):
    pass


class _ForkContext(context.ForkContext):
    Process: ClassVar[type] = _Fork


class _SpawnContext(context.SpawnContext):
    Process: ClassVar[type] = _Spawn


class _ForkServerContext(context.ForkServerContext):
    Process: ClassVar[type] = _ForkServer


_CONTEXTS = {"fork": _ForkContext(), "spawn": _SpawnContext(), "forkserver": _ForkServerContext()}
