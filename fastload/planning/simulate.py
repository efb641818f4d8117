"""Predicts how long a load takes on any cluster: the real plan, run through a model of the pipeline.

The model is `transfer/pipeline.py`, seen from one rank that represents all ranks with the same work.

Reading
    A reader posts `depth` rounds, reads `depth // 2` of their chunks at once, and hands them over in order. A
    placed round frees its staging buffer for the next one. Where readers take turns, the chunks of
    `TransferPlan.ahead` rounds are read at once. All readers advance in step: storage, and each host's share
    of it, are divided evenly among them, and a reader's part among its reads in flight.

Requests
    Where storage has a latency or a rate for each connection (`Requests`), a rank reads as many chunks at
    once as it may have requests under way and as fit into `staging_bytes`, one request for each. A request
    waits for its first byte without taking bandwidth; then it gets at most the rate of a connection.

Links
    A host's link carries storage traffic and the exchange, and works both ways at once. With several hosts
    each byte of a round enters each host once, read or received: a round occupies the link for
    round_bytes ÷ link rate, or longer if some host sends more. That is averaged over the rounds in flight.

Exchange over Gloo
    Chunks follow the trees of `transfer/messages.py`, one rail for each rank of a host. A host passes on
    complete chunks, so a hop takes chunk ÷ rank rate + `message_s`. A rank handles one message for each
    reader on its rail. The other ranks of its host copy from shared memory.

Exchange over NCCL
    Chunks follow the lines of a grid (`transfer/messages.py`), dimension by dimension. Each line is busy with
    one round at a time; several rounds are in flight. A hop costs `message_s` if all members of a line have
    something to pass on; otherwise a slice of 512 KiB comes first. Each collective costs its caller `call_s`.
    The last dimension is the devices of a host, which receive `inner_bytes_per_s`.

Ranks
    A rank passes on at most `rank_bytes_per_s` (its cores). One thread of it places `copy_bytes_per_s`, as if
    no chunk were received in place.

Left out: page caches, storage that slows down under load, stragglers, and oversubscribed switches. Rates are
goodput: TCP over Ethernet delivers some 95 % of the line.

A prediction costs a few thousand simulated rounds of one rank; longer loads are extrapolated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastload.geometry.ranges import HasRange
from fastload.planning.cluster import Cluster, Requests
from fastload.planning.exchange import Level, exchange_costs
from fastload.transfer.plan import StrategyChoice, TransferPlan, plan_transfer
from fastload.transfer.rounds import Plan

STRATEGIES = ("allgather", "broadcast", "direct")

_MAX_DIRECT_READS = 8
LATENCY_SHOWS = 1.1

STORAGE, SHARE, LINKS = "storage", "each host's share of storage", "host links"
REQUESTS = "requests in flight"
CORES, MESSAGES, PLACING = "the cores of a rank", "messages", "placing"
WAY, BEFORE = "hops from rank to rank", "the time before the first read"

_NUM_SIMULATED = 6144  # rounds; of a longer load the middle is extrapolated
_NUM_TYPICAL = 96  # rounds that represent that middle in the timeline
_PERIOD = 1536  # rounds over which the pace is measured: a multiple of every depth
_NOTHING = 1e-9  # rounding error of a read


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted load with one strategy.

    Attributes:
        decision: The strategy; ``direct``, whatever was asked, if there is nothing to exchange.
        plan: The real plan; with ``direct`` that of one rank for itself.
        total_s: Seconds until every rank has everything.
        storage_bytes: Bytes read from storage.
        exchanged_bytes: Bytes that all ranks together receive from each other.
        levels: The same, by level; empty if there is nothing to exchange.
        limits: Seconds that a round takes on each resource.
        bound_by: The bottleneck.
        timeline: The work of one reader; other ranks do the same without the reads.
    """

    decision: StrategyChoice
    plan: Plan
    total_s: float
    storage_bytes: int
    exchanged_bytes: int
    levels: Sequence[Level]
    limits: Mapping[str, float]
    bound_by: str
    timeline: Sequence[Interval]


@dataclass(frozen=True)
class ReplicatedLoad:
    """A load of everything into every rank.

    Attributes:
        tensors: The tensors in manifest order.
        cluster: The cluster.
        is_mounted: Whether the load goes through a mount, which reads ahead; see `TransferPlan`.
    """

    tensors: Sequence[HasRange]
    cluster: Cluster
    is_mounted: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint."""
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes that ranks hold in the end: everything."""
        return (self.nbytes,)

    @property
    def least_s(self) -> float:
        """A lower bound in seconds: every byte leaves the storage once, and enters each host."""
        cluster = self.cluster
        return self.nbytes / min(cluster.all_clients_bytes_per_s, cluster.host_bytes_per_s)

    def predict(self, strategy: str, *, staging_bytes: int, chunk_bytes: int | None) -> Prediction:
        """Predicts the load with one of the `STRATEGIES`.

        Args:
            strategy: The strategy.
            staging_bytes: As in `LoadOptions`.
            chunk_bytes: As in `LoadOptions`.

        Raises:
            OptionError: The plan is not possible.
        """
        cluster = self.cluster
        decision = cluster.decide(strategy)
        alone = decision.alone
        shares_memory = cluster.ranks_per_host > 1 and not cluster.nccl and not alone
        plan = plan_transfer(
            self.tensors,
            decision.readers_for(0),
            decision.recipients_with(0, cluster.num_ranks),
            staging_bytes=staging_bytes,
            chunk_bytes=chunk_bytes,
            contiguous=self.is_mounted,
            even_slots=cluster.nccl and not alone,
            hosts=cluster.host_names,
            num_sharing=cluster.ranks_per_host if shares_memory else 1,
        )
        reads = plan.ahead or num_reads(plan.depth, alone=alone)
        ahead = plan.ahead
        if cluster.requests.are_limited and plan.num_rounds:
            read_s = max(_reading_limits(plan, cluster, alone=alone).values())
            num_chunks, chunk = plan.num_rounds // max(1, plan.num_windows), plan.chunk_bytes_of(0)
            num_readers = cluster.num_ranks if alone else len(plan.readers)
            most = cluster.requests.most_reads(
                num_chunks, chunk, staging_bytes, read_s, num_readers=num_readers, alone=alone
            )
            reads = most * max(1, plan.num_windows)  # of all readers that take turns
            ahead = max(plan.depth, reads)
        costs = _Costs.of(plan, cluster, alone=alone, num_reads=reads)
        events, moving_s = RankRounds(
            num_rounds=plan.num_rounds,
            # One staging buffer is kept for ranks of the host that are a round behind.
            depth=max(1, plan.depth - 1) if shares_memory else plan.depth,
            num_reads=reads,
            ahead=ahead,
            stages=costs.stages_of(plan),
            alone=alone,
        ).run()
        pace_s = moving_s / max(1, plan.num_rounds)
        return Prediction(
            decision=decision,
            plan=plan,
            total_s=cluster.before_s + moving_s,
            storage_bytes=plan.total_bytes * (cluster.num_ranks if alone else 1),
            exchanged_bytes=sum(level.nbytes for level in costs.levels),
            levels=costs.levels,
            limits=costs.limits,
            bound_by=BEFORE if cluster.before_s > moving_s else costs.bound_by(pace_s),
            timeline=[event.later(cluster.before_s) for event in events],
        )


@dataclass(frozen=True)
class _Costs:
    """The costs of a full round.

    Attributes:
        stages: Its stages.
        limits: Seconds on each resource, by name.
        levels: The levels of the exchange.
    """

    stages: Stages
    limits: Mapping[str, float]
    levels: Sequence[Level] = ()

    @classmethod
    def of(cls, plan: TransferPlan, cluster: Cluster, *, alone: bool, num_reads: int) -> _Costs:
        """Computes the costs of a plan, of which a rank reads a number of chunks at once."""
        chunk = plan.chunk_bytes_of(0) if plan.num_rounds else 0
        limits = _reading_limits(plan, cluster, alone=alone)
        reading = reading_stages(max(limits.values()), chunk, 1, cluster.requests)
        if cluster.requests.are_limited:
            limits[REQUESTS] = (reading.wait_s + reading.answer_s) / num_reads
        if alone:
            return cls(reading, limits)
        exchange = exchange_costs(plan, cluster)
        limits[LINKS] = max(limits[LINKS], exchange.link_s)
        limits[MESSAGES], limits[CORES] = exchange.messages_s, exchange.cores_s
        limits[PLACING] = chunk * plan.windows.most_readers / cluster.cost("copy_bytes_per_s")
        busy_s = max(limits[LINKS], exchange.cores_s, exchange.messages_s, exchange.phase_s)
        stages = reading._replace(
            exchange_s=busy_s, transit_s=max(busy_s, exchange.transit_s), place_s=limits[PLACING]
        )
        return cls(stages, limits, exchange.levels)

    def stages_of(self, plan: TransferPlan) -> Callable[[int], Stages]:
        """Returns the stages of each round of the plan: only the last may be shorter."""
        last = plan.chunk_bytes_of(plan.num_rounds - 1) if plan.num_rounds else 0
        shorter = self.stages.times(last / plan.chunk_bytes_of(0)) if last else self.stages
        return lambda index: shorter if index == plan.num_rounds - 1 else self.stages

    def bound_by(self, pace_s: float) -> str:
        """Returns the busiest resource, or `WAY` if even that is mostly idle between two rounds."""
        name = max(self.limits, key=lambda name: self.limits[name])
        if pace_s > LATENCY_SHOWS * self.limits[name] and self.stages.transit_s > self.stages.exchange_s:
            return WAY
        return name


def num_reads(depth: int, *, alone: bool) -> int:
    """Returns the number of chunks that a rank reads at once."""
    return min(depth, _MAX_DIRECT_READS) if alone else max(1, depth // 2)


def _reading_limits(plan: TransferPlan, cluster: Cluster, *, alone: bool) -> dict[str, float]:
    """Returns the seconds that reading a round takes, on each resource."""
    chunk = plan.chunk_bytes_of(0) if plan.num_rounds else 0
    num_reading = cluster.num_ranks if alone else plan.windows.most_readers
    on_host = cluster.ranks_per_host if alone else _most_on_one_host(plan, cluster)
    return {
        STORAGE: num_reading * chunk / cluster.storage_bytes_per_s,
        SHARE: on_host * chunk / cluster.host_storage_bytes_per_s,
        LINKS: on_host * chunk / cluster.host_bytes_per_s,
    }


def _most_on_one_host(plan: TransferPlan, cluster: Cluster) -> float:
    """Returns the most chunks of a round that one host reads, averaged over rounds that are read at once."""
    num_rounds = max(1, min(plan.ahead, plan.num_windows))
    windows = plan.windows.readers[:num_rounds]
    counts = Counter(rank // cluster.ranks_per_host for readers in windows for rank in readers)
    return max(counts.values()) / num_rounds


class Interval(NamedTuple):
    """The interval of one stage of a round on a rank.

    Attributes:
        stage: ``read``, ``exchange`` or ``place``.
        begin_s: Begin, in seconds since the start of the load.
        end_s: End, likewise.
        first_round: Number of the round.
        num_rounds: Number of consecutive rounds that the interval represents.
    """

    stage: str
    begin_s: float
    end_s: float
    first_round: int
    num_rounds: int = 1

    def later(self, by_s: float, by_rounds: int = 0) -> Interval:
        """Returns the interval, moved."""
        moved = self._replace(begin_s=self.begin_s + by_s, end_s=self.end_s + by_s)
        return moved._replace(first_round=self.first_round + by_rounds)


class Stages(NamedTuple):
    """Durations of the stages of one round, each without the others, in seconds.

    Attributes:
        read_s: Time to read the chunks of all readers, at the rate of storage.
        exchange_s: From the start of its exchange to the start of the next one.
        transit_s: From the start to the end of its exchange.
        place_s: Time to place the chunks.
        wait_s: Time to the first byte of a chunk.
        answer_s: Time from there that its connection takes at least.
    """

    read_s: float
    exchange_s: float = 0.0
    transit_s: float = 0.0
    place_s: float = 0.0
    wait_s: float = 0.0
    answer_s: float = 0.0

    def times(self, factor: float) -> Stages:
        """Returns the stages of a longer or shorter round."""
        return Stages(*(value * factor for value in self))._replace(wait_s=self.wait_s)


def reading_stages(read_s: float, chunk_bytes: float, num_requests: float, requests: Requests) -> Stages:
    """Returns a round without an exchange, whose chunk takes some requests, one after the other."""
    answer_s = chunk_bytes / requests.connection_bytes_per_s
    return Stages(read_s, wait_s=num_requests * requests.latency_s, answer_s=answer_s)


class RankRounds:
    """The rounds of one reader; times are seconds since the first of them was posted.

    Args:
        num_rounds: Number of rounds.
        depth: Rounds in flight.
        num_reads: Chunks read at once.
        ahead: Rounds, from the first in flight, whose chunks may be read; 0 for those in flight.
        stages: Returns the stages of a round. Skipped rounds take as long as those before them.
        alone: Whether nothing is exchanged.
    """

    def __init__(
        self,
        *,
        num_rounds: int,
        depth: int,
        num_reads: int,
        ahead: int = 0,
        stages: Callable[[int], Stages],
        alone: bool,
    ) -> None:
        self._stages = stages
        self._alone = alone
        self._depth = depth
        self._ahead = ahead or depth
        self._threads = num_reads
        self._num_rounds = min(num_rounds, _NUM_SIMULATED)
        self._skipped = num_rounds - self._num_rounds
        self._events: list[Interval] = []
        self._placed: list[float] = []
        self._next_start_s = self._done_s = 0.0

    def run(self) -> tuple[list[Interval], float]:
        """Returns the timeline of the rank, and its duration in seconds."""
        self._simulate()
        if not self._placed:
            return [], 0.0
        if not self._skipped:
            return self._events, self._placed[-1]
        return self._stretched()

    def _stretched(self) -> tuple[list[Interval], float]:
        """Inserts the skipped rounds into the middle, at the pace of those before."""
        middle = self._num_rounds // 2
        begin_s = self._placed[middle]
        more_s = self._skipped * (begin_s - self._placed[middle - _PERIOD]) / _PERIOD
        head = [event for event in self._events if event.first_round <= middle]
        tail = [event.later(more_s, self._skipped) for event in self._events if event.first_round > middle]
        return [*head, *self._typical(middle, more_s), *tail], self._placed[-1] + more_s

    def _typical(self, middle: int, more_s: float) -> Iterator[Interval]:
        """Yields intervals for the skipped rounds: the last rounds before them, slowed down."""
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
        """Advances from event to event: a read may start, or has ended."""
        posted = [0.0] * min(self._ahead, self._num_rounds)
        flying: list[_Read] = []
        ended: dict[int, float] = {}
        now, begun = 0.0, 0
        while len(self._placed) < self._num_rounds:
            while begun < len(posted) and len(flying) < self._threads and posted[begun] <= now:
                flying.append(_Read(begun, self._stages_of(begun), now))
                begun += 1
            flowing = sum(read.wait_s == 0 for read in flying)  # they share the rate evenly
            step_s = min((read.remaining_s(flowing) for read in flying), default=math.inf)
            if begun < len(posted) and len(flying) < self._threads:
                step_s = min(step_s, posted[begun] - now)
            now += step_s
            for read in list(flying):
                read.advance(step_s, flowing)
                if read.left <= _NOTHING:
                    flying.remove(read)
                    ended[read.index] = now
                    self._events.append(Interval("read", read.begin_s, now, read.index))
            while len(self._placed) in ended:
                self._pass_on(len(self._placed), ended.pop(len(self._placed)))
                if len(posted) < self._num_rounds:
                    posted.append(self._placed[-1])

    def _stages_of(self, index: int) -> Stages:
        """Returns the stages of a simulated round; the second half are the last rounds of the load."""
        return self._stages(index + self._skipped if index > self._num_rounds // 2 else index)

    def _pass_on(self, index: int, ready_s: float) -> None:
        """Exchanges and places a round."""
        if self._alone:
            self._placed.append(max([ready_s, *self._placed[-1:]]))  # rounds finish in order
            return
        stages = self._stages_of(index)
        posted_s = self._placed[index - self._depth] if index >= self._depth else 0.0
        start_s = max(self._next_start_s, ready_s, posted_s)
        self._next_start_s = start_s + stages.exchange_s
        self._done_s = max(self._done_s, start_s + stages.transit_s)
        place_s = max([self._done_s, *self._placed[-1:]])
        self._placed.append(place_s + stages.place_s)
        self._events.append(Interval("exchange", start_s, self._done_s, index))
        self._events.append(Interval("place", place_s, self._placed[-1], index))


class _Read:
    """A read in flight.

    Attributes:
        index: Number of its round.
        begin_s: When it began.
        wait_s: Time until its first byte.
        left: Fraction of its bytes that have not arrived.
    """

    def __init__(self, index: int, stages: Stages, begin_s: float) -> None:
        self.index = index
        self.begin_s = begin_s
        self.wait_s = stages.wait_s
        self.left = 1.0
        self._stages = stages

    def remaining_s(self, num_flowing: int) -> float:
        """Returns the time to its next event, the first or the last byte."""
        return self.wait_s or self.left * self._all_s(num_flowing)

    def advance(self, step_s: float, num_flowing: int) -> None:
        """Lets time pass, at most until its next event."""
        if self.wait_s:
            left_s = self.wait_s - step_s
            self.wait_s = left_s if left_s > _NOTHING * self._stages.wait_s else 0.0
            return
        all_s = self._all_s(num_flowing)
        self.left -= step_s / all_s if all_s else self.left

    def _all_s(self, num_flowing: int) -> float:
        """Returns the time for all bytes while some reads share the rate."""
        return max(num_flowing * self._stages.read_s, self._stages.answer_s)
