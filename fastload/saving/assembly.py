"""Pieces of files, put together of what several ranks hold."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fastload.base.memory import PAGE_BYTES, allocate_staging, host_view, round_up
from fastload.errors import OptionError
from fastload.geometry.box import Runs
from fastload.ranks.world import World
from fastload.saving.assign import FileRange
from fastload.saving.exchange import PacketExchange
from fastload.saving.layout import Layout
from fastload.saving.packets import Packet, Packets, places_of
from fastload.saving.shards import Shards
from fastload.saving.snapshot import HasBytes, Snapshot
from fastload.transfer.wire import Wire

__all__ = ["Assembly", "Depths"]


class Depths(NamedTuple):
    """How many pieces an assembly has in memory.

    Attributes:
        writing: That are written at once.
        ahead: That come in while an earlier one is hashed.
        leaving: Packets that are on their way at once.
    """

    writing: int
    ahead: int
    leaving: int

    @property
    def num_pieces(self) -> int:
        """All of them together."""
        return (self.writing + 1 + self.ahead) + (1 + self.ahead) + self.leaving

    @classmethod
    def within(cls, staging_bytes: int, unit_bytes: int, *, num_writes: int) -> Depths:
        """Chooses them for pieces of at least so many bytes.

        Args:
            staging_bytes: Most memory of all.
            unit_bytes: The shortest piece that may be written by itself.
            num_writes: Pieces that may be written at once.

        Raises:
            OptionError: There is no room for the fewest.
        """
        least = cls(1, 0, 1)
        for depths in (cls(num_writes, 2, 4), cls(1, 1, 2), least):
            if depths.num_pieces * unit_bytes <= staging_bytes:
                return depths
        raise OptionError(
            f"staging_bytes={staging_bytes}: to save shards there takes at least "
            f"{least.num_pieces * unit_bytes}: {least.num_pieces} pieces of {unit_bytes} bytes, the shortest "
            "that this storage takes"
        )


class _Part(NamedTuple):
    """A packet of a piece, in memory.

    Attributes:
        packet: The packet.
        data: Its bytes.
        places: Where in the piece they belong; none if they are there.
    """

    packet: Packet
    data: Tensor
    places: Sequence[Runs]


class Assembly:
    """The pieces of this rank, and what it sends for those of others; see `snapshot.Slabs`.

    A packet that is one range of its piece is copied or received right there; others are scattered.

    Args:
        world: The ranks.
        layout: The files.
        pieces: What this rank writes or hashes.
        packets: What they consist of, and what others need.
        shards: The tensors of this rank; not asked if there is a snapshot.
        snapshot: `Packets.own`, if that was copied before.
        depths: How many pieces are in memory.
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
            places = [(packet.writer, packet.piece) for packet in packets.own]
            self._copied = {place: snapshot.tensor(index) for index, place in enumerate(places)}
        self.depth = depths.writing + 1
        self._num_ahead = depths.ahead
        pinned = shards.on_device
        self._slots = _Buffers(self.depth + depths.ahead, pieces, pinned=pinned)
        self._scratch = _Buffers(1 + depths.ahead, pieces, pinned=pinned)
        self._sent = _Buffers(depths.leaving, packets.leaving, pinned=pinned)
        self._posted: list[tuple[list[_Part], threading.Event]] = []
        self._exchange: PacketExchange[Packet] | None = None
        if wire is not None:
            self._exchange = PacketExchange(
                world, wire, packets.leaving, self._pack, num_buffers=depths.leaving
            )

    @property
    def nbytes(self) -> int:
        """Host memory that it takes, in bytes."""
        return sum(buffers.nbytes for buffers in (self._slots, self._scratch, self._sent))

    def open(self) -> None:
        """Meets the other ranks, if any of them needs something from another; errors are those of `piece`."""
        if self._exchange is not None:
            self._exchange.open()

    def piece(self, index: int) -> memoryview:
        """Puts a piece together, and returns its bytes.

        Raises:
            Interrupted: Another rank failed, or a connection, or what others hold did not come in time.
        """
        for ahead in range(len(self._posted), min(index + self._num_ahead + 1, len(self._pieces))):
            self._post(ahead)
        piece, coming = self._pieces[index], self._packets.coming[index]
        parts, came = self._posted[index]
        self._posted[index] = [], came
        copied = self._copied.get((coming[0].writer, index)) if len(coming) == 1 else None
        if copied is not None and coming[0].nbytes == piece.nbytes:
            places = places_of(self._layout, coming[0], piece)
            if len(places) == 1 and not places[0].steps:
                return host_view(copied)
        slot = self._slots.get(index)[: piece.nbytes]
        header = self._layout.files[piece.file].header[piece.begin : piece.end]
        if header:
            host_view(slot[: len(header)])[:] = header
        for part in parts:
            if part.packet.supplier == part.packet.writer:
                self._fill(part)
        if self._exchange is not None and any(part.packet.supplier != part.packet.writer for part in parts):
            self._exchange.wait(came, f"piece {index} of this rank")
        for part in parts:
            _scatter(part, slot)
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
        self._posted.clear()
        self._copied.clear()
        for buffers in (self._slots, self._scratch, self._sent):
            buffers.free()

    def _post(self, index: int) -> None:
        """Finds the memory for the packets of a piece, and makes ready to receive those of others."""
        piece = self._pieces[index]
        parts: list[_Part] = []
        used_bytes = 0
        for packet in self._packets.coming[index]:
            places = places_of(self._layout, packet, piece)
            if len(places) == 1 and not places[0].steps:
                into = self._slots.get(index)[places[0].start : places[0].end]
                parts.append(_Part(packet, into, ()))
            else:
                into = self._scratch.get(index)[used_bytes : used_bytes + packet.nbytes]
                parts.append(_Part(packet, into, places))
                used_bytes += packet.nbytes
        came = threading.Event()
        others = [(part.packet, part.data) for part in parts if part.packet.supplier != part.packet.writer]
        if others and self._exchange is not None:
            came = self._exchange.expect(others)
        self._posted.append((parts, came))

    def _fill(self, part: _Part) -> None:
        """Gets this rank's own packet."""
        copied = self._copied.get((part.packet.writer, part.packet.piece))
        if copied is not None:
            part.data.copy_(copied)
        else:
            self._shards.copy(part.packet, part.data)
            self._shards.settle()

    def _pack(self, packet: Packet, number: int) -> Tensor:
        copied = self._copied.get((packet.writer, packet.piece))
        if copied is not None:
            return copied
        data = self._sent.get(number)[: packet.nbytes]
        self._shards.copy(packet, data)
        self._shards.settle()
        return data


class _Buffers:
    """Some buffers of the same length, used in turn; they take no memory before.

    Args:
        count: How many.
        items: What goes into them, one at a time; the longest one fits.
        pinned: Page-locks them, for copies from a CUDA device.
    """

    def __init__(self, count: int, items: Sequence[HasBytes], *, pinned: bool) -> None:
        self._count = min(count, len(items))
        self._largest = max((round_up(item.nbytes, PAGE_BYTES) for item in items), default=0)
        self._pinned = pinned
        self._buffers: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Length of those that were used, in bytes."""
        return len(self._buffers) * self._largest

    def free(self) -> None:
        """Lets go of them."""
        self._buffers.clear()

    def get(self, index: int) -> Tensor:
        """Returns the buffer whose turn it is, which whatever used it before has to have left."""
        turn = index % self._count
        if turn not in self._buffers:
            self._buffers[turn] = allocate_staging(self._largest, pinned=self._pinned)
        return self._buffers[turn]


def _scatter(part: _Part, slot: Tensor) -> None:
    """Takes a packet to where it belongs in its piece."""
    position = 0
    for runs in part.places:
        sizes, strides = zip(*runs.steps, (runs.length, 1), strict=True)
        target = slot.as_strided(sizes, strides, slot.storage_offset() + runs.start)
        target.copy_(part.data[position : position + runs.total].view(sizes))
        position += runs.total
