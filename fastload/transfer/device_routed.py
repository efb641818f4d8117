"""The exchange between devices where ranks want different bytes: parcels among few groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from fastload.base.devices import use_stream
from fastload.base.memory import allocate, allocate_staging
from fastload.base.stopwatch import Stopwatch
from fastload.ranks.world import World
from fastload.transfer.communicators import Communicators
from fastload.transfer.endings import Endings
from fastload.transfer.lanes import Ranks
from fastload.transfer.rounds import FAILED, FlatSlab, Round
from fastload.transfer.spreads import Spreads

__all__ = ["DeviceRoutedExchange"]


class DeviceRoutedExchange:
    """Parcels between devices, each from the rank that reads it to a group that wants it.

    Chunks are read into host memory, and packed on the device. A rank that cannot read takes part all the
    same, and says so when all of them meet after the rounds; see `RoutedExchange`.

    Args:
        world: The ranks.
        groups: See `groups_of`; not empty.
        device: This rank's accelerator, with its number.
        backend: What moves data between the devices, as `exchange.backend_of` names it.
    """

    private = True
    shares_memory = False
    num_sharing = 1
    bytes_in = 0  # nobody counts what the backend takes between hosts

    def __init__(self, world: World, groups: Sequence[Ranks], device: torch.device, backend: str) -> None:
        self.transport = f"{backend} routed"
        self.device = device
        self.watch = Stopwatch()
        self._rank = world.rank
        self._members = {number: ranks for number, ranks in enumerate(groups) if world.rank in ranks}
        name = f"routed {xxhash.xxh3_64_hexdigest(repr(groups).encode())}"
        self._communicators = Communicators(world, name, self._members, device, backend)
        self._spreads = Spreads(world.rank, {})
        self._packing, self._moving = torch.Stream(device), torch.Stream(device)
        self._endings = Endings(device, self.watch)

    def offer(self) -> Any:
        return self._communicators.offer()

    def renew(self) -> None:
        self._communicators.renew()

    def accept(self, offers: Sequence[Any]) -> None:
        self._communicators.accept(offers)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        made = self._communicators.meet(give_up)
        self._spreads = Spreads(self._rank, {self._members[number]: group for number, group in made.items()})
        self._endings.begin()

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[FlatSlab, Tensor | None]:
        slab = allocate((slab_bytes,), torch.uint8, self.device)
        slab.record_stream(self._packing)
        slab.record_stream(self._moving)
        return FlatSlab(slab), self.allocate_own(own_bytes)

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=True)

    def post(self, work: Round) -> None:
        # Kernels of the caller's that still use what was freed here come first.
        here = torch.accelerator.current_stream(self.device)
        self._packing.wait_stream(here)
        self._moving.wait_stream(here)
        work.pack = partial(self._pack, work.pack)

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        ended = torch.Event(self.device)
        try:
            with self._on(self._moving):
                self._moving.wait_stream(self._packing)
                legs = (*work.kept, *work.incoming)
                for leg in legs:  # some have memory besides the slab
                    leg.data.record_stream(self._moving)
                self._spreads.bring(legs)
                ended.record(self._moving)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._endings.follow(work, ended, partial(self._note, work))

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass  # the round is done, and with it what this rank has sent

    def close(self) -> None:
        self._communicators.close(keep=self._endings.close())

    def _pack(self, pack: Callable[[Round], None], work: Round) -> None:
        with self._on(self._packing):
            pack(work)

    def _note(self, work: Round) -> None:
        if work.status == FAILED:
            work.statuses = {self._rank: FAILED}

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        # What the caller's thread has allocated in inference mode cannot be written in another mode.
        with torch.inference_mode(), use_stream(stream):
            yield
