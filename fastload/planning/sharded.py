"""Predicts sharded loads: the real plan, run through the model of `simulate`.

Differences from the model of a replicated load:

- Each round takes as long as its busiest host or rank. Real ranks need not advance in step, so a load may be
  faster if they are busy at different times.
- A rank receives and sends at most `rank_bytes_per_s` each way. It packs strided bytes, and places received
  bytes, at `copy_bytes_per_s`. A message is passed on once it is complete.
- Messages go over TCP through host memory, also to tensors on CUDA devices.
- Through a mount, each rank reads one range, and more bytes are exchanged than predicted here.
- `Cluster.before_s` leaves out the exchange of requests and the planning, seconds with many thousand ranks.

Traffic is computed over time, in columns of equally many rounds. Hosts are of one kind if their ranks make
the same requests; only the first of each kind is evaluated, rank by rank and share by share. The bytes that
ranks request of a sharing group are assumed to be spread evenly over it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fastload.geometry.ranges import ByteRange
from fastload.planning.cluster import Cluster
from fastload.planning.parallel import Model, Parallel, requests_of
from fastload.planning.simulate import (
    CORES,
    LATENCY_SHOWS,
    LINKS,
    MESSAGES,
    PLACING,
    REQUESTS,
    SHARE,
    STORAGE,
    WAY,
    Prediction,
    RankRounds,
    Stages,
    num_reads,
    reading_stages,
)
from fastload.transfer.demand import Part, RankRequest, RankRequests, Share, SharingGroups
from fastload.transfer.messages import choose_base, most_hops
from fastload.transfer.plan import StrategyChoice
from fastload.transfer.routed_plan import RoutedPlan, plan_routes

_MOST_COLUMNS = 256
_KINDS = ("read", "received", "sent", "packed", "placed", "messages")
_PACKING = "packing"


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
    read = np.zeros(grid.num_columns)
    for share in plan.shares:
        grid.span(share).add(read, share.end - share.begin)
    hosts = list(_hosts(plan, ranks_per_host))
    traffic = _traffic(plan, grid, [rank for ranks in hosts for rank in ranks], ranks_per_host)
    most = np.zeros((7, grid.num_columns))
    for ranks in hosts:
        most = np.maximum(most, _host_values([traffic[rank] for rank in ranks]))
    ways, hops = _ways(plan, grid, ranks_per_host)
    columns = np.stack([read, *most, ways, hops], axis=1)
    return [RoundTraffic(grid.num_rounds, *values) for values in columns.tolist()]


def _host_values(ranks: Sequence[_Traffic]) -> _Series:
    """Returns the fields of `RoundTraffic` from `host_read` to `rank_messages`, for one host."""
    of = {kind: np.stack([traffic[kind] for traffic in ranks]) for kind in _KINDS}
    return np.stack(
        [
            of["read"].sum(0),
            (of["read"] + of["received"]).sum(0),
            of["sent"].sum(0),
            np.maximum(of["received"], of["sent"]).max(0),
            *(of[kind].max(0) for kind in ("packed", "placed", "messages")),
        ]
    )


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


_Series = np.ndarray[Any, np.dtype[np.float64]]
_Traffic = dict[str, _Series]
"""Traffic of one rank in each column, by kind; see `_KINDS`."""


class _Span(NamedTuple):
    """The columns in which a share is read, and its fraction in each."""

    columns: slice
    fractions: _Series

    def add(self, series: _Series, amount: float) -> None:
        series[self.columns] += amount * self.fractions


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
        begin, end = share.start / width, (share.start + share.end - share.begin) / width
        first = min(int(begin), self.num_columns - 1)
        last = min(max(math.ceil(end), first + 1), self.num_columns)
        edges = np.array([begin, *range(first + 1, last), end])
        return _Span(slice(first, last), np.diff(edges) / (end - begin))


def _traffic(plan: RoutedPlan, grid: _Grid, ranks: Sequence[int], ranks_per_host: int) -> dict[int, _Traffic]:
    """Returns the traffic of some ranks."""
    traffic = {rank: {kind: np.zeros(grid.num_columns) for kind in _KINDS} for rank in ranks}
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
    span.add(traffic["placed"], nbytes)
    host, reader_host = rank // members.ranks_per_host, share.reader // members.ranks_per_host
    if host == reader_host:
        return
    num_turns = members.hosts[host]
    span.add(traffic["received"], nbytes / num_turns)
    span.add(traffic["messages"], _num_chunks(share, grid) / num_turns)
    if not members.is_last(host, reader_host):
        span.add(traffic["sent"], nbytes / num_turns)


def _send(
    traffic: _Traffic, share: Share, span: _Span, parts: Sequence[tuple[_Members, float]], grid: _Grid
) -> None:
    """Adds the bytes that a rank reads, packs, and sends to the first host of each group."""
    length = share.end - share.begin
    span.add(traffic["read"], length)
    for members, part in parts:
        if part < 1:
            span.add(traffic["packed"], part * length)
            if share.reader in members.ranks:
                span.add(traffic["placed"], part * length)
        if members.hosts.keys() - {share.reader // members.ranks_per_host}:
            span.add(traffic["sent"], part * length)
            span.add(traffic["messages"], _num_chunks(share, grid))


def _num_chunks(share: Share, grid: _Grid) -> float:
    return max(1.0, (share.end - share.begin) / grid.chunk_bytes)


def _ways(plan: RoutedPlan, grid: _Grid, ranks_per_host: int) -> tuple[_Series, _Series]:
    """Returns `way` and `num_hops` of each column: the longest over the sharing groups read in it."""
    ways, hops = np.zeros((2, grid.num_columns))
    spans: dict[int, tuple[int, int, int]] = {}
    for share in plan.shares:
        columns = grid.span(share).columns
        first, last, nbytes = spans.get(share.group, (columns.start, columns.stop, 0))
        nbytes = max(nbytes, min(share.end - share.begin, plan.chunk_bytes))
        spans[share.group] = min(first, columns.start), max(last, columns.stop), nbytes
    for group, (first, last, nbytes) in spans.items():
        wanted = plan.sharing.wanted_bytes[group]
        num_hosts = {each: len({rank // ranks_per_host for rank in each}) for each in wanted}
        far = max((num_hosts[each] - 1) * wanted[each] / plan.sharing.nbytes[group] for each in wanted)
        most = max(num_hosts.values())
        most = most_hops(most, choose_base(most)) + (max(map(len, wanted)) > most)
        for series, value in ((ways, far * nbytes), (hops, most)):
            series[first:last] = np.maximum(series[first:last], value * grid.num_rounds)
    return ways, hops


@dataclass(frozen=True)
class ShardedLoad:
    """A model and the job that loads it.

    Attributes:
        model: The model.
        parallel: The parallelism of the job.
        cluster: The cluster, with as many ranks.
    """

    model: Model
    parallel: Parallel
    cluster: Cluster

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint."""
        return self.model.nbytes

    @cached_property
    def requests(self) -> RankRequests:
        """The requests of all ranks."""
        return requests_of(self.model, self.parallel)

    @cached_property
    def sharing(self) -> SharingGroups:
        """The sharing groups of these requests."""
        return SharingGroups(self.model.tensors, self.requests, 0)

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes that the ranks of each request hold."""
        held: dict[int, int] = dict.fromkeys((ranks[0] for ranks in self.requests.ranks), 0)
        for wanted in self.sharing.wanted_bytes:
            for group, wanted_bytes in wanted.items():
                for rank in group:
                    if rank in held:
                        held[rank] += wanted_bytes
        return tuple(held.values())

    @cached_property
    def least_s(self) -> float:
        """A lower bound in seconds: a byte leaves the storage once, and enters each host that requests it."""
        cluster = self.cluster
        per_host: dict[int, int] = defaultdict(int)
        for wanted in self.sharing.wanted_bytes:
            for group, wanted_bytes in wanted.items():
                for host in {rank // cluster.ranks_per_host for rank in group}:
                    per_host[host] += wanted_bytes
        most = max(per_host.values(), default=0)
        return max(
            self.sharing.total_bytes / cluster.all_clients_bytes_per_s, most / cluster.host_bytes_per_s
        )

    def predict(self, strategy: str, *, staging_bytes: int, chunk_bytes: int | None) -> Prediction:
        """Predicts the load with one of the `STRATEGIES`.

        Args:
            strategy: The strategy.
            staging_bytes: As in `LoadOptions`.
            chunk_bytes: As in `LoadOptions`.

        Raises:
            OptionError: The plan is not possible.
        """
        cluster = replace(self.cluster, nccl=False)
        decision = cluster.decide(strategy)
        nbytes_alone = self._nbytes_alone() if decision.alone else []
        plan = plan_routes(
            self._sharing_alone(nbytes_alone) if decision.alone else self.sharing,
            decision.readers_for(0),
            order=range(1 if decision.alone else cluster.num_ranks),
            staging_bytes=staging_bytes,
            chunk_bytes=chunk_bytes,
        )
        if decision.alone:
            columns = _columns_alone(plan, nbytes_alone, cluster.ranks_per_host)
        else:
            columns = columns_of(plan, cluster.ranks_per_host)
        read_bytes = sum(nbytes_alone) or plan.total_bytes
        return _predict(decision, plan, columns, cluster, read_bytes, staging_bytes)

    def _nbytes_alone(self) -> list[int]:
        """Returns the bytes that each rank reads if it reads for itself: always complete rows."""
        tensors, requests = self.model.tensors, self.requests
        counts: dict[bytes, Counter[tuple[int, int]]] = {}
        known: dict[tuple[Part, int], int] = {}
        read = [0] * self.cluster.num_ranks
        for request, ranks in zip(requests.distinct, requests.ranks, strict=True):
            if request.columns not in counts:
                lengths = (tensors[tensor].nbytes for tensor in request.tensors)
                counts[request.columns] = Counter(zip(request.codes, lengths, strict=True))
            nbytes = 0
            for (code, length), count in counts[request.columns].items():
                key = request.parts[code], length
                if key not in known:
                    alone = RankRequests((RankRequest.of([(0, key[0])]),), ((0,),))
                    known[key] = SharingGroups([ByteRange(0, 0, length)], alone, 0).total_bytes
                nbytes += count * known[key]
            for rank in ranks:
                read[rank] = nbytes
        return read

    def _sharing_alone(self, nbytes_alone: Sequence[int]) -> SharingGroups:
        """Returns the sharing group of the rank that reads most."""
        request = self.requests.of(nbytes_alone.index(max(nbytes_alone)))
        return SharingGroups(self.model.tensors, RankRequests((request,), ((0,),)), 0)


def _columns_alone(plan: RoutedPlan, nbytes: Sequence[int], ranks_per_host: int) -> list[RoundTraffic]:
    """Returns the traffic if each rank reads for itself: the same in all columns."""
    num_columns = min(plan.num_rounds, _MOST_COLUMNS)
    starts = range(0, len(nbytes), ranks_per_host)
    per_host = max(sum(nbytes[start : start + ranks_per_host]) for start in starts)
    read, host_read = (total / max(1, num_columns) for total in (sum(nbytes), per_host))
    column = RoundTraffic(plan.num_rounds / max(1, num_columns), read, host_read, host_read, *[0.0] * 7)
    return [column] * num_columns


def _predict(
    decision: StrategyChoice,
    plan: RoutedPlan,
    columns: Sequence[RoundTraffic],
    cluster: Cluster,
    storage_bytes: int,
    staging_bytes: int,
) -> Prediction:
    num_readers = cluster.num_ranks if decision.alone else len(plan.readers)
    stages = [_stages(column, cluster, decision.alone, num_readers) for column in columns]
    reads, ahead = num_reads(plan.depth, alone=decision.alone), 0
    if cluster.requests.are_limited:
        read_s = min(
            (one.read_s / of.num_rounds for one, of in zip(stages, columns, strict=True)), default=0.0
        )
        reads = cluster.requests.most_reads(
            plan.num_rounds,
            plan.chunk_bytes,
            staging_bytes,
            read_s,
            num_readers=num_readers,
            alone=decision.alone,
        )
        ahead = max(plan.depth, reads)
    limits = [_limits(column, cluster) for column in columns]
    if cluster.requests.are_limited:
        for limit, one in zip(limits, stages, strict=True):
            limit[REQUESTS] = (one.wait_s + one.answer_s) / reads
    factor = columns[0].num_rounds if columns else 0.0
    events, moving_s = RankRounds(
        num_rounds=len(columns),
        depth=plan.depth,
        num_reads=reads,
        ahead=ahead,
        stages=stages.__getitem__,
        alone=decision.alone,
    ).run()
    totals = {name: sum(limit[name] for limit in limits) for name in limits[0]} if limits else {}
    bound_by = max(totals, key=lambda name: totals[name], default=STORAGE)
    busy_s = sum(max(limit.values()) for limit in limits)
    if moving_s > LATENCY_SHOWS * busy_s and any(one.transit_s > one.exchange_s for one in stages):
        bound_by = WAY
    return Prediction(
        decision=decision,
        plan=plan,
        total_s=cluster.before_s + moving_s,
        storage_bytes=storage_bytes,
        exchanged_bytes=0 if decision.alone else _exchanged_bytes(plan),
        levels=(),
        limits={name: total / max(1, plan.num_rounds) for name, total in totals.items()},
        bound_by=bound_by,
        timeline=[
            event._replace(first_round=int(event.first_round * factor), num_rounds=max(1, round(factor)))
            .later(cluster.before_s)
            for event in events
        ],
    )  # fmt: skip


def _limits(column: RoundTraffic, cluster: Cluster) -> dict[str, float]:
    """Returns the seconds that a column takes on each resource."""
    copy_bytes_per_s = cluster.cost("copy_bytes_per_s")
    return {
        STORAGE: column.read / cluster.storage_bytes_per_s,
        SHARE: column.host_read / cluster.host_storage_bytes_per_s,
        LINKS: max(column.host_in, column.host_out) / cluster.host_bytes_per_s,
        CORES: column.rank_through / cluster.cost("rank_bytes_per_s"),
        MESSAGES: column.rank_messages * cluster.cost("message_s"),
        _PACKING: column.rank_packed / copy_bytes_per_s,
        PLACING: column.rank_placed / copy_bytes_per_s,
    }


def _stages(column: RoundTraffic, cluster: Cluster, alone: bool, num_readers: int) -> Stages:
    limits = _limits(column, cluster)
    read_s = max(limits[STORAGE], limits[SHARE], column.host_read / cluster.host_bytes_per_s)
    reading = reading_stages(read_s, column.read / num_readers, column.num_rounds, cluster.requests)
    if alone:
        return reading
    busy_s = max(limits[name] for name in (LINKS, CORES, MESSAGES, _PACKING))
    way_s = column.way / cluster.host_bytes_per_s + column.num_hops * cluster.cost("message_s")
    return reading._replace(exchange_s=busy_s, transit_s=max(busy_s, way_s), place_s=limits[PLACING])


def _exchanged_bytes(plan: RoutedPlan) -> int:
    """Returns the bytes that all ranks receive: requested ones that they have not read."""
    sharing, own = plan.sharing, 0.0
    wanted = sum(len(group) * nbytes for groups in sharing.wanted_bytes for group, nbytes in groups.items())
    members = [
        {rank: nbytes for group, nbytes in groups.items() for rank in group}
        for groups in sharing.wanted_bytes
    ]
    for share in plan.shares:
        part = members[share.group].get(share.reader, 0) / sharing.nbytes[share.group]
        own += part * (share.end - share.begin)
    return round(wanted - own)
