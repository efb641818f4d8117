"""Copies of each rank's share on other hosts: where they are placed, and how they get there.

As in Gemini (Wang et al., SOSP 2023): the hosts form groups of as many hosts as copies, and each host of a
group has the shares of all of them. Hosts that are left over form one ring with the last group, in which each
host has the shares of the hosts before it. The copies are sent while training continues.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from fastload.base.memory import host_view
from fastload.comm.failures import require_left
from fastload.comm.world import World
from fastload.saving.exchange import BufferRing, MessageExchange, connect
from fastload.saving.layout import FileRange
from fastload.storage.memory_target import MemoryTarget

_PLACE = "copied"  # where in the store
_NUM_OUTGOING = 2  # messages in flight, to all targets
_NUM_AHEAD = 2  # parts received ahead from each source


# Placement. Pure: the same on every rank


def hosts_with_copies(num_hosts: int, num_copies: int) -> list[tuple[int, ...]]:
    """Returns for each host the hosts that have a copy of its share, itself first.

    Args:
        num_hosts: Number of hosts.
        num_copies: Copies of each share; with fewer hosts, one on each.
    """
    copies = min(num_copies, num_hosts)
    num_groups = num_hosts // copies
    in_groups = num_hosts if num_hosts % copies == 0 else (num_groups - 1) * copies
    found = []
    for host in range(num_hosts):
        first, size = (
            (host // copies * copies, copies) if host < in_groups else (in_groups, num_hosts - in_groups)
        )
        found.append(tuple(first + (host - first + ahead) % size for ahead in range(copies)))
    return found


@dataclass(frozen=True)
class CopyPlan:
    """The copies that one rank sends and receives.

    Attributes:
        targets: Ranks on other hosts that it sends its share to.
        sources: Ranks on other hosts that it receives the shares of, ascending.
        held: Ranks whose shares its host has, ascending.
        leads: Whether it is the first rank of its host.
        num_hosts: Number of hosts.
    """

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    held: tuple[int, ...]
    leads: bool
    num_hosts: int


def plan_copies(directories: Sequence[tuple[str, str]], rank: int, num_copies: int) -> CopyPlan:
    """Returns the copies of a rank: it sends its share to one rank of each host that is to have a copy.

    A host is a directory in memory. Several hosts on one machine, such as containers with their own memory,
    are lost together. So they are not neighbours as long as there are other machines.

    Args:
        directories: Machine and directory of each rank.
        rank: The rank.
        num_copies: As for `hosts_with_copies`.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for member, directory in enumerate(directories):
        ranks_of.setdefault(directory, []).append(member)
    hosts = _alternate_machines(list(ranks_of))
    copies = hosts_with_copies(len(hosts), num_copies)
    sends: dict[int, tuple[int, ...]] = {}
    held: list[int] = []
    for number, host in enumerate(hosts):
        others = [ranks_of[hosts[other]] for other in copies[number][1:]]
        for local, member in enumerate(ranks_of[host]):
            sends[member] = tuple(ranks[local % len(ranks)] for ranks in others)
        if hosts.index(directories[rank]) in copies[number]:
            held += ranks_of[host]
    return CopyPlan(
        targets=sends[rank],
        sources=tuple(member for member, targets in sorted(sends.items()) if rank in targets),
        held=tuple(sorted(held)),
        leads=ranks_of[directories[rank]][0] == rank,
        num_hosts=len(hosts),
    )


def _alternate_machines(hosts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Orders hosts so that neighbours are on different machines, as far as possible."""
    num_on_machine: dict[str, int] = {}
    order = []
    for number, (machine, _) in enumerate(hosts):
        order.append((num_on_machine.setdefault(machine, 0), number))
        num_on_machine[machine] += 1
    return [hosts[number] for _, number in sorted(order)]


# Exchange


class _Copy(NamedTuple):
    """A range of a file on its way to or from another rank."""

    peer: int
    name: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def send_copies(
    world: World,
    what: str,
    target: MemoryTarget,
    copies: CopyPlan,
    parts: Sequence[FileRange],
    names: Sequence[str],
) -> None:
    """Sends this rank's share to other hosts, and writes the shares that it receives.

    The share is read back from the memory tier, since the training's state may have changed.

    Args:
        world: The ranks.
        what: Name of the save, for messages.
        target: This host's part of the checkpoint.
        copies: Which ranks this one sends to and receives from.
        parts: The ranges that this rank has written.
        names: Names of the files.

    Raises:
        FastloadError: Some rank failed.
    """
    what = f"{what}: sending copies"
    packed = zlib.compress(json.dumps(parts).encode(), level=1)

    def show() -> None:
        if copies.targets:
            world.show_bytes(what, _PLACE, packed)

    wire, _ = connect(world, what, {*copies.targets, *copies.sources}, show, sends=bool(copies.targets))
    assert wire is not None
    outgoing = [_Copy(rank, *part) for part in _named(parts, names) for rank in copies.targets]
    buffers = BufferRing(_NUM_OUTGOING, [copy.nbytes for copy in outgoing], pinned=False)

    def read(number: int) -> Tensor:
        copy = outgoing[number]
        data = buffers.get(number)[: copy.nbytes]
        target.read(copy.name, copy.begin, host_view(data))
        return data

    writers = [copy.peer for copy in outgoing]
    exchange = MessageExchange(world, wire, writers, read, num_outgoing=_NUM_OUTGOING)

    def move() -> None:
        incoming = [_copies_of(world, what, source, names) for source in copies.sources]
        for of_source in incoming:
            target.reserve((copy.name, copy.begin, copy.end) for copy in of_source)
        exchange.open()
        _receive(exchange, incoming, target)
        exchange.finish()

    try:
        world.settle(what, move)
    finally:
        exchange.close()


def _receive(exchange: MessageExchange, incoming: Sequence[Sequence[_Copy]], target: MemoryTarget) -> None:
    """Receives the copies of each source, and writes them."""
    # One part of each source at a time, as each source sends one to each of its targets in turn.
    batches = [[copy for copy in batch if copy is not None] for batch in zip_longest(*incoming)]
    messages = [[(copy.peer, copy.nbytes) for copy in batch] for batch in batches]
    lengths = [sum(copy.nbytes for copy in batch) for batch in batches]
    buffers = BufferRing(_NUM_AHEAD, lengths, pinned=False)
    received = exchange.receive(messages, buffers, num_ahead=_NUM_AHEAD)
    for batch, (arrived, data) in zip(batches, received, strict=True):
        exchange.wait(arrived, "copies of other hosts' shares")
        for copy, content in zip(batch, data, strict=True):
            target.write(copy.name, copy.begin, host_view(content))


def _copies_of(world: World, what: str, source: int, names: Sequence[str]) -> list[_Copy]:
    packed = require_left(what, world.take_bytes(what, _PLACE, source, keep=True), source)
    parts = json.loads(zlib.decompress(packed))
    return [_Copy(source, *part) for part in _named(parts, names)]


def _named(parts: Sequence[Sequence[int]], names: Sequence[str]) -> list[tuple[str, int, int]]:
    return [(names[file], begin, end) for file, begin, end in parts]
