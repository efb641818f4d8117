"""When a save is due: by intervals, as given or computed during training, or by a policy of the caller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

from fastload.errors import OptionError
from fastload.training.cadence import AdaptiveInterval, MeasuredSave, loss_probability, mtbf_by_tier
from fastload.training.tier import STORAGE, RunningSave

T = TypeVar("T")
SaveT = TypeVar("SaveT", bound=RunningSave | None)

_log = logging.getLogger(__name__)

_DEFAULT_S = 1800.0  # default interval between saves
_FIRST_STEPS = 10  # between the first saves, which are measured
_NUM_STEPS = 101  # last steps, whose median is the time of a step
_NUM_SAVES = 5  # last ones that a policy of the caller is told of
_MIN_STEP_S = 1e-6

_TIER = "tier"  # other than storage; only a policy of the caller knows its name


@dataclass(frozen=True, kw_only=True)
class IntervalPolicy:
    """When to save by intervals: those that the keywords of a `CheckpointManager` give, with their names.

    It is a `SavePolicy`. As `save_policy=` it is the same as the keywords; a policy of yours may ask it, too.

    Attributes:
        every: ``auto`` or None.
        every_steps: Steps between saves to storage, or None.
        every_seconds: Seconds between them, infinity for none, or None. 1800 if none of these three is
            given.
        mtbf_s: Mean time between failures of the job, for ``auto``.
        restart_s: Seconds from a failure until training continues, for ``auto``.
        budget: Largest part of the time that training may wait for saves, for ``auto``.
        memory_copies: Hosts that have each share of a checkpoint in the tier; None without a tier.
        memory_every_steps: Steps between saves to the tier.
        memory_every_seconds: Seconds between them.

    Raises:
        OptionError: A value is invalid.
    """

    every: str | None = None
    every_steps: int | None = None
    every_seconds: float | None = None
    mtbf_s: float | None = None
    restart_s: float = 300.0
    budget: float = 0.035
    memory_copies: int | None = None
    memory_every_steps: int | None = None
    memory_every_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("every_steps", "memory_every_steps", "memory_copies"):
            steps = getattr(self, name)
            if steps is not None and (type(steps) is not int or steps < 1):
                raise OptionError(f"{name}={steps!r}: must be a number of at least 1")
        for name in ("every_seconds", "memory_every_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not (type(seconds) in (int, float) and seconds > 0):
                raise OptionError(f"{name}={seconds!r}: must be a number of seconds above 0")
        if (self.every, self.every_steps, self.every_seconds) == (None, None, None):
            object.__setattr__(self, "every_seconds", _DEFAULT_S)
        if self.every not in (None, "auto"):
            raise OptionError(
                f"every={self.every!r}: must be 'auto'; otherwise use every_steps= or every_seconds="
            )
        if self.every == "auto" and (self.mtbf_s is None or self.every_seconds is not None):
            raise OptionError(
                "every='auto' needs mtbf_s=, the job's mean time between failures, and no every_seconds="
            )
        has_memory, needs_one = self.memory_copies is not None, self.every != "auto"
        if self.has_memory_interval < (has_memory and needs_one) or self.has_memory_interval > has_memory:
            raise OptionError(
                "memory= and memory_every_steps= or memory_every_seconds= go together (or memory= and "
                "every='auto'): where to keep recent checkpoints, and how often"
            )
        IntervalController(self)  # whose `AdaptiveInterval` checks mtbf_s, restart_s and budget

    @property
    def has_memory_interval(self) -> bool:
        """Whether saves to memory have a separate interval."""
        return (self.memory_every_steps, self.memory_every_seconds) != (None, None)

    def due(self, step: int, now_s: float, measured: Measured) -> set[str]:
        """Returns where to save; see `SavePolicy.due`.

        Raises:
            OptionError: With ``auto``, only a manager can ask it: it has to measure all steps and saves.
        """
        if self.every is not None:
            raise OptionError("every='auto' is no interval that another policy can ask for: use it alone")
        of_tier = self.memory_every_steps, self.memory_every_seconds
        due = set()
        for tier, since_s in measured.since_s.items():
            steps, seconds = (self.every_steps, self.every_seconds) if tier == STORAGE else of_tier
            if is_due(step, steps) or (seconds is not None and since_s >= seconds):
                due.add(tier)
        return due


def is_due(step: int, every_steps: int | None) -> bool:
    """Whether a save is due at a step by an interval of steps."""
    return every_steps is not None and step > 0 and step % every_steps == 0


class EndedSave(NamedTuple):
    """A save that has ended well.

    Attributes:
        tier: Where it went.
        stall_s: Seconds for which the training waited.
        background_s: Seconds that it took after that.
    """

    tier: str
    stall_s: float
    background_s: float


class TrainingTimes:
    """The times of the steps and saves of a training, on this rank; waits for saves are no time of a step.

    Args:
        tiers: Names of the places that the training saves to.
    """

    def __init__(self, *tiers: str) -> None:
        self._steps_s: list[float] = []
        self._last_s: float | None = None
        # Each with the seconds that it stalled the training.
        self._running: dict[str, list[tuple[RunningSave, float]]] = {tier: [] for tier in tiers}

    @property
    def num_steps(self) -> int:
        """Number of steps that were measured, of the last ones."""
        return len(self._steps_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step, in the median; 0 before the first measurement."""
        return median(self._steps_s or [0.0])

    def is_running(self, tier: str) -> bool:
        """Whether a save to a tier is under way."""
        return bool(self._running[tier])

    def step_done(self) -> list[EndedSave]:
        """Measures a step; returns the saves that have ended since the last one."""
        now = time.monotonic()
        if self._last_s is not None:
            self._steps_s = [*self._steps_s, now - self._last_s][-_NUM_STEPS:]
        self._last_s = now
        return [ended for tier in self._running for ended in self._ended(tier)]

    def measure(self, save: Callable[[], SaveT], tier: str) -> tuple[SaveT, EndedSave | None]:
        """Calls `save`; returns its result, and the save if it has ended by then."""
        began = time.monotonic()
        running = save()
        stall_s = time.monotonic() - began
        self._wait(stall_s)
        if running is None:
            return running, EndedSave(tier, stall_s, 0.0)
        self._running[tier].append((running, stall_s))
        return running, None

    def pause(self, wait: Callable[[], T]) -> T:
        """Calls a function that waits for an earlier save, which is no cost of a save either."""
        began = time.monotonic()
        try:
            return wait()
        finally:
            self._wait(time.monotonic() - began)

    def _wait(self, seconds: float) -> None:
        if self._last_s is not None:
            self._last_s += seconds

    def _ended(self, tier: str) -> list[EndedSave]:
        ended = [(save, stall_s) for save, stall_s in self._running[tier] if save.done()]
        self._running[tier] = [pair for pair in self._running[tier] if pair not in ended]
        return [
            EndedSave(tier, stall_s, save.report.background_s)
            for save, stall_s in ended
            if save.report is not None  # otherwise it has failed, or was dropped
        ]


class IntervalController:
    """The seconds between saves to each tier, as given, or computed from the times of steps and saves.

    The computation is that of `fastload.training.cadence.AdaptiveInterval`. With a memory tier, each tier has
    the interval for the failures that it survives. Storage gets at most half of the budget and memory the
    rest, as in `fastload.training.cadence.recommend_tiers`.

    Args:
        policy: The requested intervals.
        num_hosts: Hosts with in-memory checkpoints.
    """

    def __init__(self, policy: IntervalPolicy, num_hosts: int = 1) -> None:
        self._policy = policy
        self._num_hosts = num_hosts
        self._storage: _TierInterval | None = None
        self._memory: _TierInterval | None = None
        self._times = TrainingTimes(_TIER, STORAGE)
        self._since = dict.fromkeys((STORAGE, _TIER), time.monotonic())
        if policy.every is None or policy.mtbf_s is None:
            return
        cadence = AdaptiveInterval(
            mtbf_s=policy.mtbf_s,
            restart_s=policy.restart_s,
            budget=policy.budget,
            concurrent_saves=1,  # saves are written one at a time
            interval_steps=_FIRST_STEPS,
        )
        self._storage = _TierInterval(cadence, "saving")
        if policy.memory_copies is not None:
            self._memory = _TierInterval(cadence, "" if policy.has_memory_interval else "saving to the tier")

    @property
    def storage_s(self) -> float | None:
        """Seconds between saves to storage; None before the first measurement, or if there is none."""
        return self._policy.every_seconds if self._storage is None else self._seconds(STORAGE, self._storage)

    @property
    def memory_s(self) -> float | None:
        """Seconds between saves to memory, likewise."""
        if self._memory is None or self._policy.has_memory_interval:
            return self._policy.memory_every_seconds
        return self._seconds(_TIER, self._memory)

    def _seconds(self, name: str, tier: _TierInterval) -> float | None:
        is_first_running = self._times.is_running(name) and not tier.cadence.saves
        if self._times.num_steps < 2 or is_first_running:
            return None
        return tier.cadence.interval_steps * self._times.step_s

    def step_done(self) -> None:
        """Measures a step, and saves that have ended."""
        if self._storage is not None:
            for ended in self._times.step_done():
                self._learn(ended)

    def take_due(self) -> tuple[set[str], str]:
        """Returns the tiers to which a save is due by now, once for each save, and no problem."""
        now, due = time.monotonic(), set()
        for tier, seconds in ((STORAGE, self.storage_s), (_TIER, self.memory_s)):
            if seconds is not None and now >= self._since[tier] + seconds:
                due.add(tier)
                self._since[tier] = now
        return due, ""

    def save_begins(self) -> None:
        """Notes that a save to storage begins, and with it the interval to the next one."""
        self._since[STORAGE] = time.monotonic()

    def measure(self, save: Callable[[], SaveT], *, to_tier: bool = False) -> SaveT:
        """Calls `save`, and measures the stall of the training; the save is one to storage or to the tier."""
        if self._storage is None:
            return save()
        running, ended = self._times.measure(save, _TIER if to_tier else STORAGE)
        if ended is not None:
            self._learn(ended)
        return running

    def pause(self, wait: Callable[[], T]) -> T:
        """Calls a function that waits for an earlier save.

        It is no time of a step, and no cost of a save: the interval already leaves time for a save to end.
        """
        return self._times.pause(wait)

    def _learn(self, ended: EndedSave) -> None:
        tier = self._memory if ended.tier == _TIER else self._storage
        if not self._times.num_steps or tier is None or self._storage is None:
            return
        save = MeasuredSave(max(self._times.step_s, _MIN_STEP_S), ended.stall_s, ended.background_s)
        budget = self._policy.budget
        if self._memory is None:
            return tier.measured(save)
        of_memory_s, of_storage_s = self._mtbf_by_tier(self._memory.background_s)
        if tier is self._storage:
            tier.measured(save, mtbf_s=of_storage_s, budget=budget / 2)
        else:
            left = max(budget / 2, budget - self._storage.overhead)
            tier.measured(save, mtbf_s=of_memory_s, budget=left)

    def _mtbf_by_tier(self, copy_s: float) -> tuple[float, float]:
        """Returns the mean seconds between failures that memory survives, and between the others.

        A failure takes one host, as in `fastload.training.cadence.loss_probability`. With one copy memory
        survives only failures of processes. Their share is unknown, so each tier has the interval for all
        failures.

        Args:
            copy_s: Seconds to restore all copies after a failure, once training continues.
        """
        policy = self._policy
        assert policy.mtbf_s is not None
        assert policy.memory_copies is not None
        copies, window_s = min(policy.memory_copies, self._num_hosts), policy.restart_s + copy_s
        share = loss_probability(
            num_hosts=self._num_hosts, copies=copies, mtbf_s=policy.mtbf_s, window_s=window_s
        )
        return mtbf_by_tier(policy.mtbf_s, share) if share < 1 else (policy.mtbf_s, policy.mtbf_s)


class _TierInterval:
    """Measured saves to one tier, and the interval that follows.

    Args:
        cadence: The first one.
        doing: Description of the saves for the log; empty logs nothing.

    Attributes:
        cadence: The current one.
    """

    def __init__(self, cadence: AdaptiveInterval, doing: str) -> None:
        self.cadence = cadence
        self._doing = doing

    @property
    def background_s(self) -> float:
        """Seconds of a save after the stall; 0 before the first measurement."""
        return median([save.background_s for save in self.cadence.saves] or [0.0])

    @property
    def overhead(self) -> float:
        """Stall ÷ interval; 0 before the first measurement."""
        saves, num_steps = self.cadence.saves, self.cadence.interval_steps
        return median([save.stall_s / (num_steps * save.step_s) for save in saves] or [0.0])

    def measured(self, save: MeasuredSave, **terms: float) -> None:
        """Updates the interval by one more save, and by other terms of the `AdaptiveInterval`."""
        before = self.cadence.interval_steps
        self.cadence = replace(self.cadence, **terms).measured(save)  # type: ignore[arg-type]
        if self.cadence.interval_steps != before and self._doing:
            _log.info("%s every %d steps: %s", self._doing, self.cadence.interval_steps, self.cadence.why)


@dataclass(frozen=True)
class Measured:
    """What rank 0 has measured of a training.

    Attributes:
        step_s: Seconds of a step, in the median; 0 before the first measurement.
        since_s: Tier → seconds since the last save to it began, or since the start.
        saves: Tier → the last saves to it that have ended, oldest first.
    """

    step_s: float
    since_s: Mapping[str, float]
    saves: Mapping[str, tuple[EndedSave, ...]]


class SavePolicy(Protocol):
    """When to save.

    Rank 0 asks it in each `CheckpointManager.should_save`. All ranks save at that step; with steps below a
    quarter of a second at a later one, within about a second. An error in it is raised on all ranks.
    """

    def due(self, step: int, now_s: float, measured: Measured) -> Collection[str]:
        """Returns where to save: ``storage``, and the name of the tier (``memory``); empty for nowhere.

        Args:
            step: Steps done so far.
            now_s: Seconds since 1970.
            measured: The times of steps and saves.
        """


class PolicyController:
    """When a save is due by a policy of the caller, which rank 0 asks; takes the place of the intervals.

    Args:
        policy: The policy.
        tier: Name of the tier that there is next to storage; empty without one.
    """

    def __init__(self, policy: SavePolicy, tier: str = "") -> None:
        tiers = (STORAGE, tier) if tier else (STORAGE,)
        self._policy = policy
        self._tier = tier
        self._times = TrainingTimes(*tiers)
        self._since = dict.fromkeys(tiers, time.monotonic())
        self._saves: dict[str, tuple[EndedSave, ...]] = dict.fromkeys(tiers, ())
        self._due: set[str] = set()
        self._problem = ""

    def step_done(self) -> None:
        """Measures a step, and saves that have ended."""
        for ended in self._times.step_done():
            self._note(ended)

    def ask(self, step: int) -> None:
        """Asks the policy about a step."""
        now = time.monotonic()
        since_s = {tier: now - began for tier, began in self._since.items()}
        measured = Measured(self._times.step_s, since_s, dict(self._saves))
        try:
            due = self._policy.due(step, time.time(), measured)
            if isinstance(due, str) or not set(due) <= self._since.keys():
                tiers = ", ".join(self._since)
                raise OptionError(f"it returned {due!r}, which is no collection of tiers of {tiers}")
            self._due |= set(due)
        except Exception as error:
            _log.warning("save_policy= cannot decide about step %d", step, exc_info=error)
            self._problem = f"save_policy= cannot decide about step {step}: {type(error).__name__}: {error}"

    def take_due(self) -> tuple[set[str], str]:
        """Returns the tiers that the policy has named since the last call, and why it failed, if it did."""
        due, problem = self._due, self._problem
        self._due, self._problem = set(), ""
        # From now on, since the save begins later, and the policy is asked meanwhile.
        self._since |= dict.fromkeys(due, time.monotonic())
        return due, problem

    def save_begins(self) -> None:
        """Notes that a save to storage begins."""
        self._since[STORAGE] = time.monotonic()

    def measure(self, save: Callable[[], SaveT], *, to_tier: bool = False) -> SaveT:
        """Calls `save`, and measures the stall of the training; the save is one to storage or to the tier."""
        tier = self._tier if to_tier else STORAGE
        self._since[tier] = time.monotonic()
        running, ended = self._times.measure(save, tier)
        if ended is not None:
            self._note(ended)
        return running

    def pause(self, wait: Callable[[], T]) -> T:
        """Calls a function that waits for an earlier save, which is no time of a step."""
        return self._times.pause(wait)

    def _note(self, ended: EndedSave) -> None:
        self._saves[ended.tier] = (*self._saves[ended.tier], ended)[-_NUM_SAVES:]
