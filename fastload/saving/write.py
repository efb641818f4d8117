"""Slabs → pending files: one thread copies and hashes, others write, and all of it is durable at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers
from fastload.comm.world import World
from fastload.errors import StorageError
from fastload.saving.assembly import Assembly
from fastload.saving.assign import FileRange, Share, blocks_of
from fastload.saving.call import Call
from fastload.saving.hashing import BlockHasher
from fastload.saving.part import Part
from fastload.saving.pending import Pending
from fastload.saving.receipts import Receipt, hand_in
from fastload.saving.snapshot import ReusedSlabs, Slabs, Snapshot
from fastload.storage import Target
from fastload.transfer.wire import Wire

__all__ = ["Writing", "Written", "write"]

T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """What one rank has done, once all of them have written.

    Attributes:
        receipt: What its leader is to know of it.
        handed_in: What each rank has told of its own; see `receipts.hand_in`.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds until what was written was durable.
        slab_bytes: Memory that the bytes went through.
    """

    receipt: Receipt
    handed_in: tuple[str | None, ...]
    write_s: float
    flush_s: float
    slab_bytes: int


def write(call: Call, part: Part, snapshot: Snapshot | None, pending: Pending) -> Written:
    """Writes this rank's share, and settles on all ranks whether all of them have.

    Args:
        call: This rank's call.
        part: Its part.
        snapshot: What it contributes; None takes it from the state. Its memory is left to the next snapshot.
        pending: What it writes to; its wire is closed in the end.

    Raises:
        FastloadError: Some rank has not written.
    """
    world, options, described = call.world, call.options, part.described
    writing = Writing(
        world,
        part.target,
        [file.name for file in described.layout.files],
        num_threads=options.write_threads,
        progress=options.progress,
    )
    call.tracing.follow({"write": writing.watch})
    wire = pending.wire
    found: list[Written] = []

    def work() -> str | None:
        pending.join()
        slabs = _slabs(call, part, snapshot, wire)
        if isinstance(slabs, Assembly):
            assemblies.append(slabs)
            slabs.open()
        hasher = BlockHasher(blocks_of(described.layout, part.share.ranges))
        receipt = Receipt(writing.write(part.share, slabs, hasher), hasher.checksums())
        if isinstance(slabs, Assembly):
            slabs.finish()
        to_tell = hand_in(world, part.team, receipt, what=call.what)
        described.own.show()
        nbytes = slabs.nbytes + (snapshot.nbytes if snapshot is not None and snapshot is not slabs else 0)
        found.append(Written(receipt, (), writing.watch.seconds, writing.flush_s, nbytes))
        return to_tell

    assemblies: list[Assembly] = []
    try:
        handed_in = world.settle(call.what, work)
    finally:
        for assembly in assemblies:
            assembly.close()
        if wire is not None and not assemblies:
            wire.close(keep=False)
        if writing.close() and snapshot is not None:
            snapshot.keep()
    return replace(found[0], handed_in=tuple(handed_in))


def _slabs(call: Call, part: Part, snapshot: Snapshot | None, wire: Wire | None) -> Slabs:
    described, share, num_writes = part.described, part.share, call.options.write_threads
    if part.shards is not None and part.packets is not None and part.depths is not None:
        given: dict[str, Any] = {"depths": part.depths, "wire": wire}
        layout = described.layout
        return Assembly(call.world, layout, share.pieces, part.packets, part.shards, snapshot, **given)
    if snapshot is not None:
        return snapshot
    return ReusedSlabs(described.source, share.pieces, num_slabs=num_writes + 1)


class Writing:
    """One rank's writing, watched by the others.

    Args:
        world: The ranks; a failure of another one ends this.
        target: Where to.
        names: Of the files.
        num_threads: Writes at once.
        progress: Called with (bytes written, bytes to write).

    Attributes:
        watch: Time with at least one write under way.
        flush_s: Seconds until what was written was durable.
    """

    def __init__(
        self,
        world: World,
        target: Target,
        names: Sequence[str],
        *,
        num_threads: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._world = world
        self._target = target
        self._names = names
        self._workers = Workers(1 if target.ordered else num_threads, "fastload-write")
        self._progress = progress
        self.watch = Stopwatch()
        self.flush_s = 0.0

    def write(self, share: Share, slabs: Slabs, hasher: BlockHasher) -> dict[str, Any]:
        """Writes all pieces and makes them durable.

        Args:
            share: What to write, and what to hash.
            slabs: The bytes of both.
            hasher: Fed with them on the way.

        Returns:
            The receipt for `Target.publish`.

        Raises:
            StorageError: Storage failed, or did not answer in time.
            Interrupted: Another rank failed.
        """
        done_bytes = 0
        under_way: deque[tuple[int, Future[None]]] = deque()

        def finish() -> None:
            nonlocal done_bytes
            piece = share.pieces[under_way[0][0]]
            self._await(piece, under_way.popleft()[1])
            done_bytes += piece.end - piece.begin
            if self._progress is not None:
                self._progress(done_bytes, share.nbytes)

        for index, piece in enumerate(share.pieces):
            if under_way and under_way[0][0] + slabs.depth == index:
                finish()
            data = slabs.piece(index)
            hasher.feed(piece, data)
            if index not in share.tails:
                under_way.append((index, self._workers.submit(partial(self._write, piece, data))))
            del data
        while under_way:
            finish()
        began = time.perf_counter()
        receipt = self._await(None, self._workers.submit(self._target.flush))
        self.flush_s = time.perf_counter() - began
        return receipt

    def close(self) -> bool:
        """Ends the threads; returns whether no write is under way any more."""
        return self._workers.close(wait_s=min(1.0, self._world.grace_s))

    def _write(self, piece: FileRange, data: memoryview) -> None:
        with self.watch.span(nbytes=len(data)):
            self._target.write(self._names[piece.file], piece.begin, data)

    def _await(self, piece: FileRange | None, work: Future[T]) -> T:
        """Waits for a write, or for all of it to be durable, no longer than the other ranks go on."""
        try:
            return self._world.await_work(work, partial(self._overdue, piece))
        finally:
            del work  # else error → traceback → frame → work → error would keep all their memory alive

    def _overdue(self, piece: FileRange | None) -> StorageError:
        text = f"storage did not answer within {self._world.patience_s:.1f} s"
        if piece is None:
            return StorageError(f"{text} that the data is durable", url=self._target.url)
        url = f"{self._target.url}/{self._names[piece.file]}"
        return StorageError(text, url=url, offset=piece.begin, nbytes=piece.end - piece.begin)
