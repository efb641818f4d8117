"""When a save that was copied is written, where a training has several in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fastload.report import SaveReport
from fastload.saving.spares import Spares

__all__ = ["Turn"]


class Turn(Protocol):
    """One of several saves that are written one after the other, on all ranks in the same order.

    All ranks hear from rank 0 whether it is written, when its turn has come there.

    Attributes:
        memory: Where the memory of its copy comes from.
    """

    @property
    def memory(self) -> Spares:
        """See above."""
        ...

    def hold(self, give_back: Callable[[], None]) -> None:
        """Takes what gives the memory of the copy back, should the save never be written."""
        ...

    def run(self, work: Callable[[], SaveReport | None]) -> SaveReport | None:
        """Does all that is left to do of the save."""
        ...

    def come(self) -> bool:
        """Waits until it is to be written or not, as far as this rank can tell; returns which."""
        ...

    def give_up(self) -> None:
        """Notes that it is not written."""
        ...

    def came_instead_of(self) -> tuple[str, ...]:
        """Returns where the earlier saves would be that were not written, in favour of this one; once."""
        ...
