"""Rank 0's decisions, left for the other ranks in the rendezvous store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastload.comm.world import World


class Decisions:
    """Rank 0's decisions, which the other ranks read in the same call through the rendezvous store.

    Args:
        world: The ranks.
        name: Of the decisions, in the store.
        what: They are about, for messages.

    Attributes:
        num_made: Number of decisions so far; the same on all ranks.
    """

    def __init__(self, world: World, name: str, what: str) -> None:
        self.num_made = 0
        self._world = world
        self._name = name
        self._what = what
        self._num_forgotten = 0

    def share(self, decide: Callable[[], Any], *, num_read: int) -> Any:
        """Returns what rank 0 decides.

        Args:
            decide: Called on rank 0 only; returns JSON values.
            num_read: How many of the first decisions are known to have reached all ranks.

        Raises:
            PeerError: Rank 0 did not come to this call in time.
        """
        world, key = self._world, self._key(self.num_made)
        self.num_made += 1
        if world.rank != 0:
            return json.loads(
                world.rendezvous.await_text(
                    self._what, key, 0, wait_s=world.patience_s, grace_s=world.grace_s
                )
            )
        decision = decide()
        if world.size > 1:
            forget = [self._key(old) for old in range(self._num_forgotten, num_read)]
            self._num_forgotten = max(self._num_forgotten, num_read)
            world.rendezvous.post(
                self._what, key, json.dumps(decision), forget=forget, limit_s=world.patience_s
            )
        return decision

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"
