"""The memory tier of a run seen from outside of it, for ``fastload flush`` and ``fastload ls``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from fastload.comm.failures import require_same
from fastload.comm.group import Meeting, separate_call
from fastload.comm.world import World
from fastload.errors import (
    FastloadError,
    IncompleteCheckpoint,
    OptionError,
    PeerError,
    StorageError,
    WorldError,
    proves_damage,
    some_of,
)
from fastload.ext.memory.flush import flush, newer_than
from fastload.ext.memory.folder import JobFolder, find_jobs, find_memory, identify
from fastload.ext.memory.restore import HostDamage, InMemoryCheckpoint, find_damage, survey
from fastload.ext.memory.run import RunName
from fastload.options import LoadOptions, Patience, SaveOptions
from fastload.storage import locate, name_of
from fastload.training.catalog import Catalog
from fastload.training.retention import Lineage, Point, StoredCheckpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """The outcome of a flush after a crash.

    Attributes:
        root: Root of the run.
        step: The step that was written; None if storage lacks nothing.
        nbytes: Its bytes.
        why: Why nothing was written; empty if a step was.
    """

    root: str
    step: int | None = None
    nbytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class _Host:
    """What one process of the command found on its host.

    Attributes:
        name: Name of the host.
        memory: Directory of the memory tier.
        identity: Identity of that directory.
        is_known: Whether the run has a folder there.
        is_alive: Whether a process of the run lives.
    """

    name: str
    memory: str
    identity: Sequence[str]
    is_known: bool
    is_alive: bool

    def __str__(self) -> str:
        return f"{self.name}:{self.memory}"


def recover(root: str | os.PathLike[str], memory: str) -> Recovery:
    """Writes the newest complete in-memory checkpoint of a dead run to its root, unless storage has it.

    One process on each host of the job calls it. The memory stays as it is, so that the run can be restored
    from there.

    Args:
        root: Root of the run.
        memory: As for a `CheckpointManager`.

    Raises:
        OptionError: Several processes run on one host.
        WorldError: A process of the run lives.
        IncompleteCheckpoint: The hosts lack parts of a newer checkpoint than those on storage.
        FastloadError: It could not be written.
    """
    with Meeting(None, f"flushing the memory tier of {name_of(root)}") as meeting:
        options = meeting.choose(None, SaveOptions)
        location = locate(root)
    world = meeting.world
    catalog = Catalog(location, None, Patience(options.retries, world.patience_s / 2))
    with ExitStack() as stack:
        with world.ending():
            run = _find_run(world, catalog)
            if not run:
                return Recovery(location.url, why="no training has used a memory tier with this root")
            hosts = _look(world, run, memory)
            _require_dead(hosts, location.url)
            folder = stack.enter_context(_open_folder(world, hosts[world.rank], run, location.url))
            chosen, why = _choose_together(world, catalog, survey(world, folder.records), hosts)
        if chosen is None:
            return Recovery(location.url, why=why)
        _write(folder, chosen, catalog, options)
    return Recovery(location.url, chosen.step, chosen.manifest.nbytes)


class Surveyed(NamedTuple):
    """An in-memory checkpoint, to list it; members are as in `Found`."""

    point: Point
    problem: str
    lineage: Lineage
    source: str = "memory"


class MemorySurvey:
    """The in-memory checkpoints of a run, to list them; `survey` and `name` are as in `SaveTier`.

    Args:
        world: The ranks, in a call that goes on.
        run: Name of the run.
        memory: Directory of the memory tier on this host.
    """

    name = "memory"

    def __init__(self, world: World, run: str, memory: str) -> None:
        self._world = world
        self._run = run
        self._memory = memory

    def survey(self) -> list[Surveyed]:
        """Returns those on the hosts of all ranks, complete or not, oldest first."""
        return [
            Surveyed(checkpoint.manifest.point, checkpoint.problem, checkpoint.manifest.lineage)
            for checkpoint in survey(self._world, self._records)
        ]

    def _records(self) -> dict[str, bytes]:
        jobs = [job for job in find_jobs(self._memory) if os.path.basename(job.path) == self._run]
        return {name: text for job in jobs for name, text in job.records if text}


def survey_run(world: World, catalog: Catalog, memory: str) -> MemorySurvey | None:
    """Returns the memory tier of a run, on all ranks; None if the run has none.

    Args:
        world: The ranks.
        catalog: The checkpoints of the run on storage.
        memory: As for a `CheckpointManager`.

    Raises:
        FastloadError: Some rank failed.
    """
    run = _find_run(world, catalog)
    if not run:
        return None
    with world.step("looking for the memory of the hosts") as step:
        step.answer(_directory(memory))
    return MemorySurvey(world, run, step.answers[world.rank])


def _directory(memory: str) -> str:
    return find_memory() if memory == "auto" else os.path.abspath(memory)


def _find_run(world: World, catalog: Catalog) -> str:
    """Returns the name of the run; empty if the root has none."""
    with world.step(f"looking for the name of the run in {catalog.root}") as step:
        run = RunName(catalog).read() if world.rank == 0 else ""
        step.answer([{"root": catalog.root.given}, run])
    require_same([same for same, _ in step.answers])
    return str(step.answers[0][1])


def _look(world: World, run: str, memory: str) -> list[_Host]:
    """Looks for the run in the memory of each host."""
    with world.step("looking for the run in the memory of the hosts") as step:
        place = _directory(memory)
        jobs = [job for job in find_jobs(place) if os.path.basename(job.path) == run]
        is_alive = any(job.is_alive for job in jobs)
        step.answer([world.host, place, identify(place), bool(jobs), is_alive])
    return [_Host(*answer) for answer in step.answers]


def _require_dead(hosts: Sequence[_Host], root: str) -> None:
    """Raises unless there is one process on each host, and no process of the run lives."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(tuple(host.identity), []).append(rank)
    if crowded := [of_host for of_host in ranks.values() if len(of_host) > 1]:
        of_host = crowded[0]
        raise OptionError(
            f"ranks {some_of(map(str, of_host))} all run on {hosts[of_host[0]]}: start one process a host, "
            "as by srun --ntasks-per-node=1 or torchrun --nproc-per-node=1"
        )
    if alive := [str(host) for host in hosts if host.is_alive]:
        raise WorldError(
            f"processes of the run in {root} live on {some_of(alive)}: end them first. A training that lives "
            "flushes its memory by itself, after SIGTERM"
        )


@contextmanager
def _open_folder(world: World, host: _Host, run: str, root: str) -> Iterator[JobFolder]:
    """Opens the run's folder on this host, for the block; one that is empty is removed."""
    folder: JobFolder | None = None
    try:
        with world.step("opening the memory of the hosts"):
            folder = JobFolder(host.memory, run, root)
        assert folder is not None
        yield folder
    finally:
        if folder is not None:
            folder.close(remove=not host.is_known)


def _choose_together(
    world: World, catalog: Catalog, checkpoints: Sequence[InMemoryCheckpoint], hosts: Sequence[_Host]
) -> tuple[InMemoryCheckpoint | None, str]:
    """Chooses the checkpoint to write, on all ranks; None with the reason if storage lacks nothing.

    Raises:
        IncompleteCheckpoint: The hosts lack parts of a newer checkpoint than those on storage.
    """
    with world.step(f"listing the checkpoints in {catalog.root}") as step:
        step.answer(_choose(catalog.stored(), checkpoints) if world.rank == 0 else None)
    name, why = step.answers[0]
    chosen = next((checkpoint for checkpoint in checkpoints if checkpoint.name == name), None)
    if chosen is not None and chosen.problem:
        raise IncompleteCheckpoint(_lacking(chosen, hosts))
    return chosen, why


def _choose(stored: Sequence[StoredCheckpoint], checkpoints: Sequence[InMemoryCheckpoint]) -> tuple[str, str]:
    """Returns the name of the newest checkpoint that storage lacks, a complete one if there is one.

    Without one, returns why.
    """
    if newer := newer_than(stored, checkpoints):
        complete = [checkpoint for checkpoint in newer if not checkpoint.problem]
        return (complete or newer)[-1].name, ""
    if not checkpoints:
        return "", "no host has a checkpoint of this run in memory"
    newest = checkpoints[-1]
    other = newest.manifest.lineage.overtaken_by(stored)
    if other is not None and other.point <= newest.manifest.point:
        later = f"a later one went on without it and saved step {other.point.step}"
        return "", f"step {newest.step} in memory is of an earlier start of the job; {later}"
    on_storage = max(checkpoint.point for checkpoint in stored).step
    return "", f"step {on_storage} is on storage, and memory has nothing newer than step {newest.step}"


def _lacking(checkpoint: InMemoryCheckpoint, hosts: Sequence[_Host]) -> str:
    """Returns which hosts lack what of an incomplete checkpoint."""
    held = [checkpoint.holders.get(rank, ()) for rank in range(len(hosts))]
    of_hosts = [f"{host} has {some_of(map(str, held[rank])) or 'none'}" for rank, host in enumerate(hosts)]
    missing = sorted(set(checkpoint.manifest.shares).difference(*held))
    return (
        f"{checkpoint.problem}, and no checkpoint on storage is as new. "
        f"Missing: {some_of(map(str, missing))}; {'; '.join(of_hosts)}. "
        "Start this command on every host of the job"
    )


def _write(folder: JobFolder, checkpoint: InMemoryCheckpoint, catalog: Catalog, options: SaveOptions) -> None:
    """Writes a checkpoint, on all ranks; damaged blocks are taken from other hosts.

    Raises:
        FastloadError: It could not be written.
    """
    try:
        _flush(folder, checkpoint, catalog, options, {})
        return
    except FastloadError as error:
        if not _blames_copies(error, checkpoint):
            raise
        _log.warning("step %d in memory: a copy is damaged, trying another one: %s", checkpoint.step, error)
    damage = find_damage(None, folder, checkpoint, LoadOptions(timeout_s=options.timeout_s))
    _flush(folder, checkpoint, catalog, options, damage)


def _flush(
    folder: JobFolder,
    checkpoint: InMemoryCheckpoint,
    catalog: Catalog,
    options: SaveOptions,
    damage: HostDamage,
) -> None:
    what = f"writing step {checkpoint.step} from memory to {catalog.root}"
    with separate_call(None, what, timeout_s=options.timeout_s) as world:
        flush(world, folder, checkpoint, partial(catalog.target, checkpoint.step), options, damage)


def _blames_copies(error: BaseException, checkpoint: InMemoryCheckpoint) -> bool:
    """Whether some rank has found damage, or could not read its host's copy."""
    causes = error.failures.values() if isinstance(error, PeerError) else [error]
    return any(
        proves_damage(cause) or (isinstance(cause, StorageError) and checkpoint.name in cause.url)
        for cause in causes
    )
