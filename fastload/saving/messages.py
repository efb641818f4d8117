"""Which bytes go from whom to whom, so that each writer has all that it writes and hashes. Pure.

What one rank contributes to one *piece* of a writer's is a *packet*: the bytes of the cells it has there,
cell by cell, each in row-major order. A writer that holds a cell takes it from itself; for others the holders
take turns. Where rows are sharded, most of what travels are blocks that cross from one rank's rows to the
next one's: many, and short. So what is for several pieces of a writer's, a *batch*, travels as one packet.
Both ends make a packet of the same stretches, in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

from fastload.geometry.box import Runs
from fastload.saving.layout import FileRange, Layout
from fastload.saving.shard_map import Cell, Holdings

__all__ = ["Packet", "Packets", "Stretch", "make_packets", "places_of"]


class Stretch(NamedTuple):
    """A part of a cell.

    Attributes:
        tensor: Number of the tensor in `Layout.space`.
        cell: The cell.
        begin: First byte in the cell.
        end: The byte after the last one in the cell.
    """

    tensor: int
    cell: Cell
    begin: int
    end: int


class Packet(NamedTuple):
    """What one rank contributes to a piece, or to a batch of them.

    Attributes:
        supplier: That rank.
        writer: The rank whose piece it is.
        number: Which of its pieces, or batches.
        stretches: What it consists of.
    """

    supplier: int
    writer: int
    number: int
    stretches: tuple[Stretch, ...]

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return sum(stretch.end - stretch.begin for stretch in self.stretches)


@dataclass(frozen=True)
class Packets:
    """The packets that one rank has to do with.

    Attributes:
        coming: For each of its pieces, what it consists of but for headers; its own packet, if any, first.
        batches: Its pieces, a few at a time.
        leaving: What others get from it for a batch of theirs, in the order in which it goes.
    """

    coming: Sequence[Sequence[Packet]]
    batches: Sequence[range]
    leaving: Sequence[Packet]

    def travelling(self, batch: int) -> list[Packet]:
        """Returns what comes from others for a batch, as they have it among their `leaving`."""
        found: dict[int, list[Packet]] = {}
        for piece in self.batches[batch]:
            for packet in self.coming[piece]:
                if packet.supplier != packet.writer:
                    found.setdefault(packet.supplier, []).append(packet)
        return [_together(packets, batch) for packets in found.values()]

    @property
    def partners(self) -> set[int]:
        """The other ranks that it gets packets from, or has some for."""
        suppliers = {packet.supplier for of_piece in self.coming for packet in of_piece}
        writers = {packet.writer for of_piece in self.coming for packet in of_piece}
        return suppliers - writers | {packet.writer for packet in self.leaving}

    @property
    def own(self) -> list[Packet]:
        """All that the rank contributes: to its own pieces, and to those of others."""
        return [*self.kept, *self.leaving]

    @property
    def kept(self) -> list[Packet]:
        """What the rank contributes to its own pieces."""
        return [packet for of_piece in self.coming for packet in of_piece if packet.supplier == packet.writer]


def make_packets(
    layout: Layout,
    holdings: Holdings,
    pieces: Sequence[Mapping[int, Sequence[FileRange]]],
    rank: int,
    teams: Sequence[Sequence[int]],
    batch_bytes: int,
) -> Packets:
    """Returns the packets that a rank has to do with.

    Args:
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        pieces: For each team, what its writers write or hash, piece by piece.
        rank: The rank.
        teams: For each team, the ranks in it, which give to each other before others do.
        batch_bytes: Most bytes of a batch of several pieces.
    """
    coming: list[list[Packet]] = []
    batches: list[range] = []
    leaving: list[Packet] = []
    for of_team, members in zip(pieces, map(frozenset, teams), strict=True):
        if rank in of_team:
            coming = [
                _coming(layout, holdings, FileRange(*piece), rank, index, members)
                for index, piece in enumerate(of_team[rank])
            ]
            batches = _batches(of_team[rank], batch_bytes)
        leaving += _leaving(layout, holdings, of_team, rank, members, batch_bytes)
    num_ranks = 1 + max(rank, *(packet.writer for packet in leaving)) if leaving else 1
    # Not all to the same writer at once.
    leaving.sort(key=lambda packet: (packet.number, (packet.writer - rank) % num_ranks))
    return Packets(coming, batches, leaving)


def places_of(layout: Layout, packet: Packet, piece: FileRange) -> list[Runs]:
    """Returns where in its piece the bytes of a packet belong, in the order in which the packet has them."""
    places: list[Runs] = []
    for number, cell, begin, end in packet.stretches:
        offset = layout.space.extents[number].offset - piece.begin
        for runs in cell.runs.cut(begin, end):
            moved = runs._replace(start=runs.start + offset)
            last = places[-1] if places else None
            if last is not None and not last.steps and not moved.steps and last.end == moved.start:
                places[-1] = last._replace(length=last.length + moved.length)
            else:
                places.append(moved)
    return places


def _coming(
    layout: Layout, holdings: Holdings, piece: FileRange, writer: int, index: int, members: Collection[int]
) -> list[Packet]:
    found: dict[int, list[Stretch]] = {writer: []}
    tensors = layout.space.extents
    for number in range(max(0, layout.space.find(piece.file, piece.begin)), len(tensors)):
        entry = tensors[number]
        if (entry.file, entry.offset) >= (piece.file, piece.end):
            break
        if entry.file == piece.file and entry.offset + entry.nbytes > piece.begin:
            cells = holdings.within(number, piece.begin - entry.offset, piece.end - entry.offset)
            for cell, begin, end in cells:
                supplier = _supplier(cell.holders, writer, index, members)
                found.setdefault(supplier, []).append(Stretch(number, cell, begin, end))
    return [Packet(supplier, writer, index, tuple(of)) for supplier, of in found.items() if of]


def _leaving(
    layout: Layout,
    holdings: Holdings,
    pieces: Mapping[int, Sequence[FileRange]],
    rank: int,
    members: Collection[int],
    batch_bytes: int,
) -> list[Packet]:
    known = _Pieces(pieces)
    found: dict[tuple[int, int], list[Stretch]] = {}
    own: dict[int, list[Cell]] = {}
    for number, entry in enumerate(layout.space.extents):
        kind = holdings.kind(number)
        if kind not in own:
            own[kind] = [cell for cell in holdings.cells(number) if rank in cell.holders]
        for cell in own[kind]:
            first, last = entry.offset + cell.runs.start, entry.offset + cell.runs.end
            for piece, writer, index in known.overlapping(entry.file, first, last):
                if _supplier(cell.holders, writer, index, members) != rank or writer == rank:
                    continue
                begin = cell.runs.before(piece.begin - entry.offset)
                end = cell.runs.before(piece.end - entry.offset)
                if begin < end:
                    found.setdefault((writer, index), []).append(Stretch(number, cell, begin, end))
    of_writer: dict[int, list[Packet]] = {}
    for (writer, index), of in sorted(found.items()):
        of_writer.setdefault(writer, []).append(Packet(rank, writer, index, tuple(of)))
    return [
        packet
        for writer, packets in of_writer.items()
        for packet in _batched(packets, _batches(pieces[writer], batch_bytes))
    ]


def _batches(pieces: Sequence[FileRange], batch_bytes: int) -> list[range]:
    """Returns the pieces of a writer in batches."""
    firsts, nbytes = [0], 0
    for index, (_, begin, end) in enumerate(pieces):
        if nbytes and nbytes + end - begin > batch_bytes:
            firsts.append(index)
            nbytes = 0
        nbytes += end - begin
    return [range(first, end) for first, end in pairwise([*firsts, len(pieces)])]


def _batched(packets: Sequence[Packet], batches: Sequence[range]) -> Iterator[Packet]:
    """Yields packets for pieces of one writer, in order, as packets for its batches."""
    ends = [batch.stop for batch in batches]
    for number, of_batch in groupby(packets, lambda packet: bisect_right(ends, packet.number)):
        yield _together(list(of_batch), number)


def _together(packets: Sequence[Packet], batch: int) -> Packet:
    """Returns packets of the same ranks, in order, as one; stretches that meet become one."""
    stretches: list[Stretch] = []
    for stretch in chain.from_iterable(packet.stretches for packet in packets):
        last = stretches[-1] if stretches else None
        if last is not None and last[:2] == stretch[:2] and last.end == stretch.begin:
            stretches[-1] = last._replace(end=stretch.end)
        else:
            stretches.append(stretch)
    return Packet(packets[0].supplier, packets[0].writer, batch, tuple(stretches))


class _Pieces:
    """The pieces of a team, to be found by what they have; what is only hashed overlaps what others write."""

    def __init__(self, pieces: Mapping[int, Sequence[FileRange]]) -> None:
        self._sorted = sorted(
            (piece, writer, index) for writer, of in pieces.items() for index, piece in enumerate(of)
        )
        self._ends = list(accumulate(((piece.file, piece.end) for piece, _, _ in self._sorted), max))

    def overlapping(self, file: int, begin: int, end: int) -> Iterator[tuple[FileRange, int, int]]:
        """Yields those that have bytes of a range, each with its writer and its number."""
        for at in range(bisect_right(self._ends, (file, begin)), len(self._sorted)):
            piece, writer, index = self._sorted[at]
            if (piece.file, piece.begin) >= (file, end):
                return
            if piece.file == file and piece.end > begin:
                yield piece, writer, index


def _supplier(holders: Sequence[int], writer: int, piece: int, members: Collection[int]) -> int:
    """Returns which of those who hold a cell gives it to a writer."""
    if writer in holders:
        return writer
    near = [rank for rank in holders if rank in members] or holders
    return near[(writer + piece) % len(near)]
