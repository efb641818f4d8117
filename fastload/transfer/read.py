"""Reads chunks into buffers, in threads, and checks them against checksums and guards."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from fastload.base.memory import allocate_staging, copy_flat, host_view
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers
from fastload.comm.world import World
from fastload.errors import ChecksumError, StorageError
from fastload.formats.manifest import FileEntry, Manifest, Piece, TensorEntry
from fastload.formats.record import checksum
from fastload.geometry.blocks import Block, Blocks
from fastload.geometry.ranges import ByteRange, Space
from fastload.storage import CheckpointReader, take
from fastload.storage.base import ByteCounter, ignore
from fastload.transfer.pace import Pace

_MAX_REREADS = 64  # a file with many damaged blocks is not read twice


class Damage(NamedTuple):
    """A checksum block that differs from what was written; sorts in the order of the checkpoint.

    Attributes:
        file: Index of the file in the manifest.
        number: Number of the block in that file.
        text: Description for users.
        doubt: See `Manifest.doubt_about`.
    """

    file: int
    number: int
    text: str
    doubt: str = ""


def refuse(damage: Damage) -> NoReturn:
    """Raises the error of a load for a damaged block.

    Raises:
        ChecksumError: Always.
    """
    doubt = f". {damage.doubt}" if damage.doubt else ""
    raise ChecksumError(f"damaged: {damage.text}{doubt}", (damage.text,))


class Verifier:
    """Verifies the checksum blocks of a checkpoint; may be used by several threads.

    Args:
        manifest: A manifest with checksums.
        on_damage: Called with each damaged block; an exception that it raises ends the read.
    """

    def __init__(self, manifest: Manifest, on_damage: Callable[[Damage], object] = refuse) -> None:
        assert manifest.block_bytes
        self._manifest = manifest
        self._on_damage = on_damage
        self._rereads = threading.Semaphore(_MAX_REREADS)

    def check(
        self,
        byte_range: ByteRange,
        buffers: Sequence[memoryview],
        read: Callable[[ByteRange, Sequence[memoryview]], None],
    ) -> None:
        """Verifies the blocks of a byte range.

        Each block with a wrong checksum is read once more, in case it was damaged on the way.

        Args:
            byte_range: The byte range, in complete blocks.
            buffers: Its bytes, cut between blocks only.
            read: Reads a byte range again.
        """
        manifest = self._manifest
        checksums = b"".join(map(checksum, _block_views(manifest.blocks, byte_range, buffers)))
        if checksums == manifest.recorded_of(byte_range, len(checksums)):
            return
        for index, block, data in _cut_into_blocks(manifest.blocks, byte_range, buffers):
            number, expected = manifest.recorded(block)
            if checksum(data) == expected:
                continue
            if self._rereads.acquire(blocking=False):
                read(ByteRange(block.file, block.offset, block.nbytes, byte_range.start), [data])
                if checksum(data) == expected:
                    continue
            name = self._name_of(manifest.blocks.space.ranges[index])
            text = manifest.describe_damage(block, name, checksum(data))
            self._on_damage(Damage(block.file, number, text, manifest.doubt_about(block)))

    def _name_of(self, extent: TensorEntry | Piece) -> str:
        if isinstance(extent, TensorEntry):
            return extent.name
        return next(entry.name for entry in self._manifest.tensors if extent in entry.pieces)


class ChecksumCollector:
    """Computes the checksums of the blocks that this rank reads; may be used by several threads.

    Args:
        manifest: A manifest with the length of a block, and no checksums yet.

    Attributes:
        checksums: By number of the block, over all files.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._blocks = manifest.blocks
        self.checksums: dict[int, bytes] = {}

    def check(self, byte_range: ByteRange, buffers: Sequence[memoryview], _read: object) -> None:
        """Adds the checksums of a byte range, in complete blocks."""
        first = self._blocks.number_at(byte_range.file, byte_range.offset)
        self.checksums |= enumerate(map(checksum, _block_views(self._blocks, byte_range, buffers)), first)


def _block_views(
    blocks: Blocks, byte_range: ByteRange, buffers: Sequence[memoryview]
) -> Iterator[memoryview]:
    """Yields the data of the blocks of a byte range, with as little Python for each as possible."""
    block_bytes, buffer, rest = blocks.block_bytes, memoryview(b""), iter(buffers)
    for _, begin, end in blocks.space.overlapping(byte_range.file, byte_range.offset, byte_range.end):
        left = end - begin
        while left:
            while not buffer:
                buffer = next(rest)
            part, buffer = buffer[:left], buffer[left:]
            left -= len(part)
            for at in range(0, len(part), block_bytes):
                yield part[at : at + block_bytes]
    assert not buffer, "complete blocks only"


def _cut_into_blocks(
    blocks: Blocks, byte_range: ByteRange, buffers: Sequence[memoryview]
) -> Iterator[tuple[int, Block, memoryview]]:
    """Yields the blocks of a byte range, each with the index of its extent and its data."""
    buffer, position, rest = memoryview(b""), 0, iter(buffers)
    for index, block in blocks.between(byte_range.file, byte_range.offset, byte_range.end):
        while position == len(buffer):
            buffer, position = next(rest), 0
        yield index, block, buffer[position : position + block.nbytes]
        position += block.nbytes
    assert position == len(buffer), "complete blocks only"


class CachedBytes:
    """Verified bytes of a checkpoint in the memory of this rank.

    Args:
        parts: Byte ranges of files, each with its bytes: a flat uint8 tensor in host memory.
    """

    def __init__(self, parts: Iterable[tuple[ByteRange, Tensor]] = ()) -> None:
        ordered = sorted(parts, key=itemgetter(0))
        self._space = Space([byte_range for byte_range, _ in ordered])
        self._data = [data for _, data in ordered]

    def joined(self, other: CachedBytes) -> CachedBytes:
        """Returns the bytes of both."""
        both = (self, other)
        return CachedBytes(part for one in both for part in zip(one._space.ranges, one._data, strict=True))

    def lacking(self, byte_ranges: Iterable[ByteRange]) -> list[ByteRange]:
        """Returns the parts of byte ranges that are not cached."""
        return [part for byte_range in byte_ranges for part, data in self.cut(byte_range) if data is None]

    def cut(self, byte_range: ByteRange) -> Iterator[tuple[ByteRange, Tensor | None]]:
        """Cuts a byte range into parts, each with its bytes, or None if they are not cached."""
        file, at = byte_range.file, byte_range.offset
        for index, begin, end in self._space.overlapping(file, at, byte_range.end):
            start = self._space.ranges[index].offset
            if start + end <= at:  # cached twice
                continue
            if start + begin > at:
                yield ByteRange(file, at, start + begin - at), None
                at = start + begin
            yield ByteRange(file, at, start + end - at), self._data[index][at - start : end]
            at = start + end
        if at < byte_range.end:
            yield ByteRange(file, at, byte_range.end - at), None

    def fill(
        self, byte_ranges: Sequence[ByteRange], buffers: Sequence[memoryview]
    ) -> tuple[list[ByteRange], list[memoryview]]:
        """Copies what is cached of some byte ranges into buffers of the same total length.

        Returns:
            The byte ranges that are not cached, and their buffers.
        """
        left, left_buffers, rest = list[ByteRange](), list[memoryview](), list(buffers)
        for byte_range in byte_ranges:
            for part, data in self.cut(byte_range):
                taken, rest = take(rest, part.nbytes)
                if data is None:
                    left.append(part)
                    left_buffers += taken
                    continue
                for buffer in filter(len, taken):
                    copy_flat(data[: len(buffer)], torch.frombuffer(buffer, dtype=torch.uint8))
                    data = data[len(buffer) :]
        return left, left_buffers


class Guards:
    """Chooses the guards to read with a byte range: bytes that have to precede data in a file.

    May be used by several threads.

    Args:
        manifest: The manifest, with guards or without.
        in_parts: Whether data may be read without their first byte.

    Attributes:
        is_broken: Whether other bytes than expected preceded data; set by the reader.
    """

    def __init__(self, manifest: Manifest, *, in_parts: bool) -> None:
        self.is_broken = False
        self._guards = manifest.guards
        guarded = {(guard.file, guard.offset) for guard in manifest.guards}
        # Views of one storage may begin anywhere within it.
        self._inner = {(extent.file, extent.offset) for extent in manifest.extents} - guarded
        self._heads = manifest.heads
        self._in_parts = in_parts
        self._seen = set[int]()

    def before(self, byte_range: ByteRange) -> tuple[int, bytes] | None:
        """Returns the offset of the guard to read with a byte range, and its expected bytes; or None.

        The guard is right before a range that begins with data. For a range within data (if it begins with a
        tensor, or if tensors are read in parts) it is further ahead, and is read only the first time.
        """
        at = bisect_right(self._guards, (byte_range.file, byte_range.offset, len(self._heads))) - 1
        if at < 0 or self._guards[at].file != byte_range.file:
            return None
        guard = self._guards[at]
        if guard.offset != byte_range.offset:
            may_be_first = self._in_parts or (byte_range.file, byte_range.offset) in self._inner
            if not may_be_first or at in self._seen:
                return None
        self._seen.add(at)
        head = self._heads[guard.head]
        return guard.offset - len(head), head


_MOST_BETWEEN_BYTES = 2 << 10  # read in vain where another request would take longer

BufferedRange = tuple[ByteRange, Sequence[memoryview]]


class ChunkReader:
    """Reads chunks in the background.

    Args:
        storage: The storage.
        files: The files of the manifest.
        pace: How many chunks are read at once.
        verifier: Verifies or computes checksums; None does neither.
        guards: The bytes that have to precede data; None without any.
        cached: The bytes that are not read from storage; None without any.

    Attributes:
        pace: As given.
        watch: Time with at least one read under way.
        verified: Bytes verified, or hashed.
        rereads: Blocks read again because of a wrong checksum.
        cached: As given, until it is closed.
    """

    def __init__(
        self,
        storage: CheckpointReader,
        files: Sequence[FileEntry],
        *,
        pace: Pace,
        verifier: Verifier | ChecksumCollector | None = None,
        guards: Guards | None = None,
        cached: CachedBytes | None = None,
    ) -> None:
        self._guards = guards
        self.cached = cached
        self._storage = storage
        storage.listen(self._note_first_byte)
        self._files = files
        self.pace = pace
        self._workers = Workers(pace.width, "fastload-read")
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[float, ByteRange]] = {}  # by thread, with its beginning
        self._verifier = verifier
        self.watch = Stopwatch()
        self.verified = ByteCounter()
        self.rereads = ByteCounter()

    @property
    def is_misread(self) -> bool:
        """Whether other bytes than the guards preceded data."""
        return self._guards is not None and self._guards.is_broken

    def submit(self, byte_ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> Future[None]:
        """Begins to read the byte ranges of a chunk into buffers of the same total length.

        What takes several requests of a storage that may be far away is read at once: none of them waits for
        the answer to another one.

        The future raises `StorageError` if all retries fail, what the verifier raises, and `Interrupted`
        after `stop`.
        """
        if self._storage.probes:
            return self._workers.submit(partial(self._read, byte_ranges, buffers))
        requests = _requests(byte_ranges, buffers, _MOST_BETWEEN_BYTES)
        return self._workers.submit_all(
            [
                partial(
                    self._read,
                    [wanted for wanted, _ in request],
                    [part for _, taken in request for part in taken],
                )
                for request in requests
            ]
        )

    def stop(self) -> None:
        """Ends reads that have not begun, and retries."""
        self._storage.stop()

    def overdue(self, at_least_s: float) -> StorageError | None:
        """Returns an error for the read that has taken longest; None if it has not taken so long."""
        with self._lock:
            since, byte_range = min(self._under_way.values(), default=(0.0, None), key=itemgetter(0))
        if byte_range is None or (for_s := time.monotonic() - since) < at_least_s:
            return None
        name = self._files[byte_range.file].name
        return StorageError(
            f"storage did not answer within {for_s:.1f} s",
            url=f"{self._storage.url}/{name}" if name else self._storage.url,
            offset=byte_range.offset,
            nbytes=byte_range.nbytes,
        )

    def close(self, *, wait_s: float) -> bool:
        """Ends the threads, and waits a little for reads under way.

        Returns:
            Whether all reads have ended. One that has not keeps its buffers alive, and writes into them if
            storage responds after all.
        """
        self._workers.close(wait_s=wait_s)
        self._storage.listen(ignore)  # else storage → reader → storage would keep all their memory alive
        self.cached = None
        return self._workers.is_idle

    def _read(self, byte_ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        if (cached := self.cached) is not None:
            byte_ranges, buffers = cached.fill(byte_ranges, buffers)
        for request in _requests(byte_ranges, buffers, 0 if self._storage.probes else _MOST_BETWEEN_BYTES):
            if self._guards is None:
                self._read_range(*_joined(request))
            else:
                self._read_guarded(request, self._guards)
            if self._verifier is not None:
                for byte_range, taken in request:
                    self._verifier.check(byte_range, taken, self._read_again)
                    self.verified.add(byte_range.nbytes)

    def _read_guarded(self, request: list[BufferedRange], guards: Guards) -> None:
        """Reads adjacent byte ranges and their guards with one request; guards further ahead take another."""
        parts: list[BufferedRange] = []
        heads: list[tuple[memoryview, bytes]] = []
        for byte_range, taken in request:
            guard = guards.before(byte_range)
            if guard is not None:
                begin, expected = guard
                heads.append((memoryview(bytearray(len(expected))), expected))
                before = byte_range._replace(offset=begin, nbytes=len(expected))
                if begin + len(expected) == byte_range.offset and not (parts and begin < parts[-1][0].end):
                    parts.append((before, [heads[-1][0]]))
                else:
                    self._read_range(before, [heads[-1][0]])
            parts.append((byte_range, taken))
        self._read_range(*_joined(parts))
        if any(head != expected for head, expected in heads):
            guards.is_broken = True

    def _read_range(self, byte_range: ByteRange, buffers: Sequence[memoryview]) -> None:
        file, storage, pace = self._files[byte_range.file], self._storage, self.pace
        with self.watch.span(nbytes=byte_range.nbytes), self._reading(byte_range):
            began_s, num_retries = time.monotonic(), storage.num_retries
            storage.read_into(file.name, byte_range.offset, buffers, file.version)
        refused, is_full = storage.num_retries > num_retries, self._workers.num_calls > pace.width
        pace.note_end(byte_range.nbytes, began_s, time.monotonic(), refused=refused, is_full=is_full)
        self._workers.set_most(pace.width)

    def _note_first_byte(self, after_s: float) -> None:
        self.pace.note_first_byte(after_s)
        self._workers.set_most(self.pace.width)

    def _read_again(self, byte_range: ByteRange, buffers: Sequence[memoryview]) -> None:
        self.rereads.add(1)
        self._read_range(byte_range, buffers)

    @contextlib.contextmanager
    def _reading(self, byte_range: ByteRange) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self._under_way[me] = time.monotonic(), byte_range
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[me]


def _requests(
    byte_ranges: Sequence[ByteRange], buffers: Sequence[memoryview], most_between: int
) -> Iterator[list[BufferedRange]]:
    """Yields the byte ranges to read with one request each: of one file, with few bytes in between."""
    request: list[BufferedRange] = []
    rest = list(buffers)
    for byte_range in byte_ranges:
        if request:
            last, _ = request[-1]
            between = byte_range.offset - last.end if byte_range.file == last.file else -1
            if not 0 <= between <= most_between:
                yield request
                request = []
        taken, rest = take(rest, byte_range.nbytes)
        request.append((byte_range, taken))
    if request:
        yield request


def _joined(request: Sequence[BufferedRange]) -> BufferedRange:
    """Returns the byte range from the first to the last of some ranges, and buffers for all of it."""
    first, _ = request[0]
    at, buffers = first.offset, list[memoryview]()
    for byte_range, taken in request:
        if byte_range.offset > at:
            buffers.append(memoryview(bytearray(byte_range.offset - at)))
        buffers += taken
        at = byte_range.end
    return first._replace(nbytes=at - first.offset), buffers


class BackgroundReads:
    """Reads of this rank into memory of their own.

    Args:
        reader: Reads the chunks, in the background.
        chunks: The byte ranges of each.

    Raises:
        MemoryError: There is too little memory.
    """

    def __init__(self, reader: ChunkReader, chunks: Sequence[Sequence[ByteRange]]) -> None:
        self.reader = reader
        self._parts: list[tuple[ByteRange, Tensor]] = []
        self._reads: deque[Future[None]] = deque()
        rest = allocate_staging(sum(wanted.nbytes for chunk in chunks for wanted in chunk), pinned=False)
        for chunk in filter(None, chunks):
            nbytes = sum(wanted.nbytes for wanted in chunk)
            self._reads.append(reader.submit(chunk, [host_view(rest[:nbytes])]))
            for wanted in chunk:
                self._parts.append((wanted, rest[: wanted.nbytes]))
                rest = rest[wanted.nbytes :]

    @property
    def is_done(self) -> bool:
        """Whether no read is under way."""
        return all(read.done() for read in self._reads)

    def wait(self, world: World) -> CachedBytes:
        """Waits for all reads.

        Raises:
            FastloadError: A read failed, or another rank did (`Interrupted`).
        """
        try:
            while self._reads:
                # No frame refers to it: else error → traceback → frame → read → error would keep the memory.
                world.await_work(self._reads.popleft(), partial(self.reader.overdue, 0.0))
        except BaseException:
            self.reader.stop()
            raise
        return CachedBytes(self._parts)

    def close(self, *, wait_s: float) -> None:
        """Ends the threads of the reader, and reads that nobody waits for."""
        if self._reads:
            self.reader.stop()
        self.reader.close(wait_s=wait_s)
