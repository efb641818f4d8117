"""Sharded saves to an object store, which takes files in parts of some MiB, each from one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastload
from fastload.ext.remote import s3
from tests.dist.harness import run_ranks
from tests.dist.test_sharded import placed
from tests.storage.s3_server import BUCKET, s3_server


def state() -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.arange(1024 * 600).reshape(1024, 600) + number for number in range(3)}


def save(rank: int, world: int, url: str, storage: Any) -> list[int]:
    s3._PART_BYTES = 1 << 20  # which this server takes
    mesh = init_device_mesh("cpu", (world,))
    placements = [Shard(0), Shard(1), Shard(0)]
    parts = {
        name: placed(tensor, mesh, [one])
        for (name, tensor), one in zip(state().items(), placements, strict=True)
    }
    options = fastload.SaveOptions(timeout_s=50, writers="all")
    handle = fastload.async_save(parts, url, storage_options=storage, options=options)
    return [one.bytes_written for one in handle.wait().ranks]


def test_shards_become_the_same_parts(tmp_path: Path) -> None:
    fastload.save(state(), tmp_path / "plain")
    with s3_server(tmp_path / "server") as storage:
        written, *_ = run_ranks(save, 3, url=f"s3://{BUCKET}/sharded", storage=storage)
    plain = {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir()}
    folder = tmp_path / "server" / BUCKET / "sharded"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == plain
    assert max(written) < sum(written) / 3 + 4 * s3._LEAST_PART_BYTES


def save_delta(rank: int, world: int, url: str, base: str, storage: Any) -> tuple[bool, bool]:
    chosen = fastload.SaveOptions(timeout_s=50, base=base)
    before = fastload.load(base, storage_options=storage, options=fastload.LoadOptions(timeout_s=50))
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["t1"][5] += 1
    report = fastload.save(after, url, storage_options=storage, options=chosen)
    load = fastload.LoadOptions(timeout_s=50, bases=base.rpartition("/")[0])
    loaded = fastload.load(url, storage_options=storage, options=load)
    fastload.load(url, into=before, storage_options=storage, options=load)
    return bool(report.base), all(
        loaded[name].equal(tensor) and before[name].equal(tensor) for name, tensor in after.items()
    )


@pytest.mark.slow
def test_a_delta_in_a_bucket_of_a_base_elsewhere(tmp_path: Path, seaweed: dict[str, Any]) -> None:
    for base in (str(tmp_path / "local" / "0"), f"s3://{BUCKET}/complete/0"):
        fastload.save(state(), base, storage_options=seaweed)
        url = f"s3://{BUCKET}/deltas/{base[0]}1"
        for found in run_ranks(save_delta, 2, url=url, base=base, storage=seaweed):
            assert found == (True, True)
