"""When to save: the same answer on all ranks, although clocks differ and a signal may hit one rank only.

Rank 0 decides, for a *window* of calls at a time, and leaves the decision in the rendezvous store before
the window begins; at its first call of a window a rank reads it. So nobody can miss a decision or see it
late, the ranks need not keep step, and most calls ask nobody. Windows last about half a second.

Steps of less than a millisecond fill the longest window in less time than other ranks take to read its
decision. Rank 0 then waits a moment: it would get ever further ahead of them, and with it the call at which
all hear of a signal.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fastload.comm.world import World
from fastload.saving.handle import SaveHandle
from fastload.training.interval import UnderWay
from fastload.training.policy import Policy
from fastload.training.signals import StopSignals

__all__ = ["Answer", "Schedule", "Timing"]

_WINDOW_S = 0.5
_MAX_WINDOW = 32  # calls; steps may become slow while a window lasts
_SHORTEST_S = 0.02  # of a longest window: each rank reads its decision in less
_BLOCK = 64  # decisions that are forgotten together
_FORGOTTEN_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What holds for one call, on all ranks.

    Attributes:
        save: Whether to save.
        stop: Whether a signal has asked the job to stop; from then on for good.
        failed: Number of a save in the background that has failed; 0 if there is none.
        memory: Whether to keep the state in memory.
    """

    save: bool = False
    stop: bool = False
    failed: int = 0
    memory: bool = False


class Schedule:
    """Answers whether to save.

    All ranks ask at the same steps.

    Args:
        world: The ranks.
        every_steps: Steps between saves; None for none by steps.
        interval_s: Returns the seconds between saves, by the clock of rank 0; None for none by time.
        memory_every_steps: Steps between saves to memory; None likewise.
        memory_interval_s: Returns the seconds between those, likewise.
        signalled: Whether this rank has got a signal to stop.
        failed: Returns the number of a save of this rank's that has failed, or 0.
    """

    def __init__(
        self,
        world: World,
        *,
        every_steps: int | None,
        interval_s: Callable[[], float | None],
        signalled: Callable[[], bool],
        failed: Callable[[], int],
        memory_every_steps: int | None = None,
        memory_interval_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._world = world
        self._every_steps = every_steps
        self._memory_steps = memory_every_steps
        self._judge = _Judge(world, interval_s, memory_interval_s, signalled, failed)
        self._step: int | None = None
        self._answer = Answer()
        self._num_calls = 0
        self._until = 0  # the first call that no known decision is for
        self._num_read = 0
        self._leader = _Leader(world, self._judge) if world.rank == 0 else None

    def ask(self, step: int) -> Answer:
        """Returns the answer for a step; to ask again for the same step changes nothing."""
        if step == self._step:
            return self._answer
        decided = self._judge.decide() if self._world.size == 1 else self._turn()
        by_steps, in_memory = _is_due(step, self._every_steps), _is_due(step, self._memory_steps)
        stop = self._answer.stop or decided.stop
        self._step = step
        self._answer = Answer(
            by_steps or decided.save, stop, decided.failed, (in_memory or decided.memory) and not stop
        )
        return self._answer

    def answer_for(self, step: int) -> Answer:
        """Returns the answer that was given for a step; that it is to be saved, if nobody has asked."""
        return self._answer if step == self._step else Answer(save=True)

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked the job to stop, as of the last answer."""
        return self._answer.stop

    def saved(self) -> None:
        """Notes that a save begins, from which the interval counts anew."""
        self._judge.saved()

    def tell(self) -> None:
        """Tells rank 0 that a signal has come; from any thread, never raises."""
        self._world.rendezvous.tell({_key("stop"): ""}, limit_s=self._world.patience_s)

    def _turn(self) -> Answer:
        """Counts a call; returns the decision of a window if it begins here."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if self._leader is not None:
            self._leader.move_on(call)
        if call < self._until:
            return Answer()
        number, self._num_read = self._num_read, self._num_read + 1
        self._until, answer = self._leader.take() if self._leader is not None else self._read(number)
        return answer

    def _read(self, number: int) -> tuple[int, Answer]:
        world, what = self._world, "asking whether to save"
        text = world.rendezvous.await_text(
            what, _key(number), 0, wait_s=world.patience_s, grace_s=world.grace_s
        )
        if number % _BLOCK == _BLOCK - 1:
            world.rendezvous.count(what, _key(f"seen/{number // _BLOCK}"), 1, limit_s=world.patience_s)
        decision = json.loads(text)
        return decision.pop("until"), Answer(**decision)


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step > 0 and step % every_steps == 0


class _Judge:
    """Decides, on rank 0, by its clock, its own signals and those that the others tell it of."""

    def __init__(
        self,
        world: World,
        interval_s: Callable[[], float | None],
        memory_interval_s: Callable[[], float | None],
        signalled: Callable[[], bool],
        failed: Callable[[], int],
    ) -> None:
        self._world = world
        self._interval_s = interval_s
        self._signalled = signalled
        self._failed = failed
        self._memory_interval_s = memory_interval_s
        self._since = self._memory_since = time.monotonic()
        self._stopping = False  # decided, though the window may not have begun

    def saved(self) -> None:
        """Notes that a save begins."""
        self._since = time.monotonic()

    def decide(self) -> Answer:
        """Returns the decision for a window that is to begin."""
        now = time.monotonic()
        stop = not self._stopping and self._is_signalled()
        self._stopping = self._stopping or stop
        interval_s, memory_s = self._interval_s(), self._memory_interval_s()
        due = interval_s is not None and now >= self._since + interval_s
        if stop or due:
            self._since = now
        in_memory = memory_s is not None and now >= self._memory_since + memory_s
        if in_memory:
            self._memory_since = now
        return Answer(stop or due, stop, self._failed(), in_memory)

    def _is_signalled(self) -> bool:
        world = self._world
        return self._signalled() or world.rendezvous.watch(
            _key("stop"), alive=False, limit_s=world.patience_s
        )


class _Leader:
    """What rank 0 does: decides ahead, and tells the others."""

    def __init__(self, world: World, judge: _Judge) -> None:
        self._world = world
        self._judge = judge
        self._number = 0
        self._until = 0
        self._window = 1
        self._next_call = 0
        self._last = (0, time.monotonic())
        self._decided: list[tuple[int, Answer]] = []
        self._num_forgotten = 0
        self._stale: list[str] = []

    def take(self) -> tuple[int, Answer]:
        """Returns where the next window ends, and its decision."""
        return self._decided.pop(0)

    def move_on(self, call: int) -> None:
        """Decides for the next window, halfway through the one that is."""
        if call < self._next_call:
            return
        self._window = self._next_window(call)
        self._until += self._window
        answer = self._judge.decide()
        self._decided.append((self._until, answer))
        self._next_call = self._until - self._window // 2
        self._post(json.dumps({"until": self._until, **asdict(answer)}))

    def _next_window(self, call: int) -> int:
        if self._window == _MAX_WINDOW:
            time.sleep(max(0.0, self._last[1] + _SHORTEST_S - time.monotonic()))
        now = time.monotonic()
        (last_call, last_s), self._last = self._last, (call, now)
        if call == last_call:
            return 1
        fitting = int(_WINDOW_S * (call - last_call) / max(now - last_s, 1e-9))
        return max(1, min(fitting, 2 * self._window, _MAX_WINDOW))

    def _post(self, text: str) -> None:
        world, rendezvous = self._world, self._world.rendezvous
        what, limit_s = "telling when to save", world.patience_s
        if self._number % _BLOCK == 0 and self._num_forgotten < self._number // _BLOCK:
            block = self._num_forgotten
            if rendezvous.count(what, _key(f"seen/{block}"), 0, limit_s=limit_s) == world.size - 1:
                self._num_forgotten += 1
                self._stale += [_key(number) for number in range(block * _BLOCK, (block + 1) * _BLOCK)]
                self._stale.append(_key(f"seen/{block}"))
        forget, self._stale = self._stale[:_FORGOTTEN_AT_ONCE], self._stale[_FORGOTTEN_AT_ONCE:]
        rendezvous.post(what, _key(self._number), text, forget=forget, limit_s=limit_s)
        self._number += 1


def _key(name: object) -> str:
    return f"schedule/{name}"


_log = logging.getLogger(__name__)


class Timing:
    """Says when to save, and learns from what steps and saves take.

    Args:
        world: The ranks.
        policy: What was asked for.
        num_hosts: Hosts that keep what is in memory; 0 for none.
        failed: Returns the number of a save of this rank's that has failed, or 0.
        signalled: Called, in a thread, when this rank has got a signal to stop.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        num_hosts: int,
        failed: Callable[[], int],
        signalled: Callable[[], object],
    ) -> None:
        self._pace = policy.rhythm.start(policy.keepers(num_hosts))
        self._schedule = Schedule(
            world,
            every_steps=policy.every_steps,
            interval_s=lambda: self._pace.interval_s,
            signalled=lambda: self._signals.received,
            failed=failed,
            memory_every_steps=policy.memory_every_steps,
            memory_interval_s=lambda: self._pace.memory_interval_s,
        )

        def tell() -> None:
            signalled()
            self._schedule.tell()

        self._signals = StopSignals(tell)
        self._root = policy.root
        self._warns = world.rank == 0 and not policy.has_interval

    def ask(self, step: int) -> Answer:
        """Returns the answer for a step; see `Schedule.ask`."""
        if self._warns:
            self._warns = False
            _log.warning(
                "should_save answers yes only after a signal: the manager of %s was given no every_steps=, "
                "every_seconds= or every=",
                self._root,
            )
        self._pace.stepped()
        return self._schedule.ask(step)

    def answer_for(self, step: int) -> Answer:
        """Returns the answer that was given for a step; see `Schedule.answer_for`."""
        return self._schedule.answer_for(step)

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked the job to stop, as of the last answer."""
        return self._schedule.stop_requested

    def saving(self, save: Callable[[], SaveHandle | None]) -> SaveHandle | None:
        """Saves; from now on the interval counts anew."""
        self._schedule.saved()
        return self._pace.saving(save)

    def keeping(self, keep: Callable[[], UnderWay]) -> None:
        """Saves to memory."""
        self._pace.keeping(keep)

    def close(self) -> None:
        """Puts back the signal handlers that were there before."""
        self._signals.close()
