"""read → exchange → place, a bounded number of rounds at a time, all three at once."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

from torch import Tensor

from fastload.errors import DeadlineExceeded, Interrupted
from fastload.loading.place import Placer
from fastload.loading.plan import Chunk, ReadPlan
from fastload.loading.read import ChunkReader
from fastload.loading.rounds import Exchange, Round, wait
from fastload.memory import host_view
from fastload.report import Stopwatch
from fastload.world import World

__all__ = ["Pipeline", "read_threads"]

_MAX_READ_THREADS = 8
_TICK_S = 0.05


def read_threads(asked: int | None, *, depth: int, ranks_on_host: int) -> int:
    """Returns how many reads a rank has in flight: as asked, or its part of the host's cores, at least 2."""
    fair = 2 * (os.cpu_count() or 1) // ranks_on_host
    return asked if asked is not None else min(depth, max(2, min(fair, _MAX_READ_THREADS)))


class Pipeline:
    """Moves all rounds of a plan through read, exchange and place.

    Three parties work at once: the reader's threads fill this rank's slots, one thread hands filled
    slots to the exchange in plan order, and the caller's thread places what has arrived and posts
    the next round into the slab that this frees. So at most `plan.depth` rounds are in flight.

    A rank that cannot read says so in its slot's status word, and goes on with the rounds that are in
    flight: every rank learns of it in the same round, and none is left waiting inside a collective.

    Args:
        world: The ranks; a failure outside of the rounds is learned from it.
        plan: What to read in which round.
        rank: This rank's place in the plan.
        reader: Reads its chunks.
        exchange: Joins the chunks of all ranks.
        placer: Takes them to the tensors.
        progress: Called with (bytes placed, bytes wanted).

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
        placer: Placer,
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
        own_bytes = plan.slot_bytes(0, rank) if plan.num_rounds else 0
        self._slabs = [exchange.allocate(plan.slab_bytes, own_bytes) for _ in range(self._depth)]
        self._posted: deque[tuple[Round, Future[None] | None]] = deque()
        self._ready = threading.Condition()
        self._ended = False
        self._read_error: BaseException | None = None
        self._starter = threading.Thread(target=self._start_all, name="fastload-start", daemon=True)
        self.place_watch = Stopwatch()
        self.exposed_s = 0.0

    @property
    def staging_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() + (own.numel() if own is not None else 0) for slab, own in self._slabs)

    def run(self) -> None:
        """Returns when every byte is in place on this rank.

        Raises:
            FastloadError: This rank failed, or learned that another did (`Interrupted`).
        """
        if self._plan.num_rounds == 0:
            return
        self._exchange.connect()
        self._reader.start()
        self._starter.start()
        rounds: deque[Round] = deque()
        try:
            for index in range(self._plan.num_rounds):
                while len(rounds) < self._depth and index + len(rounds) < self._plan.num_rounds:
                    rounds.append(self._post(index + len(rounds)))
                self._finish(rounds[0])
                self._recycle(rounds.popleft())
        except BaseException:
            self._reader.stop()
            raise
        finally:
            with self._ready:
                self._ended = True
                self._ready.notify()

    def close(self) -> None:
        """Ends the threads. After a failure that may take a moment, so the others are to be told before."""
        if self._starter.is_alive():
            self._starter.join(self._world.grace_s)
        self._exchange.close()
        self._posted.clear()
        self._read_error = None  # else error → traceback → frame → self → error would keep the slabs alive

    # The caller's thread

    def _post(self, index: int) -> Round:
        slab, own = self._slabs[index % self._depth]
        slots = self._slots(slab, index)
        work = Round(index, slots[self._rank] if own is None else own[: len(slots[self._rank])], slots)
        chunk = self._plan.chunk(index, self._rank)
        self._exchange.post(work)
        future = self._reader.submit(chunk, self._buffers(work, chunk)) if chunk.nbytes else None
        with self._ready:
            self._posted.append((work, future))
            self._ready.notify()
        return work

    def _slots(self, slab: Tensor, index: int) -> list[Tensor]:
        sizes = [self._plan.slot_bytes(index, rank) for rank in range(self._plan.world_size)]
        return list(slab[: sum(sizes)].split(sizes))

    def _buffers(self, work: Round, chunk: Chunk) -> Sequence[memoryview]:
        """Returns where a chunk is read to: the tensors themselves where nobody else needs the slot."""
        if self._plan.world_size == 1:
            targets = self._placer.targets(chunk.start, chunk.nbytes)
            if targets is not None:
                work.placed = True
                return targets
        return [host_view(work.own[: chunk.nbytes])]

    def _finish(self, work: Round) -> None:
        began = time.perf_counter()
        try:
            wait(work, until_s=self._world.patience_s, give_up=self._world.alarmed)
            failed = self._exchange.failed_ranks(work)
            if failed:
                raise Interrupted(f"round {work.index}: rank {failed[0]} could not deliver its chunk")
        except DeadlineExceeded as late:
            # Somebody else's read, or wire, unless this rank has not even handed over its own chunk.
            overdue = None if work.started.is_set() else self._reader.overdue(self._world.patience_s)
            raise overdue or Interrupted(str(late)) from None
        except Interrupted:
            if self._read_error is not None:
                raise self._read_error from None
            raise
        self.exposed_s += max(0.0, time.perf_counter() - max(began, work.started_at))
        with self.place_watch:
            for rank in self._plan.readers:
                chunk = self._plan.chunk(work.index, rank)
                if chunk.nbytes and not work.placed:
                    self._placer.place(chunk.start, work.slots[rank][: chunk.nbytes])
        if self._progress is not None:
            last = self._plan.chunk(work.index, self._plan.readers[-1])
            self._progress(last.start + last.nbytes, self._plan.total_bytes)

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
            try:
                if future is not None and not self._is_read(future):
                    return
            except BaseException as error:
                self._read_error = self._read_error or error
            work.mark(failed=self._read_error is not None)
            work.started_at = time.perf_counter()
            try:
                self._exchange.start(work)
            except Exception as error:
                work.broke(error)
                work.done.set()

    def _is_read(self, future: Future[None]) -> bool:
        """Waits for a read, and no longer than the load goes on: storage may never answer."""
        while not self._ended:
            with contextlib.suppress(NotYet):
                future.result(_TICK_S)
                return True
        return False
