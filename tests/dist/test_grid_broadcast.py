"""Broadcasts along the axes of a grid, by real collectives: those of Gloo, called as those of NCCL are."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastload.transfer.device_transport import GridBroadcast
from fastload.transfer.messages import Grid
from fastload.transfer.plan import ReaderWindows
from tests.dist.harness import ranks

_CHUNK_BYTES = 37
_PATIENCE = timedelta(seconds=60)


class Blocking:
    """A Gloo group whose calls return once they are over, since host memory has no streams to wait."""

    supports_coalescing = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank

    def broadcast(self, *arguments: Any) -> None:
        self._group.broadcast(*arguments).wait()

    def _allgather_base(self, *arguments: Any) -> None:
        self._group._allgather_base(*arguments).wait()


def broadcast_of(grid: Grid, rank: int) -> GridBroadcast:
    """Has a Gloo group for each axis of a rank."""
    store = dist.distributed_c10d._get_default_store()
    groups: list[Any] = []
    for phase in range(grid.num_phases):
        axis = grid.axis(rank, phase)
        namespace = dist.PrefixStore(f"axes/{phase}/{axis[0]}", store)
        group = None
        if len(axis) > 1:
            group = Blocking(dist.ProcessGroupGloo(namespace, axis.index(rank), len(axis), _PATIENCE))
        groups.append(group)
    return GridBroadcast(grid, rank, groups, lambda phase: nullcontext())


@pytest.mark.slow(but=["3-11"])
@ranks(11, deadline_s=90)
@pytest.mark.parametrize("num_locals", [1, 3, 11])
def test_all_chunks_reach_all_ranks(rank: int, world: int, num_locals: int) -> None:
    hosts = [f"host{rank // num_locals}" for rank in range(world)]
    grid = Grid.of(hosts)
    broadcast = broadcast_of(grid, rank)
    windows = [
        window
        for num_windows in (1, 2, 3, 8)
        for window in ReaderWindows.of(range(world), hosts, num_windows, by_local=True).readers
    ]
    for owners in (*windows, (5, 2), (7, 0, 1), tuple(range(world))[::-1]):
        chunks = torch.zeros(len(owners) * _CHUNK_BYTES, dtype=torch.uint8)
        statuses = torch.zeros(len(owners), dtype=torch.uint8)
        if rank in owners:
            place = owners.index(rank)
            chunks[place * _CHUNK_BYTES : (place + 1) * _CHUNK_BYTES] = rank + 1
            statuses[place] = rank + 1
        broadcast.run(owners, chunks, statuses)
        assert statuses.tolist() == [owner + 1 for owner in owners]
        assert torch.equal(chunks, statuses.repeat_interleave(_CHUNK_BYTES))
