"""Messages, and their ways from a reader to the recipients: trees of hosts, or a grid of ranks. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

import xxhash

from fastload.geometry.box import Runs

Ranks = tuple[int, ...]
"""Ranks that receive the same bytes, ascending."""


class Message(NamedTuple):
    """The bytes of a chunk that the same ranks receive, packed.

    Attributes:
        reader: The rank that reads the chunk.
        ranks: The recipients.
        nbytes: Length in bytes.
        ranges: (start, length) in this rank's requested bytes, in order; empty if it is no recipient.
        pieces: The positions of the bytes in the chunk, in order, if this rank reads it.
    """

    reader: int
    ranks: Ranks
    nbytes: int
    ranges: Sequence[tuple[int, int]] = ()
    pieces: Sequence[Runs] = ()


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins adjacent ranges, each (start, length)."""
    longer: list[tuple[int, int]] = []
    end = -1
    for start, nbytes in ranges:
        if start == end:
            longer[-1] = longer[-1][0], longer[-1][1] + nbytes
        else:
            longer.append((start, nbytes))
        end = start + nbytes
    return longer


# Trees of hosts, through host memory

_GOOD_NUM_HOPS = 16  # a delay that a few rounds in flight hide


class Route(NamedTuple):
    """The route of the messages of one reader to some recipients, seen from one rank.

    Attributes:
        holder: The rank of this host that has the bytes: the reader, or the rank that receives them.
        is_shared: Whether another rank of this host copies them from there.
        source: The rank that this one receives from; None if it receives nothing.
        targets: The ranks that this one sends to, those with the largest subtrees first.
        num_hops: Number of links between hosts from the reader to this host.
        group: A number for the recipients, the same in all processes.
    """

    holder: int
    is_shared: bool = False
    source: int | None = None
    targets: tuple[int, ...] = ()
    num_hops: int = 0
    group: int = 0


class Routing:
    """Finds routes along trees of hosts, and within each host; each byte enters a host once.

    The hosts of the recipients form a circle, and the messages of each reader have their own tree. In the
    tree, a host is numbered by its distance from the reader's host, in digits of some *base*. A host forwards
    a message to the next host along its highest digit, and to the first one along each higher digit. So the
    tree is a ring if the base is the number of hosts, and binomial with base 2. Hosts connect only at
    distances that are powers of the base, all hosts send about equally much, and the number of hops is the
    sum of the digits.

    Within a host, different ranks receive the messages of different readers: the first rank those of the
    first ranks of other hosts, and so on. The other recipients copy from shared memory. Ranks that share no
    memory count as hosts of their own.

    Args:
        rank: This rank.
        order: The ranks that take part, those of a host next to each other: the circle.
        domains: For each of them, an identifier common to the ranks that share memory.
    """

    def __init__(self, rank: int, order: Sequence[int], domains: Sequence[Hashable]) -> None:
        self._rank = rank
        by_domain: dict[Hashable, list[int]] = {}
        for member, domain in zip(order, domains, strict=True):
            by_domain.setdefault(domain, []).append(member)
        self.hosts = tuple(map(tuple, by_domain.values()))
        self._position = {
            member: (host, rail) for host, ranks in enumerate(self.hosts) for rail, member in enumerate(ranks)
        }
        # By identity: hashing a tuple of all ranks takes longer than sending a message.
        self._groups: dict[int, tuple[Ranks, _RecipientHosts]] = {}
        self._routes: dict[tuple[int, int], Route] = {}

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that share memory with this one, itself included."""
        return self.hosts[self._position[self._rank][0]]

    def route(self, reader: int, ranks: Ranks) -> Route:
        """Returns the route from a reader to recipients, one of which, or the reader, is this rank."""
        known = self._routes.get((reader, id(ranks)))
        if known is None:
            known = self._routes[reader, id(ranks)] = self._find(reader, self._group(ranks))
        return known

    def _group(self, ranks: Ranks) -> _RecipientHosts:
        if id(ranks) not in self._groups:
            by_host: dict[int, list[int]] = {}
            for host, _, member in sorted((*self._position[rank], rank) for rank in ranks):
                by_host.setdefault(host, []).append(member)
            number = xxhash.xxh3_64_intdigest(array("q", ranks)) >> 1
            self._groups[id(ranks)] = ranks, _RecipientHosts(tuple(by_host), tuple(by_host.values()), number)
        return self._groups[id(ranks)][1]

    def _find(self, reader: int, group: _RecipientHosts) -> Route:
        tree = _Tree(reader, *self._position[reader], group)
        host, _ = self._position[self._rank]
        position = tree.position(host)
        holder = tree.at(position)
        is_shared = any(member != holder for member in group.on(host))
        if holder != self._rank:
            return Route(holder, is_shared, group=group.number)
        base = choose_base(tree.num_hosts)
        source = tree.at(position - _highest_unit(position, base)) if position else None
        targets = tuple(tree.at(position + step) for step in hop_distances(position, tree.num_hosts, base))
        return Route(holder, is_shared, source, targets, _digit_sum(position, base), group.number)


class _RecipientHosts(NamedTuple):
    """The hosts of some recipients: their positions in the circle, ascending, and the recipients on each."""

    hosts: tuple[int, ...]
    members: tuple[list[int], ...]
    number: int

    def on(self, host: int) -> Sequence[int]:
        """Returns the recipients on a host."""
        at = bisect_left(self.hosts, host)
        return self.members[at] if at < len(self.hosts) and self.hosts[at] == host else ()


class _Tree:
    """The hosts of recipients by their distance from the host of a reader, which may have none of them."""

    def __init__(self, reader: int, host: int, rail: int, group: _RecipientHosts) -> None:
        self._reader = reader
        self._host = host
        self._rail = rail
        self._group = group
        self._first = bisect_left(group.hosts, host)
        self._is_member = bool(group.on(host))
        self.num_hosts = len(group.hosts) + (not self._is_member)

    def position(self, host: int) -> int:
        """Returns the distance of a host with recipients, or 0 for the reader's."""
        if host == self._host:
            return 0
        at = bisect_left(self._group.hosts, host)
        return (at - self._first) % len(self._group.hosts) + (not self._is_member)

    def at(self, position: int) -> int:
        """Returns the rank that receives for the host at a distance."""
        if position == 0:
            return self._reader
        at = self._first + position - (not self._is_member)
        members = self._group.members[at % len(self._group.members)]
        return members[self._rail % len(members)]


def sharing_domains(machines: Sequence[Hashable], groups: Iterable[Collection[int]]) -> list[Hashable]:
    """Returns for each rank an identifier common to the ranks that share memory.

    Ranks of a machine share memory if they receive the same message.

    Args:
        machines: For each rank, an identifier common to the ranks that can share memory.
        groups: The recipients of each message.
    """
    sharing: set[Hashable] = set()
    for ranks in groups:
        seen: set[Hashable] = set()
        for rank in ranks if len(ranks) > 1 else ():
            sharing |= {machines[rank]} & seen
            seen.add(machines[rank])
    return [(machine,) if machine in sharing else rank for rank, machine in enumerate(machines)]


def ring_order(hosts: Sequence[Hashable]) -> list[int]:
    """Returns all ranks, those of a host next to each other.

    Args:
        hosts: Host of each rank.
    """
    by_host: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return list(chain.from_iterable(by_host.values()))


@cache
def choose_base(num_hosts: int) -> int:
    """Returns the largest base with few hops: a ring, unless it is long."""
    for base in range(num_hosts, 2, -1):
        if most_hops(num_hosts, base) <= _GOOD_NUM_HOPS:
            return base
    return 2


def most_hops(num_hosts: int, base: int) -> int:
    """Returns the most hops of a message: the largest sum of digits, or one more."""
    hops, rest = 0, num_hosts - 1
    while rest >= base:
        rest //= base
        hops += base - 1
    return hops + rest


def _digit_sum(position: int, base: int) -> int:
    total = 0
    while position:
        position, digit = divmod(position, base)
        total += digit
    return total


def _highest_unit(position: int, base: int) -> int:
    unit = 1
    while unit * base <= position:
        unit *= base
    return unit


def hop_distances(position: int, num_hosts: int, base: int) -> Iterator[int]:
    """Yields the distances to the hosts that the host at a position sends to."""
    unit = 1
    if position:
        unit = _highest_unit(position, base)
        if position // unit < base - 1 and position + unit < num_hosts:
            yield unit
        unit *= base
    while position + unit < num_hosts:
        yield unit
        unit *= base


# The grid of ranks, between devices

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
    """The positions of ranks in a grid, along whose axes chunks reach all of them, one after the other.

    The hosts are factored into a few short dimensions, and the ranks of a host are the last one. In the phase
    of a dimension, the chunks that any rank of an axis has reach all ranks of this axis. So each byte enters
    each host once, at the rank with the local number of its reader, which spreads the bytes over the network
    cards of the host. The rest moves within hosts. A chunk takes as many hops as the dimensions have members,
    less one each, and no rank communicates with more ranks than that.

    If the number of hosts has large prime factors, such as 13, some hosts are extra. The chunks of an extra
    host reach a partner in a phase before all others. In the last phase between hosts, whose senders have all
    chunks, the extra host is one more member of its partner's axis.

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
        ranks, counts = tuple(ring_order(hosts)), Counter(hosts)
        if len(set(counts.values())) > 1:
            return cls(ranks, (), len(ranks))
        return cls(ranks, dims_of(len(counts)), counts[hosts[0]])

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
            hosts = [partner, *(host for host in extra if host % num_hosts == partner)]
        elif host in extra and phase < len(self.dims):
            hosts = [host]
        else:
            unit, size = prod(self.dims[: phase - 1]), self.dims[phase - 1]
            first = partner - partner // unit % size * unit
            hosts = list(range(first, first + size * unit, unit))
            if phase == len(self.dims):
                hosts += [host for host in extra if host % num_hosts in hosts]
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
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return [*factors, number] if number > 1 else factors
