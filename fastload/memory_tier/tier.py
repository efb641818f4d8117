"""The memory tier of one training: saves to host memory, restores, flushes to storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import xxhash

from fastload.base.tasks import Task
from fastload.comm.decisions import Decisions
from fastload.comm.group import join
from fastload.comm.traces import Tracing
from fastload.comm.world import World
from fastload.errors import FastloadError, OptionError, StorageError
from fastload.memory_tier.flush import EmergencyFlush, flush
from fastload.memory_tier.restore import InMemoryCheckpoint, load, survey
from fastload.memory_tier.save import TierSaveCall, TierSaveReport, finish
from fastload.options import SaveOptions
from fastload.saving.save import BegunSave, begin
from fastload.saving.snapshot import BufferPool
from fastload.storage import Location, Target
from fastload.storage.memory_folder import Home, JobFolder, find_memory, remove_dead
from fastload.storage.memory_target import MemoryTarget

_log = logging.getLogger(__name__)

LEFT_S = 24 * 3600.0
"""Seconds after which another job removes what a dead job has left on a host."""

_ELEMENT_BYTES = 16  # blocks of shares end between elements


class CheckpointStore(Protocol):
    """The checkpoints of a job on storage."""

    def target(self, step: int) -> Target:
        """Opens write access to the checkpoint of a step."""
        ...

    def newest(self) -> tuple[int, int] | None:
        """Returns branch and step of the newest complete one, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class TierJob:
    """The job that a memory tier belongs to.

    Attributes:
        world: The ranks, as long as the training lasts.
        group: The same, as for `fastload.load`.
        root: Of the checkpoints.
        memory: A directory on each host, or ``auto``.
        num_copies: How many hosts are to keep each share.
        options: How the checkpoints are saved.
        incarnation: A name that rank 0 has drawn for this start of the job.
        run: The random name of the run, 16 hex digits.
        store: The checkpoints on storage.
    """

    world: World
    group: Any
    root: Location
    memory: str
    num_copies: int
    options: SaveOptions
    incarnation: str
    run: str
    store: CheckpointStore


class TierSave:
    """A save to memory, in the background.

    Attributes:
        step: Its step.
        report: What was done, once it counts; else None.
        error: Why it does not count, if it failed; as text.
    """

    def __init__(self, step: int, work: Callable[[], TierSaveReport]) -> None:
        self.step = step
        self.report: TierSaveReport | None = None
        self.error = ""
        self._ended = threading.Event()
        Task(lambda: self._run(work), "fastload-memory").start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, well or not, which it does by itself; returns whether it has."""
        return self._ended.wait(timeout_s)

    def _run(self, work: Callable[[], TierSaveReport]) -> None:
        try:
            self.report = work()
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            del work
            self._ended.set()


def open_tier(job: TierJob) -> MemoryTier:
    """Opens the memory tier of a job on all ranks.

    Raises:
        FastloadError: There is no place for it on some host, or an option cannot be used with it.
    """
    opened: list[JobFolder] = []

    def open_folder() -> Home:
        block_bytes = job.options.block_bytes
        if block_bytes is not None and block_bytes % _ELEMENT_BYTES:
            raise OptionError(
                f"block_bytes={block_bytes!r}: must be a multiple of {_ELEMENT_BYTES} with memory="
            )
        memory = find_memory() if job.memory == "auto" else job.memory
        for left in remove_dead(memory, older_s=LEFT_S, but=job.run):
            _log.info("removed %s, which a job that died left behind: %d bytes", left.path, left.nbytes)
        opened.append(folder := JobFolder(memory, job.run, job.root.url))
        return folder.home

    try:
        homes = job.world.agree(f"making room in memory for {job.root}", open_folder)
    except BaseException:
        for folder in opened:
            _close(folder, remove=False)
        raise
    job.world.acknowledge()
    return MemoryTier(job, opened[0], [Home(*home) for home in homes])


def _close(folder: JobFolder, *, remove: bool) -> None:
    try:
        folder.close(remove=remove)
    except FastloadError as error:
        _log.warning("what is in memory stays there: %s", error)


class MemoryTier:
    """The memory tier of a job, on one rank.

    Args:
        job: The job.
        folder: The folder of the job on this host.
        homes: The host directory of each rank.

    Attributes:
        last: The save that was begun last, or None.
        flushed: Branch and step of the checkpoint that was written from memory to storage, or None.
        emergency: Writes what is in memory to storage after a signal.
    """

    def __init__(self, job: TierJob, folder: JobFolder, homes: Sequence[Home]) -> None:
        self.last: TierSave | None = None
        self.flushed: tuple[int, int] | None = None
        self._job = job
        self._folder = folder
        self._homes = homes
        self._options = _tier_options(job.options)
        self._num_begun = 0
        self._has_failed = False  # which is said once
        self._buffers = BufferPool(1)
        self._units: dict[int, int | None] = {}
        self._admissions = _Admissions(job.world)
        self.emergency = EmergencyFlush(self._join("writing what is in memory to storage"), self._flush)

    @property
    def num_hosts(self) -> int:
        """How many hosts keep something, as far as one can be lost without another."""
        return len({home.machine for home in self._homes})

    def admits(self, step: int) -> bool:
        """Whether a save can begin at a step: the one before has ended on rank 0. Same on all ranks.

        To be called at the same steps on all ranks; to ask again for the same step changes nothing.
        """
        return self._admissions.ask(step, is_idle=self.last is None or self.last.done())

    def _join(self, what: str) -> World:
        return join(self._job.group, call=what, timeout_s=self._options.timeout_s)

    def save(self, step: int, branch: int, state: Any, metadata: Mapping[str, str]) -> TierSave:
        """Copies this rank's share of a state; after that the state may change. The rest goes on meanwhile.

        Args:
            step: Of the training.
            branch: With `step` its place in the history of the run.
            state: As for `fastload.save`.
            metadata: Text to keep with it.

        Returns:
            What goes on in the background.

        Raises:
            FastloadError: The state cannot be saved.
        """
        began = time.perf_counter()
        self.settle()
        self._admissions.save_begins()
        self._num_begun += 1
        name = xxhash.xxh3_64_hexdigest(f"{self._job.incarnation} {self._num_begun}".encode())
        world = self._join(f"keeping step {step} in memory")
        call = TierSaveCall(
            world,
            self._job.root / f"step_{step:08d}",
            metadata=metadata,
            storage_options=None,
            options=self._options,
            raise_earlier=None,
            tracing=Tracing(world, None),
            began=began,
            pool=self._buffers,
            name=name,
            branch=branch,
            step=step,
            num_copies=self._job.num_copies,
            homes=self._homes,
            job=self._folder,
            target=MemoryTarget(self._folder, name, self._folder.place(name), self._unit),
        )
        begun: BegunSave | MemoryError
        try:
            begun = begin(call, state)
        except MemoryError as error:  # of which the others have heard: no reason for a training to end
            begun = error
        self.last = TierSave(step, lambda: self._finish(call, begun))
        return self.last

    def _finish(self, call: TierSaveCall, begun: BegunSave | MemoryError) -> TierSaveReport:
        try:
            if isinstance(begun, MemoryError):
                raise begun
            report = finish(call, begun)
        except Exception as error:
            is_news, self._has_failed = not self._has_failed, True
            level = logging.WARNING if self._job.world.rank == 0 and is_news else logging.DEBUG
            _log.log(level, "step %d is not kept in memory: %s", call.step, error)
            raise
        self._has_failed = False
        return report

    def settle(self) -> None:
        """Waits until the last save counts, or has failed."""
        if self.last is not None:
            self.last.wait()

    def survey(self) -> list[InMemoryCheckpoint]:
        """Returns the checkpoints that the hosts have together, the oldest first; on all ranks.

        Raises:
            FastloadError: Some rank could not look.
        """
        self.settle()
        what = f"looking what is in memory of {self._job.root}"
        world = self._join(what)
        with world.together():
            found = survey(world, what, self._folder)
        world.acknowledge()
        return found

    def load(self, found: InMemoryCheckpoint, arguments: Mapping[str, Any]) -> Any:
        """Loads a checkpoint, given the arguments of `fastload.load`; errors are those of `restore.load`."""
        given = dict(arguments)
        group, options = given.pop("process_group"), given.pop("options")
        given.pop("storage_options")
        return load(group, self._folder, found, options, given)

    def keep_only(self, name: str) -> None:
        """Retires all other checkpoints on this host; with an empty name all."""
        try:
            self._folder.retire(name)
        except FastloadError as error:
            _log.warning("what is in memory and old stays there: %s", error)

    def _unit(self, largest_bytes: int) -> int | None:
        """Returns where storage may cut files; None if it cannot be asked."""
        if largest_bytes not in self._units:
            self._units[largest_bytes] = None
            with suppress(FastloadError), closing(self._job.store.target(0)) as target:
                self._units[largest_bytes] = target.align_bytes(largest_bytes)
        return self._units[largest_bytes]

    def _flush(self, world: World) -> None:
        """Writes the newest checkpoint to storage, if it is newer than what is there; on all ranks.

        Raises:
            FastloadError: It could not be written.
        """
        self.settle()
        store, what = self._job.store, "writing what is in memory to storage"
        complete = [found for found in survey(world, what, self._folder) if found.is_complete]
        [newest, *_] = world.agree(what, lambda: store.newest() if world.rank == 0 else None)
        if not complete or (newest is not None and tuple(newest) >= complete[-1].point):
            return
        found = complete[-1]
        if self._job.options.shared is False:
            raise StorageError("each host has a copy of its own there", url=self._job.root.url)
        flush(world, self._folder, found, lambda: store.target(found.step), self._job.options)
        self.flushed = found.point
        level = logging.WARNING if world.rank == 0 else logging.DEBUG
        _log.log(level, "step %d was written from memory to storage", found.step)

    def close(self, *, remove: bool, wait_s: float | None = None) -> None:
        """Ends it.

        Args:
            remove: Removes all that the job has on this host; else it stays for the next start of the job.
            wait_s: How long to wait for the last save; None waits until it has ended.
        """
        if self.last is None or self.last.wait(wait_s):  # else it ends with the process
            _close(self._folder, remove=remove)


class _Admissions:
    """Rank 0's answers whether a save can begin.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._decisions = Decisions(world, "memory", "asking whether the last save to memory has ended")
        self._step = -1
        self._answer = False
        self._num_before = 0  # answers before the last save

    def ask(self, step: int, *, is_idle: bool) -> bool:
        """Returns rank 0's answer for a step, given whether the last save has ended here."""
        if step != self._step:
            # All ranks have made the last save, so they have read the answers before it.
            num_read = self._num_before if is_idle else 0
            self._step, self._answer = step, self._decisions.share(lambda: is_idle, num_read=num_read)
        return self._answer

    def save_begins(self) -> None:
        """Notes that all ranks begin a save."""
        self._num_before = self._decisions.num_made


def _tier_options(options: SaveOptions) -> SaveOptions:
    """Returns how to save to memory: as to storage, but that all ranks write, and training goes on."""
    return replace(
        options,
        writers="all",
        shared=True,
        overwrite=True,
        check_replicas="small" if options.check_replicas == "full" else options.check_replicas,
        trace=None,
        on_report=None,
        progress=None,
    )
