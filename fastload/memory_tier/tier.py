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

from fastload.base.threads import background
from fastload.comm.traces import Tracing
from fastload.comm.world import World, join
from fastload.errors import FastloadError, OptionError, StorageError
from fastload.memory_tier.flush import LastWords, flush
from fastload.memory_tier.restore import Found, load, survey
from fastload.memory_tier.save import GenerationCall, GenerationReport, finish
from fastload.options import LoadOptions, SaveOptions
from fastload.saving.save import BegunSave, begin
from fastload.saving.snapshot import BufferPool
from fastload.storage import Location, Target
from fastload.storage.tier import Home, JobFolder
from fastload.storage.tier_leftovers import remove_dead
from fastload.storage.tier_place import find_memory
from fastload.storage.tier_target import TierTarget

__all__ = ["LEFT_S", "Keeper", "Making", "Places", "Terms", "open_tier"]

_log = logging.getLogger(__name__)
LEFT_S = 24 * 3600.0
"""Seconds after which what a dead job has left on a host is removed by another one."""
_YES = "yes"
_ELEMENT_BYTES = 16  # blocks of shares end between elements


@dataclass(frozen=True)
class _Asked:
    """What has been asked of `Keeper.admits`.

    Attributes:
        number: How often.
        step: For which step the last time.
        answer: The last answer.
        heard: All ranks have heard the answers to those before this one.
        forgotten: Answers to those before this one are not in the store any more.
    """

    number: int = 0
    step: int = -1
    answer: bool = False
    heard: int = 0
    forgotten: int = 0


class Places(Protocol):
    """Where the checkpoints of a job are on storage."""

    def target(self, step: int) -> Target:
        """Opens write access to the checkpoint of a step."""
        ...

    def newest(self) -> tuple[int, int] | None:
        """Returns branch and step of the newest that is whole, or None."""
        ...


@dataclass(frozen=True)
class Terms:
    """What the memory tier of a job follows from.

    Attributes:
        world: The ranks, as long as the training lasts.
        group: The same, as for `fastload.load`.
        root: Of which checkpoints.
        memory: A directory on each host, or ``auto``.
        num_copies: How many hosts are to keep each share.
        options: How the checkpoints are saved.
        life: A name that rank 0 has drawn for this life of the job.
        run: The random name of the run, 16 hex digits.
        places: Where they are on storage.
    """

    world: World
    group: Any
    root: Location
    memory: str
    num_copies: int
    options: SaveOptions
    life: str
    run: str
    places: Places


class Making:
    """A generation that is being made in the background.

    Attributes:
        step: Its step.
        report: What was done, once it counts; else None.
        error: Why it does not count, if it failed; as text.
    """

    def __init__(self, step: int, work: Callable[[], GenerationReport]) -> None:
        self.step = step
        self.report: GenerationReport | None = None
        self.error = ""
        self._ended = threading.Event()
        self._thread = background(lambda: self._run(work), "fastload-generation")
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, well or not, which it does by itself; returns whether it has."""
        return self._ended.wait(timeout_s)

    def _run(self, work: Callable[[], GenerationReport]) -> None:
        try:
            self.report = work()
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            del work
            self._ended.set()


class Keeper:
    """What one rank does for the memory tier of its job.

    Args:
        terms: Of the job.

    Attributes:
        last: The generation that was begun last, or None.
        flushed: Branch and step of what was written from memory to storage, or None.
        homes: Of each rank, where it keeps what it has; set by `meet`.
        last_words: Writes what is in memory to storage after a signal; likewise.

    Raises:
        StorageError: There is no place for it on this host.
    """

    def __init__(self, terms: Terms) -> None:
        self.last: Making | None = None
        self.homes: Sequence[Home] = ()
        self.flushed: tuple[int, int] | None = None
        self._terms = terms
        self._options = _how_to_keep(terms.options)
        self._num_begun = 0
        self._has_failed = False  # which is said once
        self._buffers = BufferPool(1)
        self._asked = _Asked()
        self._units: dict[int, int | None] = {}
        memory = find_memory() if terms.memory == "auto" else terms.memory
        for left in remove_dead(memory, older_s=LEFT_S, but=terms.run):
            _log.info("removed %s, which a job that died left behind: %d bytes", left.path, left.nbytes)
        self._folder = JobFolder(memory, terms.run, terms.root.url)
        self.last_words: LastWords

    def meet(self, homes: Sequence[Home]) -> None:
        """Learns where the ranks keep what they have, once all of them have a place for it."""
        self.homes = homes
        self.last_words = LastWords(self._meet("writing what is in memory to storage"), self._flush)

    @property
    def num_hosts(self) -> int:
        """How many hosts keep something, as far as one can be lost without another."""
        return len({home.machine for home in self.homes})

    @property
    def home(self) -> Home:
        """Where this rank keeps what it has."""
        return self._folder.home

    def _meet(self, what: str) -> World:
        return join(self._terms.group, call=what, timeout_s=self._options.timeout_s)

    def admits(self, step: int) -> bool:
        """Whether a generation can begin at a step: the one before has ended on rank 0. Same on all ranks.

        To be called at the same steps on all ranks; to ask again for the same step changes nothing.
        """
        asked = self._asked
        if step != asked.step:
            answer = self._answer(asked)
            self._asked = replace(
                asked,
                number=asked.number + 1,
                step=step,
                answer=answer,
                forgotten=asked.heard if answer else asked.forgotten,
            )
        return self._asked.answer

    def _answer(self, asked: _Asked) -> bool:
        """Finds the answer on rank 0, which tells the others."""
        rendezvous, limit_s = self._terms.world.rendezvous, self._terms.world.patience_s
        key, what = f"memory/{asked.number}", "asking whether the last generation has ended"
        if self._terms.world.rank:
            grace_s = self._terms.world.grace_s
            return rendezvous.await_text(what, key, 0, wait_s=limit_s, grace_s=grace_s) == _YES
        answer = self.last is None or self.last.done()
        if self._terms.world.size > 1:
            # All ranks have made the last generation, so they have heard the answers before it.
            heard = range(asked.forgotten, asked.heard) if answer else ()
            text = _YES if answer else "no"
            rendezvous.post(what, key, text, forget=[f"memory/{each}" for each in heard], limit_s=limit_s)
        return answer

    def save(self, step: int, branch: int, state: Any, metadata: Mapping[str, str]) -> Making:
        """Copies this rank's share of a state; after that the state may change. The rest is done beside it.

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
        self._asked = replace(self._asked, heard=self._asked.number)
        self._num_begun += 1
        name = xxhash.xxh3_64_hexdigest(f"{self._terms.life} {self._num_begun}".encode())
        world = self._meet(f"keeping step {step} in memory")
        location = self._terms.root / f"step_{step:08d}"
        call = GenerationCall(
            world,
            location,
            metadata=metadata,
            storage_options=None,
            options=self._options,
            raise_earlier=None,
            tracing=Tracing(world, None),
            began=began,
            name=name,
            branch=branch,
            step=step,
            num_copies=self._terms.num_copies,
            homes=self.homes,
            job=self._folder,
            target=TierTarget(self._folder, name, self._folder.place(name), self._unit),
            buffers=self._buffers,
        )
        begun: BegunSave | MemoryError
        try:
            begun = begin(call, state)
        except MemoryError as error:  # of which the others have heard: no reason for a training to end
            begun = error
        self.last = making = Making(step, lambda: self._finish(call, begun))
        return making

    def _finish(self, call: GenerationCall, begun: BegunSave | MemoryError) -> GenerationReport:
        try:
            if isinstance(begun, MemoryError):
                raise begun
            report = finish(call, begun)
        except Exception as error:
            is_news, self._has_failed = not self._has_failed, True
            level = logging.WARNING if self._terms.world.rank == 0 and is_news else logging.DEBUG
            _log.log(level, "step %d is not kept in memory: %s", call.step, error)
            raise
        self._has_failed = False
        return report

    def settle(self) -> None:
        """Waits until the last generation counts, or has failed."""
        if self.last is not None:
            self.last.wait()

    def survey(self) -> list[Found]:
        """Finds which generations the hosts have together; the oldest first.

        Raises:
            FastloadError: Some rank could not look.
        """
        self.settle()
        what = f"looking what is in memory of {self._terms.root}"
        world = self._meet(what)
        with world.together():
            found = survey(world, what, self._folder)
        world.heard()
        return found

    def load(self, found: Found, arguments: Mapping[str, Any]) -> Any:
        """Loads a generation; errors are those of `restore.load`."""
        given = dict(arguments)
        options = given.pop("options", None) or LoadOptions(
            timeout_s=self._options.timeout_s, retries=self._options.retries
        )
        given.pop("storage_options", None)
        return load(given.pop("process_group", self._terms.group), self._folder, found, options, given)

    def keep_only(self, name: str) -> None:
        """Has no other generation count on this host; an empty name is that of none."""
        try:
            self._folder.retire(name)
        except FastloadError as error:
            _log.warning("what is in memory and old stays there: %s", error)

    def _unit(self, largest_bytes: int) -> int | None:
        """Returns where storage may cut files; None if it cannot be asked."""
        if largest_bytes not in self._units:
            self._units[largest_bytes] = None
            with suppress(FastloadError), closing(self._terms.places.target(0)) as target:
                self._units[largest_bytes] = target.align_bytes(largest_bytes)
        return self._units[largest_bytes]

    def _flush(self, world: World) -> None:
        """Writes the newest generation to storage, if it is newer than what is there; on all ranks.

        Raises:
            FastloadError: It could not be written.
        """
        self.settle()
        places, what = self._terms.places, "writing what is in memory to storage"
        whole = [found for found in survey(world, what, self._folder) if found.is_whole]
        [newest, *_] = world.agree(what, lambda: places.newest() if world.rank == 0 else None)
        if not whole or (newest is not None and tuple(newest) >= (whole[-1].branch, whole[-1].step)):
            return
        found = whole[-1]
        if self._terms.options.shared is False:
            raise StorageError("each host has a copy of its own there", url=self._terms.root.url)
        flush(world, self._folder, found, lambda: places.target(found.step), self._terms.options)
        self.flushed = found.branch, found.step
        level = logging.WARNING if world.rank == 0 else logging.DEBUG
        _log.log(level, "step %d was written from memory to storage", found.step)

    def end(
        self, *, goes_well: bool, flushes: bool, is_durable: Callable[[tuple[int, int] | None], bool]
    ) -> None:
        """Ends it with the training: all is removed once it is on storage, and stays if it is not.

        Args:
            goes_well: Whether the training has come to its end.
            flushes: Whether what is newer in memory is written to storage.
            is_durable: Whether nothing in memory is newer than what was saved, or written from memory.
        """
        if not goes_well:
            self.last_words.cancel()
            return self.close(remove=False, wait_s=self._terms.world.grace_s)
        if flushes and not is_durable(self.flushed):
            self.last_words.write_now()
        self.last_words.come_to_save()
        self.close(remove=is_durable(self.flushed))

    def close(self, *, remove: bool, wait_s: float | None = None) -> None:
        """Ends it.

        Args:
            remove: Removes all that the job has on this host; else it stays for the next life of the job.
            wait_s: How long to wait for the last generation; None waits until it has ended.
        """
        if self.last is not None and not self.last.wait(wait_s):
            return  # what is still at work ends with the process
        try:
            self._folder.close(remove=remove)
        except FastloadError as error:
            _log.warning("what is in memory stays there: %s", error)


def _how_to_keep(options: SaveOptions) -> SaveOptions:
    """Returns how a generation is saved: like a checkpoint, but that all ranks write, and training goes on.

    Raises:
        OptionError: Checksum blocks do not end between elements.
    """
    if options.block_bytes is not None and options.block_bytes % _ELEMENT_BYTES:
        raise OptionError(
            f"block_bytes={options.block_bytes!r}: must be a multiple of {_ELEMENT_BYTES} with memory="
        )
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


def open_tier(terms: Terms) -> Keeper:
    """Opens the memory tier of a job on all ranks.

    Raises:
        FastloadError: There is no place for it on some host, or an option cannot be used with it.
    """
    keepers: list[Keeper] = []

    def open_it() -> Home:
        keepers.append(keeper := Keeper(terms))
        return keeper.home

    world = terms.world
    try:
        homes = world.agree(f"making room in memory for {terms.root}", open_it)
    except BaseException:
        for keeper in keepers:
            keeper.close(remove=False)
        raise
    world.heard()
    keepers[0].meet([Home(*home) for home in homes])
    return keepers[0]
