"""Tasks in daemon threads, worker threads, and calls into libraries with a deadline.

A thread stays for a moment after its task, so that the next task starts faster.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from fastload.base.devices import adopt_device, own_device
from fastload.errors import DeadlineExceeded, Interrupted

_LEAVING_S = 1.0
_IDLE_S = 1.0  # for less frequent tasks a new thread is fast enough
_IDLE_NAME = "fastload-idle"
_TICK_S = 0.05
_AT_ONCE = 8  # requests; network storage answers each after a round trip

S = TypeVar("S")
T = TypeVar("T")


class Task:
    """Work in a thread that does not keep the process from exiting, with the current device of its starter.

    Args:
        work: The work. An exception that it raises ends the thread.
        name: Name of the thread meanwhile.
        ends_thread: Whether the thread ends with the work, since the work may spoil it for others.

    Attributes:
        ends_thread: As given.
    """

    def __init__(self, work: Callable[[], object], name: str, *, ends_thread: bool = False) -> None:
        self._work: Callable[[], object] | None = work
        self._name = name
        self.ends_thread = ends_thread
        self._has_begun = False
        self._device: int | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts the work.

        Raises:
            RuntimeError: The system cannot start a thread.
        """
        self._has_begun = True
        self._device = own_device()
        try:
            _pool.send(self)
        except BaseException:
            self._has_begun = False
            raise

    def is_alive(self) -> bool:
        """Whether the work is under way."""
        return self._has_begun and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the work, if it has begun, for at most `timeout` seconds."""
        if self._has_begun:
            self._ended.wait(timeout)

    def do(self) -> None:
        """Does the work in this thread."""
        threading.current_thread().name = self._name
        adopt_device(self._device)
        work, self._work = self._work, None
        assert work is not None, "done once"
        work()

    def end(self) -> None:
        """Ends `join`."""
        self._ended.set()


class _ThreadPool:
    """Starts tasks in idle threads, the last one to become idle first."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Starts over, also in a forked child, which has none of the threads."""
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Task | None]] = []
        self._under_way: WeakSet[Task] = WeakSet()

    def send(self, task: Task) -> None:
        """Starts a task.

        Raises:
            RuntimeError: The system cannot start a thread.
        """
        with self._lock:
            self._under_way.add(task)
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(task)
        else:
            threading.Thread(target=self._serve, args=([task],), name=_IDLE_NAME, daemon=True).start()

    def _serve(self, tasks: list[Task | None]) -> None:
        inbox: SimpleQueue[Task | None] = SimpleQueue()
        while (task := tasks.pop()) is not None:
            try:
                task.do()
                if task.ends_thread:
                    return
                threading.current_thread().name = _IDLE_NAME
                with self._lock:
                    self._idle.append(inbox)  # before `join` returns, so that the next task finds it
            finally:
                task.end()
            del task  # so that an idle thread keeps no memory alive
            tasks.append(self._await(inbox))

    def _await(self, inbox: SimpleQueue[Task | None]) -> Task | None:
        """Returns the next task; None if there has been none for a moment."""
        try:
            return inbox.get(timeout=_IDLE_S)
        except Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
            return inbox.get()

    def dismiss(self) -> None:
        """Waits a moment for threads at the exit of the process.

        A thread that returns from C++ after the interpreter is gone aborts the process (`terminate called
        without an active exception`). One that never returns does no harm.
        """
        deadline = time.monotonic() + _LEAVING_S
        with self._lock:  # a set cannot change while it is iterated
            under_way = list(self._under_way)
        for task in under_way:
            if task.is_alive():
                task.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)


_pool = _ThreadPool()
atexit.register(_pool.dismiss)


class ProcessLock:
    """A lock for process-wide state, which is free in a forked child."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        """Acquires the lock, or returns False if it is held and `blocking` is False."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Releases the lock."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Workers:
    """A thread pool whose threads, unlike an executor's, do not delay the exit of the process.

    Args:
        num_threads: Most calls at once; calls begin in the order in which they are submitted.
        name: Prefix of the names of the threads, which start when they are needed.
        end_threads: Whether the threads serve nobody else afterwards.
    """

    def __init__(self, num_threads: int, name: str, *, end_threads: bool = False) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._most = num_threads
        self._end_threads = end_threads
        self._name = name
        self._threads: list[Task] = []
        self._num_threads = 0  # of them, that will take another call
        self._lock = threading.Lock()
        self._num_calls = 0
        self._is_closed = False

    @property
    def num_calls(self) -> int:
        """Calls that were submitted and have not returned."""
        return self._num_calls

    @property
    def is_idle(self) -> bool:
        """Whether all calls submitted so far have returned."""
        with self._lock:
            return not self._num_calls

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes a call as soon as a thread is free.

        Raises:
            RuntimeError: The system cannot start a thread, or the pool is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: no call after the end")
            if self._num_calls >= self._num_threads < self._most:
                self._start()
            self._num_calls += 1
        self._calls.put((call, future))
        return future

    def submit_all(self, calls: Sequence[Callable[[], object]]) -> Future[Any]:
        """Makes calls as soon as threads are free; the future ends once all have, with the first error.

        Args:
            calls: At least one.

        Raises:
            RuntimeError: As for `submit`.
        """
        if len(calls) == 1:
            return self.submit(calls[0])
        ended: Future[None] = Future()
        parts, num_done, lock = list[Future[object]](), count(1), threading.Lock()

        def note(_: Future[object]) -> None:
            with lock:
                is_last = next(num_done) == len(calls)
            if is_last:
                error = next((error for part in parts if (error := part.exception()) is not None), None)
                parts.clear()  # which refer to this function
                if error is None:
                    ended.set_result(None)
                else:
                    ended.set_exception(error)
                del error

        parts += [self.submit(call) for call in calls]
        for part in tuple(parts):
            part.add_done_callback(note)
        return ended

    def set_most(self, num_threads: int) -> None:
        """Changes the number of calls at once; calls under way go on. After `close` no thread starts."""
        with self._lock:
            self._most = num_threads
            # Nobody would end a thread that starts after `close`.
            while not self._is_closed and self._num_threads < min(self._most, self._num_calls):
                self._start()

    def _start(self) -> None:
        """Starts one more thread, unless the system cannot and there are others."""
        name = f"{self._name}-{len(self._threads)}"
        thread = Task(self._serve, name, ends_thread=self._end_threads)
        try:
            thread.start()
        except RuntimeError:
            if not self._num_threads:
                raise
            self._most = self._num_threads
        else:
            self._threads.append(thread)
            self._num_threads += 1

    def close(self, *, wait_s: float) -> bool:
        """Ends the threads after the calls submitted so far; returns whether they ended in time."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._is_closed, threads = True, tuple(self._threads)
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while not self._ends_one() and (submitted := self._calls.get()) is not None:
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
            del call, future  # so that an idle thread keeps no memory alive

    def _ends_one(self) -> bool:
        """Whether there is one thread too many."""
        with self._lock:
            is_too_many = self._num_threads > self._most
            self._num_threads -= is_too_many
        return is_too_many

    def _free(self) -> None:
        """Counts a thread as free, before its result is known and leads to the next call."""
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
    """Returns the result of a call, unless it takes too long.

    The call runs in another thread, which is abandoned after the limit: a thread inside a library cannot be
    interrupted.

    Args:
        limit_s: Longest duration.
        what: Name of the call, for messages.
        call: The call; an exception that it raises is raised here.
        since: Returns a later `time.monotonic` from which the limit counts, if any.
        give_up: Polled; True ends the wait.

    Raises:
        DeadlineExceeded: It took too long.
        Interrupted: `give_up` returned True.
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
        Task(run, "fastload-call").start()
    except RuntimeError:
        run()  # no memory for a thread: without a deadline, but other ranks wait for this call
    longest_s = limit_s if give_up is None else _TICK_S
    while not ended.wait(min(longest_s, max(0.0, left_s()))):
        if give_up is not None and give_up():
            raise Interrupted(f"{what}: another rank failed")
        if left_s() <= 0:
            raise DeadlineExceeded(f"{what} did not end within {limit_s:.1f} s")
    raise_first(errors)
    return values[0]


def raise_first(errors: list[BaseException]) -> None:
    """Raises the first of some errors, if there are any, and empties the list."""
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # else error → traceback → frame → error would keep all their memory alive


def await_done(
    work: Future[Any],
    *,
    give_up: Callable[[], bool],
    limit_s: float = math.inf,
    late: Callable[[], Exception | None] | None = None,
) -> None:
    """Waits until a future is done.

    Args:
        work: The future.
        give_up: Polled; True ends the wait.
        limit_s: Time after which `late` is called repeatedly.
        late: Returns an error to raise; None continues to wait.

    Raises:
        Interrupted: `give_up` returned True.
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


def in_threads(function: Callable[[S], T], items: Sequence[S], at_once: int = _AT_ONCE) -> list[T]:
    """Maps items in threads. Raises the first failure in the order of the items, which is deterministic.

    Args:
        function: Called in threads.
        items: Its arguments.
        at_once: Most threads.
    """
    places, results, errors = count(), dict[int, T](), dict[int, BaseException]()

    def work() -> None:
        # All items before one that fails have begun, and end.
        while not errors and (place := next(places)) < len(items):
            try:
                results[place] = function(items[place])
            except BaseException as error:
                errors[place] = error

    threads = [Task(work, "fastload-map") for _ in range(min(at_once, len(items)))]
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:  # fewer do as well
            if not number:
                raise
        if len(results) == len(items):  # of which none takes as long as a thread takes to start
            break
    for thread in threads:
        thread.join()
    if errors:
        try:
            raise errors[min(errors)]
        finally:
            errors.clear()  # else error → traceback → frame → error would keep all their memory alive
    return [results[place] for place in range(len(items))]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Makes calls in threads, as `in_threads`, and returns their results."""
    return in_threads(lambda call: call(), calls)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Has torch's operations on CPUs run in the calling thread alone, where torch uses OpenMP.

    Threads of OpenMP wait for each other at each operation: while other threads are busy, that takes many
    times as long. The number is a setting of each thread, unlike that of `torch.set_num_threads`.
    """
    set_num_threads, num_threads = _omp_set_num_threads(), torch.get_num_threads()
    if set_num_threads is None or num_threads == 1:
        yield
        return
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(num_threads)


@cache
def _omp_set_num_threads() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(torch._C.__file__).omp_set_num_threads
    except (AttributeError, OSError):
        return None
