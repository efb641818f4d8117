"""Collects the facts of all ranks, and measures the rates between their hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from fastload.comm.clocks import compare_clocks
from fastload.comm.launch import Launch, join_job
from fastload.comm.world import World
from fastload.errors import CheckpointNotFound, FastloadError, StorageError
from fastload.formats.names import NAMES
from fastload.loading.access import Access, agree_on_access
from fastload.options import LoadOptions, Patience
from fastload.planning.doctor.facts import Facts, look_around
from fastload.planning.doctor.latency import Answers, measure_answers
from fastload.storage import Location, PatientStorage, open_storage
from fastload.transfer.links import Links
from fastload.transfer.plan import choose_strategy

_LIMIT_S = 60.0  # without progress
_LINK_LIMIT_S = 15.0  # to connect, and for each message
_AIM_S = 1.0  # duration of the measurement on the slowest link
_MESSAGE_BYTES = 4 << 20
_FEWEST, _MOST = 4, 1024
_IN_FLIGHT = 2


@dataclass(frozen=True)
class Opening:
    """The result of opening a checkpoint.

    Attributes:
        path: Its path or URL, for messages.
        is_local: Whether it is on a file system.
        format: Format of the checkpoint; empty if there is none.
        nbytes: Size of the checkpoint.
        num_files: Number of its files.
        strategy: The strategy of a load into host memory.
        why: The reason for the strategy.
        notes: Why a rank cannot read, by rank.
        answers: How storage answered the first rank that reads; None of local files, or if a read failed.
        problem: Why it could not be opened; empty if it could.
        is_missing: Whether there is no checkpoint.
    """

    path: str
    is_local: bool
    format: str = ""
    nbytes: int = 0
    num_files: int = 0
    strategy: str = ""
    why: str = ""
    notes: Mapping[int, str] = field(default_factory=dict)
    answers: Answers | None = None
    problem: str = ""
    is_missing: bool = False


@dataclass(frozen=True)
class HostRate:
    """The rate at which a host received from the previous one while it sent to the next one.

    Attributes:
        host: Name of the host.
        source: Name of the previous host.
        bytes_per_s: The rate; 0 if nothing arrived.
        problem: Why nothing arrived; empty if it did.
    """

    host: str
    source: str
    bytes_per_s: float
    problem: str = ""


@dataclass(frozen=True)
class Site:
    """The findings of all ranks together.

    Attributes:
        facts: The facts of each rank.
        launcher: ``torchrun``, ``srun`` or ``none``.
        met_s: Seconds until the ranks had found each other.
        clocks_s: Offset of each rank's clock from rank 0's.
        rates: Rates between hosts; empty for a single host.
        opening: The result of opening the given checkpoint; None without one.
        staging_bytes: Limit of a load's memory on each rank, beyond the state.
    """

    facts: list[Facts]
    launcher: str
    met_s: float
    clocks_s: list[float]
    rates: list[HostRate]
    opening: Opening | None
    staging_bytes: int


def examine(launch: Launch, location: Location | None, options: LoadOptions) -> Site:
    """Examines all ranks of a job. Needs no process group, so it can explain why there is none.

    A step that fails is reported in its result.

    Args:
        launch: This process's rank in the job.
        location: A checkpoint, or a directory for checkpoints; None for none.
        options: Options of a load.

    Returns:
        The findings, the same on all ranks.

    Raises:
        WorldError: The ranks did not find each other.
        PeerError: A rank died, or was stuck.
    """
    began = time.monotonic()
    worlds = join_job(launch, "looking around", "opening a checkpoint", timeout_s=_LIMIT_S)
    world = next(worlds)
    met_s = time.monotonic() - began
    with world.together():
        with world.step("looking around") as step:
            step.answer(asdict(look_around(world.rank, launch.master_addr, location)))
        facts = [Facts.from_dict(fields) for fields in step.answers]
        machines = [one.machine for one in facts]
        rates = measure_rates(world, [one.host for one in facts], machines)
        clocks_s = compare_clocks(world, machines, time.time)
    world.acknowledge()
    opening = _open(next(worlds), location, options) if location is not None else None
    return Site(facts, launch.launcher, met_s, clocks_s, rates, opening, options.staging_bytes)


def _open(world: World, location: Location, options: LoadOptions) -> Opening:
    def connect() -> PatientStorage:
        storage = open_storage(location, NAMES, io=options.io, patience=Patience(timeout_s=_LIMIT_S / 2))
        return PatientStorage(storage, Patience(1, _LIMIT_S / 6))

    begun = Opening(str(location), is_local=not location.scheme)
    try:
        with world.together():
            access = agree_on_access(world, location.url, connect, {"path": location.given})
            answers = None if begun.is_local else _measure(world, access)
        world.acknowledge()
        access.storage.close()
        choice = choose_strategy(
            options.strategy,
            world_size=world.size,
            readers=access.readers,
            hosts=access.hosts,
            shared=access.shared,
            fast_links=False,
        )
    except CheckpointNotFound as error:
        return replace(begun, problem=str(error), is_missing=True)
    except FastloadError as error:
        return replace(begun, problem=f"{type(error).__name__}: {error}")
    return replace(
        begun,
        format=access.stored.format,
        nbytes=access.stored.nbytes,
        num_files=len(access.stored.files),
        strategy=choice.strategy,
        why=choice.why,
        notes=dict(access.notes),
        answers=answers,
    )


def _measure(world: World, access: Access) -> Answers | None:
    """Has the first rank that reads measure requests for the largest file."""
    largest = max(access.stored.files, key=lambda file: file.nbytes)
    answers: Answers | None = None
    with world.step("measuring requests") as step:
        if world.rank == access.readers[0] and largest.nbytes:
            with suppress(StorageError):  # a load will name it
                answers = measure_answers(access.storage, largest)
        step.answer(asdict(answers) if answers is not None else None)
    found = step.answers[access.readers[0]]
    return Answers(**found) if found is not None else None


def measure_rates(world: World, hosts: Sequence[str], machines: Sequence[str]) -> list[HostRate]:
    """Sends bytes around a ring of the hosts, over one connection from each to the next, all at once.

    Args:
        world: The ranks; all of them call this.
        hosts: Host name of each rank.
        machines: Identifier of each rank's host.

    Returns:
        One rate for each host, the same on all ranks; empty for a single host.

    Raises:
        FastloadError: A rank did not answer.
    """
    leaders = [machines.index(one) for one in dict.fromkeys(machines)]
    if len(leaders) == 1:
        return []
    number = leaders.index(world.rank) if world.rank in leaders else None
    ring = _Ring(number, len(leaders)) if number is not None else None
    try:
        with world.step("finding the other hosts") as finding:
            finding.answer(ring.open() if ring else {})
        if ring:
            ring.connect([finding.answers[leader] for leader in leaders])
        with world.step("trying the links") as trying:
            trying.answer(ring.trial() if ring else 0.0)
        rates = [trying.answers[leader] for leader in leaders]
        count = min(_MOST, max(_FEWEST, round(_AIM_S * min(rates) / _MESSAGE_BYTES)))
        with world.step("measuring the links") as measuring:
            measuring.answer(asdict(ring.result(hosts, leaders, count)) if ring else {})
    finally:
        if ring:
            ring.links.drop()
    return [HostRate(**measuring.answers[leader]) for leader in leaders]


class _Ring:
    """A host in a ring: it receives bytes from the previous one and sends them to the next one.

    Args:
        number: Number of this host.
        size: Number of hosts, at least two.
    """

    def __init__(self, number: int, size: int) -> None:
        self.links = Links(number, timedelta(seconds=_LINK_LIMIT_S))
        self.previous, self.following = (number - 1) % size, (number + 1) % size
        self.number = number
        self.problem = ""

    def open(self) -> str:
        try:
            return self.links.open({self.previous, self.following})
        except FastloadError as error:
            self.problem = str(error)
            return ""

    def connect(self, addresses: Sequence[str]) -> None:
        if not all(addresses):
            self.problem = self.problem or "another host cannot be connected to"
            return
        try:
            self.links.find(dict(enumerate(addresses)))
            self.links.connect(give_up=lambda: False)
        except (FastloadError, RuntimeError) as error:
            self.problem = str(error)

    def trial(self) -> float:
        self._pass_on(1)  # warms up the connection and the memory
        return self._pass_on(_IN_FLIGHT)

    def result(self, hosts: Sequence[str], leaders: Sequence[int], count: int) -> HostRate:
        host, source = hosts[leaders[self.number]], hosts[leaders[self.previous]]
        rate = self._pass_on(count)
        return HostRate(host, source, rate, self.problem)

    def _pass_on(self, count: int) -> float:
        """Sends and receives `count` messages; returns bytes per second, 0 if a message is lost."""
        if self.problem:
            return 0.0
        outgoing = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        incoming = [torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(_IN_FLIGHT)]
        limit = timedelta(seconds=_LINK_LIMIT_S)
        began, works = time.perf_counter(), list[Any]()
        try:
            for index in range(count):
                works.append(self.links.receive(incoming[index % _IN_FLIGHT], self.previous, 0))
                works.append(self.links.send(outgoing, self.following, 0))
                if len(works) >= 2 * _IN_FLIGHT:
                    works.pop(0).wait(limit)
                    works.pop(0).wait(limit)
            for work in works:
                work.wait(limit)
        except RuntimeError as error:
            self.problem = f"nothing came within {_LINK_LIMIT_S:.0f} s: {str(error).partition(chr(10))[0]}"
            return 0.0
        return count * _MESSAGE_BYTES / (time.perf_counter() - began)
