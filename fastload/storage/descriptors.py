"""Descriptors within the limit of the process: the least recently used are closed, and reopened on use."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice

from fastload.base.threads import ProcessLock

_PART = 8  # share of the descriptors of the process; the rest is for the program
_FEWEST = 4


class DescriptorPool:
    """Counts open descriptors. Those in use stay open, even above the limit.

    Args:
        lock: Lock to use; None for a new one.
    """

    def __init__(self, lock: ProcessLock | None = None) -> None:
        self._lock = lock if lock is not None else threading.Lock()
        self._abandoned: deque[Descriptor] = deque()
        self._num_open = 0
        self._idle: OrderedDict[_Open, None] = OrderedDict()  # the longest unused first

    def take(self, descriptor: Descriptor) -> _Open | None:
        """Adds a user to a descriptor, if it is open."""
        with self._lock:
            if (opened := descriptor.opened) is not None:
                opened.num_users += 1
                self._idle.pop(opened, None)
            return opened

    def add(self, opened: _Open) -> list[_Open]:
        """Adds a descriptor with one user; returns those to be closed for it."""
        self._close_abandoned()
        with self._lock:
            opened.descriptor.opened = opened
            self._num_open += 1
            unused = list(islice(self._idle, max(0, self._num_open - _most())))
            for one in unused:
                self._forget(one)
            return unused

    def put_back(self, opened: _Open) -> None:
        """Removes a user; the last one closes a descriptor that was dropped meanwhile."""
        with self._lock:
            opened.num_users -= 1
            unused = not opened.num_users
            kept = opened.descriptor.opened is opened
            if unused and kept:
                self._idle[opened] = None
        if unused and not kept:
            os.close(opened.number)

    def drop(self, descriptor: Descriptor) -> _Open | None:
        """Forgets an open descriptor; returns it if it has no users, for the caller to close."""
        with self._lock:
            if (opened := descriptor.opened) is not None:
                self._forget(opened)
            return opened if opened is not None and not opened.num_users else None

    def abandon(self, descriptor: Descriptor) -> None:
        """Closes a descriptor from a finalizer.

        If the lock is taken, perhaps by this very thread, the next call closes it.
        """
        self._abandoned.append(descriptor)
        self._close_abandoned()

    def _close_abandoned(self) -> None:
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                opened = self._abandoned.popleft().opened if self._abandoned else None
                if opened is not None:
                    self._forget(opened)
            finally:
                self._lock.release()
            if opened is not None and not opened.num_users:
                os.close(opened.number)

    def _forget(self, opened: _Open) -> None:
        self._idle.pop(opened, None)
        opened.descriptor.opened = None
        self._num_open -= 1


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # programs change it
    return max(_FEWEST, soft // _PART) if soft != resource.RLIM_INFINITY else sys.maxsize


class Descriptor:
    """A file that is opened on use, and stays open while the limit permits.

    Args:
        pool: The pool that counts it.
        open_: Opens the file; called again after it was closed.
        finish: Called before it is closed for another one, and by `finish`.

    Attributes:
        opened: The open descriptor, if any; owned by the pool.
    """

    def __init__(
        self, pool: DescriptorPool, open_: Callable[[], int], finish: Callable[[int], object] | None = None
    ) -> None:
        self.opened: _Open | None = None
        self._pool = pool
        self._open = open_
        self._finish = finish
        self._opening = threading.Lock()
        self._closed = False

    def use(self) -> AbstractContextManager[int]:
        """Opens the file and yields its number, which stays open in the `with` block."""
        with self._opening:
            unused: list[_Open] = []
            if (opened := self._pool.take(self)) is None:
                opened = self._open_now()
                unused = self._pool.add(opened)
        return self._lend(opened, unused)

    def _open_now(self) -> _Open:
        if not self._closed:
            number = self._open()
            if not self._closed:
                return _Open(self, number)
            os.close(number)
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    @contextmanager
    def _lend(self, opened: _Open, unused: Sequence[_Open]) -> Iterator[int]:
        try:
            with ExitStack() as closing:
                for one in unused:
                    closing.callback(one.descriptor.end, one.number)
            yield opened.number
        finally:
            self._pool.put_back(opened)

    def finish(self) -> None:
        """Calls `finish` and closes it, if it is open. It must have no users."""
        if (opened := self._pool.drop(self)) is not None:
            self.end(opened.number)

    def close(self) -> None:
        """Closes it permanently, once it has no users, without calling `finish`."""
        self._closed = True  # a late use could find another directory under the same number
        if (opened := self._pool.drop(self)) is not None:
            os.close(opened.number)

    def abandon(self) -> None:
        """Closes it permanently, from the finalizer of its owner."""
        self._closed = True
        self._pool.abandon(self)

    def end(self, number: int) -> None:
        """Calls `finish` and closes a descriptor that the pool has forgotten."""
        try:
            if self._finish is not None:
                self._finish(number)
        finally:
            os.close(number)


class DirectFile:
    """A file with a descriptor for the page cache and, once needed, one for direct I/O (O_DIRECT).

    Args:
        pool: The pool that counts both.
        open_: Opens the file with additional flags.
        finish: As for `Descriptor`.
        directly: Whether to try direct I/O.

    Attributes:
        cached: The descriptor for the page cache.
        directly: Whether direct I/O is tried, and has not failed yet.
    """

    def __init__(
        self,
        pool: DescriptorPool,
        open_: Callable[[int], int],
        finish: Callable[[int], object] | None = None,
        *,
        directly: bool,
    ) -> None:
        self.directly = directly
        self.cached = Descriptor(pool, partial(open_, 0), finish)
        self._direct = Descriptor(pool, partial(open_, os.O_DIRECT), finish)

    def direct(self) -> AbstractContextManager[int | None]:
        """Yields the descriptor for direct I/O; None if there is none."""
        if self.directly:
            try:
                return self._direct.use()
            except OSError:  # if the file itself is at fault, buffered I/O raises, too
                self.directly = False
        return nullcontext()

    def finish(self) -> None:
        """Finishes both descriptors."""
        self.cached.finish()
        self._direct.finish()

    def close(self) -> None:
        """Closes both descriptors."""
        self.cached.close()
        self._direct.close()

    def abandon(self) -> None:
        """Closes both descriptors, from the finalizer of their owner."""
        self.cached.abandon()
        self._direct.abandon()


class _Open:
    """An open descriptor.

    Attributes:
        descriptor: Its file.
        number: Its number.
        num_users: Users at the moment.
    """

    def __init__(self, descriptor: Descriptor, number: int) -> None:
        self.descriptor = descriptor
        self.number = number
        self.num_users = 1
