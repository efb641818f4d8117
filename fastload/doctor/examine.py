"""All ranks look around, tell each other what they found, and measure what only several can."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from fastload.comm.group import join_job
from fastload.comm.launch import Launch
from fastload.comm.traces import compare_clocks
from fastload.comm.world import World
from fastload.doctor.facts import Facts, look_around
from fastload.doctor.rates import HostRate, measure_rates
from fastload.errors import CheckpointNotFound, FastloadError
from fastload.formats.names import NAMES
from fastload.loading.access import Access, agree_on_access
from fastload.options import LoadOptions
from fastload.storage import Location, PatientStorage, open_storage
from fastload.transfer.strategy import choose_strategy

__all__ = ["Opening", "Site", "examine"]

_LIMIT_S = 60.0  # without progress


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
