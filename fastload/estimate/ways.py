"""What a round costs on its way from those who read it to all ranks. Pure arithmetic on the real plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastload.transfer.grid import dims_of
from fastload.transfer.plan import TransferPlan
from fastload.transfer.routing import choose_base, most_hops, num_targets

__all__ = ["Level", "Rates", "Way", "way_of"]

_SLICE_BYTES = 512 << 10  # NCCL passes on a chunk in such pieces: NCCL_BUFFSIZE, 4 MiB, in 8 steps


class Rates(NamedTuple):
    """What carries a round, in bytes per second; and seconds.

    Attributes:
        host: A host's link, each way.
        rank: What the cores of a rank receive and pass on.
        inner: What a device receives from the others of its host.
        message_s: What a hop costs beyond its bytes.
        call_s: What a collective costs the rank that calls it.
    """

    host: float
    rank: float
    inner: float
    message_s: float
    call_s: float


class Level(NamedTuple):
    """One level of an exchange.

    Attributes:
        name: ``between hosts`` or ``inside hosts``.
        how: By what means.
        nbytes: What all ranks together receive through it, in the whole load.
        num_hops: How many times a chunk is passed on in it, at most.
    """

    name: str
    how: str
    nbytes: int
    num_hops: int


@dataclass(frozen=True)
class Way:
    """What a full round takes from when it starts, but for what it is read and placed; in seconds.

    Attributes:
        link_s: A host's link, whichever way it is busier.
        cores_s: The cores of a rank.
        messages_s: The messages of a rank, or its calls.
        phase_s: What of it rounds do one after the other.
        transit_s: From its start to its end.
        levels: What goes which way.
    """

    link_s: float
    cores_s: float
    messages_s: float
    phase_s: float
    transit_s: float
    levels: tuple[Level, ...]


def way_of(plan: TransferPlan, num_hosts: int, num_locals: int, rates: Rates, *, nccl: bool) -> Way:
    """Returns what a full round takes.

    Args:
        plan: Of ranks in the order of their hosts.
        num_hosts: How many there are.
        num_locals: Ranks of each.
        rates: What carries it.
        nccl: Whether that is NCCL between devices; else Gloo between hosts, and shared memory.
    """
    chunk_bytes = plan.chunk_bytes_of(0) if plan.num_rounds else 0
    round_bytes = chunk_bytes * plan.windows.most_readers
    find = _through_nccl if nccl else _through_gloo
    return find(plan, num_hosts, num_locals, rates, chunk_bytes, round_bytes)


def _through_gloo(
    plan: TransferPlan, num_hosts: int, num_locals: int, rates: Rates, chunk_bytes: int, round_bytes: int
) -> Way:
    """Trees between hosts, on as many rails as they have ranks; shared memory inside."""
    base = choose_base(num_hosts)
    hops = most_hops(num_hosts, base)
    hop_s = chunk_bytes / min(rates.host, rates.rank) + rates.message_s
    num_messages = math.ceil(plan.windows.most_readers / num_locals) if num_hosts > 1 else 1
    sent = _most_sent_by_trees(plan, num_hosts, num_locals, base) * chunk_bytes
    how = "a ring" if base >= num_hosts else f"trees of base {base}"
    return Way(
        link_s=max(round_bytes, sent) / rates.host if num_hosts > 1 else 0.0,
        cores_s=round_bytes / num_locals / rates.rank if num_hosts > 1 else 0.0,
        messages_s=num_messages * rates.message_s,
        phase_s=0.0,
        transit_s=hops * hop_s + (rates.message_s if num_locals > 1 else 0.0),
        levels=_levels(plan, num_hosts, num_locals, (how, hops), ("shared memory", 1)),
    )


def _through_nccl(
    plan: TransferPlan, num_hosts: int, num_locals: int, rates: Rates, chunk_bytes: int, round_bytes: int
) -> Way:
    """The lines of a grid: those of hosts first, then those of the ranks of a host."""
    dims = dims_of(num_hosts)
    rail = rates.host / num_locals
    phases = []
    if num_hosts > math.prod(dims):
        phases.append(chunk_bytes / rail + rates.message_s)  # from guests
    for dim, size in enumerate(dims):
        num_chunks = plan.windows.most_readers / num_locals / math.prod(dims[dim + 1 :])
        nbytes = max(1.0, num_chunks) * chunk_bytes * (size - 1) / size
        # Where all of a line have something to pass on, none has to wait for the first piece.
        wait_bytes = 0 if num_chunks >= size else min(chunk_bytes, _SLICE_BYTES)
        phases.append(nbytes / rail + (size - 1) * (rates.message_s + wait_bytes / rail))
    inner_bytes = round_bytes * (num_locals - 1) / num_locals
    phases.append(inner_bytes / rates.inner + (num_locals - 1) * rates.message_s)
    sent = _most_sent_along_lines(plan, num_locals, dims) * chunk_bytes
    num_guests = num_hosts - math.prod(dims)
    num_phases = (num_guests > 0) + len(dims) + (num_locals > 1)
    how = f"lines of {' × '.join(map(str, dims))}", sum(dims) - len(dims) + 2 * (num_guests > 0)
    return Way(
        link_s=max(round_bytes, sent) / rates.host if num_hosts > 1 else 0.0,
        cores_s=0.0,
        messages_s=2 * num_phases * rates.call_s,  # chunks, and what is the matter with them
        phase_s=max(phases),
        transit_s=sum(phases) + 2 * num_phases * rates.call_s,
        levels=_levels(plan, num_hosts, num_locals, how, ("links between devices", num_locals - 1)),
    )


def _levels(
    plan: TransferPlan, num_hosts: int, num_locals: int, outer: tuple[str, int], inner: tuple[str, int]
) -> tuple[Level, ...]:
    total = plan.total_bytes
    levels = (
        Level("between hosts", outer[0], total * (num_hosts - 1), outer[1]),
        Level("inside hosts", inner[0], total * num_hosts * (num_locals - 1), inner[1]),
    )
    return tuple(level for level in levels if level.nbytes)


def _owners(plan: TransferPlan, num_locals: int) -> tuple[list[Counter[int]], int]:
    """Returns how many chunks the hosts have read of the rounds in flight, by rail; and how many rounds.

    Hosts that have more to send than others have it in different rounds: of those in flight it is even.
    """
    rails = [Counter[int]() for _ in range(num_locals)]
    num_rounds = max(1, min(plan.depth, plan.num_windows))
    for readers in plan.windows.readers[:num_rounds]:
        for rank in readers:
            rails[rank % num_locals][rank // num_locals] += 1
    return rails, num_rounds


def _most_sent_by_trees(plan: TransferPlan, num_hosts: int, num_locals: int, base: int) -> float:
    """Returns how many chunks the busiest host sends in a round."""
    if num_hosts == 1:
        return 0.0
    rails, num_rounds = _owners(plan, num_locals)
    targets = torch.tensor([num_targets(at, num_hosts, base) for at in range(num_hosts)], dtype=torch.float64)
    read = torch.zeros(num_hosts, dtype=torch.float64)
    for rail in rails:
        for host, count in rail.items():
            read[host] += count
    # Who is how far from whom: a convolution.
    sent = torch.fft.irfft(torch.fft.rfft(targets) * torch.fft.rfft(read), n=num_hosts)
    return float(sent.max()) / num_rounds


def _most_sent_along_lines(plan: TransferPlan, num_locals: int, dims: Sequence[int]) -> float:
    """Returns how many chunks the busiest host sends in a round: each member of a line, but the last one."""
    rails, num_rounds = _owners(plan, num_locals)
    num_hosts = math.prod(dims)
    sent = [0] * num_hosts
    for read in rails:
        rail = Counter[int]()  # guests have their partners pass on what they have read
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
