"""Predicts sharded loads: the real plan, run through the model of `simulate`.

Differences from the model of a replicated load:

- Each round takes as long as its busiest host or rank. Real ranks need not advance in step, so a load may be
  faster if they are busy at different times.
- A rank receives and sends at most `rank_bytes_per_s` each way. It packs strided bytes, and places received
  bytes, at `copy_bytes_per_s`. A message is passed on once it is complete.
- Messages go over TCP through host memory, also to tensors on CUDA devices.
- Through a mount, each rank reads one range, and more bytes are exchanged than predicted here.
- `Cluster.before_s` leaves out the exchange of requests and the planning, seconds with many thousand ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fastload.estimate.parallel import Model, Parallel, requests_of
from fastload.estimate.simulate import (
    CORES,
    LATENCY_SHOWS,
    LINKS,
    MESSAGES,
    PLACING,
    SHARE,
    STORAGE,
    WAY,
    Cluster,
    Prediction,
    RankRounds,
    Stages,
    num_reads,
)
from fastload.estimate.traffic import RoundTraffic, columns_of
from fastload.geometry.ranges import ByteRange
from fastload.transfer.demand import Part, RankRequest, RankRequests, SharingGroups
from fastload.transfer.plan import StrategyChoice
from fastload.transfer.routed_plan import RoutedPlan, plan_routes

_NUM_COLUMNS_ALONE = 256
_PACKING = "packing"


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
        return _predict(decision, plan, columns, cluster, sum(nbytes_alone) or plan.total_bytes)

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
    num_columns = min(plan.num_rounds, _NUM_COLUMNS_ALONE)
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
) -> Prediction:
    limits = [_limits(column, cluster) for column in columns]
    stages = [_stages(column, cluster, decision.alone) for column in columns]
    factor = columns[0].num_rounds if columns else 0.0
    events, moving_s = RankRounds(
        num_rounds=len(columns),
        depth=plan.depth,
        num_reads=num_reads(plan.depth, alone=decision.alone),
        stages=stages.__getitem__,
        request_s=cluster.request_s * factor,
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


def _stages(column: RoundTraffic, cluster: Cluster, alone: bool) -> Stages:
    limits = _limits(column, cluster)
    read_s = max(limits[STORAGE], limits[SHARE], column.host_read / cluster.host_bytes_per_s)
    if alone:
        return Stages(read_s)
    busy_s = max(limits[name] for name in (LINKS, CORES, MESSAGES, _PACKING))
    way_s = column.way / cluster.host_bytes_per_s + column.num_hops * cluster.cost("message_s")
    return Stages(read_s, busy_s, max(busy_s, way_s), limits[PLACING])


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
