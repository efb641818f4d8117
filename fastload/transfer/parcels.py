"""The buffers of the rounds in flight where ranks want different bytes: what is read, packed and received."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fastload.base.devices import copy_async
from fastload.base.memory import round_up
from fastload.geometry.box import Runs
from fastload.geometry.extents import Span
from fastload.transfer.lanes import Stretch
from fastload.transfer.parcel import Parcel
from fastload.transfer.rounds import Arrival, Exchange, Leg, Round, Slots
from fastload.transfer.route import RoutedPlan, Routes
from fastload.transfer.slabs import LEAST_PIECE_BYTES, OwnChunk, Places

__all__ = ["ParcelSlabs"]

_ALIGNED_BYTES = 64


class ParcelSlabs:
    """One slab for each round in flight, used in turn; see `slabs.Slabs`.

    A chunk that this rank wants as it is, and a parcel that it wants in one piece, are read and received
    right where they belong. All others take room in the slab, until they are placed and passed on. If slabs
    are on a device, all go through them: chunks are read into host memory, and packed on the device.

    Args:
        plan: The rounds.
        rank: This one.
        exchange: Allocates the slabs.
        places: Where the bytes go in the end: what this rank wants, laid end to end.

    Attributes:
        depth: How many rounds may be in flight.

    Raises:
        MemoryError: The slabs do not fit into memory.
    """

    def __init__(self, plan: RoutedPlan, rank: int, exchange: Exchange, places: Places) -> None:
        self._rank = rank
        self._places = places
        self._routes = Routes(plan, rank)
        sizes = plan.slab_bytes, plan.longest_chunk_bytes
        slab, own = exchange.allocate(*sizes)
        round_bytes = plan.slab_bytes + (own.nbytes if own is not None else 0)
        self.depth = min(plan.depth, plan.num_rounds, max(1, plan.staging_bytes // round_bytes))
        allocated = [(slab, own), *(exchange.allocate(*sizes) for _ in range(self.depth - 1))]
        self._slabs = [slab.cut({rank: plan.slab_bytes}).whole for slab, _ in allocated]
        self._own = [own for _, own in allocated if own is not None]
        self._on_device = bool(self._own)
        self._rooms = [_Room(slab) for slab in self._slabs]
        self._starts: dict[int, int] = {}
        self.wanted_bytes = 0
        for tensor, part in plan.lanes.claims.of(rank):
            self._starts[tensor] = self.wanted_bytes
            self.wanted_bytes += sum(runs.total for runs in part)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs that were used: the others take no memory, unless they are pinned."""
        return sum(room.most for room in self._rooms) + sum(own.nbytes for own in self._own)

    def free(self) -> None:
        """Lets go of the slabs; see `slabs.SlabsOf.free`."""
        self._slabs.clear()
        self._own.clear()
        for room in self._rooms:
            room.free()

    def lay_out(self, plan: RoutedPlan, index: int, number: int, own: OwnChunk | None = None) -> Round:
        """Finds the memory for what is read and received in a round; see `slabs.Slabs.lay_out`."""
        turn = index % self.depth
        slab = self._rooms[turn] = _Room(self._slabs[turn], self._rooms[turn].most)
        stretches, sent = self._routes.reads(index), self._routes.sent(index)
        extents = self._routes.extents(stretches)
        nbytes = sum(extent.nbytes for extent in extents)
        work = Round(number, Slots.none(), {}, spans=[Span(*extent, start=0) for extent in extents])
        if nbytes:
            direct = self._direct(stretches, sent)
            buffers = direct if direct is not None else [self._own_memory(turn, slab, nbytes)]
            work.parts, work.buffers = {self._rank: buffers[0]}, buffers
            if direct is not None:
                work.placed.add(self._rank)
            work.pack = partial(self._pack, sent, slab)
        for parcel in self._routes.received(index):
            target = self._target(parcel)
            data = target if target is not None else slab.take(parcel.nbytes)
            work.incoming.append(Leg(parcel, data, is_placed=target is not None))
        return work

    def arrivals(self, plan: RoutedPlan, index: int, work: Round) -> Iterator[Arrival]:
        """Yields what has come in a round: who has read it, and what of it is still to be placed."""
        for leg in (*work.kept, *work.incoming):
            if not leg.parcel.is_own:
                continue
            pieces = [] if leg.is_placed else self._cut(leg)
            yield Arrival(leg.parcel.reader, leg.parcel.nbytes, pieces)

    def _pack(self, sent: Sequence[Parcel], slab: _Room, work: Round) -> None:
        """Makes the parcels of a chunk that has been read."""
        is_direct, chunk = self._rank in work.placed, work.buffers[0]
        if self._on_device:
            on_host, chunk = chunk, slab.take(chunk.nbytes)
            copy_async(on_host, chunk)
        for parcel in sent:
            # If it was read into several pieces, nobody else wants it, and it is where it belongs.
            data = self._packed(parcel, chunk, slab) if len(work.buffers) == 1 else chunk
            work.kept.append(Leg(parcel, data, is_placed=is_direct))

    def _own_memory(self, turn: int, slab: _Room, nbytes: int) -> Tensor:
        """Returns host memory that a chunk is read into."""
        return self._own[turn][:nbytes] if self._on_device else slab.take(nbytes)

    def _packed(self, parcel: Parcel, chunk: Tensor, slab: _Room) -> Tensor:
        pieces = self._pieces(parcel)
        if len(pieces) == 1 and not pieces[0].steps:
            return chunk[pieces[0].start : pieces[0].start + pieces[0].length]
        packed, position = slab.take(parcel.nbytes), 0
        for piece in pieces:
            sizes, strides = zip(*piece.steps, (piece.length, 1), strict=True)
            source = chunk.as_strided(sizes, strides, chunk.storage_offset() + piece.start)
            packed[position : position + piece.total].view(sizes).copy_(source)
            position += piece.total
        return packed

    def _pieces(self, parcel: Parcel) -> list[Runs]:
        """Returns where in its chunk the bytes of a parcel are, in order."""
        pieces: list[Runs] = []
        for (tensor, begin, nbytes), place in zip(parcel.stretches, parcel.places, strict=True):
            for runs in self._routes.part(parcel.wanter, tensor):
                for piece in runs.cut(runs.before(begin), runs.before(begin + nbytes)):
                    moved = piece._replace(start=piece.start - begin + place)
                    last = pieces[-1] if pieces else None
                    if last is not None and not last.steps and not moved.steps and last.end == moved.start:
                        pieces[-1] = last._replace(length=last.length + moved.length)
                    else:
                        pieces.append(moved)
        return pieces

    def _direct(self, stretches: Sequence[Stretch], sent: Sequence[Parcel]) -> list[Tensor] | None:
        """Returns the memory that a chunk belongs to, if this rank wants all of it, just as it is."""
        ranges = []
        for stretch in stretches:
            found = self._ranges(stretch)
            if len(found) != 1 or found[0][1] != stretch.nbytes:
                return None
            ranges += found
        ranges = _joined(ranges)
        is_kept = all(parcel.is_own and parcel.next is None for parcel in sent)
        at_most = 1 + sum(nbytes for _, nbytes in ranges) // LEAST_PIECE_BYTES if is_kept else 1
        return self._targets(ranges, at_most)

    def _target(self, parcel: Parcel) -> Tensor | None:
        """Returns the memory that a parcel belongs to, if that is one piece."""
        ranges = self._placed_ranges(parcel)
        targets = self._targets(ranges, 1) if len(ranges) == 1 else None
        return targets[0] if targets else None

    def _targets(self, ranges: Sequence[tuple[int, int]], at_most: int) -> list[Tensor] | None:
        if self._on_device:
            return None
        pieces: list[Tensor] = []
        for start, nbytes in ranges:
            targets = self._places.targets(start, nbytes, at_most - len(pieces))
            if targets is None:
                return None
            pieces += targets
        return pieces

    def _cut(self, leg: Leg) -> list[tuple[int, Tensor]]:
        """Returns where a parcel is to be placed, piece by piece."""
        pieces, position = [], 0
        for start, nbytes in self._placed_ranges(leg.parcel):
            pieces.append((start, leg.data[position : position + nbytes]))
            position += nbytes
        return pieces

    def _placed_ranges(self, parcel: Parcel) -> list[tuple[int, int]]:
        """Returns which ranges of what this rank wants a parcel has, in order."""
        return _joined([found for stretch in parcel.stretches for found in self._ranges(stretch)])

    def _ranges(self, stretch: Stretch) -> list[tuple[int, int]]:
        """Returns which ranges of what this rank wants are in a stretch, box by box."""
        found, start = [], self._starts.get(stretch.tensor, -1)
        for runs in self._routes.part(self._rank, stretch.tensor):
            first, last = runs.before(stretch.begin), runs.before(stretch.begin + stretch.nbytes)
            if first < last:
                found.append((start + first, last - first))
            start += runs.total
        return found


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins ranges that follow each other."""
    joined: list[tuple[int, int]] = []
    for start, nbytes in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + nbytes
        else:
            joined.append((start, nbytes))
    return joined


class _Room:
    """What is left of a slab in one round.

    Attributes:
        most: The most that was taken of the slab, in any round.
    """

    def __init__(self, slab: Tensor, most: int = 0) -> None:
        self._slab = slab
        self._taken = 0
        self.most = most

    def take(self, nbytes: int) -> Tensor:
        """Returns memory, flat uint8; besides the slab if that is full, which many small parcels can do."""
        begin, self._taken = self._taken, self._taken + round_up(nbytes, _ALIGNED_BYTES)
        self.most = max(self.most, self._taken)
        if begin + nbytes > self._slab.numel():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._slab.device)
        return self._slab[begin : begin + nbytes]

    def free(self) -> None:
        """Lets go of the slab."""
        self._slab = self._slab[:0].clone()
