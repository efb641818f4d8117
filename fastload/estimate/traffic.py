"""Traffic of a routed load over time, on one host of each kind. Pure arithmetic on the real plan.

Rounds are aggregated into columns of equal length. Hosts are of one kind if their ranks make the same
requests; only the first of each kind is evaluated, rank by rank and share by share. The bytes that ranks
request of a sharing group are assumed to be spread evenly over it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from fastload.transfer.messages import choose_base, most_hops
from fastload.transfer.plan import Share
from fastload.transfer.routed_plan import RoutedPlan

_MOST_COLUMNS = 256


class RoundTraffic(NamedTuple):
    """Bytes that consecutive rounds move, on the host or rank with the most.

    Attributes:
        num_rounds: Number of rounds; need not be a whole number.
        read: Read from storage by all hosts together.
        host_read: Read by a host.
        host_in: Read by a host, or received from other hosts.
        host_out: Sent by a host to other hosts.
        rank_through: Received or sent by a rank, whichever is more.
        rank_packed: Packed by a rank before it sends.
        rank_placed: Placed by a rank, without bytes that were read in place.
        rank_messages: Number of messages that a rank receives or begins to send.
        way: Bytes sent from host to host in sequence until the last host has a message.
        num_hops: Hops from rank to rank until the last one has it.
    """

    num_rounds: float
    read: float
    host_read: float
    host_in: float
    host_out: float
    rank_through: float
    rank_packed: float
    rank_placed: float
    rank_messages: float
    way: float
    num_hops: float


def columns_of(plan: RoutedPlan, ranks_per_host: int) -> list[RoundTraffic]:
    """Returns the traffic of the rounds of a plan, in order.

    Args:
        plan: The plan.
        ranks_per_host: Ranks on each host; those of a host are consecutive.
    """
    grid = _Grid.of(plan)
    read = grid.series()
    for share in plan.shares:
        read.add(grid.span(share), share.end - share.begin)
    hosts = list(_hosts(plan, ranks_per_host))
    traffic = _traffic(plan, grid, [rank for ranks in hosts for rank in ranks], ranks_per_host)
    most = [[0.0] * grid.num_columns for _ in range(7)]
    for ranks in hosts:
        values = _host_values([traffic[rank] for rank in ranks])
        most = [_each(max, both) for both in zip(most, values, strict=True)]
    return [
        RoundTraffic(grid.num_rounds, *values)
        for values in zip(read.totals(), *most, *_ways(plan, grid, ranks_per_host), strict=True)
    ]


def _host_values(ranks: Sequence[_Traffic]) -> list[list[float]]:
    """Returns the fields of `RoundTraffic` from `host_read` to `rank_messages`, for one host."""
    of = {kind: [traffic[kind].totals() for traffic in ranks] for kind in _KINDS}
    return [
        _each(sum, of["read"]),
        _each(sum, [*of["read"], *of["received"]]),
        _each(sum, of["sent"]),
        _each(max, [*of["received"], *of["sent"]]),
        *(_each(max, of[kind]) for kind in ("packed", "placed", "messages")),
    ]


def _each(combine: Callable[[Iterable[float]], float], series: Sequence[list[float]]) -> list[float]:
    return [combine(values) for values in zip(*series, strict=True)]


def _hosts(plan: RoutedPlan, ranks_per_host: int) -> Iterator[range]:
    """Yields the ranks of the first host of each kind."""
    requests = {rank: number for number, ranks in enumerate(plan.sharing.requests.ranks) for rank in ranks}
    reads = set(plan.readers)
    found = set()
    for first in range(0, len(plan.order), ranks_per_host):
        ranks = range(first, first + ranks_per_host)
        kind = tuple((requests[rank], rank in reads) for rank in ranks)
        if kind not in found:
            found.add(kind)
            yield ranks


class _Span(NamedTuple):
    """The columns in which a share is read, and its fractions in the first, the last, and each other one."""

    first: int
    last: int
    head: float
    tail: float
    each: float


@dataclass(frozen=True)
class _Grid:
    """The columns.

    Attributes:
        num_columns: Number of columns.
        num_rounds: Rounds in each.
        chunk_bytes: Chunk size of the plan.
    """

    num_columns: int
    num_rounds: float
    chunk_bytes: int

    @classmethod
    def of(cls, plan: RoutedPlan) -> _Grid:
        num_columns = min(plan.num_rounds, _MOST_COLUMNS)
        return cls(num_columns, plan.num_rounds / max(1, num_columns), plan.chunk_bytes)

    def span(self, share: Share) -> _Span:
        width = self.num_rounds * self.chunk_bytes
        begin, length = share.start / width, (share.end - share.begin) / width
        end = begin + length
        last = min(max(int(begin), -int(-end // 1) - 1), self.num_columns - 1)
        first = min(int(begin), last)
        if first == last:
            return _Span(first, last, 1.0, 0.0, 0.0)
        return _Span(first, last, (first + 1 - begin) / length, (end - last) / length, 1 / length)

    def series(self) -> _Series:
        return _Series([0.0] * self.num_columns, [0.0] * (self.num_columns + 1))


class _Series(NamedTuple):
    """Traffic by column, as single values and as steps that change all later columns."""

    at: list[float]
    steps: list[float]

    def add(self, span: _Span, amount: float) -> None:
        self.at[span.first] += amount * span.head
        if span.last > span.first:
            self.at[span.last] += amount * span.tail
            self.steps[span.first + 1] += amount * span.each
            self.steps[span.last] -= amount * span.each

    def totals(self) -> list[float]:
        return [single + level for single, level in zip(self.at, accumulate(self.steps), strict=False)]


_KINDS = ("read", "received", "sent", "packed", "placed", "messages")
_Traffic = dict[str, _Series]
"""Bytes of one rank by kind: read, received from other hosts, sent to them, packed, placed."""


def _traffic(plan: RoutedPlan, grid: _Grid, ranks: Sequence[int], ranks_per_host: int) -> dict[int, _Traffic]:
    """Returns the traffic of some ranks."""
    traffic = {rank: {kind: grid.series() for kind in _KINDS} for rank in ranks}
    shares = defaultdict(list)
    for share in plan.shares:
        shares[share.group].append((share, grid.span(share)))
    num_hosts = len(plan.order) // ranks_per_host
    for group, wanted in enumerate(plan.sharing.wanted_bytes):
        parts = [
            (_Members.of(ranks, ranks_per_host, num_hosts), nbytes / plan.sharing.nbytes[group])
            for ranks, nbytes in wanted.items()
        ]
        for members, part in parts:
            for rank in traffic.keys() & set(members.ranks):
                for share, span in shares[group]:
                    if share.reader != rank:
                        _receive(traffic[rank], rank, members, share, span, part, grid)
        for share, span in shares[group]:
            if share.reader in traffic:
                _send(traffic[share.reader], share, span, parts, grid)
    return traffic


@dataclass(frozen=True)
class _Members:
    """The members of a sharing group and their hosts, along which messages go as a ring.

    Attributes:
        ranks: The ranks.
        hosts: Number of members on each host, by host, ascending.
        ranks_per_host: Ranks of each host, members or not.
        num_hosts: Hosts of the job.
    """

    ranks: tuple[int, ...]
    hosts: Mapping[int, int]
    ranks_per_host: int
    num_hosts: int

    @classmethod
    def of(cls, ranks: tuple[int, ...], ranks_per_host: int, num_hosts: int) -> _Members:
        counts = Counter(rank // ranks_per_host for rank in ranks)
        return cls(ranks, dict(sorted(counts.items())), ranks_per_host, num_hosts)

    def is_last(self, host: int, reader_host: int) -> bool:
        """Whether this host is the last in the ring for messages from a given host."""
        order = list(self.hosts)
        after = order[(order.index(host) + 1) % len(order)]
        return self._steps(host, reader_host) <= self._steps(host, after)

    def _steps(self, host: int, other: int) -> int:
        return (other - host) % self.num_hosts or self.num_hosts


def _receive(
    traffic: _Traffic, rank: int, members: _Members, share: Share, span: _Span, part: float, grid: _Grid
) -> None:
    """Adds the bytes that a rank receives of another rank's share, and those that it forwards.

    A message enters a host once: its members receive in turn, and share memory.
    """
    nbytes = part * (share.end - share.begin)
    traffic["placed"].add(span, nbytes)
    host, reader_host = rank // members.ranks_per_host, share.reader // members.ranks_per_host
    if host == reader_host:
        return
    num_turns = members.hosts[host]
    traffic["received"].add(span, nbytes / num_turns)
    traffic["messages"].add(span, _num_chunks(share, grid) / num_turns)
    if not members.is_last(host, reader_host):
        traffic["sent"].add(span, nbytes / num_turns)


def _send(
    traffic: _Traffic, share: Share, span: _Span, parts: Sequence[tuple[_Members, float]], grid: _Grid
) -> None:
    """Adds the bytes that a rank reads, packs, and sends to the first host of each group."""
    length = share.end - share.begin
    traffic["read"].add(span, length)
    for members, part in parts:
        if part < 1:
            traffic["packed"].add(span, part * length)
            if share.reader in members.ranks:
                traffic["placed"].add(span, part * length)
        if members.hosts.keys() - {share.reader // members.ranks_per_host}:
            traffic["sent"].add(span, part * length)
            traffic["messages"].add(span, _num_chunks(share, grid))


def _num_chunks(share: Share, grid: _Grid) -> float:
    return max(1.0, (share.end - share.begin) / grid.chunk_bytes)


def _ways(plan: RoutedPlan, grid: _Grid, ranks_per_host: int) -> tuple[list[float], list[float]]:
    """Returns `way` and `num_hops` of each column: the longest over the sharing groups read in it."""
    ways, hops = ([0.0] * grid.num_columns for _ in range(2))
    spans: dict[int, list[float]] = {}
    for share in plan.shares:
        span = grid.span(share)
        first, last, length = spans.get(share.group, (span.first, span.last, 0))
        nbytes = max(length, min(share.end - share.begin, plan.chunk_bytes))
        spans[share.group] = [min(first, span.first), max(last, span.last), nbytes]
    for group, (first, last, nbytes) in spans.items():
        wanted = plan.sharing.wanted_bytes[group]
        num_hosts = {each: len({rank // ranks_per_host for rank in each}) for each in wanted}
        far = max((num_hosts[each] - 1) * wanted[each] / plan.sharing.nbytes[group] for each in wanted)
        most = max(num_hosts.values())
        most = most_hops(most, choose_base(most)) + (max(map(len, wanted)) > most)
        for column in range(int(first), int(last) + 1):
            ways[column] = max(ways[column], far * nbytes * grid.num_rounds)
            hops[column] = max(hops[column], most * grid.num_rounds)
    return ways, hops
