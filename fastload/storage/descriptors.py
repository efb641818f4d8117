"""Open files, no more than a process may have: those that are longest unused are closed, and opened again."""

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

_PART = 8  # of the descriptors that the process may have: the others are for the program
_FEWEST = 4


class DescriptorPool:
    """Counts the descriptors that are open. One that is in use stays so, even above the limit.

    Args:
        lock: What guards it; None for a lock of its own.
    """

    def __init__(self, lock: ProcessLock | None = None) -> None:
        self._lock = lock if lock is not None else threading.Lock()
        self._abandoned: deque[Descriptor] = deque()
        self._num_open = 0
        self._idle: OrderedDict[_Open, None] = OrderedDict()  # the longest unused first

    def take(self, descriptor: Descriptor) -> _Open | None:
        """Marks a descriptor as used once more, if it is open."""
        with self._lock:
            if (opened := descriptor.opened) is not None:
                opened.num_users += 1
                self._idle.pop(opened, None)
            return opened

    def add(self, opened: _Open) -> list[_Open]:
        """Notes that a descriptor was opened, and is in use; returns those that have to be closed for it."""
        self._sweep()
        with self._lock:
            opened.descriptor.opened = opened
            self._num_open += 1
            unused = list(islice(self._idle, max(0, self._num_open - _most())))
            for one in unused:
                self._forget(one)
            return unused

    def put_back(self, opened: _Open) -> None:
        """Marks a descriptor as used once less; the last user closes what was dropped meanwhile."""
        with self._lock:
            opened.num_users -= 1
            unused = not opened.num_users
            kept = opened.descriptor.opened is opened
            if unused and kept:
                self._idle[opened] = None
        if unused and not kept:
            os.close(opened.number)

    def drop(self, descriptor: Descriptor) -> _Open | None:
        """Forgets an open descriptor; returns it if nobody uses it, so that it is to be closed now."""
        with self._lock:
            if (opened := descriptor.opened) is not None:
                self._forget(opened)
            return opened if opened is not None and not opened.num_users else None

    def abandon(self, descriptor: Descriptor) -> None:
        """Closes a descriptor whose owner was dropped.

        The garbage collector may call this in a thread that holds the lock. Then it is left for later.
        """
        self._abandoned.append(descriptor)
        self._sweep()

    def _sweep(self) -> None:
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
    """A file that is opened when it is used, and stays open as long as there is room for it.

    Args:
        pool: Where it counts.
        open_: Opens it; called again after it was closed.
        finish: Called before it is closed to make room, and by `finish`.

    Attributes:
        opened: What is open, if anything; the pool's.
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
        """Opens it and lends its number, which nobody closes meanwhile; for a `with` and nothing else."""
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
        """Closes it, if it is open, as it would be closed to make room: nobody may use it now."""
        if (opened := self._pool.drop(self)) is not None:
            self.end(opened.number)

    def close(self) -> None:
        """Closes it for good, as soon as nobody uses it; nothing is finished."""
        self._closed = True  # a use that comes too late may find another directory by the number it knows
        if (opened := self._pool.drop(self)) is not None:
            os.close(opened.number)

    def abandon(self) -> None:
        """Closes it for good, from the finalizer of what it belongs to."""
        self._closed = True
        self._pool.abandon(self)

    def end(self, number: int) -> None:
        """Finishes and closes what the pool has forgotten."""
        try:
            if self._finish is not None:
                self._finish(number)
        finally:
            os.close(number)


class DirectFile:
    """A file with one descriptor for the page cache and, once it is needed, one past it (O_DIRECT).

    Args:
        pool: Where both count.
        open_: Opens the file with further flags.
        finish: As for `Descriptor`.
        directly: Whether to try to go past the page cache.

    Attributes:
        cached: The descriptor for the page cache.
        directly: Whether the file can be used past it, as far as is known.
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
        """Lends the descriptor past the page cache; None if there can be none."""
        if self.directly:
            try:
                return self._direct.use()
            except OSError:  # if the file itself is what is wrong, the page cache says so, too
                self.directly = False
        return nullcontext()

    def finish(self) -> None:
        """Finishes both, as `Descriptor.finish`."""
        self.cached.finish()
        self._direct.finish()

    def close(self) -> None:
        """Closes both as soon as nobody uses them."""
        self.cached.close()
        self._direct.close()

    def abandon(self) -> None:
        """Closes both, from the finalizer of their owner."""
        self.cached.abandon()
        self._direct.abandon()


class _Open:
    """A descriptor that is open.

    Attributes:
        descriptor: Whose it is.
        number: Its number.
        num_users: How many use it now.
    """

    def __init__(self, descriptor: Descriptor, number: int) -> None:
        self.descriptor = descriptor
        self.number = number
        self.num_users = 1
