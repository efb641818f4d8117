"""Which call of a group is which, and what one rank has of the group's tree from call to call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.comm.links import Tag, TreeLinks
from fastload.comm.meeting import Verdict
from fastload.comm.versions import Versions

__all__ = ["Standing", "Turn", "Turns", "turns_in"]


@dataclass(eq=False, slots=True)
class Turn:
    """The place of a call among those that this rank makes.

    Attributes:
        call: Its name.
        number: Its number: the same on all ranks that make the same calls.
        missed: What the others have heard, if this rank is too late for it.
    """

    call: str
    number: int
    missed: Verdict | None = None


class Turns:
    """The numbers of a group's calls on one rank, in the order in which it has begun them.

    A number says nothing of how the ranks agree, so it does not matter to it who finds a tree broken, and
    when, nor which thread goes on with a call. It stays once the ranks have met there. Before that, this rank
    may find that the others have used it for a call of which it knows nothing: then this call has the next
    number, and so have all that were begun after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._num_begun = 0
        self._open: list[Turn] = []

    def begin(self, call: str) -> Turn:
        """Returns the turn of a call that this rank begins."""
        with self._lock:
            self._num_begun += 1
            self._open.append(turn := Turn(call, self._num_begun))
        return turn

    def settle(self, turn: Turn) -> None:
        """Notes that the ranks have met for a call: its number stays."""
        with self._lock:
            if turn in self._open:
                self._open.remove(turn)

    def look_back(self, until: Turn, passed: Callable[[Turn], Verdict | None]) -> None:
        """Settles the calls up to one, in order.

        Args:
            until: That.
            passed: Returns what was decided without this rank where a turn is; None if nothing was.
        """
        with self._looking:
            while until in (waiting := list(self._open)):
                verdict = passed(turn := waiting[0])
                if verdict is None or verdict.missed:
                    turn.missed = verdict
                    self.settle(turn)
                else:
                    self._put_off(turn)

    def _put_off(self, first: Turn) -> None:
        with self._lock:
            self._num_begun += 1
            for turn in self._open[self._open.index(first) :] if first in self._open else ():
                turn.number += 1


_of_corners: dict[tuple[str, int], Turns] = {}  # by what a corner is named, and rank


def turns_in(corner: Any, rank: int, size: int) -> Turns:
    """Returns the numbers of a rank's calls in the corner of a store.

    A group may be made anew in the corner where one of the same name and members was before. Its calls go on
    with the numbers of that: how many calls each rank has made there, some perhaps alone, the ranks find out
    as within one group. In a store that has come in place of another all begin anew.

    Args:
        corner: Of a ``torch.distributed.Store``.
        rank: This one.
        size: Number of ranks.

    Raises:
        WorldError: They run different versions of fastload.
    """
    return _of_corners.setdefault((Versions(corner, rank, size).greet(), rank), Turns())


class Standing:
    """What one rank has of the tree of its group, from call to call.

    Attributes:
        turns: The numbers of the calls; None before the first one.
        bonds: Its connections; None if there is no tree.
        num_tries: How many calls have tried to make a tree in vain, since the last one.
    """

    def __init__(self) -> None:
        self.turns: Turns | None = None
        self.bonds: TreeLinks | None = None
        self.num_tries = 0
        self._lock = threading.Lock()
        self._unheard: dict[Tag, Sequence[str]] = {}
        self._of_last_tree: list[str] = []
        self._going: list[str] = []

    def bond(self, bonds: TreeLinks) -> None:
        """Has another tree from now on.

        All ranks have come to it, after what has broken the last one; what they may still have looked for in
        the store then goes when the next one is made.
        """
        self.num_tries = 0
        old, self.bonds = self.bonds, bonds
        if old is not None:
            old.drop()
        with self._lock:
            self._going += self._of_last_tree
            self._of_last_tree = [key for keys in self._unheard.values() for key in keys]
            self._unheard = {}

    def forget(self, bonds: TreeLinks) -> None:
        """Has no tree any more, if it was that one."""
        bonds.drop()
        if self.bonds is bonds:
            self.bonds = None

    def end_step(self, tag: Tag, keys: Sequence[str], bonds: TreeLinks) -> None:
        """Notes that this rank has heard of a step along the tree, and goes on by itself.

        Args:
            tag: Of the step.
            keys: In the store, which go once all ranks have heard.
            bonds: Where they tell that.
        """
        with self._lock:
            if keys:
                self._unheard[tag] = keys
            bonds.acknowledge(tag)
            for each in bonds.take_acknowledged():
                self._going += self._unheard.pop(each, ())

    def outdate(self, keys: Sequence[str]) -> None:
        """Notes keys that some rank may look for that has found the tree broken."""
        with self._lock:
            self._of_last_tree += keys

    def take_going(self) -> list[str]:
        """Returns keys that nobody looks for any more."""
        with self._lock:
            going, self._going = self._going, []
        return going

    def drop(self) -> None:
        """Lets go of the tree; blocks nobody, and never raises."""
        if self.bonds is not None:
            self.bonds.drop()

    def disown(self) -> None:
        """Closes its descriptors in a forked child."""
        if self.bonds is not None:
            self.bonds.disown()
