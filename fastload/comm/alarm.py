"""How ranks that are far apart learn that one of them has failed, and that the others get on."""

from __future__ import annotations

import time

from fastload.comm.rendezvous import Rendezvous

__all__ = ["Alarm"]

_ALARM_PERIOD_S = 0.2
_PULSE_PERIOD_S = 1.0


class Alarm:
    """The alarm of one world, seen from one of its ranks.

    Args:
        rendezvous: Where it is heard.
        rank: This one.
        grace_s: How long the others get, after a failure, to say what they know.
        patience_s: Longest wait for the store.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, *, grace_s: float, patience_s: float) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._grace_s = grace_s
        self._patience_s = patience_s
        self._rings = False
        self._period_s = min(max(_ALARM_PERIOD_S, rendezvous.turn_s), grace_s / 4)
        self._next_look = time.monotonic() + self._period_s  # what is short needs no look
        self._moved = False
        self._next_pulse = 0.0

    def ring(self) -> None:
        """Tells the other ranks, wherever they are, that this one has failed."""
        self._rings = True
        self._rendezvous.tell({"alarm": str(self._rank)}, limit_s=self._grace_s)

    def expect(self) -> None:
        """Takes it for granted that the alarm rings."""
        self._rings = True

    def moved(self) -> None:
        """Notes that this rank gets on; the others learn of it with the next look."""
        self._moved = True

    def rings(self) -> bool:
        """Whether some rank has failed. Cheap: asks the store a few times a second at most."""
        now = time.monotonic()
        if not self._rings and now >= self._next_look:
            self._next_look = now + self._period_s
            alive = self._moved and now >= self._next_pulse
            if alive:
                self._moved, self._next_pulse = False, now + min(_PULSE_PERIOD_S, self._grace_s / 4)
            self._rings = self._rendezvous.watch("alarm", alive=alive, limit_s=self._patience_s)
        return self._rings
