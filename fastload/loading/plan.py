"""Who reads what when. Pure: the same inputs give the same plan on every rank.

The bytes of the wanted tensors, in file order, form one *wanted space* from 0 to `total_bytes`. It
is cut into rounds, and each round into one chunk per reader: in round k, reader i of R reads the
i-th chunk of that round. All chunks of a round have the same length (the very last ones may be
shorter), so shares differ by less than one chunk, whatever the tensors look like.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import xxhash

from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.memory import PAGE_BYTES, round_up

__all__ = ["Chunk", "ReadPlan", "Span", "plan_reads"]

STATUS_BYTES = 8

_MAX_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 20  # below, the cost of a message shows
_LEAST_CHUNK_BYTES = 256 << 10  # rather fewer readers than less than this
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
class ReadPlan:
    """Which rank reads which bytes in which round.

    Attributes:
        extents: What is to be read, as maximal spans, in order: the wanted space, or what is left of it.
        world_size: Ranks that end up with the bytes.
        readers: The ranks that read, ascending.
        chunk_bytes: Length of a chunk in every round but the last.
        depth: Rounds that may be in flight at once.
    """

    extents: tuple[Span, ...]
    world_size: int
    readers: tuple[int, ...]
    chunk_bytes: int
    depth: int

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
        """Returns the length of the longest chunk of a round."""
        start = round_index * self.chunk_bytes * len(self.readers)
        left = self.total_bytes - start
        return min(self.chunk_bytes, -(-left // len(self.readers)))

    def chunk(self, round_index: int, rank: int) -> Chunk:
        """Returns what a rank reads in a round; empty for a rank that is no reader."""
        place = self._place_of.get(rank)
        if place is None:
            return Chunk(self.total_bytes, 0)
        length = self.chunk_bytes_of(round_index)
        start = round_index * self.chunk_bytes * len(self.readers) + place * length
        start = min(start, self.total_bytes)
        return Chunk(start, min(length, self.total_bytes - start))

    def slot_sizes(self, round_index: int) -> list[int]:
        """Returns how much of a slab each rank's chunk and status word take in a round: whole pages."""
        longest = self.chunk_bytes_of(round_index)
        reader, other = round_up(longest + STATUS_BYTES, PAGE_BYTES), round_up(STATUS_BYTES, PAGE_BYTES)
        return [reader if rank in self._place_of else other for rank in range(self.world_size)]

    @property
    def slab_bytes(self) -> int:
        """Size of a staging buffer that holds a whole round."""
        return _slab_bytes(self.chunk_bytes, len(self.readers), self.world_size)

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
        begun = min(num_posted * self.chunk_bytes * len(self.readers), self.total_bytes)
        left = [self.chunk(index, rank) for index, rank in lacking]
        left.append(Chunk(begun, self.total_bytes - begun))
        extents = tuple(span for chunk in left for span in self.spans(chunk))
        return replace(self, extents=extents, readers=readers)

    def digest(self) -> str:
        """xxh3-128 of the plan, for comparison between ranks."""
        text = json.dumps([self.extents, self.world_size, self.readers, self.chunk_bytes, self.depth])
        return xxhash.xxh3_128_hexdigest(text.encode())


def plan_reads(
    wanted: Sequence[TensorEntry],
    *,
    world_size: int,
    readers: Sequence[int],
    staging_bytes: int,
    chunk_bytes: int | None,
) -> ReadPlan:
    """Deals the bytes of the wanted tensors to the readers.

    Where staging is too small for a chunk of useful size from each reader, only some of the readers,
    spread evenly, read.

    Args:
        wanted: Tensors in manifest order.
        world_size: Ranks that end up with the bytes.
        readers: Ranks that can read, ascending; at least one.
        staging_bytes: Most bytes for all slabs of one rank together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.

    Raises:
        OptionError: `chunk_bytes` does not fit into `staging_bytes`.
    """
    extents = _merge(wanted)
    total_bytes = sum(extent.nbytes for extent in extents)
    if chunk_bytes is None:
        readers = _affordable(readers, world_size, staging_bytes)
        chunk_bytes = _good_chunk_bytes(total_bytes, len(readers), world_size, staging_bytes)
    chunk_bytes = max(1, min(chunk_bytes, -(-total_bytes // len(readers))))
    depth = min(_MAX_DEPTH, staging_bytes // _slab_bytes(chunk_bytes, len(readers), world_size))
    if depth < 1:
        raise OptionError(
            f"chunk_bytes={chunk_bytes}: one chunk of each of {len(readers)} readers does not fit into "
            f"staging_bytes={staging_bytes}"
        )
    return ReadPlan(extents, world_size, tuple(readers), chunk_bytes, depth)


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


def _slab_bytes(chunk_bytes: int, num_readers: int, world_size: int) -> int:
    slot = round_up(chunk_bytes + STATUS_BYTES, PAGE_BYTES)
    return num_readers * slot + (world_size - num_readers) * PAGE_BYTES


def _affordable(readers: Sequence[int], world_size: int, staging_bytes: int) -> Sequence[int]:
    """Drops readers, evenly, until a slab per round in flight fits with chunks of useful size."""
    slot = round_up(_LEAST_CHUNK_BYTES + STATUS_BYTES, PAGE_BYTES)
    spare = staging_bytes // _MAX_DEPTH - world_size * PAGE_BYTES
    count = max(1, min(len(readers), spare // slot))
    return [readers[index * len(readers) // count] for index in range(count)]


def _good_chunk_bytes(total_bytes: int, num_readers: int, world_size: int, staging_bytes: int) -> int:
    """Chooses chunks short enough for many rounds, long enough for storage, and within staging."""
    num_rounds = _GOOD_NUM_ROUNDS if world_size > 1 else _GOOD_NUM_READS
    for_overlap = round_up(-(-total_bytes // (num_readers * num_rounds)), PAGE_BYTES)
    per_slab = staging_bytes // _MAX_DEPTH - (world_size - num_readers) * PAGE_BYTES
    for_staging = per_slab // num_readers // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES
    least = PAGE_BYTES - STATUS_BYTES  # no slot is smaller than a page
    return max(least, min(max(for_overlap, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES, for_staging))
