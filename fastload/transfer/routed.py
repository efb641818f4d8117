"""The exchange over Gloo where ranks want different bytes: parcels, from those who read to those who want."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fastload.base.memory import allocate_staging
from fastload.base.stopwatch import Stopwatch
from fastload.comm.hosts import Peer
from fastload.comm.world import World
from fastload.transfer.rounds import FAILED, FlatSlab, Leg, Round, wait_sent
from fastload.transfer.wire import Relay, Wire

__all__ = ["RoutedExchange"]


class RoutedExchange:
    """Parcels over Gloo, each passed on from one rank that wants it to the next.

    Receives are posted ahead; a parcel is passed on as soon as it is here. A rank that cannot read sends
    what it has in its buffers, so that nobody waits for it, and says so when all of them meet after the
    rounds: those who want other bytes have nothing to do with it until then.

    Args:
        world: The ranks.
        partners: Those that this one sends to or receives from.
        pinned: Page-locks slabs, for copies to an accelerator.
    """

    transport = "gloo routed"
    private = True
    shares_memory = False
    num_sharing = 1

    def __init__(self, world: World, partners: Collection[int], *, pinned: bool) -> None:
        self.device = torch.device("cpu")
        self.watch = Stopwatch()
        self._pinned = pinned
        self._rank = world.rank
        self._wire = Wire(world, range(world.size), partners)
        self._relay = Relay(self._pass_on, self._ended, self.watch, self._wire.timeout)

    @property
    def bytes_in(self) -> int:
        return self._relay.bytes_in

    def offer(self) -> Any:
        return self._wire.offer()

    def renew(self) -> None:
        self._wire.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        return self._wire.accept(offers)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        self._wire.connect(give_up=give_up)
        self._relay.begin()

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[FlatSlab, Tensor | None]:
        return FlatSlab(allocate_staging(slab_bytes, pinned=self._pinned)), None

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=self._pinned)

    def post(self, work: Round) -> None:
        try:
            work.receives = [self._receive(leg) for leg in work.incoming]
        except RuntimeError as error:
            work.broke(error)
        self._relay.post(work, sum(leg.data.nbytes for leg in work.incoming))

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        if work.status == FAILED:
            self._wire.fail("this rank is lost to the load")  # it may not even have all parcels
        try:
            for leg in work.kept:
                self._send(work, leg)
        except RuntimeError as error:
            work.broke(error)
        work.started.set()

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        wait_sent(work, until_s, give_up)

    def close(self) -> None:
        if self._relay.close(self._wire.cut):
            self._wire.close(keep=self._relay.whole)

    def _pass_on(self, work: Round) -> None:
        for leg, receive in zip(work.incoming, work.receives, strict=False):
            try:
                receive.wait(self._wire.timeout)
                self._send(work, leg)
            except RuntimeError as error:
                self._wire.fail(str(error))
                work.broke(error)

    def _ended(self, work: Round) -> None:
        if work.status == FAILED:
            work.statuses = {self._rank: FAILED}
        work.done.set()

    # The parcels of one reader come in the same order at both ends: that in which they are passed on.

    def _receive(self, leg: Leg) -> Any:
        return self._wire.receive(leg.data, leg.parcel.source, self._wire.number(leg.parcel.reader))

    def _send(self, work: Round, leg: Leg) -> None:
        if leg.parcel.next is not None:
            tag = self._wire.number(leg.parcel.reader)
            work.sends.append(self._wire.send(leg.data, leg.parcel.next, tag))
