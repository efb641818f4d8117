"""A checkpoint as files to be copied byte for byte, cut into blocks. Pure: the same on every rank.

The bytes of all files are cut into *stretches*, and each stretch every `block_bytes` from its first byte.
Of a file that the commit record names, the header is a stretch and so is each tensor: its blocks are then
the checksum blocks of the record. Any other file is one stretch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import xxhash

from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.formats.record import CHECKSUM_BYTES
from fastload.geometry.blocks import Blocks
from fastload.geometry.extents import Space


class Stretch(NamedTuple):
    """A byte range of one file whose blocks are counted from its first byte.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes; never 0.
        checksums: The recorded checksum of each block, 8 bytes each; empty where nobody recorded any.
    """

    file: int
    offset: int
    nbytes: int
    checksums: bytes = b""


class Run(NamedTuple):
    """Blocks of one stretch that follow each other.

    Attributes:
        first: The number of the first one.
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
    """What is to be copied.

    Attributes:
        files: Every file, in name order.
        stretches: Their bytes, in order.
        block_bytes: Length of a block; the last one of a stretch may be shorter.
        identity: 16 hex digits, the same for the same checkpoint only.
    """

    files: tuple[FileEntry, ...]
    stretches: tuple[Stretch, ...]
    block_bytes: int
    identity: str

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of all stretches."""
        return Blocks(Space(self.stretches), self.block_bytes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.nbytes for file in self.files)

    def recorded(self, number: int) -> bytes:
        """Returns the checksum that the commit record has for a block; empty if it has none."""
        index = self.blocks.owner(number)
        begin = (number - self.blocks.firsts[index]) * CHECKSUM_BYTES
        return self.stretches[index].checksums[begin : begin + CHECKSUM_BYTES]

    def lacking(self, held: bytes | bytearray) -> list[Run]:
        """Returns what is not held, as maximal runs of blocks that cross no bound of a stretch.

        Args:
            held: For each block, whether it is held.

        """
        runs = []
        for stretch, (first, end) in zip(self.stretches, pairwise(self.blocks.firsts), strict=True):
            begin = held.find(0, first, end)
            while begin >= 0:
                stop = held.find(1, begin, end)
                stop = end if stop < 0 else stop
                offset = stretch.offset + (begin - first) * self.block_bytes
                nbytes = min((stop - begin) * self.block_bytes, stretch.offset + stretch.nbytes - offset)
                runs.append(Run(begin, stretch.file, offset, nbytes))
                begin = held.find(0, stop, end)
        return runs

    def ranges(self, held: bytes | bytearray) -> dict[str, list[tuple[int, int]]]:
        """Returns the bytes of the blocks that are held: name of the file → disjoint ranges."""
        found: dict[str, list[tuple[int, int]]] = {}
        for run in self.lacking(held.translate(_INVERTED)):
            name, end = self.files[run.file].name, run.offset + run.nbytes
            ranges = found.setdefault(name, [])
            if ranges and ranges[-1][1] == run.offset:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((run.offset, end))
        return found


_INVERTED = bytes([1, 0, *range(2, 256)])


def take_inventory(
    manifest: Manifest, others: Sequence[FileEntry], *, block_bytes: int, nonce: str
) -> Inventory:
    """Lists what there is to copy.

    Args:
        manifest: The checkpoint.
        others: Its files that the manifest does not name.
        block_bytes: Length of a block if the checkpoint has no commit record, which says it else.
        nonce: Text for the identity; empty if the versions that storage tells say enough.
    """
    block_bytes = manifest.block_bytes or block_bytes
    tensors: dict[str, list[TensorEntry]] = {file.name: [] for file in manifest.files}
    for entry in manifest.tensors:
        tensors[manifest.files[entry.file].name].append(entry)
    files = sorted((*manifest.files, *others), key=lambda file: file.name)
    stretches: list[Stretch] = []
    for number, file in enumerate(files):
        stretches += _cut(number, file, tensors.get(file.name, ()), block_bytes)
    recorded = {file.name for file in manifest.files} if manifest.block_bytes else set()
    facts = [[file.name, file.nbytes, "" if file.name in recorded else file.version] for file in files]
    text = json.dumps([facts, manifest.record_digest, block_bytes, nonce])
    return Inventory(tuple(files), tuple(stretches), block_bytes, xxhash.xxh3_64_hexdigest(text.encode()))


def _cut(number: int, file: FileEntry, tensors: Sequence[TensorEntry], block_bytes: int) -> list[Stretch]:
    if not file.checksums:
        return [Stretch(number, 0, file.nbytes)] if file.nbytes else []
    whole = [entry for entry in tensors if entry.nbytes]
    stretches = [Stretch(number, 0, whole[0].offset)]
    begin = 0
    for entry in whole:
        end = begin + -(-entry.nbytes // block_bytes) * CHECKSUM_BYTES
        stretches.append(Stretch(number, entry.offset, entry.nbytes, file.checksums[begin:end]))
        begin = end
    return stretches


def as_ranges(held: bytes | bytearray) -> list[tuple[int, int]]:
    """Writes flags as ranges (first, end) of those that are set."""
    ranges = []
    begin = held.find(1)
    while begin >= 0:
        end = held.find(0, begin)
        end = len(held) if end < 0 else end
        ranges.append((begin, end))
        begin = held.find(1, end)
    return ranges


def held_by_all(hosts: Sequence[Sequence[tuple[int, int]]], num_blocks: int) -> bytes:
    """Returns, for each block, whether every host has it.

    Args:
        hosts: The blocks that each host has, as ranges (first, end).
        num_blocks: How many there are.
    """
    held = bytearray(b"\1" * num_blocks)
    for ranges in hosts:
        last = 0
        for first, end in (*ranges, (num_blocks, num_blocks)):
            held[last:first] = bytes(first - last)
            last = end
    return bytes(held)
