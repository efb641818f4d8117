"""What a process group keeps from one call for the next: connections, and what else takes long to make."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fastload.base.threads import ProcessLock

__all__ = ["Keepsake", "Kept", "kept_of"]

T = TypeVar("T")

_lock = ProcessLock()


class Keepsake(Protocol):
    """What can be kept.

    Attributes:
        token: Says which one it is; the same on all ranks that have made it together, and of no other.
    """

    token: str

    def drop(self) -> None:
        """Lets go of it, for good; keeps nobody waiting, and never raises."""
        ...

    def disown(self) -> None:
        """Closes its descriptors in a forked child, which has none of its parent's threads; never raises."""
        ...


class Kept:
    """What the ranks of one group have made together, seen from one of them.

    Whoever takes a thing has it alone, until it is put back: two calls at once do not share it. Since other
    ranks may have dropped theirs, or have taken it for another call, what was taken is used only if all ranks
    have told each other the same token; if not, all of them drop it and make another one.
    """

    def __init__(self) -> None:
        self._things: dict[str, Keepsake] = {}
        self._num_drops = 0
        self._lasting: Any = None

    def lasting(self, make: Callable[[], T]) -> T:
        """Returns what stays when a call fails, until the group goes: one thing, made the first time."""
        with _lock:
            if self._lasting is None:
                self._lasting = make()
            found: T = self._lasting
        return found

    def take(self, name: str) -> Any:
        """Returns what was put back under a name, which is there no longer; None if nothing was."""
        with _lock:
            return self._things.pop(name, None)

    @property
    def era(self) -> int:
        """Changes when all is dropped; see `put`."""
        return self._num_drops

    def put(self, name: str, thing: Keepsake, era: int) -> None:
        """Keeps a thing, in place of what was there under this name.

        Args:
            name: Of it.
            thing: What no call uses any more.
            era: `era` as it was when the thing was taken or made: what was used when a call failed goes, too.
        """
        with _lock:
            going = self._things.pop(name, None) if era == self._num_drops else thing
            if going is not thing:
                self._things[name] = thing
        if going is not None:
            going.drop()

    def drop(self) -> None:
        """Lets go of all: a call has failed, and who knows what of it is still under way; never raises."""
        with _lock:
            self._num_drops += 1
            going, self._things = list(self._things.values()), {}
        for thing in going:
            thing.drop()

    def end(self) -> None:
        """Lets go of all, for good: the group is gone, or the process ends."""
        if self._lasting is not None:
            self._lasting.drop()
        self.drop()

    def disown(self) -> None:
        """Forgets all in a forked child."""
        if self._lasting is not None:
            self._lasting.disown()
            self._lasting = None
        going, self._things = list(self._things.values()), {}
        for thing in going:
            thing.disown()


_of_groups: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()


def kept_of(group: Any) -> Kept:
    """Returns what a process group keeps; when the group goes, or the process ends, that goes, too."""
    with _lock:
        kept = _of_groups.get(group)
        if kept is None:
            kept = _of_groups[group] = Kept()
            weakref.finalize(group, kept.end)
        return kept


def _disown_all() -> None:
    for kept in list(_of_groups.values()):
        kept.disown()


os.register_at_fork(after_in_child=_disown_all)
