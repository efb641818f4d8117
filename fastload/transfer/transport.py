"""Rounds in flight, the interface of transports, and the transport of a rank that exchanges nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import allocate_buffers
from fastload.base.stopwatch import Stopwatch
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.geometry.ranges import ByteRange
from fastload.transfer.links import Offering
from fastload.transfer.messages import Message, Route

TICK_S = 0.05
# The status of a chunk that could not be read.
UNREADABLE = 1  # its reader continues without reading; other ranks may read its chunks
FAILED = 2  # its reader cannot continue


class Delivery(NamedTuple):
    """A message with its memory on this rank.

    Attributes:
        message: The message.
        route: Its route.
        data: Its bytes, flat uint8; empty if another rank of this host holds them.
        is_in_place: Whether the bytes arrive where they belong.
    """

    message: Message
    route: Route
    data: Tensor
    is_in_place: bool = False


@dataclass(frozen=True)
class Slots:
    """A buffer, or its beginning, cut into one slot per reader.

    Attributes:
        memory: All slots, flat uint8.
        by_reader: The slot of each reader.
    """

    memory: Tensor
    by_reader: dict[int, Tensor]


@dataclass(frozen=True)
class OwnChunk:
    """The chunk that this rank reads in a round.

    Attributes:
        byte_ranges: Its byte ranges, at least one.
        memory: The host memory that it is read into, in flat uint8 pieces. Several pieces are in place, and
            no other rank gets any of them.
        is_in_place: Whether the memory is its destination.
        outgoing: Its messages, with their routes.
    """

    byte_ranges: Sequence[ByteRange]
    memory: Sequence[Tensor]
    is_in_place: bool = False
    outgoing: Sequence[tuple[Message, Route]] = ()


@dataclass
class Round:
    """One round under way.

    Attributes:
        index: Number of the round, over all plans of a load.
        readers: The ranks that read a chunk in it.
        chunk: This rank's chunk; None if it has none.
        packed: The same messages with their memory, once the chunk is read.
        incoming: The messages to this rank, in the order in which it forwards them.
        slots: On a device, the adjacent slots that the chunks of all readers arrive in.
        sends: The transport's handles of sends.
        statuses: Status of each chunk that could not be read, by reader; complete once `done`.
        started: Set once the transport has taken this rank's chunk.
        done: Set once every message has arrived.
        sent: Set once the transport no longer uses the memory of the round.
        error: The first error of the transport, or None.
        began: When its exchange began, by the stopwatch.
    """

    index: int
    readers: Collection[int] = ()
    chunk: OwnChunk | None = None
    packed: list[Delivery] = field(default_factory=list)
    incoming: list[Delivery] = field(default_factory=list)
    slots: Slots | None = None
    statuses: dict[int, int] = field(default_factory=dict)
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    sent: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    began: float | None = None
    sends: list[Any] = field(default_factory=list)

    @property
    def outgoing(self) -> Sequence[tuple[Message, Route]]:
        """The messages of this rank's chunk, with their routes."""
        return self.chunk.outgoing if self.chunk is not None else ()

    def broke(self, error: BaseException) -> None:
        """Keeps the first error of the transport."""
        if self.error is None:
            # Without its traceback, whose frames hold this round: a cycle that would keep its memory alive.
            self.error = error.with_traceback(None)


class BufferMemory:
    """The memory of the rounds in flight: buffers, and chunks that this rank reads. No other rank shares it.

    Args:
        device: Where the buffers live; chunks are in host memory.
        pinned: Whether to page-lock host memory, for copies to an accelerator.

    Attributes:
        device: As given.
        is_shared: Whether other ranks of this host copy messages from the buffers of this one.
    """

    is_shared = False

    def __init__(self, device: torch.device | str = "cpu", *, pinned: bool) -> None:
        self.device = torch.device(device)
        self._pinned = pinned
        self._buffers: list[Tensor] = []
        self._chunks: list[Tensor] = []
        self._most_chunks = self._chunk_bytes = 0

    def allocate(self, count: int, nbytes: int) -> None:
        """Allocates buffers, each for the messages of one round at a time."""
        self._buffers = allocate_buffers(count, nbytes, pinned=self._pinned)

    def buffer(self, number: int, rank: int) -> Tensor:
        """Returns a buffer of this rank, or of another one of this host, once they are connected.

        Args:
            number: Number of the buffer.
            rank: The rank.

        Returns:
            Flat uint8.
        """
        return self._buffers[number]

    def of(self, rank: int) -> Tensor:
        """Returns the memory that a rank of this host shares, with all buffers and chunks; flat uint8."""
        raise NotImplementedError

    def allocate_chunks(self, count: int, most: int, nbytes: int) -> None:
        """Allocates host memory for chunks that this rank reads.

        Args:
            count: Number of chunks, of which each rank has memory before data move.
            most: Number of chunks that `chunk` may be asked for.
            nbytes: Length of each.
        """
        self._most_chunks, self._chunk_bytes = most, nbytes
        self._chunks = allocate_buffers(count, nbytes, pinned=self._pinned)

    def chunk(self, number: int) -> Tensor:
        """Returns the memory for a chunk that this rank reads, once the ranks are connected.

        Args:
            number: Which; lower numbers first.
        """
        if number >= len(self._chunks):  # page-locked memory is taken at once, so not all of it
            more = min(len(self._chunks), self._most_chunks - len(self._chunks))
            self._chunks += allocate_buffers(more, self._chunk_bytes, pinned=self._pinned)
        return self._chunks[number]

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Waits until no rank needs the buffer of a round; arguments and errors as for `Transport.wait`."""

    def freed(self, number: int) -> int:
        """Returns the last round, up to one that this rank has released, that no rank of its host needs."""
        return number

    def close(self) -> None:
        """Releases the memory; rounds that have not ended keep theirs."""
        self._buffers.clear()
        self._chunks.clear()


class Transport:
    """Moves messages between ranks. Rounds are posted and started in plan order on every rank.

    It has three parts, each for those who need no other one: `connections` for the step in which the ranks
    exchange addresses, `memory` for what is read and received, and the rounds.

    Args:
        name: What carries the bytes, for the report.
        rank: This rank.
        memory: The memory of the rounds.
        connections: Those that the ranks make; None if this rank makes none.

    Attributes:
        name: As given.
        memory: As given.
        connections: As given.
        watch: Time with at least one round under way.
    """

    def __init__(
        self, name: str, rank: int, memory: BufferMemory, connections: Offering | None = None
    ) -> None:
        self.name = name
        self.memory = memory
        self.connections = connections
        self.watch = Stopwatch()
        self._rank = rank

    @property
    def starts_ahead(self) -> int | None:
        """How many rounds after the one that the caller waits for have started by then, and no others have.

        None if a round starts as soon as its chunk is read. Between devices that would be too early: NCCL
        wants its kernels started in one order on all devices, those of other communicators included. If
        rounds started while the caller's thread starts collectives of its own, two ranks could have them in
        different orders in the queues of their devices, and wait for each other for ever.
        """
        return None

    @property
    def bytes_in(self) -> int:
        """Bytes received through sockets, for this rank or for others of its host."""
        return 0

    def route(self, message: Message) -> Route:
        """Returns the route of a message."""
        return Route(self._rank)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Connects to the other ranks, all of which are known to be ready.

        Args:
            give_up: Polled; True ends the wait for them.

        Raises:
            Interrupted: Some rank did not come, or `give_up` returned True.
        """

    def post(self, work: Round) -> None:
        """Makes a round ready to receive."""

    def packing(self) -> AbstractContextManager[None]:
        """Returns a context for packing the messages of a chunk that is read."""
        return nullcontext()

    def start(self, work: Round, status: int) -> None:
        """Sends the messages of this rank's chunk, and its status: 0 if it could be read."""
        raise NotImplementedError

    def wait(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Waits until every message of a round has arrived.

        Args:
            work: The round.
            until_s: Longest wait in seconds.
            give_up: Polled; True ends the wait.

        Raises:
            Interrupted: The transport failed, or `give_up` returned True.
            DeadlineExceeded: It took too long.
        """
        wait_for(work.done, f"round {work.index}", until_s, give_up)
        require_unbroken(work)

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Waits until the memory of a round may be overwritten; arguments and errors as for `wait`."""

    def close(self) -> None:
        """Ends the transport; rounds that have not ended are abandoned, and keep their memory alive."""
        self.memory.close()


def require_unbroken(work: Round) -> None:
    """Raises the error of the transport in a round that has ended, as `Interrupted`."""
    if work.error is not None:
        raise Interrupted(f"the exchange of round {work.index} broke: {work.error}") from work.error


def wait_for(event: threading.Event, what: str, until_s: float, give_up: Callable[[], bool]) -> None:
    """Waits for an event, named `what` in messages; the rest is as for `Transport.wait`."""
    deadline = time.monotonic() + until_s
    # Polled even if the event is set: a rank that never waits must also notice failures.
    while not give_up():
        if event.wait(TICK_S):
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} made no progress for {until_s:.1f} s")
    raise Interrupted("another rank failed")


def wait_sent(work: Round, until_s: float, give_up: Callable[[], bool]) -> None:
    """Waits until all messages of a round are sent; arguments and errors are those of `Transport.wait`."""
    wait_for(work.sent, f"sending round {work.index}", until_s, give_up)
    if work.error is not None:
        raise Interrupted(f"round {work.index} did not reach the others: {work.error}")


class LocalTransport(Transport):
    """The transport of a rank that reads all its bytes itself.

    Args:
        rank: This rank.
        pinned: Whether to page-lock buffers, for copies to an accelerator.
    """

    def __init__(self, rank: int, *, pinned: bool) -> None:
        super().__init__("none", rank, BufferMemory(pinned=pinned))

    @property
    def starts_ahead(self) -> int:
        return 0

    def start(self, work: Round, status: int) -> None:
        if status:
            work.statuses = {self._rank: status}
        work.started.set()
        work.done.set()
