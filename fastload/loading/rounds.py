"""What a round is, and what an exchange of rounds has to do; and the one that has nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from fastload.errors import DeadlineExceeded, Interrupted
from fastload.loading.plan import STATUS_BYTES
from fastload.memory import allocate_staging
from fastload.report import Stopwatch

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
# What a status word says, in each of its bytes.
UNREADABLE = 1  # this rank cannot read, but goes on: others may read its chunks
FAILED = 2  # this rank is lost to the load


@dataclass(frozen=True)
class Slots:
    """A slab, or its beginning, cut into one slot per rank.

    Attributes:
        whole: All slots, flat uint8, on the exchange's device.
        each: The slot of each rank; empty for a rank that is no reader.
        owners: The ranks with a slot.
        ends: Position of the last byte of each of their slots, on the same device.
    """

    whole: Tensor
    each: list[Tensor]
    owners: list[int]
    ends: Tensor

    @classmethod
    def cut(cls, slab: Tensor, sizes: Sequence[int]) -> Slots:
        """Cuts the beginning of a slab into slots of these sizes."""
        whole = slab[: sum(sizes)]
        owners = [rank for rank, size in enumerate(sizes) if size]
        ends = torch.tensor(list(accumulate(sizes[rank] for rank in owners)), dtype=torch.long) - 1
        return cls(whole, list(whole.split(list(sizes))), owners, ends.to(slab.device))

    def statuses(self) -> dict[int, int]:
        """Returns what the status words say, of those ranks where it is not that all is well."""
        words = self.whole[self.ends].cpu()
        return {self.owners[place]: int(words[place]) for place in words.nonzero().flatten().tolist()}


@dataclass
class Round:
    """One round under way.

    Attributes:
        index: Which round, counted over all plans of a load.
        own: Host memory of this rank's slot; the reader fills it.
        slots: Where the slots of all ranks come together.
        started: Set once this rank's slot is complete and handed over.
        done: Set once every slot is here.
        sent: Set once the transport has no more use for the slots.
        error: What broke the transport, if it broke.
        placed: Whether the bytes were read to where they belong, past the slot.
        began: When its exchange began, by the stopwatch.
    """

    index: int
    own: Tensor
    slots: Slots
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    sent: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    placed: bool = False
    began: float | None = None
    receives: list[Any] = field(default_factory=list)
    sends: list[Any] = field(default_factory=list)

    def broke(self, error: BaseException) -> None:
        """Notes what broke the transport, the first time."""
        if self.error is None:
            # Without its traceback, whose frames hold this round: a cycle that would keep the slabs alive.
            self.error = error.with_traceback(None)

    def mark(self, status: int) -> None:
        """Writes this rank's status word."""
        self.own[-STATUS_BYTES:].fill_(status)


class Exchange(Protocol):
    """Moves slots between the ranks. Rounds are posted and started in plan order on every rank.

    Attributes:
        transport: What carries the bytes, for the report.
        device: Where slots live.
        watch: Time with at least one exchange under way.
    """

    transport: str
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
        """Makes the round's slots ready to receive."""
        ...

    def start(self, work: Round) -> None:
        """Hands over this rank's slot, data and status word."""
        ...

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Returns once the round's slots may be overwritten; arguments and errors are those of `wait`."""
        ...

    def close(self) -> None:
        """Ends the exchange; rounds that have not ended are abandoned."""
        ...


def wait(work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
    """Waits until every slot of a round is here.

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
