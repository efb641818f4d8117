"""How often to save, worked out while training runs: measured by one rank, which decides for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol, TypeVar

from fastload.errors import OptionError
from fastload.estimate.cadence import Cadence, Save
from fastload.estimate.tiers import loss_probability, mtbf_by_tier

__all__ = ["Keepers", "Pace", "Rhythm", "Steady", "UnderWay"]

_log = logging.getLogger(__name__)
_FIRST_STEPS = 10  # between the first saves, which are made to be measured
_NUM_STEPS = 101  # whose median is the time of a step


@dataclass(frozen=True)
class Keepers:
    """Who keeps recent checkpoints in memory.

    Attributes:
        num_hosts: Hosts that there are.
        num_copies: How many of them are to keep each share.
        interval_s: Seconds between those, if given.
        is_paced: Whether they have no interval of their own, neither in steps nor in seconds.
    """

    num_hosts: int
    num_copies: int
    interval_s: float | None = None
    is_paced: bool = False

    def mtbf_by_tier(self, mtbf_s: float, window_s: float) -> tuple[float, float]:
        """Returns the mean times in seconds between failures that memory gets over, and that need storage.

        Failures are as in `fastload.estimate.tiers.loss_probability`: each takes a host. With one copy memory
        gets over processes that die, and how many failures are of that kind nobody knows: then each tier is
        there for all of them.

        Args:
            mtbf_s: Mean time between failures of the job.
            window_s: Time from a failure until all copies are there again.
        """
        copies = min(self.num_copies, self.num_hosts)
        share = loss_probability(num_hosts=self.num_hosts, copies=copies, mtbf_s=mtbf_s, window_s=window_s)
        return mtbf_by_tier(mtbf_s, share) if share < 1 else (mtbf_s, mtbf_s)


@dataclass(frozen=True)
class Rhythm:
    """What was asked for: seconds between saves, or ``auto`` and what it is to be worked out from.

    Attributes:
        every: ``auto`` or None.
        every_seconds: Seconds between saves; None for none by time.
        mtbf_s: Mean time between failures of the job, for ``auto``.
        restart_s: Seconds from a failure until training goes on, for ``auto``.
        budget: Largest part of the time that training may stand still to save, for ``auto``.
    """

    every: str | None
    every_seconds: float | None
    mtbf_s: float | None
    restart_s: float
    budget: float

    def __post_init__(self) -> None:
        seconds = self.every_seconds
        if seconds is not None and not (type(seconds) in (int, float) and seconds > 0):
            raise OptionError(f"every_seconds={seconds!r}: must be a number of seconds above 0")
        if self.every not in (None, "auto"):
            raise OptionError(
                f"every={self.every!r}: must be 'auto', or every_steps= or every_seconds= be used"
            )
        if self.every == "auto" and (self.mtbf_s is None or seconds is not None):
            raise OptionError(
                "every='auto' needs mtbf_s=, the job's mean time between failures, and no every_seconds="
            )
        self.start()

    def start(self, keepers: Keepers | None = None) -> Pace | Steady:
        """Returns what says how long to wait, as a training begins.

        Args:
            keepers: Who keeps recent checkpoints in memory; None for nobody.
        """
        if self.mtbf_s is None or self.every is None:
            return Steady(self.every_seconds, keepers.interval_s if keepers is not None else None)
        return Pace(mtbf_s=self.mtbf_s, restart_s=self.restart_s, budget=self.budget, keepers=keepers)


class Ended(Protocol):
    """What a report says of how long it took."""

    @property
    def background_s(self) -> float:
        """Seconds until it counted, once training went on."""
        ...


class UnderWay(Protocol):
    """A save that goes on in the background, to either tier."""

    @property
    def report(self) -> Ended | None:
        """What was done, once it has succeeded; else None."""
        ...

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...


T = TypeVar("T", bound=UnderWay | None)


class Steady:
    """Intervals that were given.

    Args:
        interval_s: Seconds between saves to storage, or None for none by time.
        memory_interval_s: Seconds between those to memory, likewise.
    """

    def __init__(self, interval_s: float | None, memory_interval_s: float | None = None) -> None:
        self.interval_s = interval_s
        self.memory_interval_s = memory_interval_s

    def stepped(self) -> None:
        """Notes that a step is over."""

    def saving(self, save: Callable[[], T]) -> T:
        """Saves to storage."""
        return save()

    def keeping(self, keep: Callable[[], T]) -> T:
        """Saves to memory."""
        return keep()


class Pace:
    """Intervals that follow from what steps and saves take; see `fastload.estimate.cadence.Cadence`.

    With memory each tier has that of the failures that it is there for. Storage gets at most half of the
    budget, and memory what that leaves, as in `fastload.estimate.tiers.recommend_tiers`.

    Args:
        mtbf_s: Mean time between failures of the job, in seconds.
        restart_s: Seconds from a failure until training goes on.
        budget: Largest part of the time that training may stand still to save.
        keepers: Who keeps recent checkpoints in memory; None for nobody.
    """

    def __init__(
        self, *, mtbf_s: float, restart_s: float, budget: float, keepers: Keepers | None = None
    ) -> None:
        cadence = Cadence(
            mtbf_s=mtbf_s,
            restart_s=restart_s,
            budget=budget,
            saves_in_flight=1,  # they are written one after the other
            interval_steps=_FIRST_STEPS,
        )
        self._mtbf_s, self._restart_s, self._budget = mtbf_s, restart_s, budget
        self._keepers = keepers
        self._storage = _Tier(cadence, "saving")
        self._memory = _Tier(cadence, "keeping in memory" if keepers and keepers.is_paced else "")
        self._steps_s: list[float] = []
        self._last_s: float | None = None

    @property
    def interval_s(self) -> float | None:
        """Seconds between saves to storage; None while too little is known."""
        return self._seconds(self._storage)

    @property
    def memory_interval_s(self) -> float | None:
        """Seconds between saves to memory; None while too little is known, or for none by time."""
        if self._keepers is None or not self._keepers.is_paced:
            return self._keepers.interval_s if self._keepers is not None else None
        return self._seconds(self._memory)

    def _seconds(self, tier: _Tier) -> float | None:
        if len(self._steps_s) < 2 or tier.is_first_under_way:
            return None
        return tier.cadence.interval_steps * median(self._steps_s)

    def stepped(self) -> None:
        """Notes that a step is over, and learns from saves that have ended."""
        now = time.monotonic()
        if self._last_s is not None:
            self._steps_s = [*self._steps_s, now - self._last_s][-_NUM_STEPS:]
        self._last_s = now
        for tier in (self._memory, self._storage):
            for stall_s, background_s in tier.ended():
                self._feed(tier, stall_s, background_s)

    def saving(self, save: Callable[[], T]) -> T:
        """Saves to storage, and measures for how long training stands still."""
        return self._begin(self._storage, save)

    def keeping(self, keep: Callable[[], T]) -> T:
        """Saves to memory, and measures for how long training stands still."""
        return self._begin(self._memory, keep)

    def _begin(self, tier: _Tier, save: Callable[[], T]) -> T:
        began = time.monotonic()
        handle = save()
        stall_s = time.monotonic() - began
        self._last_s = None if self._last_s is None else self._last_s + stall_s
        if handle is None:
            self._feed(tier, stall_s, 0.0)
        else:
            tier.begun(handle, stall_s)
        return handle

    def _feed(self, tier: _Tier, stall_s: float, background_s: float) -> None:
        if not self._steps_s:
            return
        save = Save(max(median(self._steps_s), 1e-6), stall_s, background_s)
        if self._keepers is None:
            return tier.measured(save)
        window_s = self._restart_s + self._memory.background_s
        of_memory_s, of_storage_s = self._keepers.mtbf_by_tier(self._mtbf_s, window_s)
        if tier is self._storage:
            tier.measured(save, mtbf_s=of_storage_s, budget=self._budget / 2)
        else:
            left = max(self._budget / 2, self._budget - self._storage.overhead)
            tier.measured(save, mtbf_s=of_memory_s, budget=left)


class _Tier:
    """The saves to one tier: what they take, and the interval that follows.

    Args:
        cadence: To begin with.
        doing: What is done so often, for the log; empty to say nothing.

    Attributes:
        cadence: As of now.
    """

    def __init__(self, cadence: Cadence, doing: str) -> None:
        self.cadence = cadence
        self._doing = doing
        self._under_way: list[tuple[UnderWay, float]] = []

    @property
    def is_first_under_way(self) -> bool:
        """Whether a save goes on, and none has been measured: nobody knows how long it takes."""
        return bool(self._under_way) and not self.cadence.saves

    @property
    def background_s(self) -> float:
        """Time that a save takes after training goes on; 0 while it is not known."""
        return median([save.background_s for save in self.cadence.saves] or [0.0])

    @property
    def overhead(self) -> float:
        """Stall ÷ interval; 0 while it is not known."""
        saves, num_steps = self.cadence.saves, self.cadence.interval_steps
        return median([save.stall_s / (num_steps * save.step_s) for save in saves] or [0.0])

    def begun(self, handle: UnderWay, stall_s: float) -> None:
        """Notes a save that goes on, and for how long training stood still for it."""
        self._under_way.append((handle, stall_s))

    def ended(self) -> list[tuple[float, float]]:
        """Returns stall and background of those that have ended since the last time, in seconds."""
        ended = [(handle, stall_s) for handle, stall_s in self._under_way if handle.done()]
        self._under_way = [pair for pair in self._under_way if pair not in ended]
        # One without a report has failed, which is told elsewhere, or was given up.
        reports = [(handle.report, stall_s) for handle, stall_s in ended]
        return [(stall_s, report.background_s) for report, stall_s in reports if report is not None]

    def measured(self, save: Save, **terms: float) -> None:
        """Works the interval out anew, from one more save and for other terms of the `Cadence`."""
        before = self.cadence.interval_steps
        self.cadence = replace(self.cadence, **terms).measured(save)  # type: ignore[arg-type]
        if self.cadence.interval_steps != before and self._doing:
            _log.info("%s every %d steps: %s", self._doing, self.cadence.interval_steps, self.cadence.why)
