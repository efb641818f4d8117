"""One save of a training that has several in flight: from its copy on until it is written, or given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastload.report import SaveReport
from fastload.saving.handle import SaveHandle
from fastload.saving.snapshot import Spares
from fastload.training.retention import Saved

__all__ = ["Flight", "Planned", "Shared"]


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
        memory: That of their copies.
        changed: Guards them; notified when one of them is over.
        given_up: Number → where it would be, of those that are not written, until a report has said so.
    """

    memory: Spares
    changed: threading.Condition = field(default_factory=threading.Condition)
    given_up: dict[int, str] = field(default_factory=dict)


class Flight:
    """A save in flight. Has its turn once those before it are over; see `fastload.saving.turn.Turn`.

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
        self._give_back: Callable[[], None] | None = None

    @property
    def memory(self) -> Spares:
        """Where the memory of its copy comes from."""
        return self._shared.memory

    @property
    def waits(self) -> bool:
        """Whether it waits for others, and so can still be given up."""
        with self._shared.changed:
            return not (self.is_over or self._has_come or self._is_next)

    @property
    def _is_next(self) -> bool:
        return all(flight.is_over for flight in self._before)

    def hold(self, give_back: Callable[[], None]) -> None:
        """Takes what gives the memory of its copy back."""
        self._give_back = give_back

    def run(self, work: Callable[[], SaveReport | None]) -> SaveReport | None:
        """Does all that is left to do of it."""
        try:
            return work()
        finally:
            with self._shared.changed:
                self.is_over, self._before, self._give_back = True, (), None
                self._shared.changed.notify_all()

    def come(self) -> bool:
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
            if self._give_back is not None:
                self._give_back()
            self._shared.changed.notify_all()

    def came_instead_of(self) -> tuple[str, ...]:
        """Returns where the earlier ones would be that were given up, and that no report has named."""
        with self._shared.changed:
            numbers = sorted(number for number in self._shared.given_up if number < self.number)
            return tuple(self._shared.given_up.pop(number) for number in numbers)
