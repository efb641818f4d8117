"""Who writes and hashes which bytes. Pure: the same inputs give the same shares on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.geometry.blocks import Block, Blocks
from fastload.geometry.extents import Extent, Space
from fastload.saving.layout import Layout

__all__ = [
    "FileRange",
    "Share",
    "assign",
    "blocks_of",
    "cut",
    "partition",
    "tail_of",
    "tensors_within",
    "whole_units",
]


class FileRange(NamedTuple):
    """Bytes of one file, from `begin` up to but not including `end`; never empty."""

    file: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Share:
    """The bytes of a save that one rank contributes.

    Attributes:
        ranges: All it writes, in file order.
        pieces: What it copies, hashes and writes at once, one after the other.
        tails: The numbers of those pieces that it only hashes: the rest of blocks that it has begun.
    """

    ranges: Sequence[FileRange]
    pieces: Sequence[FileRange]
    tails: frozenset[int]

    @classmethod
    def of(cls, layout: Layout, ranges: Sequence[FileRange], piece_bytes: int) -> Share:
        """Returns the share of a writer with these ranges, given the most bytes of a piece."""
        pieces: list[FileRange] = []
        tails = set()
        for part in ranges:
            pieces += cut([part], piece_bytes)
            if tail := tail_of(layout, part):
                tails.add(len(pieces))
                pieces.append(tail)
        return cls(ranges, pieces, frozenset(tails))

    @property
    def nbytes(self) -> int:
        """Length of all it writes."""
        return sum(end - begin for _, begin, end in self.ranges)


def assign(
    layout: Layout, writers: Sequence[int], rank: int, *, align_bytes: int | None, piece_bytes: int
) -> Share:
    """Returns what a rank contributes to a save.

    Args:
        layout: The files.
        writers: The ranks that share the writing.
        rank: The rank; it need not write.
        align_bytes: Where a file may be cut; None: nowhere.
        piece_bytes: Most bytes to copy, hash and write at once, unless `align_bytes` is more.

    Raises:
        OptionError: `align_bytes` is below 1, or there are no writers.
    """
    shares = partition(layout, num_writers=len(writers), align_bytes=align_bytes)
    ranges = shares[writers.index(rank)] if rank in writers else ()
    return Share.of(layout, ranges, whole_units(piece_bytes, align_bytes))


def whole_units(piece_bytes: int, align_bytes: int | None) -> int:
    """Returns the length of a piece: the most that it may have, in units that a file may be cut into."""
    unit = align_bytes or 1
    return max(1, piece_bytes // unit) * unit


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
    # One may cut where each file, laid end to end, has whole units.
    units = Blocks(Space([Extent(file, 0, size) for file, size in enumerate(sizes)]), align_bytes)
    files, total = units.space, units.space.nbytes
    cuts = [units.floor(total * number // num_writers) for number in range(num_writers)]
    return tuple(tuple(_ranges(files, begin, end)) for begin, end in pairwise([*cuts, total]))


def blocks_of(layout: Layout, ranges: Sequence[FileRange]) -> Iterator[Block]:
    """Yields the checksum blocks a writer has to hash: those whose first byte it writes.

    So each block is hashed once, whoever writes. The last one may end beyond the writer's range. They are
    numbered within their file.

    Args:
        layout: The files.
        ranges: What the writer writes.
    """
    for file, begin, end in ranges:
        first = layout.first_block(file)
        for _, block in layout.blocks.between(file, begin, end):
            yield block._replace(number=block.number - first)


def cut(ranges: Sequence[FileRange], piece_bytes: int) -> list[FileRange]:
    """Cuts ranges into what is copied and written at once: each of them every so many bytes."""
    return [
        FileRange(file, at, min(end, at + piece_bytes))
        for file, begin, end in ranges
        for at in range(begin, end, piece_bytes)
    ]


def tail_of(layout: Layout, written: FileRange) -> FileRange | None:
    """Returns the bytes beyond a writer's range that belong to a block it has to hash; None if none do."""
    file, begin, end = written
    blocks = layout.blocks.between(file, max(begin, end - layout.block_bytes), end)
    stop = max((block.offset + block.nbytes for _, block in blocks), default=end)
    return FileRange(file, end, stop) if stop > end else None


def tensors_within(layout: Layout, wanted: FileRange) -> Iterator[TensorEntry]:
    """Yields the tensors that have bytes in a range of a file, in order."""
    tensors = layout.space.extents
    for index in range(max(0, layout.space.find(wanted.file, wanted.begin)), len(tensors)):
        entry = tensors[index]
        if (entry.file, entry.offset) >= (wanted.file, wanted.end):
            return
        if entry.file == wanted.file and entry.offset + entry.nbytes > wanted.begin:
            yield entry


def _ranges(files: Space[Extent], begin: int, end: int) -> Iterator[FileRange]:
    """Yields a range of all files one after the other as ranges of the files."""
    for file, first, stop in files.cut(begin, end - begin):
        yield FileRange(file, first, stop)


def _deal_files(sizes: Sequence[int], num_writers: int) -> tuple[tuple[FileRange, ...], ...]:
    shares: list[list[FileRange]] = [[] for _ in range(num_writers)]
    loads = [0] * num_writers
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        writer = loads.index(min(loads))
        shares[writer].append(FileRange(file, 0, sizes[file]))
        loads[writer] += sizes[file]
    return tuple(tuple(sorted(share)) for share in shares)
