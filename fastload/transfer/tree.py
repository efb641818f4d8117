"""The way of a chunk from the rank that reads it to all hosts, and which rank of a host takes it in. Pure.

Between hosts a chunk enters each of them once. The hosts stand in a circle, and each reader's chunks have a
tree of their own, in which a host is known by its distance from the reader's, written with digits of some
*base*. A host that has got the chunk passes it on to the next one along its highest digit, and to the first
one along each higher digit. So with as large a base as there are hosts it is a ring, with base 2 a binomial
tree; hosts talk only to those at distances that are powers of the base, every host sends about as much as
every other, and the way is as long as the sum of the digits.

In a host, chunks are spread over *rails*: the first rank of every host takes in what the first rank of any
host has read, and so on. Ranks of a host share memory, so one of them is enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Trees", "choose_base", "most_hops"]

_GOOD_NUM_HOPS = 16  # as many wait while chunks are on their way as a few rounds in flight make up for


@dataclass(frozen=True)
class Trees:
    """Who passes whose chunks on to whom.

    Attributes:
        hosts: The ranks of each host; hosts next to each other in the circle.
        base: Of the digits.
    """

    hosts: tuple[tuple[int, ...], ...]
    base: int

    @classmethod
    def between(cls, ranks: Sequence[int], hosts: Sequence[Hashable]) -> Trees:
        """Returns those of some ranks.

        Args:
            ranks: Those that take part, in the order of the circle.
            hosts: What tells the host of each of them from the others.
        """
        found: dict[Hashable, list[int]] = {}
        for rank, host in zip(ranks, hosts, strict=True):
            found.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, found.values())), choose_base(len(found)))

    @cached_property
    def _place_of(self) -> dict[int, tuple[int, int]]:
        """Host and rail of each rank."""
        return {
            rank: (host, rail) for host, ranks in enumerate(self.hosts) for rail, rank in enumerate(ranks)
        }

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a rank's host, itself included."""
        return self.hosts[self._place_of[rank][0]]

    def taker(self, owner: int, rank: int) -> int:
        """Returns which rank of a rank's host has the chunks of a reader come in; the reader on its own."""
        return self._at(self._place_of[rank][0], owner)

    def source(self, owner: int, rank: int) -> int | None:
        """Returns from whom a rank receives the chunks of a reader; None if it does not."""
        position = self._position(owner, rank)
        if position == 0 or self.taker(owner, rank) != rank:
            return None
        unit = _highest_unit(position, self.base)
        return self._at(self._place_of[rank][0] - unit, owner)

    def targets(self, owner: int, rank: int) -> list[int]:
        """Returns to whom a rank sends the chunks of a reader, first to who has most others behind it."""
        if self.taker(owner, rank) != rank:
            return []
        position, host = self._position(owner, rank), self._place_of[rank][0]
        return [self._at(host + step, owner) for step in _steps(position, len(self.hosts), self.base)]

    def hops(self, owner: int, rank: int) -> int:
        """Returns how many links between hosts the chunks of a reader cross on their way to a rank."""
        position, num_hops = self._position(owner, rank), 0
        while position:
            position, digit = divmod(position, self.base)
            num_hops += digit
        return num_hops

    def _position(self, owner: int, rank: int) -> int:
        return (self._place_of[rank][0] - self._place_of[owner][0]) % len(self.hosts)

    def _at(self, host: int, owner: int) -> int:
        """Returns the rank of a host on the rail of a reader; where ranks are fewer, they have several."""
        ranks = self.hosts[host % len(self.hosts)]
        return ranks[self._place_of[owner][1] % len(ranks)]


def choose_base(num_hosts: int) -> int:
    """Returns the base of the digits: that of a ring, unless the way around it is long."""
    for base in range(num_hosts, 2, -1):
        if most_hops(num_hosts, base) <= _GOOD_NUM_HOPS:
            return base
    return 2


def most_hops(num_hosts: int, base: int) -> int:
    """Returns the most links between hosts that a chunk crosses: the largest sum of digits, or one above."""
    hops, rest = 0, num_hosts - 1
    while rest >= base:
        rest //= base
        hops += base - 1
    return hops + rest


def _highest_unit(position: int, base: int) -> int:
    unit = 1
    while unit * base <= position:
        unit *= base
    return unit


def _steps(position: int, num_hosts: int, base: int) -> Iterator[int]:
    """Yields how far from a host those are that it passes a chunk on to."""
    unit = 1
    if position:
        unit = _highest_unit(position, base)
        if position // unit < base - 1 and position + unit < num_hosts:
            yield unit
        unit *= base
    while position + unit < num_hosts:
        yield unit
        unit *= base
