"""A parcel: what one group of ranks wants of a chunk. Pure."""

from __future__ import annotations

from typing import NamedTuple

from fastload.transfer.lanes import Ranks, Stretch

__all__ = ["Parcel"]


class Parcel(NamedTuple):
    """What one group of ranks wants of a chunk.

    Attributes:
        chain: The ranks that it goes through: the reader, then those who want it.
        hop: This rank's place among them.
        is_own: Whether this rank wants it.
        stretches: What of the checkpoint it is of.
        places: Where each of these lies in the chunk, if this rank reads it.
        nbytes: Its length, packed.
        ranks: Those who want it, ascending.
    """

    chain: tuple[int, ...]
    hop: int
    is_own: bool
    stretches: tuple[Stretch, ...]
    places: tuple[int, ...]
    nbytes: int
    ranks: Ranks

    @property
    def reader(self) -> int:
        """Who reads it."""
        return self.chain[0]

    @property
    def wanter(self) -> int:
        """One of those that want it: this rank, if it does."""
        return self.chain[self.hop] if self.is_own else self.ranks[0]

    @property
    def is_handed(self) -> bool:
        """Whether the rank that reads it does not want it."""
        return len(self.chain) > len(self.ranks)

    @property
    def first(self) -> int:
        """The first in its chain that wants it."""
        return self.chain[self.is_handed]

    @property
    def source(self) -> int:
        """Whom this rank gets it from."""
        return self.chain[self.hop - 1]

    @property
    def next(self) -> int | None:
        """Whom this rank passes it on to."""
        return self.chain[self.hop + 1] if self.hop + 1 < len(self.chain) else None
