"""The buffers of the rounds in flight, and where in them, or beside them, each chunk comes to lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from fastload.geometry.extents import Span
from fastload.transfer.plan import Chunk, TransferPlan
from fastload.transfer.rounds import Arrival, Exchange, Round, Slab, Slots

__all__ = ["LEAST_PIECE_BYTES", "OwnChunk", "Places", "Slabs", "SlabsOf"]

PlanT = TypeVar("PlanT", contravariant=True)

LEAST_PIECE_BYTES = 16 << 10  # on average; to read into shorter pieces takes longer than to copy them


class Places(Protocol):
    """Where the bytes go: tensors, or files."""

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns host memory that a range of the wanted space belongs to, in at most so many pieces.

        None if it is to be placed.
        """
        ...

    def place(self, start: int, data: Tensor) -> None:
        """Takes a range of the wanted space; it may go on doing so until `settle`."""
        ...

    def settle(self) -> None:
        """Returns once everything placed so far has left the buffers it came from."""
        ...


@dataclass(frozen=True)
class OwnChunk:
    """Where a chunk comes to lie that this rank reads ahead of its round.

    Attributes:
        spans: What it is.
        memory: Host memory of a whole slot, which it is read into; or the memory that it belongs to.
        nbytes: Its length.
        is_placed: Whether that is where it belongs.
    """

    spans: Sequence[Span]
    memory: Tensor
    nbytes: int
    is_placed: bool

    @property
    def data(self) -> Tensor:
        """Its bytes, flat uint8."""
        return self.memory[: self.nbytes]


class SlabsOf(Protocol[PlanT]):
    """The buffers of the rounds in flight of one kind of plan.

    Attributes:
        depth: How many rounds may be in flight.
        wanted_bytes: Bytes that come to this rank in all.
    """

    depth: int
    wanted_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; they take no memory if everything is read to where it belongs."""
        ...

    def free(self) -> None:
        """Lets go of the slabs; a read that is still under way keeps its own."""
        ...

    def lay_out(self, plan: PlanT, index: int, number: int, own: OwnChunk | None = None) -> Round:
        """Finds the memory for the chunks of a round.

        Args:
            plan: The rounds.
            index: Which of them.
            number: The same, counted over all plans.
            own: This rank's chunk, if it was read ahead.
        """
        ...

    def arrivals(self, plan: PlanT, index: int, work: Round) -> Iterator[Arrival]:
        """Yields what has come in a round: who has read it, and what of it is still to be placed."""
        ...


class Slabs:
    """One slab for each round in flight, used in turn.

    A chunk that belongs into one piece of host memory gets that for its place, others a slot of the slab.

    Args:
        plan: The rounds.
        rank: This one.
        exchange: Allocates the slabs.
        places: Where the bytes go in the end.

    Attributes:
        depth: How many rounds may be in flight.
        wanted_bytes: Bytes that come to this rank in all.

    Raises:
        MemoryError: The slabs do not fit into memory.
    """

    def __init__(self, plan: TransferPlan, rank: int, exchange: Exchange, places: Places) -> None:
        num_slabs = self.depth = min(plan.depth, plan.num_rounds)
        if exchange.shares_memory:
            # One slab more than rounds in flight: others of the host may be a round behind this rank. Even
            # where each round has its own, since there are more rounds if readers drop out.
            num_slabs = max(2, min(plan.depth, plan.num_rounds + 1))
            self.depth = num_slabs - 1
        self._rank = rank
        self._places = places
        self._wants = rank in plan.demand.ranks
        self._on_device = exchange.device.type != "cpu"
        self._in_place = not self._on_device and not exchange.shares_memory
        own_bytes = plan.largest_slot_bytes(rank)
        num_own = min(plan.num_reads, len(plan.rounds_of(rank, 0, plan.num_rounds))) if plan.ahead else 0
        self._own = [exchange.allocate_own(own_bytes) for _ in range(num_own)]
        self._slabs = [
            exchange.allocate(plan.slab_bytes, 0 if plan.ahead else own_bytes) for _ in range(num_slabs)
        ]
        self._slots: dict[int, tuple[dict[int, int], Slots]] = {}
        self._used = plan.exchanges
        self.wanted_bytes = plan.total_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; they take no memory if everything is read to where it belongs."""
        if not self._used:
            return 0
        own = sum(memory.nbytes for memory in self._own)
        return own + sum(slab.nbytes + (own.nbytes if own is not None else 0) for slab, own in self._slabs)

    def free(self) -> None:  # noqa: D102  (as above)
        self._slabs.clear()
        self._own.clear()

    def lay_own(self, plan: TransferPlan, index: int) -> OwnChunk:
        """Finds the memory for this rank's chunk of a round, where chunks are read ahead.

        It is that of the chunk so many laps before, whose round has to be over.
        """
        chunk = plan.chunk(index, self._rank)
        memory = self._own[index // plan.num_turns % len(self._own)]
        targets = self._targets(plan, chunk, at_most=1) if chunk.nbytes and self._in_place else None
        is_placed = targets is not None
        return OwnChunk(plan.spans(chunk), targets[0] if targets else memory, chunk.nbytes, is_placed)

    def lay_out(self, plan: TransferPlan, index: int, number: int, own: OwnChunk | None = None) -> Round:
        """Finds the memory for the chunks of a round.

        Args:
            plan: The rounds.
            index: Which of them.
            number: The same, counted over all plans.
            own: This rank's chunk, if it was read ahead.
        """
        turn = number % len(self._slabs)
        slab, own_slot = self._slabs[turn]
        chunks = plan.chunks(index)
        slots = self._cut(plan.slot_sizes(index, chunks), turn, slab)
        chunk = chunks.get(self._rank, Chunk(plan.total_bytes, 0))
        spans = plan.spans(chunk)
        if self._on_device:  # all chunks go through the slots
            self._used = True
            whole = own.memory if own is not None else own_slot
            if whole is None or self._rank not in slots.each:
                return Round(number, slots, slots.each, chunks)
            whole = whole[: slots.each[self._rank].numel()]
            return Round(number, slots, slots.each, chunks, spans, [whole[: chunk.nbytes]], whole)
        parts, placed = {}, set()
        for rank, slot in slots.each.items():
            coming = chunks[rank]
            if not coming.nbytes:
                continue
            if rank == self._rank and own is not None and self._in_place:
                parts[rank] = own.data
                placed |= {rank} if own.is_placed else set()
                continue
            targets = self._targets(plan, coming, at_most=1) if self._in_place else None
            if targets is not None:
                placed.add(rank)
            parts[rank] = targets[0] if targets is not None else slot[: coming.nbytes]
        buffers = [parts[self._rank]] if self._rank in parts else []
        if buffers and not placed and not plan.exchanges:
            # With nobody to pass it on to, a chunk may be read into several tensors at once.
            several = self._targets(plan, chunk, at_most=1 + chunk.nbytes // LEAST_PIECE_BYTES)
            if several is not None:
                buffers, placed = several, {self._rank}
        self._used |= bool(buffers) and self._rank not in placed
        elsewhere = own.data if own is not None and not self._in_place else None
        return Round(number, slots, parts, chunks, spans, buffers, elsewhere, placed=placed)

    def arrivals(self, plan: TransferPlan, index: int, work: Round) -> Iterator[Arrival]:
        """Yields what has come in a round: who has read it, and what of it is still to be placed."""
        if not self._wants:
            return
        whole = plan.whole(index) if self._on_device and not work.statuses else None
        if whole is not None:  # of many short pieces each would be a copy of its own
            own = plan.chunk(index, self._rank)
            yield Arrival(self._rank, own.nbytes, [])
            yield Arrival(None, whole.nbytes - own.nbytes, _pieces(plan, whole, work.slots.whole))
            return
        for rank, chunk in work.chunks.items():
            if rank not in work.statuses:
                is_placed = rank in work.placed or not chunk.nbytes
                yield Arrival(rank, chunk.nbytes, [] if is_placed else _pieces(plan, chunk, work.parts[rank]))

    def _targets(self, plan: TransferPlan, chunk: Chunk, at_most: int) -> list[Tensor] | None:
        """Returns the host memory that a chunk belongs to; None if it has to be placed."""
        pieces: list[Tensor] = []
        for span in plan.spans(chunk):
            targets = self._places.targets(span.start, span.nbytes, at_most - len(pieces))
            if targets is None:
                return None
            pieces += targets
        return pieces

    def _cut(self, sizes: dict[int, int], turn: int, slab: Slab) -> Slots:
        """Cuts a slab anew only if the round has other slots than the one before it there."""
        if turn not in self._slots or self._slots[turn][0] != sizes:
            self._slots[turn] = sizes, slab.cut(sizes)
        return self._slots[turn][1]


def _pieces(plan: TransferPlan, chunk: Chunk, data: Tensor) -> list[tuple[int, Tensor]]:
    """Returns where what lies in a chunk is to be placed, piece by piece."""
    pieces, position = [], 0
    for span in plan.spans(chunk):
        pieces.append((span.start, data[position : position + span.nbytes]))
        position += span.nbytes
    return pieces
