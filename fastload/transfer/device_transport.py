"""The transports between devices: the group's backend, on communicators and streams of fastload's own.

`DeviceTransport` serves plans in which all ranks request the same bytes. Chunks are in adjacent slots and
move along the axes of a grid. `RoutedDeviceTransport` serves the other plans, with messages between few sets
of ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from fastload.base.devices import copy_async, give_back_streams, poll, take_stream, use_stream
from fastload.base.memory import allocate, allocate_staging
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded
from fastload.transfer.communicators import Communicators, all_gather, broadcast, join_stream
from fastload.transfer.messages import Grid, Message, Move, Ranks, is_gather
from fastload.transfer.routed_plan import RoutedPlan
from fastload.transfer.transport import (
    FAILED,
    TICK_S,
    BufferMemory,
    Delivery,
    Round,
    Transport,
    require_unbroken,
)


class _DeviceMemory(BufferMemory):
    """Buffers on an accelerator, and the streams that use them.

    Args:
        device: This rank's accelerator, with its index.
        num_streams: Number of streams.

    Attributes:
        streams: The streams.
    """

    def __init__(self, device: torch.device, num_streams: int) -> None:
        super().__init__(device, pinned=True)
        self.streams = [take_stream(device) for _ in range(num_streams)]

    def allocate(self, count: int, nbytes: int) -> None:
        self._buffers = [self._on_device(nbytes) for _ in range(count)]

    def _on_device(self, nbytes: int) -> Tensor:
        memory = allocate((nbytes,), torch.uint8, self.device)
        for stream in self.streams:
            # The caller's kernels may still use the memory, and an abandoned load's kernels after this one.
            stream.wait_stream(torch.accelerator.current_stream(self.device))
            memory.record_stream(stream)
        return memory


class _GridMemory(_DeviceMemory):
    """Also the statuses of the readers in each round.

    Args:
        device: This rank's accelerator, with its index.
        num_streams: Number of streams.
        num_ranks: Number of ranks.

    Attributes:
        statuses: For each buffer one status of each reader, on the device and in host memory.
    """

    def __init__(self, device: torch.device, num_streams: int, num_ranks: int) -> None:
        super().__init__(device, num_streams)
        self.statuses: list[tuple[Tensor, Tensor]] = []
        self._num_ranks = num_ranks

    def allocate(self, count: int, nbytes: int) -> None:
        super().allocate(count, nbytes)
        # Here: a rank that ran out of memory in a round would leave the others waiting.
        self.statuses += [
            (self._on_device(self._num_ranks), allocate_staging(self._num_ranks, pinned=True))
            for _ in range(count)
        ]


class _BackendTransport(Transport):
    """A transport by a backend between devices, which does not count `bytes_in`.

    The caller's thread polls the events at the ends of rounds: another one would disturb its captures of
    graphs.

    Args:
        name: For the report.
        world: The ranks.
        memory: Its buffers on this rank's accelerator.
        communicators: The communicators that carry the rounds.
    """

    def __init__(self, name: str, world: World, memory: _DeviceMemory, communicators: Communicators) -> None:
        super().__init__(name, world.rank, memory, communicators)
        self._streams = memory.streams
        self._communicators = communicators
        self._under_way: deque[tuple[Round, torch.Event, Callable[[], None]]] = deque()
        self._broke = False

    @property
    def starts_ahead(self) -> int:
        return 1  # its chunk is on the way to the device, and to others, while the one before arrives

    def wait(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        def has_ended() -> bool:
            self._note_ended()
            return work.done.is_set()

        poll(has_ended, f"round {work.index}", until_s, give_up)
        require_unbroken(work)

    def close(self) -> None:
        with contextlib.suppress(DeadlineExceeded):
            poll(self._note_ended, "the last rounds", 2 * TICK_S)
        has_ended = not self._under_way and not self._broke
        self._communicators.close(keep=has_ended)
        if has_ended:  # else they may be stuck for ever
            give_back_streams(self._streams)
        self._streams = []
        self._under_way.clear()
        super().close()

    def start(self, work: Round, status: int) -> None:
        work.began = self.watch.start()
        ended = torch.Event(self.memory.device)
        note: Callable[[], None] = _nothing
        try:
            # Tensors that the caller allocated in inference mode cannot be written in another mode.
            with torch.inference_mode(), use_stream(self._streams[0]):
                note = self._launch(work, status, ended)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._under_way.append((work, ended, note))

    def _launch(self, work: Round, status: int, ended: torch.Event) -> Callable[[], None]:
        """Starts the kernels of a round on streams of this transport.

        Args:
            work: The round.
            status: As for `start`.
            ended: Recorded after all kernels.

        Returns:
            What notes the statuses of the round, after the event.
        """
        raise NotImplementedError

    def _note_ended(self) -> bool:
        """Notes the rounds that have ended; returns whether there are no others."""
        with use_stream(self._streams[0]):
            while self._under_way:
                work, ended, note = self._under_way[0]
                try:
                    if work.error is None:
                        if not ended.query():
                            return False
                        note()
                except RuntimeError as error:  # of any earlier kernel
                    work.broke(error)
                self._under_way.popleft()
                self._broke |= work.error is not None
                self.watch.stop(work.began, round=work.index)
                work.done.set()
        return True


def _nothing() -> None:
    pass


class DeviceTransport(_BackendTransport):
    """Collectives on device buffers.

    Each axis of the grid of ranks has a communicator. The group's own one is never used, since the caller may
    be in the middle of a collective on it.

    Args:
        world: The ranks.
        device: This rank's accelerator, with its index.
        backend: The backend, as `comm.group.backend_of` returns it.
        grid: The positions of the ranks.
    """

    def __init__(self, world: World, device: torch.device, backend: str, grid: Grid) -> None:
        self._grid = grid
        axes = {phase: self._grid.axis(world.rank, phase) for phase in range(self._grid.num_phases)}
        members = {phase: ranks for phase, ranks in axes.items() if len(ranks) > 1}
        communicators = Communicators(world, f"grid {self._grid.dims}", members, device, backend)
        # One for copies and one for each phase, so that those of different rounds overlap.
        memory = _GridMemory(device, 1 + grid.num_phases, len(grid.ranks))
        super().__init__(backend, world, memory, communicators)
        self._last = self._streams[0]
        self._statuses = memory.statuses
        self._num_started = 0
        self._broadcast: GridBroadcast | None = None

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        made = self._communicators.connect(give_up)
        communicators = [made.get(phase) for phase in range(self._grid.num_phases)]
        self._broadcast = GridBroadcast(self._grid, self._rank, communicators, self._in_phase)

    def _launch(self, work: Round, status: int, ended: torch.Event) -> Callable[[], None]:
        """Sends chunks, and one status of each reader, to all ranks."""
        assert work.slots is not None, "made for this transport"
        assert self._broadcast is not None
        readers = tuple(work.slots.by_reader)
        both = self._statuses[self._num_started % len(self._statuses)]
        statuses, on_host = (buffer[: len(readers)] for buffer in both)
        self._num_started += 1
        self._last = self._streams[0]
        statuses.zero_()
        if work.chunk is not None:
            (chunk,) = work.chunk.memory
            copy_async(chunk, work.slots.by_reader[self._rank][: chunk.numel()])
            statuses[readers.index(self._rank)].fill_(status)
        self._broadcast.run(readers, work.slots.memory, statuses)
        with use_stream(self._last):
            if on_host.is_pinned():
                copy_async(statuses, on_host)
            ended.record(self._last)
        return partial(self._note, work, readers, statuses, on_host)

    def _note(self, work: Round, readers: Sequence[int], statuses: Tensor, on_host: Tensor) -> None:
        """Notes which chunks of a round could not be read."""
        if not on_host.is_pinned():
            on_host.copy_(statuses)
        statuses_of_readers = zip(readers, on_host.tolist(), strict=True)
        work.statuses = {rank: status for rank, status in statuses_of_readers if status}

    @contextmanager
    def _in_phase(self, phase: int) -> Iterator[None]:
        """Queues kernels after earlier phases of this round, and next to other phases of other rounds."""
        stream = self._streams[1 + phase]
        stream.wait_stream(self._last)
        self._last = stream
        with use_stream(self._last):
            yield


_NUM_KNOWN = 1024  # windows of readers whose moves are cached


class GridBroadcast:
    """Broadcasts to all ranks along the axes of a grid.

    Args:
        grid: The grid of all ranks.
        rank: This rank.
        communicators: Of its axis in each phase, with the ranks in the order of `Grid.axis`; None where it
            is alone.
        in_phase: Returns a context for the collectives of a phase, such as a stream of their own.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        communicators: Sequence[Any],
        in_phase: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._by_phase = communicators
        self._in_phase = in_phase
        self._moves = lru_cache(_NUM_KNOWN)(lambda readers: grid.moves(readers, rank))

    def run(self, readers: tuple[int, ...], *rows: Tensor) -> None:
        """Sends the part of each reader to all ranks.

        Args:
            readers: The ranks that have filled their parts, in the order of the parts.
            rows: Tensors of equally long parts, (readers x length,).
        """
        for phase, (communicator, moves) in enumerate(zip(self._by_phase, self._moves(readers), strict=True)):
            if communicator is not None and moves:
                with self._in_phase(phase):
                    self._move(communicator, moves, rows, len(readers))

    def _move(self, communicator: Any, moves: Sequence[Move], rows: Sequence[Tensor], num_parts: int) -> None:
        for row in rows:
            part = row.numel() // num_parts
            if is_gather(moves, communicator.size()):
                move = moves[communicator.rank()]
                into = row[moves[0].begin * part : moves[-1].end * part]
                join_stream(
                    communicator, all_gather(communicator, row[move.begin * part : move.end * part], into)
                )
            else:
                _coalesced(
                    communicator,
                    [
                        partial(broadcast, communicator, row[move.begin * part : move.end * part], move.root)
                        for move in moves
                    ],
                )


_MAX_NUM_SETS = 4  # that a rank is in: each takes a communicator


class RoutedDeviceTransport(_BackendTransport):
    """Messages between devices, each from its reader to its recipients.

    Chunks are read into host memory and packed on the device. A rank that cannot read goes on taking part,
    and reports it when the ranks meet after the rounds.

    Args:
        world: The ranks.
        member_sets: See `communicator_ranks`; not empty.
        device: This rank's accelerator, with its index.
        backend: The backend, as `comm.group.backend_of` returns it.
    """

    def __init__(
        self, world: World, member_sets: Sequence[Ranks], device: torch.device, backend: str
    ) -> None:
        self._members = {number: ranks for number, ranks in enumerate(member_sets) if world.rank in ranks}
        name = f"routed {xxhash.xxh3_64_hexdigest(repr(member_sets).encode())}"
        communicators = Communicators(world, name, self._members, device, backend)
        super().__init__(f"{backend} routed", world, _DeviceMemory(device, 2), communicators)
        self._by_ranks: Mapping[Ranks, Any] = {}
        self._packing, self._moving = self._streams

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        made = self._communicators.connect(give_up)
        self._by_ranks = {self._members[number]: communicator for number, communicator in made.items()}

    def post(self, work: Round) -> None:
        # The caller's kernels may still use the memory.
        here = torch.accelerator.current_stream(self.memory.device)
        self._packing.wait_stream(here)
        self._moving.wait_stream(here)

    def packing(self) -> AbstractContextManager[None]:
        return self._on(self._packing)

    def _launch(self, work: Round, status: int, ended: torch.Event) -> Callable[[], None]:
        with self._on(self._moving):
            self._moving.wait_stream(self._packing)
            deliveries = (*work.packed, *work.incoming)
            for delivery in deliveries:  # some have memory outside of the buffer
                delivery.data.record_stream(self._moving)
            self._exchange(deliveries)
            ended.record(self._moving)
        return partial(self._note, work, status)

    def _note(self, work: Round, status: int) -> None:
        if status == FAILED:
            work.statuses = {self._rank: FAILED}

    def _exchange(self, deliveries: Collection[Delivery]) -> None:
        """Sends and receives all messages of a round that concern this rank.

        All ranks make their calls in one order: by round, point to point before broadcasts, by recipients.
        So they cannot deadlock, though some ranks are ahead of others.
        """
        if sent := sent_to_roots(deliveries, self._rank):
            # One of all ranks, with their own numbers.
            everyone = self._by_ranks[max(self._by_ranks, key=len)]
            _coalesced(
                everyone, [partial(_send_to_root, everyone, self._rank, delivery) for delivery in sent]
            )
        for ranks, sent in broadcasts_of(deliveries).items():
            communicator = self._by_ranks[ranks]
            _coalesced(
                communicator,
                [
                    partial(broadcast, communicator, delivery.data, ranks.index(root_of(delivery.message)))
                    for delivery in sent
                ],
            )

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        # Tensors that the caller allocated in inference mode cannot be written in another mode.
        with torch.inference_mode(), use_stream(stream):
            yield


def _send_to_root(communicator: Any, rank: int, delivery: Delivery) -> Any:
    if delivery.message.reader == rank:
        return communicator.send([delivery.data], root_of(delivery.message), 0)
    return communicator.recv([delivery.data], delivery.message.reader, 0)


def root_of(message: Message) -> int:
    """Returns the recipient that broadcasts a message: the reader, or one that the reader sends to."""
    if message.reader in message.ranks:
        return message.reader
    return message.ranks[message.reader % len(message.ranks)]


def _coalesced(communicator: Any, calls: Sequence[Callable[[], Any]]) -> None:
    """Makes calls of a communicator: in one launch where its backend can, else one after the other."""
    if not communicator.supports_coalescing:
        works = [call() for call in calls]
    else:
        works = []
        communicator._start_coalescing()
        try:
            for call in calls:
                call()
        finally:  # else it would keep all later calls of this thread, of any communicator
            works.append(communicator._end_coalescing())
    for work in works:
        join_stream(communicator, work)


def communicator_ranks(plan: RoutedPlan) -> tuple[Ranks, ...]:
    """Returns the sets of ranks that need a communicator, ascending; the same on all ranks.

    These are the recipients of each message, and all ranks if some reader is no recipient. The result is
    empty if no message has two recipients, if some rank were in too many of them, or if chunks in host memory
    do not fit into staging next to the buffers on the device.

    Args:
        plan: The plan.
    """
    if not plan.depth_on_device:
        return ()
    member_sets = {ranks for ranks in plan.recipient_sets if len(ranks) > 1}
    counts = Counter(rank for ranks in member_sets for rank in ranks)
    if max(counts.values(), default=0) > _MAX_NUM_SETS or not member_sets:
        return ()
    return tuple(sorted(member_sets | {tuple(sorted(plan.order))} if plan.has_mere_readers else member_sets))


def sent_to_roots(deliveries: Iterable[Delivery], rank: int) -> list[Delivery]:
    """Returns the messages between a reader that is no recipient and a root, in one order on both.

    Args:
        deliveries: All messages of a round that concern the rank.
        rank: The rank, as reader or root.
    """
    return _in_order(
        delivery
        for delivery in deliveries
        if delivery.message.reader not in delivery.message.ranks
        and rank in (delivery.message.reader, root_of(delivery.message))
    )


def broadcasts_of(deliveries: Iterable[Delivery]) -> dict[Ranks, list[Delivery]]:
    """Returns the messages to broadcast, by recipients; both in one order on all ranks.

    Args:
        deliveries: All messages of a round that concern the rank.
    """
    by_ranks: dict[Ranks, list[Delivery]] = {}
    for delivery in _in_order(
        delivery for delivery in deliveries if delivery.message.ranges and len(delivery.message.ranks) > 1
    ):
        by_ranks.setdefault(delivery.message.ranks, []).append(delivery)
    return by_ranks


def _in_order(deliveries: Iterable[Delivery]) -> list[Delivery]:
    # A round has at most one message for each reader and recipients.
    return sorted(deliveries, key=lambda delivery: (delivery.message.ranks, delivery.message.reader))
