"""Reads of this rank into host memory of their own, before anything is placed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from fastload.base.memory import allocate_staging, host_view
from fastload.comm.world import World
from fastload.geometry.ranges import ByteRange
from fastload.transfer.read import ChunkReader, HeldBytes


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
        rest = allocate_staging(sum(each.nbytes for chunk in chunks for each in chunk), pinned=False)
        for chunk in filter(None, chunks):
            nbytes = sum(each.nbytes for each in chunk)
            self._reads.append(reader.submit(chunk, [host_view(rest[:nbytes])]))
            for each in chunk:
                self._parts.append((each, rest[: each.nbytes]))
                rest = rest[each.nbytes :]

    @property
    def is_done(self) -> bool:
        """Whether no read is under way."""
        return all(read.done() for read in self._reads)

    def wait(self, world: World) -> HeldBytes:
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
        return HeldBytes(self._parts)

    def close(self, *, wait_s: float) -> None:
        """Ends the threads of the reader, and reads that nobody waits for."""
        if self._reads:
            self.reader.stop()
        self.reader.close(wait_s=wait_s)
