"""Calls into libraries that may block for ever, given a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from fastload.errors import DeadlineExceeded

__all__ = ["within"]

T = TypeVar("T")


def within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """Returns what a call returns or raises, unless that takes too long.

    The call runs in a thread of its own, and is left behind there if it takes too long: nothing can
    interrupt a thread that is inside a library. Being a daemon, it does not hold up the exit.

    Raises:
        DeadlineExceeded: It took too long.
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

    threading.Thread(target=run, name="fastload-call", daemon=True).start()
    if not ended.wait(limit_s):
        raise DeadlineExceeded(f"{what} did not end within {limit_s:.1f} s")
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # else error → traceback → frame → error would keep all their memory alive
    return values[0]
