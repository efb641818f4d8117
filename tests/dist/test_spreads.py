"""Parcels among the groups that want them, by real collectives: those of Gloo, called as those of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fastload
from fastload.base.memory import allocate_staging
from fastload.loading import job
from fastload.loading.match import Match
from fastload.ranks.world import World
from fastload.transfer import device_routed
from fastload.transfer.lanes import Ranks
from fastload.transfer.rounds import FAILED, FlatSlab, LocalExchange, Round
from fastload.transfer.spreads import Spreads
from tests.checkpoints import assert_same_bits
from tests.dist.harness import ranks
from tests.dist.test_sharded import emptied, locals_of, make, placed, write
from tests.dist.test_sharded_failures import break_reads, load, tensors

_PATIENCE = timedelta(seconds=60)


class OverGloo(LocalExchange):
    """What the exchange over NCCL does, in the same order, in host memory in the place of a device."""

    transport = "nccl routed"
    num_made = 0

    def __init__(self, world: World, groups: Sequence[Ranks], device: torch.device, backend: str) -> None:
        super().__init__(pinned=False)
        self._rank = world.rank
        self._groups = groups
        self._name = f"spreads/{OverGloo.num_made}"
        OverGloo.num_made += 1

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[FlatSlab, Tensor | None]:
        slab, own = (allocate_staging(nbytes, pinned=False) for nbytes in (slab_bytes, own_bytes))
        return FlatSlab(slab), own

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        store = dist.distributed_c10d._get_default_store()
        made: dict[Ranks, Any] = {}
        for number, members in enumerate(self._groups):
            if self._rank in members:
                corner = dist.PrefixStore(f"{self._name}/{number}", store)
                place = members.index(self._rank)
                made[members] = dist.ProcessGroupGloo(corner, place, len(members), _PATIENCE)
        self._spreads = Spreads(self._rank, made)

    def start(self, work: Round) -> None:
        self._spreads.bring((*work.kept, *work.incoming))
        work.statuses = {self._rank: FAILED} if work.status == FAILED else {}
        work.started.set()
        work.done.set()


def take_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has loads decide as if all tensors were on devices with NCCL."""
    monkeypatch.setattr(device_routed, "DeviceRoutedExchange", OverGloo)
    monkeypatch.setattr(job, "backend_of", lambda group, device_type: "nccl")
    monkeypatch.setattr(Match, "device", property(lambda self: torch.device("cuda")))


@ranks(4, deadline_s=90)
def test_shards_and_replicas_of_them_come_to_all_who_want_them(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_for_devices(monkeypatch)
    tensors = make(tmp_path)
    if rank == 0:
        write(tmp_path, tensors)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2))
    layouts = (
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
        [Shard(0), Shard(1)],
    )
    for placements in layouts:
        state: dict[str, Tensor] = {
            name: placed(tensor, mesh, placements) if tensor.dim() else tensor.clone()
            for name, tensor in tensors.items()
        }
        before = locals_of(state)
        options = fastload.LoadOptions(timeout_s=60, chunk_bytes=4096)
        with fastload.open(tmp_path, options=options) as opened:
            opened.load(into=emptied(state))
        assert opened.report is not None
        assert opened.report.transport == "nccl routed"
        assert_same_bits(locals_of(state), before)


@ranks(4, deadline_s=90)
def test_ranks_that_cannot_read_take_part(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some columns of a chunk are for those who have not read it; what is left is read by the others."""
    take_for_devices(monkeypatch)
    path = tmp_path / "x.safetensors"
    if rank == 0:
        safetensors.torch.save_file(tensors(), path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (world,))
    for broken in ({}, {1: 3, 2: 0}):
        with pytest.MonkeyPatch.context() as patch:
            break_reads(patch, broken.get(rank))
            report = load(path, mesh, timeout_s=20, chunk_bytes=20_001, staging_bytes=1 << 20)
        assert report.transport == "nccl routed"
        assert [own.rank for own in report.ranks if "stopped reading" in own.note] == list(broken)
        assert max(own.peak_staging_bytes for own in report.ranks) <= 1 << 20
    with pytest.MonkeyPatch.context() as patch:
        break_reads(patch, 2 if rank == 1 else None, RuntimeError("odd bytes"))
        with pytest.raises(fastload.FastloadError, match="odd bytes"):
            load(path, mesh, timeout_s=20, chunk_bytes=20_001)
    load(path, mesh, timeout_s=20)
