"""Short work in threads that are kept for a moment: the next work need not wait until one has begun."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from weakref import WeakSet

_LEAVING_S = 1.0
_IDLE_S = 1.0  # calls that follow each other more slowly do not mind a new thread
_IDLE_NAME = "idle"


class Task:
    """Work that a thread of its own does, which does not keep the process from ending.

    Args:
        work: The work. What it raises ends the thread, as in any thread.
        name: Of the thread meanwhile.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work: Callable[[], object] | None = work
        self._name = name
        self._has_begun = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Begins.

        Raises:
            RuntimeError: The system lets no thread begin.
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
        """Waits for its end, if it has begun, no longer than a timeout in seconds."""
        if self._has_begun:
            self._ended.wait(timeout)

    def do(self) -> None:
        """Does the work in this thread."""
        threading.current_thread().name = self._name
        work, self._work = self._work, None
        assert work is not None, "done once"
        work()

    def end(self) -> None:
        """Tells those who wait for its end."""
        self._ended.set()


class _ThreadPool:
    """The threads that have nothing to do, the last one to have ended something first."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child there are none."""
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Task | None]] = []
        self._under_way: WeakSet[Task] = WeakSet()

    def send(self, task: Task) -> None:
        """Has a thread do something.

        Raises:
            RuntimeError: The system lets no thread begin.
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
                    self._idle.append(inbox)  # before anybody who waits for the end has the next task
            finally:
                task.end()
            del task  # a thread that waits for more keeps no memory
            tasks.append(self._await(inbox))

    def _await(self, inbox: SimpleQueue[Task | None]) -> Task | None:
        """Returns what is to be done next; None if there has been nothing for a moment."""
        try:
            return inbox.get(timeout=_IDLE_S)
        except Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
            return inbox.get()

    def dismiss(self) -> None:
        """Gives the threads that are about to end the time for it.

        A thread that returns from C++ when the interpreter is already gone takes the process down
        (`terminate called without an active exception`). One that hangs for good does no harm.
        """
        deadline = time.monotonic() + _LEAVING_S
        with self._lock:  # else one that begins meanwhile would end the walk over them
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
