"""The memory tier of a training: saves to host memory, restores, flushes to storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import xxhash

from fastload.base.threads import Task, raise_first
from fastload.comm.group import join, separate_call
from fastload.comm.observers import observe
from fastload.comm.world import Decisions, World
from fastload.errors import FastloadError, OptionError, StorageError
from fastload.memory_tier.flush import EmergencyFlush, flush
from fastload.memory_tier.manifest import StoredCheckpoint
from fastload.memory_tier.restore import InMemoryCheckpoint, load, survey
from fastload.memory_tier.save import TierSaveCall, finish
from fastload.options import SaveOptions
from fastload.report import SaveReport
from fastload.saving.background import FinishedSave
from fastload.saving.save import BegunSave, begin
from fastload.saving.snapshot import BufferPool
from fastload.storage import Location, Target
from fastload.storage.memory_folder import HostDirectory, JobFolder, find_memory, remove_dead
from fastload.storage.memory_target import MemoryTarget

_log = logging.getLogger(__name__)

LEFT_S = 24 * 3600.0
"""Seconds after which the next job removes the remains of a dead job from a host."""

_ELEMENT_BYTES = 16  # blocks of shares must end between elements


@dataclass(frozen=True, kw_only=True)
class TierJob:
    """The job that a memory tier belongs to.

    Attributes:
        world: The ranks of the training.
        group: Their process group, as for `fastload.load`.
        root: Root of the checkpoints.
        memory: A directory on each host, or ``auto``.
        num_copies: Number of hosts that have each share.
        options: How to save to storage.
        incarnation: A random name of this start of the job.
        run: The random name of the run, 16 hex digits.
        locate: Returns the place of the checkpoint of a step on storage.
        open_target: Opens write access to the checkpoint of a step on storage.
        list_stored: Lists the usable checkpoints on storage.
    """

    world: World
    group: Any
    root: Location
    memory: str
    num_copies: int
    options: SaveOptions
    incarnation: str
    run: str
    locate: Callable[[int], Location]
    open_target: Callable[[int], Target]
    list_stored: Callable[[], list[StoredCheckpoint]]

    @property
    def tier_options(self) -> SaveOptions:
        """How to save to memory: all ranks write."""
        options = self.options
        return replace(
            options,
            writers="all",
            shared=True,
            overwrite=True,
            check_replicas="small" if options.check_replicas == "full" else options.check_replicas,
            trace=None,
            progress=None,
        )


class TierSave:
    """A save to memory, in the background.

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
        """Whether it has ended, successfully or not."""
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


def open_tier(job: TierJob) -> MemoryTier:
    """Opens the memory tier of a job on all ranks.

    Raises:
        FastloadError: Some host has no directory for it, or an option is invalid with it.
    """
    folder: JobFolder | None = None
    try:
        with job.world.ending(), job.world.step(f"making room in memory for {job.root}") as step:
            folder = _open_folder(job)
            step.answer(folder.host_directory)
    except BaseException:
        if folder is not None:
            _close(folder, remove=False)
        raise
    return MemoryTier(job, folder, [HostDirectory(*directory) for directory in step.answers])


def _open_folder(job: TierJob) -> JobFolder:
    """Opens the job's folder on this host; removes those that dead jobs have left.

    Raises:
        OptionError: An option is invalid with a memory tier.
        StorageError: There is no directory for it.
    """
    block_bytes = job.options.block_bytes
    if block_bytes is not None and block_bytes % _ELEMENT_BYTES:
        raise OptionError(f"block_bytes={block_bytes!r}: must be a multiple of {_ELEMENT_BYTES} with memory=")
    memory = find_memory() if job.memory == "auto" else job.memory
    for dead in remove_dead(memory, older_s=LEFT_S, but=job.run):
        _log.info("removed %s, which a dead job left behind: %d bytes", dead.path, dead.nbytes)
    return JobFolder(memory, job.run, job.root.url)


def _close(folder: JobFolder, *, remove: bool) -> None:
    try:
        folder.close(remove=remove)
    except FastloadError as error:
        _log.warning("cannot remove the memory tier of this job: %s", error)


class MemoryTier:
    """The memory tier of a job, on one rank.

    Args:
        job: The job.
        folder: The job's folder on this host.
        directories: The host directory of each rank.

    Attributes:
        last: The last save, or None.
        flushed: Branch and step of the checkpoint that was flushed to storage, or None.
        emergency: The flush to storage after a signal.
    """

    def __init__(self, job: TierJob, folder: JobFolder, directories: Sequence[HostDirectory]) -> None:
        self.last: TierSave | None = None
        self.flushed: tuple[int, int] | None = None
        self._job = job
        self._folder = folder
        self._directories = directories
        self._num_begun = 0
        self._buffers = BufferPool(1)
        self._unit = cache(partial(_unit, job.open_target))
        what = "waiting for rank 0: has the last save to memory ended?"
        self._decisions = Decisions(job.world, "memory", what)
        self._asked = -1, False  # the last step, and whether a save could begin at it
        self.emergency = EmergencyFlush(self._join("flushing the memory tier to storage"), self._flush)

    @property
    def num_hosts(self) -> int:
        """Number of machines, which can be lost one by one."""
        return len({directory.machine for directory in self._directories})

    def admits(self, step: int) -> bool:
        """Whether a save can begin at a step: the last one has ended on rank 0. Same on all ranks.

        All ranks call it at the same steps. A repeated call for a step returns the same.
        """
        if step != self._asked[0]:
            if self._job.world.rank == 0:
                self._decisions.post(self.last is None or self.last.done())
            self._asked = step, self._decisions.take()
        return self._asked[1]

    def _join(self, what: str) -> World:
        return join(self._job.group, call=what, timeout_s=self._job.options.timeout_s)

    def save(
        self,
        step: int,
        branch: int,
        state: Any,
        metadata: Mapping[str, str],
        *,
        origin: tuple[int, int, str] | None = None,
        problem: Exception | None = None,
    ) -> TierSave:
        """Copies this rank's share of a state, which may change afterwards; saves it in the background.

        All errors are warnings, those of the state as well: the other ranks hear of them in the background,
        where they cannot raise. A save to storage does.

        Args:
            step: Step of the training.
            branch: With `step`, its place in the history of the run.
            state: As for `fastload.save`.
            metadata: Text to store with it.
            origin: See `HostManifest.origin`.
            problem: Why this rank cannot save; None if it can.
        """
        began = time.perf_counter()
        self.wait()
        is_first = self.last is None or not self.last.error  # only the first failure in a row is a warning
        self._num_begun += 1
        name = xxhash.xxh3_64_hexdigest(f"{self._job.incarnation} {self._num_begun}".encode())
        world = self._join(f"saving step {step} to memory")
        call = TierSaveCall(
            world,
            self._job.locate(step),
            metadata=metadata,
            storage_options=None,
            options=self._job.tier_options,
            raise_earlier=None,
            observers=observe(world, None),
            began=began,
            problem=problem,
            pool=self._buffers,
            name=name,
            branch=branch,
            step=step,
            incarnation=self._job.incarnation,
            origin=origin,
            num_copies=self._job.num_copies,
            directories=self._directories,
            job=self._folder,
            target=MemoryTarget(self._folder, name, self._folder.place(name), self._unit),
        )
        errors: list[BaseException] = []
        begun: BegunSave | None = None
        try:
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

        self.last = TierSave(work, warn)
        return self.last

    def wait(self) -> None:
        """Waits until the last save has ended."""
        if self.last is not None:
            self.last.wait()

    def survey(self) -> list[InMemoryCheckpoint]:
        """Returns the in-memory checkpoints, complete or not, oldest first. A call of all ranks.

        Raises:
            FastloadError: Some rank could not read its host's manifests.
        """
        self.wait()
        job, what = self._job, f"looking for in-memory checkpoints of {self._job.root}"
        with separate_call(job.group, what, timeout_s=job.options.timeout_s) as world:
            return survey(world, self._folder)

    def load(self, checkpoint: InMemoryCheckpoint, arguments: Mapping[str, Any]) -> Any:
        """Loads a checkpoint, with arguments of `fastload.load`; raises as `restore.load`."""
        given = dict(arguments)
        group, options = given.pop("process_group"), given.pop("options")
        given.pop("storage_options")
        return load(group, self._folder, checkpoint, options, given)

    def keep_only(self, name: str) -> None:
        """Retires all other checkpoints on this host; all if the name is empty."""
        try:
            self._folder.retire(name)
        except FastloadError as error:
            _log.warning("cannot remove old in-memory checkpoints: %s", error)

    def _flush(self, world: World) -> None:
        """Writes the newest checkpoint to storage, if storage has none as new; on all ranks.

        Raises:
            FastloadError: It failed.
        """
        self.wait()
        job, checkpoints = self._job, survey(world, self._folder)
        with world.step() as step:
            step.answer(self._choose(checkpoints) if world.rank == 0 else "")
        chosen = next((checkpoint for checkpoint in checkpoints if checkpoint.name == step.answers[0]), None)
        if chosen is None:
            return
        if job.options.shared is False:
            raise StorageError("with shared=False each host has its own copy there", url=job.root.url)
        flush(world, self._folder, chosen, partial(job.open_target, chosen.step), job.options)
        self.flushed = chosen.point
        level = logging.WARNING if world.rank == 0 else logging.DEBUG
        _log.log(level, "step %d was flushed from memory to storage", chosen.step)

    def _choose(self, checkpoints: Sequence[InMemoryCheckpoint]) -> str:
        """Returns the name of the checkpoint to flush; empty if storage has one that is as new."""
        stored = self._job.list_stored()
        current = [
            checkpoint
            for checkpoint in checkpoints
            if checkpoint.is_complete and not checkpoint.manifest.overtaken_by(stored)
        ]
        newest = max((checkpoint.point for checkpoint in stored), default=None)
        if not current or (newest is not None and newest >= current[-1].point):
            return ""
        return current[-1].name

    def close(self, *, remove: bool, wait_s: float | None = None) -> None:
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
