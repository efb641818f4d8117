"""The memory tier of a training: saves to host memory, restores, flushes to storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import xxhash

from fastload.base.threads import Task, raise_first
from fastload.comm.group import join, separate_call
from fastload.comm.observers import Observers, observe
from fastload.comm.world import Decisions, World
from fastload.errors import FastloadError, OptionError, may_be_gone
from fastload.ext.memory.flush import EmergencyFlush, flush, newer_than
from fastload.ext.memory.folder import HostDirectory, JobFolder, find_memory, remove_dead
from fastload.ext.memory.restore import InMemoryCheckpoint, load, survey
from fastload.ext.memory.run import RunName, agree_on_run
from fastload.ext.memory.save import TierSaveCall, finish
from fastload.ext.memory.target import MemoryTarget
from fastload.options import SaveOptions
from fastload.report import SaveReport
from fastload.saving.background import FinishedSave
from fastload.saving.save import BegunSave, begin
from fastload.saving.snapshot import BufferPool
from fastload.storage import Target
from fastload.training.retention import Lineage, Point
from fastload.training.tier import Found, TierJob

_log = logging.getLogger(__name__)

LEFT_S = 24 * 3600.0
"""Seconds after which the next job removes the remains of a dead job from a host."""

_ELEMENT_BYTES = 16  # blocks of shares must end between elements


class MemorySave:
    """A save to memory, in the background; a `RunningSave`.

    Args:
        work: Finishes it.
        warn: Called with its error, or that of `on_report`, and whether the save has succeeded.

    Attributes:
        report: Its report once it has succeeded; otherwise None.
        error: Why it, or `on_report`, failed, as text; otherwise empty.
    """

    def __init__(
        self, work: Callable[[], FinishedSave], warn: Callable[[BaseException, bool], object]
    ) -> None:
        self.report: SaveReport | None = None
        self.error = ""
        self._warn = warn
        self._ended = threading.Event()
        Task(lambda: self._run(work), "fastload-memory").start()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended; returns whether it has."""
        return self._ended.wait(timeout_s)

    def _run(self, work: Callable[[], FinishedSave]) -> None:
        try:
            finished = work()
            self.report = finished.report
            finished.tell()
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
            self._warn(error, self.report is not None)
        finally:
            del work
            self._ended.set()


@dataclass(frozen=True)
class FoundInMemory:
    """An in-memory checkpoint; members are as in `Found`.

    Attributes:
        checkpoint: The checkpoint.
        group: The ranks, as for `fastload.load`.
        folder: The job's folder on this host.
    """

    checkpoint: InMemoryCheckpoint
    group: Any
    folder: JobFolder
    source = "memory"

    @property
    def point(self) -> Point:
        return self.checkpoint.manifest.point

    @property
    def problem(self) -> str:
        return self.checkpoint.problem

    @property
    def lineage(self) -> Lineage:
        return self.checkpoint.manifest.lineage

    def load(self, arguments: Mapping[str, Any]) -> Any:
        given = dict(arguments)
        group, options = given.pop("process_group"), given.pop("options")
        given.pop("storage_options")
        return load(group, self.folder, self.checkpoint, options, given)

    def blames(self, error: BaseException) -> bool:
        return may_be_gone(error)


def open_tier(job: TierJob, *, directory: str) -> MemoryTier:
    """Opens the memory tier of a job on all ranks.

    Args:
        job: The job.
        directory: A directory on this host, or ``auto``.

    Raises:
        FastloadError: Some host has no directory for it, or an option is invalid with it.
    """
    folder: JobFolder | None = None
    try:
        name = RunName(job.catalog)
        run, is_writer = agree_on_run(job, name)
        with job.world.ending(), job.world.step(f"making room in memory for {job.catalog.root}") as step:
            if is_writer:
                name.write(run)
            folder = _open_folder(job, directory, run)
            step.answer(folder.host_directory)
    except BaseException:
        if folder is not None:
            _close(folder, remove=False)
        raise
    return MemoryTier(job, folder, [HostDirectory(*directory) for directory in step.answers])


def _open_folder(job: TierJob, directory: str, run: str) -> JobFolder:
    """Opens the job's folder on this host; removes those that dead jobs have left.

    Raises:
        OptionError: An option is invalid with a memory tier.
        StorageError: There is no directory for it.
    """
    block_bytes = job.options.block_bytes
    if block_bytes is not None and block_bytes % _ELEMENT_BYTES:
        raise OptionError(f"block_bytes={block_bytes!r}: must be a multiple of {_ELEMENT_BYTES} with memory=")
    memory = find_memory() if directory == "auto" else directory
    for dead in remove_dead(memory, older_s=LEFT_S, but=run):
        _log.info("removed %s, which a dead job left behind: %d bytes", dead.path, dead.nbytes)
    return JobFolder(memory, run, job.catalog.root.url)


def _close(folder: JobFolder, *, remove: bool) -> None:
    try:
        folder.close(remove=remove)
    except FastloadError as error:
        _log.warning("cannot remove the memory tier of this job: %s", error)


def _options_in_memory(options: SaveOptions) -> SaveOptions:
    """Returns how to save to memory: all ranks write."""
    return replace(
        options,
        writers="all",
        shared=True,
        overwrite=True,
        check_replicas="small" if options.check_replicas == "full" else options.check_replicas,
        trace=None,
        progress=None,
    )


class MemoryTier:
    """The memory tier of a job, on one rank; a `SaveTier`.

    Args:
        job: The job.
        folder: The job's folder on this host.
        directories: The host directory of each rank.

    Attributes:
        last: The last save, or None.
    """

    name = "memory"

    def __init__(self, job: TierJob, folder: JobFolder, directories: Sequence[HostDirectory]) -> None:
        self.last: MemorySave | None = None
        self._job = job
        self._folder = folder
        self._directories = directories
        self._num_begun = 0
        self._buffers = BufferPool(1)
        self._unit = cache(partial(_unit, job.catalog.target))
        what = "waiting for rank 0: has the last save to memory ended?"
        self._decisions = Decisions(job.world, "memory", what)
        self._asked = -1, False  # the last step, and whether a save could begin at it
        self._flushed: Point | None = None
        self._emergency = EmergencyFlush(self._join("flushing the memory tier to storage"), self._flush)

    @property
    def num_hosts(self) -> int:
        """Number of machines."""
        return len({directory.machine for directory in self._directories})

    def admits(self, step: int) -> bool:
        """Whether the last save has ended on rank 0."""
        if step != self._asked[0]:
            if self._job.world.rank == 0:
                self._decisions.post(self.last is None or self.last.done())
            self._asked = step, self._decisions.take()
        return self._asked[1]

    def _join(self, what: str) -> World:
        return join(self._job.group, call=what, timeout_s=self._job.options.timeout_s)

    def save(
        self,
        point: Point,
        lineage: Lineage,
        state: Any,
        metadata: Mapping[str, str],
        *,
        problem: Exception | None = None,
    ) -> MemorySave:
        """Saves a state, with copies on other hosts, as `SaveTier.save`."""
        began = time.perf_counter()
        self.wait()
        is_first = self.last is None or not self.last.error  # only the first failure in a row is a warning
        self._num_begun += 1
        name = xxhash.xxh3_64_hexdigest(f"{lineage.incarnation} {self._num_begun}".encode())
        step, world = point.step, self._join(f"saving step {point.step} to memory")
        call = TierSaveCall(
            world,
            self._job.catalog.path(step),
            metadata=metadata,
            storage_options=None,
            options=_options_in_memory(self._job.options),
            raise_earlier=None,
            observers=Observers(),
            began=began,
            problem=problem,
            pool=self._buffers,
            step=step,
            tier="memory",
            name=name,
            point=point,
            lineage=lineage,
            num_copies=self._job.num_copies,
            directories=self._directories,
            job=self._folder,
            target=MemoryTarget(self._folder, name, self._folder.place(name), self._unit),
        )
        errors: list[BaseException] = []
        begun: BegunSave | None = None
        try:
            call = replace(call, observers=observe(world, None))
            begun = begin(call, state)
        except Exception as error:  # `begin` has notified the other ranks; the training continues
            errors.append(error)

        def work() -> FinishedSave:
            raise_first(errors)
            assert begun is not None
            return finish(call, begun)

        level = logging.WARNING if self._job.world.rank == 0 and is_first else logging.DEBUG

        def warn(error: BaseException, is_saved: bool) -> None:
            outcome = "is saved" if is_saved else "is not saved"
            _log.log(level, "step %d %s to memory: %s", step, outcome, error)

        self.last = MemorySave(work, warn)
        return self.last

    def wait(self) -> None:
        """Waits until the last save has ended."""
        if self.last is not None:
            self.last.wait()

    def survey(self) -> list[FoundInMemory]:
        """Returns the in-memory checkpoints on all hosts, complete or not, oldest first."""
        self.wait()
        job, what = self._job, f"looking for in-memory checkpoints of {self._job.catalog.root}"
        with separate_call(job.group, what, timeout_s=job.options.timeout_s) as world:
            return [
                FoundInMemory(checkpoint, job.group, self._folder)
                for checkpoint in survey(world, self._folder.records)
            ]

    def restored(self, found: Found | None) -> None:
        """Retires all other checkpoints on this host."""
        try:
            self._folder.retire(cast(FoundInMemory, found).checkpoint.name if found is not None else "")
        except FastloadError as error:
            _log.warning("cannot remove old in-memory checkpoints: %s", error)

    def arm(self) -> None:
        """Flushes the newest checkpoint to storage after a while, unless the training saves before."""
        self._emergency.arm()

    def yield_to_training(self) -> None:
        """Gives up the flush; if it has begun, waits for its end."""
        self._emergency.yield_to_training()

    def _flush(self, world: World) -> None:
        """Writes the newest checkpoint to storage, if storage has none as new; on all ranks.

        Raises:
            FastloadError: It failed.
        """
        self.wait()
        job, checkpoints = self._job, survey(world, self._folder.records)
        with world.step() as step:
            step.answer(self._choose(checkpoints) if world.rank == 0 else "")
        chosen = next((checkpoint for checkpoint in checkpoints if checkpoint.name == step.answers[0]), None)
        if chosen is None:
            return
        flush(world, self._folder, chosen, partial(job.catalog.target, chosen.step), job.options)
        self._flushed = chosen.manifest.point
        level = logging.INFO if world.rank == 0 else logging.DEBUG
        _log.log(level, "step %d was flushed from memory to storage", chosen.step)

    def _choose(self, checkpoints: Sequence[InMemoryCheckpoint]) -> str:
        """Returns the name of the checkpoint to flush; empty if storage has one that is as new."""
        newer = newer_than(self._job.catalog.stored(), checkpoints)
        return next((checkpoint.name for checkpoint in reversed(newer) if not checkpoint.problem), "")

    def close(self, *, goes_well: bool, lacking: Point | None, flushes: bool) -> None:
        """Flushes what storage lacks, and removes the in-memory checkpoints that it has then."""
        if not goes_well:
            self._emergency.disarm()
            return self._close(wait_s=self._job.world.grace_s)
        if flushes and not self._has_flushed(lacking):
            self._emergency.write_now()
        self._emergency.yield_to_training()
        self._close(remove=self._has_flushed(lacking))

    def _has_flushed(self, lacking: Point | None) -> bool:
        return lacking is None or (self._flushed is not None and self._flushed >= lacking)

    def _close(self, *, remove: bool = False, wait_s: float | None = None) -> None:
        """Closes the tier.

        Args:
            remove: Whether to remove the job's checkpoints from this host; if not, the next start finds them.
            wait_s: Longest wait for the last save; None waits until it has ended.
        """
        self._decisions.close()
        if self.last is None or self.last.wait(wait_s):  # otherwise the folder closes with the process
            _close(self._folder, remove=remove)


def _unit(open_target: Callable[[int], Target], largest_bytes: int) -> int | None:
    """Returns the unit in which storage cuts files; None if storage does not answer."""
    with suppress(FastloadError), closing(open_target(0)) as target:
        return target.align_bytes(largest_bytes)
    return None
