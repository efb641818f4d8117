"""Collects the facts of all ranks, and measures the rates between their hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from fastload.comm.group import Launch, join_job
from fastload.comm.traces import compare_clocks
from fastload.comm.world import World
from fastload.doctor.facts import Facts, look_around
from fastload.errors import CheckpointNotFound, FastloadError
from fastload.formats.names import NAMES
from fastload.loading.access import Access, agree_on_access
from fastload.options import LoadOptions
from fastload.storage import Location, PatientStorage, open_storage
from fastload.transfer.links import Links
from fastload.transfer.plan import choose_strategy

_LIMIT_S = 60.0  # without progress
_LINK_LIMIT_S = 15.0  # for connecting, and for a message
_AIM_S = 1.0  # what the slowest link is measured for
_MESSAGE_BYTES = 4 << 20
_FEWEST, _MOST = 4, 1024
_IN_FLIGHT = 2


@dataclass(frozen=True)
class Opening:
    """What opening a checkpoint came to.

    Attributes:
        path: What was asked for, to be shown.
        is_local: Whether it is on a file system.
        format: Of the checkpoint; empty if there is none.
        nbytes: Of the checkpoint.
        num_files: Of the checkpoint.
        strategy: How a load into host memory would go.
        why: The reason.
        notes: For each rank that cannot read, why.
        problem: Why it could not be opened; empty if it could.
        is_missing: Whether that is because nothing is there that is a checkpoint.
    """

    path: str
    is_local: bool
    format: str = ""
    nbytes: int = 0
    num_files: int = 0
    strategy: str = ""
    why: str = ""
    notes: Mapping[int, str] = field(default_factory=dict)
    problem: str = ""
    is_missing: bool = False


@dataclass(frozen=True)
class HostRate:
    """What came to a host from the one before it, while it sent as much to the one behind it.

    Attributes:
        host: Its name.
        source: The other one's.
        bytes_per_s: How fast; 0 if nothing came.
        problem: Why nothing came; empty if it did.
    """

    host: str
    source: str
    bytes_per_s: float
    problem: str = ""


@dataclass(frozen=True)
class Site:
    """What all ranks together found.

    Attributes:
        facts: Of each rank.
        launcher: ``torchrun``, ``srun`` or ``none``.
        met_s: What it took the ranks to find each other.
        clocks_s: What takes each rank's clock to rank 0's; None where that could not be found out.
        rates: Between hosts; nothing if there is one only.
        opening: Of the checkpoint that was asked for; None if none was.
        staging_bytes: What a load takes at most on each rank, beyond the state.
    """

    facts: list[Facts]
    launcher: str
    met_s: float
    clocks_s: list[float | None]
    rates: list[HostRate]
    opening: Opening | None
    staging_bytes: int


def examine(launch: Launch, location: Location | None, options: LoadOptions) -> Site:
    """Has all ranks of a job look around.

    A step that fails is told of in what it was to find out. No process group is made: where one could not
    be, this says why.

    Args:
        launch: This process's place in the job.
        location: A checkpoint, or a directory for checkpoints; None for none.
        options: How it would be loaded.

    Returns:
        The same on all ranks.

    Raises:
        WorldError: The ranks did not find each other.
        PeerError: A rank ended, or was stuck.
    """
    began = time.monotonic()
    worlds = join_job(launch, "looking around", "opening a checkpoint", timeout_s=_LIMIT_S)
    world = next(worlds)
    met_s = time.monotonic() - began
    with world.together():
        found = world.agree(
            "looking around", lambda: asdict(look_around(world.rank, launch.master_addr, location))
        )
        facts = [Facts.from_dict(fields) for fields in found]
        machines = [one.machine for one in facts]
        rates = measure_rates(world, [one.host for one in facts], machines)
        offset = compare_clocks(world, machines, time.time)
        clocks_s = world.agree("comparing clocks", lambda: offset)
    world.acknowledge()
    opening = _open(next(worlds), location, options) if location is not None else None
    return Site(facts, launch.launcher, met_s, clocks_s, rates, opening, options.staging_bytes)


def _open(world: World, location: Location, options: LoadOptions) -> Opening:
    def connect() -> PatientStorage:
        attempt_s = _LIMIT_S / 6
        storage = open_storage(location, NAMES, io=options.io, attempt_s=attempt_s)
        return PatientStorage(storage, retries=1, timeout_s=attempt_s)

    begun = Opening(str(location), is_local=not location.scheme)
    try:
        with world.together():
            access = agree_on_access(world, location.url, connect, {"path": location.given})
        world.acknowledge()
        access.storage.close()
        return _opened(begun, access, world.size, options)
    except CheckpointNotFound as error:
        return replace(begun, problem=str(error), is_missing=True)
    except FastloadError as error:
        return replace(begun, problem=f"{type(error).__name__}: {error}")


def _opened(begun: Opening, access: Access, num_ranks: int, options: LoadOptions) -> Opening:
    manifest = access.manifest
    decision = choose_strategy(
        options.strategy,
        world_size=num_ranks,
        readers=access.readers,
        hosts=access.hosts,
        shared=access.shared,
        fast_links=False,
    )
    return replace(
        begun,
        format=manifest.format,
        nbytes=manifest.nbytes,
        num_files=len(manifest.files),
        strategy=decision.strategy,
        why=decision.why,
        notes=dict(access.notes),
    )


def measure_rates(world: World, hosts: Sequence[str], machines: Sequence[str]) -> list[HostRate]:
    """Sends bytes around a ring of the hosts; one connection from each to the next, all at a time.

    Args:
        world: The ranks, all of which call this.
        hosts: Name of each rank's host.
        machines: What the ranks of one host have in common, and no others.

    Returns:
        One for each host, the same on all ranks; nothing if there is only one host.

    Raises:
        FastloadError: A rank did not answer.
    """
    leaders = [machines.index(one) for one in dict.fromkeys(machines)]
    if len(leaders) == 1:
        return []
    number = leaders.index(world.rank) if world.rank in leaders else None
    ring = _Ring(number, len(leaders)) if number is not None else None
    try:
        opened = world.agree("finding the other hosts", ring.open if ring else dict)
        if ring:
            ring.connect([opened[leader] for leader in leaders])
        trials = world.agree("trying the links", lambda: ring.trial() if ring else 0.0)
        rates = [trials[leader] for leader in leaders]
        count = min(_MOST, max(_FEWEST, round(_AIM_S * min(rates) / _MESSAGE_BYTES)))
        found = world.agree(
            "measuring the links", lambda: asdict(ring.result(hosts, leaders, count)) if ring else {}
        )
    finally:
        if ring:
            ring.links.drop()
    return [HostRate(**found[leader]) for leader in leaders]


class _Ring:
    """A host's place among the others: it gets bytes from the one before and sends them to the one behind.

    Args:
        number: Of this host.
        size: How many there are, two at least.
    """

    def __init__(self, number: int, size: int) -> None:
        self.links = Links(number, timedelta(seconds=_LINK_LIMIT_S))
        self.before, self.behind = (number - 1) % size, (number + 1) % size
        self.number = number
        self.problem = ""

    def open(self) -> dict[str, list[str]]:
        try:
            return self.links.open({self.before, self.behind})
        except FastloadError as error:
            self.problem = str(error)
            return {}

    def connect(self, addresses: Sequence[dict[str, list[str]]]) -> None:
        if not all(addresses):
            self.problem = self.problem or "another host cannot be connected to"
            return
        try:
            self.links.find(dict(enumerate(addresses)))
            self.links.connect(give_up=lambda: False)
        except (FastloadError, RuntimeError) as error:
            self.problem = str(error)

    def trial(self) -> float:
        self._pass_on(1)  # the first message finds its way, and memory is touched for the first time
        return self._pass_on(_IN_FLIGHT)

    def result(self, hosts: Sequence[str], leaders: Sequence[int], count: int) -> HostRate:
        host, source = hosts[leaders[self.number]], hosts[leaders[self.before]]
        rate = self._pass_on(count)
        return HostRate(host, source, rate, self.problem)

    def _pass_on(self, count: int) -> float:
        """Sends and receives so many messages; returns their bytes per second, 0 if any did not come."""
        if self.problem:
            return 0.0
        outgoing = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        incoming = [torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(_IN_FLIGHT)]
        limit = timedelta(seconds=_LINK_LIMIT_S)
        began, works = time.perf_counter(), list[Any]()
        try:
            for index in range(count):
                works.append(self.links.receive(incoming[index % _IN_FLIGHT], self.before, 0))
                works.append(self.links.send(outgoing, self.behind, 0))
                if len(works) >= 2 * _IN_FLIGHT:
                    works.pop(0).wait(limit)
                    works.pop(0).wait(limit)
            for work in works:
                work.wait(limit)
        except RuntimeError as error:
            self.problem = f"nothing came within {_LINK_LIMIT_S:.0f} s: {str(error).partition(chr(10))[0]}"
            return 0.0
        return count * _MESSAGE_BYTES / (time.perf_counter() - began)
