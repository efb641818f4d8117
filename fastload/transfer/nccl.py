"""The exchange over NCCL: slabs on devices, along the lines of a grid of hosts and their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastload.base.memory import allocate, allocate_staging
from fastload.base.stopwatch import Stopwatch
from fastload.ranks.world import World
from fastload.transfer.communicators import Communicators
from fastload.transfer.endings import Endings
from fastload.transfer.grid import Grid
from fastload.transfer.lines import Lines
from fastload.transfer.rounds import FlatSlab, Round

__all__ = ["NcclExchange"]


class NcclExchange:
    """Collectives of NCCL on device slabs, on streams of their own.

    Where the ranks are a grid of more than one dimension, each line of it has a communicator, which is kept
    for the next loads of the group. Else the group's own is used.

    Args:
        world: The ranks; their group has an NCCL backend.
        device: This rank's CUDA device.
        hosts: Host of each rank.
    """

    transport = "nccl"
    shares_memory = False
    num_sharing = 1
    bytes_in = 0  # nobody counts what NCCL takes between hosts

    def __init__(self, world: World, device: torch.device, hosts: Sequence[str]) -> None:
        self.device = device
        self.watch = Stopwatch()
        self._rank = world.rank
        self._group = world.group
        grid = Grid.of(hosts)
        self.private = grid.num_lines > 1
        self._grid = grid if self.private else Grid(tuple(range(world.size)), (), world.size)
        self._communicators = _communicators(world, grid, device) if self.private else None
        # One for each phase: rounds overlap, each in another one.
        self._streams = [torch.cuda.Stream(device) for _ in range(self._grid.num_phases)]
        self._last = self._streams[0]
        self._lines: Lines | None = None
        self._endings = Endings(device, self.watch)

    def offer(self) -> Any:
        return self._communicators.offer() if self._communicators is not None else None

    def renew(self) -> None:
        if self._communicators is not None:
            self._communicators.renew()

    def accept(self, offers: Sequence[Any]) -> None:
        if self._communicators is not None:
            self._communicators.accept(offers)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        if self._communicators is not None:
            found = self._communicators.meet(give_up)
            groups = [found.get(phase) for phase in range(self._grid.num_phases)]
        else:
            assert self._group is not None
            groups = [None, self._group._get_backend(self.device)]
        self._lines = Lines(self._grid, self._rank, groups, self._within)
        self._endings.begin()

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[FlatSlab, Tensor | None]:
        slab = allocate((slab_bytes,), torch.uint8, self.device)
        for stream in self._streams:
            # Kernels of the caller's that still use what was freed here come first; and whoever gets the
            # memory next has to wait for what an abandoned load has left on the stream.
            stream.wait_stream(torch.cuda.current_stream(self.device))
            slab.record_stream(stream)
        return FlatSlab(slab), allocate_staging(own_bytes, pinned=True)

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=True)

    def post(self, work: Round) -> None:
        pass

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        ended = torch.cuda.Event()
        statuses = None
        try:
            # What the caller's thread has allocated in inference mode cannot be written in another mode.
            self._last = self._streams[0]
            with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._last):
                found = self._bring(work)
                with torch.cuda.stream(self._last):
                    # After the collectives, which no rank is to be left alone in.
                    statuses = allocate_staging(found.numel(), pinned=True).copy_(found, non_blocking=True)
                    ended.record(self._last)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._endings.follow(work, ended, partial(_note, work, statuses))

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass  # the round is done, so every rank of the lines has sent and received all of it

    def close(self) -> None:
        whole = self._endings.close()
        if self._communicators is not None:
            self._communicators.close(keep=whole)

    def _bring(self, work: Round) -> Tensor:
        """Brings chunks, and what is the matter with them, to all ranks; returns that, (readers,)."""
        assert self._lines is not None
        owners = tuple(work.slots.each)
        found = torch.zeros(len(owners), dtype=torch.uint8, device=self.device)
        if work.own is not None and self._rank in work.slots.each:
            work.slots.each[self._rank].copy_(work.own, non_blocking=True)
            found[owners.index(self._rank)].fill_(work.status)
        for stream in self._streams:
            found.record_stream(stream)
        self._lines.bring(owners, work.slots.whole, found)
        return found

    @contextmanager
    def _within(self, phase: int) -> Iterator[None]:
        """What is called here comes after what was called before, and beside other phases of other rounds."""
        self._streams[phase].wait_stream(self._last)
        self._last = self._streams[phase]
        with torch.cuda.stream(self._last):
            yield


def _communicators(world: World, grid: Grid, device: torch.device) -> Communicators:
    """Those of the lines of a rank, by phase."""
    phases = [phase for phase in range(grid.num_phases) if grid.has_line(world.rank, phase)]
    lines = {phase: grid.line(world.rank, phase) for phase in phases}
    return Communicators(world, f"nccl {grid.dims} {device}", lines, device)


def _note(work: Round, statuses: Tensor | None) -> None:
    """Notes which chunks of a round could not be read.

    Args:
        work: The round, which is here.
        statuses: Host memory of what each reader says, (readers,).
    """
    if statuses is not None:
        found = zip(work.slots.each, statuses.tolist(), strict=True)
        work.statuses = {rank: status for rank, status in found if status}
