"""What a round is, and what an exchange of rounds has to do; and the one that has nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fastload.errors import DeadlineExceeded, Interrupted
from fastload.loading.plan import STATUS_BYTES
from fastload.memory import allocate_staging
from fastload.report import Stopwatch

__all__ = ["FAILED", "TICK_S", "Exchange", "Round", "failed_ranks", "wait", "wait_for"]

TICK_S = 0.05
FAILED = 1


@dataclass
class Round:
    """One round under way.

    Attributes:
        index: Which round of the plan.
        own: Host memory of this rank's slot; the reader fills it.
        slots: The slot of each rank, on the exchange's device.
        started: Set once this rank's slot is complete and handed over.
        done: Set once every slot is here.
        sent: Set once the transport has no more use for the slots.
        error: What broke the transport, if it broke.
        placed: Whether the bytes were read to where they belong, past the slot.
        started_at: When this rank's slot was handed over, by `time.perf_counter`.
    """

    index: int
    own: Tensor
    slots: list[Tensor]
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    sent: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    placed: bool = False
    started_at: float = 0.0
    receives: list[Any] = field(default_factory=list)
    sends: list[Any] = field(default_factory=list)

    def broke(self, error: BaseException) -> None:
        """Notes what broke the transport, the first time."""
        if self.error is None:
            # Without its traceback, whose frames hold this round: a cycle that would keep the slabs alive.
            self.error = error.with_traceback(None)

    def mark(self, *, failed: bool) -> None:
        """Writes this rank's status word."""
        self.own[-STATUS_BYTES:].fill_(FAILED if failed else 0)


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

    def connect(self) -> None:
        """Meets the other ranks; to be called once all of them are known to be ready.

        Raises:
            Interrupted: Some rank did not come.
        """
        ...

    def post(self, work: Round) -> None:
        """Makes the round's slots ready to receive."""
        ...

    def start(self, work: Round) -> None:
        """Hands over this rank's slot, data and status word."""
        ...

    def failed_ranks(self, work: Round) -> list[int]:
        """Returns the ranks whose status word in a round that is done says failed."""
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
    while not event.wait(TICK_S):
        if give_up():
            raise Interrupted("another rank failed")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} made no progress for {until_s:.1f} s")


class LocalExchange:
    """A world of 1, or every rank for itself: nothing to exchange."""

    transport = "none"

    def __init__(self, *, pinned: bool) -> None:
        self.device = torch.device("cpu")
        self.watch = Stopwatch()
        self._pinned = pinned

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[Tensor, Tensor | None]:
        return allocate_staging(slab_bytes, pinned=self._pinned), None

    def connect(self) -> None:
        pass

    def post(self, work: Round) -> None:
        pass

    def start(self, work: Round) -> None:
        work.done.set()

    def failed_ranks(self, work: Round) -> list[int]:
        return failed_ranks(work.slots)

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass


def failed_ranks(slots: Sequence[Tensor]) -> list[int]:
    """Returns the ranks whose status word, in host memory, says failed."""
    return [rank for rank, slot in enumerate(slots) if slot[-1].item()]
