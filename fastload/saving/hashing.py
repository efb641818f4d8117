"""The checksums of the blocks that a rank owns, computed as its pieces pass by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import Block
from fastload.saving.assign import FileRange

__all__ = ["BlockHasher", "Checksums"]

Checksums = dict[int, list[tuple[int, bytes]]]
"""File → (number of the first block, checksums of it and those that follow it, 8 bytes each)."""


class BlockHasher:
    """Hashes blocks whose bytes come in pieces, in order.

    Args:
        blocks: The blocks, in order.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks: Iterator[Block] = iter(blocks)
        self._block = next(self._blocks, None)
        self._begun = xxhash.xxh3_64()
        self._num_begun_bytes = 0
        self._found: dict[int, list[tuple[int, bytearray]]] = {}

    def feed(self, piece: FileRange, data: memoryview) -> None:
        """Takes the next piece; bytes of blocks that belong to other ranks are skipped."""
        while (block := self._block) is not None and block.file == piece.file and block.offset < piece.end:
            begin = block.offset + self._num_begun_bytes - piece.begin
            end = block.offset + block.nbytes - piece.begin
            if end > len(data):
                self._begun.update(data[begin:])
                self._num_begun_bytes += len(data) - begin
                return
            if self._num_begun_bytes:
                self._begun.update(data[begin:end])
                self._add(block, self._begun.digest())
                self._begun.reset()
                self._num_begun_bytes = 0
            else:
                self._add(block, checksum(data[begin:end]))
            self._block = next(self._blocks, None)

    def checksums(self) -> Checksums:
        """Returns the checksums, once everything has been fed."""
        assert self._block is None
        return {
            file: [(first, bytes(sums)) for first, sums in stretches]
            for file, stretches in self._found.items()
        }

    def _add(self, block: Block, digest: bytes) -> None:
        stretches = self._found.setdefault(block.file, [])
        if stretches and stretches[-1][0] + len(stretches[-1][1]) // CHECKSUM_BYTES == block.number:
            stretches[-1][1].extend(digest)
        else:
            stretches.append((block.number, bytearray(digest)))
