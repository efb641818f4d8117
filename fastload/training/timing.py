"""When a training saves: by steps, by time, after a signal; the same answer on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastload.comm.world import World
from fastload.saving.handle import SaveHandle
from fastload.training.pacing import UnderWay
from fastload.training.policy import Policy
from fastload.training.schedule import Answer, Schedule
from fastload.training.signals import StopSignals

__all__ = ["Timing"]

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
