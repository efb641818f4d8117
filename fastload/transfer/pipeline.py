"""Runs the rounds of a plan: read, pack, transport and place, several rounds at a time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future

from fastload.base.memory import host_view
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import await_done, background
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, FastloadError, Interrupted, StorageError
from fastload.transfer.buffers import Arrival, Buffers, Destinations, OwnChunk, Plan
from fastload.transfer.plan import TransferPlan
from fastload.transfer.read import ChunkReader
from fastload.transfer.transport import FAILED, UNREADABLE, Round, Transport, wait


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


class ReadAhead:
    """The chunks of this rank whose rounds are not in flight yet.

    Args:
        rank: This one.
        reader: Reads them.
        buffers: Has the memory for them.
    """

    def __init__(self, rank: int, reader: ChunkReader, buffers: Buffers) -> None:
        self._rank = rank
        self._reader = reader
        self._buffers = buffers
        self._begun: deque[tuple[int, OwnChunk, Future[None]]] = deque()
        self._next = 0

    def read(self, plan: Plan, num_done: int) -> None:
        """Begins to read what may be read, once so many rounds of a plan are over."""
        if not isinstance(plan, TransferPlan) or not plan.ahead:
            return
        end = num_done + plan.ahead
        for index in plan.rounds_of(self._rank, self._next, end):
            own = self._buffers.lay_own(plan, index)
            if own.nbytes:
                read = self._reader.submit(own.spans, [host_view(own.data)])
                self._begun.append((index, own, read))
        self._next = end

    def take(self, round_index: int) -> tuple[OwnChunk | None, Future[None] | None]:
        """Returns this rank's chunk of a round, and what reads it; None if none was read ahead."""
        if not self._begun or self._begun[0][0] != round_index:
            return None, None
        _, own, read = self._begun.popleft()
        return own, read

    def drop(self, *, give_up: Callable[[], bool]) -> None:
        """Ends with a plan: waits until nothing is written any more to where others may write.

        Raises:
            Interrupted: `give_up` said so.
        """
        while self._begun:
            *_, read = self._begun.popleft()
            await_done(read, give_up=give_up)
        self._next = 0

    def forget(self) -> None:
        """Lets go of everything; what is still written keeps its own memory."""
        self._begun.clear()


_MAX_READ_THREADS = 8


def read_threads(num_threads: int | None, plan: Plan, *, ranks_on_host: int, in_order: bool) -> int:
    """Returns how many reads a rank has in flight.

    As many as the option says. Else one, if storage wants them in order. Else, with an exchange, what the
    plan needs. Without one, this rank's part of the host's cores, at least 2.
    """
    if num_threads is not None:
        return num_threads
    if in_order:
        return 1
    if plan.exchanges:
        return plan.num_reads
    fair = 2 * (os.cpu_count() or 1) // ranks_on_host
    return min(plan.depth, max(2, min(fair, _MAX_READ_THREADS)))


class Pipeline:
    """Moves all rounds of a plan through read, exchange and place.

    Three parties work at once: the reader's threads read this rank's chunks, one thread hands them to
    the transport in plan order, and the caller's thread places what has arrived and posts the next round
    into the buffer that this frees. So at most `plan.depth` rounds are in flight. A chunk that belongs into
    one piece of host memory is read, received and passed on right there; others go through the buffer.
    Where readers take turns, their chunks are read ahead of the rounds in flight.

    A rank that cannot read says so beside its chunk, and goes on with the rounds that are in flight: none is
    left waiting inside a collective. Where every rank learns of it in the same round, what is left is then
    dealt anew, to the ranks that can still read. Else `unread_from` is to be told to the others afterwards.

    Args:
        world: The ranks; a failure outside of the rounds is learned from it.
        plan: What to read in which round.
        reader: Reads this rank's chunks.
        transport: Brings the messages of each chunk to the ranks that want them.
        destinations: Where the bytes go.
        buffers: Those of the plan, the transport and the destinations.
        progress: Called with (bytes placed, bytes wanted).

    Attributes:
        broken: Readers that dropped out; the same on every rank.
        ends_before: Asked with the number of a round, counted over all plans, before it is begun: True ends
            the transfer with the rounds in flight. All ranks have to end it with the same one.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        reader: ChunkReader,
        transport: Transport,
        destinations: Destinations,
        buffers: Buffers,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._world = world
        self._plan = plan
        self._reader = reader
        self._transport = transport
        self._placing = _Placing(world.rank, destinations, progress)
        self._buffers = buffers
        self._starter = Starter(reader, transport)
        self._ahead = ReadAhead(world.rank, reader, buffers)
        self._first_index = 0
        self._num_posted = 0
        self.broken: set[int] = set()
        self.ends_before: Callable[[int], bool] = _never

    @property
    def read_error(self) -> BaseException | None:
        """What kept this rank from reading a chunk; None if nothing did."""
        return self._starter.read_error

    @property
    def unread_from(self) -> int | None:
        """The first round that lacks this rank's chunk, where the others do not know of it; None if none."""
        return None if self._plan.in_lockstep else self._starter.unread_from

    @property
    def drop_out(self) -> str:
        """Why this rank stopped to read while the load went on; empty if it did not."""
        return f"stopped reading: {self._starter.note}" if self._starter.note else ""

    @property
    def received_bytes(self) -> int:
        """Bytes placed that other ranks have read."""
        return self._placing.received_bytes

    @property
    def placed_bytes(self) -> int:
        """Bytes placed, whoever has read them."""
        return self._placing.placed_bytes

    @property
    def bytes_in(self) -> int:
        """Bytes that came in from ranks that share no memory with this one."""
        return self._transport.bytes_in

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers; they take no memory if everything is read to where it belongs."""
        return self._buffers.nbytes

    @property
    def watches(self) -> dict[str, Stopwatch]:
        """The stopwatch of each stage."""
        return {"read": self._reader.watch, "exchange": self._transport.watch, "place": self._placing.watch}

    @property
    def num_posted(self) -> int:
        """Rounds that this rank has begun, counted over all plans."""
        return self._num_posted

    def run(self) -> None:
        """Returns when every byte is in place on this rank.

        Raises:
            FastloadError: This rank failed, or learned that another did (`Interrupted`).
        """
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[list[tuple[int, int]]]:
        """Does the same round by round; while it pauses, the rounds after that are read and exchanged.

        Yields:
            (start, length) of what of a round has been read or received right where it belongs; the rest of
            it was placed. Until the next step, its bytes stay in the buffer that they were placed from.

        Raises:
            FastloadError: As above.
        """
        if self._plan.num_rounds == 0:
            return
        self._transport.connect(give_up=self._world.peer_failed)
        self._starter.begin()
        try:
            plan: Plan | None = self._plan
            while plan is not None:
                plan = yield from self._run_plan(plan)
        except BaseException as error:
            self._reader.stop()
            if not isinstance(error, Interrupted):
                raise
            # Whoever ended the load, that this rank could not read is a part of why: those who wait for its
            # chunk may lose patience before it does.
            cause = self._starter.read_error or self._reader.overdue(self._world.patience_s / 2)
            if cause is None:
                raise
            try:
                raise cause from None
            finally:
                del cause  # else error → traceback → frame → error would keep all their memory alive
        finally:
            self._starter.end()

    def _run_plan(self, plan: Plan) -> Generator[list[tuple[int, int]], None, Plan | None]:
        """Runs a plan to its end, or until a reader drops out; then returns the plan of what is left."""
        rounds: deque[Round] = deque()
        lacking: list[tuple[int, int]] = []
        broken: set[int] = set()
        num_posted = 0
        has_ended = False
        depth = min(self._buffers.depth, plan.ahead or plan.num_rounds)
        for index in range(plan.num_rounds):
            if not broken:
                self._ahead.read(plan, index)
            while not broken and not has_ended and len(rounds) < depth and num_posted < plan.num_rounds:
                if has_ended := self.ends_before(self._first_index + num_posted):
                    break
                rounds.append(self._post(plan, num_posted))
                num_posted += 1
                self._num_posted = self._first_index + num_posted
            if not rounds:
                break
            unread = self._finish(plan, index, rounds[0])
            yield _ranges_in_place(rounds[0])
            self._recycle(rounds.popleft())
            if plan.in_lockstep:
                broken.update(unread)
                lacking += [(index, rank) for rank in unread]
            elif self._starter.read_error is not None and plan.readers == (self._world.rank,):
                raise self._starter.read_error  # nobody can read what is left
        self._first_index += num_posted
        if has_ended:
            self._ahead.drop(give_up=self._world.peer_failed)
        if has_ended or not broken:
            return None
        self.broken |= broken
        self._ahead.drop(give_up=self._world.peer_failed)
        left = plan.without(broken, lacking, num_posted)
        if left is None:
            raise self._starter.read_error or Interrupted("no rank is left that can read")
        return left

    def close(self) -> None:
        """Ends the threads. After a failure that may take a moment, so the others are to be told before."""
        self._starter.close(wait_s=self._world.grace_s)
        self._ahead.forget()
        self._transport.close()
        self._buffers.free()

    def _post(self, plan: Plan, index: int) -> Round:
        """Makes a round ready to receive, and has this rank's chunk read."""
        number = self._first_index + index
        try:
            self._transport.reserve(number, until_s=self._world.patience_s, give_up=self._is_lost)
        except DeadlineExceeded as late:
            raise Interrupted(str(late)) from None
        own, read = self._ahead.take(index)
        work = self._buffers.lay_out(plan, index, number, own)
        self._transport.post(work)
        if work.spans and read is None:
            read = self._reader.submit(work.spans, [host_view(buffer) for buffer in work.buffers])
        self._starter.post(work, read)
        return work

    def _is_lost(self) -> bool:
        """Whether some rank failed: also this one in its other threads, since others may wait for it."""
        return self._world.peer_failed() or self._starter.is_lost

    def _finish(self, plan: Plan, index: int, work: Round) -> list[int]:
        """Places a round once it is here; returns the readers whose chunks it lacks."""
        statuses = self._await(work)
        if lost := [rank for rank, status in statuses.items() if status != UNREADABLE]:
            raise Interrupted(f"round {work.index}: rank {lost[0]} is lost")
        self._placing.place(work.index, self._buffers.arrivals(work), self._buffers.wanted_bytes)
        # In the same order on all ranks: what is left is dealt by it.
        return [rank for rank in sorted(statuses) if plan.chunk(index, rank).nbytes]

    def _await(self, work: Round) -> dict[int, int]:
        """Returns what is the matter with chunks of a round once it is here."""
        try:
            wait(work, until_s=self._world.patience_s, give_up=self._world.peer_failed)
        except DeadlineExceeded as late:
            raise self._reason(work, late) from None
        self._world.note_progress()
        return work.statuses

    def _reason(self, work: Round, late: DeadlineExceeded) -> FastloadError:
        """Somebody else's read, or wire, unless this rank has not even handed over its own chunk."""
        overdue = None if work.started.is_set() else self._reader.overdue(at_least_s=0.0)
        return overdue or Interrupted(str(late))

    def _recycle(self, work: Round) -> None:
        # Before others may overwrite what copies to the device still read.
        self._placing.settle()
        try:
            self._transport.release(work, until_s=self._world.patience_s, give_up=self._world.peer_failed)
        except DeadlineExceeded as late:
            raise Interrupted(str(late)) from None


def _never(number: int) -> bool:
    return False


def _ranges_in_place(work: Round) -> list[tuple[int, int]]:
    """Returns what of a round came right to where it belongs: (start, length) in what this rank wants."""
    deliveries = (each for each in (*work.kept, *work.incoming) if each.is_in_place)
    found = (each.message for each in deliveries if each.message.reader not in work.statuses)
    return [bounds for message in found for bounds in message.ranges]


class _Placing:
    """What has arrived, on its way to where it belongs; and how much that was.

    Args:
        rank: This one.
        destinations: Takes it there.
        progress: Called with (bytes placed, bytes wanted).

    Attributes:
        watch: Time spent placing.
        placed_bytes: Bytes placed.
        received_bytes: Those of them that other ranks have read.
    """

    def __init__(
        self, rank: int, destinations: Destinations, progress: Callable[[int, int], None] | None
    ) -> None:
        self._rank = rank
        self._destinations = destinations
        self._progress = progress
        self.placed_bytes = 0
        self.watch = Stopwatch()
        self.received_bytes = 0

    def place(self, index: int, arrivals: Iterable[Arrival], wanted_bytes: int) -> None:
        """Places a round."""
        with self.watch.span(round=index):
            for arrival in arrivals:
                self._place(arrival)
        if self._progress is not None:
            self._progress(self.placed_bytes, wanted_bytes)

    def settle(self) -> None:
        """Returns once everything placed so far is where it belongs."""
        self._destinations.settle()

    def _place(self, arrival: Arrival) -> None:
        for start, data in arrival.pieces:
            self._destinations.place(start, data)
        self.placed_bytes += arrival.nbytes
        if arrival.reader != self._rank:
            self.received_bytes += arrival.nbytes
