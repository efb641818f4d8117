"""Who reads what when. Pure: the same inputs give the same plan on every rank.

The bytes of the wanted tensors, in file order, form one *wanted space* from 0 to `total_bytes`. It
is cut into rounds, and each round into one chunk per reader: in round k, reader i of R reads the
i-th chunk of that round. All chunks of a round have the same length (the very last ones may be
shorter), so shares differ by less than one chunk, whatever the tensors look like.

Where checksum blocks are to be verified, each bound between two chunks is moved down to the nearest
bound between two blocks, so that whoever reads a block reads all of it. Chunks are then longer or
shorter by less than a block.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import xxhash

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry

__all__ = ["Chunk", "Grid", "ReadPlan", "Span", "plan_reads"]

DISTRESS_BYTES = 16  # what to know a notice by
NOTICE_BYTES = DISTRESS_BYTES + 1  # what a reader sends that could not read

_MAX_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 20  # below, the cost of a message shows
_LEAST_CHUNK_BYTES = 256 << 10  # rather fewer readers than less than this
_GOOD_NUM_READERS = 64  # where not all can read: enough to get from storage what it has
_GOOD_NUM_ROUNDS = 128  # what a pipeline of rounds cannot overlap is about one round
_GOOD_NUM_READS = 16  # with nothing to exchange: enough to keep several threads busy to the end
_MAX_DEPTH = 4


class Span(NamedTuple):
    """A contiguous byte range of one file that is contiguous in the wanted space too.

    Attributes:
        file: Index of the file in the manifest.
        offset: First byte in the file.
        nbytes: Length in bytes.
        start: First byte in the wanted space.
    """

    file: int
    offset: int
    nbytes: int
    start: int


class Chunk(NamedTuple):
    """A contiguous range of what a plan reads, read by one rank in one round."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class Grid:
    """Where checksum blocks begin in the wanted space.

    Attributes:
        tensor_starts: The first byte of each tensor that is not empty, ascending.
        block_bytes: Length of a block; the last one of a tensor may be shorter.
        longest_bytes: Length of the longest block there is.
    """

    tensor_starts: tuple[int, ...]
    block_bytes: int
    longest_bytes: int

    def block_start(self, position: int) -> int:
        """Returns where the block that holds a byte begins."""
        tensor = self.tensor_starts[bisect_right(self.tensor_starts, position) - 1]
        return position - (position - tensor) % self.block_bytes

    def digest(self) -> str:
        """xxh3-128 of the grid."""
        starts = array("Q", self.tensor_starts).tobytes()
        return f"{self.block_bytes}/{xxhash.xxh3_128_hexdigest(starts)}"


@dataclass(frozen=True)
class ReadPlan:
    """Which rank reads which bytes in which round.

    Attributes:
        extents: What is to be read, as maximal spans, in order: the wanted space, or what is left of it.
        world_size: Ranks that end up with the bytes.
        readers: The ranks that read, ascending.
        chunk_bytes: Length of a chunk in every round but the last, before bounds are moved to blocks.
        depth: Rounds that may be in flight at once.
        grid: The checksum blocks that no chunk may cut; None if there are none to verify.
        even_slots: Whether the slots of all readers have to be equally long in each round.
    """

    extents: tuple[Span, ...]
    world_size: int
    readers: tuple[int, ...]
    chunk_bytes: int
    depth: int
    grid: Grid | None = None
    even_slots: bool = False

    @cached_property
    def _starts(self) -> list[int]:
        """Where each extent starts among all that is to be read, and where the last one ends."""
        return list(accumulate((extent.nbytes for extent in self.extents), initial=0))

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.readers)}

    @property
    def total_bytes(self) -> int:
        """Bytes to be read, by all readers together."""
        return self._starts[-1]

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
        start, end = self._bound(round_index, place), self._bound(round_index, place + 1)
        return Chunk(start, end - start)

    def _bound(self, round_index: int, place: int) -> int:
        """Returns where the chunk of the reader at a place begins among all that is to be read."""
        begin = round_index * self.chunk_bytes * len(self.readers)
        position = min(begin + place * self.chunk_bytes_of(round_index), self.total_bytes)
        if self.grid is None or position == self.total_bytes:
            return position
        index = bisect_right(self._starts, position) - 1
        wanted = self.extents[index].start + position - self._starts[index]
        return position - wanted + self.grid.block_start(wanted)  # an extent begins with a block

    def slot_sizes(self, round_index: int) -> list[int]:
        """Returns how much of a slab each rank's chunk takes in a round: whole pages.

        Nothing for a rank that is no reader: what goes wrong there it tells by an alarm.
        """
        if self.grid is None:
            lengths = [self.chunk_bytes_of(round_index)] * len(self.readers)
        else:
            lengths = [self.chunk(round_index, rank).nbytes for rank in self.readers]
            lengths = [max(lengths)] * len(lengths) if self.even_slots else lengths
        sizes = [0] * self.world_size
        for rank, length in zip(self.readers, lengths, strict=True):
            sizes[rank] = _slot_bytes(length)
        return sizes

    def largest_slot_bytes(self, rank: int) -> int:
        """Returns how much of a slab a rank's chunk takes at most."""
        return _slot_bytes(self.chunk_bytes + self._longest_block_bytes) if rank in self._place_of else 0

    @property
    def slab_bytes(self) -> int:
        """Size of a staging buffer that holds a whole round."""
        slab = _Slab(len(self.readers), self.world_size, self._longest_block_bytes, self.even_slots)
        return slab.nbytes(self.chunk_bytes)

    @property
    def _longest_block_bytes(self) -> int:
        return self.grid.longest_bytes if self.grid is not None else 0

    def spans(self, chunk: Chunk) -> list[Span]:
        """Returns the spans that make up a chunk, in order."""
        spans: list[Span] = []
        position, end = chunk.start, chunk.start + chunk.nbytes
        index = bisect_right(self._starts, position) - 1
        while position < end:
            extent, start = self.extents[index], self._starts[index]
            nbytes = min(end, start + extent.nbytes) - position
            skip = position - start
            spans.append(Span(extent.file, extent.offset + skip, nbytes, extent.start + skip))
            position += nbytes
            index += 1
        return spans

    def without(
        self, broken: Collection[int], lacking: Sequence[tuple[int, int]], num_posted: int
    ) -> ReadPlan | None:
        """Returns the plan of what is left to do when some readers drop out.

        Args:
            broken: The readers that drop out.
            lacking: (round, rank) of the chunks that are missing in rounds that are over.
            num_posted: Rounds that are over; those after them have not begun, and are dealt anew.

        Returns:
            A plan that needs no larger slabs than this one, or None if no reader is left.
        """
        readers = tuple(rank for rank in self.readers if rank not in broken)
        if not readers:
            return None
        begun = self._bound(num_posted, 0)
        left = [self.chunk(index, rank) for index, rank in lacking]
        left.append(Chunk(begun, self.total_bytes - begun))
        extents = tuple(span for chunk in left for span in self.spans(chunk))
        return replace(self, extents=extents, readers=readers)

    def digest(self) -> str:
        """xxh3-128 of the plan, for comparison between ranks."""
        grid = self.grid.digest() if self.grid is not None else None
        shape = [self.world_size, self.readers, self.chunk_bytes, self.depth, grid, self.even_slots]
        text = json.dumps([self.extents, *shape])
        return xxhash.xxh3_128_hexdigest(text.encode())


def plan_reads(
    wanted: Sequence[TensorEntry],
    *,
    world_size: int,
    readers: Sequence[int],
    staging_bytes: int,
    chunk_bytes: int | None,
    block_bytes: int = 0,
    even_slots: bool = False,
) -> ReadPlan:
    """Deals the bytes of the wanted tensors to the readers.

    Where staging is too small for a chunk of useful size from each reader, only some of the readers,
    spread evenly, read. No chunk is shorter than a checksum block, but for the last ones.

    Args:
        wanted: Tensors in manifest order.
        world_size: Ranks that end up with the bytes.
        readers: Ranks that can read, ascending; at least one.
        staging_bytes: Most bytes for all slabs of one rank together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.
        block_bytes: Length of the checksum blocks that are to be verified; 0 if there are none.
        even_slots: See `ReadPlan`.

    Raises:
        OptionError: `chunk_bytes`, or a checksum block, does not fit into `staging_bytes`.
    """
    grid = _grid(wanted, block_bytes)
    longest = grid.longest_bytes if grid is not None else 0
    extents = _merge(wanted)
    total_bytes = sum(extent.nbytes for extent in extents)
    if chunk_bytes is None:
        readers = _affordable(readers, _Slab(1, world_size, longest, even_slots), staging_bytes)
    slab = _Slab(len(readers), world_size, longest, even_slots)
    if chunk_bytes is None:
        chunk_bytes = _good_chunk_bytes(total_bytes, slab, staging_bytes)
    chunk_bytes = max(1, min(chunk_bytes, -(-total_bytes // len(readers))))
    if longest:
        # Whole blocks, else the readers at some places would always get the larger part.
        chunk_bytes = max(1, chunk_bytes // longest) * longest
    depth = min(_MAX_DEPTH, staging_bytes // slab.nbytes(chunk_bytes))
    if depth < 1:
        blocks = f" (checksum blocks have {longest}: verify=False reads without)" if longest else ""
        raise OptionError(
            f"chunk_bytes={chunk_bytes}: one chunk of each of {len(readers)} readers does not fit into "
            f"staging_bytes={staging_bytes}{blocks}"
        )
    return ReadPlan(extents, world_size, tuple(readers), chunk_bytes, depth, grid, even_slots)


def _grid(wanted: Sequence[TensorEntry], block_bytes: int) -> Grid | None:
    lengths = [entry.nbytes for entry in wanted if entry.nbytes]
    if not block_bytes or not lengths:
        return None
    starts = accumulate(lengths[:-1], initial=0)
    return Grid(tuple(starts), block_bytes, min(block_bytes, max(lengths)))


def _merge(wanted: Sequence[TensorEntry]) -> tuple[Span, ...]:
    """Joins tensors that follow each other without a gap in the same file."""
    extents: list[Span] = []
    file, begin, end, start = -1, 0, 0, 0
    for entry in wanted:
        if entry.nbytes == 0:
            continue
        if entry.file != file or entry.offset != end:
            if end > begin:
                extents.append(Span(file, begin, end - begin, start))
                start += end - begin
            file, begin = entry.file, entry.offset
        end = entry.offset + entry.nbytes
    if end > begin:
        extents.append(Span(file, begin, end - begin, start))
    return tuple(extents)


def _slot_bytes(chunk_bytes: int) -> int:
    return round_up(max(chunk_bytes, NOTICE_BYTES), PAGE_BYTES)


@dataclass(frozen=True)
class _Slab:
    """How much room a round takes."""

    num_readers: int
    world_size: int
    longest_block_bytes: int
    even_slots: bool

    def nbytes(self, chunk_bytes: int) -> int:
        """Returns the most that the slots of a round take together."""
        return self.num_readers * self.each_bytes(chunk_bytes) + self.once_bytes

    def each_bytes(self, chunk_bytes: int) -> int:
        """Returns what to reckon for each reader."""
        if self.even_slots or not self.longest_block_bytes:
            return _slot_bytes(chunk_bytes + self.longest_block_bytes)
        return _slot_bytes(chunk_bytes + PAGE_BYTES)  # lengths that differ are rounded up one by one

    @property
    def once_bytes(self) -> int:
        """What moved bounds add to one chunk they take from the one before it: a block more in all."""
        return 0 if self.even_slots else round_up(self.longest_block_bytes, PAGE_BYTES)


def _affordable(readers: Sequence[int], slab: _Slab, staging_bytes: int) -> Sequence[int]:
    """Drops readers, evenly, until a slab per round in flight fits with chunks of useful size.

    If all cannot read, then rather fewer of them, who read more at a time, than as many as just can.
    """
    spare = staging_bytes // _MAX_DEPTH - slab.once_bytes

    def fitting(chunk_bytes: int) -> int:
        return spare // slab.each_bytes(max(chunk_bytes, slab.longest_block_bytes))

    if fitting(_LEAST_CHUNK_BYTES) >= len(readers):
        return readers
    useful = min(max(spare // _GOOD_NUM_READERS, _LEAST_CHUNK_BYTES), _MIN_CHUNK_BYTES)
    count = max(1, min(len(readers), fitting(useful)))
    return [readers[index * len(readers) // count] for index in range(count)]


def _good_chunk_bytes(total_bytes: int, slab: _Slab, staging_bytes: int) -> int:
    """Chooses chunks short enough for many rounds, long enough for storage, and within staging."""
    num_rounds = _GOOD_NUM_ROUNDS if slab.world_size > 1 else _GOOD_NUM_READS
    for_overlap = round_up(-(-total_bytes // (slab.num_readers * num_rounds)), PAGE_BYTES)
    besides = slab.nbytes(PAGE_BYTES) - slab.num_readers * PAGE_BYTES
    spare = staging_bytes // _MAX_DEPTH - besides
    for_staging = spare // slab.num_readers // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(max(for_overlap, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES, for_staging))
