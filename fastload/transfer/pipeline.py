"""read → exchange → place, a bounded number of rounds at a time, all three at once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Protocol

from torch import Tensor

from fastload.base.memory import host_view
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background
from fastload.errors import DeadlineExceeded, FastloadError, Interrupted, StorageError
from fastload.ranks.world import World
from fastload.transfer.plan import NOTICE_BYTES, Chunk, ReadPlan
from fastload.transfer.read import ChunkReader
from fastload.transfer.rounds import FAILED, UNREADABLE, Exchange, Round, Slots, wait

__all__ = ["Pipeline", "Places", "read_threads"]

_MAX_READ_THREADS = 8
_TICK_S = 0.05
_LEAST_PIECE_BYTES = 16 << 10  # on average; to read into shorter pieces takes longer than to copy them


def read_threads(asked: int | None, *, depth: int, exchanges: bool, ranks_on_host: int) -> int:
    """Returns how many reads a rank has in flight.

    As asked. Else, with an exchange, half of the slabs: while those are read the others are exchanged.
    Without one, this rank's part of the host's cores, at least 2.
    """
    if asked is not None:
        return asked
    if exchanges:
        return max(1, depth // 2)
    fair = 2 * (os.cpu_count() or 1) // ranks_on_host
    return min(depth, max(2, min(fair, _MAX_READ_THREADS)))


class Places(Protocol):
    """Where the bytes go: tensors (`Placer`), or files (`FilePlacer`)."""

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns host memory that a range of the wanted space belongs to, in at most so many pieces.

        None if it is to be placed.
        """
        ...

    def place(self, start: int, data: Tensor) -> None:
        """Takes a range of the wanted space; it may go on doing so until `settle`."""
        ...

    def settle(self) -> None:
        """Returns once everything placed so far has left the buffers it came from."""
        ...


class Pipeline:
    """Moves all rounds of a plan through read, exchange and place.

    Three parties work at once: the reader's threads read this rank's chunks, one thread hands them to
    the exchange in plan order, and the caller's thread places what has arrived and posts the next round
    into the slab that this frees. So at most `plan.depth` rounds are in flight. A chunk that belongs into
    one piece of host memory is read, received and passed on right there; others go through the slab.

    A rank that cannot read sends a notice in place of its chunk, and goes on with the rounds that are in
    flight: every rank learns of it in the same round, and none is left waiting inside a collective.
    What is left is then dealt anew, to the ranks that can still read.

    Args:
        world: The ranks; a failure outside of the rounds is learned from it.
        plan: What to read in which round.
        rank: This rank's place in the plan.
        reader: Reads its chunks.
        exchange: Joins the chunks of all ranks.
        placer: Takes them to where they belong.
        progress: Called with (bytes placed, bytes wanted).

    Attributes:
        broken: Readers that dropped out; the same on every rank.
        received_bytes: Bytes placed that other ranks have read.
        place_watch: Time spent placing.

    Raises:
        MemoryError: The slabs do not fit into memory.
    """

    def __init__(
        self,
        world: World,
        plan: ReadPlan,
        rank: int,
        reader: ChunkReader,
        exchange: Exchange,
        placer: Places,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._world = world
        self._plan = plan
        self._rank = rank
        self._reader = reader
        self._exchange = exchange
        self._placer = placer
        self._progress = progress
        self._depth = min(plan.depth, plan.num_rounds)
        own_bytes = plan.largest_slot_bytes(rank)
        self._slabs = [exchange.allocate(plan.slab_bytes, own_bytes) for _ in range(self._depth)]
        self._slots: dict[int, tuple[list[int], Slots]] = {}
        self._staged = plan.world_size > 1
        self._first_index = 0
        self._distress = b""
        self._posted: deque[tuple[Round, Future[None] | None]] = deque()
        self._ready = threading.Condition()
        self._complete = False
        self._ended = False
        self._read_error: BaseException | None = None
        self._starter = background(self._start_all, "fastload-start")
        self._placed_bytes = 0
        self._total_bytes = plan.total_bytes
        self.broken: set[int] = set()
        self.received_bytes = 0
        self.place_watch = Stopwatch()

    @property
    def drop_out(self) -> str:
        """Why this rank stopped to read while the load went on; empty if it did not."""
        return f"stopped reading: {self._read_error}" if self._rank in self.broken else ""

    @property
    def staging_bytes(self) -> int:
        """Bytes of all slabs; they take no memory if everything is read to where it belongs."""
        if not self._staged:
            return 0
        return sum(slab.numel() + (own.numel() if own is not None else 0) for slab, own in self._slabs)

    @property
    def watches(self) -> dict[str, Stopwatch]:
        """The stopwatch of each stage."""
        return {"read": self._reader.watch, "exchange": self._exchange.watch, "place": self.place_watch}

    def run(self, distress: bytes) -> None:
        """Returns when every byte is in place on this rank.

        Args:
            distress: 16 random bytes, the same on all ranks, which tell a notice from a chunk.

        Raises:
            FastloadError: This rank failed, or learned that another did (`Interrupted`).
        """
        if self._plan.num_rounds == 0:
            return
        self._distress = distress
        self._exchange.connect(give_up=self._world.alarmed)
        self._reader.start()
        self._starter.start()
        try:
            plan: ReadPlan | None = self._plan
            while plan is not None:
                self._plan = plan
                plan = self._run_plan(plan)
            self._complete = True
        except Interrupted:
            # Whoever ended the load, that this rank could not read is a part of why: those who wait for its
            # chunk may lose patience before it does.
            self._read_error = self._read_error or self._reader.overdue(self._world.patience_s / 2)
            if self._read_error is not None:
                raise self._read_error from None
            raise
        finally:
            if not self._complete:
                self._reader.stop()
            with self._ready:
                self._ended = True
                self._ready.notify()

    def _run_plan(self, plan: ReadPlan) -> ReadPlan | None:
        """Runs a plan to its end, or until a reader drops out; then returns the plan of what is left."""
        rounds: deque[Round] = deque()
        lacking: list[tuple[int, int]] = []
        broken: set[int] = set()
        num_posted = 0
        self._slots.clear()
        for index in range(plan.num_rounds):
            while not broken and len(rounds) < self._depth and num_posted < plan.num_rounds:
                rounds.append(self._post(plan, num_posted))
                num_posted += 1
            if not rounds:
                break
            unread = self._finish(plan, index, rounds)
            self._recycle(rounds.popleft())
            broken.update(unread)
            lacking += [(index, rank) for rank in unread]
        self._first_index += num_posted
        if not broken:
            return None
        self.broken |= broken
        left = plan.without(broken, lacking, num_posted)
        if left is None:
            raise self._read_error or Interrupted("no rank is left that can read")
        return left

    def close(self) -> None:
        """Ends the threads. After a failure that may take a moment, so the others are to be told before."""
        if self._starter.is_alive():
            self._starter.join(self._world.grace_s)
        self._exchange.close()
        self._posted.clear()
        self._read_error = None  # else error → traceback → frame → self → error would keep the slabs alive

    # The caller's thread

    def _post(self, plan: ReadPlan, index: int) -> Round:
        number = index % self._depth
        slab, own = self._slabs[number]
        sizes = plan.slot_sizes(index)
        if number not in self._slots or self._slots[number][0] != sizes:
            self._slots[number] = sizes, Slots.cut(slab, sizes)
        work = self._lay_out(plan, index, self._slots[number][1], own)
        chunk = plan.chunk(index, self._rank)
        self._exchange.post(work)
        future = self._submit(plan, work, chunk) if chunk.nbytes else None
        with self._ready:
            self._posted.append((work, future))
            self._ready.notify()
        return work

    def _lay_out(self, plan: ReadPlan, index: int, slots: Slots, own: Tensor | None) -> Round:
        """Finds the memory for the chunks of a round: where they belong, else in the slab."""
        if own is not None:
            own = own[: len(slots.each[self._rank])]
            return Round(self._first_index + index, self._distress, slots, slots.each, own)
        parts, placed = [slot[:0] for slot in slots.each], set()
        for rank in slots.owners:
            chunk = plan.chunk(index, rank)
            targets = self._targets(plan, chunk, at_most=1) if chunk.nbytes >= NOTICE_BYTES else None
            if targets is not None:
                parts[rank] = targets[0]
                placed.add(rank)
            else:
                parts[rank] = slots.each[rank][: max(chunk.nbytes, NOTICE_BYTES)]
        return Round(self._first_index + index, self._distress, slots, parts, parts[self._rank], placed)

    def _submit(self, plan: ReadPlan, work: Round, chunk: Chunk) -> Future[None]:
        """Has a chunk read; with nobody to pass it on to, into several tensors at once too."""
        spans = plan.spans(chunk)
        at_most = 1 + chunk.nbytes // _LEAST_PIECE_BYTES
        if plan.world_size == 1 and (targets := self._targets(plan, chunk, at_most)) is not None:
            work.placed.add(self._rank)
            return self._reader.submit(spans, [host_view(target) for target in targets])
        self._staged |= self._rank not in work.placed
        return self._reader.submit(spans, [host_view(work.own[: chunk.nbytes])])

    def _targets(self, plan: ReadPlan, chunk: Chunk, at_most: int) -> list[Tensor] | None:
        """Returns the host memory that a chunk belongs to; None if it has to be placed."""
        pieces: list[Tensor] = []
        for span in plan.spans(chunk):
            targets = self._placer.targets(span.start, span.nbytes, at_most - len(pieces))
            if targets is None:
                return None
            pieces += targets
        return pieces

    def _finish(self, plan: ReadPlan, index: int, rounds: Sequence[Round]) -> list[int]:
        """Places the first round in flight once it is here; returns the readers whose chunks it lacks."""
        work = rounds[0]
        notices = self._await(work)
        if lost := [rank for rank, status in notices.items() if status != UNREADABLE]:
            if not self._exchange.private:
                self._end(rounds)
            raise Interrupted(f"round {work.index}: rank {lost[0]} is lost")
        with self.place_watch.span(round=work.index):
            for rank in plan.readers:
                if rank not in notices:
                    self._place(plan, plan.chunk(index, rank), work, rank)
        if self._progress is not None:
            self._progress(self._placed_bytes, self._total_bytes)
        return [rank for rank in notices if plan.chunk(index, rank).nbytes]

    def _await(self, work: Round) -> dict[int, int]:
        """Returns the notices of a round once it is here."""
        try:
            wait(work, until_s=self._world.patience_s, give_up=self._world.alarmed)
        except DeadlineExceeded as late:
            raise self._reason(work, late) from None
        self._world.moved()
        return work.notices()

    def _end(self, rounds: Sequence[Round]) -> None:
        """Lets rounds end that every rank has posted.

        A collective that some ranks enter and others do not would meet the next one of the caller's.
        """
        with contextlib.suppress(FastloadError):  # there is a cause already
            for work in rounds:
                self._await(work)

    def _place(self, plan: ReadPlan, chunk: Chunk, work: Round, rank: int) -> None:
        position = 0
        for span in [] if rank in work.placed else plan.spans(chunk):
            self._placer.place(span.start, work.parts[rank][position : position + span.nbytes])
            position += span.nbytes
        self._placed_bytes += chunk.nbytes
        if rank != self._rank:
            self.received_bytes += chunk.nbytes

    def _reason(self, work: Round, late: DeadlineExceeded) -> FastloadError:
        """Somebody else's read, or wire, unless this rank has not even handed over its own chunk."""
        overdue = None if work.started.is_set() else self._reader.overdue(at_least_s=0.0)
        return overdue or Interrupted(str(late))

    def _recycle(self, work: Round) -> None:
        try:
            self._exchange.release(work, until_s=self._world.patience_s, give_up=self._world.alarmed)
        except DeadlineExceeded as late:
            raise Interrupted(str(late)) from None
        self._placer.settle()

    # The starter's thread

    def _start_all(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._posted or self._ended)
                if not self._posted:
                    return
                work, future = self._posted.popleft()
            if future is not None and not self._is_done(future):
                return
            # Not result(): a raised error has this frame in its traceback, and so, in a cycle, itself.
            error = future.exception() if future is not None else None
            if error is not None:
                work.mark(work.own, self._note(error))
            try:
                self._exchange.start(work)
            except Exception as error:
                work.broke(error)
                work.done.set()

    def _note(self, error: BaseException) -> int:
        """Keeps the first error of a read, and returns what the others are to be told."""
        if self._read_error is None:
            self._read_error = error
            self._reader.stop()  # this rank drops out: what it has not begun to read, others will
        return UNREADABLE if isinstance(self._read_error, StorageError) else FAILED

    def _is_done(self, future: Future[None]) -> bool:
        """Waits for a read, good or bad, and no longer than the load goes on: storage may never answer."""
        while not self._ended:
            with contextlib.suppress(NotYet):
                future.exception(_TICK_S)
                return True
        return False
