"""What a round is, and what an exchange of rounds has to do; and the one that has nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastload.base.memory import allocate_staging
from fastload.base.stopwatch import Stopwatch
from fastload.comm.hosts import Peer
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.geometry.extents import Span

if TYPE_CHECKING:
    from fastload.transfer.parcel import Parcel
    from fastload.transfer.plan import Chunk

__all__ = [
    "FAILED",
    "TICK_S",
    "UNREADABLE",
    "Arrival",
    "Exchange",
    "FlatSlab",
    "Leg",
    "Round",
    "Slab",
    "Slots",
    "wait",
    "wait_for",
    "wait_sent",
]

TICK_S = 0.05
# The status of a chunk that could not be read.
UNREADABLE = 1  # this rank cannot read, but goes on: others may read its chunks
FAILED = 2  # this rank is lost to the load


@dataclass(frozen=True)
class Slots:
    """A slab, or its beginning, cut into one slot per reader.

    Attributes:
        whole: All slots, flat uint8, on the exchange's device; empty where they are not next to each other.
        each: The slot of each reader.
    """

    whole: Tensor
    each: dict[int, Tensor]

    @classmethod
    def none(cls) -> Slots:
        """Returns no slots: chunks of a round come to lie wherever there is room."""
        return cls(torch.empty(0, dtype=torch.uint8, device="cpu"), {})


class Slab(Protocol):
    """A reusable buffer for the chunks of one round.

    Attributes:
        nbytes: How much memory of this rank's it takes.
    """

    @property
    def nbytes(self) -> int: ...  # noqa: D102
    def cut(self, sizes: Mapping[int, int]) -> Slots:
        """Cuts its beginning into slots of these sizes."""
        ...


class FlatSlab(NamedTuple):
    """A slab in one piece that this rank has for itself.

    Attributes:
        memory: Flat uint8, on the exchange's device.
    """

    memory: Tensor

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.memory.nbytes

    def cut(self, sizes: Mapping[int, int]) -> Slots:
        """Cuts its beginning into slots of these sizes, one after the other."""
        whole = self.memory[: sum(sizes.values())]
        return Slots(whole, dict(zip(sizes, whole.split(list(sizes.values())), strict=True)))


class Leg(NamedTuple):
    """A parcel on its way through this rank.

    Attributes:
        parcel: What it is.
        data: Its bytes, flat uint8.
        is_placed: Whether they come to where they belong.
    """

    parcel: Parcel
    data: Tensor
    is_placed: bool


class Arrival(NamedTuple):
    """What has come to this rank.

    Attributes:
        reader: Who has read it; None if several other ranks have.
        nbytes: Its length.
        pieces: What of it is to be placed: where in what this rank wants, and the bytes, flat uint8.
    """

    reader: int | None
    nbytes: int
    pieces: Sequence[tuple[int, Tensor]]


def _nothing(work: Round) -> None:
    pass


@dataclass
class Round:
    """One round under way.

    Attributes:
        index: Which round, counted over all plans of a load.
        slots: Where the chunks of all readers come together.
        parts: What the chunk of each reader is received into and passed on from: its slot, or the memory
            that it belongs to. A rank without a chunk in this round may be missing.
        chunks: What each reader reads, of a plan in which all ranks want the same.
        spans: What this rank reads.
        buffers: Host memory that this rank's chunk is read into, in pieces.
        own: Host memory that this rank's chunk is in before it is handed over, if that is not its part.
        placed: The ranks whose chunks need not be placed, as they come to where they belong.
        pack: To be called with this round once its chunk is read: makes the parcels, if there are any.
        kept: The parcels of this rank's chunk, then.
        incoming: The parcels that come to this rank, in the order in which it passes them on.
        status: What this rank says of its own chunk, once it is handed over; 0 if it could be read.
        statuses: What is the matter with chunks that could not be read, by reader; complete once `done`.
        started: Set once this rank's chunk is complete and handed over.
        done: Set once every chunk is here.
        sent: Set once the transport has no more use for the slots.
        error: What broke the transport, if it broke.
        began: When its exchange began, by the stopwatch.
    """

    index: int
    slots: Slots
    parts: dict[int, Tensor]
    chunks: Mapping[int, Chunk] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    buffers: Sequence[Tensor] = ()
    own: Tensor | None = None
    placed: set[int] = field(default_factory=set)
    pack: Callable[[Round], None] = _nothing
    kept: list[Leg] = field(default_factory=list)
    incoming: list[Leg] = field(default_factory=list)
    status: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
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


class Exchange(Protocol):
    """Moves slots between the ranks. Rounds are posted and started in plan order on every rank.

    Attributes:
        transport: What carries the bytes, for the report.
        private: Whether nobody else uses the connections, so that rounds under way may be abandoned.
        shares_memory: Whether other ranks place chunks from the slabs of this one.
        num_sharing: How many ranks of a host have their slabs together, at least; the same on all ranks.
        bytes_in: Bytes that have come in over sockets, for this rank or for others of its host.
        device: Where slots live.
        watch: Time with at least one exchange under way.
    """

    transport: str
    private: bool
    num_sharing: int
    device: torch.device
    watch: Stopwatch

    @property
    def shares_memory(self) -> bool: ...  # noqa: D102
    @property
    def bytes_in(self) -> int: ...  # noqa: D102

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[Slab, Tensor | None]:
        """Allocates a slab, and host memory for this rank's own slot unless the slab is host memory."""
        ...

    def allocate_own(self, nbytes: int) -> Tensor:
        """Allocates host memory that this rank reads a chunk into before the chunk has a slab."""
        ...

    def offer(self) -> Any:
        """Returns what the others have to know to connect to this rank, a JSON object; None for nothing.

        See `wire.Offering`.
        """
        ...

    def renew(self) -> None:
        """Drops the connections that were kept: other ranks have not got them any more."""
        ...

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        """Learns what each rank of the world has offered, with one and the same token.

        Returns:
            Where this rank is about to connect to.
        """
        ...

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Meets the other ranks; to be called once all of them are known to be ready.

        Args:
            give_up: Asked again and again; True ends the wait for them.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
        """
        ...

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Returns once the slab of a round is free on the other ranks, too; the rest is that of `wait`."""
        ...

    def post(self, work: Round) -> None:
        """Makes the round's parts ready to receive."""
        ...

    def start(self, work: Round) -> None:
        """Hands over this rank's chunk and its status."""
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


def wait_sent(work: Round, until_s: float, give_up: Callable[[], bool]) -> None:
    """Waits until nothing of a round is to be sent any more; arguments and errors are those of `wait`."""
    wait_for(work.sent, f"sending round {work.index}", until_s, give_up)
    if work.error is not None:
        raise Interrupted(f"round {work.index} did not reach the others: {work.error}")


class LocalExchange:
    """A world of 1, or every rank for itself: nothing to exchange."""

    transport = "none"
    private = True
    shares_memory = False
    num_sharing = 1
    bytes_in = 0

    def __init__(self, *, pinned: bool) -> None:
        self.device = torch.device("cpu")
        self.watch = Stopwatch()
        self._pinned = pinned

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[FlatSlab, Tensor | None]:
        return FlatSlab(allocate_staging(slab_bytes, pinned=self._pinned)), None

    def offer(self) -> None:
        return None

    def renew(self) -> None:
        pass

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        return ()

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=self._pinned)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        pass

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def post(self, work: Round) -> None:
        pass

    def start(self, work: Round) -> None:
        if work.status:
            work.statuses = dict.fromkeys(work.parts, work.status)
        work.done.set()

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass
