"""The exchange over NCCL: an all-gather on device slabs."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastload.base.memory import allocate, allocate_staging
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background
from fastload.ranks.world import World
from fastload.transfer.rounds import TICK_S, FlatSlab, Round, Slots

__all__ = ["NcclExchange"]

_Running = tuple[Round, torch.cuda.Event, Tensor | None]
"""A round, what tells that it has ended, and host memory of its statuses, (ranks,), if it could be begun."""


class NcclExchange:
    """All-gather over NCCL on device slabs, on a stream of its own.

    Args:
        world: The ranks; their group has an NCCL backend.
        device: This rank's CUDA device.
    """

    transport = "nccl"
    shares_memory = False
    num_sharing = 1
    private = False  # a communicator of its own would cost memory and time in every load

    def __init__(self, world: World, device: torch.device) -> None:
        self.device = device
        self.watch = Stopwatch()
        self._rank = world.rank
        self._size = world.size
        self._group = world.group
        self._stream = torch.cuda.Stream(device)
        self._running: queue.SimpleQueue[_Running | None] = queue.SimpleQueue()
        self._waiter = background(self._wait_all, "fastload-nccl")

    def offer(self) -> None:
        return None

    def renew(self) -> None:
        pass

    def accept(self, offers: Sequence[Any]) -> None:
        pass

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        self._waiter.start()

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[FlatSlab, Tensor | None]:
        slab = allocate((slab_bytes,), torch.uint8, self.device)
        # Kernels of the caller's that still use what was freed here come first; and whoever gets the memory
        # next has to wait for what an abandoned load has left on the stream.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        slab.record_stream(self._stream)
        return FlatSlab(slab), allocate_staging(own_bytes, pinned=True)

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=True)

    def post(self, work: Round) -> None:
        pass

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        sent = torch.cuda.Event()
        statuses = None
        try:
            # What the caller's thread has allocated in inference mode cannot be written in another mode.
            with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                if work.own is not None and self._rank in work.slots.each:
                    work.slots.each[self._rank].copy_(work.own, non_blocking=True)
                self._all_gather(work.slots)
                found = self._gather_statuses(work.status)
                # After the collectives, which no rank is to be left alone in.
                statuses = allocate_staging(self._size, pinned=True).copy_(found, non_blocking=True)
                sent.record(self._stream)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._running.put((work, sent, statuses))

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass  # the round is done, so every rank has sent and received all of it

    def close(self) -> None:
        if not self._waiter.is_alive():
            return
        self._running.put(None)
        self._waiter.join(2 * TICK_S)

    def _all_gather(self, slots: Slots) -> None:
        even = len({slot.numel() for slot in slots.each.values()}) == 1
        if even and len(slots.each) == self._size:
            _gather_single(slots.whole, slots.each[self._rank], self._group)
            return
        for owner, slot in slots.each.items():
            if slot.numel():
                dist.broadcast(slot, group=self._group, group_src=owner)

    def _gather_statuses(self, own: int) -> Tensor:
        """Returns what each rank says of its chunk, (ranks,), on the device."""
        statuses = torch.empty(self._size, dtype=torch.uint8, device=self.device)
        _gather_single(statuses, torch.full((1,), own, dtype=torch.uint8, device=self.device), self._group)
        return statuses

    def _wait_all(self) -> None:
        with torch.cuda.device(self.device):  # else of a new thread it is the first, which others use
            while (running := self._running.get()) is not None:
                self._wait(*running)

    def _wait(self, work: Round, sent: torch.cuda.Event, statuses: Tensor | None) -> None:
        try:
            while work.error is None and not sent.query():
                time.sleep(0.0002)  # a blocking wait could not be abandoned
            if statuses is not None:
                work.statuses = {rank: status for rank, status in enumerate(statuses.tolist()) if status}
        except RuntimeError as error:  # of any kernel before it
            work.broke(error)
        self.watch.stop(work.began, round=work.index)
        work.done.set()


def _gather_single(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)
