"""The other ranks of this host, from one load to the next: how they meet, and what they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastload.comm.agreement import World
from fastload.comm.door import Door
from fastload.comm.hostlink import HostLink, HostRounds, Listener

__all__ = ["Neighbours"]


class Neighbours:
    """The ranks of one host, for one load.

    Args:
        world: The ranks.
        ranks: Those of this host, more than one.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._rank = world.rank
        self._patience_s = world.patience_s
        self._kept = world.kept
        self._era = world.kept.era
        self._name = f"the ranks {self.ranks} of a host"
        self._link: HostLink | None = None
        self._door: Door | None = None
        self._offers: Mapping[int, Mapping[str, str]] = {}

    def offer(self) -> dict[str, str]:
        """Returns what the others have to know to meet this rank; from then on it is to be closed."""
        self._link = self._kept.take(self._name)
        if self._link is not None and not self._link.is_alive:
            self.renew()
        if self._link is not None:
            return {"leader": str(self.ranks[0]), "token": self._link.token}
        self._door = self._door or Door()
        return {"leader": str(self.ranks[0]), "token": "", "door": self._door.name}

    def renew(self) -> None:
        """Lets go of what connected the ranks: others of them have it no more."""
        if self._link is not None:
            self._link.drop()
            self._link = None

    def accept(self, offers: Sequence[Mapping[str, str]]) -> None:
        """Learns what each rank of the world has offered."""
        self._offers = {rank: offers[rank] for rank in self.ranks}

    def begin(self, nbytes: int, listener: Listener, *, give_up: Callable[[], bool]) -> HostRounds:
        """Meets the others, unless they are together already, and begins a load.

        Args:
            nbytes: How much memory the ranks share in it; the same on all of them.
            listener: Is told of its rounds, in another thread.
            give_up: Asked again and again; True ends the wait for the others.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
            MemoryError: The system does not give that much memory.
        """
        if self._link is None:
            assert self._door is not None, "offered"
            doors = {rank: offer["door"] for rank, offer in self._offers.items()}
            self._link = HostLink(
                self._rank, self.ranks, self._door, doors, until_s=self._patience_s, give_up=give_up
            )
            self._door.close()
        return self._link.begin(nbytes, listener, until_s=self._patience_s, give_up=give_up)

    def close(self) -> None:
        """Keeps what connects the ranks for the next load, if all of them are still there."""
        if self._door is not None:
            self._door.close()
        link, self._link = self._link, None
        if link is not None and link.is_alive:
            self._kept.put(self._name, link, self._era)
        elif link is not None:
            link.drop()
