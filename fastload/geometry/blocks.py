"""Checksum blocks: what is hashed as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from fastload.geometry.extents import Space


class Block(NamedTuple):
    """A part of an extent that has one checksum.

    Attributes:
        number: Which block it is, counted over all extents.
        file: Index of its file.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    number: int
    file: int
    offset: int
    nbytes: int


class Blocks:
    """The blocks of a space: each of its extents is cut every `block_bytes` from its first byte.

    Args:
        space: Its extents are not empty.
        block_bytes: Length of a block; the last one of an extent may be shorter.
    """

    def __init__(self, space: Space[Any], block_bytes: int) -> None:
        self.space = space
        self.block_bytes = block_bytes

    @cached_property
    def firsts(self) -> list[int]:
        """The number of the first block of each extent, and how many blocks there are."""
        counts = (num_blocks(extent.nbytes, self.block_bytes) for extent in self.space.extents)
        return list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self.firsts[-1]

    @cached_property
    def longest_bytes(self) -> int:
        """Length of the longest block there is."""
        return min(self.block_bytes, max((extent.nbytes for extent in self.space.extents), default=0))

    def floor(self, position: int) -> int:
        """Returns where in the space the block begins that holds a position."""
        start = self.space.starts[self.space.at(position)]
        return position - (position - start) % self.block_bytes

    def owner(self, number: int) -> int:
        """Returns the extent that a block is a part of."""
        return bisect_right(self.firsts, number) - 1

    def __getitem__(self, number: int) -> Block:
        return self._block(self.owner(number), number)

    def between(self, file: int, begin: int, end: int) -> Iterator[tuple[int, Block]]:
        """Yields the blocks that begin in a byte range of a file, in order, each with its extent.

        The extents have to be in the order of their bytes.
        """
        extents = self.space.extents
        index = max(0, self.space.find(file, begin))
        while index < len(extents) and (extents[index].file, extents[index].offset) < (file, end):
            skipped = begin - extents[index].offset if extents[index].file == file else extents[index].nbytes
            first = self.firsts[index] + num_blocks(max(0, skipped), self.block_bytes)
            for number in range(first, self.firsts[index + 1]):
                block = self._block(index, number)
                if block.offset >= end:
                    return
                yield index, block
            index += 1

    def _block(self, index: int, number: int) -> Block:
        extent = self.space.extents[index]
        skipped = (number - self.firsts[index]) * self.block_bytes
        nbytes = min(self.block_bytes, extent.nbytes - skipped)
        return Block(number, extent.file, extent.offset + skipped, nbytes)


def num_blocks(nbytes: int, block_bytes: int) -> int:
    """Returns how many blocks so many bytes of one extent have."""
    return -(-nbytes // block_bytes)
