"""The transport between devices for one group of all ranks, along the lines of a grid of hosts and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastload.base.devices import copy_async, use_stream
from fastload.base.memory import allocate, allocate_staging
from fastload.base.stopwatch import Stopwatch
from fastload.comm.hosts import Peer
from fastload.comm.world import World
from fastload.transfer.communicators import Communicators, Endings
from fastload.transfer.grid import Grid, Move, is_gather
from fastload.transfer.message import Message
from fastload.transfer.routing import Route
from fastload.transfer.transport import FlatBuffer, Round, Slots

__all__ = ["DeviceExchange", "Lines"]

_NUM_KNOWN = 1024  # windows of readers whose moves are kept


class DeviceExchange:
    """Collectives on device buffers, on streams and communicators of fastload's own.

    Each line of the grid of ranks has a communicator, which is kept for the next loads of the group. The
    group's own communicator is never used: the caller may be in the middle of a collective on it.

    Args:
        world: The ranks.
        device: This rank's accelerator, with its number.
        backend: What moves data between the devices, as `open_transport.backend_of` names it.
        hosts: Host of each rank.
    """

    shares_memory = False
    bytes_in = 0  # nobody counts what the backend takes between hosts

    def __init__(self, world: World, device: torch.device, backend: str, hosts: Sequence[str]) -> None:
        self.name = backend
        self.device = device
        self.watch = Stopwatch()
        self._rank = world.rank
        self._grid = Grid.of(hosts)
        phases = [phase for phase in range(self._grid.num_phases) if self._grid.has_line(world.rank, phase)]
        lines = {phase: self._grid.line(world.rank, phase) for phase in phases}
        self._communicators = Communicators(world, f"grid {self._grid.dims}", lines, device, backend)
        # One for each phase: rounds overlap, each in another one.
        self._streams = [torch.Stream(device) for _ in range(self._grid.num_phases)]
        self._last = self._streams[0]
        self._statuses: list[Tensor] = []
        self._num_started = 0
        self._lines: Lines | None = None
        self._endings = Endings(device, self.watch)

    def route(self, message: Message) -> Route:
        return Route(self._rank)

    def offer(self) -> Any:
        return self._communicators.offer()

    def renew(self) -> None:
        self._communicators.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        self._communicators.accept(offers)
        return ()  # the backend has ways of its own

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        found = self._communicators.meet(give_up)
        groups = [found.get(phase) for phase in range(self._grid.num_phases)]
        self._lines = Lines(self._grid, self._rank, groups, self._within)
        self._endings.begin()

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def allocate(self, buffer_bytes: int, own_bytes: int) -> tuple[FlatBuffer, Tensor | None]:
        buffer = allocate((buffer_bytes,), torch.uint8, self.device)
        # Allocated here: a rank that ran out of memory in a round would leave the others alone in it.
        statuses = allocate((len(self._grid.ranks),), torch.uint8, self.device)
        for stream in self._streams:
            # Kernels of the caller's that still use what was freed here come first; and whoever gets the
            # memory next has to wait for what an abandoned load has left on the stream.
            stream.wait_stream(torch.accelerator.current_stream(self.device))
            buffer.record_stream(stream)
            statuses.record_stream(stream)
        self._statuses.append(statuses)
        return FlatBuffer(buffer), allocate_staging(own_bytes, pinned=True)

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=True)

    def post(self, work: Round) -> None:
        pass

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        ended = torch.Event(self.device)
        assert work.slots is not None, "made for this transport"
        statuses = self._statuses[self._num_started % len(self._statuses)][: len(work.slots.each)]
        self._num_started += 1
        try:
            # What the caller's thread has allocated in inference mode cannot be written in another mode.
            self._last = self._streams[0]
            with torch.inference_mode(), use_stream(self._last):
                self._bring(work.slots, work, statuses)
                ended.record(self._last)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._endings.follow(work, ended, partial(_note, work, tuple(work.slots.each), statuses))

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass  # the round is done, so every rank of the lines has sent and received all of it

    def close(self) -> None:
        self._communicators.close(keep=self._endings.close())

    def _bring(self, slots: Slots, work: Round, statuses: Tensor) -> None:
        """Brings chunks, and one status for each reader, to all ranks."""
        assert self._lines is not None
        owners = tuple(slots.each)
        statuses.zero_()
        if work.own is not None:
            copy_async(work.own, slots.each[self._rank])
            statuses[owners.index(self._rank)].fill_(work.status)
        self._lines.bring(owners, slots.whole, statuses)

    @contextmanager
    def _within(self, phase: int) -> Iterator[None]:
        """What is called here comes after what was called before, and beside other phases of other rounds."""
        self._streams[phase].wait_stream(self._last)
        self._last = self._streams[phase]
        with use_stream(self._last):
            yield


def _note(work: Round, readers: Sequence[int], statuses: Tensor) -> None:
    """Notes which chunks of a round could not be read.

    Args:
        work: The round, which is here.
        readers: Those of it.
        statuses: What each of them says, (readers,), on the device.
    """
    found = zip(readers, statuses.tolist(), strict=True)
    work.statuses = {rank: status for rank, status in found if status}


class Lines:
    """The lines of one rank, each with a process group.

    Args:
        grid: Of all ranks.
        rank: This one.
        groups: The backend of a process group for its line in each phase, with the same numbers; None where
            this rank is the only one of it.
        within: Returns what the collectives of a phase are to be called in: a stream of their own.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        groups: Sequence[Any],
        within: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._groups = groups
        self._within = within
        self._moves = lru_cache(_NUM_KNOWN)(lambda owners: grid.moves(owners, rank))

    def bring(self, owners: tuple[int, ...], *rows: Tensor) -> None:
        """Brings what each of some ranks has put into its part to all ranks.

        Args:
            owners: Who has put something there, in the order of their parts.
            rows: What has such parts, equally long, and nothing else; (owners x length,).
        """
        for phase, (group, moves) in enumerate(zip(self._groups, self._moves(owners), strict=True)):
            if group is not None and moves:
                with self._within(phase):
                    self._move(group, moves, rows, len(owners))

    def _move(self, group: Any, moves: Sequence[Move], rows: Sequence[Tensor], num_parts: int) -> None:
        for row in rows:
            part = row.numel() // num_parts
            if is_gather(moves, group.size()):
                own = moves[group.rank()]
                into = row[moves[0].begin * part : moves[-1].end * part]
                group._allgather_base(into, row[own.begin * part : own.end * part]).wait()
            else:
                self._broadcast(group, moves, row, part)

    def _broadcast(self, group: Any, moves: Sequence[Move], row: Tensor, part: int) -> None:
        """At once where the backend can: one after the other they would take as long as all of them."""
        at_once = group.supports_coalescing
        if at_once:
            group._start_coalescing()
        works = []
        for move in moves:
            how = dist.BroadcastOptions()
            how.rootRank = move.root
            works.append(group.broadcast([row[move.begin * part : move.end * part]], how))
        if at_once:
            works = [group._end_coalescing()]
        for work in works:
            work.wait()
