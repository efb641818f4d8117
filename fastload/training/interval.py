"""Intervals between saves, as given or as rank 0 computes them during training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from fastload.errors import OptionError
from fastload.estimate.cadence import AdaptiveInterval, MeasuredSave, loss_probability, mtbf_by_tier

if TYPE_CHECKING:
    from fastload.memory_tier.tier import TierSave
    from fastload.saving.background import SaveHandle

T = TypeVar("T")
SaveT = TypeVar("SaveT", bound="SaveHandle | TierSave | None")

_log = logging.getLogger(__name__)

_DEFAULT_S = 1800.0  # default interval between saves
_FIRST_STEPS = 10  # between the first saves, which are measured
_NUM_STEPS = 101  # last steps, whose median is the time of a step


@dataclass(frozen=True, kw_only=True)
class IntervalPolicy:
    """When to save: the arguments of a `CheckpointManager`, checked.

    Attributes:
        every: ``auto`` or None.
        every_steps: Steps between saves to storage, or None.
        every_seconds: Seconds between them, infinity for none, or None. 1800 if none of these three is
            given.
        mtbf_s: Mean time between failures of the job, for ``auto``.
        restart_s: Seconds from a failure until training continues, for ``auto``.
        budget: Largest part of the time that training may wait for saves, for ``auto``.
        memory_copies: Hosts that have each share of an in-memory checkpoint; None without a memory tier.
        memory_every_steps: Steps between saves to memory.
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


class IntervalController:
    """The seconds between saves to each tier, as given, or computed from the times of steps and saves.

    The computation is that of `fastload.estimate.cadence.AdaptiveInterval`. With a memory tier, each tier has
    the interval for the failures that it survives. Storage gets at most half of the budget and memory the
    rest, as in `fastload.estimate.cadence.recommend_tiers`.

    Args:
        policy: The requested intervals.
        num_hosts: Hosts with in-memory checkpoints.
    """

    def __init__(self, policy: IntervalPolicy, num_hosts: int = 1) -> None:
        self._policy = policy
        self._num_hosts = num_hosts
        self._storage: _TierInterval | None = None
        self._memory: _TierInterval | None = None
        self._steps_s: list[float] = []
        self._last_s: float | None = None
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
            self._memory = _TierInterval(cadence, "" if policy.has_memory_interval else "saving to memory")

    @property
    def storage_s(self) -> float | None:
        """Seconds between saves to storage; None before the first measurement, or if there is none."""
        return self._policy.every_seconds if self._storage is None else self._seconds(self._storage)

    @property
    def memory_s(self) -> float | None:
        """Seconds between saves to memory, likewise."""
        if self._memory is None or self._policy.has_memory_interval:
            return self._policy.memory_every_seconds
        return self._seconds(self._memory)

    def _seconds(self, tier: _TierInterval) -> float | None:
        if len(self._steps_s) < 2 or tier.is_first_running:
            return None
        return tier.cadence.interval_steps * median(self._steps_s)

    def step_done(self) -> None:
        """Measures a step, and saves that have ended."""
        if self._storage is None:
            return
        now = time.monotonic()
        if self._last_s is not None:
            self._steps_s = [*self._steps_s, now - self._last_s][-_NUM_STEPS:]
        self._last_s = now
        for tier in (self._memory, self._storage):
            for stall_s, background_s in tier.ended() if tier is not None else ():
                self._learn(tier, stall_s, background_s)

    def measure(self, save: Callable[[], SaveT], *, in_memory: bool = False) -> SaveT:
        """Calls `save`, and measures the stall of the training; the save is one to storage or to memory."""
        tier = self._memory if in_memory else self._storage
        began = time.monotonic()
        running = save()
        stall_s = time.monotonic() - began
        self._last_s = None if self._last_s is None else self._last_s + stall_s
        if running is not None and tier is not None:
            tier.running.append((running, stall_s))
        else:
            self._learn(tier, stall_s, 0.0)
        return running

    def pause(self, wait: Callable[[], T]) -> T:
        """Calls a function that waits for an earlier save.

        It is no time of a step, and no cost of a save: the interval already leaves time for a save to end.
        """
        began = time.monotonic()
        try:
            return wait()
        finally:
            waited_s = time.monotonic() - began
            self._last_s = None if self._last_s is None else self._last_s + waited_s

    def _learn(self, tier: _TierInterval | None, stall_s: float, background_s: float) -> None:
        if not self._steps_s or tier is None or self._storage is None:
            return
        save = MeasuredSave(max(median(self._steps_s), 1e-6), stall_s, background_s)
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

        A failure takes one host, as in `fastload.estimate.cadence.loss_probability`. With one copy memory
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
        running: Saves under way, each with the seconds that it stalled the training.
    """

    def __init__(self, cadence: AdaptiveInterval, doing: str) -> None:
        self.cadence = cadence
        self.running: list[tuple[SaveHandle | TierSave, float]] = []
        self._doing = doing

    @property
    def is_first_running(self) -> bool:
        """Whether the first save is under way, so that none has been measured."""
        return bool(self.running) and not self.cadence.saves

    @property
    def background_s(self) -> float:
        """Seconds of a save after the stall; 0 before the first measurement."""
        return median([save.background_s for save in self.cadence.saves] or [0.0])

    @property
    def overhead(self) -> float:
        """Stall ÷ interval; 0 before the first measurement."""
        saves, num_steps = self.cadence.saves, self.cadence.interval_steps
        return median([save.stall_s / (num_steps * save.step_s) for save in saves] or [0.0])

    def ended(self) -> list[tuple[float, float]]:
        """Returns stall and background seconds of the saves that have ended since the last call."""
        ended = [(save, stall_s) for save, stall_s in self.running if save.done()]
        self.running = [pair for pair in self.running if pair not in ended]
        # A save without a report has failed, or was dropped.
        reports = [(save.report, stall_s) for save, stall_s in ended]
        return [(stall_s, report.background_s) for report, stall_s in reports if report is not None]

    def measured(self, save: MeasuredSave, **terms: float) -> None:
        """Updates the interval by one more save, and by other terms of the `AdaptiveInterval`."""
        before = self.cadence.interval_steps
        self.cadence = replace(self.cadence, **terms).measured(save)  # type: ignore[arg-type]
        if self.cadence.interval_steps != before and self._doing:
            _log.info("%s every %d steps: %s", self._doing, self.cadence.interval_steps, self.cadence.why)
