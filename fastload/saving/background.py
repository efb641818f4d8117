"""Saves in the background: their handles, and queues in which they are written one after the other.

No failure is lost.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from fastload.base.threads import Task
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.observers import notify
from fastload.errors import DeadlineExceeded, FastloadError, WorldError
from fastload.report import SaveReport
from fastload.saving.snapshot import BufferPool, Snapshot

if TYPE_CHECKING:
    from fastload.saving.call import SaveCall

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedSave:
    """A save whose checkpoint exists.

    Attributes:
        report: The report.
        call: The call.
        some_listen: Whether any rank has an `on_report`.
    """

    report: SaveReport
    call: SaveCall
    some_listen: bool

    def tell(self) -> None:
        """Notifies, and calls `on_report`, on all ranks; if it raises on one, it raises on all."""
        call, world = self.call, self.call.world
        notify(world, "save", call.began, report=self.report)
        with world.together():
            world.tell(call.what, self.report, call.options.on_report, some_listen=self.some_listen)
        world.acknowledge()


@short_tracebacks
class SaveHandle:
    """A save in the background, from `fastload.async_save`.

    A program waits for its saves before it exits. If you do not call `wait`, the next save raises the error
    of a failed one. Without a next save, the error is printed to stderr at exit, when Python cannot change
    the exit status any more; so call `wait` for the last save. Forked children do not inherit saves.

    Attributes:
        report: What it did, once it has succeeded; else None.
    """

    _running: ClassVar[list[SaveHandle]] = []
    _unseen: ClassVar[list[SaveHandle]] = []
    _in_doubt: ClassVar[bool] = False

    def __init__(
        self,
        url: str,
        save: Callable[[], FinishedSave | None],
        *,
        snapshot: Snapshot | None = None,
        caller_raises: bool = False,
    ) -> None:
        """Starts the background part of a save.

        Args:
            url: The destination.
            save: Finishes the save. Returns None if it was dropped for a newer one.
            snapshot: The copy of the state; None if the save reads the state.
            caller_raises: Whether the caller raises its error on all ranks, so that the next save does not.
        """
        self.report: SaveReport | None = None
        self._url = url
        self._snapshot = snapshot
        self._caller_raises = caller_raises
        self._error: BaseException | None = None
        self._ended = threading.Event()
        if not caller_raises:
            SaveHandle._in_doubt = False  # the ranks have met since
        self._running.append(self)
        Task(lambda: self._run(save), "fastload-save").start()

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._ended.is_set()

    def failed(self) -> bool:
        """Whether it has ended with an error, without a checkpoint."""
        return self.done() and self.report is None and self._error is not None

    def wait_snapshot(self, timeout: float | None = None) -> None:
        """Waits until the state is copied, so that it may change; at once unless ``snapshot="overlap"``.

        To be called before anything but a step of a ``torch.optim`` optimizer changes tensors of the state:
        these steps wait by themselves. A change that did not wait fails the save with `StateChanged`.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            DeadlineExceeded: It is not copied within the timeout.
        """
        snapshot = self._snapshot
        if snapshot is not None:
            if not snapshot.wait(timeout):
                raise DeadlineExceeded(f"the state for {self._url} was not copied within {timeout} s")
            snapshot.release_steps()
            self._snapshot = None

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint exists.

        Args:
            timeout: Longest wait in seconds; None waits until the save ends, which has its own deadlines.

        Raises:
            DeadlineExceeded: It has not ended within the timeout, and continues.
            FastloadError: It failed; every call raises the same error.
            WorldError: It belongs to a parent process.
        """
        self.wait_snapshot(timeout)
        if not self._ended.wait(timeout):
            raise DeadlineExceeded(f"the save to {self._url} has not ended within {timeout} s")
        if self in self._unseen:
            self._unseen.remove(self)
        try:
            if self._error is not None:
                raise self._error.with_traceback(None)
            assert self.report is not None
            return self.report
        finally:
            del self  # else error → traceback → frame → self → error would keep the caller's memory alive

    @classmethod
    def _forget_all(cls) -> None:
        """Ends the parent's saves in a forked child, which does not have their threads."""
        for handle in cls._running:
            handle._error = WorldError(f"the save to {handle._url} belongs to the parent process")
            handle._ended = threading.Event()  # the lock of the old one may be held
            handle._ended.set()
            handle._snapshot = None  # likewise
        cls._running.clear()
        cls._unseen.clear()
        SaveHandle._in_doubt = False

    def _complaint(self) -> str:
        failing = "the save" if self.report is None else "on_report, after the save"
        return f"{failing} to {self._url} failed: {type(self._error).__name__}: {self._error}"

    def _run(self, save: Callable[[], FinishedSave | None]) -> None:
        try:
            if (finished := save()) is not None:
                self.report = finished.report
                finished.tell()
        except BaseException as error:
            self._error = _without_frames(error)
            _log.error("%s", self._complaint())
            if self.report is None and not self._caller_raises:
                SaveHandle._in_doubt = True
            self._unseen.append(self)
        finally:
            del save
            self._running.remove(self)
            self._ended.set()


def await_end(handle: SaveHandle) -> None:
    """Waits until a save has ended; leaves an error to its `wait` or the next save."""
    handle.wait_snapshot()
    handle._ended.wait()


def raise_unseen() -> None:
    """Raises the error of a failed save for which `wait` was not called, and says which save it is of."""
    for handle in SaveHandle._unseen:
        if handle.report is None and not handle._caller_raises:
            try:
                handle.wait()
            except FastloadError as error:
                raise _of_earlier_save(error, handle._url) from error.__cause__
            finally:
                del handle  # as in `SaveHandle.wait`


def _of_earlier_save(error: FastloadError, url: str) -> FastloadError:
    """Returns the error of a save as another call raises it."""
    earlier, text = copy.copy(error), str(error.args[0])
    prefix = f"saving to {url}"
    text = text.removeprefix(prefix) if text.startswith(prefix) else f" failed: {text}"
    earlier.args = (f"the earlier save to {url}{text}",)
    return earlier


def in_doubt() -> bool:
    """Whether some rank may have an error to raise, as far as this rank can tell.

    All ranks know which saves fail, but not on which ranks `wait` was called.
    """
    return SaveHandle._in_doubt or any(not handle._caller_raises for handle in list(SaveHandle._running))


def _without_frames(error: BaseException) -> BaseException:
    """Removes the frames from an error, since they would keep the memory of the save alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


@atexit.register
def _await_saves() -> None:
    for handle in list(SaveHandle._running):
        await_end(handle)
    for handle in SaveHandle._unseen:
        # The log may not be open any more.
        print(f"fastload: {handle._complaint()} (wait() was not called)", file=sys.stderr)


os.register_at_fork(after_in_child=SaveHandle._forget_all)


# Queues


@dataclass(frozen=True)
class SaveQueue:
    """State that queued saves share.

    Attributes:
        pool: Lends the memory of their snapshots.
        changed: Guards all of them; notified when one ends or is dropped.
        dropped: Number → URL of dropped saves that no report has named yet.
    """

    pool: BufferPool
    changed: threading.Condition = field(default_factory=threading.Condition)
    dropped: dict[int, str] = field(default_factory=dict)


class QueuedSave:
    """A save in a queue. It is written after those before it, or dropped for a newer one.

    All ranks queue the same saves in the same order; rank 0 decides whether a save is written.

    Args:
        number: Its number; later saves have higher ones.
        url: Its destination.
        before: The saves that come before it.
        queue: The queue.

    Attributes:
        number: As given.
        queue: As given.
        is_over: Whether it has ended or was dropped, and so needs no memory.
    """

    def __init__(self, number: int, url: str, before: Sequence[QueuedSave], queue: SaveQueue) -> None:
        self.number = number
        self.queue = queue
        self.is_over = False
        self._url = url
        self._before = before
        self._has_turn = False
        self._is_dropped = False
        self._release: Callable[[], None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for others, so that it can be dropped."""
        with self.queue.changed:
            return not (self.is_over or self._has_turn or self._is_next())

    def _is_next(self) -> bool:
        return all(save.is_over for save in self._before)

    def on_drop(self, release: Callable[[], None]) -> None:
        """Takes the callback that frees the snapshot if the save is dropped."""
        self._release = release

    def run(self, work: Callable[[], FinishedSave | None]) -> FinishedSave | None:
        """Does the work of the save, and lets the next one begin."""
        try:
            return work()
        finally:
            with self.queue.changed:
                self.is_over, self._before, self._release = True, (), None
                self.queue.changed.notify_all()

    def await_turn(self) -> bool:
        """Waits for its turn; returns whether to write it, or False if it was dropped. Rank 0 decides."""
        with self.queue.changed:
            self.queue.changed.wait_for(lambda: self._is_dropped or self._is_next())
            self._has_turn, self._before = True, ()
            return not self._is_dropped

    def drop(self) -> None:
        """Frees its snapshot, unless it is over; rank 0 has decided so before anything was written."""
        with self.queue.changed:
            if self.is_over:
                return
            self.is_over = self._is_dropped = True
            self.queue.dropped[self.number] = self._url
            if self._release is not None:
                self._release()
            self.queue.changed.notify_all()

    def replaced_urls(self) -> tuple[str, ...]:
        """Returns the URLs of earlier saves that were dropped, and that no report has named."""
        with self.queue.changed:
            numbers = sorted(number for number in self.queue.dropped if number < self.number)
            return tuple(self.queue.dropped.pop(number) for number in numbers)
