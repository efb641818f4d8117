"""Buffers in memory that the ranks of a host share: what one of them holds, the others copy from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fastload.comm.shared_memory import HostMemory
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.transport import TICK_S, Round

__all__ = ["SharedBuffer", "SharedBuffers"]


class SharedBuffer:
    """One of the buffers of a host: a part for each of its ranks.

    Attributes:
        nbytes: Length of a part.
    """

    def __init__(self, buffers: SharedBuffers, number: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffers = buffers
        self._number = number

    @property
    def memory(self) -> Tensor:
        """The part of this rank."""
        return self.of(self._buffers.rank)

    def of(self, rank: int) -> Tensor:
        """Returns the part of a rank of this host."""
        return self._buffers.part(self._number, rank)


class SharedBuffers:
    """The buffers of the ranks of one host, and how far these are with them.

    Each rank has its chunks, and the messages that it receives from other hosts, in its own part, and tells
    the others once it has all of a round. They use a buffer again once all of them are done with it, which
    they tell each other along with that; so one buffer more than rounds in flight keeps them from waiting.

    Args:
        world: The ranks.
        ranks: Those of this host, more than one.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.rank = world.rank
        self._host = HostMemory(world, ranks)
        self._num_buffers = 0
        self._buffer_bytes = 0
        self._turns = _Turns()

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Returns one more buffer, with memory once the ranks are connected.

        Each part has room for a whole round; what its rank does not hold, it does not touch.
        """
        self._buffer_bytes = max(self._buffer_bytes, nbytes)
        self._num_buffers += 1
        return SharedBuffer(self, self._num_buffers - 1, nbytes)

    def part(self, number: int, rank: int) -> Tensor:
        """Returns the part of a rank of a buffer."""
        memory = self._host.memory
        begin = (self._host.ranks.index(rank) * self._num_buffers + number) * self._buffer_bytes
        return memory[begin : begin + self._buffer_bytes]

    def offer(self) -> dict[str, str]:
        """Returns what the others have to know to connect to this rank."""
        return self._host.offer()

    def renew(self) -> None:
        """Drops what was kept."""
        self._host.renew()

    def accept(self, offers: Sequence[Mapping[str, str]]) -> None:
        """Learns what each rank of the world has offered."""
        self._host.accept(offers)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Meets the others of the host, and takes the memory.

        Args:
            give_up: Asked again and again; True ends the wait for them.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
            MemoryError: The system does not give that much memory.
        """
        nbytes = len(self._host.ranks) * self._num_buffers * self._buffer_bytes
        self._host.connect(nbytes, self._turns, give_up=give_up)

    def post(self, work: Round) -> None:
        """Takes note of a round whose parts are ready to receive."""
        self._turns.post(work)

    def arrive(self, work: Round, statuses: dict[int, int]) -> None:
        """Tells the others that this rank's part of a round is here, and what is the matter with it."""
        self._host.arrive(work.index, self._turns.placed, statuses)

    def release(self, work: Round) -> None:
        """Notes that this rank has placed a round; the others learn of it with the next one."""
        self._turns.placed = work.index

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Returns once no rank of the host needs what was in the buffer of a round before.

        Raises:
            Interrupted: A rank is gone, or `give_up` said so.
            DeadlineExceeded: It took too long.
        """
        self._turns.await_released(index - self._num_buffers, until_s=until_s, give_up=give_up)

    def close(self) -> None:
        """Ends the load; what connects the ranks is kept for the next one."""
        self._host.close()
        self._turns.end()


class _Turns:
    """How far the ranks of a host are with the rounds of a load; a `shared_memory.RoundObserver`.

    Attributes:
        placed: Up to which round this rank has placed all.
    """

    def __init__(self) -> None:
        self.placed = -1
        self._released = -1
        self._posted: dict[int, Round] = {}
        self._changed = threading.Condition()
        self._lost: int | None = None

    def post(self, work: Round) -> None:
        """Takes note of a round that is to be complete."""
        with self._changed:
            self._posted[work.index] = work
            lost = self._lost
        if lost is not None:
            _break(work, lost)

    def end(self) -> None:
        """Forgets rounds that nobody waits for any more, which keep their memory."""
        with self._changed:
            self._posted.clear()

    def await_released(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Returns once all ranks of the host have placed all up to a round; see `SharedBuffers.reserve`."""
        deadline = time.monotonic() + until_s
        with self._changed:
            while self._released < index:
                if self._lost is not None:
                    raise Interrupted(_gone(self._lost))
                if give_up():
                    raise Interrupted("another rank failed")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"not all of this host placed round {index} within {until_s:.1f} s"
                    )
                self._changed.wait(TICK_S)

    def complete(self, index: int, statuses: Mapping[int, int], released: int) -> None:
        """Hears that all of a round is here."""
        with self._changed:
            work = self._posted.pop(index, None)
            self._released = max(self._released, released)
            self._changed.notify_all()
        if work is not None:
            work.statuses = dict(statuses)
            work.done.set()

    def lost(self, rank: int) -> None:
        """Hears that a rank of the host is gone."""
        with self._changed:
            self._lost = rank
            posted, self._posted = list(self._posted.values()), {}
            self._changed.notify_all()
        for work in posted:
            _break(work, rank)


def _break(work: Round, rank: int) -> None:
    work.broke(Interrupted(_gone(rank)))
    work.done.set()


def _gone(rank: int) -> str:
    return f"rank {rank}, on the same host, is gone"
