"""What rank 0 says at each save of a training with several in flight: all ranks hear it in the same call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fastload.comm.world import World

__all__ = ["Order", "Orders"]


@dataclass(frozen=True)
class Order:
    """What all ranks do before a save.

    Attributes:
        failed: Number of an earlier save that has failed, which they raise; 0 if there is none.
        given_up: Numbers of earlier saves that are not written, since this one is newer.
    """

    failed: int = 0
    given_up: tuple[int, ...] = ()


class Orders:
    """Brings what rank 0 decides to the others, through the rendezvous store.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_forgotten = 0

    def share(self, number: int, decide: Callable[[], Order], *, num_heard: int) -> Order:
        """Returns what rank 0 decides.

        Args:
            number: Of the order, from 1 on.
            decide: Called on rank 0 only.
            num_heard: How many of the first orders are known to have reached all ranks.

        Raises:
            PeerError: Rank 0 did not come to this save in time.
        """
        world, what = self._world, "asking what becomes of earlier saves"
        if world.rank != 0:
            text = world.rendezvous.await_text(
                what, _key(number), 0, wait_s=world.patience_s, grace_s=world.grace_s
            )
            found = json.loads(text)
            return Order(found["failed"], tuple(found["given_up"]))
        order = decide()
        if world.size > 1:
            forget = [_key(old) for old in range(self._num_forgotten + 1, num_heard + 1)]
            self._num_forgotten = max(self._num_forgotten, num_heard)
            text = json.dumps(asdict(order))
            world.rendezvous.post(what, _key(number), text, forget=forget, limit_s=world.patience_s)
        return order


def _key(number: int) -> str:
    return f"orders/{number}"
