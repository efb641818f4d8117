"""The cost of the exchange of a round, computed from the real plan. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastload.planning.cluster import Cluster
from fastload.transfer.messages import choose_base, dims_of, hop_distances, most_hops
from fastload.transfer.plan import TransferPlan

_SLICE_BYTES = 512 << 10  # slice of a chunk that NCCL passes on: NCCL_BUFFSIZE, 4 MiB, in 8 steps


class Level(NamedTuple):
    """One level of an exchange.

    Attributes:
        name: ``between hosts`` or ``inside hosts``.
        how: Description of the means.
        nbytes: Bytes that all ranks together receive through it in the load.
        num_hops: Most hops of a chunk.
    """

    name: str
    how: str
    nbytes: int
    num_hops: int


@dataclass(frozen=True)
class ExchangeCosts:
    """Times of the exchange of a full round, in seconds.

    Attributes:
        link_s: On a host's link, in the busier direction.
        cores_s: On the cores of a rank.
        messages_s: For the messages or calls of a rank.
        phase_s: Longest phase; a phase takes one round at a time.
        transit_s: From start to end.
        levels: Bytes between hosts and within them.
    """

    link_s: float
    cores_s: float
    messages_s: float
    phase_s: float
    transit_s: float
    levels: tuple[Level, ...]


def exchange_costs(plan: TransferPlan, cluster: Cluster) -> ExchangeCosts:
    """Returns the costs of the exchange of a full round.

    Args:
        plan: The plan; ranks are in the order of their hosts.
        cluster: The hosts and links.
    """
    return _over_nccl(plan, cluster) if cluster.nccl else _over_gloo(plan, cluster)


def _over_gloo(plan: TransferPlan, cluster: Cluster) -> ExchangeCosts:
    """Costs of trees between hosts, one rail for each rank of a host, and of shared memory within hosts."""
    num_hosts, num_locals = cluster.num_hosts, cluster.ranks_per_host
    num_readers, chunk_bytes = plan.windows.most_readers, plan.chunk_bytes_of(0) if plan.num_rounds else 0
    rank_bytes_per_s, message_s = cluster.cost("rank_bytes_per_s"), cluster.cost("message_s")
    base = choose_base(num_hosts)
    hops = most_hops(num_hosts, base)
    hop_s = chunk_bytes / min(cluster.host_bytes_per_s, rank_bytes_per_s) + message_s
    how = "a ring" if base >= num_hosts else f"trees of base {base}"
    link_s = cores_s = 0.0
    num_messages = 1
    if num_hosts > 1:
        num_sent = max(num_readers, _most_sent_by_trees(plan, num_hosts, num_locals, base))
        link_s = num_sent * chunk_bytes / cluster.host_bytes_per_s
        cores_s = num_readers * chunk_bytes / num_locals / rank_bytes_per_s
        num_messages = math.ceil(num_readers / num_locals)
    return ExchangeCosts(
        link_s=link_s,
        cores_s=cores_s,
        messages_s=num_messages * message_s,
        phase_s=0.0,
        transit_s=hops * hop_s + (message_s if num_locals > 1 else 0.0),
        levels=_levels(plan, cluster, (how, hops), ("shared memory", 1)),
    )


def _over_nccl(plan: TransferPlan, cluster: Cluster) -> ExchangeCosts:
    """Costs along the lines of a grid: first those of hosts, then those of the ranks of a host."""
    num_hosts, num_locals, message_s = cluster.num_hosts, cluster.ranks_per_host, cluster.cost("message_s")
    num_readers, chunk_bytes = plan.windows.most_readers, plan.chunk_bytes_of(0) if plan.num_rounds else 0
    dims = dims_of(num_hosts)
    num_extra = num_hosts - math.prod(dims)
    rail_bytes_per_s = cluster.host_bytes_per_s / num_locals
    phases = [chunk_bytes / rail_bytes_per_s + message_s] if num_extra else []
    for dim, size in enumerate(dims):
        num_chunks = num_readers / num_locals / math.prod(dims[dim + 1 :])
        nbytes = max(1.0, num_chunks) * chunk_bytes * (size - 1) / size
        # If all members of a line have something to send, none waits for the first slice.
        wait_bytes = 0 if num_chunks >= size else min(chunk_bytes, _SLICE_BYTES)
        phases.append(nbytes / rail_bytes_per_s + (size - 1) * (message_s + wait_bytes / rail_bytes_per_s))
    inner_bytes = num_readers * chunk_bytes * (num_locals - 1) / num_locals
    phases.append(inner_bytes / cluster.inner_bytes_per_s + (num_locals - 1) * message_s)
    num_phases = (num_extra > 0) + len(dims) + (num_locals > 1)
    calls_s = 2 * num_phases * cluster.call_s  # chunks, and their status
    num_sent = max(num_readers, _most_sent_along_lines(plan, num_locals, dims))
    how = f"lines of {' × '.join(map(str, dims))}", sum(dims) - len(dims) + 2 * (num_extra > 0)
    return ExchangeCosts(
        link_s=num_sent * chunk_bytes / cluster.host_bytes_per_s if num_hosts > 1 else 0.0,
        cores_s=0.0,
        messages_s=calls_s,
        phase_s=max(phases),
        transit_s=sum(phases) + calls_s,
        levels=_levels(plan, cluster, how, ("links between devices", num_locals - 1)),
    )


def _levels(
    plan: TransferPlan, cluster: Cluster, outer: tuple[str, int], inner: tuple[str, int]
) -> tuple[Level, ...]:
    total, num_hosts, num_locals = plan.total_bytes, cluster.num_hosts, cluster.ranks_per_host
    levels = (
        Level("between hosts", outer[0], total * (num_hosts - 1), outer[1]),
        Level("inside hosts", inner[0], total * num_hosts * (num_locals - 1), inner[1]),
    )
    return tuple(level for level in levels if level.nbytes)


def _owners(plan: TransferPlan, num_locals: int) -> tuple[list[Counter[int]], int]:
    """Returns the chunks that hosts have read in the rounds in flight, by rail, and the number of rounds.

    The hosts with more to send differ from round to round, so the average over rounds in flight is even.
    """
    rails = [Counter[int]() for _ in range(num_locals)]
    num_rounds = max(1, min(plan.depth, plan.num_windows))
    for readers in plan.windows.readers[:num_rounds]:
        for rank in readers:
            rails[rank % num_locals][rank // num_locals] += 1
    return rails, num_rounds


def _most_sent_by_trees(plan: TransferPlan, num_hosts: int, num_locals: int, base: int) -> float:
    """Returns how many chunks the busiest host sends in a round."""
    rails, num_rounds = _owners(plan, num_locals)
    num_targets = [sum(1 for _ in hop_distances(at, num_hosts, base)) for at in range(num_hosts)]
    targets = torch.tensor(num_targets, dtype=torch.float64)
    read = torch.zeros(num_hosts, dtype=torch.float64)
    for rail in rails:
        for host, count in rail.items():
            read[host] += count
    # Sums over the distances between hosts: a convolution.
    sent = torch.fft.irfft(torch.fft.rfft(targets) * torch.fft.rfft(read), n=num_hosts)
    return float(sent.max()) / num_rounds


def _most_sent_along_lines(plan: TransferPlan, num_locals: int, dims: Sequence[int]) -> float:
    """Returns how many chunks the busiest host sends in a round: all members of a line but the last send."""
    rails, num_rounds = _owners(plan, num_locals)
    num_hosts = math.prod(dims)
    sent = [0] * num_hosts
    for read in rails:
        rail = Counter[int]()  # partners forward chunks of extra hosts
        for host, count in read.items():
            rail[host % num_hosts] += count
        unit = 1
        for size in dims:
            of_line, of_member = Counter[int](), Counter[int]()
            for host, count in rail.items():
                of_line[host // (unit * size)] += count
                of_member[host // unit] += count
            for host in range(num_hosts):
                line, member = divmod(host // unit, size)
                sent[host] += of_line[line] - of_member[line * size + (member + 1) % size]
            unit *= size
    return max(sent) / num_rounds
