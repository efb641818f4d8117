"""Hosts, and the rates of their links and storage: the clusters of `simulate` and `sharded`.

Before the first read, `opening_s` is for listing, headers and connections, and `_OPENING_TRIPS` requests wait
for each other. The ranks agree `_NUM_AGREEMENTS`
times, along the tree of `comm/tree.py`, in which each handles seven others on every level, one after the
other. All ranks get the report of each. The first load of a group builds the tree: each rank makes
`_NUM_REQUESTS` requests to the rendezvous store, which one thread serves while the first rank reads headers.
These costs were measured on one machine (docs/benchmarks.md), except for the network between two ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fastload.errors import OptionError
from fastload.transfer.pace import far_reads
from fastload.transfer.plan import StrategyChoice, choose_strategy

# Assumptions, of the order of one core's TCP, and of a copy to fresh memory.
_GLOO = {"rank_bytes_per_s": 1.6e9, "copy_bytes_per_s": 2e9, "message_s": 80e-6}
_NCCL = {"rank_bytes_per_s": math.inf, "copy_bytes_per_s": math.inf, "message_s": 10e-6}  # assumptions

# First load of a group: counted, and measured with `scripts/bench_load.py agree` (docs/benchmarks.md).
_NUM_AGREEMENTS = 3
_TREE_BASE = 8
_HOP_S = 16e-6 + 50e-6  # from rank to rank; the network is an assumption
_RESPONSE_S = 8e-6  # to take the response of a rank below, or to send it the decision
_DECISION_S = 40e-6  # to store the decision
_REPORT_S, _REPORT_BYTES = 1e-6, 35  # report of a rank to all others, in all agreements together
_NUM_REQUESTS = 1.125  # one of each rank, and a second one of every eighth rank
_REQUEST_S = 5.6e-6

_OPENING_TRIPS = 3  # requests that wait for each other: the listing, the heads of all files, their tails


@dataclass(frozen=True, kw_only=True)
class Requests:
    """How storage answers the requests of a rank.

    Attributes:
        latency_s: Mean time to the first byte.
        connection_bytes_per_s: Rate at which one answer arrives.
        in_flight: Most requests that a rank has under way; None for as many as storage rewards, as in a load.

    Raises:
        OptionError: A number is out of range.
    """

    latency_s: float = 0.0
    connection_bytes_per_s: float = math.inf
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise OptionError(f"latency_s={self.latency_s}: must not be negative")
        if not self.connection_bytes_per_s > 0:
            raise OptionError(f"connection_bytes_per_s={self.connection_bytes_per_s}: must be above 0")
        if self.in_flight is not None and self.in_flight < 1:
            raise OptionError(f"in_flight={self.in_flight}: must be at least 1")

    @property
    def are_limited(self) -> bool:
        """Whether more requests in flight make a load faster."""
        return self.latency_s > 0 or math.isfinite(self.connection_bytes_per_s)

    def most_reads(
        self,
        num_chunks: int,
        chunk_bytes: int,
        staging_bytes: int,
        read_s: float,
        *,
        num_readers: int,
        alone: bool,
    ) -> int:
        """Returns the number of chunks that a rank reads at once.

        Args:
            num_chunks: Chunks that it reads.
            chunk_bytes: Length of a chunk.
            staging_bytes: Memory for chunks that are exchanged.
            read_s: Time in which storage can deliver a chunk to the rank, at its full rate.
            num_readers: The ranks that read.
            alone: Whether nothing is exchanged: reads go into the tensors.
        """
        if (most := self.in_flight) is None:
            answer_s = self.latency_s + chunk_bytes / self.connection_bytes_per_s
            first, most = far_reads(num_readers)
            rewarded = math.ceil(min(answer_s / read_s, most)) if read_s else most
            most = max(first, min(rewarded, _mean_in_flight(num_chunks, first, most)))
        fitting = most if alone or not chunk_bytes else staging_bytes // chunk_bytes
        return max(1, min(most, fitting))


def _mean_in_flight(num_chunks: int, first: int, most: int) -> int:
    """Returns the mean of the requests in flight, which double each time that all have been answered."""
    num_times, left, in_flight = 0, num_chunks, first
    while left > in_flight and in_flight < most:
        num_times, left, in_flight = num_times + 1, left - in_flight, min(2 * in_flight, most)
    return math.ceil(num_chunks / (num_times + left / in_flight)) if num_chunks else first


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, and the rates of their links and storage: goodput in bytes per second.

    Attributes:
        num_hosts: Number of hosts.
        ranks_per_host: Ranks on each host.
        host_bytes_per_s: Rate of a host's network link, each way.
        storage_bytes_per_s: Rate of storage to all hosts together.
        host_storage_bytes_per_s: Highest rate of storage to one host.
        requests: How storage answers each request.
        nccl: Whether the exchange is NCCL between devices, not Gloo between hosts.
        rank_bytes_per_s: Rate at which a rank receives and forwards; None for 1.6 GB/s, with NCCL no limit.
        copy_bytes_per_s: Rate at which a rank places bytes; None for 2 GB/s, with NCCL no limit.
        message_s: Cost of a hop besides its bytes; None for 80 µs, with NCCL 10 µs.
        inner_bytes_per_s: Rate between the devices of a host: an assumption, for NVLink driven by few
            multiprocessors.
        call_s: Cost of a collective to its caller: an assumption.
        opening_s: Time before the first read, without agreements and the latency of requests.
        agreeing_s: Time of the agreements; None for the first load of a group, whose ranks build their tree
            while the first one reads the headers.

    Raises:
        OptionError: A number is out of range.
    """

    num_hosts: int
    ranks_per_host: int
    host_bytes_per_s: float
    storage_bytes_per_s: float = math.inf
    host_storage_bytes_per_s: float = math.inf
    requests: Requests = Requests()
    nccl: bool = False
    rank_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    message_s: float | None = None
    inner_bytes_per_s: float = 100e9
    call_s: float = 50e-6
    opening_s: float = 0.15
    agreeing_s: float | None = None

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
        """Returns a rate or time, or its default for the kind of exchange."""
        given = getattr(self, name)
        return float(given if given is not None else (_NCCL if self.nccl else _GLOO)[name])

    @property
    def before_s(self) -> float:
        """Time before the first read."""
        opening_s = self.opening_s + _OPENING_TRIPS * self.requests.latency_s
        if self.agreeing_s is not None:
            return opening_s + self.agreeing_s
        meeting_s = self.num_ranks * _NUM_REQUESTS * _REQUEST_S
        return max(opening_s, meeting_s) + _agreeing_s(self.num_ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks of the world."""
        return self.num_hosts * self.ranks_per_host

    @property
    def host_names(self) -> list[str]:
        """Host name of each rank."""
        return [f"host{rank // self.ranks_per_host}" for rank in range(self.num_ranks)]

    def decide(self, strategy: str) -> StrategyChoice:
        """Returns the choice for a strategy if all ranks can read."""
        return choose_strategy(
            strategy,
            world_size=self.num_ranks,
            readers=range(self.num_ranks),
            hosts=self.host_names,
            shared=True,
            fast_links=self.nccl,
        )

    @property
    def client_bytes_per_s(self) -> float:
        """Highest rate of storage to one host."""
        return min(self.storage_bytes_per_s, self.host_storage_bytes_per_s, self.host_bytes_per_s)

    @property
    def all_clients_bytes_per_s(self) -> float:
        """Highest rate of storage to all hosts together."""
        each = min(self.host_storage_bytes_per_s, self.host_bytes_per_s)
        return min(self.storage_bytes_per_s, self.num_hosts * each)


def _agreeing_s(num_ranks: int) -> float:
    """Returns the seconds of the agreements in one load."""
    levels, least = 0, 1
    while least < num_ranks:
        levels, least = levels + 1, least * _TREE_BASE
    step_s = 2 * levels * (_HOP_S + (_TREE_BASE - 1) * _RESPONSE_S) + _DECISION_S
    # up the tree, to the store and back, and down
    report_bytes = num_ranks * _REPORT_BYTES * (1 + 2 + levels * (_TREE_BASE - 1))
    reports_s = num_ranks * _REPORT_S + report_bytes / _GLOO["rank_bytes_per_s"]
    return _NUM_AGREEMENTS * step_s + reports_s
