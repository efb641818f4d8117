"""Whose turn it is to have a chunk in a round, where there is no room for one of each reader. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log
from typing import NamedTuple

__all__ = ["Seat", "Windows", "num_turns_for", "seats_of"]

_NEAR = 1.42  # powers of 2 are never further apart


class Seat(NamedTuple):
    """Where a reader is.

    Attributes:
        host: Which of the hosts of all readers.
        local: Which of the readers of that host.
    """

    host: int
    local: int


@dataclass(frozen=True)
class Windows:
    """Readers that take turns: each round has the chunks of one window of them.

    A window has readers from hosts at equal distances, as many of each `Seat.local`: so in every round all
    hosts, and the ranks of each of them, have as much to receive and to pass on. Windows that follow each
    other are of hosts far from each other.

    Attributes:
        order: All readers, window by window.
        num_turns: How many windows there are.
    """

    order: tuple[int, ...]
    num_turns: int

    @classmethod
    def of(
        cls, readers: Sequence[int], hosts: Sequence[str], num_turns: int, *, by_local: bool = False
    ) -> Windows:
        """Arranges readers in windows that differ by one reader at most.

        Args:
            readers: Ascending.
            hosts: Host of each rank; empty if each is on a host of its own.
            num_turns: How many windows, no more than readers.
            by_local: Whether the readers of a window are in the order of `Seat.local` first, and of hosts
                then, if all hosts have as many.
        """
        if num_turns == 1 and not by_local:
            return cls(tuple(readers), 1)
        seats = seats_of(readers, hosts)
        num_locals = 1 + max(seat.local for seat in seats)
        by_local = by_local and len(seats) == num_locals * (1 + max(seat.host for seat in seats))
        num_bits = (num_turns - 1).bit_length()

        def place(index: int) -> tuple[int, int, int]:
            host, local = seats[index]
            turn = (host + local * num_turns // num_locals) % num_turns
            within = (local, host) if by_local else (host, local)
            return int(f"{turn:0{num_bits}b}"[::-1], 2), *within

        return cls(tuple(readers[index] for index in sorted(range(len(readers)), key=place)), num_turns)

    @property
    def most_readers(self) -> int:
        """Readers in the largest window."""
        return -(-len(self.order) // self.num_turns)

    def first(self, turn: int) -> int:
        """Returns how many readers have their turn before this one."""
        return turn * len(self.order) // self.num_turns

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The readers of each window, in the order of their chunks."""
        turns = range(self.num_turns)
        return tuple(self.order[self.first(turn) : self.first(turn + 1)] for turn in turns)

    @cached_property
    def turn_of(self) -> dict[int, int]:
        """The window of each reader."""
        return {rank: turn for turn, readers in enumerate(self.readers) for rank in readers}

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Where each reader is in `order`."""
        return {rank: place for place, rank in enumerate(self.order)}


def seats_of(readers: Sequence[int], hosts: Sequence[str]) -> list[Seat]:
    """Returns where each reader is; arguments are those of `Windows.of`."""
    if not hosts:
        return [Seat(host, 0) for host in range(len(readers))]
    numbers: dict[str, int] = {}
    counts: Counter[str] = Counter()
    seats = []
    for rank in readers:
        host = hosts[rank]
        seats.append(Seat(numbers.setdefault(host, len(numbers)), counts[host]))
        counts[host] += 1
    return seats


def num_turns_for(num_hosts: int, good: float, at_least: int) -> int:
    """Returns how many windows to have: if possible so that their readers are on hosts at equal distances.

    Args:
        num_hosts: How many hosts there are.
        good: About so many.
        at_least: But no less than this.
    """
    near = range(max(at_least, ceil(good / _NEAR)), int(good * _NEAR) + 1)
    even = [turns for turns in near if num_hosts % turns == 0]
    return min(even, key=lambda turns: abs(log(turns / good)), default=max(at_least, ceil(good)))
