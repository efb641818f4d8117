"""The steps at which to save: the same on all ranks, although clocks differ and a signal may reach one rank.

Rank 0 decides for a *window* of calls at a time. It posts the decision in the rendezvous store before the
window begins, and each rank reads it at its first call of the window. So no rank misses a decision or acts on
it late, ranks need not be in step, and most calls need no communication. A window lasts about half a second.

With steps of less than a millisecond, rank 0 gets through the longest window before the other ranks have read
its decision. It then waits a moment. Otherwise it would run further and further ahead, and all ranks would
learn of a signal later and later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from fastload.comm.world import Decisions, World
from fastload.errors import OptionError
from fastload.training.catalog import is_step
from fastload.training.interval import (
    IntervalController,
    IntervalPolicy,
    PolicyController,
    SavePolicy,
    SaveT,
    controller_of,
    is_due,
)
from fastload.training.pending import PendingSaves
from fastload.training.signals import StopSignals
from fastload.training.tier import STORAGE, SaveTier

T = TypeVar("T")

_WINDOW_S = 0.5
_MAX_WINDOW = 32  # calls; steps may become slow while a window lasts
_SHORTEST_S = 0.02  # least duration of the longest window: ranks read a decision in less
_STOP = "schedule/stop"  # key in the store


@dataclass(frozen=True, slots=True)
class ScheduleAnswer:
    """The answer to one call; the same on all ranks.

    Attributes:
        save: Whether to save to storage.
        stop: Whether a signal has asked the job to stop; it stays true.
        failed: Number of a failed save in the background; 0 if there is none.
        tier: Whether to save to the tier.
        problem: Why the policy of the caller cannot decide; empty if it can.
    """

    save: bool = False
    stop: bool = False
    failed: int = 0
    tier: bool = False
    problem: str = ""


class SaveSchedule:
    """Decides at which steps to save, to storage or to the tier. All ranks ask at the same steps.

    Args:
        world: The ranks.
        intervals: When to save.
        policy: The caller's policy, in place of the intervals; None without one.
        pending: This rank's saves.
        tier: The tier, or None.
    """

    def __init__(
        self,
        world: World,
        intervals: IntervalPolicy,
        policy: SavePolicy | None,
        pending: PendingSaves,
        tier: SaveTier | None,
    ) -> None:
        self._world = world
        self._intervals = intervals
        self._tier = tier
        self._asked: PolicyController | None = None
        self._controller: IntervalController | PolicyController
        if policy is not None:
            self._controller = self._asked = PolicyController(policy, tier.name if tier is not None else "")
        else:
            self._controller = controller_of(intervals, tier.num_hosts if tier is not None else 0)
        self._signals = StopSignals(self._on_signal)
        self._decider = _Decider(world, self._controller, self._signals, pending)
        self._windows = _Windows(world, self._decider)
        self._step: int | None = None
        self._answer = ScheduleAnswer()
        self._missed = ScheduleAnswer()  # what was due when the policy of the caller failed

    def ask(self, step: int) -> ScheduleAnswer:
        """Returns the answer for a step; a repeated call for a step returns the same.

        Raises:
            OptionError: The policy of the caller cannot decide; on all ranks.
        """
        self._controller.step_done()
        if step == self._step:
            return self._answer
        if self._asked is not None and self._world.rank == 0:
            self._asked.ask(step)
        decided = self._decider.decide() if self._world.size == 1 else self._windows.next_call()
        stop = self._answer.stop or decided.stop
        save, to_tier = decided.save or self._missed.save, decided.tier or self._missed.tier
        if decided.problem:
            self._answer = replace(self._answer, stop=stop)
            self._missed = ScheduleAnswer(save=save, tier=to_tier)
            raise OptionError(decided.problem)
        self._missed = ScheduleAnswer()
        to_tier = to_tier or is_due(step, self._intervals.memory_every_steps)
        self._step = step
        self._answer = ScheduleAnswer(
            save=save or is_due(step, self._intervals.every_steps),
            stop=stop,
            failed=decided.failed,
            tier=to_tier and not stop,
        )
        return self._answer

    def answer_for(self, step: int) -> ScheduleAnswer:
        """Returns the answer for the last step that was asked about; for other steps, to save to storage."""
        return self._answer if step == self._step else ScheduleAnswer(save=True)

    def stand_in(self, step: Any) -> int:
        """Returns a step; for one that cannot be used the last that was asked about, as on other ranks."""
        return step if is_step(step) else self._step or 0

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked the job to stop, as of the last answer."""
        return self._answer.stop

    def measure(self, save: Callable[[], SaveT], *, to_tier: bool = False) -> SaveT:
        """Calls `save`. The interval to the next save to storage begins with one to storage."""
        if not to_tier:
            self._controller.save_begins()
        return self._controller.measure(save, to_tier=to_tier)

    def pause(self, wait: Callable[[], T]) -> T:
        """Calls a function that waits, which is no time of a step."""
        return self._controller.pause(wait)

    def close(self) -> None:
        """Restores the previous signal handlers."""
        self._signals.close()
        self._windows.close()

    def _on_signal(self) -> None:
        """Notifies rank 0 of a signal; from any thread, never raises."""
        if self._tier is not None:
            self._tier.arm()
        self._world.rendezvous.tell(_STOP, limit_s=self._world.patience_s)


class _Decider:
    """Makes rank 0's decisions: by its clock or policy, and by the signals of all ranks."""

    def __init__(
        self,
        world: World,
        controller: IntervalController | PolicyController,
        signals: StopSignals,
        pending: PendingSaves,
    ) -> None:
        self._world = world
        self._controller = controller
        self._signals = signals
        self._pending = pending
        self._stopping = False  # decided, perhaps for a window that has not begun

    def decide(self) -> ScheduleAnswer:
        """Returns the decision for the next window."""
        stop = not self._stopping and self._is_signalled()
        self._stopping = self._stopping or stop
        due, problem = self._controller.take_due()
        if stop:
            self._controller.save_begins()
        return ScheduleAnswer(
            save=stop or STORAGE in due,
            stop=stop,
            failed=self._pending.failed,
            tier=bool(due - {STORAGE}),
            problem=problem,
        )

    def _is_signalled(self) -> bool:
        return self._signals.received or self._world.rendezvous.watch(_STOP, alive=False)


class _Windows:
    """The calls of one rank, in windows.

    Args:
        world: The ranks.
        decider: Makes the decisions on rank 0.
    """

    def __init__(self, world: World, decider: _Decider) -> None:
        self._decisions = Decisions(world, "schedule", "asking whether to save")
        self._leader = _Leader(self._decisions, decider) if world.rank == 0 else None
        self._num_calls = 0
        self._until = 0  # the first call after the windows that were decided

    def next_call(self) -> ScheduleAnswer:
        """Returns the decision of a window at its first call; at others, not to save."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if self._leader is not None:
            self._leader.advance(call)
        if call < self._until:
            return ScheduleAnswer()
        window = self._decisions.take()
        self._until = window["until"]
        return ScheduleAnswer(**window["answer"])

    def close(self) -> None:
        """Ends the windows on this rank."""
        self._decisions.close(_STOP)


class _Leader:
    """Decides on rank 0 for the windows ahead."""

    def __init__(self, decisions: Decisions, decider: _Decider) -> None:
        self._decisions = decisions
        self._decider = decider
        self._until = 0
        self._window = 1
        self._next_call = 0
        self._last = (0, time.monotonic())

    def advance(self, call: int) -> None:
        """Decides for the next window, halfway through the current one."""
        if call < self._next_call:
            return
        self._window = self._next_window(call)
        self._until += self._window
        self._next_call = self._until - self._window // 2
        self._decisions.post({"until": self._until, "answer": asdict(self._decider.decide())})

    def _next_window(self, call: int) -> int:
        if self._window == _MAX_WINDOW:
            time.sleep(max(0.0, self._last[1] + _SHORTEST_S - time.monotonic()))
        now = time.monotonic()
        (last_call, last_s), self._last = self._last, (call, now)
        if call == last_call:
            return 1
        fitting = int(_WINDOW_S * (call - last_call) / max(now - last_s, 1e-9))
        return max(1, min(fitting, 2 * self._window, _MAX_WINDOW))
