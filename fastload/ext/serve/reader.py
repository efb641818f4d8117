"""A reader that asks peers for the checksum blocks of a checkpoint, and reads the rest from its origin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from fastload.ext.serve.peer import KnownPeer
from fastload.ext.serve.pool import Loan, PeerPool
from fastload.ext.serve.process import READS
from fastload.formats.manifest import Manifest
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.ranges import ByteRange
from fastload.storage import CheckpointReader, take
from fastload.storage.base import ByteCounter
from fastload.storage.http import HttpFault
from fastload.storage.reader import LayeredReader


class _Segment(NamedTuple):
    """A part of a request.

    Attributes:
        begin: First byte in the file.
        end: The byte after the last one.
        ends: The ends of its checksum blocks; empty for bytes without checksums.
    """

    begin: int
    end: int
    ends: tuple[int, ...]


class PeerReader(LayeredReader):
    """Reads complete checksum blocks from peers, verified, and all else from the origin.

    What no peer has, or what a peer delivers wrong, late or not at all, comes from another peer or from the
    origin.

    Args:
        origin: The storage of the checkpoint.
        manifest: Its files and checksums, as the origin has them.
        pool: The peers.
        digest: The digest of the checkpoint.
    """

    def __init__(self, origin: CheckpointReader, manifest: Manifest, pool: PeerPool, digest: str) -> None:
        super().__init__(origin)
        self._manifest = manifest
        self._pool = pool
        self._digest = digest
        self._numbers = {file.name: number for number, file in enumerate(manifest.files)}
        self._supplied = ByteCounter()
        self._skips_peers = False

    @property
    def supplied_bytes(self) -> int:
        return self._supplied.total

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._pool.problems())

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        if self._skips_peers:
            super().read_into(name, offset, buffers, version)
            return
        rest: Sequence[memoryview] = buffers
        for part in self._parts(name, offset, offset + sum(map(len, buffers))):
            taken, rest = take(rest, part.end - part.begin)
            if part.ends:
                self._read_blocks(name, part, taken, version)
            else:
                super().read_into(name, part.begin, taken, version)

    def skip_sources(self, skipped: bool) -> None:
        super().skip_sources(skipped)
        self._skips_peers = skipped

    def stop(self) -> None:
        super().stop()
        self._pool.stop()

    def close(self) -> None:
        self._pool.close()
        super().close()

    def _parts(self, name: str, begin: int, end: int) -> Iterator[_Segment]:
        """Cuts a byte range into adjacent checksum blocks and what is between them."""
        at, ends = begin, list[int]()
        number = self._numbers.get(name)
        blocks = self._manifest.blocks.between(number, begin, end) if number is not None else ()
        for _, block in blocks if self._manifest.block_bytes else ():
            if block.end > end:
                break
            last = ends[-1] if ends else at
            if block.offset > last:
                if ends:
                    yield _Segment(at, last, tuple(ends))
                yield _Segment(last, block.offset, ())
                at, ends = block.offset, []
            ends.append(block.end)
        last = ends[-1] if ends else at
        if ends:
            yield _Segment(at, last, tuple(ends))
        if last < end:
            yield _Segment(last, end, ())

    def _read_blocks(self, name: str, part: _Segment, buffers: Sequence[memoryview], version: str) -> None:
        """Reads adjacent checksum blocks, from one place after the other."""
        at, ends = part.begin, part.ends
        while ends:
            loan, fault = self._pool.lend(name, at, ends), None
            taken, left = take(buffers, loan.end - at)
            try:
                if loan.peer is None:
                    with READS.noted(self._digest, name, at, loan.end):
                        super().read_into(name, at, taken, version)
                else:
                    self._ask(loan.peer, loan, name, at, taken)
            except HttpFault as error:
                fault = error
            finally:
                self._pool.give_back(loan, loan.end - at, fault)
            if fault is None:
                at, buffers = loan.end, left
                ends = tuple(end for end in ends if end > at)

    def _ask(self, peer: KnownPeer, loan: Loan, name: str, at: int, buffers: Sequence[memoryview]) -> None:
        """Asks a peer for blocks.

        Raises:
            HttpFault: They did not come, or are not as recorded.
        """
        path = "/".join(filter(None, (loan.folder, name)))
        with self._pool.connection(peer) as connection:
            connection.read(path, at, buffers, self._digest, loan.timeout_s)
        self._verify(name, at, buffers)
        self._supplied.add(loan.end - at)

    def _verify(self, name: str, at: int, buffers: Sequence[memoryview]) -> None:
        """Compares blocks with their recorded checksums.

        Raises:
            HttpFault: One differs.
        """
        nbytes = sum(map(len, buffers))
        byte_range = ByteRange(self._numbers[name], at, nbytes)
        rest: Sequence[memoryview] = buffers
        sums = []
        for _, block in self._manifest.blocks.between(byte_range.file, at, byte_range.end):
            taken, rest = take(rest, block.nbytes)
            sums.append(_checksum(taken))
        found = b"".join(sums)
        if found != self._manifest.recorded_of(byte_range, len(found)):
            width = CHECKSUM_BYTES
            recorded = self._manifest.recorded_of(byte_range, len(found))
            num_wrong = sum(
                found[begin : begin + width] != recorded[begin : begin + width]
                for begin in range(0, len(found), width)
            )
            raise HttpFault(f"delivered {num_wrong} blocks with other checksums than recorded")


def _checksum(buffers: Sequence[memoryview]) -> bytes:
    if len(buffers) == 1:
        return checksum(buffers[0])
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()
