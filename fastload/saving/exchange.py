"""Assembly of parts of files from this rank's bytes and from messages of other ranks."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fastload.base.memory import PAGE_BYTES, allocate_buffers, allocate_staging, host_view, round_up
from fastload.base.threads import Task
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.geometry.box import Runs
from fastload.saving.messages import ShardMessage, positions_in
from fastload.saving.plan import SavePlan
from fastload.saving.snapshot import Snapshot
from fastload.transfer.links import Wire, accept_offers
from fastload.transfer.transport import TICK_S, wait_for

T = TypeVar("T")

_TAG = 0  # both ends order the messages for a rank by its parts
_FOR_EVER = timedelta(days=1)  # a message waits for its writer, which may write for hours before


class BufferRing:
    """Buffers of the same length, used in turn and allocated on first use.

    Args:
        count: Number of buffers.
        lengths: Lengths of their contents in bytes; the longest one fits.
        pinned: Whether to page-lock them, for copies from an accelerator.

    Attributes:
        kind: Equal for rings that can replace each other.
    """

    def __init__(self, count: int, lengths: Sequence[int], *, pinned: bool) -> None:
        largest = round_up(max(lengths, default=0), PAGE_BYTES)
        self.kind = min(count, len(lengths)), largest, pinned
        self._buffers: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated buffers."""
        return len(self._buffers) * self.kind[1]

    def get(self, index: int) -> Tensor:
        """Returns the buffer for an index. Its last user must have finished."""
        count, largest, pinned = self.kind
        turn = index % count
        if turn not in self._buffers and pinned:  # page-locked ones take less memory together
            for number, buffer in enumerate(allocate_buffers(count, largest, pinned=True)):
                self._buffers.setdefault(number, buffer)
        elif turn not in self._buffers:
            self._buffers[turn] = allocate_staging(largest, pinned=False)
        return self._buffers[turn]


@contextmanager
def connecting(world: World, partners: Collection[int]) -> Iterator[Wire]:
    """Yields connections to other ranks, to `connect`; drops them if the block fails.

    Args:
        world: The ranks.
        partners: The ranks that this one sends to or receives from.
    """
    wire = Wire(world, range(world.size), partners)
    try:
        yield wire
    except BaseException:
        wire.close(keep=False)
        raise


def connect(world: World, what: str, wire: Wire, answers: Sequence[Mapping[str, Any]]) -> Wire | None:
    """Exchanges the addresses of the ranks, unless no rank sends anything.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        wire: From `connecting`.
        answers: Of all ranks, each with whether it ``sends`` anything, and the ``offer`` of its wire.

    Returns:
        The connections; None if they are not needed.

    Raises:
        FastloadError: Some rank failed, or cannot be reached.
    """
    if not any(answer["sends"] for answer in answers):
        wire.close(keep=True)
        return None
    accept_offers(world, what, wire, [answer["offer"] for answer in answers])
    return wire


class MessageExchange:
    """Sends and receives the messages of one rank.

    Each direction has its own thread, since a wait inside Gloo cannot look for failures of other ranks.
    Messages leave in the order of their parts, and every writer has receives open for its next parts. So the
    message for the first incomplete part is never behind one that waits.

    Args:
        world: The ranks.
        wire: Connections to the ranks that this one sends to or receives from; closed in the end.
        outgoing: The receivers of the messages to send, in order.
        pack: Returns the bytes of an outgoing message by its number, flat uint8.
        num_outgoing: Most outgoing messages at once.
    """

    def __init__(
        self,
        world: World,
        wire: Wire,
        outgoing: Sequence[int],
        pack: Callable[[int], Tensor],
        *,
        num_outgoing: int,
    ) -> None:
        self._world = world
        self._outgoing = outgoing
        self._pack = pack
        self._num_outgoing = num_outgoing
        self._wire = wire
        self._expected: queue.SimpleQueue[tuple[list[Any], threading.Event] | None] = queue.SimpleQueue()
        self._all_sent = threading.Event()
        self._error: Exception | None = None
        self._closed = False
        self._threads: list[Task] = []

    def open(self) -> None:
        """Connects to the other ranks, and begins to send.

        Raises:
            Interrupted: Some rank did not connect.
        """
        self._wire.connect(give_up=self._world.peer_failed)
        self._threads = [
            Task(self._send_all, "fastload-send"),
            Task(self._await_all, "fastload-receive"),
        ]
        for thread in self._threads:
            thread.start()

    def receive(
        self, batches: Sequence[Sequence[tuple[int, int]]], buffers: BufferRing, *, num_ahead: int
    ) -> Iterator[tuple[threading.Event, list[Tensor]]]:
        """Receives batches of messages in order, some of them ahead.

        Args:
            batches: Sender and length in bytes of the messages of each batch.
            buffers: `num_ahead` buffers, each for one batch.
            num_ahead: Batches received at once.

        Yields:
            For each batch an event to `wait` for, and the bytes of its messages, which are valid until the
            next iteration.

        Raises:
            Interrupted: A connection broke.
        """
        posted: deque[tuple[threading.Event, list[Tensor]]] = deque()
        for number in range(len(batches)):
            for ahead in range(number + len(posted), min(number + num_ahead, len(batches))):
                posted.append(self._expect(batches[ahead], buffers.get(ahead)))
            yield posted.popleft()

    def _expect(
        self, messages: Sequence[tuple[int, int]], buffer: Tensor
    ) -> tuple[threading.Event, list[Tensor]]:
        """Posts receives of messages; returns the event of their arrival, and their bytes."""
        lengths = [nbytes for _, nbytes in messages]
        data = list(buffer[: sum(lengths)].split(lengths)) if messages else []
        receives = [
            _or_interrupt(partial(self._wire.receive, into, sender, _TAG))
            for (sender, _), into in zip(messages, data, strict=True)
        ]
        arrived = threading.Event()
        self._expected.put((receives, arrived))
        return arrived, data

    def wait(self, event: threading.Event, what: str) -> None:
        """Waits for messages.

        Args:
            event: From `receive`.
            what: Their description, for error messages.

        Raises:
            Interrupted: Another rank or a connection failed, or they did not come in time.
        """
        pulse = None
        while True:
            try:
                self._wait(event, what, self._world.patience_s / 2)
                break
            except DeadlineExceeded as late:
                # The other end may be writing its own parts, which can take any time.
                before, pulse = pulse, self._world.rendezvous.progress()
                if pulse == before:
                    raise Interrupted(str(late)) from None
        self._world.note_progress()

    def _wait(self, event: threading.Event, what: str, limit_s: float) -> None:
        try:
            wait_for(event, what, limit_s, lambda: self._error is not None or self._world.peer_failed())
        finally:
            self._check()

    def finish(self) -> None:
        """Waits until everything is sent; raises as `wait`."""
        self.wait(self._all_sent, "sending to the ranks that write")

    def close(self) -> None:
        """Ends the exchange, and abandons its messages."""
        self._closed = True
        self._expected.put(None)
        ended = not self._is_alive(TICK_S)
        if not ended:
            self._wire.cut()
        if not self._is_alive(10 * TICK_S):
            self._wire.close(keep=ended and self._error is None and self._all_sent.is_set())

    def _is_alive(self, wait_s: float) -> bool:
        for thread in self._threads:
            thread.join(wait_s)
        return any(thread.is_alive() for thread in self._threads)

    def _check(self) -> None:
        error = self._error
        try:
            if error is not None:
                raise error.with_traceback(None)
        finally:
            del error  # else error → traceback → frame → error would keep all their memory alive

    def _send_all(self) -> None:
        sends: deque[Any] = deque()
        try:
            for number, writer in enumerate(self._outgoing):
                if len(sends) == self._num_outgoing:
                    _finish(sends.popleft())
                if self._closed:
                    return
                sends.append(_or_interrupt(partial(self._wire.send, self._pack(number), writer, _TAG)))
            while sends:
                _finish(sends.popleft())
        except Exception as error:
            self._broke(error)
        self._all_sent.set()

    def _await_all(self) -> None:
        while (expected := self._expected.get()) is not None:
            receives, arrived = expected
            try:
                for receive in receives:
                    _finish(receive)
            except Exception as error:
                self._broke(error)
                return
            arrived.set()

    def _broke(self, error: Exception) -> None:
        if self._error is None:
            self._error = error.with_traceback(None)


def _or_interrupt(call: Callable[[], T]) -> T:
    """Calls a function of a connection; raises `Interrupted` if the connection broke."""
    try:
        return call()
    except RuntimeError as error:
        why = str(error)
    raise Interrupted(f"the exchange broke: {why}")  # without the error, whose frames have the bytes


def _finish(work: Any) -> None:
    _or_interrupt(lambda: work.wait(_FOR_EVER))


class _Batch(NamedTuple):
    """A batch of incoming messages.

    Attributes:
        end: The part after its last one.
        arrived: Set once all have arrived.
        left: Sender → the bytes that no part has taken yet.
    """

    end: int
    arrived: threading.Event
    left: dict[int, Tensor]


class PartAssembler:
    """Assembles the parts that this rank writes, and sends its bytes for the parts of other writers.

    Args:
        world: The ranks.
        plan: This rank's plan.
        snapshot: The bytes that this rank contributes; None reads them from the state.
        wire: Connections to other ranks; None if no rank needs bytes from another one.

    Attributes:
        depth: Number of parts that are valid at once: part i until part i + depth is requested.
    """

    def __init__(self, world: World, plan: SavePlan, snapshot: Snapshot | None, wire: Wire | None) -> None:
        self.depth = plan.depths.parts
        self._plan = plan
        self._snapshot = snapshot
        # Cached with the connections of successful saves: the first touch of memory takes four times as long
        # as to hash it.
        self._buffers: dict[str, BufferRing] = wire.along("buffers") if wire is not None else {}
        messages = plan.messages
        self._reuse("parts", self.depth, [part.nbytes for part in plan.share.parts])
        self._reuse("scratch", 1, [message.nbytes for message in messages.local])
        self._reuse("outgoing", plan.depths.outgoing, [message.nbytes for message in messages.outgoing])
        self._exchange: MessageExchange | None = None
        self._incoming: Iterator[_Batch] = iter(())
        self._batch: _Batch | None = None
        if wire is not None:
            writers = [message.writer for message in messages.outgoing]
            self._exchange = MessageExchange(
                world, wire, writers, self._pack, num_outgoing=plan.depths.outgoing
            )
            self._incoming = self._receive(self._exchange)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(ring.nbytes for ring in self._buffers.values())

    def open(self) -> None:
        """Waits for the snapshot, and connects to the other ranks if any rank needs bytes from another one.

        Raises:
            Interrupted: As for `part`.
            Exception: The snapshot could not be made.
        """
        if self._snapshot is not None:
            self._snapshot.await_copies()
        if self._exchange is not None:
            self._exchange.open()

    def part(self, index: int) -> memoryview:
        """Assembles a part, and returns its bytes. Parts are requested in order.

        Raises:
            Interrupted: Another rank or a connection failed, or messages did not come in time.
        """
        layout, part = self._plan.state.layout, self._plan.share.parts[index]
        messages = self._plan.messages.parts[index]
        while self._exchange is not None and (self._batch is None or self._batch.end <= index):
            self._batch = next(self._incoming)
        positions = [positions_in(layout, part, message) for message in messages]
        is_own = len(messages) == 1 and messages[0].is_local and messages[0].nbytes == part.nbytes
        if is_own and self._snapshot is not None and _is_one_run(positions[0]):
            return host_view(self._snapshot.get(messages[0]))
        buffer = self._buffers["parts"].get(index)[: part.nbytes]
        header = layout.files[part.file].header[part.offset : part.end]
        if header:
            host_view(buffer[: len(header)])[:] = header
        for message, runs in zip(messages, positions, strict=True):
            if not message.is_local:
                _scatter(self._take(message), runs, buffer)
            elif self._snapshot is not None:
                _scatter(self._snapshot.get(message), runs, buffer)
            elif _is_one_run(runs):
                self._read(message, buffer[runs[0].start : runs[0].end])
            else:
                _scatter(self._read(message, self._buffers["scratch"].get(0)), runs, buffer)
        return host_view(buffer)

    def finish(self) -> None:
        """Waits until all outgoing messages are sent.

        Raises:
            Interrupted: As for `part`.
            StateChanged: The state changed while it was copied.
        """
        if self._exchange is not None:
            self._exchange.finish()
        if self._snapshot is not None:
            self._snapshot.require_unchanged()

    def close(self) -> None:
        """Ends the exchange, and frees all memory."""
        exchange, self._exchange = self._exchange, None  # breaks a reference cycle
        if exchange is not None:
            exchange.close()
        self._incoming, self._batch = iter(()), None
        self._snapshot = None
        self._buffers = {}

    def _receive(self, exchange: MessageExchange) -> Iterator[_Batch]:
        """Receives the incoming messages, batch by batch."""
        messages, num_ahead = self._plan.messages, self._plan.depths.incoming
        batches = [
            [(message.sender, message.nbytes) for message in messages.incoming(number)]
            for number in range(len(messages.batches))
        ]
        lengths = [sum(nbytes for _, nbytes in of_batch) for of_batch in batches]
        received = exchange.receive(batches, self._reuse("incoming", num_ahead, lengths), num_ahead=num_ahead)
        for parts, of_batch, (arrived, data) in zip(messages.batches, batches, received, strict=True):
            senders = [sender for sender, _ in of_batch]
            yield _Batch(parts.stop, arrived, dict(zip(senders, data, strict=True)))

    def _take(self, message: ShardMessage) -> Tensor:
        """Waits for a message for the current part. The messages of a rank are taken in order."""
        batch = self._batch
        assert batch is not None
        assert self._exchange is not None
        if not batch.arrived.is_set():
            self._exchange.wait(batch.arrived, f"part {message.number} of this rank")
        data = batch.left[message.sender]
        batch.left[message.sender] = data[message.nbytes :]
        return data[: message.nbytes]

    def _reuse(self, name: str, count: int, lengths: Sequence[int]) -> BufferRing:
        """Returns the buffers of the last save if they fit, else new ones."""
        is_copied = self._snapshot is None  # from the state, perhaps on an accelerator
        ring = BufferRing(count, lengths, pinned=is_copied and self._plan.state.reader.on_device)
        if name not in self._buffers or self._buffers[name].kind != ring.kind:
            self._buffers[name] = ring
        return self._buffers[name]

    def _read(self, message: ShardMessage, buffer: Tensor) -> Tensor:
        """Copies the bytes of a message out of the state."""
        data = buffer[: message.nbytes]
        self._plan.state.reader.copy(message.ranges, data)
        self._plan.state.reader.wait_copied()
        return data

    def _pack(self, number: int) -> Tensor:
        message = self._plan.messages.outgoing[number]
        if self._snapshot is not None:
            return self._snapshot.get(message)
        return self._read(message, self._buffers["outgoing"].get(number))


def _is_one_run(positions: Sequence[Runs]) -> bool:
    return len(positions) == 1 and not positions[0].steps


def _scatter(data: Tensor, positions: Sequence[Runs], part: Tensor) -> None:
    """Copies the bytes of a message to their positions in a part."""
    begin = 0
    for runs in positions:
        copied = data[begin : begin + runs.total]
        if runs.steps:
            target = runs.of(part)
            target.copy_(copied.view(target.shape))
        else:
            part[runs.start : runs.end].copy_(copied)
        begin += runs.total
