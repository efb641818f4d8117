"""Tasks in a pool of daemon threads, each of which is kept for a moment to start the next task faster."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from weakref import WeakSet

_LEAVING_S = 1.0
_IDLE_S = 1.0  # for less frequent tasks a new thread is fast enough
_IDLE_NAME = "idle"


class Task:
    """Work in a thread that does not keep the process from exiting.

    Args:
        work: The work. An exception that it raises ends the thread.
        name: Name of the thread meanwhile.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work: Callable[[], object] | None = work
        self._name = name
        self._has_begun = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts the work.

        Raises:
            RuntimeError: The system cannot start a thread.
        """
        self._has_begun = True
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
