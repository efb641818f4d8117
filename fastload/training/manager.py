"""`CheckpointManager`: the checkpoints of a training."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from types import TracebackType
from typing import Any

from fastload.base.registry import extension
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.failures import require_same
from fastload.comm.group import Meeting, separate_call
from fastload.comm.observers import notify, notifying_of_failure
from fastload.errors import FastloadError, OptionError, StorageError, WorldError
from fastload.loading.checkpoint import Checkpoint
from fastload.options import LoadOptions, Patience, SaveOptions
from fastload.saving.background import QueuedSave, SaveHandle
from fastload.saving.call import make_call
from fastload.saving.save import save, save_in_background
from fastload.storage import Location, locate, name_of
from fastload.storage.base import new_token
from fastload.training.catalog import MAX_STEP, Catalog, Cleaner, is_step, metadata_of, metrics_of
from fastload.training.history import History, Listing
from fastload.training.interval import IntervalPolicy, SavePolicy
from fastload.training.pending import PendingSaves, SaveRequest
from fastload.training.restore import CheckpointRestorer, require_valid
from fastload.training.retention import KeepPolicy, Point, Retention, SavedCheckpoint
from fastload.training.schedule import SaveSchedule, ScheduleAnswer
from fastload.training.tier import STORAGE, OpenTier, SaveTier, TierJob


@dataclass(frozen=True)
class Policy:
    """The arguments of a `CheckpointManager`, checked.

    Attributes:
        root: Root of the checkpoints.
        interval: When to save, by intervals.
        save_policy: The caller's policy of when to save in place of these, or None.
        retention: Which checkpoints to keep, by the keywords.
        keep_policy: The caller's policy of which to keep, or None.
        async_: Whether to save in the background.
        options: How to save.
        max_pending_saves: Most copies of the state at once.
        tier: Opens a tier next to storage; None without one.
        deltas: Whether to save deltas.

    Raises:
        OptionError: A value is invalid, or the extension for deltas is missing.
    """

    root: Location
    interval: IntervalPolicy
    save_policy: SavePolicy | None
    retention: Retention
    keep_policy: KeepPolicy | None
    async_: bool
    options: SaveOptions
    max_pending_saves: int = 1
    tier: OpenTier | None = None
    deltas: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.deltas, bool):
            raise OptionError(f"deltas={self.deltas!r}: must be True or False")
        if self.deltas:
            extension("plan_transforms", "delta", "deltas=")
        if self.options.base is not None:
            raise OptionError(
                f"base={self.options.base!r}: deltas=True saves each checkpoint as a delta of the one before"
            )
        if type(self.max_pending_saves) is not int or self.max_pending_saves < 1:
            raise OptionError(f"max_pending_saves={self.max_pending_saves!r}: must be a number of at least 1")
        if self.max_pending_saves > 1 and not self.async_:
            raise OptionError(
                f"max_pending_saves={self.max_pending_saves}: needs async_=True, since other saves end "
                "before they return"
            )

    @property
    def keeps(self) -> KeepPolicy | None:
        """The policy of which checkpoints to keep; None keeps all."""
        if self.keep_policy is not None:
            return self.keep_policy
        return self.retention if self.retention.keep_last is not None else None

    def shared_values(self) -> dict[str, Any]:
        """Returns the values that must be the same on all ranks."""
        best = self.retention.best
        return {
            "call": "CheckpointManager",
            "root": self.root.given,
            **asdict(self.interval),
            **asdict(self.retention),
            "save_policy": _class_of(self.save_policy),
            "keep_policy": _class_of(self.keep_policy),
            "best": list(best) if best is not None else None,
            "async_": self.async_,
            "deltas": self.deltas,
            "max_pending_saves": self.max_pending_saves,
            "tier": _opener(self.tier),  # not where, which may differ between hosts
            **self.options.shared_values(),
        }


def _opener(tier: OpenTier | None) -> str:
    """Returns which function or class opens a tier."""
    opener: Any = tier.func if isinstance(tier, partial) else tier
    return getattr(opener, "__qualname__", "") or type(opener).__qualname__


def _class_of(policy: object) -> str:
    return "" if policy is None else f"{type(policy).__module__}.{type(policy).__qualname__}"


def _require_policy(name: str, policy: object, method: str, keywords: Mapping[str, Any]) -> None:
    """Raises if an object is no policy, or if keywords are given whose place it takes."""
    if isinstance(policy, type) or not callable(getattr(policy, method, None)):
        raise OptionError(f"{name}={policy!r}: must have a method {method}; see fastload.policies")
    if given := [f"{keyword}={value!r}" for keyword, value in keywords.items() if value is not None]:
        raise OptionError(f"{name}= and {', '.join(given)}: give either the policy or these")


def _when_to_save(
    policy: SavePolicy | None, copies: int | None, *, terms: Mapping[str, Any], **intervals: Any
) -> tuple[IntervalPolicy, SavePolicy | None]:
    """Returns the intervals, and the policy that is asked in place of them, if there is one.

    Args:
        policy: The caller's policy, or None.
        copies: See `IntervalPolicy.memory_copies`.
        terms: The keywords whose place a policy takes, and which have defaults.
        **intervals: The other ones.

    Raises:
        OptionError: A value is invalid.
    """
    if policy is None:
        return IntervalPolicy(**intervals, **terms, memory_copies=copies), None
    defaults = {field.name: field.default for field in fields(IntervalPolicy)}
    changed = {name: value if value != defaults[name] else None for name, value in terms.items()}
    _require_policy("save_policy", policy, "due", {**intervals, **changed})
    if type(policy) is IntervalPolicy:  # a subclass may decide otherwise
        of_policy = policy.memory_copies
        return replace(policy, memory_copies=of_policy if copies and of_policy else copies), None
    of_tier = math.inf if copies is not None else None
    never: dict[str, Any] = {"every_seconds": math.inf, "memory_every_seconds": of_tier}
    return IntervalPolicy(**never, memory_copies=copies), policy


def _tier_of(memory: str | os.PathLike[str] | None, tier: OpenTier | None) -> OpenTier | None:
    """Returns what opens the tier; that of `memory=` is an extension.

    Raises:
        OptionError: Both are given, or one is invalid, or the extension is missing.
    """
    if memory is None:
        if tier is not None and not callable(tier):
            raise OptionError(f"tier={tier!r}: must be callable, and open a tier")
        return tier
    if tier is not None:
        raise OptionError("memory= and tier=: give only one, since there is one tier next to storage")
    path = os.fspath(memory)
    if not isinstance(path, str) or not path:
        raise OptionError(f"memory={memory!r}: must be 'auto' or a directory on each host")
    open_tier = extension("tiers", "memory", "memory=")
    return partial(open_tier, directory=path if path == "auto" else os.path.abspath(path))


@short_tracebacks
class CheckpointManager:
    """Saves the states of a training below one root, applies rules of retention, and restores the newest.

    All ranks of the group make the same calls in the same order, with the same arguments, also `latest` and
    other queries. Use it as a context manager, or `close` it::

        with fastload.CheckpointManager("runs/7", keep_last=3) as manager:  # saves every 30 minutes
            state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
            if manager.latest() is not None:
                manager.restore(into=state)
            for step in range(state["step"] + 1, ...):
                ...
                state["step"] = step
                if manager.should_save(step):
                    manager.save(step, state, metrics={"loss": loss})
                if manager.stop_requested:
                    break

    While the manager is open, SIGTERM and SIGUSR1 (Slurm sends one before a time limit) do not end the
    process. Soon after any rank gets one, `should_save` and `stop_requested` are true on all ranks. Previous
    handlers are called as well, and restored by `close`.

    The next call that all ranks make raises the error of a failed save in the background on all of them.

    With `max_pending_saves` above 1 a save does not wait until the last one is written: copies of the state
    wait in memory, and are written one after the other. If storage is slower than the training saves, a
    waiting copy is dropped for a newer one; the log and `SaveReport.came_instead_of` name it. Copies that
    `keep_every` or `best` name, and those saved after a signal, are never dropped: if only such copies wait,
    training waits.

    Args:
        root: A directory or URL; its checkpoints are ``step_00001234`` and so on.
        every_steps: Steps between saves.
        every_seconds: Seconds between saves; 1800 if neither this nor `every_steps` nor `every` is given.
            ``math.inf`` leaves saves to signals.
        every: ``auto`` computes the interval from the measured times of steps and saves, `mtbf_s`,
            `restart_s` and `budget`. With `memory`, storage has the interval for the failures that memory
            does not survive. Memory has that for the others, unless you give its interval.
        mtbf_s: Mean time between failures of the job, in seconds; ``auto`` needs it.
        restart_s: Seconds from a failure until training continues.
        budget: Largest part of the time that training may wait for saves.
        save_policy: When to save, in place of these intervals and those of `memory`; see
            `fastload.policies.SavePolicy`.
        keep_last: Number of newest checkpoints to keep; None keeps all. Older ones are deleted once a
            newer one is committed, unless this process has them open.
        keep_every: Also keeps checkpoints whose step is a multiple of this.
        keep_every_seconds: Also keeps one checkpoint per this many seconds.
        best: A metric and ``min`` or ``max``, such as ``("loss", "min")``; also keeps the best checkpoint.
        keep_policy: Which checkpoints to keep, in place of these four rules; see
            `fastload.policies.KeepPolicy`.
        async_: Whether `save` returns as soon as each rank has copied its share of the state.
        max_pending_saves: Most copies of the state at once, written or waiting. The first save allocates the
            memory of all.
        deltas: Whether to save only what differs from the newest complete checkpoint of the root; see
            docs/deltas.md. Checkpoints that others need as their base are kept.
        memory: Also saves to the memory of the hosts: a directory on each host, such as one of a tmpfs or of
            a fast local disk, or ``auto`` for ``/dev/shm`` (or a larger tmpfs).
        memory_every_steps: Steps between saves to memory.
        memory_every_seconds: Seconds between saves to memory.
        memory_copies: Number of hosts that have each host's share; one host less may be lost.
        tier: Opens another tier in place of that of `memory`, which the keywords above are for then; see
            `fastload.training.tier`.
        process_group: As for `fastload.load`.
        storage_options: As for `fastload.load`.
        options: How to save. A checkpoint of the same step is replaced; `overwrite` has no effect. With
            `trace`, each save has a file of its own, with the name of the checkpoint before the suffix.

    Raises:
        StorageError: A host has no place for the memory tier.
        OptionError: An argument is invalid.
        PlanMismatch: The arguments of the ranks differ.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_policy: SavePolicy | None = None,
        keep_policy: KeepPolicy | None = None,
        tier: OpenTier | None = None,
        async_: bool = True,
        max_pending_saves: int = 1,
        deltas: bool = False,
        process_group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
        # In place of a `save_policy`.
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every: str | None = None,
        mtbf_s: float | None = None,
        restart_s: float = 300.0,
        budget: float = 0.035,
        # In place of a `keep_policy`.
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_every_seconds: float | None = None,
        best: tuple[str, str] | None = None,
        # In place of a `tier`.
        memory: str | os.PathLike[str] | None = None,
        memory_every_steps: int | None = None,
        memory_every_seconds: float | None = None,
        memory_copies: int = 2,
    ) -> None:
        began = time.perf_counter()
        with Meeting(process_group, f"managing the checkpoints in {name_of(root)}") as meeting:
            chosen = meeting.choose(options, SaveOptions)
            opens_tier = _tier_of(memory, tier)
            interval, asked = _when_to_save(
                save_policy,
                memory_copies if opens_tier is not None else None,
                every=every,
                every_steps=every_steps,
                every_seconds=every_seconds,
                memory_every_steps=memory_every_steps,
                memory_every_seconds=memory_every_seconds,
                terms={"mtbf_s": mtbf_s, "restart_s": restart_s, "budget": budget},
            )
            rules: dict[str, Any] = {
                "keep_last": keep_last,
                "keep_every": keep_every,
                "keep_every_seconds": keep_every_seconds,
                "best": tuple(best) if isinstance(best, list) else best,
            }
            if keep_policy is not None:
                _require_policy("keep_policy", keep_policy, "keep", rules)
            # A subclass may keep others.
            retention = keep_policy if type(keep_policy) is Retention else Retention(**rules)
            policy = Policy(
                locate(root),
                interval,
                asked,
                retention,
                keep_policy if keep_policy is not retention else None,
                async_,
                replace(chosen, overwrite=True),
                max_pending_saves,
                opens_tier,
                deltas,
            )
            load_options = LoadOptions(timeout_s=chosen.timeout_s, retries=chosen.retries)
        world = meeting.world
        self._world, self._policy = world, policy
        self._open_in: int | None = os.getpid()  # the process; None once it is closed
        self._defaults = {  # of loads; saves have separate options
            "process_group": process_group,
            "storage_options": storage_options,
            "options": load_options,
        }
        patience = Patience(policy.options.retries, world.patience_s / 2)
        self._catalog = Catalog(policy.root, storage_options, patience)
        self._bases = Catalog(policy.root, storage_options, patience)  # for the threads that save deltas
        lists, cleans, incarnation = self._meet()
        self._history = History(
            world,
            self._catalog,
            lists=lists,
            process_group=process_group,
            incarnation=incarnation if policy.tier is not None else "",
        )
        self._tier = self._open_tier()
        self._restorer = CheckpointRestorer(world, self._defaults, self._catalog, self._history, self._tier)
        self._pending = PendingSaves(world, policy.max_pending_saves, policy.retention)
        self._schedule = SaveSchedule(world, policy.interval, policy.save_policy, self._pending, self._tier)
        self._cleaner: Cleaner | None = None
        if cleans:
            self._cleaner = Cleaner(world, self._catalog, policy.keeps, Checkpoint.urls_in_use)
            self._cleaner.clean()
        notify(world, "manage", began)

    def _open_tier(self) -> SaveTier | None:
        """Opens the tier, if there is one."""
        policy = self._policy
        if policy.tier is None or policy.interval.memory_copies is None:
            return None
        return policy.tier(
            TierJob(
                world=self._world,
                group=self._defaults["process_group"],
                catalog=self._catalog,
                num_copies=policy.interval.memory_copies,
                options=policy.options,
            )
        )

    def _meet(self) -> tuple[bool, bool, str]:
        """Compares the arguments of the ranks.

        Returns:
            Whether this rank lists, whether it deletes, and a name of this start of the job, the same on all
            ranks.
        """
        world, what = self._world, f"managing the checkpoints in {self._catalog.root}"
        with world.ending(), world.step(what) as comparing:
            incarnation = new_token() if world.rank == 0 else ""
            view = {"host": world.node, "shared": self._catalog.shared, "incarnation": incarnation}
            comparing.answer({**view, "same": self._policy.shared_values()})
        views = comparing.answers
        require_same([view["same"] for view in views])
        hosts = [view["host"] for view in views]
        first = hosts.index(world.node) if self._policy.options.shared is False else 0
        lists, cleans = world.rank == 0 or not views[world.rank]["shared"], world.rank == first
        return lists, cleans, views[0]["incarnation"]

    # When

    def should_save(self, step: int) -> bool:
        """Whether to save at this step; the same answer on all ranks.

        Costs next to nothing: the ranks ask the rendezvous store about twice a second. To be called once in
        each step, or at any rate at the same steps on all ranks.

        Args:
            step: Steps done so far; with `every_steps`, its multiples from 1 on are saved.

        Raises:
            FastloadError: A save in the background has failed.
            OptionError: `save_policy` has failed, or returned no tiers.
        """
        self._require_open()
        answer = self._schedule.ask(step)
        if answer.failed and self._pending.holds(answer.failed):
            self._raise_failed(answer.failed)
        return answer.save or self._goes_to_tier(answer, step)

    def _goes_to_tier(self, answer: ScheduleAnswer, step: int) -> bool:
        return self._tier is not None and answer.tier and self._tier.admits(step)

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked the job to stop, as of the last `should_save`; the same on all ranks."""
        return self._schedule.stop_requested

    # Save

    def save(self, step: int, state: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Saves a state as the checkpoint of a step: to storage, to the tier (such as memory) or to both.

        The last `should_save` decided where; without one for this step it is storage. If `max_pending_saves`
        copies exist already, it first waits for one of them. Errors of a save to the tier, those of the state
        included, are warnings on all ranks, and the next save to it tries again.

        Args:
            step: The step, from 0 on.
            state: As for `fastload.save`.
            metrics: Name → number; rank 0's are stored with the checkpoint, those of other ranks are ignored.

        Raises:
            FastloadError: As for `fastload.save`; or an earlier save has failed, and this one did not begin.
        """
        self._require_open()
        began = time.perf_counter()
        own_metrics = metrics if self._world.rank == 0 else None
        problem: FastloadError | None = _problem_with(step, own_metrics)
        if problem is not None and self._world.size == 1:
            raise problem
        if problem is not None:  # this rank meets the others where they are, and they hear of it
            step, own_metrics = self._schedule.stand_in(step), None
        answer = self._schedule.answer_for(step)
        self._restorer.note_tier()
        branch, path = self._history.branch_for(step, is_void=problem is not None), self.path(step)
        metadata = metadata_of(step, own_metrics, branch, self._history.incarnation)
        if self._tier is not None and self._goes_to_tier(answer, step):
            point, lineage = Point(branch, step), self._history.lineage
            save_to_tier = partial(self._tier.save, point, lineage, state, metadata, problem=problem)
            self._schedule.measure(save_to_tier, to_tier=True)
            self._history.note_in_tier(point)
            if not answer.save:
                return
        if self._tier is not None and self._schedule.stop_requested:
            self._tier.yield_to_training()
        problem = problem or self._problem_with_root()
        saved = SavedCheckpoint(step, 0.0, metrics_of(metadata), branch)
        request = SaveRequest(saved, path, self._schedule.stop_requested, is_void=problem is not None)
        if failed := self._schedule.pause(lambda: self._pending.make_room(request)):
            self._raise_failed(failed)
        save = partial(self._save_to_storage, state, step, metadata, self._find_base(step), problem, began)
        has_succeeded = self._pending.start(
            request, lambda queued: self._schedule.measure(partial(save, queued))
        )
        self._catalog.damaged.discard(step)
        if self._cleaner is not None:
            self._cleaner.prune(has_succeeded, step, damaged=set(self._catalog.damaged))
            if not self._policy.async_:
                self._finish()

    def _problem_with_root(self) -> StorageError | None:
        """Returns why this rank cannot write to a local root, before the first save is durable; else None.

        Not when the manager opens: one that only restores needs no write access.
        """
        is_first = self._world.rank == 0 or self._policy.options.shared is False  # to write at the root
        if is_first and self._pending.newest is None:
            try:
                self._catalog.require_writable()
            except StorageError as error:
                return error
        return None

    def _raise_failed(self, number: int) -> None:
        """Raises the error of a failed save on all ranks."""
        group, timeout_s = self._defaults["process_group"], self._policy.options.timeout_s
        with separate_call(group, "saving in the background", timeout_s=timeout_s) as world, world.step():
            self._pending.wait(number)

    def _find_base(self, step: int) -> Callable[[], Location | None] | None:
        """Returns what finds the base of a delta once it is written; None for complete checkpoints."""
        if not self._policy.deltas:
            return None
        return partial(self._bases.base_for, step, damaged=frozenset(self._catalog.damaged - {step}))

    def _save_to_storage(
        self,
        state: Any,
        step: int,
        metadata: Mapping[str, str],
        find_base: Callable[[], Location | None] | None,
        problem: Exception | None,
        began: float,
        queued: QueuedSave | None,
    ) -> SaveHandle | None:
        """Saves; returns the handle of a save in the background."""
        policy, given, options = self._policy, self._defaults, self._policy.options
        path = self.path(step)
        call = make_call(
            path,
            given["process_group"],
            metadata,
            given["storage_options"],
            options,
            problem=problem,
            began=began,
            in_background=policy.async_,
            queued=queued,
            find_base=find_base,
            step=step,
        )
        if policy.async_:
            return save_in_background(call, state)
        save(call, state)
        return None

    # What there is

    def path(self, step: int) -> str:
        """Returns the path of the checkpoint of a step, with the credentials in the root's URL."""
        return os.fspath(self._catalog.path(step))

    def all_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending, on any host if each has its own disk.

        Waits for saves in the background.

        Raises:
            FastloadError: A rank could not list storage, or a save in the background has failed.
        """
        return sorted(point.step for point in self._look().complete)

    def latest(self) -> int | None:
        """Returns the step of the newest complete checkpoint, in the tier or on storage, or None.

        The newest is the one that was saved last. After the run has gone back to an earlier step, there may
        be higher steps that are older.

        Raises:
            UnsupportedVersion: This fastload cannot read a checkpoint that may be newer.
            FastloadError: As for `all_steps`.
        """
        listing = self._look()
        choices = [choice for choice, _ in self._restorer.choices(listing)]
        exist = (choice for choice in choices if choice.source != STORAGE or choice.point in listing.complete)
        return next((choice.point.step for choice in exist), None)

    def _look(self, step: int | None = None, **arguments: Any) -> Listing:
        """Lists the checkpoints on all ranks, before a restore with these arguments."""
        self._require_open()
        with self._history.call() as world:
            with world.step():
                require_valid(step, arguments)
                # So that no rank lists checkpoints that another one is about to delete. The remains of dead
                # saves are none.
                self._finish(Cleaner.wait_pruned)
            return self._history.look(world)

    def prefetch(self, step: int | None = None, *, options: LoadOptions | None = None) -> None:
        """Begins to read the checkpoint that `restore` will restore, in the background.

        A call of all ranks, for example before the model is built::

            with fastload.CheckpointManager("runs/7") as manager:
                manager.prefetch()
                state = {"model": build_model(), "step": 0}
                if manager.latest() is not None:
                    manager.restore(into=state)

        Each rank reads and verifies a share into host memory, which the next `restore` releases; see
        `fastload.prefetch`. `restore` reads from storage if there is a newer checkpoint by then, or if it is
        given `options`, `process_group` or `storage_options` of its own. Nothing is read if the newest
        checkpoint is in the tier, or if there is none.

        Args:
            step: As for `restore`.
            options: How to read and load it; None for the defaults.

        Raises:
            FastloadError: As for `fastload.prefetch`, except for damage, which `restore` deals with.
        """
        self._require_open()
        self._restorer.end_prefetch()
        self._restorer.prefetch(step, options, self._look(step, options=options))

    def restore(self, into: Any = None, step: int | None = None, **arguments: Any) -> Any:
        """Loads the newest complete checkpoint; `restored_step` and `restored_from` tell which one.

        It comes from the tier, such as the memory of the hosts, if that has all of it, else from storage. If
        it turns out to be damaged or incomplete, there is a warning, and the next one is loaded. Other
        problems are errors, such as a newer version, a dtype of a newer torch, or NumPy that is not
        installed. If another process deletes old checkpoints meanwhile, its newer ones are found.

        Args:
            into: As for `fastload.load`.
            step: Restores this step only; None the newest.
            arguments: Further ones of `fastload.load`.

        Returns:
            The result of `fastload.load`.

        Raises:
            CheckpointNotFound: There is no checkpoint.
            UnsupportedVersion: This fastload cannot read a checkpoint that may be the newest. Others can be
                restored by their step.
            FastloadError: As for `fastload.load`; if all are damaged, the error of the oldest.
        """
        arguments["into"] = into
        began = time.perf_counter()
        with notifying_of_failure(self._world, "restore", began):
            return self._restorer.restore(step, arguments, self._look(step, **arguments), began)

    @property
    def restored_step(self) -> int | None:
        """Step of the last restored checkpoint, or None."""
        return self._restorer.restored.step if self._restorer.restored is not None else None

    @property
    def restored_from(self) -> str | None:
        """Its source: ``storage``, or the name of the tier, such as ``memory``; None without a restore."""
        return self._restorer.restored.source if self._restorer.restored is not None else None

    # The end

    def wait(self) -> None:
        """Waits until all saves are durable or dropped, and old checkpoints are deleted.

        Also waits for the save to the tier, whose errors are warnings.

        Raises:
            FastloadError: A save to storage failed.
        """
        self._require_open()
        self._finish()
        if self._tier is not None:
            self._tier.wait()

    def close(self) -> None:
        """Waits as `wait` does, and restores the previous signal handlers.

        A tier that has a newer checkpoint than storage first writes it there.
        """
        self._end(goes_well=True)

    def _end(self, *, goes_well: bool) -> None:
        if self._open_in != os.getpid():
            return
        self._open_in = None
        began = time.perf_counter()
        self._restorer.end_prefetch()
        try:
            self._finish()
        finally:
            self._pending.close()
            self._schedule.close()
            if self._tier is not None:
                lacking = self._history.lacking(self._pending.newest)
                flushes = self.stop_requested or self._history.uses_tier
                self._tier.close(goes_well=goes_well, lacking=lacking, flushes=flushes)
            notify(self._world, "close", began)

    def _require_open(self) -> None:
        if self._open_in is None:
            raise WorldError("this CheckpointManager is closed")
        if self._open_in != os.getpid():
            raise WorldError("this CheckpointManager belongs to the parent process")

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
                raise  # otherwise it was logged; it must not hide the error that ended the training

    def _finish(self, wait: Callable[[Cleaner, float], object] = Cleaner.wait) -> None:
        """Waits for all saves, and for what the cleaner has to do."""
        try:
            self._pending.wait()
        finally:
            if self._cleaner is not None:
                wait(self._cleaner, self._world.patience_s / 2)


def _problem_with(step: Any, metrics: Mapping[str, Any] | None) -> OptionError | None:
    """Returns why a step and its metrics cannot be saved, or None."""
    if not is_step(step):
        return OptionError(f"step={step!r}: must be a whole number from 0 to {MAX_STEP}")
    try:
        metadata_of(step, metrics)
    except Exception as error:  # of the caller's numbers, too
        return OptionError(f"metrics={metrics!r}: must be numbers by name ({error})")
    return None
