"""The intervals of ``every="auto"``: computed during training, from the times of its steps and saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TypeVar

from fastload.planning.cadence import AdaptiveInterval, MeasuredSave, loss_probability, mtbf_by_tier
from fastload.training.interval import (
    TIER,
    EndedSave,
    IntervalController,
    IntervalPolicy,
    SaveT,
    TrainingTimes,
)
from fastload.training.tier import STORAGE

T = TypeVar("T")

_log = logging.getLogger(__name__)

_FIRST_STEPS = 10  # between the first saves, which are measured
_MIN_STEP_S = 1e-6


class AdaptiveController(IntervalController):
    """When a save is due by the costs of the saves so far.

    The computation is that of `fastload.planning.cadence.AdaptiveInterval`. With a memory tier, each tier has
    the interval for the failures that it survives. Storage gets at most half of the budget and memory the
    rest, as in `fastload.planning.cadence.recommend_tiers`.

    Args:
        policy: The requested intervals, of which ``every`` is ``auto``.
        num_hosts: Hosts with in-memory checkpoints.
    """

    def __init__(self, policy: IntervalPolicy, num_hosts: int) -> None:
        super().__init__(policy)
        assert policy.mtbf_s is not None
        self._num_hosts = num_hosts
        self._times = TrainingTimes(TIER, STORAGE)
        first = AdaptiveInterval(
            mtbf_s=policy.mtbf_s,
            restart_s=policy.restart_s,
            budget=policy.budget,
            concurrent_saves=1,  # saves are written one at a time
            interval_steps=_FIRST_STEPS,
        )
        self._storage = _TierInterval(first, "saving")
        self._memory: _TierInterval | None = None
        if policy.memory_copies is not None:
            self._memory = _TierInterval(first, "" if policy.has_memory_interval else "saving to the tier")

    @property
    def storage_s(self) -> float | None:
        """Seconds between saves to storage; None before the first measurement."""
        return self._seconds(STORAGE, self._storage)

    @property
    def memory_s(self) -> float | None:
        """Seconds between saves to memory; None also if there is no such interval."""
        if self._memory is None or self.policy.has_memory_interval:
            return self.policy.memory_every_seconds
        return self._seconds(TIER, self._memory)

    def _seconds(self, name: str, tier: _TierInterval) -> float | None:
        is_first_running = self._times.is_running(name) and not tier.cadence.saves
        if self._times.num_steps < 2 or is_first_running:
            return None
        return tier.cadence.interval_steps * self._times.step_s

    def step_done(self) -> None:
        """Measures a step, and saves that have ended."""
        for ended in self._times.step_done():
            self._learn(ended)

    def measure(self, save: Callable[[], SaveT], *, to_tier: bool = False) -> SaveT:
        """Calls `save`, and measures the stall of the training; the save is one to storage or to the tier."""
        running, ended = self._times.measure(save, TIER if to_tier else STORAGE)
        if ended is not None:
            self._learn(ended)
        return running

    def pause(self, wait: Callable[[], T]) -> T:
        """Calls a function that waits for an earlier save.

        It is no time of a step, and no cost of a save: the interval already leaves time for a save to end.
        """
        return self._times.pause(wait)

    def _learn(self, ended: EndedSave) -> None:
        tier = self._memory if ended.tier == TIER else self._storage
        if not self._times.num_steps or tier is None:
            return
        save = MeasuredSave(max(self._times.step_s, _MIN_STEP_S), ended.stall_s, ended.background_s)
        budget = self.policy.budget
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

        A failure takes one host, as in `fastload.planning.cadence.loss_probability`. With one copy memory
        survives only failures of processes. Their share is unknown, so each tier has the interval for all
        failures.

        Args:
            copy_s: Seconds to restore all copies after a failure, once training continues.
        """
        policy = self.policy
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
