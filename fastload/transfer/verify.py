"""Checks bytes that were read against the checksums of the commit record."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, NoReturn

from fastload.errors import ChecksumError
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.transfer.plan import Span

__all__ = ["Block", "Damage", "Verifier", "refuse"]

_MAX_SECOND_LOOKS = 64  # what is rotten through and through is not read twice


class Block(NamedTuple):
    """One checksum block.

    Attributes:
        entry: The tensor it is a part of.
        number: Which block of its file it is.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    entry: TensorEntry
    number: int
    offset: int
    nbytes: int


class Damage(NamedTuple):
    """One block that is not as it was written; in the order of the checkpoint.

    Attributes:
        file: Index of the file in the manifest.
        number: Which block of that file.
        text: What to say of it.
    """

    file: int
    number: int
    text: str


def refuse(damage: Damage) -> NoReturn:
    """What a load does about damage.

    Raises:
        ChecksumError: Always.
    """
    raise ChecksumError(f"damaged: {damage.text}", (damage.text,))


class Verifier:
    """Knows the blocks of a checkpoint; may be used by several threads.

    Args:
        manifest: With checksums.
    """

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.block_bytes
        self._url = manifest.url
        self._files = manifest.files
        self._block_bytes = manifest.block_bytes
        self._entries: list[list[TensorEntry]] = [[] for _ in manifest.files]
        for entry in manifest.tensors:
            if entry.nbytes:
                self._entries[entry.file].append(entry)
        self._offsets = [[entry.offset for entry in entries] for entries in self._entries]
        # The number of the first block of each tensor in its file.
        self._firsts = [
            list(accumulate((-(-entry.nbytes // self._block_bytes) for entry in entries), initial=0))
            for entries in self._entries
        ]
        self._lock = threading.Lock()
        self._num_second_looks = 0

    def blocks(self, span: Span) -> Iterator[Block]:
        """Yields the blocks that make up a span, in order; it has to begin and end with a block."""
        offset, end = span.offset, span.offset + span.nbytes
        index = bisect_right(self._offsets[span.file], offset) - 1
        while offset < end:
            entry = self._entries[span.file][index]
            within = offset - entry.offset
            number, cut = divmod(within, self._block_bytes)
            nbytes = min(self._block_bytes, entry.nbytes - within)
            assert not cut
            assert offset + nbytes <= end
            yield Block(entry, self._firsts[span.file][index] + number, offset, nbytes)
            offset += nbytes
            index += within + nbytes == entry.nbytes

    def damage(
        self, span: Span, buffers: Sequence[memoryview], read: Callable[[Span, Sequence[memoryview]], None]
    ) -> Iterator[Damage]:
        """Yields what there is to say of each block of a span that is not as it was written.

        Such a block is read again, once: what was spoiled on the way heals.

        Args:
            span: What was read; it has to begin and end with a block.
            buffers: Its bytes, cut between blocks only.
            read: Reads a span again.
        """
        whole, position, rest = memoryview(b""), 0, iter(buffers)
        for block in self.blocks(span):
            while position == len(whole):
                whole, position = next(rest), 0
            data = whole[position : position + block.nbytes]
            position += block.nbytes
            expected = self._expected(span.file, block)
            if checksum(data) == expected:
                continue
            if self._may_look_again():
                read(Span(span.file, block.offset, block.nbytes, span.start), [data])
                if checksum(data) == expected:
                    continue
            text = self._describe(span.file, block, expected, checksum(data))
            yield Damage(span.file, block.number, text)

    def _expected(self, file: int, block: Block) -> bytes:
        begin = block.number * CHECKSUM_BYTES
        return self._files[file].checksums[begin : begin + CHECKSUM_BYTES]

    def _may_look_again(self) -> bool:
        with self._lock:
            self._num_second_looks += 1
            return self._num_second_looks <= _MAX_SECOND_LOOKS

    def _describe(self, file: int, block: Block, expected: bytes, found: bytes) -> str:
        where = f"{self._url.rstrip('/')}/{self._files[file].name}"
        what = f"block {block.number} [bytes {block.offset}-{block.offset + block.nbytes}]"
        tensor = f"of tensor {block.entry.name[:200]!r}"
        return f"{where}: {what} {tensor}: checksum {expected.hex()} expected, {found.hex()} found"
