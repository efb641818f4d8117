"""Writes byte ranges into the files of a copy: verifies blocks, writes them, and notes them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from fastload.base.memory import host_view
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers
from fastload.comm.world import World
from fastload.errors import ChecksumError, StorageError
from fastload.ext.staging.inventory import BlockRun, Inventory
from fastload.ext.staging.local_copy import LocalCopy
from fastload.ext.staging.stock import Stock, journal_entry
from fastload.formats.record import checksum
from fastload.geometry.blocks import Block, num_blocks
from fastload.geometry.ranges import Space
from fastload.storage import CheckpointReader
from fastload.storage.base import ByteCounter
from fastload.storage.reader import LayeredReader

_MAX_REREADS = 64  # not every block of a file that is damaged throughout


class BlockCheck:
    """Hashes every block that arrives, and compares it with its recorded checksum, if any.

    A block that differs is read again from storage, once, in case it was damaged on the way.

    Args:
        inventory: The files to copy.
        read_again: Reads a block into a buffer.
        verify: Whether to compare with the commit record.

    Attributes:
        verified: Bytes that were compared with the commit record.
        rereads: Blocks read again.
    """

    def __init__(
        self, inventory: Inventory, read_again: Callable[[Block, memoryview], None], *, verify: bool
    ) -> None:
        self._inventory = inventory
        self._read_again = read_again
        self._verify = verify
        self._rereads = threading.Semaphore(_MAX_REREADS)
        self.verified = ByteCounter()
        self.rereads = ByteCounter()

    def __call__(self, block: Block, data: memoryview) -> bytes:
        """Returns the checksum of a block, after it has been repaired if needed.

        Raises:
            ChecksumError: It is not the recorded one.
        """
        found = checksum(data)
        recorded = self._inventory.recorded(block.number) if self._verify else b""
        if not recorded:
            return found
        if found != recorded and self._rereads.acquire(blocking=False):
            self.rereads.add(1)
            again = memoryview(bytearray(block.nbytes))
            with contextlib.suppress(StorageError):  # a host that only receives may not see the source
                self._read_again(block, again)
                if (second := checksum(again)) == recorded:
                    data[:], found = again, second
        if found != recorded:
            name = self._inventory.files[block.file].name
            where = f"{name} [bytes {block.offset}-{block.end}]"
            text = f"{where}: checksum {recorded.hex()} expected, {found.hex()} found"
            raise ChecksumError(f"damaged: {text}", (text,))
        self.verified.add(block.nbytes)
        return found


class FileWriter:
    """Writes byte ranges into the files of a copy. Offsets count the bytes of the runs, laid end to end.

    Args:
        world: The ranks.
        inventory: The files to copy.
        runs: The bytes that some host lacks.
        copy: The copy; None if it is complete already.
        stock: The blocks in the copy; updated here.
        check: Checks every block before it is written.
        num_threads: Writes at once.

    Attributes:
        watch: Time with at least one write under way.
        written: Bytes that were written.
    """

    def __init__(
        self,
        world: World,
        inventory: Inventory,
        runs: Sequence[BlockRun],
        copy: LocalCopy | None,
        *,
        stock: Stock,
        check: BlockCheck,
        num_threads: int,
    ) -> None:
        self._world = world
        self._inventory = inventory
        self._wanted = Space(runs)
        self._copy = copy
        self._stock = stock
        self._check = check
        self._workers = Workers(num_threads if copy is not None else 0, "fastload-copy")
        self._under_way: deque[tuple[Block, Future[bytes]]] = deque()
        self.watch = Stopwatch()
        self.written = ByteCounter()

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns None: bytes have to be placed."""
        return None

    def place(self, start: int, data: Tensor) -> None:
        """Starts to write a byte range, which begins and ends at the bounds of blocks.

        Args:
            start: Offset of the first byte.
            data: The bytes, flat uint8, in host memory.
        """
        if self._copy is None:
            return
        view = host_view(data)
        for batch, part in self._lacking(self._blocks(start, len(view)), view):
            work = self._workers.submit(partial(self._write, batch, part))
            self._under_way.append((batch[0]._replace(nbytes=len(part)), work))

    def write_early(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Writes the complete blocks of what this rank has just read; `place` then skips them.

        Any thread may call it. What cannot be written, or differs from the saved block, is left to `place`.

        Args:
            file: Index of the file.
            offset: First byte in the file.
            buffers: The bytes.
        """
        if self._copy is None:
            return
        begin = offset
        for buffer in buffers:
            end = begin + len(buffer)
            blocks = [one for _, one in self._inventory.blocks.between(file, begin, end) if one.end <= end]
            data = buffer[blocks[0].offset - begin :] if blocks else buffer
            for batch, part in self._lacking(blocks, data):
                with contextlib.suppress(ChecksumError, StorageError):
                    self._copy.note(self._write(batch, part))
            begin = end

    def follow(self) -> Callable[[], bool]:
        """Returns once all bytes placed so far are written, and notes their blocks in the journal.

        Raises:
            ChecksumError: A block differs from the saved one.
            StorageError: A block could not be written.
            Interrupted: Another rank failed.
        """
        entries = []
        while self._under_way:
            late = partial(self._late, self._under_way[0][0])
            # No frame refers to it: else error → traceback → frame → work → error would keep buffers alive.
            entries.append(self._world.await_work(self._under_way.popleft()[1], late))
        if entries and self._copy is not None:
            self._copy.note(b"".join(entries))
        return lambda: True

    def close(self) -> bool:
        """Ends the threads; returns whether all writes have ended."""
        self._under_way.clear()  # else an untaken error → traceback → frame → this → error
        return self._workers.close(wait_s=min(1.0, self._world.grace_s))

    def _blocks(self, start: int, nbytes: int) -> list[Block]:
        """Returns the blocks of a byte range."""
        blocks, block_bytes = [], self._inventory.block_bytes
        for index, begin, end in self._wanted.cut(start, nbytes):
            first = self._wanted.ranges[index].first
            assert not begin % block_bytes
            for number in range(first + begin // block_bytes, first + num_blocks(end, block_bytes)):
                blocks.append(self._inventory.blocks[number])
        return blocks

    def _lacking(self, blocks: Iterable[Block], data: memoryview) -> Iterator[tuple[list[Block], memoryview]]:
        """Yields consecutive blocks of one file that are not there yet, with their bytes.

        Args:
            blocks: Blocks, one after the other.
            data: The bytes of all of them.
        """
        batch: list[Block] = []
        begin = position = 0
        for block in blocks:
            is_held = self._stock.held[block.number]
            if batch and (is_held or batch[-1].file != block.file):
                yield batch, data[begin:position]
                batch = []
            if not is_held:
                begin = begin if batch else position
                batch.append(block)
            position += block.nbytes
        if batch:
            yield batch, data[begin:position]

    def _write(self, batch: Sequence[Block], data: memoryview) -> bytes:
        """Writes consecutive blocks; returns their entries for the journal."""
        assert self._copy is not None
        digests, position = [], 0
        for block in batch:
            digests.append(self._check(block, data[position : position + block.nbytes]))
            position += block.nbytes
        with self.watch:
            name = self._inventory.files[batch[0].file].name
            self._copy.write(name, batch[0].offset, data)
        self.written.add(len(data))
        found = {block.number: digest for block, digest in zip(batch, digests, strict=True)}
        for number, digest in found.items():
            self._stock.note(number, digest)
        return b"".join(journal_entry(number, digest) for number, digest in found.items())

    def _late(self, block: Block) -> StorageError:
        assert self._copy is not None
        return StorageError(
            f"writing did not end within {self._world.patience_s:.1f} s",
            url=f"{self._copy.url}/{self._inventory.files[block.file].name}",
            offset=block.offset,
            nbytes=block.nbytes,
        )


class WritingReader(LayeredReader):
    """Reads a checkpoint, and writes complete blocks into its copy as soon as they are read.

    Others that stage may wait for them, and for no other ones, so this one never waits for blocks that come
    before them.

    Args:
        reader: Reads the checkpoint.
        names: The files, in the order of the inventory, by their names in the checkpoint.
        writer: Writes the copy.
    """

    def __init__(self, reader: CheckpointReader, names: Sequence[str], writer: FileWriter) -> None:
        super().__init__(reader)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._writer = writer

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        """Reads a byte range; see `Storage.read_into`."""
        super().read_into(name, offset, buffers, version)
        self._writer.write_early(self._numbers[name], offset, buffers)
