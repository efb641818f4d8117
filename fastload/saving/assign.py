"""Who writes and hashes which bytes. Pure: the same inputs give the same shares on every rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.formats.record import num_blocks
from fastload.saving.layout import Layout

__all__ = ["FileRange", "OwnedBlock", "blocks_of", "cut", "partition", "tail_of", "tensors_within"]


class FileRange(NamedTuple):
    """Bytes of one file, from `begin` up to but not including `end`; never empty."""

    file: int
    begin: int
    end: int


class OwnedBlock(NamedTuple):
    """A checksum block that a writer has to hash.

    Attributes:
        file: Index of the file in the layout.
        number: Which of the file's blocks it is, in offset order.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    file: int
    number: int
    offset: int
    nbytes: int


def partition(
    layout: Layout, *, num_writers: int, align_bytes: int | None
) -> tuple[tuple[FileRange, ...], ...]:
    """Deals the bytes of the files, headers included, to the writers; each byte once.

    Each writer gets one contiguous range of all files one after the other, cut only between files and
    at multiples of `align_bytes` in a file, and at most the mean and `align_bytes` more. With whole
    files a writer gets those it is dealt, longest first, each to whoever has least.

    Args:
        layout: The files.
        num_writers: How many share the writing.
        align_bytes: Where a file may be cut, such as the part size of an upload; None: nowhere.

    Returns:
        For each writer its ranges in file order; none if there is nothing left for it.

    Raises:
        OptionError: A number is below 1.
    """
    if num_writers < 1 or (align_bytes is not None and align_bytes < 1):
        raise OptionError(f"num_writers={num_writers}, align_bytes={align_bytes}: must be at least 1")
    sizes = [file.nbytes for file in layout.files]
    if align_bytes is None:
        return _deal_files(sizes, num_writers)
    starts = list(accumulate(sizes, initial=0))
    cuts = [_cut(starts, starts[-1] * number // num_writers, align_bytes) for number in range(num_writers)]
    return tuple(tuple(_ranges(starts, begin, end)) for begin, end in pairwise([*cuts, starts[-1]]))


def blocks_of(layout: Layout, ranges: Sequence[FileRange]) -> Iterator[OwnedBlock]:
    """Yields the checksum blocks a writer has to hash: those whose first byte it writes.

    So each block is hashed once, whoever writes. The last one may end beyond the writer's range.

    Args:
        layout: The files.
        ranges: What the writer writes.
    """
    for file, begin, end in ranges:
        tensors = layout.files[file].tensors
        first, last = _within(tensors, begin, end)
        number = num_blocks((entry.nbytes for entry in tensors[:first]), layout.block_bytes)
        for entry in tensors[first:last]:
            for start in range(0, entry.nbytes, layout.block_bytes):
                offset = entry.offset + start
                if begin <= offset < end:
                    yield OwnedBlock(file, number, offset, min(layout.block_bytes, entry.nbytes - start))
                number += 1


def cut(ranges: Sequence[FileRange], piece_bytes: int) -> list[FileRange]:
    """Cuts ranges at the multiples of a length in each file, into what is copied and written at once."""
    pieces = []
    for file, begin, end in ranges:
        while begin < end:
            stop = min(end, (begin // piece_bytes + 1) * piece_bytes)
            pieces.append(FileRange(file, begin, stop))
            begin = stop
    return pieces


def tail_of(layout: Layout, ranges: Sequence[FileRange]) -> list[FileRange]:
    """Returns the bytes beyond a writer's range that belong to a block it has to hash; at most one range."""
    if not ranges:
        return []
    file, begin, end = ranges[-1]
    for entry in tensors_within(layout, FileRange(file, end - 1, end)):
        start = entry.offset + (end - 1 - entry.offset) // layout.block_bytes * layout.block_bytes
        stop = min(start + layout.block_bytes, entry.offset + entry.nbytes)
        if start >= begin and stop > end:
            return [FileRange(file, end, stop)]
    return []


def tensors_within(layout: Layout, wanted: FileRange) -> Iterator[TensorEntry]:
    """Yields the tensors that have bytes in a range of a file, in order."""
    tensors = layout.files[wanted.file].tensors
    first, last = _within(tensors, wanted.begin, wanted.end)
    for entry in tensors[first:last]:
        if entry.nbytes and entry.offset + entry.nbytes > wanted.begin:
            yield entry


def _within(tensors: Sequence[TensorEntry], begin: int, end: int) -> tuple[int, int]:
    # Of tensors at one offset only the last one has bytes: step back to what holds `begin`.
    first = max(0, bisect_right(tensors, begin, key=attrgetter("offset")) - 1)
    return first, bisect_left(tensors, end, key=attrgetter("offset"))


def _cut(starts: Sequence[int], position: int, align_bytes: int) -> int:
    """Returns the last place where one may cut at or before a position in all files one after the other."""
    start = starts[bisect_right(starts, position) - 1]
    return start + (position - start) // align_bytes * align_bytes


def _ranges(starts: Sequence[int], begin: int, end: int) -> Iterator[FileRange]:
    """Yields a range of all files one after the other as ranges of the files."""
    file = bisect_right(starts, begin) - 1
    while begin < end:
        stop = min(end, starts[file + 1])
        yield FileRange(file, begin - starts[file], stop - starts[file])
        begin, file = stop, file + 1


def _deal_files(sizes: Sequence[int], num_writers: int) -> tuple[tuple[FileRange, ...], ...]:
    shares: list[list[FileRange]] = [[] for _ in range(num_writers)]
    loads = [0] * num_writers
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        writer = loads.index(min(loads))
        shares[writer].append(FileRange(file, 0, sizes[file]))
        loads[writer] += sizes[file]
    return tuple(tuple(sorted(share)) for share in shares)
