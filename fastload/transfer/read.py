"""Fills buffers with chunks, in some threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from operator import itemgetter
from queue import SimpleQueue

from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background
from fastload.errors import StorageError
from fastload.formats.manifest import FileEntry
from fastload.storage import PatientStorage, take
from fastload.storage.base import ByteCounter
from fastload.transfer.plan import Span
from fastload.transfer.verify import Damage, Verifier

__all__ = ["ChunkReader"]


class ChunkReader:
    """Reads chunks in the background.

    Args:
        storage: Where from.
        files: The files of the manifest.
        threads: Chunks read at once.
        verifier: Checks what was read; None if there is nothing to check it against.
        on_damage: Called with each block that is not as it was written; what it raises ends the read.

    Attributes:
        watch: Time with at least one read under way.
        verified: Bytes that were checked.
        rereads: Blocks read again because they had not.
    """

    def __init__(
        self,
        storage: PatientStorage,
        files: Sequence[FileEntry],
        *,
        threads: int,
        verifier: Verifier | None,
        on_damage: Callable[[Damage], object],
    ) -> None:
        self._storage = storage
        self._files = files
        self._asked: SimpleQueue[tuple[Sequence[Span], Sequence[memoryview], Future[None]] | None] = (
            SimpleQueue()
        )
        # Unlike an executor's threads: a read that storage never answers must not hold up the exit.
        self._threads = [background(self._serve, f"fastload-read-{n}") for n in range(threads)]
        self._lock = threading.Lock()
        self._num_serving = 0
        self._num_unanswered = 0
        self._at_end: Callable[[], None] | None = None
        self._under_way: dict[int, tuple[float, Span]] = {}  # of each thread: since when, and what
        self._verifier = verifier
        self._on_damage = on_damage
        self.watch = Stopwatch()
        self.verified = ByteCounter()
        self.rereads = ByteCounter()

    def submit(self, spans: Sequence[Span], buffers: Sequence[memoryview]) -> Future[None]:
        """Starts to fill buffers, together as long as the spans of a chunk, with their bytes.

        The future raises `StorageError` if storage fails for good, what `on_damage` raises, `Interrupted`
        after `stop`.
        """
        future: Future[None] = Future()
        with self._lock:
            self._num_unanswered += 1
        self._asked.put((spans, buffers, future))
        return future

    def start(self) -> None:
        """Starts the threads."""
        self._num_serving = len(self._threads)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets reads that have not begun, and retries, end at once."""
        self._storage.stop()

    def overdue(self, at_least_s: float) -> StorageError | None:
        """Returns what to say of the read that has taken longest; None if none has for so long."""
        with self._lock:
            since, span = min(self._under_way.values(), default=(0.0, None), key=itemgetter(0))
        if span is None or (for_s := time.monotonic() - since) < at_least_s:
            return None
        name = self._files[span.file].name
        return StorageError(
            f"storage did not answer within {for_s:.1f} s",
            url=f"{self._storage.url}/{name}" if name else self._storage.url,
            offset=span.offset,
            nbytes=span.nbytes,
        )

    def close(self, *, wait_s: float) -> bool:
        """Ends the threads, and waits a little for reads under way.

        Returns:
            Whether no read is under way any more, even if a thread has not ended yet. If one is, storage
            does not answer; such a read still writes into its buffers, which it keeps alive, should
            storage answer after all.
        """
        deadline = time.monotonic() + wait_s
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            return not self._num_unanswered

    def at_end(self, call: Callable[[], None]) -> None:
        """Calls something once no read is under way any more: now, or in the last thread to end."""
        with self._lock:
            if self._num_serving:
                self._at_end = call
                return
        call()

    def _serve(self) -> None:
        try:
            self._serve_all()
        finally:
            with self._lock:
                self._num_serving -= 1
                call = self._at_end if not self._num_serving else None
            if call is not None:
                call()

    def _serve_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            spans, buffers, future = asked
            del asked
            try:
                self._read(spans, buffers)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del buffers, future  # a thread that waits for more keeps no memory

    def _read(self, spans: Sequence[Span], buffers: Sequence[memoryview]) -> None:
        rest = list(buffers)
        try:
            for span in spans:
                taken, rest = take(rest, span.nbytes)
                self._read_span(span, taken)
                if self._verifier is not None:
                    self._verify(self._verifier, span, taken)
        finally:
            with self._lock:
                self._num_unanswered -= 1

    def _read_span(self, span: Span, buffers: Sequence[memoryview]) -> None:
        with self.watch.span(nbytes=span.nbytes), self._reading(span):
            file = self._files[span.file]
            self._storage.read_into(file.name, span.offset, buffers, file.version)

    def _read_again(self, span: Span, buffers: Sequence[memoryview]) -> None:
        self.rereads.add(1)
        self._read_span(span, buffers)

    def _verify(self, verifier: Verifier, span: Span, buffers: Sequence[memoryview]) -> None:
        for damage in verifier.damage(span, buffers, self._read_again):
            self._on_damage(damage)
        self.verified.add(span.nbytes)

    @contextlib.contextmanager
    def _reading(self, span: Span) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self._under_way[me] = time.monotonic(), span
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[me]
