"""Routes of messages from their reader to the hosts of the recipients, and within each host. Pure.

Each byte enters a host once. The hosts of the recipients form a circle, and the messages of each reader have
their own tree. In the tree, a host is numbered by its distance from the reader's host, in digits of some
*base*. A host forwards a message to the next host along its highest digit, and to the first one along each
higher digit. So the tree is a ring if the base is the number of hosts, and binomial with base 2. Hosts
connect only at distances that are powers of the base, all hosts send about equally much, and the number of
hops is the sum of the digits.

Within a host, different ranks receive the messages of different readers: the first rank those of the first
ranks of other hosts, and so on. The other recipients copy from shared memory. Ranks that share no memory
count as hosts of their own.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import xxhash

from fastload.transfer.message import Ranks

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
    """Finds routes.

    Args:
        rank: This rank.
        order: The ranks that take part, those of a host next to each other: the circle.
        domains: For each of them, an identifier common to the ranks that share memory.
    """

    def __init__(self, rank: int, order: Sequence[int], domains: Sequence[Hashable]) -> None:
        self._rank = rank
        found: dict[Hashable, list[int]] = {}
        for member, domain in zip(order, domains, strict=True):
            found.setdefault(domain, []).append(member)
        self.hosts = tuple(map(tuple, found.values()))
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
            found: dict[int, list[int]] = {}
            for host, _, member in sorted((*self._position[rank], rank) for rank in ranks):
                found.setdefault(host, []).append(member)
            number = xxhash.xxh3_64_intdigest(array("q", ranks)) >> 1
            self._groups[id(ranks)] = ranks, _RecipientHosts(tuple(found), tuple(found.values()), number)
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
        targets = tuple(tree.at(position + step) for step in _steps(position, tree.num_hosts, base))
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


def ring_order(hosts: Sequence[str]) -> list[int]:
    """Returns all ranks, those of a host next to each other.

    Args:
        hosts: Host of each rank.
    """
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(chain.from_iterable(found.values()))


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


def num_targets(position: int, num_hosts: int, base: int) -> int:
    """Returns how many hosts the host at a distance sends to."""
    return sum(1 for _ in _steps(position, num_hosts, base))


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


def _steps(position: int, num_hosts: int, base: int) -> Iterator[int]:
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
