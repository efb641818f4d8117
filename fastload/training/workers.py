"""Processes that prepare data, such as a DataLoader's workers: they outlive signals that ask the job to stop.

Launchers and Slurm send those to every process of a job. The ranks save; a worker that dies of one ends the
training of its rank before it can.
"""

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

__all__ = ["worker_context"]


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
