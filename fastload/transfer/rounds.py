"""What a round is, and what an exchange of rounds has to do; and the one that has nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from ctypes import string_at
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from fastload.base.memory import allocate_staging, host_view
from fastload.base.stopwatch import Stopwatch
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.plan import NOTICE_BYTES

__all__ = [
    "FAILED",
    "TICK_S",
    "UNREADABLE",
    "Exchange",
    "Round",
    "Slots",
    "wait",
    "wait_for",
]

TICK_S = 0.05
# What a notice says.
UNREADABLE = 1  # this rank cannot read, but goes on: others may read its chunks
FAILED = 2  # this rank is lost to the load


@dataclass(frozen=True)
class Slots:
    """A slab, or its beginning, cut into one slot per rank.

    Attributes:
        whole: All slots, flat uint8, on the exchange's device.
        each: The slot of each rank; empty for a rank that is no reader.
        owners: The ranks with a slot.
        heads: Positions of the first bytes of each of their slots, (owners, NOTICE_BYTES), on a device;
            None in host memory.
    """

    whole: Tensor
    each: list[Tensor]
    owners: list[int]
    heads: Tensor | None

    @classmethod
    def cut(cls, slab: Tensor, sizes: Sequence[int]) -> Slots:
        """Cuts the beginning of a slab into slots of these sizes."""
        whole = slab[: sum(sizes)]
        owners = [rank for rank, size in enumerate(sizes) if size]
        heads = None
        if slab.device.type != "cpu":
            starts = list(accumulate((sizes[rank] for rank in owners[:-1]), initial=0))
            heads = torch.tensor([range(start, start + NOTICE_BYTES) for start in starts], device=slab.device)
        return cls(whole, list(whole.split(list(sizes))), owners, heads)


@dataclass
class Round:
    """One round under way.

    Attributes:
        index: Which round, counted over all plans of a load.
        distress: What a chunk that its reader could not read begins with: bytes that no chunk has by chance.
        slots: Where the chunks of all ranks come together.
        parts: What each rank's chunk is received into and passed on from: its slot, or the memory that it
            belongs to; as long as the chunk, but never shorter than a notice.
        own: Host memory of this rank's chunk; the reader fills it.
        placed: The ranks whose chunks need not be placed, as they come to where they belong.
        started: Set once this rank's chunk is complete and handed over.
        done: Set once every chunk is here.
        sent: Set once the transport has no more use for the slots.
        error: What broke the transport, if it broke.
        began: When its exchange began, by the stopwatch.
    """

    index: int
    distress: bytes
    slots: Slots
    parts: list[Tensor]
    own: Tensor
    placed: set[int] = field(default_factory=set)
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    sent: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    began: float | None = None
    receives: list[Any] = field(default_factory=list)
    sends: list[Any] = field(default_factory=list)

    def broke(self, error: BaseException) -> None:
        """Notes what broke the transport, the first time."""
        if self.error is None:
            # Without its traceback, whose frames hold this round: a cycle that would keep the slabs alive.
            self.error = error.with_traceback(None)

    def mark(self, part: Tensor, status: int) -> None:
        """Puts a notice where a chunk should be."""
        host_view(part)[:NOTICE_BYTES] = self.distress + bytes([status])

    def notices(self) -> dict[int, int]:
        """Returns what those ranks say that have put a notice in place of a chunk, once the round is done."""
        if self.slots.heads is None:
            heads = [string_at(self.parts[rank].data_ptr(), NOTICE_BYTES) for rank in self.slots.owners]
        else:
            heads = [bytes(head) for head in self.slots.whole[self.slots.heads].cpu().tolist()]
        found = zip(self.slots.owners, heads, strict=True)
        return {rank: head[-1] for rank, head in found if head[:-1] == self.distress}


class Exchange(Protocol):
    """Moves slots between the ranks. Rounds are posted and started in plan order on every rank.

    Attributes:
        transport: What carries the bytes, for the report.
        private: Whether nobody else uses the connections, so that rounds under way may be abandoned.
        device: Where slots live.
        watch: Time with at least one exchange under way.
    """

    transport: str
    private: bool
    device: torch.device
    watch: Stopwatch

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Allocates a slab, and host memory for this rank's own slot unless the slab is host memory."""
        ...

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Meets the other ranks; to be called once all of them are known to be ready.

        Args:
            give_up: Asked again and again; True ends the wait for them.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
        """
        ...

    def post(self, work: Round) -> None:
        """Makes the round's parts ready to receive."""
        ...

    def start(self, work: Round) -> None:
        """Hands over this rank's chunk."""
        ...

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Returns once the round's parts may be overwritten; arguments and errors are those of `wait`."""
        ...

    def close(self) -> None:
        """Ends the exchange; rounds that have not ended are abandoned."""
        ...


def wait(work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
    """Waits until every chunk of a round is here.

    Args:
        work: The round.
        until_s: Longest wait in seconds.
        give_up: Asked again and again; True ends the wait.

    Raises:
        Interrupted: The transport broke, or `give_up` said so.
        DeadlineExceeded: It took too long.
    """
    wait_for(work.done, f"round {work.index}", until_s, give_up)
    if work.error is not None:
        raise Interrupted(f"the exchange of round {work.index} broke: {work.error}") from work.error


def wait_for(event: threading.Event, what: str, until_s: float, give_up: Callable[[], bool]) -> None:
    """Waits for an event; arguments and errors are those of `wait`, `what` is for its messages."""
    deadline = time.monotonic() + until_s
    # Asked even where there is nothing to wait for: a rank that gets on well must notice too.
    while not give_up():
        if event.wait(TICK_S):
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} made no progress for {until_s:.1f} s")
    raise Interrupted("another rank failed")


class LocalExchange:
    """A world of 1, or every rank for itself: nothing to exchange."""

    transport = "none"
    private = True

    def __init__(self, *, pinned: bool) -> None:
        self.device = torch.device("cpu")
        self.watch = Stopwatch()
        self._pinned = pinned

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[Tensor, Tensor | None]:
        return allocate_staging(slab_bytes, pinned=self._pinned), None

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        pass

    def post(self, work: Round) -> None:
        pass

    def start(self, work: Round) -> None:
        work.done.set()

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass
