"""The files to copy and their blocks. Pure: the same on every rank.

Files are cut into ranges, and each range into blocks of `block_bytes` from its first byte. In a file that the
commit record names, the header and each tensor are a range, so that their blocks are the checksum blocks of
the record. Any other file is one range.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import xxhash

from fastload.formats.manifest import FileEntry, Manifest, Piece, TensorEntry
from fastload.formats.record import CHECKSUM_BYTES
from fastload.geometry.blocks import Blocks, num_blocks
from fastload.geometry.ranges import Space, join_adjacent


class BlockRange(NamedTuple):
    """A byte range of one file whose blocks are counted from its first byte.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes; never 0.
        checksums: The recorded checksum of each block, 8 bytes each; empty without a record.
    """

    file: int
    offset: int
    nbytes: int
    checksums: bytes = b""


class BlockRun(NamedTuple):
    """Consecutive blocks of one range.

    Attributes:
        first: Number of the first block.
        file: Index of their file.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    first: int
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Inventory:
    """The files to copy.

    Attributes:
        files: All files, in name order.
        file_ranges: Their bytes, in order.
        block_bytes: Length of a block; the last block of a range may be shorter.
        identity: 16 hex digits that identify the checkpoint.
    """

    files: tuple[FileEntry, ...]
    file_ranges: tuple[BlockRange, ...]
    block_bytes: int
    identity: str

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of all ranges."""
        return Blocks(Space(self.file_ranges), self.block_bytes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.nbytes for file in self.files)

    def recorded(self, number: int) -> bytes:
        """Returns the recorded checksum of a block; empty without a record."""
        index = self.blocks.owner(number)
        begin = (number - self.blocks.firsts[index]) * CHECKSUM_BYTES
        return self.file_ranges[index].checksums[begin : begin + CHECKSUM_BYTES]

    def lacking(self, held: bytes | bytearray) -> list[BlockRun]:
        """Returns the blocks that are not held, as maximal runs within ranges.

        Args:
            held: For each block, whether it is held.
        """
        return list(self._runs(held, 0))

    def turned(self, runs: Sequence[BlockRun], part: float) -> list[BlockRun]:
        """Returns runs in another order: from a place on, to the end, and then from the beginning.

        Args:
            runs: The runs.
            part: Where to begin, as a part of their bytes: from 0 to less than 1.
        """
        left = int(part * sum(run.nbytes for run in runs))
        for index, run in enumerate(runs):
            if left < run.nbytes:
                skipped = left // self.block_bytes
                nbytes = skipped * self.block_bytes
                head = run._replace(nbytes=nbytes)
                tail = BlockRun(run.first + skipped, run.file, run.offset + nbytes, run.nbytes - nbytes)
                return [tail, *runs[index + 1 :], *runs[:index], *([head] if nbytes else ())]
            left -= run.nbytes
        return list(runs)

    def ranges(self, held: bytes | bytearray) -> dict[str, list[tuple[int, int]]]:
        """Returns the bytes of the held blocks: name of the file → disjoint (begin, end)."""
        found: dict[str, list[tuple[int, int]]] = {}
        for run in self._runs(held, 1):
            ranges = found.setdefault(self.files[run.file].name, [])
            ranges.append((run.offset, run.offset + run.nbytes))
        return {name: join_adjacent(ranges) for name, ranges in found.items()}

    def _runs(self, flags: bytes | bytearray, wanted: int) -> Iterator[BlockRun]:
        """Yields maximal runs of blocks with a flag, within ranges."""
        for one, (first, end) in zip(self.file_ranges, pairwise(self.blocks.firsts), strict=True):
            for begin, stop in _runs(flags, wanted, first, end):
                offset = one.offset + (begin - first) * self.block_bytes
                nbytes = min((stop - begin) * self.block_bytes, one.offset + one.nbytes - offset)
                yield BlockRun(begin, one.file, offset, nbytes)


def take_inventory(
    manifest: Manifest, others: Sequence[FileEntry], *, block_bytes: int, nonce: str
) -> Inventory:
    """Returns the inventory of a checkpoint.

    Args:
        manifest: The checkpoint.
        others: Files next to those of the manifest.
        block_bytes: Length of a block, for a checkpoint without a commit record.
        nonce: Text for the identity; empty if the files have versions that identify them.
    """
    block_bytes = manifest.block_bytes or block_bytes
    extents: dict[str, list[TensorEntry | Piece]] = {file.name: [] for file in manifest.files}
    for extent in manifest.extents:
        extents[manifest.files[extent.file].name].append(extent)
    files = sorted((*manifest.files, *others), key=lambda file: file.name)
    file_ranges: list[BlockRange] = []
    for number, file in enumerate(files):
        file_ranges += _cut(number, file, extents.get(file.name, ()), block_bytes)
    recorded = {file.name for file in manifest.files} if manifest.format == "fastload" else set()
    facts = [[file.name, file.nbytes, "" if file.name in recorded else file.version] for file in files]
    text = json.dumps([facts, manifest.record_digest, block_bytes, nonce])
    return Inventory(tuple(files), tuple(file_ranges), block_bytes, xxhash.xxh3_64_hexdigest(text.encode()))


def _cut(
    number: int, file: FileEntry, extents: Sequence[TensorEntry | Piece], block_bytes: int
) -> list[BlockRange]:
    """Cuts a file into its extents, with their checksums, and the bytes between them."""
    file_ranges: list[BlockRange] = []
    begin = at = 0
    for extent in extents if file.checksums else ():
        if not extent.nbytes:
            continue
        if extent.offset > at:
            file_ranges.append(BlockRange(number, at, extent.offset - at))
        end = begin + num_blocks(extent.nbytes, block_bytes) * CHECKSUM_BYTES
        file_ranges.append(BlockRange(number, extent.offset, extent.nbytes, file.checksums[begin:end]))
        begin, at = end, extent.offset + extent.nbytes
    if at < file.nbytes:
        file_ranges.append(BlockRange(number, at, file.nbytes - at))
    return file_ranges


def _runs(flags: bytes | bytearray, wanted: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields maximal ranges (first, end) of flags between two."""
    first = flags.find(wanted, begin, end)
    while first >= 0:
        stop = flags.find(1 - wanted, first, end)
        stop = end if stop < 0 else stop
        yield first, stop
        first = flags.find(wanted, stop, end)


def as_ranges(held: bytes | bytearray) -> list[tuple[int, int]]:
    """Returns the ranges (first, end) of flags that are set."""
    return list(_runs(held, 1, 0, len(held)))


def held_by_all(hosts: Sequence[Sequence[tuple[int, int]]], num_blocks: int) -> bytes:
    """Returns, for each block, whether every host has it.

    Args:
        hosts: The blocks of each host, as ranges (first, end).
        num_blocks: Number of blocks.
    """
    held = bytearray(b"\1" * num_blocks)
    for ranges in hosts:
        last = 0
        for first, end in (*ranges, (num_blocks, num_blocks)):
            held[last:first] = bytes(first - last)
            last = end
    return bytes(held)
