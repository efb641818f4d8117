"""Byte ranges of files, and positions in several of them laid end to end. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heapreplace
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar


class HasRange(Protocol):
    """An object with bytes in a file: a `ByteRange`, or a tensor of a manifest."""

    @property
    def file(self) -> int:
        """Index of the file."""

    @property
    def offset(self) -> int:
        """First byte in the file."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""


class ByteRange(NamedTuple):
    """A byte range of one file.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes.
        start: First byte in a space that contains the range.
    """

    file: int
    offset: int
    nbytes: int
    start: int = 0

    @property
    def end(self) -> int:
        """The byte after the last one in the file."""
        return self.offset + self.nbytes


Ranged = TypeVar("Ranged", bound=HasRange)


class Space(Generic[Ranged]):
    """Byte ranges laid end to end: the bytes from 0 to `nbytes`.

    Args:
        ranges: The ranges in the order of the space, none of them empty where positions are looked up.
    """

    def __init__(self, ranges: Sequence[Ranged]) -> None:
        self.ranges = ranges

    @cached_property
    def starts(self) -> list[int]:
        """The first byte of each range, and the end of the last one."""
        return list(accumulate((byte_range.nbytes for byte_range in self.ranges), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges together."""
        return self.starts[-1]

    def at(self, position: int) -> int:
        """Returns the index of the range at a position."""
        return bisect_right(self.starts, position) - 1

    def within(self, start: int, nbytes: int) -> range:
        """Returns the indexes of the ranges with bytes in a part of the space, which is not empty."""
        return range(self.at(start), bisect_left(self.starts, start + nbytes))

    def cut(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Cuts a part of the space into (index of a range, begin, end) in bytes of that range."""
        if not nbytes:
            return
        starts, stop = self.starts, start + nbytes
        for index in self.within(start, nbytes):
            first = starts[index]
            yield index, max(start - first, 0), min(stop, starts[index + 1]) - first

    def overlapping(self, file: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cuts a part of a file into (index of a range, begin, end) in bytes of that range.

        The ranges have to be in the order of their bytes.
        """
        for index in range(max(0, self.find(file, begin)), len(self.ranges)):
            byte_range = self.ranges[index]
            if (byte_range.file, byte_range.offset) >= (file, end):
                return
            first, last = max(0, begin - byte_range.offset), min(byte_range.nbytes, end - byte_range.offset)
            if byte_range.file == file and first < last:
                yield index, first, last

    def find(self, file: int, offset: int) -> int:
        """Returns the index of the last range that begins at or before a byte of a file; -1 without one.

        The ranges have to be in the order of their bytes.
        """
        return bisect_right(self.ranges, (file, offset), key=_first_byte) - 1


def _first_byte(byte_range: HasRange) -> tuple[int, int]:
    return byte_range.file, byte_range.offset


def join_adjacent(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins each (begin, end) with the one before, if it begins where that one ends."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def deal_uncut(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deals ranges that are not cut, the longest first, each to the share with the fewest bytes so far.

    Returns:
        The numbers of the ranges in each share, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [(0, share) for share in range(num_shares)]
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        nbytes, share = totals[0]
        insort(shares[share], number)
        heapreplace(totals, (nbytes + lengths[number], share))
    return shares


def merged(wanted: Iterable[HasRange]) -> tuple[ByteRange, ...]:
    """Joins ranges that are adjacent in a file; the results are laid end to end."""
    ranges: list[ByteRange] = []
    file, begin, end, start = -1, 0, 0, 0
    for byte_range in wanted:
        if byte_range.nbytes == 0:
            continue
        if byte_range.file != file or byte_range.offset != end:
            if end > begin:
                ranges.append(ByteRange(file, begin, end - begin, start))
                start += end - begin
            file, begin = byte_range.file, byte_range.offset
        end = byte_range.offset + byte_range.nbytes
    if end > begin:
        ranges.append(ByteRange(file, begin, end - begin, start))
    return tuple(ranges)
