"""Reads this rank's share of a checkpoint into host memory, in the background, before anything is loaded."""

from __future__ import annotations

from fastload.base.memory import PAGE_BYTES
from fastload.formats.manifest import Manifest
from fastload.loading.prepare import Opened
from fastload.loading.session import Session, Supplied
from fastload.transfer.plan import Chunk, plan_transfer
from fastload.transfer.read import BackgroundReads
from fastload.transfer.routed_plan import SuppliedRange, Supply

_UNBOUNDED_BYTES = 1 << 62
_LEAST_CHUNKS = 16
_MAX_CHUNK_BYTES = 8 << 20


def prefetch(session: Session) -> None:
    """Begins to read the shares of a checkpoint, on all ranks; see `fastload.prefetch`.

    Raises:
        FastloadError: A rank failed.
    """
    if session.supplier is not None:
        return
    components = session.opened.access.components
    if components and components[0].stored.delta is not None:  # a model that holds the base needs no more
        prefetch(session.component(0))
        return
    session.supplier = supplier = Prefetch()
    try:
        supplier.begin(session)
    except BaseException:
        session.drop_supplier()
        raise


class Prefetch:
    """Supplies the bytes that the ranks have read ahead, and the rest from storage: a `Supplier`."""

    def __init__(self) -> None:
        self._share: _Share | None = None  # until all ranks have read theirs
        self._supplied: Supplied | None = None  # from then on

    @property
    def is_done(self) -> bool:
        """Whether no read of this rank is under way."""
        return self._share is None or self._share.is_done

    def begin(self, session: Session) -> None:
        """Begins the reads, on all ranks.

        Raises:
            FastloadError: A rank failed.
        """
        with session.opened.world.step(f"prefetching {session.stored.url}"):
            self._share = _Share(session.opened)

    def wait(self, session: Session) -> None:
        """Waits for the reads of all ranks, and reads again what was laid out otherwise than inferred."""
        world = session.opened.world
        while (share := self._share) is not None:
            try:
                with world.step(f"prefetching {session.stored.url}", is_long=True) as step:
                    cached = share.wait(world)
                    step.answer(share.reader.is_misread)
            finally:
                self.close(wait_s=min(1.0, world.grace_s))
            if any(step.answers):
                session.reopen_exactly()
                self.begin(session)
            else:
                self._supplied = Supplied(cached, share.supply())

    def supplied(self) -> Supplied | None:
        """Returns what all ranks have read."""
        return self._supplied

    def covers(self, manifest: Manifest) -> bool:
        """Whether the ranks can supply everything of a manifest."""
        return self._supplied is None or not self._supplied.supply.lacking(manifest.extents)

    def close(self, *, wait_s: float) -> None:
        """Ends the reads."""
        share, self._share = self._share, None
        if share is not None:
            share.close(wait_s=wait_s)


class _Share(BackgroundReads):
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

    def supply(self) -> Supply:
        """Returns which ranks supply each byte: the one that has read it ahead, or else all readers."""
        plan, readers = self._plan, self._plan.readers
        ranges = []
        for rank in readers:
            rounds = (0, self._num_chunks, plan.num_rounds)
            begin, middle, end = (plan.chunk(index, rank).start for index in rounds)
            for start, stop, ranks in ((begin, middle, (rank,)), (middle, end, readers)):
                ranges += [
                    SuppliedRange(each.file, each.offset, each.nbytes, ranks)
                    for each in plan.byte_ranges(Chunk(start, stop - start))
                ]
        return Supply(tuple(sorted(ranges)))
