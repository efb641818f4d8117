"""Hands what was read to the transport, in the order of the rounds."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

from fastload.base.threads import await_done, background
from fastload.errors import FastloadError, Interrupted, StorageError
from fastload.transfer.read import ChunkReader
from fastload.transfer.transport import FAILED, UNREADABLE, Round, Transport

__all__ = ["Starter"]


class Starter:
    """A thread that starts each round once this rank's chunk has been read, or could not be.

    Args:
        reader: Reads the chunks; is stopped once one of them could not be read.
        transport: Takes them to the other ranks.

    Attributes:
        read_error: What kept this rank from reading a chunk, or from packing it; None if nothing did.
        note: The same as text, empty if nothing did; it outlasts `close`.
        unread_from: The round of the first chunk that it could not read; None if it could read all.
    """

    def __init__(self, reader: ChunkReader, transport: Transport) -> None:
        self.read_error: BaseException | None = None
        self.note = ""
        self.unread_from: int | None = None
        self._reader = reader
        self._transport = transport
        self._posted: deque[tuple[Round, Future[None] | None]] = deque()
        self._ready = threading.Condition()
        self._ended = False
        self._thread = background(self._start_all, "fastload-start")

    @property
    def is_lost(self) -> bool:
        """Whether this rank can neither read nor help the others any more."""
        return self.read_error is not None and not isinstance(self.read_error, StorageError)

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, work: Round, read: Future[None] | None) -> None:
        """Has a round started as soon as a read has ended; at once if this rank has no chunk in it."""
        with self._ready:
            self._posted.append((work, read))
            self._ready.notify()

    def end(self) -> None:
        """Lets the thread end after what it does now."""
        with self._ready:
            self._ended = True
            self._ready.notify()

    def close(self, *, wait_s: float) -> None:
        """Waits for the thread, and lets go of everything."""
        if self._thread.is_alive():
            self._thread.join(wait_s)
        self._posted.clear()
        self.read_error = None  # else error → traceback → frame → self → error would keep the buffers alive

    def _start_all(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._posted or self._ended)
                if not self._posted:
                    return
                work, read = self._posted.popleft()
            if read is not None:
                try:  # no longer than the load goes on: storage may never answer
                    await_done(read, give_up=lambda: self._ended)
                except Interrupted:
                    return
            unpacked = _pack(work)  # even what could not be read, for which others wait
            # Not result(): a raised error has this frame in its traceback, and so, in a cycle, itself.
            error = unpacked or (read.exception() if read is not None else None)
            if error is not None:
                work.status = self._note(error, work.index)
            try:
                self._transport.start(work)
            except Exception as error:
                self._note(error, work.index)
                work.broke(error)
                work.done.set()

    def _note(self, error: BaseException, index: int) -> int:
        """Keeps the first error, or one that is worse; returns what the others are to be told."""
        is_first = self.read_error is None
        if is_first or not isinstance(error, FastloadError):
            self.read_error, self.note = error, str(error)
        if is_first:
            self.unread_from = index
            self._reader.stop()  # this rank drops out: what it has not begun to read, others will
        return FAILED if self.is_lost else UNREADABLE


def _pack(work: Round) -> Exception | None:
    """Makes the messages of a chunk; returns what kept this rank from it."""
    try:
        work.pack(work)
    except Exception as error:
        return error
    return None
