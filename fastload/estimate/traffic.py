"""What a routed load moves in the course of time, on one host of each kind. Pure arithmetic on the real plan.

The rounds are taken together in columns of equal length. Hosts are of one kind if their ranks want the
same; only the first of each kind is looked at, rank by rank and share by share. The bytes that ranks request
of a sharing group are taken to be spread evenly over it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from fastload.transfer.routed_plan import RoutedPlan
from fastload.transfer.routing import choose_base, most_hops
from fastload.transfer.shares import Share

__all__ = ["Column", "columns_of"]

_MOST_COLUMNS = 256


class Column(NamedTuple):
    """What some rounds move that follow each other; in bytes, of the host or rank with the most of it.

    Attributes:
        num_rounds: How many rounds they are; need not be a whole number.
        read: What leaves the storage, for all hosts together.
        host_read: What a host reads.
        host_in: What a host reads, or receives from others.
        host_out: What a host sends to others.
        rank_through: What a rank receives, or sends, whichever is more.
        rank_packed: What a rank packs to be sent.
        rank_placed: What a rank takes to where it belongs, but what it has read right there.
        rank_messages: How many messages a rank receives, or begins to send.
        way: What goes from host to host one after the other until the last one has a message of a round.
        num_hops: From rank to rank, until the last one has it.
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


def columns_of(plan: RoutedPlan, ranks_per_host: int) -> list[Column]:
    """Returns what the rounds of a plan move, in order.

    Args:
        plan: The plan, for ranks in the order of their numbers.
        ranks_per_host: Ranks on each host, those of a host with numbers that follow each other.
    """
    grid = _Grid.of(plan)
    read = grid.series()
    for share in plan.shares:
        read.add(grid.span(share), share.end - share.begin)
    hosts = [_Host(ranks) for ranks in _hosts(plan, ranks_per_host)]
    chosen = {rank: host for host in hosts for rank in host.ranks}
    for rank, flows in _flows(plan, grid, chosen.keys(), ranks_per_host).items():
        chosen[rank].flows.append(flows)
    most = [read.totals(), *([0.0] * grid.num_columns for _ in range(7))]
    for host in hosts:
        for index, values in enumerate(host.values(grid), 1):
            most[index] = list(map(max, most[index], values))
    return [
        Column(grid.num_rounds, *values)
        for values in zip(*most, *_ways(plan, grid, ranks_per_host), strict=True)
    ]


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
    """Which columns a share is read in, and which part of it in the first, the last, and each in between."""

    first: int
    last: int
    head: float
    tail: float
    each: float


@dataclass(frozen=True)
class _Grid:
    """The columns.

    Attributes:
        num_columns: How many there are.
        num_rounds: Rounds of each.
        chunk_bytes: Of the plan.
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
    """Something that is moved, column by column: single values, and steps up and down of all that follow."""

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


@dataclass(frozen=True)
class _Flows:
    """What one rank reads, receives and sends; from and to other hosts, too."""

    read: _Series
    received: _Series
    received_far: _Series
    sent: _Series
    sent_far: _Series
    packed: _Series
    placed: _Series
    messages: _Series


@dataclass(frozen=True)
class _Host:
    """One host."""

    ranks: range
    flows: list[_Flows] = field(default_factory=list)

    def values(self, grid: _Grid) -> list[list[float]]:
        """Returns what `Column` has from `host_read` to `rank_messages`."""

        def most(*names: str) -> list[float]:
            of_ranks = [getattr(flows, name).totals() for flows in self.flows for name in names]
            return [max(values) for values in zip(*of_ranks, strict=True)]

        def total(name: str) -> list[float]:
            of_ranks = [getattr(flows, name).totals() for flows in self.flows]
            return [sum(values) for values in zip(*of_ranks, strict=True)]

        read = total("read")
        received = [sum(both) for both in zip(read, total("received_far"), strict=True)]
        of_ranks = most("received", "sent"), most("packed"), most("placed"), most("messages")
        return [read, received, total("sent_far"), *of_ranks]


def _flows(plan: RoutedPlan, grid: _Grid, ranks: Iterable[int], ranks_per_host: int) -> dict[int, _Flows]:
    """Returns what some ranks do."""
    flows = {rank: _Flows(*(grid.series() for _ in range(8))) for rank in ranks}
    shares = defaultdict(list)
    for share in plan.shares:
        shares[share.group].append((share, grid.span(share)))
    sharing = plan.sharing
    for group, wanted in enumerate(sharing.wanted_bytes):
        parts = [(_Hosts.of(each, ranks_per_host), wanted[each] / sharing.nbytes[group]) for each in wanted]
        for hosts, part in parts:
            for rank in flows.keys() & set(hosts.group):
                for share, span in shares[group]:
                    if share.reader != rank:
                        _receive(flows[rank], rank, hosts, share, span, part, grid)
        for share, span in shares[group]:
            if share.reader in flows:
                _begin(flows[share.reader], share, span, parts, grid)
    return flows


@dataclass(frozen=True)
class _Hosts:
    """The hosts of a group, which its messages go around.

    Attributes:
        group: The ranks.
        order: Their hosts, ascending.
        num_members: How many of the ranks each host has.
        ranks_per_host: How many ranks, of the group or not, are on a host.
    """

    group: tuple[int, ...]
    order: Sequence[int]
    num_members: Mapping[int, int]
    ranks_per_host: int

    @classmethod
    def of(cls, group: tuple[int, ...], ranks_per_host: int) -> _Hosts:
        counts = Counter(rank // ranks_per_host for rank in group)
        return cls(group, sorted(counts), counts, ranks_per_host)

    def is_last(self, host: int, reader_host: int) -> bool:
        """Whether messages of a host's ranks come to this one last."""
        after = self.order[(self.order.index(host) + 1) % len(self.order)]
        return reader_host == after or _is_between(host, reader_host, after)


def _receive(
    flows: _Flows, rank: int, hosts: _Hosts, share: Share, span: _Span, part: float, grid: _Grid
) -> None:
    """Adds what comes to a rank of a share that another one reads, and what it sends on.

    A message enters a host once; the ranks of the group there take turns to receive, and share memory.
    """
    nbytes = part * (share.end - share.begin)
    flows.placed.add(span, nbytes)
    host, reader_host = rank // hosts.ranks_per_host, share.reader // hosts.ranks_per_host
    if host == reader_host:
        return
    nbytes /= hosts.num_members[host]
    flows.received.add(span, nbytes)
    flows.received_far.add(span, nbytes)
    flows.messages.add(span, _num_chunks(share, grid) / hosts.num_members[host])
    if not hosts.is_last(host, reader_host):
        flows.sent.add(span, nbytes)
        flows.sent_far.add(span, nbytes)


def _begin(
    flows: _Flows, share: Share, span: _Span, groups: Sequence[tuple[_Hosts, float]], grid: _Grid
) -> None:
    """Adds what a rank reads itself, packs, and sends to the first host of each group."""
    length = share.end - share.begin
    flows.read.add(span, length)
    for hosts, part in groups:
        if part < 1:
            flows.packed.add(span, part * length)
            if share.reader in hosts.group:
                flows.placed.add(span, part * length)
        if any(host != share.reader // hosts.ranks_per_host for host in hosts.order):
            flows.sent.add(span, part * length)
            flows.sent_far.add(span, part * length)
            flows.messages.add(span, _num_chunks(share, grid))


def _num_chunks(share: Share, grid: _Grid) -> float:
    return max(1.0, (share.end - share.begin) / grid.chunk_bytes)


def _is_between(before: int, rank: int, after: int) -> bool:
    """Whether a rank comes after one and before another, in the order that goes around."""
    if before < after:
        return before < rank < after
    return rank > before or rank < after


def _ways(plan: RoutedPlan, grid: _Grid, ranks_per_host: int) -> tuple[list[float], list[float]]:
    """Returns `way` and `num_hops` of each column: of the sharing groups that are read then, the longest."""
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
