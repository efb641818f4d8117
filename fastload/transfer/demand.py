"""Who can deliver the bytes of a space, and who wants them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Demand", "Supply"]


@dataclass(frozen=True)
class Supply:
    """Who can deliver: readers of storage, or hosts that have a copy.

    Attributes:
        ranks: Those of whom each can deliver every byte, ascending; at least one.
    """

    ranks: tuple[int, ...]

    def without(self, broken: Collection[int]) -> Supply | None:
        """Returns what is left when some ranks drop out; None if that is nothing."""
        left = tuple(rank for rank in self.ranks if rank not in broken)
        return Supply(left) if left else None


@dataclass(frozen=True)
class Demand:
    """Who wants the bytes.

    Attributes:
        ranks: Those of whom each wants every byte, ascending: all ranks, one of each host, one alone; none if
            the bytes are read only to be looked at.
    """

    ranks: tuple[int, ...] = ()
