"""The rendezvous of one process alone."""

from __future__ import annotations

from collections.abc import Sequence

from fastload.comm.meeting import Verdict
from fastload.comm.rendezvous import Rendezvous

__all__ = ["Solo"]


class Solo(Rendezvous):
    """That of a world of 1, which has nobody to ask."""

    def __init__(self) -> None:
        super().__init__(None, rank=0, size=1, host=None, if_lost="")
        self._left: dict[str, bytes] = {}

    def tell(self, values: dict[str, str], *, limit_s: float) -> None:
        """Does nothing: there is nobody to be told."""

    def watch(self, key: str, *, alive: bool, limit_s: float) -> bool:
        """Returns False: nobody else fails."""
        return False

    def collect(
        self,
        what: str,
        step: int,
        answer: str,
        *,
        along: bytes = b"",
        wait_s: float,
        grace_s: float,
        forget: int | None,
        since: float | None = None,
    ) -> Verdict:
        """Returns the one answer."""
        return Verdict.from_text(Verdict.write(wait_s, answer), 1, along)

    def hear(
        self, step: int, *, num_others: int, failed: bool, leavings: Sequence[str], grace_s: float
    ) -> None:
        """Forgets what was left."""
        for place in leavings:
            self._left.pop(place, None)

    def resign(
        self, heard: int | None, answers: Sequence[tuple[int, str]], *, at_once: bool, limit_s: float
    ) -> None:
        """Does nothing."""

    def note_shared(self, step: int, place: str, num_keys: int) -> None:
        """Forgets them: the one rank has them."""
        self._left.pop(place, None)

    def leave(self, what: str, place: str, data: bytes, *, limit_s: float) -> list[str]:
        """Keeps bytes for `take`."""
        self._left[place] = data
        return [place]

    def take(self, what: str, place: str, *, keep: bool, limit_s: float) -> bytes | None:
        """Returns what `leave` has kept; None if it has nothing."""
        return self._left.get(place) if keep else self._left.pop(place, None)
