"""Ranks in a grid, along whose lines chunks come to all of them, one dimension after the other. Pure.

The hosts are factored into a few short dimensions, and the ranks of a host are the last one. In the phase
of a dimension the chunks that are on a line already come to all of the line. So each byte enters each host
once, by the rank at the place of the one that has read it, and so through as many network cards as hosts
have ranks; the rest is within hosts. A chunk takes as many hops as the dimensions have members, less one
each, and no rank has to do with more ranks than that.

Where hosts are, say, 13, one is the *guest* of another one: in a phase before all others its chunks come to
its partner, and in the last phase between hosts, from which all hosts have everything, it is one more
member of its partner's line.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

_GOOD_DIM = 8  # longer lines take more hops, and more lines more messages


class Move(NamedTuple):
    """What comes to all of a line from one of its members.

    Attributes:
        root: Which member of the line.
        begin: The first chunk, of those in a row that all chunks of a round are in.
        end: The first one after it that does not come.
    """

    root: int
    begin: int
    end: int


@dataclass(frozen=True)
class Grid:
    """Where ranks are.

    Attributes:
        ranks: All of them, those of a host next to each other.
        dims: How many members the lines of each dimension of hosts have, but for guests.
        num_locals: How many ranks each host has: the last dimension.
    """

    ranks: tuple[int, ...]
    dims: tuple[int, ...]
    num_locals: int

    @classmethod
    def of(cls, hosts: Sequence[Hashable]) -> Grid:
        """Returns that of some hosts; where they have not as many ranks each, all are one line.

        Args:
            hosts: Host of each rank.
        """
        found: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        ranks = tuple(rank for members in found.values() for rank in members)
        num_locals = {len(members) for members in found.values()}
        if len(num_locals) > 1:
            return cls(ranks, (), len(ranks))
        return cls(ranks, dims_of(len(found)), num_locals.pop())

    @property
    def num_phases(self) -> int:
        """How many phases there are: that of guests, one for each dimension of hosts, that of their ranks."""
        return len(self.dims) + 2

    @property
    def num_lines(self) -> int:
        """In how many phases anything may come to a rank."""
        return (self._num_guests > 0) + len(self.dims) + (self.num_locals > 1)

    @property
    def _num_guests(self) -> int:
        return len(self.ranks) // self.num_locals - prod(self.dims)

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def _host(self, rank: int) -> int:
        return self._place_of[rank] // self.num_locals

    @cached_property
    def _digits(self) -> dict[int, tuple[int, ...]]:
        """Where each rank, or its partner, is in each dimension."""
        num_hosts = prod(self.dims)
        return {
            rank: (*self._host_digits(self._host(rank) % num_hosts), place % self.num_locals)
            for place, rank in enumerate(self.ranks)
        }

    def _host_digits(self, host: int) -> Iterator[int]:
        for size in self.dims:
            host, digit = divmod(host, size)
            yield digit

    def line(self, rank: int, phase: int) -> tuple[int, ...]:
        """Returns the ranks that have to do with each other in a phase, this one included."""
        host, local = self._host(rank), self._digits[rank][-1]
        if phase == self.num_phases - 1:
            return self.ranks[host * self.num_locals : (host + 1) * self.num_locals]
        num_hosts = prod(self.dims)
        partner, guests = host % num_hosts, range(num_hosts, num_hosts + self._num_guests)
        if phase == 0:
            hosts = [partner, *(guest for guest in guests if guest % num_hosts == partner)]
        elif host in guests and phase < len(self.dims):
            hosts = [host]
        else:
            unit, size = prod(self.dims[: phase - 1]), self.dims[phase - 1]
            first = partner - partner // unit % size * unit
            hosts = list(range(first, first + size * unit, unit))
            if phase == len(self.dims):
                hosts += [guest for guest in guests if guest % num_hosts in hosts]
        return tuple(self.ranks[host * self.num_locals + local] for host in hosts)

    def has_line(self, rank: int, phase: int) -> bool:
        """Whether a rank has to do with others in a phase."""
        return len(self.line(rank, phase)) > 1

    def in_order(self, owners: Sequence[int]) -> list[int]:
        """Returns readers in an order in which what comes to a line from one of its members is in a row."""
        return sorted(owners, key=lambda owner: (self._digits[owner][::-1], owner))

    def moves(self, owners: Sequence[int], rank: int) -> list[list[Move]]:
        """Returns what comes to the lines of a rank, phase by phase; the same for all of a line.

        Args:
            owners: Who has read the chunks, in their order: best that of `in_order`.
            rank: Whose lines.
        """
        return [self._moves_in(phase, owners, rank) for phase in range(self.num_phases)]

    def _moves_in(self, phase: int, owners: Sequence[int], rank: int) -> list[Move]:
        here, num_hosts = self._digits[rank][phase:], prod(self.dims)
        is_guest = self._host(rank) >= num_hosts
        if is_guest and 0 < phase < len(self.dims):
            return []
        moves: list[Move] = []
        for place, owner in enumerate(owners):
            digits = self._digits[owner]
            if digits[phase:] != here or (phase == 0 and self._host(owner) < num_hosts):
                continue
            root = digits[phase - 1] if phase else 1
            if moves and moves[-1].root == root and moves[-1].end == place:
                moves[-1] = moves[-1]._replace(end=place + 1)
            else:
                moves.append(Move(root, place, place + 1))
        return moves


def is_gather(moves: Sequence[Move], num_members: int) -> bool:
    """Whether members of a line have as many chunks each, one after the other: an all-gather has them."""
    if [move.root for move in moves] != list(range(num_members)):
        return False
    lengths = {move.end - move.begin for move in moves}
    return len(lengths) == 1 and moves[-1].end - moves[0].begin == num_members * lengths.pop()


def dims_of(num_hosts: int) -> tuple[int, ...]:
    """Factors as many of the hosts as possible into short dimensions; the others are guests.

    The longest comes first: most bytes go along the last one.
    """
    while (primes := _primes(num_hosts)) and primes[-1] > _GOOD_DIM:
        num_hosts -= 1
    dims: list[int] = []
    for prime in reversed(primes):
        fitting = (at for at, size in enumerate(dims) if size * prime <= _GOOD_DIM)
        if (at := next(fitting, None)) is None:
            dims.append(prime)
        else:
            dims[at] *= prime
    return tuple(sorted(dims, reverse=True))


def _primes(number: int) -> list[int]:
    """Returns the prime factors of a number, ascending."""
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return [*found, number] if number > 1 else found
