"""Saves that go on in the background, none of whose failures is lost."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import ClassVar

from fastload.base.tasks import Task
from fastload.errors import DeadlineExceeded, WorldError
from fastload.report import SaveReport

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save that goes on in the background. Made by `fastload.async_save`.

    A program that ends waits for its saves. An error that nobody has waited for is raised by the next
    save; if there is none, it is told on stderr when the program ends, whose exit status Python lets
    nothing change by then. So `wait` for the last one. A forked child has nothing to do with any of it.

    Args:
        url: Where to.
        save: Does what is left to do. What it returns is None if the save was not written, for a newer one.
        tell: Hands the report to whoever wants it.
        apart: Whether its errors are the business of whoever made it, and of no other save.

    Attributes:
        report: What it did, once it has succeeded; else None.
    """

    _running: ClassVar[list[SaveHandle]] = []
    _unseen: ClassVar[list[SaveHandle]] = []
    _in_doubt: ClassVar[bool] = False

    def __init__(
        self,
        url: str,
        save: Callable[[], SaveReport | None],
        tell: Callable[[SaveReport], None],
        *,
        apart: bool = False,
    ) -> None:
        self.report: SaveReport | None = None
        self._url = url
        self._apart = apart
        self._error: BaseException | None = None
        self._ended = threading.Event()
        if not apart:
            SaveHandle._in_doubt = False  # whoever was has met the others
        self._running.append(self)
        Task(lambda: self._run(save, tell), "fastload-save").start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def failed(self) -> bool:
        """Whether it has ended, and the checkpoint does not exist."""
        return self.done() and self.report is None and self._error is not None

    def settle(self) -> None:
        """Waits until it has ended, well or not; an error is left for `wait` or the next save."""
        self._ended.wait()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint exists.

        Args:
            timeout: Longest wait in seconds; None waits until the save ends, which it does by itself.

        Raises:
            DeadlineExceeded: It has not ended by then, and goes on.
            FastloadError: It failed; the same error at every call.
            WorldError: It is that of a process of which this one is a child.
        """
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
    def raise_unseen(cls) -> None:
        """Raises the error of a save that nobody has waited for."""
        for handle in cls._unseen:
            if handle.report is None and not handle._apart:
                try:
                    handle.wait()
                finally:
                    del handle  # as in `wait`

    @classmethod
    def in_doubt(cls) -> bool:
        """Whether some rank may have an error that nobody there has waited for, as far as this one can tell.

        All ranks hear of a save that fails, but not which of them have waited for it.
        """
        return cls._in_doubt or any(not handle._apart for handle in list(cls._running))

    @classmethod
    def _forget_all(cls) -> None:
        """Lets go of the parent's saves, in a child: the threads that would end them are not here."""
        for handle in cls._running:
            handle._error = WorldError(f"the save to {handle._url} is not that of this process")
            handle._ended = threading.Event()  # the lock of the one before may be held for ever
            handle._ended.set()
        cls._running.clear()
        cls._unseen.clear()
        SaveHandle._in_doubt = False

    def _complaint(self) -> str:
        what = "the save" if self.report is None else "on_report, after the save"
        return f"{what} to {self._url} failed: {type(self._error).__name__}: {self._error}"

    def _run(self, save: Callable[[], SaveReport | None], tell: Callable[[SaveReport], None]) -> None:
        try:
            self.report = save()
            if self.report is not None:
                tell(self.report)
        except BaseException as error:
            self._error = _without_frames(error)
            _log.error("%s", self._complaint())
            if self.report is None and not self._apart:
                SaveHandle._in_doubt = True
            self._unseen.append(self)
        finally:
            del save, tell
            self._running.remove(self)
            self._ended.set()


def _without_frames(error: BaseException) -> BaseException:
    """Returns an error that can be kept: its frames would keep the memory of the save alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


@atexit.register
def _await_saves() -> None:
    for handle in list(SaveHandle._running):
        handle._ended.wait()
    for handle in SaveHandle._unseen:
        # Its log may go anywhere, or nowhere any more.
        print(f"fastload: {handle._complaint()} (nobody waited for it)", file=sys.stderr)


os.register_at_fork(after_in_child=SaveHandle._forget_all)
