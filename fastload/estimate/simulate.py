"""How long a load would take in a world that need not exist. Pure arithmetic on the real plan.

The model is the pipeline of `transfer/pipeline.py`, seen from one rank that stands for all of its kind:

- Every reader posts `depth` rounds, has `depth // 2` of their chunks read at once, hands over what is
  read in order, and posts the next round into the slab that a placed round frees.
- All readers are alike and keep step. Storage and its shares are divided evenly among them, and a
  reader's part among its reads in flight. A request adds `request_s` in which nothing comes for it;
  as a reader's requests keep step too, that is not hidden by its other reads.
- Storage traffic and exchange arrive over the same link of a host, which works both ways at once. With
  more than one host each byte of a round enters every host exactly once, read or received: a round
  occupies the link for round_bytes ÷ link rate. Hops inside of a host cost messages, not link time.
- The ring passes a slot on once it is there as a whole: a slot is at the last host after hosts - 1
  times chunk ÷ link rate, and every hop adds `message_s`. Rounds follow each other around the ring.
  A rank handles one message per reader and round.
- NCCL pipelines within a slot, and one round follows the other; where only some ranks read, that its
  broadcasts cost what the all-gather would is an assumption.
- A rank passes on at most `rank_bytes_per_s` (its cores), and one thread of it places `copy_bytes_per_s`,
  as if no chunk came to where it belongs at once.
- `opening_s` comes before the data: listing, headers, the agreements, connecting.

What it leaves out: page caches, storage that slows down under load, stragglers, and switches between
hosts with less than full bandwidth. Rates are goodput: TCP over Ethernet delivers some 95 % of the line.

The cost is that of a few thousand rounds of one rank: what repeats is extrapolated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from fastload.errors import OptionError
from fastload.geometry.extents import HasExtent
from fastload.transfer.plan import TransferPlan, plan_transfer
from fastload.transfer.strategy import Decision, choose_strategy

__all__ = ["STRATEGIES", "Cluster", "Interval", "Prediction", "predict"]

STRATEGIES = ("allgather", "broadcast", "direct")

_NUM_SIMULATED = 6144  # rounds; of a longer load the middle is extrapolated
_NUM_TYPICAL = 96  # rounds that the picture of that middle is made of
_PERIOD = 1536  # rounds, over which their pace is measured: a multiple of every depth
_MAX_DIRECT_READS = 8
_LATENCY_SHOWS = 1.1
_NOTHING = 1e-9  # what rounding leaves of a read

# Assumed, of the order that one core of TCP and a copy to memory touched for the first time take.
_RING = {"rank_bytes_per_s": 1.6e9, "copy_bytes_per_s": 2e9, "message_s": 80e-6}
_NCCL = {"rank_bytes_per_s": math.inf, "copy_bytes_per_s": math.inf, "message_s": 10e-6}  # an assumption

_STORAGE, _SHARE, _LINKS = "storage", "each host's share of storage", "host links"
_CORES, _MESSAGES, _PLACING = "the cores of a rank", "messages", "placing"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the hosts and links of a world can do; rates are goodput in bytes per second.

    Attributes:
        num_hosts: Hosts.
        ranks_per_host: Ranks on each of them.
        host_bytes_per_s: A host's network link, each way.
        storage_bytes_per_s: What storage delivers to all hosts together.
        host_storage_bytes_per_s: What storage delivers to one host at most.
        nccl: Whether the exchange is NCCL between devices, not the ring over Gloo.
        rank_bytes_per_s: What a rank can receive and pass on; None for 1.6 GB/s, with NCCL no limit.
        copy_bytes_per_s: What a rank can place; None for 2 GB/s, with NCCL no limit.
        message_s: What a hop costs beyond its bytes; None for 80 µs, with NCCL 10 µs.
        request_s: Time to the first byte of a read.
        opening_s: Time before the first read.

    Raises:
        OptionError: A number makes no sense.
    """

    num_hosts: int
    ranks_per_host: int
    host_bytes_per_s: float
    storage_bytes_per_s: float = math.inf
    host_storage_bytes_per_s: float = math.inf
    nccl: bool = False
    rank_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    message_s: float | None = None
    request_s: float = 0.0
    opening_s: float = 0.15

    def __post_init__(self) -> None:
        for name in ("num_hosts", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: must be at least 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("bytes_per_s") and value is not None and not value > 0:
                raise OptionError(f"{field.name}={value}: must be above 0")
            if field.name.endswith("_s") and value is not None and not value >= 0:
                raise OptionError(f"{field.name}={value}: must not be negative")
        if math.isinf(min(self.storage_bytes_per_s, self.host_storage_bytes_per_s)):
            raise OptionError("give the rate of storage: of all of it, or of each host's share")

    def cost(self, name: str) -> float:
        """Returns a number that has a default of its own for each kind of exchange."""
        given = getattr(self, name)
        return float(given if given is not None else (_NCCL if self.nccl else _RING)[name])

    @property
    def num_ranks(self) -> int:
        """Ranks of the world."""
        return self.num_hosts * self.ranks_per_host

    @property
    def client_bytes_per_s(self) -> float:
        """What one host alone can get from storage."""
        return min(self.storage_bytes_per_s, self.host_storage_bytes_per_s, self.host_bytes_per_s)

    @property
    def all_clients_bytes_per_s(self) -> float:
        """What all hosts together can get from storage."""
        each = min(self.host_storage_bytes_per_s, self.host_bytes_per_s)
        return min(self.storage_bytes_per_s, self.num_hosts * each)


class Interval(NamedTuple):
    """When one stage of one round is under way on a rank.

    Attributes:
        stage: ``read``, ``exchange`` or ``place``.
        begin_s: Since the load began.
        end_s: Since the load began.
        first_round: The round.
        num_rounds: How many of them, if the interval stands for several that follow each other.
    """

    stage: str
    begin_s: float
    end_s: float
    first_round: int
    num_rounds: int = 1

    def later(self, by_s: float, by_rounds: int = 0) -> Interval:
        """Returns the same, moved."""
        moved = self._replace(begin_s=self.begin_s + by_s, end_s=self.end_s + by_s)
        return moved._replace(first_round=self.first_round + by_rounds)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How one strategy would do.

    Attributes:
        decision: The strategy; where there is nothing to exchange it is ``direct`` whatever was asked.
        plan: The real plan; with ``direct`` that of each rank for itself.
        total_s: Until every rank has everything.
        storage_bytes: What leaves the storage.
        limits: What each part of the world needs for a round, in seconds.
        bound_by: What holds the load up.
        timeline: What one of the readers does; the other ranks do the same but for the reads.
    """

    decision: Decision
    plan: TransferPlan
    total_s: float
    storage_bytes: int
    limits: Mapping[str, float]
    bound_by: str
    timeline: Sequence[Interval]


def predict(
    wanted: Sequence[HasExtent],
    cluster: Cluster,
    strategy: str,
    *,
    staging_bytes: int,
    chunk_bytes: int | None,
) -> Prediction:
    """Predicts a load.

    Args:
        wanted: Tensors in manifest order.
        cluster: The world.
        strategy: One of `STRATEGIES`.
        staging_bytes: As in `LoadOptions`.
        chunk_bytes: As in `LoadOptions`.

    Raises:
        OptionError: The plan is not possible.
    """
    ranks = cluster.num_ranks
    hosts = [f"host{rank // cluster.ranks_per_host}" for rank in range(ranks)]
    decision = choose_strategy(
        strategy, world_size=ranks, readers=range(ranks), hosts=hosts, shared=True, fast_links=cluster.nccl
    )
    alone = decision.alone
    plan = plan_transfer(
        wanted,
        decision.supply(0),
        decision.demand(0, ranks),
        staging_bytes=staging_bytes,
        chunk_bytes=chunk_bytes,
    )
    costs = _Costs.of(plan, cluster, alone=alone)
    events, moving_s = _Rank(plan, costs, cluster.request_s, alone=alone).run()
    return Prediction(
        decision=decision,
        plan=plan,
        total_s=cluster.opening_s + moving_s,
        storage_bytes=plan.total_bytes * (ranks if alone else 1),
        limits=costs.limits,
        bound_by=costs.bound_by(moving_s / max(1, plan.num_rounds)),
        timeline=[event.later(cluster.opening_s) for event in events],
    )


@dataclass(frozen=True)
class _Costs:
    """What the stages of a full round take, were each of them alone; in seconds.

    Attributes:
        read_s: Reading the chunks of all readers.
        limits: What it takes on each part of the world, by name.
        exchange_s: From one round's start to the next one's.
        transit_s: From a round's start to its end.
        place_s: Placing it.
    """

    read_s: float
    limits: Mapping[str, float]
    exchange_s: float = 0.0
    transit_s: float = 0.0
    place_s: float = 0.0

    @classmethod
    def of(cls, plan: TransferPlan, cluster: Cluster, *, alone: bool) -> _Costs:
        """Derives them from the plan."""
        chunk = plan.chunk_bytes_of(0) if plan.num_rounds else 0
        num_readers = cluster.num_ranks if alone else len(plan.readers)
        on_host = cluster.ranks_per_host if alone else _most_on_one_host(plan, cluster)
        limits = {
            _STORAGE: num_readers * chunk / cluster.storage_bytes_per_s,
            _SHARE: on_host * chunk / cluster.host_storage_bytes_per_s,
            _LINKS: on_host * chunk / cluster.host_bytes_per_s,
        }
        read_s = max(limits.values())
        if alone:
            return cls(read_s, limits)
        round_bytes, num_hops = chunk * len(plan.readers), cluster.num_ranks - 1
        if cluster.num_hosts > 1:
            limits[_LINKS] = round_bytes / cluster.host_bytes_per_s
        hops_s = num_hops * cluster.cost("message_s")
        limits[_MESSAGES] = hops_s if cluster.nccl else len(plan.readers) * cluster.cost("message_s")
        limits[_CORES] = round_bytes / cluster.cost("rank_bytes_per_s")
        limits[_PLACING] = place_s = round_bytes / cluster.cost("copy_bytes_per_s")
        busy_s = max(limits[_LINKS], limits[_CORES])
        if cluster.nccl:
            return cls(read_s, limits, busy_s + hops_s, busy_s + hops_s, place_s)
        busy_s = max(busy_s, limits[_MESSAGES])
        around_s = hops_s + (cluster.num_hosts - 1) * chunk / cluster.host_bytes_per_s
        return cls(read_s, limits, busy_s, max(busy_s, around_s), place_s)

    def bound_by(self, pace_s: float) -> str:
        """Names what is busiest, unless even that is idle for much of the time between two rounds."""
        name = max(self.limits, key=lambda name: self.limits[name])
        if pace_s > _LATENCY_SHOWS * self.limits[name] and self.transit_s > self.exchange_s:
            return "the way around the ring"
        return name


def _most_on_one_host(plan: TransferPlan, cluster: Cluster) -> int:
    return max(Counter(rank // cluster.ranks_per_host for rank in plan.readers).values())


class _Rank:
    """One reader that stands for all; times are seconds since the first round was posted.

    Args:
        plan: Its plan.
        costs: Of a full round.
        request_s: Time to the first byte of a read.
        alone: Whether nothing is exchanged.
    """

    def __init__(self, plan: TransferPlan, costs: _Costs, request_s: float, *, alone: bool) -> None:
        self._costs = costs
        self._request_s = request_s
        self._alone = alone
        self._depth = plan.depth
        self._threads = min(plan.depth, _MAX_DIRECT_READS) if alone else max(1, plan.depth // 2)
        self._num_rounds = min(plan.num_rounds, _NUM_SIMULATED)
        self._skipped = plan.num_rounds - self._num_rounds
        last = plan.chunk_bytes_of(plan.num_rounds - 1) if plan.num_rounds else 0
        self._last_part = last / plan.chunk_bytes_of(0) if last else 1.0
        self._events: list[Interval] = []
        self._placed: list[float] = []
        self._next_start_s = self._done_s = 0.0

    def run(self) -> tuple[list[Interval], float]:
        """Returns what the rank does and how long it takes."""
        self._simulate()
        if not self._placed:
            return [], 0.0
        if not self._skipped:
            return self._events, self._placed[-1]
        return self._stretched()

    def _stretched(self) -> tuple[list[Interval], float]:
        """Puts the rounds that were not simulated into the middle, at the pace of those before."""
        middle = self._num_rounds // 2
        begin_s = self._placed[middle]
        more_s = self._skipped * (begin_s - self._placed[middle - _PERIOD]) / _PERIOD
        head = [event for event in self._events if event.first_round <= middle]
        tail = [event.later(more_s, self._skipped) for event in self._events if event.first_round > middle]
        return [*head, *self._typical(middle, more_s), *tail], self._placed[-1] + more_s

    def _typical(self, middle: int, more_s: float) -> Iterator[Interval]:
        """Shows the rounds left out as the last ones before them in slow motion: as busy, and as idle."""
        begin_s, end_s = self._placed[middle - _NUM_TYPICAL], self._placed[middle]
        slower, num_rounds = more_s / max(end_s - begin_s, 1e-12), max(1, self._skipped // _NUM_TYPICAL)
        for event in self._events:
            if event.begin_s < end_s and event.end_s > begin_s:
                since_s, until_s = max(event.begin_s, begin_s), min(event.end_s, end_s)
                yield Interval(
                    event.stage,
                    end_s + (since_s - begin_s) * slower,
                    end_s + (until_s - begin_s) * slower,
                    middle + 1 + max(0, event.first_round - middle + _NUM_TYPICAL) * num_rounds,
                    num_rounds,
                )

    def _simulate(self) -> None:
        """Goes from event to event: a round is posted, a read's first byte comes, or its last."""
        posted = [0.0] * min(self._depth, self._num_rounds)
        flying: list[_Read] = []
        ended: dict[int, float] = {}
        now, begun = 0.0, 0
        while len(self._placed) < self._num_rounds:
            while begun < len(posted) and len(flying) < self._threads and posted[begun] <= now:
                flying.append(
                    _Read(begun, self._part(begun) * self._costs.read_s, now, now + self._request_s)
                )
                begun += 1
            flowing = [read for read in flying if read.first_byte_s <= now]
            awaited = [read.first_byte_s for read in flying if read.first_byte_s > now]
            if begun < len(posted) and len(flying) < self._threads:
                awaited.append(posted[begun])
            shortest_s = min((read.left_s for read in flowing), default=math.inf)
            # Reads in flight share the rate evenly.
            end_s = now + shortest_s * len(flowing) if flowing else math.inf
            until_s = min([end_s, *awaited])
            progress_s = shortest_s if until_s == end_s else (until_s - now) / max(1, len(flowing))
            now = until_s
            for read in flowing:
                read.left_s -= progress_s
                if read.left_s <= _NOTHING * progress_s:
                    flying.remove(read)
                    ended[read.index] = now
                    self._events.append(Interval("read", read.begin_s, now, read.index))
            while len(self._placed) in ended:
                self._pass_on(len(self._placed), ended.pop(len(self._placed)))
                if len(posted) < self._num_rounds:
                    posted.append(self._placed[-1])

    def _part(self, index: int) -> float:
        """The length of a round as a part of a full one: only the last may be shorter."""
        return self._last_part if index == self._num_rounds - 1 else 1.0

    def _pass_on(self, index: int, ready_s: float) -> None:
        """Exchanges and places a round."""
        if self._alone:
            self._placed.append(max([ready_s, *self._placed[-1:]]))  # finished in order, like any round
            return
        part, costs = self._part(index), self._costs
        start_s = max(self._next_start_s, ready_s)
        self._next_start_s = start_s + part * costs.exchange_s
        self._done_s = max(self._done_s, start_s + part * costs.transit_s)
        place_s = max([self._done_s, *self._placed[-1:]])
        self._placed.append(place_s + part * costs.place_s)
        self._events.append(Interval("exchange", start_s, self._done_s, index))
        self._events.append(Interval("place", place_s, self._placed[-1], index))


@dataclass
class _Read:
    """A read in flight; `left_s` is what it still takes if no other is in flight."""

    index: int
    left_s: float
    begin_s: float
    first_byte_s: float
