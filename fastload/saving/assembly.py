"""Pieces of files, put together of what several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from fastload.base.memory import host_view
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.geometry.box import Runs
from fastload.saving.assign import FileRange
from fastload.saving.exchange import PacketExchange
from fastload.saving.incoming import Buffers, Incoming
from fastload.saving.layout import Layout
from fastload.saving.packets import Packet, Packets, places_of
from fastload.saving.shards import Shards
from fastload.saving.snapshot import Snapshot
from fastload.transfer.wire import Wire

__all__ = ["Assembly", "Depths"]


class Depths(NamedTuple):
    """How much of a save an assembly has in memory.

    Attributes:
        slots: Pieces that are put together, or written, at once.
        coming: Batches that come in.
        leaving: Packets that are on their way.
    """

    slots: int
    coming: int
    leaving: int

    @property
    def num_batches(self) -> int:
        """Those that come and those that leave, of which a packet may be all."""
        return self.coming + self.leaving

    @property
    def num_pieces(self) -> int:
        """All of them together, if a batch is one piece; and a scratch."""
        return self.slots + 1 + self.num_batches

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
        least = cls(1, 1, 1)
        for depths in (cls(num_writes + 1, 2, 4), cls(2, 2, 2), least):
            if depths.num_pieces * unit_bytes <= staging_bytes:
                return depths
        raise OptionError(
            f"staging_bytes={staging_bytes}: to save shards there takes at least "
            f"{least.num_pieces * unit_bytes}: {least.num_pieces} pieces of {unit_bytes} bytes, the shortest "
            "that this storage takes"
        )

    def batch_bytes(self, staging_bytes: int, piece_bytes: int) -> int:
        """Returns how many bytes of pieces may come together."""
        return max(piece_bytes, (staging_bytes - (self.slots + 1) * piece_bytes) // self.num_batches)


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
