"""Descriptors within the limit of the process: the least recently used are closed, and reopened on use."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import islice

from fastload.base.threads import ProcessLock

_PART = 8  # share of the descriptors of the process; the rest is for the program
_FEWEST = 4
_BUFFER_BYTES = 4 << 20


class DescriptorPool:
    """Counts open descriptors. Those in use stay open, even above the limit.

    Args:
        lock: Lock to use; None for a new one.
    """

    def __init__(self, lock: ProcessLock | None = None) -> None:
        self._lock = lock if lock is not None else threading.Lock()
        self._abandoned: deque[Descriptor] = deque()
        self._num_open = 0
        self._idle: OrderedDict[Descriptor, None] = OrderedDict()  # the longest unused first

    def take(self, descriptor: Descriptor) -> int | None:
        """Adds a user to a descriptor and returns its number, if it is open."""
        with self._lock:
            if descriptor.number is None or descriptor.is_closed:
                return None
            descriptor.num_users += 1
            self._idle.pop(descriptor, None)
            return descriptor.number

    def add(self, descriptor: Descriptor, number: int) -> list[tuple[Descriptor, int]]:
        """Adds an open descriptor with one user; returns those to be closed for it, with their numbers."""
        self._close_abandoned()
        with self._lock:
            descriptor.number, descriptor.num_users = number, 1
            self._num_open += 1
            unused = list(islice(self._idle, max(0, self._num_open - _most())))
            return [(one, self._forget(one)) for one in unused]

    def put_back(self, descriptor: Descriptor) -> None:
        """Removes a user; the last one closes a descriptor that was closed meanwhile."""
        with self._lock:
            descriptor.num_users -= 1
            if descriptor.num_users:
                return
            if not descriptor.is_closed:
                self._idle[descriptor] = None
                return
            number = self._forget(descriptor)
        os.close(number)

    def drop(self, descriptor: Descriptor) -> int | None:
        """Forgets a descriptor without users; returns its number for the caller to close, if it is open."""
        with self._lock:
            return self._drop(descriptor)

    def abandon(self, descriptor: Descriptor) -> None:
        """Closes a descriptor from a finalizer.

        If the lock is taken, perhaps by this very thread, the next call closes it.
        """
        self._abandoned.append(descriptor)
        self._close_abandoned()

    def _close_abandoned(self) -> None:
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                number = self._drop(self._abandoned.popleft()) if self._abandoned else None
            finally:
                self._lock.release()
            if number is not None:
                os.close(number)

    def _drop(self, descriptor: Descriptor) -> int | None:
        is_unused = descriptor.number is not None and not descriptor.num_users
        return self._forget(descriptor) if is_unused else None

    def _forget(self, descriptor: Descriptor) -> int:
        number, descriptor.number = descriptor.number, None
        assert number is not None
        self._idle.pop(descriptor, None)
        self._num_open -= 1
        return number


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
        number: Its number if it is open; set by the pool, as is `num_users`.
        num_users: Users at the moment.
        is_closed: Whether it is closed permanently: a late use could find another directory under its number.
    """

    def __init__(
        self, pool: DescriptorPool, open_: Callable[[], int], finish: Callable[[int], object] | None = None
    ) -> None:
        self.number: int | None = None
        self.num_users = 0
        self.is_closed = False
        self._pool = pool
        self._open = open_
        self._finish = finish
        self._opening = threading.Lock()

    def use(self) -> AbstractContextManager[int]:
        """Opens the file and yields its number, which stays open in the `with` block."""
        with self._opening:
            unused: list[tuple[Descriptor, int]] = []
            if (number := self._pool.take(self)) is None:
                number = -1 if self.is_closed else self._open()
                if self.is_closed:
                    if number >= 0:  # it was closed meanwhile: this may be a file of another directory
                        os.close(number)
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                unused = self._pool.add(self, number)
        return self._lend(number, unused)

    @contextmanager
    def _lend(self, number: int, unused: Sequence[tuple[Descriptor, int]]) -> Iterator[int]:
        try:
            with ExitStack() as closing:
                for one, other in unused:
                    closing.callback(one.end, other)
            yield number
        finally:
            self._pool.put_back(self)

    def finish(self) -> None:
        """Calls `finish` and closes it, if it is open. It must have no users."""
        if (number := self._pool.drop(self)) is not None:
            self.end(number)

    def close(self) -> None:
        """Closes it permanently, once it has no users, without calling `finish`."""
        self.is_closed = True
        if (number := self._pool.drop(self)) is not None:
            os.close(number)

    def abandon(self) -> None:
        """Closes it permanently, from the finalizer of its owner."""
        self.is_closed = True
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


class AlignedBuffer(threading.local):
    """A page-aligned buffer of each thread, for direct I/O. It is not shared with a forked child."""

    @cached_property
    def data(self) -> memoryview:
        """The buffer of this thread."""
        return memoryview(mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
