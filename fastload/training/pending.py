"""The pending saves of a training: copied, and not yet known to be durable.

Their copies are written one after the other. Rank 0 decides what becomes of them, and tells the others where
they come by anyway: at the next save, and when it is the turn of one of them. So nobody in the background
uses the process group of the training, and all ranks do the same with every save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastload.comm.decisions import Decisions
from fastload.comm.world import World
from fastload.report import SaveReport
from fastload.saving.call import QueuedSave
from fastload.saving.handle import SaveHandle
from fastload.saving.snapshot import BufferPool
from fastload.training.retention import Point, Retention, SavedCheckpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """A save that a training asks for.

    Attributes:
        saved: What the rules of retention know of it.
        url: Where to.
        stays: Whether it is written in any case.
    """

    saved: SavedCheckpoint
    url: str
    stays: bool


@dataclass(frozen=True)
class _Queue:
    """What the saves of one training share.

    Attributes:
        pool: Lends the memory of their snapshots.
        changed: Guards them; notified when one of them is over.
        given_up: Number → URL of those that are not written, until a report has said so.
    """

    pool: BufferPool
    changed: threading.Condition = field(default_factory=threading.Condition)
    given_up: dict[int, str] = field(default_factory=dict)


class PendingSave:
    """A pending save. Its turn comes once those before it are over; see `saving.call.QueuedSave`.

    Args:
        number: Its number; later ones are higher, and newer.
        request: What was asked for.
        before: The saves that were pending when it was asked for.
        queue: What it shares with them.

    Attributes:
        number: As given.
        request: As given.
        handle: What goes on in the background, once something does.
        is_over: Whether it takes no memory any more: it has ended, or is given up.
    """

    def __init__(
        self, number: int, request: SaveRequest, before: Sequence[PendingSave], queue: _Queue
    ) -> None:
        self.number = number
        self.request = request
        self.handle: SaveHandle | None = None
        self.is_over = False
        self._is_given_up = False
        self._has_turn = False
        self._before: Sequence[PendingSave] = before
        self._queue = queue
        self._release: Callable[[], None] | None = None

    @property
    def pool(self) -> BufferPool:
        """Lends the memory of its snapshot."""
        return self._queue.pool

    @property
    def waits(self) -> bool:
        """Whether it waits for others, and so can still be given up."""
        with self._queue.changed:
            return not (self.is_over or self._has_turn or self._is_next)

    @property
    def _is_next(self) -> bool:
        return all(save.is_over for save in self._before)

    def hold(self, release: Callable[[], None]) -> None:
        """Takes a callback that frees the snapshot."""
        self._release = release

    def run(self, work: Callable[[], SaveReport | None]) -> SaveReport | None:
        """Does all that is left to do of it."""
        try:
            return work()
        finally:
            with self._queue.changed:
                self.is_over, self._before, self._release = True, (), None
                self._queue.changed.notify_all()

    def await_turn(self) -> bool:
        """Waits until it is its turn, or is given up; returns which. Rank 0's answer counts."""
        with self._queue.changed:
            self._queue.changed.wait_for(lambda: self._is_given_up or self._is_next)
            self._has_turn, self._before = True, ()
            return not self._is_given_up

    def give_up(self) -> None:
        """Drops its copy, if that has not been done; as rank 0 has decided, before anything was written."""
        with self._queue.changed:
            if self.is_over:
                return
            self.is_over = self._is_given_up = True
            self._queue.given_up[self.number] = self.request.url
            if self._release is not None:
                self._release()
            self._queue.changed.notify_all()

    def came_instead_of(self) -> tuple[str, ...]:
        """Returns the URLs of the earlier ones that were given up, and that no report has named."""
        with self._queue.changed:
            numbers = sorted(number for number in self._queue.given_up if number < self.number)
            return tuple(self._queue.given_up.pop(number) for number in numbers)


class PendingSaves:
    """Keeps saves until they are durable, or somebody has heard why they are not.

    All ranks make the same calls.

    Args:
        world: The ranks.
        num_slots: Copies of the state that there may be at once. With one, a save waits until the one
            before is over; with more, until there is room, which those make that wait to be written: of
            them only the newest is.
        retention: Says which saves are written in any case.

    Attributes:
        newest: The newest that is known to be written, or None.
    """

    def __init__(self, world: World, num_slots: int, retention: Retention) -> None:
        self._level = logging.WARNING if world.rank == 0 else logging.DEBUG  # of the first wait
        self._num_slots = num_slots
        self._retention = retention
        self._decisions = Decisions(world, "orders", "asking what becomes of earlier saves")
        self._queue = _Queue(BufferPool(num_slots))
        self._saves: list[PendingSave] = []
        self._number = 0
        self._num_ended = 0
        self._best: SavedCheckpoint | None = None
        self.newest: Point | None = None

    @property
    def failed(self) -> int:
        """Number of the oldest failed save that has not been reported, or 0."""
        return next((save.number for save in self._saves if save.handle and save.handle.failed()), 0)

    def holds(self, number: int) -> bool:
        """Whether nobody has waited for the save of that number; the same on all ranks if it has failed."""
        return any(save.number == number for save in self._saves)

    # A save

    def make_room(self, request: SaveRequest) -> int:
        """Waits until there is room for one more copy.

        Returns:
            The number of an earlier save that has failed, which all ranks are to raise instead; 0 if there is
            none. With one slot it is always 0: a save that comes next tells all ranks by itself.

        Raises:
            PeerError: Rank 0 did not come to this save in time.
        """
        self._number += 1
        if self._num_slots == 1:
            self._await_last(request)
            return 0
        self._forget_ended()
        failed, given_up = self._decisions.share(lambda: self._decide(request), num_read=self._num_ended)
        for save in self._saves:
            if save.number in given_up:
                save.give_up()
        if not failed:
            self._await_slot(request)
        return int(failed)

    def start(
        self, request: SaveRequest, save: Callable[[QueuedSave | None], SaveHandle | None]
    ) -> Callable[[], bool]:
        """Starts the save that room was made for.

        Returns:
            What waits until it has ended, and says whether its checkpoint exists.
        """
        pending = PendingSave(self._number, request, tuple(self._saves), self._queue)
        pending.handle = handle = save(pending if self._num_slots > 1 else None)
        if handle is not None:
            self._saves.append(pending)
        self._note(pending)

        def has_succeeded() -> bool:
            if handle is not None:
                handle.settle()
            return handle is None or handle.report is not None

        return has_succeeded

    def _await_last(self, request: SaveRequest) -> None:
        """Waits for the save before; its error, if any, is raised by the next save, which tells all ranks."""
        for save in self._saves:
            if save.handle is not None:
                if not save.handle.done():
                    self._log_wait(
                        "step %d is to be saved, but the save before still goes on: waiting for it",
                        request.saved.step,
                    )
                save.handle.settle()
            self._note(save)
        self._saves.clear()

    def _log_wait(self, text: str, *values: int) -> None:
        """Logs that a save has to wait: the first time as a warning, since the next ones often wait, too."""
        _log.log(self._level, f"{text} (later waits are logged at level DEBUG)", *values)
        self._level = logging.DEBUG

    def _note(self, save: PendingSave) -> None:
        """Notes a save that has ended, if it has ended well."""
        if save.handle is None or save.handle.report is not None:
            point = save.request.saved.point
            self.newest = point if self.newest is None else max(self.newest, point)

    def _decide(self, request: SaveRequest) -> tuple[int, list[int]]:
        """Decides on rank 0: returns the number of a failed save, or 0, and those of saves to give up."""
        with self._queue.changed:
            if failed := self.failed:
                return failed, []
            there = [save for save in self._saves if not save.is_over]
            others = [request.saved, *([self._best] if self._best is not None else [])]
            given_up = []
            for save in there:
                rivals = [*others, *(one.request.saved for one in there if one is not save)]
                is_needed = save.request.stays or self._retention.insists_on(save.request.saved, rivals)
                if save.waits and not is_needed:
                    given_up.append(save)
            for save in given_up:
                save.give_up()
        for save in given_up:
            _log.warning(
                "step %d is not written: storage is busy with earlier ones, and step %d is newer",
                save.request.saved.step, request.saved.step,
            )  # fmt: skip
        return 0, [save.number for save in given_up]

    def _await_slot(self, request: SaveRequest) -> None:
        with self._queue.changed:
            if not self._has_slot():
                self._log_wait(
                    "step %d is to be saved, but %d saves are in flight: waiting for one of them",
                    request.saved.step, self._num_slots,
                )  # fmt: skip
            self._queue.changed.wait_for(self._has_slot)

    def _has_slot(self) -> bool:
        return sum(not save.is_over for save in self._saves) < self._num_slots

    def _forget_ended(self) -> None:
        """Drops saves that have ended well, or were given up."""
        for save in list(self._saves):
            if save.handle is not None and save.handle.done() and not save.handle.failed():
                self._saves.remove(save)
                self._note(save)
                self._num_ended = max(self._num_ended, save.number)
                if save.handle.report is not None:
                    self._best = self._retention.best_of(save.request.saved, self._best)

    # The end

    def wait(self, number: int | None = None) -> None:
        """Waits until all pending saves, or those up to a number, are over.

        Raises:
            FastloadError: One has failed; another one is told at the next call.
        """
        while self._saves and (number is None or self._saves[0].number <= number):
            save = self._saves.pop(0)
            handle = save.handle
            try:
                if handle is not None:
                    handle.settle()
                    self._note(save)
                    if handle.failed() or handle.report is not None:
                        handle.wait()
            finally:
                del handle, save  # else error → traceback → frame → handle → error would keep it all alive

    def close(self) -> None:
        """Frees the memory."""
        self._queue.pool.clear()
