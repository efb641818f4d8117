"""When a save is due: by intervals, or by a policy of the caller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

from fastload.base.registry import extension
from fastload.errors import OptionError
from fastload.training.tier import STORAGE, RunningSave

T = TypeVar("T")
SaveT = TypeVar("SaveT", bound=RunningSave | None)

_log = logging.getLogger(__name__)

_DEFAULT_S = 1800.0  # default interval between saves
_NUM_STEPS = 101  # last steps, whose median is the time of a step
_NUM_SAVES = 5  # last ones that a policy of the caller is told of

TIER = "tier"
"""The tier next to storage; only a policy of the caller knows its name."""


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
        controller_of(self)  # that of ``auto`` checks mtbf_s, restart_s and budget

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
    """When a save is due by the seconds that a policy gives.

    Args:
        policy: The intervals.

    Attributes:
        policy: The intervals.
    """

    def __init__(self, policy: IntervalPolicy) -> None:
        self.policy = policy
        self._since = dict.fromkeys((STORAGE, TIER), time.monotonic())

    @property
    def storage_s(self) -> float | None:
        """Seconds between saves to storage; None if there is no such interval."""
        return self.policy.every_seconds

    @property
    def memory_s(self) -> float | None:
        """Seconds between saves to the tier, likewise."""
        return self.policy.memory_every_seconds

    def step_done(self) -> None:
        """Notes the end of a step, which changes nothing here."""

    def take_due(self) -> tuple[set[str], str]:
        """Returns the tiers to which a save is due by now, once for each save, and no problem."""
        now, due = time.monotonic(), set()
        for tier, seconds in ((STORAGE, self.storage_s), (TIER, self.memory_s)):
            if seconds is not None and now >= self._since[tier] + seconds:
                due.add(tier)
                self._since[tier] = now
        return due, ""

    def save_begins(self) -> None:
        """Notes that a save to storage begins, and with it the interval to the next one."""
        self._since[STORAGE] = time.monotonic()

    def measure(self, save: Callable[[], SaveT], *, to_tier: bool = False) -> SaveT:
        """Calls `save`, which is one to storage or to the tier."""
        return save()

    def pause(self, wait: Callable[[], T]) -> T:
        """Calls a function that waits for an earlier save."""
        return wait()


def controller_of(policy: IntervalPolicy, num_hosts: int = 1) -> IntervalController:
    """Returns what tells when a save is due; of ``auto``, it computes the intervals, and is an extension.

    Args:
        policy: The intervals.
        num_hosts: Hosts of the tier.

    Raises:
        OptionError: Values for ``auto`` are invalid, or its extension is not installed.
    """
    if policy.every is None:
        return IntervalController(policy)
    controller: IntervalController = extension("intervals", policy.every, f"every={policy.every!r}")(
        policy, num_hosts
    )
    return controller


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
