"""The saves of a training that are in flight: copied, and not yet known to be durable.

Their copies are written one after the other. Rank 0 decides what becomes of them, and tells the others where
they come by anyway: at the next save (`orders`), and when it is the turn of one of them (`flight`). So nobody
in the background uses the process group of the training, and all ranks do the same with every save.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from fastload.comm.world import World
from fastload.report import SaveReport
from fastload.saving.call import QueuedSave
from fastload.saving.handle import SaveHandle
from fastload.saving.snapshot import BufferPool
from fastload.training.retention import Point, Retention, Saved

__all__ = ["Flight", "InFlight", "Order", "Orders", "Planned", "Shared"]


@dataclass(frozen=True)
class Order:
    """What all ranks do before a save.

    Attributes:
        failed: Number of an earlier save that has failed, which they raise; 0 if there is none.
        given_up: Numbers of earlier saves that are not written, since this one is newer.
    """

    failed: int = 0
    given_up: tuple[int, ...] = ()


class Orders:
    """Brings what rank 0 decides to the others, through the rendezvous store.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_forgotten = 0

    def share(self, number: int, decide: Callable[[], Order], *, num_heard: int) -> Order:
        """Returns what rank 0 decides.

        Args:
            number: Of the order, from 1 on.
            decide: Called on rank 0 only.
            num_heard: How many of the first orders are known to have reached all ranks.

        Raises:
            PeerError: Rank 0 did not come to this save in time.
        """
        world, what = self._world, "asking what becomes of earlier saves"
        if world.rank != 0:
            text = world.rendezvous.await_text(
                what, _key(number), 0, wait_s=world.patience_s, grace_s=world.grace_s
            )
            found = json.loads(text)
            return Order(found["failed"], tuple(found["given_up"]))
        order = decide()
        if world.size > 1:
            forget = [_key(old) for old in range(self._num_forgotten + 1, num_heard + 1)]
            self._num_forgotten = max(self._num_forgotten, num_heard)
            text = json.dumps(asdict(order))
            world.rendezvous.post(what, _key(number), text, forget=forget, limit_s=world.patience_s)
        return order


def _key(number: int) -> str:
    return f"orders/{number}"


@dataclass(frozen=True)
class Planned:
    """A save that a training asks for.

    Attributes:
        saved: What the rules of retention know of it.
        url: Where to.
        stays: Whether it is written in any case.
    """

    saved: Saved
    url: str
    stays: bool


@dataclass(frozen=True)
class Shared:
    """What the saves of one training share.

    Attributes:
        pool: Lends the memory of their snapshots.
        changed: Guards them; notified when one of them is over.
        given_up: Number → where it would be, of those that are not written, until a report has said so.
    """

    pool: BufferPool
    changed: threading.Condition = field(default_factory=threading.Condition)
    given_up: dict[int, str] = field(default_factory=dict)


class Flight:
    """A save in flight. Has its turn once those before it are over; see `fastload.saving.call.QueuedSave`.

    Args:
        number: Its number; later ones are higher, and newer.
        planned: What was asked for.
        before: The saves that were in flight when it was asked for.
        shared: What it shares with them.

    Attributes:
        number: As given.
        planned: As given.
        handle: What goes on in the background, once something does.
        is_over: Whether it takes no memory any more: it has ended, or is given up.
    """

    def __init__(self, number: int, planned: Planned, before: Sequence[Flight], shared: Shared) -> None:
        self.number = number
        self.planned = planned
        self.handle: SaveHandle | None = None
        self.is_over = False
        self._is_given_up = False
        self._has_come = False
        self._before: Sequence[Flight] = before
        self._shared = shared
        self._release: Callable[[], None] | None = None

    @property
    def pool(self) -> BufferPool:
        """Lends the memory of its snapshot."""
        return self._shared.pool

    @property
    def waits(self) -> bool:
        """Whether it waits for others, and so can still be given up."""
        with self._shared.changed:
            return not (self.is_over or self._has_come or self._is_next)

    @property
    def _is_next(self) -> bool:
        return all(flight.is_over for flight in self._before)

    def hold(self, release: Callable[[], None]) -> None:
        """Takes a callback that frees the snapshot."""
        self._release = release

    def run(self, work: Callable[[], SaveReport | None]) -> SaveReport | None:
        """Does all that is left to do of it."""
        try:
            return work()
        finally:
            with self._shared.changed:
                self.is_over, self._before, self._release = True, (), None
                self._shared.changed.notify_all()

    def await_turn(self) -> bool:
        """Waits until it is its turn, or is given up; returns which. Rank 0's answer counts."""
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._is_given_up or self._is_next)
            self._has_come, self._before = True, ()
            return not self._is_given_up

    def give_up(self) -> None:
        """Lets go of it, if that has not been done; as rank 0 has decided, before anything was written."""
        with self._shared.changed:
            if self.is_over:
                return
            self.is_over = self._is_given_up = True
            self._shared.given_up[self.number] = self.planned.url
            if self._release is not None:
                self._release()
            self._shared.changed.notify_all()

    def came_instead_of(self) -> tuple[str, ...]:
        """Returns where the earlier ones would be that were given up, and that no report has named."""
        with self._shared.changed:
            numbers = sorted(number for number in self._shared.given_up if number < self.number)
            return tuple(self._shared.given_up.pop(number) for number in numbers)


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
        self._shared = Shared(BufferPool(num_slots))
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

    def make(
        self, planned: Planned, save: Callable[[QueuedSave | None], SaveHandle | None]
    ) -> Callable[[], bool]:
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
        self._shared.pool.clear()
