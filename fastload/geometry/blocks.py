"""Checksum blocks, and the blocks of byte ranges. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from fastload.geometry.ranges import Space

_MIN_BLOCK_BYTES = 256 << 10
_MAX_BLOCK_BYTES = 4 << 20
_GOOD_NUM_BLOCKS = 1 << 18  # 4 MiB of checksums in the commit record


class Block(NamedTuple):
    """A part of a byte range that has one checksum.

    Attributes:
        number: Number of the block over all ranges.
        file: Index of its file.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    number: int
    file: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after the last one in the file."""
        return self.offset + self.nbytes


class Blocks:
    """The blocks of a space. Each range is cut every `block_bytes`, counted from its first byte.

    Args:
        space: A space without empty ranges.
        block_bytes: Length of a block; the last one of a range may be shorter.
    """

    def __init__(self, space: Space[Any], block_bytes: int) -> None:
        self.space = space
        self.block_bytes = block_bytes

    @cached_property
    def firsts(self) -> list[int]:
        """The number of the first block of each range, and the number of blocks."""
        counts = (num_blocks(byte_range.nbytes, self.block_bytes) for byte_range in self.space.ranges)
        return list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self.firsts[-1]

    @cached_property
    def longest_bytes(self) -> int:
        """Length of the longest block."""
        return min(self.block_bytes, max((byte_range.nbytes for byte_range in self.space.ranges), default=0))

    def floor(self, position: int) -> int:
        """Returns the first byte, in the space, of the block at a position."""
        start = self.space.starts[self.space.at(position)]
        return position - (position - start) % self.block_bytes

    def first_of(self, file: int) -> int:
        """Returns the number of the first block of a file, or of the next file if it has none.

        The ranges have to be in the order of their bytes.
        """
        return self.firsts[self.space.find(file, -1) + 1]

    def owner(self, number: int) -> int:
        """Returns the index of the range of a block."""
        return bisect_right(self.firsts, number) - 1

    def __getitem__(self, number: int) -> Block:
        return self._block(self.owner(number), number)

    def at(self, file: int, offset: int) -> Block | None:
        """Returns the block with a byte of a file; None if no range has it.

        The ranges have to be in the order of their bytes.
        """
        index = self.space.find(file, offset)
        if index < 0:
            return None
        byte_range = self.space.ranges[index]
        skipped = offset - byte_range.offset
        if byte_range.file != file or skipped >= byte_range.nbytes:
            return None
        return self._block(index, self.firsts[index] + skipped // self.block_bytes)

    def number_at(self, file: int, offset: int) -> int:
        """Returns the number of the block with a byte of a file, which some range has.

        The ranges have to be in the order of their bytes.
        """
        index = self.space.find(file, offset)
        within: int = offset - self.space.ranges[index].offset
        return self.firsts[index] + within // self.block_bytes

    def between(self, file: int, begin: int, end: int) -> Iterator[tuple[int, Block]]:
        """Yields the blocks that begin in a part of a file, in order, each with the index of its range.

        The ranges have to be in the order of their bytes.
        """
        ranges = self.space.ranges
        index = max(0, self.space.find(file, begin))
        while index < len(ranges) and (ranges[index].file, ranges[index].offset) < (file, end):
            skipped = begin - ranges[index].offset if ranges[index].file == file else ranges[index].nbytes
            first = self.firsts[index] + num_blocks(max(0, skipped), self.block_bytes)
            for number in range(first, self.firsts[index + 1]):
                block = self._block(index, number)
                if block.offset >= end:
                    return
                yield index, block
            index += 1

    def _block(self, index: int, number: int) -> Block:
        byte_range = self.space.ranges[index]
        skipped = (number - self.firsts[index]) * self.block_bytes
        nbytes = min(self.block_bytes, byte_range.nbytes - skipped)
        return Block(number, byte_range.file, byte_range.offset + skipped, nbytes)


def num_blocks(nbytes: int, block_bytes: int) -> int:
    """Returns the number of blocks of a range of `nbytes` bytes."""
    return -(-nbytes // block_bytes)


def good_block_bytes(total_bytes: int) -> int:
    """Chooses blocks small enough to be verified one by one, and few enough for the commit record."""
    least = -(-total_bytes // _GOOD_NUM_BLOCKS)
    return max(_MIN_BLOCK_BYTES, min(1 << (least - 1).bit_length(), _MAX_BLOCK_BYTES))
