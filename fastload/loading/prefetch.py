"""Reads this rank's share of a checkpoint into host memory, in the background, before anything is loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from fastload.base.memory import PAGE_BYTES, allocate_staging, host_view
from fastload.comm.world import World
from fastload.geometry.ranges import ByteRange
from fastload.loading.prepare import Opened
from fastload.transfer.plan import Chunk, plan_transfer
from fastload.transfer.read import ChunkReader, HeldBytes
from fastload.transfer.routed_plan import HeldRange, Holders

_UNBOUNDED_BYTES = 1 << 62
_LEAST_CHUNKS = 16
_MAX_CHUNK_BYTES = 8 << 20


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


class Prefetch(BackgroundReads):
    """The share of this rank of a checkpoint, as far as it fits into `LoadOptions.prefetch_bytes`.

    The readers have equal shares, each a contiguous part of the checkpoint, whatever is loaded later.

    Args:
        opened: The checkpoint.

    Raises:
        MemoryError: There is too little memory.
    """

    def __init__(self, opened: Opened) -> None:
        options, access, limit_bytes = opened.options, opened.access, opened.options.prefetch_bytes
        chunk_bytes = options.chunk_bytes
        if chunk_bytes is None and limit_bytes is not None:  # chunks that fill the memory
            chunk_bytes = min(max(limit_bytes // _LEAST_CHUNKS, PAGE_BYTES), _MAX_CHUNK_BYTES)
        self._plan = plan = plan_transfer(
            access.stored.extents,
            access.readers,
            (),
            staging_bytes=_UNBOUNDED_BYTES,
            chunk_bytes=chunk_bytes,
            block_bytes=opened.block_bytes or PAGE_BYTES,
            contiguous=True,
        )
        self._num_chunks = plan.num_rounds
        if limit_bytes is not None and plan.blocks is not None:
            fitting = (limit_bytes - plan.blocks.longest_bytes) // plan.chunk_bytes
            self._num_chunks = min(max(0, fitting), plan.num_rounds)
        rank = opened.world.rank
        indexes = range(self._num_chunks if rank in access.readers else 0)
        reader = opened.open_reader(plan, in_parts=True)
        super().__init__(reader, [plan.byte_ranges(plan.chunk(index, rank)) for index in indexes])

    def holders(self) -> Holders:
        """Returns which ranks supply each byte: the one that has read it ahead, or else all readers."""
        plan, readers = self._plan, self._plan.readers
        held = []
        for rank in readers:
            rounds = (0, self._num_chunks, plan.num_rounds)
            begin, middle, end = (plan.chunk(index, rank).start for index in rounds)
            for start, stop, ranks in ((begin, middle, (rank,)), (middle, end, readers)):
                held += [
                    HeldRange(each.file, each.offset, each.nbytes, ranks)
                    for each in plan.byte_ranges(Chunk(start, stop - start))
                ]
        return Holders(tuple(sorted(held)))
