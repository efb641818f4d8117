"""The checkpoints of one training: when to save, what to keep, where to go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fastload import api
from fastload.comm.failures import require_same
from fastload.comm.group import agree, meet
from fastload.errors import FastloadError, OptionError, WorldError
from fastload.loading.checkpoint import Checkpoint
from fastload.options import SAVE_SETTINGS, LoadOptions, SaveOptions
from fastload.saving.handle import SaveHandle
from fastload.saving.queue import QueuedSave
from fastload.saving.save import save_in_background
from fastload.storage import locate, name_of
from fastload.storage.base import new_token
from fastload.training.catalog import MAX_STEP, Catalog, Cleaner, RunName, metadata_of, metrics_of
from fastload.training.interval import IntervalPolicy
from fastload.training.pending import PendingSaves, SaveRequest
from fastload.training.policy import Policy, memory_directory
from fastload.training.restore import CheckpointRestorer, History, Listing
from fastload.training.retention import Point, Retention, SavedCheckpoint
from fastload.training.schedule import SaveSchedule, ScheduleAnswer

if TYPE_CHECKING:  # for those who have a tier
    from fastload.memory_tier.tier import MemoryTier


class CheckpointManager:
    """Saves the states of a training below one root, keeps the checkpoints it should, restores the newest.

    All ranks of the group make the same calls in the same order, with the same arguments; so `latest` and
    the others that ask storage are not for rank 0 alone. Use it as a context manager, or `close` it::

        with fastload.CheckpointManager("runs/7", every_seconds=900, keep_last=3) as manager:
            state = manager.restore() if manager.latest() is not None else None
            for step in range(...):
                ...
                if manager.should_save(step):
                    manager.save(step, state, metrics={"loss": loss})
                if manager.stop_requested:
                    break

    While it is open, SIGTERM and SIGUSR1 (Slurm sends one before a time limit) do not end the process:
    whichever rank gets one, soon after all ranks are told to save, and to stop. Handlers that were there
    before are called as well, and put back by `close`.

    A save in the background that failed is raised on all ranks by the next call that can say so.

    With `in_flight` above 1 a save need not wait until the one before is written: copies of the state wait in
    memory, and are written one after the other. Where storage is slower than training saves, a copy that
    waits gives its place to a newer one, and is never written; the log says so, and
    `SaveReport.came_instead_of`. Never does one that `keep_every` or `best` names, or that was saved after a
    signal: if only such are in flight, training waits.

    Args:
        root: A directory or URL; its checkpoints are ``step_00001234`` and so on.
        every_steps: Steps between saves.
        every_seconds: Seconds between saves.
        every: ``auto`` works the interval out, from what steps and saves take and the three that follow. With
            `memory` storage's is for the failures that memory does not survive, and memory's for the others,
            if it was given none. They are:
        mtbf_s: Mean time between failures of the job, in seconds; ``auto`` needs it.
        restart_s: Seconds from a failure until training goes on.
        budget: Largest part of the time that training may stand still to save.
        keep_last: Number of newest checkpoints to keep; None keeps all. Older ones are deleted once a
            newer one is committed; never one that this process has open.
        keep_every: Keeps those whose step is a multiple of this, too.
        keep_every_seconds: Keeps one in so many seconds, too.
        best: A metric and ``min`` or ``max``, such as ``("loss", "min")``: keeps the best one, too.
        async_: Whether `save` returns as soon as each rank has copied its share of the state.
        in_flight: Copies of the state that there may be at once, being written or waiting for it. The first
            save takes the memory of all.
        memory: Keeps recent checkpoints in the memory of the hosts, besides: a directory on each host, such
            as one of a tmpfs or of a fast local disk, or ``auto`` for ``/dev/shm`` (or a larger tmpfs).
        memory_every_steps: Steps between those.
        memory_every_seconds: Seconds between those.
        memory_copies: How many hosts keep each host's share of one: so many less one may be lost.
        process_group: As for `fastload.load`.
        storage_options: As for `fastload.load`.
        options: How to save. A checkpoint of the same step is replaced, whatever `overwrite` says.

    Raises:
        StorageError: There is no place for the memory tier on a host.
        OptionError: An argument cannot be used.
        PlanMismatch: The ranks did not give the same arguments.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every: str | None = None,
        mtbf_s: float | None = None,
        restart_s: float = 300.0,
        budget: float = 0.035,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_every_seconds: float | None = None,
        best: tuple[str, str] | None = None,
        async_: bool = True,
        in_flight: int = 1,
        memory: str | os.PathLike[str] | None = None,
        memory_every_steps: int | None = None,
        memory_every_seconds: float | None = None,
        memory_copies: int = 2,
        process_group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        def ready() -> Policy:
            directory = memory_directory(memory)
            return Policy(
                locate(root),
                IntervalPolicy(
                    every=every,
                    every_steps=every_steps,
                    every_seconds=every_seconds,
                    mtbf_s=mtbf_s,
                    restart_s=restart_s,
                    budget=budget,
                    memory_copies=memory_copies if directory is not None else None,
                    memory_every_steps=memory_every_steps,
                    memory_every_seconds=memory_every_seconds,
                ),
                Retention(
                    keep_last=keep_last,
                    keep_every=keep_every,
                    keep_every_seconds=keep_every_seconds,
                    best=tuple(best) if isinstance(best, list) else best,
                ),
                async_,
                replace(options if options is not None else SaveOptions(), overwrite=True),
                in_flight,
                directory,
            )

        self._world, self._policy = world, policy = meet(
            process_group,
            f"managing the checkpoints in {name_of(root)}",
            ready,
            timeout_s=lambda policy: policy.options.timeout_s,
            default_s=getattr(options, "timeout_s", SAVE_SETTINGS["timeout_s"].default),
        )
        self._open_in: int | None = os.getpid()  # the process; None once it is closed
        timeout_s, retries = policy.options.timeout_s, policy.options.retries
        self._defaults = {  # of loads; saves have options of their own
            "process_group": process_group,
            "storage_options": storage_options,
            "options": LoadOptions(timeout_s=timeout_s, retries=retries),
        }
        self._catalog = Catalog(policy.root, storage_options, timeout_s=world.patience_s / 2, retries=retries)
        lists, cleans, incarnation, run = self._meet()
        self._history = History(world, self._catalog, lists=lists, process_group=process_group)
        self._tier = self._open_tier(incarnation, run)
        self._restorer = CheckpointRestorer(world, self._defaults, self._catalog, self._history, self._tier)
        self._pending = PendingSaves(world, policy.in_flight, policy.retention)
        self._schedule = SaveSchedule(world, policy.root, policy.interval, self._pending, self._tier)
        self._cleaner: Cleaner | None = None
        if cleans:
            self._cleaner = Cleaner(self._catalog, policy.retention, Checkpoint.urls_in_use)
            self._cleaner.clean()

    def _open_tier(self, incarnation: str, run: str) -> MemoryTier | None:
        """Opens the memory tier, if there is to be one."""
        policy = self._policy
        if policy.memory is None or policy.interval.memory_copies is None:
            return None
        from fastload.memory_tier.tier import TierJob, open_tier

        return open_tier(
            TierJob(
                world=self._world,
                group=self._defaults["process_group"],
                root=policy.root,
                memory=policy.memory,
                num_copies=policy.interval.memory_copies,
                options=policy.options,
                incarnation=incarnation,
                run=run,
                store=self._catalog,
            )
        )

    def _meet(self) -> tuple[bool, bool, str, str]:
        """Compares the arguments.

        Returns:
            Whether this rank lists, whether it deletes, and two names that are the same on all ranks: of this
            incarnation of the job, and of its run.
        """
        policy = self._policy
        world, name = self._world, RunName(self._catalog)
        what = f"managing the checkpoints in {self._catalog.root}"

        def compare() -> dict[str, Any]:
            shared = self._catalog.shared
            seen = {"host": world.node, "shared": shared, "incarnation": new_token()}
            looks = policy.memory is not None and (world.rank == 0 or not shared)
            return {**seen, "same": policy.shared_values(), "run": name.read() if looks else ""}

        with world.together():
            views = world.agree(what, compare)
        world.acknowledge()
        require_same([each["same"] for each in views])
        hosts = [each["host"] for each in views]
        first = hosts.index(world.node) if policy.options.shared is False else 0
        lists, cleans = world.rank == 0 or not views[world.rank]["shared"], world.rank == first
        incarnation = views[0]["incarnation"]
        run = next((each["run"] for each in views if each["run"]), incarnation)
        if policy.memory is not None:
            with world.together():
                world.agree(what, lambda: name.write(run) if cleans else None)
            world.acknowledge()
        return lists, cleans, incarnation, run

    # When

    def should_save(self, step: int) -> bool:
        """Whether to save at this step: the same answer on all ranks.

        Costs next to nothing: the ranks ask the rendezvous store about twice a second. To be called once in
        each step, or at any rate at the same steps on all ranks. Of a manager without an interval it answers
        yes only after a signal, and warns of that once.

        Args:
            step: Steps done so far; with `every_steps`, its multiples from 1 on are saved.

        Raises:
            FastloadError: A save in the background has failed.
        """
        self._require_open()
        answer = self._schedule.ask(step)
        if answer.failed and self._pending.holds(answer.failed):
            self._raise_failed(answer.failed)
        return answer.save or self._goes_to_memory(answer, step)

    def _goes_to_memory(self, answer: ScheduleAnswer, step: int) -> bool:
        return self._tier is not None and answer.memory and self._tier.admits(step)

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked the job to stop, as of the last `should_save`: the same on all ranks."""
        return self._schedule.stop_requested

    # Save

    def save(self, step: int, state: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Saves a state as the checkpoint of a step: to storage, to memory or both.

        To where the last `should_save` has said that it is due; to storage, if that was not asked for this
        step. If as many saves as may be are in flight, waits for one of them first. What goes wrong with
        memory is a warning, and the next step that is due there is tried again.

        Args:
            step: Its number, from 0 on.
            state: As for `fastload.save`.
            metrics: Name → number, to be kept with it; those of rank 0 count.

        Raises:
            FastloadError: As for `fastload.save`; or an earlier one has failed, and this one was not begun.
        """
        self._require_open()
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise OptionError(f"step={step!r}: must be a whole number from 0 to {MAX_STEP}")
        try:
            metadata_of(step, metrics)
        except (TypeError, ValueError) as error:
            raise OptionError(f"metrics={metrics!r}: must be numbers by name ({error})") from None
        answer = self._schedule.answer_for(step)
        self._restorer.note_memory()
        branch, path = self._history.branch_for(step), self.path(step)
        metadata = metadata_of(step, metrics, branch)
        if self._tier is not None and self._goes_to_memory(answer, step):
            self._schedule.save_to_memory(partial(self._tier.save, step, branch, state, metadata))
            self._history.note_memory(Point(branch, step))
            if not answer.save:
                return
        if self._tier is not None and self._schedule.stop_requested:
            self._tier.emergency.yield_to_training()
        saved = SavedCheckpoint(step, 0.0, metrics_of(metadata), branch)
        request = SaveRequest(saved, path, self._schedule.stop_requested)
        if failed := self._pending.make_room(request):
            self._raise_failed(failed)
        save = partial(self._save_to_storage, state, path, metadata)
        has_succeeded = self._pending.start(
            request, lambda queued: self._schedule.save_to_storage(partial(save, queued))
        )
        self._catalog.damaged.discard(step)
        if self._cleaner is not None:
            self._cleaner.prune(has_succeeded, step, damaged=set(self._catalog.damaged))
            if not self._policy.async_:
                self._finish()

    def _raise_failed(self, number: int) -> None:
        """Raises the error of a save on all ranks, which all know to have failed."""
        agree(
            self._defaults["process_group"],
            "saving in the background",
            partial(self._pending.wait, number),
            timeout_s=self._policy.options.timeout_s,
        )

    def _save_to_storage(
        self, state: Any, path: str, metadata: Mapping[str, str], queued: QueuedSave | None
    ) -> SaveHandle | None:
        """Saves; returns what goes on in the background, if anything does."""
        given: dict[str, Any] = {**self._defaults, "metadata": metadata, "options": self._policy.options}
        if self._policy.async_:
            return save_in_background(state, path, **given, queued=queued)
        api.save(state, path, **given)
        return None

    # What there is

    def path(self, step: int) -> str:
        """Returns where the checkpoint of a step is, or would be: what to load, with the root's password."""
        return os.fspath(self._catalog.path(step))

    def all_steps(self) -> list[int]:
        """Returns the steps of which there is a complete checkpoint, ascending.

        Where hosts have disks of their own, on any of them. A save that goes on is waited for.

        Raises:
            FastloadError: A rank could not ask storage, or the save in the background has failed.
        """
        return sorted(point.step for point in self._look().complete)

    def latest(self) -> int | None:
        """Returns the step of the newest complete checkpoint, in memory or on storage, or None.

        The newest is the one that was saved last. If the run has gone back to an earlier step, that is one of
        those that it has saved since, although there may be higher steps.

        Raises:
            UnsupportedVersion: There is one that this fastload cannot read, and that may be newer.
            FastloadError: As for `all_steps`.
        """
        points = [Point(*found.point) for found in self._restorer.in_memory()]
        listing = self._look()
        self._catalog.require_supported(listing.unsupported)
        newest = max([*listing.complete, *points], default=None)
        return newest.step if newest is not None else None

    def _look(self) -> Listing:
        self._require_open()
        # All end first, so that no rank sees what another one is about to delete.
        return self._history.look(self._finish)

    def restore(self, into: Any = None, step: int | None = None, **arguments: Any) -> Any:
        """Loads the newest checkpoint that is whole; `restored_step` and `restored_from` say which.

        It comes from the memory of the hosts, if what those that are here have of it is whole, else from
        storage. One that turns out to be damaged or incomplete is left out, with a warning, for the newest of
        the others. Nothing else is passed over: what only this process cannot read (a newer version, a dtype
        of a newer torch, NumPy that is not installed) is an error. If another process deletes old checkpoints
        meanwhile, what it has saved instead is found.

        Args:
            into: As for `fastload.load`.
            step: Only this one.
            arguments: Further ones of `fastload.load`.

        Returns:
            What `fastload.load` returns.

        Raises:
            CheckpointNotFound: There is none.
            UnsupportedVersion: There is one that this fastload cannot read, and that may be the newest; one
                that is named by its step can be restored.
            FastloadError: As for `fastload.load`; if all are damaged, what is wrong with the oldest.
        """
        self._require_open()
        return self._restorer.restore(step, {"into": into, **arguments}, self._finish)

    @property
    def restored_step(self) -> int | None:
        """Step of the checkpoint that was last restored, or None."""
        return self._restorer.restored.step if self._restorer.restored is not None else None

    @property
    def restored_from(self) -> str | None:
        """Where that was: ``memory`` or ``storage``; None if nothing was restored."""
        return self._restorer.restored.source if self._restorer.restored is not None else None

    # The end

    def wait(self) -> None:
        """Waits until what was saved is durable, if not given up, and what it made superfluous is deleted.

        Raises:
            FastloadError: The save failed.
        """
        self._require_open()
        self._finish()

    def close(self) -> None:
        """Waits as `wait` does, and puts back the signal handlers that were there before.

        What is newer in memory than on storage is written there; then what is in memory is removed.
        """
        self._end(goes_well=True)

    def _end(self, *, goes_well: bool) -> None:
        if self._open_in != os.getpid():
            return
        self._open_in = None
        try:
            self._finish()
        finally:
            self._pending.close()
            self._schedule.close()
            if self._tier is not None:
                self._end_tier(self._tier, goes_well=goes_well)

    def _end_tier(self, tier: MemoryTier, *, goes_well: bool) -> None:
        """Removes all that is in memory once it is on storage; it stays if it is not."""
        if not goes_well:
            tier.emergency.disarm()
            return tier.close(remove=False, wait_s=self._world.grace_s)
        saved, has_memory = self._pending.newest, self._history.has_memory
        if (self.stop_requested or has_memory) and not self._history.is_durable(saved, tier.flushed):
            tier.emergency.write_now()
        tier.emergency.yield_to_training()
        tier.close(remove=self._history.is_durable(saved, tier.flushed))

    def _require_open(self) -> None:
        if self._open_in is None:
            raise WorldError("this CheckpointManager is closed")
        if self._open_in != os.getpid():
            raise WorldError("this CheckpointManager is that of another process, which has forked this one")

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        goes_well = kind is None or (isinstance(error, SystemExit) and not error.code)
        try:
            self._end(goes_well=goes_well)
        except FastloadError:
            if goes_well:
                raise  # else it was logged when it happened, and must not hide what ended the training

    def _finish(self) -> None:
        try:
            self._pending.wait()
        finally:
            if self._cleaner is not None:
                self._cleaner.wait(self._world.patience_s / 2)
