"""Ranks in a grid, along whose axes chunks reach all of them, one dimension after the other. Pure.

The hosts are factored into a few short dimensions, and the ranks of a host are the last one. In the phase of
a dimension, the chunks that any rank of an axis has reach all ranks of this axis. So each byte enters each
host once, at the rank with the local number of its reader, which spreads the bytes over the network cards of
the host. The rest moves within hosts. A chunk takes as many hops as the dimensions have members, less one
each, and no rank communicates with more ranks than that.

If the number of hosts has large prime factors, such as 13, some hosts are extra. The chunks of an extra host
reach a partner in a phase before all others. In the last phase between hosts, whose senders have all chunks,
the extra host is one more member of its partner's axis.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

_GOOD_DIM = 8  # longer axes take more hops, and more axes more messages


class Move(NamedTuple):
    """Consecutive chunks that one member of an axis sends to all others.

    Attributes:
        root: Number of the member.
        begin: Number of the first chunk in the round.
        end: Number of the chunk after the last one.
    """

    root: int
    begin: int
    end: int


@dataclass(frozen=True)
class Grid:
    """The positions of ranks in a grid.

    Attributes:
        ranks: All ranks, those of a host next to each other.
        dims: Number of hosts in each dimension of hosts, without extra hosts.
        num_locals: Number of ranks on each host: the last dimension.
    """

    ranks: tuple[int, ...]
    dims: tuple[int, ...]
    num_locals: int

    @classmethod
    def of(cls, hosts: Sequence[Hashable]) -> Grid:
        """Returns the grid of some hosts; if they have different numbers of ranks, all ranks are one axis.

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
        """Number of phases: extra hosts, each dimension of hosts, the ranks within hosts."""
        return len(self.dims) + 2

    @property
    def _num_extra(self) -> int:
        return len(self.ranks) // self.num_locals - prod(self.dims)

    @cached_property
    def _position_of(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def _host(self, rank: int) -> int:
        return self._position_of[rank] // self.num_locals

    @cached_property
    def _digits(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of each rank, or of its partner."""
        num_hosts = prod(self.dims)
        return {
            rank: (*self._host_digits(self._host(rank) % num_hosts), position % self.num_locals)
            for position, rank in enumerate(self.ranks)
        }

    def _host_digits(self, host: int) -> Iterator[int]:
        for size in self.dims:
            host, digit = divmod(host, size)
            yield digit

    def axis(self, rank: int, phase: int) -> tuple[int, ...]:
        """Returns the ranks that communicate with a rank in a phase, itself included."""
        host, local = self._host(rank), self._digits[rank][-1]
        if phase == self.num_phases - 1:
            return self.ranks[host * self.num_locals : (host + 1) * self.num_locals]
        num_hosts = prod(self.dims)
        partner, extra = host % num_hosts, range(num_hosts, num_hosts + self._num_extra)
        if phase == 0:
            hosts = [partner, *(each for each in extra if each % num_hosts == partner)]
        elif host in extra and phase < len(self.dims):
            hosts = [host]
        else:
            unit, size = prod(self.dims[: phase - 1]), self.dims[phase - 1]
            first = partner - partner // unit % size * unit
            hosts = list(range(first, first + size * unit, unit))
            if phase == len(self.dims):
                hosts += [each for each in extra if each % num_hosts in hosts]
        return tuple(self.ranks[host * self.num_locals + local] for host in hosts)

    def in_order(self, readers: Sequence[int]) -> list[int]:
        """Returns readers in an order in which the chunks that a member sends in a phase are consecutive."""
        return sorted(readers, key=lambda reader: (self._digits[reader][::-1], reader))

    def moves(self, readers: Sequence[int], rank: int) -> list[list[Move]]:
        """Returns the moves along the axis of a rank in each phase; the same for all ranks of the axis.

        Args:
            readers: The reader of each chunk of a round, best `in_order`.
            rank: The rank.
        """
        return [self._moves_in(phase, readers, rank) for phase in range(self.num_phases)]

    def _moves_in(self, phase: int, readers: Sequence[int], rank: int) -> list[Move]:
        here, num_hosts = self._digits[rank][phase:], prod(self.dims)
        is_extra = self._host(rank) >= num_hosts
        if is_extra and 0 < phase < len(self.dims):
            return []
        moves: list[Move] = []
        for number, reader in enumerate(readers):
            digits = self._digits[reader]
            if digits[phase:] != here or (phase == 0 and self._host(reader) < num_hosts):
                continue
            root = digits[phase - 1] if phase else 1
            if moves and moves[-1].root == root and moves[-1].end == number:
                moves[-1] = moves[-1]._replace(end=number + 1)
            else:
                moves.append(Move(root, number, number + 1))
        return moves


def is_gather(moves: Sequence[Move], num_members: int) -> bool:
    """Whether the moves are an all-gather: each member, in order, has equally many chunks."""
    if [move.root for move in moves] != list(range(num_members)):
        return False
    lengths = {move.end - move.begin for move in moves}
    return len(lengths) == 1 and moves[-1].end - moves[0].begin == num_members * lengths.pop()


def dims_of(num_hosts: int) -> tuple[int, ...]:
    """Factors as many hosts as possible into short dimensions; the others are extra.

    The longest comes first, since most bytes move along the last one.
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
