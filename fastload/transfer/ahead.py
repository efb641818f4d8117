"""What this rank reads ahead of the rounds in flight, where readers take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from fastload.base.memory import host_view
from fastload.base.threads import await_done
from fastload.transfer.buffers import Buffers, OwnChunk, Plan
from fastload.transfer.plan import TransferPlan
from fastload.transfer.read import ChunkReader

__all__ = ["ReadAhead"]


class ReadAhead:
    """The chunks of this rank whose rounds are not in flight yet.

    Args:
        rank: This one.
        reader: Reads them.
        buffers: Has the memory for them.
    """

    def __init__(self, rank: int, reader: ChunkReader, buffers: Buffers) -> None:
        self._rank = rank
        self._reader = reader
        self._buffers = buffers
        self._begun: deque[tuple[int, OwnChunk, Future[None]]] = deque()
        self._next = 0

    def read(self, plan: Plan, num_done: int) -> None:
        """Begins to read what may be read, once so many rounds of a plan are over."""
        if not isinstance(plan, TransferPlan) or not plan.ahead:
            return
        end = num_done + plan.ahead
        for index in plan.rounds_of(self._rank, self._next, end):
            own = self._buffers.lay_own(plan, index)
            if own.nbytes:
                read = self._reader.submit(own.spans, [host_view(own.data)])
                self._begun.append((index, own, read))
        self._next = end

    def take(self, round_index: int) -> tuple[OwnChunk | None, Future[None] | None]:
        """Returns this rank's chunk of a round, and what reads it; None if none was read ahead."""
        if not self._begun or self._begun[0][0] != round_index:
            return None, None
        _, own, read = self._begun.popleft()
        return own, read

    def drop(self, *, give_up: Callable[[], bool]) -> None:
        """Ends with a plan: waits until nothing is written any more to where others may write.

        Raises:
            Interrupted: `give_up` said so.
        """
        while self._begun:
            *_, read = self._begun.popleft()
            await_done(read, give_up=give_up)
        self._next = 0

    def forget(self) -> None:
        """Lets go of everything; what is still written keeps its own memory."""
        self._begun.clear()
