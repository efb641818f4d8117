"""Runs the rounds of a plan, several at a time: read, pack, transport, place."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from fastload.base.devices import is_accelerator, poll
from fastload.base.memory import host_view
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers, await_done
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, FastloadError, Interrupted, StorageError
from fastload.storage import CheckpointReader
from fastload.transfer.buffers import Arrival, Buffers, Writer
from fastload.transfer.pace import Pace, far_reads
from fastload.transfer.read import ChunkReader
from fastload.transfer.rounds import Plan
from fastload.transfer.transport import (
    FAILED,
    UNREADABLE,
    LocalTransport,
    OwnChunk,
    Round,
    Transport,
)

if TYPE_CHECKING:
    from fastload.transfer.routed_plan import RoutedPlan


def _open_transport(
    world: World, plan: Plan, machines: Sequence[Hashable], device: torch.device | None, backend: str
) -> Transport:
    """Opens the transport that fits a plan and the device; arguments are those of `Pipeline`."""
    pinned = device is not None and is_accelerator(device)
    if backend and device is not None and plan.grid is not None:
        from fastload.transfer.device_transport import DeviceTransport

        return DeviceTransport(world, device, backend, plan.grid)
    if not plan.exchanges:
        return LocalTransport(world.rank, pinned=pinned)
    if backend and device is not None:
        from fastload.transfer.device_transport import RoutedDeviceTransport, communicator_ranks

        if member_sets := communicator_ranks(cast("RoutedPlan", plan)):  # others have a grid
            return RoutedDeviceTransport(world, member_sets, device, backend)
    # One rank alone, or each for itself, need not import it.
    from fastload.transfer.host_transport import HostTransport
    from fastload.transfer.messages import Routing, sharing_domains

    # Shared memory takes one buffer more than rounds in flight, so at least two.
    domains = sharing_domains(machines or range(world.size), plan.recipient_sets if plan.depth > 1 else ())
    routing = Routing(world.rank, plan.order, [domains[rank] for rank in plan.order])
    return HostTransport(world, routing, plan.pairs(world.rank), pinned=pinned)


class Starter:
    """Starts each round once the read of this rank's chunk has ended; when, see `Transport.starts_ahead`.

    Args:
        reader: Reads the chunks; stopped once one of them could not be read.
        transport: Sends them to the other ranks.
        buffers: Packs them.

    Attributes:
        read_error: The error of the first chunk that could not be read or packed, or a worse one; or None.
        note: The error as text, or empty; kept by `close`.
        unread_from: The round of the first chunk that could not be read, or None.
    """

    def __init__(self, reader: ChunkReader, transport: Transport, buffers: Buffers) -> None:
        self.read_error: BaseException | None = None
        self.note = ""
        self.unread_from: int | None = None
        self._reader = reader
        self._transport = transport
        self._buffers = buffers
        self._is_ordered = transport.starts_ahead is not None
        # A failed call of NCCL can leave a group of calls open in its thread, for ever.
        self._thread = Workers(1, "fastload-start", end_threads=self._is_ordered)
        self._posted: deque[tuple[Round, Future[None] | None]] = deque()  # until `start_until`
        self._is_ending = self._has_ended = False

    @property
    def is_lost(self) -> bool:
        """Whether this rank can neither read nor take part in the exchange."""
        return self.read_error is not None and not isinstance(self.read_error, StorageError)

    def post(self, work: Round, read: Future[None] | None) -> None:
        """Starts a round once a read has ended, or at once if this rank has no chunk in it.

        Unless the transport has rounds started when it says so: then in `start_until`.
        """
        if self._is_ordered:
            self._posted.append((work, read))
        else:
            self._thread.submit(partial(self._start_later, work, read))

    def start_until(self, number: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Starts the rounds that were posted, up to one of them; returns once they have started.

        Args:
            number: Number of the last one, over all plans.
            until_s: Longest wait for each, in seconds.
            give_up: Polled; True ends the wait.

        Raises:
            StorageError: A read did not end in time.
            DeadlineExceeded: The transport did not start a round in time.
            Interrupted: `give_up` returned True.
        """
        while self._posted and self._posted[0][0].index <= number:
            work, read = self._posted.popleft()
            if read is not None:
                late: Callable[[], Exception | None] = partial(self._reader.overdue, 0.0)
                await_done(read, give_up=give_up, limit_s=until_s, late=late)
            if not self._transport.starts_ahead:  # nothing is sent
                self._start(work, read)
                continue
            late = partial(DeadlineExceeded, f"round {work.index} did not start within {until_s:.1f} s")
            started = self._thread.submit(partial(self._start, work, read))
            await_done(started, give_up=give_up, limit_s=until_s, late=late)

    def end(self) -> None:
        """Ends the thread after the rounds whose chunks are read."""
        self._is_ending = True
        self._thread.close(wait_s=0.0)

    def close(self, *, wait_s: float) -> None:
        """Waits for the thread."""
        self._thread.close(wait_s=wait_s)
        self._posted.clear()
        self.read_error = None  # else error → traceback → frame → self → error would keep the buffers alive

    def _start_later(self, work: Round, read: Future[None] | None) -> None:
        if self._has_ended:
            return
        if read is not None:
            try:  # no longer than the load, since storage may never respond
                await_done(read, give_up=lambda: self._is_ending)
            except Interrupted:
                self._has_ended = True
                return
        self._start(work, read)

    def _start(self, work: Round, read: Future[None] | None) -> None:
        """Starts a round whose chunk is read."""
        unpacked = self._pack(work)  # even an unread chunk, since others wait for its messages
        # Not result(): the traceback of a raised error has this frame, and so forms a cycle with the error.
        error = unpacked or (read.exception() if read is not None else None)
        status = self._note(error, work.index) if error is not None else 0
        try:
            self._transport.start(work, status)
        except Exception as error:
            self._note(error, work.index)
            work.broke(error)
            work.done.set()

    def _note(self, error: BaseException, index: int) -> int:
        """Keeps the first error, or a worse one; returns the status for the other ranks."""
        is_first = self.read_error is None
        if is_first or not isinstance(error, FastloadError):
            self.read_error, self.note = error, str(error)
        if is_first:
            self.unread_from = index
            self._reader.stop()  # this rank drops out; others read the rest of its bytes
        return FAILED if self.is_lost else UNREADABLE

    def _pack(self, work: Round) -> Exception | None:
        try:
            with self._transport.packing():
                self._buffers.pack(work)
        except Exception as error:
            return error
        return None


class ReadAhead:
    """The chunks that this rank reads, also before their rounds are in flight.

    Half as many again are begun as are read at once: some wait for an earlier one, others to be read. If none
    waits to be read, reading is ahead of the exchange, and no more are read at once. Without an exchange four
    times as many are begun as may ever be read at once, while they need no memory: some always wait to be
    read when there may be more, and only a late read holds up the others.

    Args:
        rank: This rank.
        reader: Reads the chunks.
        buffers: Has memory for them.
    """

    def __init__(self, rank: int, reader: ChunkReader, buffers: Buffers) -> None:
        self._rank = rank
        self._reader = reader
        self._buffers = buffers
        self._begun: deque[tuple[int, OwnChunk, Future[None]]] = deque()
        self._next = self._first_number = 0
        self._is_in_place = False  # the last chunk

    def begin(self, first_number: int) -> None:
        """Begins a plan.

        Args:
            first_number: Number of its first round, over all plans.
        """
        self._next, self._first_number = 0, first_number

    def read(self, plan: Plan, num_done: int) -> None:
        """Begins all reads that are allowed once so many rounds of a plan are over."""
        self._buffers.release(self._first_number + num_done - 1)
        num_windows = plan.num_windows
        width = self._reader.pace.width
        most = max(width + width // 2, plan.depth) * num_windows
        end = num_done + (min(most, plan.ahead) if plan.ahead else most)
        last = end if plan.exchanges else max(end, num_done + 4 * self._reader.pace.most)
        for index in plan.rounds_of(self._rank, self._next, last):
            if index >= end and not self._is_in_place:
                break
            if not self._begin(plan, index):
                return
        self._next = max(self._next, min(end, plan.num_rounds))

    def take(self, plan: Plan, index: int) -> tuple[OwnChunk | None, Future[None] | None]:
        """Returns this rank's chunk of the next round and its read; None if it is empty.

        There is memory for it, since no rank needs that of as many earlier rounds as are in flight.
        """
        if self._next <= index:
            for _ in plan.rounds_of(self._rank, index, index + 1):
                has_begun = self._begin(plan, index)
                assert has_begun, "memory for the rounds in flight"
            self._next = index + 1
        if not self._begun or self._begun[0][0] != index:
            return None, None
        _, chunk, read = self._begun.popleft()
        return chunk, read

    def drop(self, *, give_up: Callable[[], bool]) -> None:
        """Ends a plan: waits for its reads, since later ones may use the same memory.

        Raises:
            Interrupted: `give_up` returned True.
        """
        if not self._begun:
            return
        self._buffers.drop(self._first_number + self._begun[0][0])
        while self._begun:
            *_, read = self._begun.popleft()
            await_done(read, give_up=give_up)

    def forget(self) -> None:
        """Drops all chunks; reads under way keep their memory alive."""
        self._begun.clear()

    def _begin(self, plan: Plan, index: int) -> bool:
        """Begins to read the chunk of a round; returns whether there was memory for it."""
        chunk = self._buffers.prepare_chunk(plan, index, self._first_number + index)
        if chunk is None:
            return False
        self._next = index + 1
        if chunk.byte_ranges:
            self._is_in_place = chunk.is_in_place
            read = self._reader.submit(chunk.byte_ranges, [host_view(piece) for piece in chunk.memory])
            self._begun.append((index, chunk, read))
        return True


_MAX_READ_THREADS = 8
_PLACED_PART = 4  # of the rounds in flight: those that are placed, and copied while the next ones are read


def pace_of(
    num_threads: int | None,
    plan: Plan,
    storage: CheckpointReader,
    *,
    ranks_on_host: int,
    first_byte_s: float = 0.0,
) -> Pace:
    """Returns how many reads a rank has in flight.

    That is the option if it is set, or 1 if storage needs reads in order. Else it follows storage. It begins
    with what the plan needs with an exchange, and without one with this rank's share of the host's cores, at
    least 2; with more if storage was far away when the headers were read.

    Args:
        num_threads: The option.
        plan: The plan.
        storage: What the chunks are read from.
        ranks_on_host: Ranks that share the host's cores.
        first_byte_s: Time in seconds to the first byte of the headers, on the rank that read them; 0 if it
            is unknown.
    """
    if num_threads is not None or storage.in_order:
        return Pace(num_threads or 1, num_threads or 1)
    fair = max(2, min(2 * (os.cpu_count() or 1) // ranks_on_host, _MAX_READ_THREADS))
    least = plan.num_reads if plan.exchanges else min(plan.depth, fair)
    far, most = far_reads(len(plan.readers))
    return Pace(least, max(least, most), far, first_byte_s=first_byte_s or storage.first_byte_s)


class PlacedRounds:
    """The rounds that are placed, in order, until the memory of each may be overwritten.

    Args:
        world: The ranks.
        transport: Releases the memory.
        writer: Placed the data, and may still copy from their buffers.
    """

    def __init__(self, world: World, transport: Transport, writer: Writer) -> None:
        self._world = world
        self._transport = transport
        self._writer = writer
        self._rounds: deque[tuple[Round, Callable[[], bool]]] = deque()

    def __len__(self) -> int:
        return len(self._rounds)

    def add(self, work: Round) -> None:
        """Adds a round; all that was placed of it has been placed."""
        self._rounds.append((work, self._writer.follow()))

    def release(self, at_most: int) -> None:
        """Releases rounds that are copied; waits while there are more than `at_most`.

        Raises:
            DeadlineExceeded: A device did not copy for too long.
            Interrupted: Another rank failed.
        """
        while self._rounds:
            work, is_copied = self._rounds[0]
            if not is_copied():
                if len(self._rounds) <= at_most:
                    return
                what = f"the copies of round {work.index} to devices"
                poll(is_copied, what, self._world.patience_s, self._world.peer_failed)
            self._rounds.popleft()
            self._transport.release(work, until_s=self._world.patience_s, give_up=self._world.peer_failed)

    def forget(self) -> None:
        """Drops all rounds; copies under way keep their memory alive."""
        self._rounds.clear()


def _never(number: int) -> bool:
    return False


class Pipeline:
    """Moves all rounds of a plan through read, exchange and place, by the transport that fits.

    The reader's threads read this rank's chunks. One thread passes them to the transport in plan order. The
    caller's thread places what has arrived and posts the next round into a free buffer. So at most
    `plan.depth` rounds are in flight: the same ones on all ranks if these exchange anything; otherwise a few
    of them are already placed, and being copied to a device. A chunk for one piece of host memory is read,
    received and forwarded there; others go through the buffer. With several windows, chunks are read ahead
    of the rounds in flight.

    Between devices the thread passes chunks on only when the caller's thread says so: one round ahead of the
    one that it waits for. So at the end of each step the same rounds have started on all ranks, and the
    caller's own collectives follow them in one order.

    A rank that cannot read sends a status with its chunk and continues with the rounds in flight, so no rank
    waits for it. If all ranks learn of that in the same round, the remaining bytes are dealt again to the
    other readers. Else the caller has to send `unread_from` to the other ranks afterwards. Without an
    exchange nobody takes over, and the read fails.

    Args:
        world: The ranks, with the failure flag.
        plan: The plan.
        reader: Reads this rank's chunks.
        writer: Writes the bytes.
        machines: For each rank of the world, what it has in common with those it can share memory with; empty
            if no ranks share any.
        device: Where the tensors will live on this rank; host memory if None.
        backend: What moves data between the devices of all ranks; empty if nothing does.
        progress: Called with (bytes placed, bytes wanted).

    Attributes:
        plan: As given.
        reader: As given.
        transport: Sends and receives messages.
        num_posted: Rounds that this rank has begun, counted over all plans.
        broken: Readers that dropped out; the same on every rank.

    Raises:
        MemoryError: Staging buffers do not fit into memory.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        reader: ChunkReader,
        writer: Writer,
        *,
        machines: Sequence[Hashable] = (),
        device: torch.device | None = None,
        backend: str = "",
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._world = world
        self.plan = plan
        self.reader = reader
        self.transport = _open_transport(world, plan, machines, device, backend)
        self._placing = _Placing(world.rank, writer, progress)
        self._placed = PlacedRounds(world, self.transport, writer)
        self._buffers = Buffers(plan, world.rank, self.transport.memory, self.transport.route, writer)
        self._starter = Starter(reader, self.transport, self._buffers)
        self._ahead = ReadAhead(world.rank, reader, self._buffers)
        self.num_posted = 0
        self.broken: set[int] = set()

    @property
    def read_error(self) -> BaseException | None:
        """The error of the first chunk that this rank could not read, or None."""
        return self._starter.read_error

    @property
    def unread_from(self) -> int | None:
        """The first round without this rank's chunk, unless the other ranks know it; or None."""
        return None if self.plan.in_lockstep else self._starter.unread_from

    @property
    def drop_out(self) -> str:
        """Why this rank stopped reading while the load continued; else empty."""
        return f"stopped reading: {self._starter.note}" if self._starter.note else ""

    @property
    def received_bytes(self) -> int:
        """Bytes placed that other ranks read."""
        return self._placing.received_bytes

    @property
    def placed_bytes(self) -> int:
        """Bytes placed, by any reader."""
        return self._placing.placed_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes used of all buffers; 0 if everything is read and received in place."""
        return self._buffers.nbytes

    @property
    def watches(self) -> dict[str, Stopwatch]:
        """The stopwatch of each stage."""
        return {"read": self.reader.watch, "exchange": self.transport.watch, "place": self._placing.watch}

    def run(self) -> None:
        """Runs all rounds.

        Raises:
            FastloadError: This rank failed, or another one did (`Interrupted`).
        """
        for _ in self.steps():
            pass

    def steps(self, ends_before: Callable[[int], bool] = _never) -> Iterator[list[tuple[int, int]]]:
        """Runs all rounds, one for each step; later rounds are read and exchanged meanwhile.

        Args:
            ends_before: Called with the number of each round, over all plans, before it begins. True ends the
                transfer after the rounds in flight. It has to return True for the same round on all ranks.

        Yields:
            (start, length) of the bytes of a round that were read or received in place; the rest was placed.
            Until the next step they stay in the buffer that they were placed from.

        Raises:
            FastloadError: This rank failed, or another one did (`Interrupted`).
        """
        if self.plan.num_rounds == 0:
            return
        self.transport.connect(give_up=self._world.peer_failed)
        try:
            plan: Plan | None = self.plan
            while plan is not None:
                plan = yield from self._run_plan(plan, ends_before)
        except BaseException as error:
            self.reader.stop()
            if not isinstance(error, Interrupted | DeadlineExceeded):
                raise
            # This rank's failure to read comes first: the ranks that wait for its chunk may have given up
            # before it did.
            cause = self._starter.read_error or self.reader.overdue(self._world.patience_s / 2)
            if cause is None and isinstance(error, DeadlineExceeded):
                cause = Interrupted(str(error))
            if cause is None:
                raise
            try:
                raise cause from None
            finally:
                del cause  # else error → traceback → frame → error would keep all their memory alive
        finally:
            self._starter.end()

    def _run_plan(
        self, plan: Plan, ends_before: Callable[[int], bool]
    ) -> Generator[list[tuple[int, int]], None, Plan | None]:
        """Runs a plan until its end or until a reader drops out; then returns the plan for the rest."""
        rounds: deque[Round] = deque()
        lacking: list[tuple[int, int]] = []
        broken: set[int] = set()
        num_posted = 0
        has_ended = False
        self._ahead.begin(self.num_posted)
        depth = min(self._buffers.depth, plan.ahead or plan.num_rounds)
        for index in range(plan.num_rounds):
            if not broken:
                self._ahead.read(plan, index - len(self._placed))
            num_free = depth - len(rounds) - len(self._placed)
            while not broken and not has_ended and num_free > 0 and num_posted < plan.num_rounds:
                if has_ended := ends_before(self.num_posted):
                    break
                rounds.append(self._post(plan, num_posted))
                num_posted += 1
                self.num_posted += 1
                num_free -= 1
            if not rounds:
                break
            self._start(rounds)
            work = rounds.popleft()
            unread = self._finish(plan, index, work)
            yield _ranges_in_place(work)
            self._placed.add(work)
            self._placed.release(at_most=0 if plan.exchanges else depth // _PLACED_PART)
            if plan.in_lockstep:
                broken.update(unread)
                lacking += [(index, rank) for rank in unread]
            elif self._starter.read_error is not None and plan.readers == (self._world.rank,):
                raise self._starter.read_error  # no other rank can read the rest
        self._placed.release(at_most=0)
        if has_ended:
            self._ahead.drop(give_up=self._world.peer_failed)
        if has_ended or not broken:
            return None
        self.broken |= broken
        self._ahead.drop(give_up=self._world.peer_failed)
        left = plan.without(broken, lacking, num_posted) if plan.exchanges else None
        if left is None:
            raise self._starter.read_error or Interrupted("no rank is left that can read")
        return left

    def close(self) -> None:
        """Ends the threads. After a failure this may take a moment, so set the failure flag before."""
        self._starter.close(wait_s=self._world.grace_s)
        self._ahead.forget()
        self._placed.forget()
        self.transport.close()
        self._buffers.free()

    def _post(self, plan: Plan, index: int) -> Round:
        """Posts the receives of a round and begins to read this rank's chunk."""
        number = self.num_posted
        self.transport.memory.reserve(number, until_s=self._world.patience_s, give_up=self._is_lost)
        self._buffers.release(number - self._buffers.depth)
        chunk, read = self._ahead.take(plan, index)
        work = self._buffers.prepare(plan, index, number, chunk)
        self.transport.post(work)
        self._starter.post(work, read)
        return work

    def _start(self, rounds: Sequence[Round]) -> None:
        """Starts the round to wait for, and those that the transport has started by then."""
        last, until_s = min(self.transport.starts_ahead or 0, len(rounds) - 1), self._world.patience_s
        self._starter.start_until(rounds[last].index, until_s=until_s, give_up=self._world.peer_failed)

    def _is_lost(self) -> bool:
        """Whether a rank failed, also this one in another thread."""
        return self._world.peer_failed() or self._starter.is_lost

    def _finish(self, plan: Plan, index: int, work: Round) -> list[int]:
        """Places a round once it has arrived; returns the readers whose chunks are missing."""
        self._await(work)
        if lost := [rank for rank, status in work.statuses.items() if status != UNREADABLE]:
            raise Interrupted(f"round {work.index}: rank {lost[0]} is lost")
        self._placing.place(work.index, self._buffers.arrivals(work), self._buffers.wanted_bytes)
        # In one order on all ranks, which determines how the rest is dealt.
        return [rank for rank in sorted(work.statuses) if plan.chunk(index, rank).nbytes]

    def _await(self, work: Round) -> None:
        try:
            self.transport.wait(work, until_s=self._world.patience_s, give_up=self._world.peer_failed)
        except DeadlineExceeded:
            # To blame is this rank's storage if its own chunk is not read yet, and else the exchange.
            overdue = None if work.started.is_set() else self.reader.overdue(at_least_s=0.0)
            if overdue is None:
                raise
            raise overdue from None
        self._world.note_progress()


def _ranges_in_place(work: Round) -> list[tuple[int, int]]:
    """Returns (start, length) of the requested bytes that were read or received in place."""
    deliveries = (delivery for delivery in (*work.packed, *work.incoming) if delivery.is_in_place)
    messages = (delivery.message for delivery in deliveries if delivery.message.reader not in work.statuses)
    return [bounds for message in messages for bounds in message.ranges]


class _Placing:
    """Has arrived bytes written, and counts them.

    Args:
        rank: This rank.
        writer: Writes them.
        progress: Called with (bytes placed, bytes wanted).

    Attributes:
        writer: As given.
        watch: Time spent placing.
        placed_bytes: Bytes placed.
        received_bytes: The part of them that other ranks read.
    """

    def __init__(self, rank: int, writer: Writer, progress: Callable[[int, int], None] | None) -> None:
        self._rank = rank
        self.writer = writer
        self._progress = progress
        self.placed_bytes = 0
        self.watch = Stopwatch()
        self.received_bytes = 0

    def place(self, index: int, arrivals: Iterable[Arrival], wanted_bytes: int) -> None:
        with self.watch.span(round=index):
            for arrival in arrivals:
                self._place(arrival)
        if self._progress is not None:
            self._progress(self.placed_bytes, wanted_bytes)

    def _place(self, arrival: Arrival) -> None:
        for start, data in arrival.pieces:
            self.writer.place(start, data)
        self.placed_bytes += arrival.nbytes
        if arrival.reader != self._rank:
            self.received_bytes += arrival.nbytes
