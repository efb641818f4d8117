"""Threads that nobody has to wait for, and calls into libraries with a deadline."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from fastload.base.tasks import Task
from fastload.errors import DeadlineExceeded, Interrupted

T = TypeVar("T")

_TICK_S = 0.05


def background(target: Callable[[], object], name: str) -> Task:
    """Makes an task, to be started by the caller: a thread that does not keep the process from ending."""
    return Task(target, name)


class ProcessLock:
    """A lock for what a process has once; in a forked child no thread of the parent's holds it."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        """Takes it; without blocking only if it is free, and says so."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Lets go of it."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Workers:
    """Threads that make calls; unlike an executor's, they hold up no exit.

    Args:
        num_threads: Calls at once; they begin in the order in which they are submitted.
        name: Of the threads, each of which starts once there is a call for it.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._most = num_threads
        self._name = name
        self._threads: list[Task] = []
        self._lock = threading.Lock()
        self._num_calls = 0
        self._num_serving = 0
        self._at_end: list[Callable[[], object]] = []

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes a call as soon as a thread is free.

        Raises:
            RuntimeError: The system lets no thread begin.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._num_calls >= len(self._threads) < self._most:
                self._start()
            self._num_calls += 1
        self._calls.put((call, future))
        return future

    def _start(self) -> None:
        """Starts one more thread; where the system lets no more begin, those that there are have to do."""
        thread = background(self._serve, f"{self._name}-{len(self._threads)}")
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            self._most = len(self._threads)
        else:
            self._threads.append(thread)
            self._num_serving += 1

    def close(self, *, wait_s: float) -> bool:
        """Ends the threads after the calls submitted so far; returns whether they have ended in time."""
        deadline = time.monotonic() + wait_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def at_end(self, call: Callable[[], object]) -> None:
        """Calls something once no call is under way any more: now, or in the last thread to end."""
        with self._lock:
            if self._num_serving:
                self._at_end.append(call)
                return
        call()

    def _serve(self) -> None:
        try:
            self._serve_all()
        finally:
            with self._lock:
                self._num_serving -= 1
                calls = self._at_end if not self._num_serving else []
            for call in calls:
                call()

    def _serve_all(self) -> None:
        while (submitted := self._calls.get()) is not None:
            call, future = submitted
            del submitted
            try:
                result = call()
            except BaseException as error:
                self._free()
                future.set_exception(error)
            else:
                self._free()
                future.set_result(result)
                del result
            del call, future  # a thread that waits for more keeps no memory

    def _free(self) -> None:
        """Notes that a thread is free, before whoever hears of what it did wants the next call made."""
        with self._lock:
            self._num_calls -= 1


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
    try:
        background(run, "fastload-call").start()
    except RuntimeError:
        run()  # there is no memory for a thread: rather without an end than not at all, since others wait
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


def await_done(
    work: Future[Any],
    *,
    give_up: Callable[[], bool],
    limit_s: float = math.inf,
    late: Callable[[], Exception | None] | None = None,
) -> None:
    """Waits until a call that a thread makes has returned or raised, no longer than the others go on.

    Args:
        work: The call.
        give_up: Asked again and again; True ends the wait.
        limit_s: How long to wait.
        late: Returns what to raise then; None waits on.

    Raises:
        Interrupted: `give_up` said so.
    """
    deadline = time.monotonic() + limit_s
    while not give_up():
        with suppress(NotYet):
            work.exception(_TICK_S)
        if work.done():
            return
        if late is not None and time.monotonic() > deadline and (error := late()) is not None:
            raise error
    raise Interrupted("another rank failed")


def each(names: Iterable[str], call: Callable[[str], object], *, num_threads: int) -> None:
    """Calls with every name, several at a time; raises the first error once all have returned."""
    left = sorted(names, reverse=True)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                if not left:
                    return
                name = left.pop()
            try:
                call(name)
            except BaseException as error:
                errors.append(error)

    threads = [background(work, "fastload-each") for _ in range(min(num_threads, len(left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # else error → traceback → frame → error would keep all their memory alive
