"""The saves of a training that are in flight: copied, and not yet known to be durable.

Their copies are written one after the other. Rank 0 decides what becomes of them, and tells the others where
they come by anyway: at the next save (`orders`), and when it is the turn of one of them (`flight`). So nobody
in the background uses the process group of the training, and all ranks do the same with every save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastload.comm.world import World
from fastload.saving.call import Turn
from fastload.saving.handle import SaveHandle
from fastload.saving.snapshot import Spares
from fastload.training.flight import Flight, Planned, Shared
from fastload.training.orders import Order, Orders
from fastload.training.retention import Point, Retention, Saved

__all__ = ["InFlight"]

_log = logging.getLogger(__name__)


class InFlight:
    """Keeps hold of saves until they are durable, or somebody has heard why they are not.

    All ranks make the same calls.

    Args:
        world: The ranks.
        num_slots: How many copies of the state there may be at once. With one, a save waits until the one
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
        self._orders = Orders(world)
        self._shared = Shared(Spares(num_slots))
        self._flights: list[Flight] = []
        self._number = 0
        self._num_heard = 0
        self._best: Saved | None = None
        self.newest: Point | None = None

    @property
    def failed(self) -> int:
        """Number of the first one that has failed, of which nobody has heard; else 0."""
        failed = (flight.number for flight in self._flights if flight.handle and flight.handle.failed())
        return next(failed, 0)

    def holds(self, number: int) -> bool:
        """Whether nobody has waited for the save of that number; the same on all ranks if it has failed."""
        return any(flight.number == number for flight in self._flights)

    # A save

    def make_room(self, planned: Planned) -> int:
        """Waits until there is room for one more copy.

        Returns:
            The number of an earlier save that has failed, which all ranks are to raise instead; 0 if there is
            none. With one slot it is always 0: a save that comes next tells all ranks by itself.

        Raises:
            PeerError: Rank 0 did not come to this save in time.
        """
        self._number += 1
        if self._num_slots == 1:
            self._await_last(planned)
            return 0
        self._forget_ended()
        order = self._orders.share(self._number, lambda: self._decide(planned), num_heard=self._num_heard)
        for flight in self._flights:
            if flight.number in order.given_up:
                flight.give_up()
        if not order.failed:
            self._await_slot(planned)
        return order.failed

    def make(self, planned: Planned, save: Callable[[Turn | None], SaveHandle | None]) -> Callable[[], bool]:
        """Makes the save that room was made for.

        Returns:
            What waits until it has ended, and says whether its checkpoint exists.
        """
        flight = Flight(self._number, planned, tuple(self._flights), self._shared)
        flight.handle = handle = save(flight if self._num_slots > 1 else None)
        if handle is not None:
            self._flights.append(flight)
        self._note(flight)

        def has_succeeded() -> bool:
            if handle is not None:
                handle.settle()
            return handle is None or handle.report is not None

        return has_succeeded

    def _await_last(self, planned: Planned) -> None:
        """Waits for the save before; its error, if any, is raised by the next save, which tells all ranks."""
        for flight in self._flights:
            if flight.handle is not None:
                if not flight.handle.done():
                    self._say(
                        "step %d is to be saved, but the save before still goes on: waiting for it",
                        planned.saved.step,
                    )
                flight.handle.settle()
            self._note(flight)
        self._flights.clear()

    def _say(self, text: str, *values: int) -> None:
        """Logs that a save has to wait: the first time as a warning, since the next ones often wait, too."""
        _log.log(self._level, f"{text} (later waits are logged at level DEBUG)", *values)
        self._level = logging.DEBUG

    def _note(self, flight: Flight) -> None:
        """Notes a save that has ended, if it has ended well."""
        if flight.handle is None or flight.handle.report is not None:
            point = flight.planned.saved.point
            self.newest = point if self.newest is None else max(self.newest, point)

    def _decide(self, planned: Planned) -> Order:
        with self._shared.changed:
            if failed := self.failed:
                return Order(failed)
            there = [flight for flight in self._flights if not flight.is_over]
            others = [planned.saved, *([self._best] if self._best is not None else [])]
            given_up = []
            for flight in there:
                rivals = [*others, *(one.planned.saved for one in there if one is not flight)]
                if flight.waits and not (
                    flight.planned.stays or self._retention.insists_on(flight.planned.saved, rivals)
                ):
                    given_up.append(flight)
            for flight in given_up:
                flight.give_up()
        for flight in given_up:
            _log.warning(
                "step %d is not written: storage is busy with earlier ones, and step %d is newer",
                flight.planned.saved.step, planned.saved.step,
            )  # fmt: skip
        return Order(given_up=tuple(flight.number for flight in given_up))

    def _await_slot(self, planned: Planned) -> None:
        with self._shared.changed:
            if not self._has_slot():
                self._say(
                    "step %d is to be saved, but %d saves are in flight: waiting for one of them",
                    planned.saved.step, self._num_slots,
                )  # fmt: skip
            self._shared.changed.wait_for(self._has_slot)

    def _has_slot(self) -> bool:
        return sum(not flight.is_over for flight in self._flights) < self._num_slots

    def _forget_ended(self) -> None:
        """Lets go of saves that have ended well, or were given up."""
        for flight in list(self._flights):
            if flight.handle is not None and flight.handle.done() and not flight.handle.failed():
                self._flights.remove(flight)
                self._note(flight)
                self._num_heard = max(self._num_heard, flight.number)
                if flight.handle.report is not None:
                    self._best = self._retention.best_of(flight.planned.saved, self._best)

    # The end

    def wait(self, number: int | None = None) -> None:
        """Waits until all that is in flight, or what was begun up to a number, is over.

        Raises:
            FastloadError: One has failed; another one is told at the next call.
        """
        while self._flights and (number is None or self._flights[0].number <= number):
            flight = self._flights.pop(0)
            handle = flight.handle
            try:
                if handle is not None:
                    handle.settle()
                    self._note(flight)
                    if handle.failed() or handle.report is not None:
                        handle.wait()
            finally:
                del handle, flight  # else error → traceback → frame → handle → error would keep it all alive

    def close(self) -> None:
        """Lets go of the memory."""
        self._shared.memory.clear()
