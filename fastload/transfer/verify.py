"""Checks bytes that were read against the checksums of the commit record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from fastload.errors import ChecksumError
from fastload.formats.manifest import Manifest
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import Block, Blocks
from fastload.geometry.extents import Space, Span

__all__ = ["Damage", "Verifier", "refuse"]

_MAX_SECOND_LOOKS = 64  # what is rotten through and through is not read twice


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
        tensors = Space([entry for entry in manifest.tensors if entry.nbytes])
        self._blocks = Blocks(tensors, manifest.block_bytes)
        # The number of the first block of each file: those of the record are counted within their file.
        self._firsts = [
            self._blocks.firsts[tensors.find(file, -1) + 1] for file in range(len(manifest.files))
        ]
        self._lock = threading.Lock()
        self._num_second_looks = 0

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
        for index, block in self._blocks.between(span.file, span.offset, span.offset + span.nbytes):
            while position == len(whole):
                whole, position = next(rest), 0
            data = whole[position : position + block.nbytes]
            position += block.nbytes
            number = block.number - self._firsts[block.file]
            expected = self._expected(block.file, number)
            if checksum(data) == expected:
                continue
            if self._may_look_again():
                read(Span(block.file, block.offset, block.nbytes, span.start), [data])
                if checksum(data) == expected:
                    continue
            name = self._blocks.space.extents[index].name
            text = self._describe(block._replace(number=number), name, expected, checksum(data))
            yield Damage(block.file, number, text)
        assert position == len(whole)  # whole blocks only

    def _expected(self, file: int, number: int) -> bytes:
        begin = number * CHECKSUM_BYTES
        return self._files[file].checksums[begin : begin + CHECKSUM_BYTES]

    def _may_look_again(self) -> bool:
        with self._lock:
            self._num_second_looks += 1
            return self._num_second_looks <= _MAX_SECOND_LOOKS

    def _describe(self, block: Block, name: str, expected: bytes, found: bytes) -> str:
        where = f"{self._url.rstrip('/')}/{self._files[block.file].name}"
        what = f"block {block.number} [bytes {block.offset}-{block.offset + block.nbytes}]"
        tensor = f"of tensor {name[:200]!r}"
        return f"{where}: {what} {tensor}: checksum {expected.hex()} expected, {found.hex()} found"
