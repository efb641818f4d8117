"""The pending saves of a training: copied, and not yet known to be durable.

Copies are written one after the other. Rank 0 decides which ones, and the other ranks learn of it in calls
that they make anyway: the next save, and the turn of a pending one. So the background never uses the process
group of the training, and all ranks treat each save in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from fastload.comm.world import Decisions, World
from fastload.saving.background import QueuedSave, SaveHandle, SaveQueue, await_end
from fastload.saving.snapshot import BufferPool
from fastload.training.retention import Point, Retention, SavedCheckpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """A requested save.

    Attributes:
        saved: The checkpoint, as the rules of retention see it.
        url: Its destination.
        is_required: Whether it must be written even if a newer save is waiting.
        is_void: Whether it will fail, so that no other save is dropped for it.
    """

    saved: SavedCheckpoint
    url: str
    is_required: bool
    is_void: bool = False


@dataclass(frozen=True)
class _Pending:
    """A pending save.

    Attributes:
        request: The request.
        queued: Its place in the queue.
        handle: The save in the background; None if it has ended.
    """

    request: SaveRequest
    queued: QueuedSave
    handle: SaveHandle | None

    @property
    def has_failed(self) -> bool:
        return self.handle is not None and self.handle.failed()


class PendingSaves:
    """Saves that are not durable yet, or whose error has not been raised.

    All ranks make the same calls.

    Args:
        world: The ranks.
        num_slots: Most copies of the state at once. With one, a save waits until the last one has ended. With
            more, a save waits for a free slot; of the saves that wait to be written, only the newest is.
        retention: Names the saves that are written in any case.

    Attributes:
        newest: The newest save that is known to be durable, or None.
    """

    def __init__(self, world: World, num_slots: int, retention: Retention) -> None:
        self._decides = world.rank == 0
        self._level = logging.INFO if self._decides else logging.DEBUG  # of the first wait
        self._num_slots = num_slots
        self._retention = retention
        self._decisions = Decisions(world, "pending", "waiting for rank 0's decision on pending saves")
        self._queue = SaveQueue(BufferPool(num_slots))
        self._saves: list[_Pending] = []
        self._number = 0
        self._best: SavedCheckpoint | None = None
        self.newest: Point | None = None

    @property
    def failed(self) -> int:
        """The oldest failed save whose error has not been raised, or 0."""
        return next((save.queued.number for save in self._saves if save.has_failed), 0)

    def holds(self, number: int) -> bool:
        """Whether a save is pending, or its error has not been raised; the same on all ranks if it failed."""
        return any(save.queued.number == number for save in self._saves)

    # A save

    def make_room(self, request: SaveRequest) -> int:
        """Waits for a free slot.

        Returns:
            The number of a failed save, whose error all ranks raise instead; 0 if there is none. With one
            slot always 0: the next save tells all ranks by itself.

        Raises:
            PeerError: Rank 0 did not come to this save in time.
        """
        self._number += 1
        if self._num_slots == 1:
            self._await_last(request)
            return 0
        self._forget_ended()
        if self._decides:
            self._decisions.post(self._decide(request))
        failed, dropped = self._decisions.take()
        for save in self._saves:
            if save.queued.number in dropped:
                save.queued.drop()
        if not failed:
            self._await_slot(request)
        return int(failed)

    def start(
        self, request: SaveRequest, save: Callable[[QueuedSave | None], SaveHandle | None]
    ) -> Callable[[], bool]:
        """Starts a save in the slot of `make_room`.

        Returns:
            A function that waits until the save has ended, and returns whether its checkpoint exists.
        """
        before = [pending.queued for pending in self._saves]
        queued = QueuedSave(self._number, request.url, before, self._queue)
        handle = save(queued if self._num_slots > 1 else None)
        pending = _Pending(request, queued, handle)
        if handle is not None:
            self._saves.append(pending)
        self._note_durable(pending)

        def has_succeeded() -> bool:
            if handle is not None:
                await_end(handle)
            return handle is None or handle.report is not None

        return has_succeeded

    def _await_last(self, request: SaveRequest) -> None:
        """Waits for the last save. If it failed, the save that begins now raises its error on all ranks."""
        for save in self._saves:
            if save.handle is not None:
                if not save.handle.done():
                    self._log_wait(
                        "step %d is to be saved, but the last save has not ended: waiting for it",
                        request.saved.step,
                    )
                await_end(save.handle)
            self._note_durable(save)
        self._saves.clear()

    def _log_wait(self, text: str, *values: int) -> None:
        """Logs a wait: the first one at level INFO, since later ones are often the same."""
        _log.log(self._level, f"{text} (later waits are logged at level DEBUG)", *values)
        self._level = logging.DEBUG

    def _note_durable(self, save: _Pending) -> None:
        """Updates `newest`, if a save has succeeded."""
        if save.handle is None or save.handle.report is not None:
            point = save.request.saved.point
            self.newest = point if self.newest is None else max(self.newest, point)

    def _decide(self, request: SaveRequest) -> tuple[int, list[int]]:
        """Returns rank 0's decision: the number of a failed save, or 0, and those of saves to drop."""
        with self._queue.changed:
            if failed := self.failed:
                return failed, []
            if request.is_void:
                return 0, []
            active = [save for save in self._saves if not save.queued.is_over]
            others = [request.saved, *([self._best] if self._best is not None else [])]
            dropped = []
            for save in active:
                rivals = [*others, *(other.request.saved for other in active if other is not save)]
                is_required = save.request.is_required or self._retention.requires(save.request.saved, rivals)
                if save.queued.is_waiting and not is_required:
                    dropped.append(save)
            for save in dropped:
                save.queued.drop()
        for save in dropped:
            _log.warning(
                "step %d is not written: storage is busy with earlier ones, and step %d is newer",
                save.request.saved.step, request.saved.step,
            )  # fmt: skip
        return 0, [save.queued.number for save in dropped]

    def _await_slot(self, request: SaveRequest) -> None:
        with self._queue.changed:
            if not self._has_slot():
                self._log_wait(
                    "step %d is to be saved, but %d saves are pending: waiting for one of them",
                    request.saved.step, self._num_slots,
                )  # fmt: skip
            self._queue.changed.wait_for(self._has_slot)

    def _has_slot(self) -> bool:
        return sum(not save.queued.is_over for save in self._saves) < self._num_slots

    def _forget_ended(self) -> None:
        """Removes saves that have succeeded or were dropped."""
        for save in list(self._saves):
            if save.handle is not None and save.handle.done() and not save.handle.failed():
                self._saves.remove(save)
                self._note_durable(save)
                if save.handle.report is not None:
                    self._best = self._retention.best_of(save.request.saved, self._best)

    # The end

    def wait(self, number: int | None = None) -> None:
        """Waits until all pending saves, or those up to a number, have ended.

        Raises:
            FastloadError: One has failed; the next call raises the error of the next one.
        """
        while self._saves and (number is None or self._saves[0].queued.number <= number):
            save = self._saves.pop(0)
            handle = save.handle
            try:
                if handle is not None:
                    await_end(handle)
                    self._note_durable(save)
                    if handle.failed() or handle.report is not None:
                        handle.wait()
            finally:
                del handle, save  # else error → traceback → frame → handle → error would keep it all alive

    def close(self) -> None:
        """Frees the memory, and ends the decisions of rank 0."""
        self._queue.pool.clear()
        self._decisions.close()
