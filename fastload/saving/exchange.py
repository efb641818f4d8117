"""Messages between the ranks that hold shards and the ranks that write them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fastload.base.errands import Errand
from fastload.base.memory import PAGE_BYTES, allocate_staging, host_view, round_up
from fastload.base.threads import background
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.geometry.box import Runs
from fastload.saving.layout import FileRange, Layout
from fastload.saving.messages import Packet, Packets, places_of
from fastload.saving.plan import Depths
from fastload.saving.snapshot import Shards, Snapshot
from fastload.transfer.rounds import TICK_S, wait_for
from fastload.transfer.wire import Wire

__all__ = ["Assembly", "Buffers", "Incoming", "PacketExchange"]

_TAG = 0  # packets for a rank come in the order of its pieces at both ends
_FOR_EVER = timedelta(days=1)  # a packet waits for its writer, who may write for hours before


class Sendable(Protocol):
    """What goes from one rank to another: a packet, or a copy of what is written already."""

    @property
    def supplier(self) -> int:
        """The rank that it comes from."""
        ...

    @property
    def writer(self) -> int:
        """The rank that it goes to."""
        ...


ItemT = TypeVar("ItemT", bound=Sendable)


class PacketExchange(Generic[ItemT]):
    """Sends what others need as they come to need it, and receives what this rank needs.

    Both in threads of their own: a wait of Gloo's cannot look out for alarms. Packets leave in the order of
    the pieces that they are for, and every writer has receives open for its next pieces. So the packet for
    the first piece of all that is not complete is never behind one that waits.

    Args:
        world: The ranks.
        wire: To those that this rank has packets for, or gets some from; closed in the end.
        leaving: What others get from this rank, in order.
        pack: Returns the bytes of a packet, flat uint8, given which of `num_buffers` it may use.
        num_buffers: Packets under way at once.
    """

    def __init__(
        self,
        world: World,
        wire: Wire,
        leaving: Sequence[ItemT],
        pack: Callable[[ItemT, int], Tensor],
        *,
        num_buffers: int,
    ) -> None:
        self._world = world
        self._leaving = leaving
        self._pack = pack
        self._num_buffers = num_buffers
        self._wire = wire
        self._expected: queue.SimpleQueue[tuple[list[Any], threading.Event] | None] = queue.SimpleQueue()
        self._all_sent = threading.Event()
        self._error: Exception | None = None
        self._closed = False
        self._threads: list[Errand] = []

    def open(self) -> None:
        """Meets the other ranks, and begins to send.

        Raises:
            Interrupted: Some rank did not come.
        """
        self._wire.connect(give_up=self._world.alarmed)
        self._threads = [
            background(self._send_all, "fastload-send"),
            background(self._await_all, "fastload-receive"),
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, parts: Sequence[tuple[ItemT, Tensor]]) -> threading.Event:
        """Makes ready to receive packets; returns what is set once all of them are here."""
        came = threading.Event()
        try:
            receives = [self._wire.receive(into, packet.supplier, _TAG) for packet, into in parts]
        except RuntimeError as error:
            raise Interrupted(f"the exchange broke: {error}") from error
        self._expected.put((receives, came))
        return came

    def wait(self, event: threading.Event, what: str) -> None:
        """Waits for packets.

        Args:
            event: What `expect` returned.
            what: They are, for messages.

        Raises:
            Interrupted: Another rank failed, or the connection did, or they did not come in time.
        """
        pulse = None
        while True:
            try:
                self._wait(event, what, self._world.patience_s / 2)
                break
            except DeadlineExceeded as late:
                # Whoever is to send or to take them may write what it has by itself for as long as it likes.
                before, pulse = pulse, self._world.rendezvous.pulse(limit_s=self._world.grace_s)
                if pulse == before:
                    raise Interrupted(str(late)) from None
        self._world.moved()

    def _wait(self, event: threading.Event, what: str, limit_s: float) -> None:
        try:
            wait_for(event, what, limit_s, lambda: self._error is not None or self._world.alarmed())
        finally:
            self._check()

    def finish(self) -> None:
        """Waits until all has been sent; errors are those of `wait`."""
        self.wait(self._all_sent, "sending to the ranks that write")

    def close(self) -> None:
        """Ends the exchange; what is still under way is abandoned."""
        self._closed = True
        self._expected.put(None)
        whole = not self._is_alive(TICK_S)
        if not whole:
            self._wire.cut()
        if not self._is_alive(10 * TICK_S):
            self._wire.close(keep=whole and self._error is None and self._all_sent.is_set())

    def _is_alive(self, wait_s: float) -> bool:
        for thread in self._threads:
            thread.join(wait_s)
        return any(thread.is_alive() for thread in self._threads)

    def _check(self) -> None:
        error = self._error
        try:
            if isinstance(error, _Broken):
                raise Interrupted(f"the exchange broke: {error}")
            if error is not None:
                raise error.with_traceback(None)
        finally:
            del error  # else error → traceback → frame → error would keep all their memory alive

    def _send_all(self) -> None:
        under_way: deque[Any] = deque()
        try:
            for index, packet in enumerate(self._leaving):
                if len(under_way) == self._num_buffers:
                    _wait(under_way.popleft())
                if self._closed:
                    return
                data = self._pack(packet, index % self._num_buffers)
                under_way.append(_run(lambda: self._wire.send(data, packet.writer, _TAG)))  # noqa: B023
            while under_way:
                _wait(under_way.popleft())
        except Exception as error:
            self._broke(error)
        self._all_sent.set()

    def _await_all(self) -> None:
        while (expected := self._expected.get()) is not None:
            receives, came = expected
            try:
                for receive in receives:
                    _wait(receive)
            except Exception as error:
                self._broke(error)
                return
            came.set()

    def _broke(self, error: Exception) -> None:
        if self._error is None:
            self._error = error.with_traceback(None)


class _Broken(Exception):
    """A connection did not last."""


def _run(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise _Broken(str(error)) from None


def _wait(work: Any) -> None:
    _run(lambda: work.wait(_FOR_EVER))


class Incoming:
    """What others contribute to the pieces of this rank, which are put together in order.

    Args:
        packets: What the pieces consist of.
        exchange: Brings it, once it is open.
        memory: Makes the buffers for it, given the lengths of what comes for each batch; see `Buffers`.
        num_batches: How many of them there are.
    """

    def __init__(
        self,
        packets: Packets,
        exchange: PacketExchange[Packet],
        memory: Callable[[Sequence[int]], Buffers],
        *,
        num_batches: int,
    ) -> None:
        self._exchange = exchange
        self._ends = [batch.stop for batch in packets.batches]
        self._packets = [packets.travelling(number) for number in range(len(self._ends))]
        lengths = [sum(packet.nbytes for packet in of_batch) for of_batch in self._packets]
        self._memory = memory(lengths)
        self._num_batches = num_batches
        self._posted: deque[tuple[dict[int, Tensor], Event]] = deque()
        self._number = -1
        self._left: dict[int, Tensor] = {}
        self._came = Event()

    def reach(self, piece: int) -> None:
        """Makes ready to receive what is for a piece, and for later ones; what earlier ones got may go.

        Raises:
            Interrupted: A connection broke.
        """
        while self._number < 0 or self._ends[self._number] <= piece:
            self._number += 1
            last = min(self._number + self._num_batches, len(self._ends))
            for number in range(self._number + len(self._posted), last):
                self._post(number)
            self._left, self._came = self._posted.popleft()

    def take(self, packet: Packet) -> Tensor:
        """Waits for what a rank contributes to the piece that was reached; its packets are taken in order.

        Raises:
            Interrupted: Another rank failed, or a connection, or it did not come in time.
        """
        if not self._came.is_set():
            self._exchange.wait(self._came, f"piece {packet.number} of this rank")
        data = self._left[packet.supplier]
        self._left[packet.supplier] = data[packet.nbytes :]
        return data[: packet.nbytes]

    def free(self) -> None:
        """Lets go of the memory."""
        self._posted.clear()
        self._left.clear()
        self._memory = Buffers(0, (), pinned=False)

    def _post(self, number: int) -> None:
        packets, memory, position = self._packets[number], self._memory, 0
        parts: list[tuple[Packet, Tensor]] = []
        for packet in packets:
            parts.append((packet, memory.get(number)[position : position + packet.nbytes]))
            position += packet.nbytes
        came = self._exchange.expect(parts)
        self._posted.append(({packet.supplier: data for packet, data in parts}, came))


class Buffers:
    """Some buffers of the same length, used in turn; they take no memory before.

    Args:
        count: How many.
        lengths: Of what goes into them, one at a time, in bytes; the longest one fits.
        pinned: Page-locks them, for copies from an accelerator.

    Attributes:
        kind: The same for those that may take each other's place.
    """

    def __init__(self, count: int, lengths: Sequence[int], *, pinned: bool) -> None:
        largest = round_up(max(lengths, default=0), PAGE_BYTES)
        self.kind = min(count, len(lengths)), largest, pinned
        self._buffers: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Length of those that were used, in bytes."""
        return len(self._buffers) * self.kind[1]

    def get(self, index: int) -> Tensor:
        """Returns the buffer whose turn it is, which whatever used it before has to have left."""
        count, largest, pinned = self.kind
        turn = index % count
        if turn not in self._buffers:
            self._buffers[turn] = allocate_staging(largest, pinned=pinned)
        return self._buffers[turn]


class Assembly:
    """The pieces of this rank, and what it sends for those of others; see `snapshot.Slabs`.

    What this rank holds itself is copied where it belongs; what others hold comes for some pieces at a time.

    Args:
        world: The ranks.
        layout: The files.
        pieces: What this rank writes or hashes.
        packets: What they consist of, and what others need.
        shards: The tensors of this rank; not asked if there is a snapshot.
        snapshot: `Packets.own`, if that was copied before.
        depths: How much is in memory.
        wire: To other ranks; None if no rank needs anything from another one.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        pieces: Sequence[FileRange],
        packets: Packets,
        shards: Shards,
        snapshot: Snapshot | None,
        *,
        depths: Depths,
        wire: Wire | None,
    ) -> None:
        self._layout = layout
        self._pieces = pieces
        self._packets = packets
        self._shards = shards
        self._copied = {}
        if snapshot is not None:
            places = [(packet.writer, packet.number) for packet in packets.own]
            self._copied = {place: snapshot.tensor(index) for index, place in enumerate(places)}
        self.depth = depths.slots
        # Kept with the connections, which only a save that ended well leaves to the next one: the first touch
        # of memory takes four times as long as to hash what is in it.
        self._buffers: dict[str, Buffers] = wire.along("buffers", dict) if wire is not None else {}
        self._reuse("slots", depths.slots, [piece.nbytes for piece in pieces])
        self._reuse("scratch", 1, [packet.nbytes for packet in packets.kept])
        self._reuse("leaving", depths.leaving, [packet.nbytes for packet in packets.leaving])
        self._incoming: Incoming | None = None
        self._exchange: PacketExchange[Packet] | None = None
        if wire is not None:
            self._exchange = PacketExchange(
                world, wire, packets.leaving, self._pack, num_buffers=depths.leaving
            )
            coming = partial(self._reuse, "coming", depths.coming)
            self._incoming = Incoming(packets, self._exchange, coming, num_batches=depths.coming)

    @property
    def nbytes(self) -> int:
        """Host memory that it takes, in bytes."""
        return sum(memory.nbytes for memory in self._buffers.values())

    def open(self) -> None:
        """Meets the other ranks, if any of them needs something from another; errors are those of `piece`."""
        if self._exchange is not None:
            self._exchange.open()

    def piece(self, index: int) -> memoryview:
        """Puts a piece together, and returns its bytes.

        Raises:
            Interrupted: Another rank failed, or a connection, or what others hold did not come in time.
        """
        piece, coming = self._pieces[index], self._packets.coming[index]
        if self._incoming is not None:
            self._incoming.reach(index)
        whole = coming[0] if len(coming) == 1 and coming[0].nbytes == piece.nbytes else None
        copied = self._copied.get((whole.writer, index)) if whole is not None else None
        if whole is not None and copied is not None and _is_one_run(places_of(self._layout, whole, piece)):
            return host_view(copied)
        slot = self._buffers["slots"].get(index)[: piece.nbytes]
        header = self._layout.files[piece.file].header[piece.begin : piece.end]
        if header:
            host_view(slot[: len(header)])[:] = header
        for packet in coming:
            places = places_of(self._layout, packet, piece)
            if packet.supplier != packet.writer:
                assert self._incoming is not None
                _scatter(self._incoming.take(packet), places, slot)
            elif (packet.writer, index) in self._copied:
                _scatter(self._copied[packet.writer, index], places, slot)
            elif _is_one_run(places):
                self._fill(packet, slot[places[0].start : places[0].end])
            else:
                data = self._buffers["scratch"].get(0)[: packet.nbytes]
                self._fill(packet, data)
                _scatter(data, places, slot)
        return host_view(slot)

    def finish(self) -> None:
        """Returns once others have what they need from this rank; errors are those of `piece`."""
        if self._exchange is not None:
            self._exchange.finish()

    def close(self) -> None:
        """Ends what is still under way, and lets go of all memory."""
        exchange, self._exchange = self._exchange, None  # which refers to this
        if exchange is not None:
            exchange.close()
        incoming, self._incoming = self._incoming, None  # which refers to that
        if incoming is not None:
            incoming.free()
        self._copied.clear()
        self._buffers = {}

    def _reuse(self, name: str, count: int, lengths: Sequence[int]) -> Buffers:
        """Returns the buffers of the last save if they will do, else others."""
        buffers = Buffers(count, lengths, pinned=self._shards.on_device)
        if name not in self._buffers or self._buffers[name].kind != buffers.kind:
            self._buffers[name] = buffers
        return self._buffers[name]

    def _fill(self, packet: Packet, out: Tensor) -> None:
        self._shards.copy(packet, out)
        self._shards.settle()

    def _pack(self, packet: Packet, number: int) -> Tensor:
        copied = self._copied.get((packet.writer, packet.number))
        if copied is not None:
            return copied
        data = self._buffers["leaving"].get(number)[: packet.nbytes]
        self._fill(packet, data)
        return data


def _is_one_run(places: Sequence[Runs]) -> bool:
    return len(places) == 1 and not places[0].steps


def _scatter(data: Tensor, places: Sequence[Runs], slot: Tensor) -> None:
    """Takes a packet to where it belongs in its piece."""
    position = 0
    for runs in places:
        part = data[position : position + runs.total]
        if runs.steps:
            sizes, strides = zip(*runs.steps, (runs.length, 1), strict=True)
            target = slot.as_strided(sizes, strides, slot.storage_offset() + runs.start)
            target.copy_(part.view(sizes))
        else:
            slot[runs.start : runs.end].copy_(part)
        position += runs.total
