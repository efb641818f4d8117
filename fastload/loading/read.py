"""Fills buffers with chunks, in some threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from fastload.formats.manifest import FileEntry
from fastload.loading.plan import Chunk, ReadPlan
from fastload.report import Stopwatch
from fastload.storage import PatientStorage, take

__all__ = ["ChunkReader"]


class ChunkReader:
    """Reads chunks of a plan in the background.

    Args:
        storage: Where from.
        files: The files of the manifest.
        plan: What the chunks are made of.
        threads: Chunks read at once.

    Attributes:
        watch: Time with at least one read under way.
    """

    def __init__(
        self,
        storage: PatientStorage,
        files: Sequence[FileEntry],
        plan: ReadPlan,
        *,
        threads: int,
    ) -> None:
        self._storage = storage
        self._files = files
        self._plan = plan
        self._asked: SimpleQueue[tuple[Chunk, Sequence[memoryview], Future[None]] | None] = SimpleQueue()
        # Daemons, unlike an executor's threads: a read that storage never answers must not hold up the exit.
        self._threads = [
            threading.Thread(target=self._serve, name=f"fastload-read-{n}", daemon=True)
            for n in range(threads)
        ]
        self.watch = Stopwatch()

    def submit(self, chunk: Chunk, buffers: Sequence[memoryview]) -> Future[None]:
        """Starts to fill buffers, together as long as the chunk, with its bytes.

        The future raises `StorageError` if storage fails for good, `Interrupted` after `stop`.
        """
        future: Future[None] = Future()
        self._asked.put((chunk, buffers, future))
        return future

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets reads that have not begun, and retries, end at once."""
        self._storage.stop()

    def close(self) -> None:
        """Ends the threads, without waiting for a read that storage does not answer."""
        for _ in self._threads:
            self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            chunk, buffers, future = asked
            try:
                self._read(chunk, buffers)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _read(self, chunk: Chunk, buffers: Sequence[memoryview]) -> None:
        rest = list(buffers)
        with self.watch:
            for span in self._plan.spans(chunk):
                taken, rest = take(rest, span.nbytes)
                file = self._files[span.file]
                self._storage.read_into(file.name, span.offset, taken, file.version)
