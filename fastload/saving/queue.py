"""Saves in the background that are written one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastload.report import SaveReport
from fastload.saving.snapshot import BufferPool


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

    def run(self, work: Callable[[], SaveReport | None]) -> SaveReport | None:
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
