"""Who reads what when. Pure: the same inputs give the same plan on every rank.

The wanted bytes, in file order, form one *wanted space* from 0 to `total_bytes`. It
is cut into rounds, and each round into one chunk per reader: in round k, reader i of R reads the
i-th chunk of that round. All chunks of a round have the same length (the very last ones may be
shorter), so shares differ by less than one chunk, whatever the tensors look like.

Of storage that reads ahead, each reader gets one range of the wanted space instead, and reads one chunk
of it in each round: what is read ahead is then what it asks for next, and not what others read.

Where checksum blocks are to be verified, each bound between two chunks is moved down to the nearest
bound between two blocks, so that whoever reads a block reads all of it. Chunks are then longer or
shorter by less than a block.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import xxhash

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import OptionError
from fastload.geometry.blocks import Blocks
from fastload.geometry.extents import HasExtent, Space, Span
from fastload.transfer.demand import Demand, Supply

__all__ = ["Chunk", "TransferPlan", "plan_transfer"]

_MAX_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 20  # below, the cost of a message shows
_LEAST_CHUNK_BYTES = 256 << 10  # rather fewer readers than less than this
_GOOD_NUM_READERS = 64  # where not all can read: enough to get from storage what it has
_GOOD_NUM_ROUNDS = 128  # what a pipeline of rounds cannot overlap is about one round
_GOOD_NUM_READS = 16  # with nothing to exchange: enough to keep several threads busy to the end
_MAX_DEPTH = 4


class Chunk(NamedTuple):
    """A contiguous range of what a plan reads, read by one rank in one round."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class TransferPlan:
    """Which rank reads which bytes in which round.

    Attributes:
        extents: What is to be read, as maximal spans, in order: the wanted space, or what is left of it.
        supply: The ranks that read.
        demand: The ranks that end up with the bytes.
        chunk_bytes: Length of a chunk in every round but the last, before bounds are moved to blocks.
        depth: Rounds that may be in flight at once.
        blocks: The checksum blocks of the wanted space, which no chunk may cut; None if there are none to
            verify.
        even_slots: Whether the slots of all readers have to be equally long in each round.
        contiguous: Whether what a reader reads in all rounds is one range.
        in_lockstep: Whether all ranks learn in the same round of a chunk that could not be read.
    """

    extents: tuple[Span, ...]
    supply: Supply
    demand: Demand
    chunk_bytes: int
    depth: int
    blocks: Blocks | None = None
    even_slots: bool = False
    contiguous: bool = False
    in_lockstep: ClassVar[bool] = True

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that read, ascending."""
        return self.supply.ranks

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(sorted({*self.supply.ranks, *self.demand.ranks}))

    @property
    def exchanges(self) -> bool:
        """Whether anything has to get from the rank that reads it to another one."""
        return _exchanges(self.supply, self.demand)

    @cached_property
    def _space(self) -> Space[Span]:
        return Space(self.extents)

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.readers)}

    @property
    def total_bytes(self) -> int:
        """Bytes to be read, by all readers together."""
        return self._space.nbytes

    @property
    def num_rounds(self) -> int:
        """How many rounds it takes."""
        return -(-self.total_bytes // (self.chunk_bytes * len(self.readers)))

    def chunk_bytes_of(self, round_index: int) -> int:
        """Returns the length of the longest chunk of a round, before bounds are moved to those of blocks."""
        left = self.total_bytes - round_index * self.chunk_bytes * len(self.readers)
        return min(self.chunk_bytes, max(-(-left // len(self.readers)), self._longest_block_bytes))

    def chunk(self, round_index: int, rank: int) -> Chunk:
        """Returns what a rank reads in a round; empty for a rank that is no reader."""
        place = self._place_of.get(rank)
        if place is None:
            return Chunk(self.total_bytes, 0)
        after = (round_index + 1, place) if self.contiguous else (round_index, place + 1)
        start, end = self._bound(round_index, place), self._bound(*after)
        return Chunk(start, end - start)

    @cached_property
    def _share_bytes(self) -> int:
        """What each reader reads in all, before bounds are moved to blocks; the last one may read less."""
        return -(-self.total_bytes // len(self.readers))

    def _bound(self, round_index: int, place: int) -> int:
        """Returns where the chunk of the reader at a place begins among all that is to be read."""
        if self.contiguous:
            begin = place * self._share_bytes + min(round_index * self.chunk_bytes, self._share_bytes)
        else:
            begin = round_index * self.chunk_bytes * len(self.readers)
            begin += place * self.chunk_bytes_of(round_index)
        position = min(begin, self.total_bytes)
        if self.blocks is None or position == self.total_bytes:
            return position
        index = self._space.at(position)
        wanted = self.extents[index].start + position - self._space.starts[index]
        return position - wanted + self.blocks.floor(wanted)  # an extent begins with a block

    def slot_sizes(self, round_index: int) -> dict[int, int]:
        """Returns how much of a slab the chunk of each reader takes in a round: whole pages."""
        if self.blocks is None:
            lengths = [self.chunk_bytes_of(round_index)] * len(self.readers)
        else:
            lengths = [self.chunk(round_index, rank).nbytes for rank in self.readers]
            lengths = [max(lengths)] * len(lengths) if self.even_slots else lengths
        return {rank: _slot_bytes(length) for rank, length in zip(self.readers, lengths, strict=True)}

    def largest_slot_bytes(self, rank: int) -> int:
        """Returns how much of a slab a rank's chunk takes at most."""
        return _slot_bytes(self.chunk_bytes + self._longest_block_bytes) if rank in self._place_of else 0

    @property
    def slab_bytes(self) -> int:
        """Size of a buffer that holds a whole round."""
        apart = self.even_slots or self.contiguous
        return _Slab.of(self.supply, self.demand, self.blocks, apart).nbytes(self.chunk_bytes)

    @property
    def _longest_block_bytes(self) -> int:
        return _longest_bytes(self.blocks)

    def spans(self, chunk: Chunk) -> list[Span]:
        """Returns the spans that make up a chunk, in order."""
        spans = []
        for index, begin, end in self._space.cut(chunk.start, chunk.nbytes):
            extent = self.extents[index]
            spans.append(Span(extent.file, extent.offset + begin, end - begin, extent.start + begin))
        return spans

    def without(
        self, broken: Collection[int], lacking: Sequence[tuple[int, int]], num_posted: int
    ) -> TransferPlan | None:
        """Returns the plan of what is left to do when some readers drop out.

        Args:
            broken: The readers that drop out.
            lacking: (round, rank) of the chunks that are missing in rounds that are over.
            num_posted: Rounds that are over; those after them have not begun, and are dealt anew.

        Returns:
            A plan that needs no larger slabs than this one, or None if no reader is left.
        """
        supply = self.supply.without(broken)
        if supply is None:
            return None
        left = [self.chunk(index, rank) for index, rank in lacking]
        left += self._from_round(num_posted)
        extents = tuple(span for chunk in left for span in self.spans(chunk))
        return replace(self, extents=extents, supply=supply)

    def _from_round(self, round_index: int) -> list[Chunk]:
        """Returns all that is read from a round on."""
        if not self.contiguous:
            begin = self._bound(round_index, 0)
            return [Chunk(begin, self.total_bytes - begin)]
        places = range(len(self.readers))
        bounds = [(self._bound(round_index, place), self._bound(self.num_rounds, place)) for place in places]
        return [Chunk(begin, end - begin) for begin, end in bounds]

    def digest(self) -> str:
        """xxh3-128 of the plan, for comparison between ranks."""
        # Who is who matters to the others only if anything gets from one to another.
        ranks = [self.readers, self.demand.ranks] if self.exchanges else []
        blocks = _digest(self.blocks) if self.blocks is not None else None
        shape = self.even_slots, self.contiguous
        text = json.dumps([self.extents, ranks, self.chunk_bytes, self.depth, blocks, *shape])
        return xxhash.xxh3_128_hexdigest(text.encode())


def plan_transfer(
    wanted: Sequence[HasExtent],
    supply: Supply,
    demand: Demand,
    *,
    staging_bytes: int,
    chunk_bytes: int | None,
    block_bytes: int = 0,
    even_slots: bool = False,
    contiguous: bool = False,
) -> TransferPlan:
    """Deals the wanted bytes to the ranks that can deliver them.

    Where staging is too small for a chunk of useful size from each of them, only some, spread evenly, read.
    No chunk is shorter than a checksum block, but for the last ones.

    Args:
        wanted: Tensors, or other ranges of files, in file order.
        supply: Who can read.
        demand: Who wants what is read.
        staging_bytes: Most bytes for all slabs of one rank together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.
        block_bytes: Length of the checksum blocks that are to be verified; 0 if there are none.
        even_slots: See `TransferPlan`.
        contiguous: Whether each reader is to read one range, if staging is large enough: bounds that are
            moved to blocks then lengthen all chunks of a round, not one of them.

    Raises:
        OptionError: `chunk_bytes`, or a checksum block, does not fit into `staging_bytes`.
    """
    blocks = _blocks(wanted, block_bytes)
    longest = _longest_bytes(blocks)
    extents = _merge(wanted)
    total_bytes = sum(extent.nbytes for extent in extents)
    slab = _Slab.of(supply, demand, blocks, even_slots or contiguous)
    needed_bytes = _MAX_DEPTH * slab.nbytes(max(chunk_bytes or _LEAST_CHUNK_BYTES, longest))
    if contiguous and needed_bytes > staging_bytes:
        contiguous = False
        slab = _Slab.of(supply, demand, blocks, even_slots)
    if chunk_bytes is None:
        supply = _affordable(supply, slab, staging_bytes)
        slab = _Slab.of(supply, demand, blocks, even_slots or contiguous)
        chunk_bytes = _good_chunk_bytes(total_bytes, len(supply.ranks), slab, staging_bytes)
    chunk_bytes = max(1, min(chunk_bytes, -(-total_bytes // len(supply.ranks))))
    if longest:
        # Whole blocks, else the readers at some places would always get the larger part.
        chunk_bytes = max(1, chunk_bytes // longest) * longest
    depth = min(_MAX_DEPTH, staging_bytes // slab.nbytes(chunk_bytes))
    if depth < 1:
        why = f" (checksum blocks have {longest}: verify=False reads without)" if longest else ""
        raise OptionError(
            f"chunk_bytes={chunk_bytes}: one chunk of each of {slab.num_slots} readers does not fit into "
            f"staging_bytes={staging_bytes}{why}"
        )
    return TransferPlan(extents, supply, demand, chunk_bytes, depth, blocks, even_slots, contiguous)


def _exchanges(supply: Supply, demand: Demand) -> bool:
    return (bool(demand.ranks) and supply.ranks != demand.ranks) or len(demand.ranks) > 1


def _blocks(wanted: Sequence[HasExtent], block_bytes: int) -> Blocks | None:
    filled = [extent for extent in wanted if extent.nbytes] if block_bytes else []
    return Blocks(Space(filled), block_bytes) if filled else None


def _longest_bytes(blocks: Blocks | None) -> int:
    return blocks.longest_bytes if blocks is not None else 0


def _digest(blocks: Blocks) -> str:
    """xxh3-128 of where blocks begin."""
    starts = array("Q", blocks.space.starts).tobytes()
    return f"{blocks.block_bytes}/{xxhash.xxh3_128_hexdigest(starts)}"


def _merge(wanted: Iterable[HasExtent]) -> tuple[Span, ...]:
    """Joins what follows each other without a gap in the same file."""
    extents: list[Span] = []
    file, begin, end, start = -1, 0, 0, 0
    for extent in wanted:
        if extent.nbytes == 0:
            continue
        if extent.file != file or extent.offset != end:
            if end > begin:
                extents.append(Span(file, begin, end - begin, start))
                start += end - begin
            file, begin = extent.file, extent.offset
        end = extent.offset + extent.nbytes
    if end > begin:
        extents.append(Span(file, begin, end - begin, start))
    return tuple(extents)


def _slot_bytes(chunk_bytes: int) -> int:
    return round_up(chunk_bytes, PAGE_BYTES)


@dataclass(frozen=True)
class _Slab:
    """How much room a round takes on one rank.

    Attributes:
        num_slots: Chunks that it holds: those of all readers, or this rank's own if nothing is exchanged.
        exchanges: Whether chunks go on to others.
        longest_block_bytes: Length of the longest checksum block; 0 without any.
        apart: Whether each slot has to have room for a block more, since they have to be equally long, or
            since chunks of a round do not follow each other.
    """

    num_slots: int
    exchanges: bool
    longest_block_bytes: int
    apart: bool

    @classmethod
    def of(cls, supply: Supply, demand: Demand, blocks: Blocks | None, apart: bool) -> _Slab:
        exchanges = _exchanges(supply, demand)
        return cls(len(supply.ranks) if exchanges else 1, exchanges, _longest_bytes(blocks), apart)

    def nbytes(self, chunk_bytes: int) -> int:
        """Returns the most that the slots of a round take together."""
        return self.num_slots * self.each_bytes(chunk_bytes) + self.once_bytes

    def each_bytes(self, chunk_bytes: int) -> int:
        """Returns what to reckon for each slot."""
        if self.apart or not self.longest_block_bytes:
            return _slot_bytes(chunk_bytes + self.longest_block_bytes)
        return _slot_bytes(chunk_bytes + PAGE_BYTES)  # lengths that differ are rounded up one by one

    @property
    def once_bytes(self) -> int:
        """What moved bounds add to one chunk they take from the one before it: a block more in all."""
        return 0 if self.apart else round_up(self.longest_block_bytes, PAGE_BYTES)


def _affordable(supply: Supply, slab: _Slab, staging_bytes: int) -> Supply:
    """Drops readers, evenly, until a slab per round in flight fits with chunks of useful size.

    If all cannot read, then rather fewer of them, who read more at a time, than as many as just can.
    """
    spare = staging_bytes // _MAX_DEPTH - slab.once_bytes

    def fitting(chunk_bytes: int) -> int:
        return spare // slab.each_bytes(max(chunk_bytes, slab.longest_block_bytes))

    if not slab.exchanges or fitting(_LEAST_CHUNK_BYTES) >= slab.num_slots:
        return supply
    useful = min(max(spare // _GOOD_NUM_READERS, _LEAST_CHUNK_BYTES), _MIN_CHUNK_BYTES)
    readers, count = supply.ranks, max(1, min(slab.num_slots, fitting(useful)))
    return Supply(tuple(readers[index * len(readers) // count] for index in range(count)))


def _good_chunk_bytes(total_bytes: int, num_readers: int, slab: _Slab, staging_bytes: int) -> int:
    """Chooses chunks short enough for many rounds, long enough for storage, and within staging."""
    num_rounds = _GOOD_NUM_ROUNDS if slab.exchanges else _GOOD_NUM_READS
    for_overlap = round_up(-(-total_bytes // (num_readers * num_rounds)), PAGE_BYTES)
    besides = slab.nbytes(PAGE_BYTES) - slab.num_slots * PAGE_BYTES
    spare = staging_bytes // _MAX_DEPTH - besides
    for_staging = spare // slab.num_slots // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(max(for_overlap, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES, for_staging))
