"""Threads that nobody has to wait for, and calls into libraries with a deadline."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

from fastload.errors import DeadlineExceeded, Interrupted

__all__ = ["background", "within"]

T = TypeVar("T")

_LEAVING_S = 1.0
_TICK_S = 0.05
_threads: WeakSet[threading.Thread] = WeakSet()


def background(target: Callable[[], object], name: str) -> threading.Thread:
    """Makes a thread, to be started by the caller, that does not keep the process from ending."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    _threads.add(thread)
    return thread


@atexit.register
def _await_threads() -> None:
    """Gives the threads that are about to end the time for it.

    A thread that returns from C++ when the interpreter is already gone takes the process down
    (`terminate called without an active exception`). One that hangs for good does no harm.
    """
    deadline = time.monotonic() + _LEAVING_S
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def within(
    limit_s: float,
    what: str,
    call: Callable[[], T],
    *,
    since: Callable[[], float] = float,
    give_up: Callable[[], bool] | None = None,
) -> T:
    """Returns what a call returns or raises, unless that takes too long.

    The call runs in a thread of its own, and is left behind there if it takes too long: nothing can
    interrupt a thread that is inside a library.

    Args:
        limit_s: How long it may take.
        what: What is called, for the message.
        call: The call.
        since: Returns the `time.monotonic` from which the limit counts, if that is after the beginning.
        give_up: Asked again and again; True ends the wait.

    Raises:
        DeadlineExceeded: It took too long.
        Interrupted: `give_up` said so.
    """
    values: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            values.append(call())
        except BaseException as error:
            errors.append(error)
        ended.set()

    def left_s() -> float:
        return max(began, since()) + limit_s - time.monotonic()

    began = time.monotonic()
    background(run, "fastload-call").start()
    longest_s = limit_s if give_up is None else _TICK_S
    while not ended.wait(min(longest_s, max(0.0, left_s()))):
        if give_up is not None and give_up():
            raise Interrupted(f"{what}: another rank failed")
        if left_s() <= 0:
            raise DeadlineExceeded(f"{what} did not end within {limit_s:.1f} s")
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # else error → traceback → frame → error would keep all their memory alive
    return values[0]
