"""How a load ends that cannot go on."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from fastload.base.stopwatch import Stopwatch
from fastload.comm.world import World
from fastload.errors import ChecksumError
from fastload.formats.manifest import TensorEntry
from fastload.loading.place import Destination, Placer
from fastload.transfer.pipeline import Pipeline
from fastload.transfer.rounds import LocalExchange, Round
from fastload.transfer.slabs import Slabs
from tests.unit.plans import plan_for_all

_NBYTES = 1 << 16


class SharedExchange(LocalExchange):
    """Stands for one that uses the caller's own group; notes what it is asked to do."""

    private = False

    def __init__(self) -> None:
        super().__init__(pinned=False)
        self.posted: list[int] = []
        self.started: list[int] = []

    def post(self, work: Round) -> None:
        self.posted.append(work.index)

    def start(self, work: Round) -> None:
        self.started.append(work.index)
        super().start(work)


class DamagedReader:
    """Finds the first chunk damaged, and is slow with the others."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._num_asked = 0

    def stop(self) -> None:
        pass

    def submit(self, spans: Any, buffers: Any) -> Future[None]:
        future: Future[None] = Future()
        if self._num_asked == 0:
            future.set_exception(ChecksumError("a block is not as it was written"))
        else:
            threading.Timer(0.1 * self._num_asked, future.set_result, [None]).start()
        self._num_asked += 1
        return future


def test_no_collective_of_the_callers_group_is_left_half_entered() -> None:
    entry = TensorEntry("t", "U8", (_NBYTES,), 0, 0, _NBYTES)
    plan = plan_for_all([entry], world_size=1, readers=[0], staging_bytes=1 << 20, chunk_bytes=4096)
    exchange, reader = SharedExchange(), DamagedReader()
    placer = Placer([Destination(entry, torch.uint8, torch.zeros(_NBYTES, dtype=torch.uint8))])
    world = World(rank=0, size=1, group=None, timeout_s=30)
    slabs = Slabs(plan, 0, exchange, placer)
    pipeline = Pipeline(world, plan, reader, exchange, placer, slabs, None)  # type: ignore[arg-type]
    with pytest.raises(ChecksumError):
        pipeline.run()
    assert exchange.started == exchange.posted == list(range(plan.depth))
    pipeline.close()
