"""How often to save, worked out while training runs: measured by one rank, which decides for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from fastload.errors import OptionError
from fastload.estimate.cadence import Cadence, Save
from fastload.saving.handle import SaveHandle

__all__ = ["Pace", "Rhythm", "Steady"]

_log = logging.getLogger(__name__)

_FIRST_STEPS = 10  # between the first saves, which are made to be measured
_NUM_STEPS = 101  # whose median is the time of a step


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

    def start(self) -> Pace | Steady:
        """Returns what says how long to wait, as a training begins."""
        if self.mtbf_s is None or self.every is None:
            return Steady(self.every_seconds)
        return Pace(mtbf_s=self.mtbf_s, restart_s=self.restart_s, budget=self.budget)


class Steady:
    """An interval that was given.

    Args:
        interval_s: Seconds between saves, or None for none by time.
    """

    def __init__(self, interval_s: float | None) -> None:
        self.interval_s = interval_s

    def stepped(self) -> None:
        """Notes that a step is over."""

    def saving(self, save: Callable[[], SaveHandle | None]) -> SaveHandle | None:
        """Saves."""
        return save()


class Pace:
    """An interval that follows from what steps and saves take; see `fastload.estimate.cadence.Cadence`.

    Args:
        mtbf_s: Mean time between failures of the job, in seconds.
        restart_s: Seconds from a failure until training goes on.
        budget: Largest part of the time that training may stand still to save.
    """

    def __init__(self, *, mtbf_s: float, restart_s: float, budget: float) -> None:
        self._cadence = Cadence(
            mtbf_s=mtbf_s,
            restart_s=restart_s,
            budget=budget,
            saves_in_flight=1,  # they are written one after the other
            interval_steps=_FIRST_STEPS,
        )
        self._steps_s: list[float] = []
        self._last_s: float | None = None
        self._under_way: list[tuple[SaveHandle, float]] = []

    @property
    def interval_s(self) -> float | None:
        """Seconds between saves; None while too little is known."""
        if len(self._steps_s) < 2:
            return None
        return self._cadence.interval_steps * median(self._steps_s)

    def stepped(self) -> None:
        """Notes that a step is over, and learns from saves that have ended."""
        now = time.monotonic()
        if self._last_s is not None:
            self._steps_s = [*self._steps_s, now - self._last_s][-_NUM_STEPS:]
        self._last_s = now
        self._learn()

    def saving(self, save: Callable[[], SaveHandle | None]) -> SaveHandle | None:
        """Saves, and measures for how long training stands still."""
        began = time.monotonic()
        handle = save()
        stall_s = time.monotonic() - began
        self._last_s = None if self._last_s is None else self._last_s + stall_s
        if handle is None:
            self._feed(stall_s, 0.0)
        else:
            self._under_way.append((handle, stall_s))
        return handle

    def _learn(self) -> None:
        ended = [(handle, stall_s) for handle, stall_s in self._under_way if handle.done()]
        self._under_way = [(handle, stall_s) for handle, stall_s in self._under_way if not handle.done()]
        for handle, stall_s in ended:
            report = handle.report
            if report is not None:  # else it failed, which is told elsewhere, or was given up
                self._feed(stall_s, max(0.0, report.total_s - report.stall_s - report.waited_s))

    def _feed(self, stall_s: float, background_s: float) -> None:
        if not self._steps_s:
            return
        before = self._cadence.interval_steps
        step_s = max(median(self._steps_s), 1e-6)
        self._cadence = self._cadence.measured(Save(step_s, stall_s, background_s))
        if self._cadence.interval_steps != before:
            _log.info("saving every %d steps: %s", self._cadence.interval_steps, self._cadence.why)
