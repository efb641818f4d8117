"""Slabs → pending files: one thread copies and hashes, others write, and all of it is durable at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers
from fastload.errors import StorageError
from fastload.ranks.world import World
from fastload.saving.assign import FileRange
from fastload.saving.hashing import BlockHasher
from fastload.saving.snapshot import Slabs
from fastload.storage import Target

__all__ = ["Writing"]

T = TypeVar("T")

_TICK_S = 0.05


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

    def write(
        self, pieces: Sequence[FileRange], tail: Sequence[FileRange], slabs: Slabs, hasher: BlockHasher
    ) -> dict[str, Any]:
        """Writes all pieces and makes them durable.

        Args:
            pieces: In file order.
            tail: What is only hashed, after them.
            slabs: The bytes of both.
            hasher: Fed with them on the way.

        Returns:
            The receipt for `Target.publish`.

        Raises:
            StorageError: Storage failed, or did not answer in time.
            Interrupted: Another rank failed.
        """
        total, done = sum(piece.end - piece.begin for piece in pieces), 0
        under_way: deque[tuple[FileRange, Future[None]]] = deque()

        def finish() -> int:
            piece, writing = under_way.popleft()
            self._await(writing, piece)
            return piece.end - piece.begin

        for index, piece in enumerate(pieces):
            if len(under_way) == slabs.depth:
                done += finish()
                self._report(done, total)
            data = slabs.piece(index)
            hasher.feed(piece, data)
            under_way.append((piece, self._workers.submit(partial(self._write, piece, data))))
            del data
        while under_way:
            done += finish()
            self._report(done, total)
        for index, rest in enumerate(tail, len(pieces)):
            hasher.feed(rest, slabs.piece(index))
        began = time.perf_counter()
        receipt = self._await(self._workers.submit(self._target.flush), None)
        self.flush_s = time.perf_counter() - began
        return receipt

    def close(self) -> bool:
        """Ends the threads; returns whether no write is under way any more."""
        return self._workers.close(wait_s=min(1.0, self._world.grace_s))

    def _write(self, piece: FileRange, data: memoryview) -> None:
        with self.watch.span(nbytes=len(data)):
            self._target.write(self._names[piece.file], piece.begin, data)

    def _await(self, work: Future[T], piece: FileRange | None) -> T:
        """Waits for a write, no longer than the other ranks go on."""
        return self._world.await_work(work, partial(self._overdue, piece))

    def _overdue(self, piece: FileRange | None) -> StorageError:
        text = f"storage did not answer within {self._world.patience_s:.1f} s"
        if piece is None:
            return StorageError(f"{text} that the data is durable", url=self._target.url)
        url = f"{self._target.url}/{self._names[piece.file]}"
        return StorageError(text, url=url, offset=piece.begin, nbytes=piece.end - piece.begin)

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)
