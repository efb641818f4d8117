"""The requests of saves to S3: how many wait for each other, and how many parts are under way at once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastload
from fastload.ext.remote import s3 as s3_uploads
from tests.dist.flaky_server import serving
from tests.dist.harness import run_ranks
from tests.dist.patience import patient
from tests.dist.test_sharded import placed
from tests.storage.round_trips import RoundTrips
from tests.storage.s3_server import BUCKET

_SMALL = {"weight": torch.arange(2500.0)}


@pytest.fixture
def proxy(seaweed: dict[str, Any]) -> Iterator[tuple[RoundTrips, dict[str, Any]]]:
    with serving(RoundTrips(seaweed["endpoint"])) as proxy:
        yield proxy, {**seaweed, "endpoint": proxy.url}


def new_url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/step"


def save_small(rank: int, world: int, url: str, storage: Any) -> None:
    fastload.save(_SMALL, url, storage_options=storage)


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_small_save_waits_for_at_most_twelve_answers(proxy: Any, num_ranks: int) -> None:
    server, storage = proxy
    run_ranks(save_small, num_ranks, url=new_url(), storage=storage)
    # Ten; on a busy machine two of them that do not wait for each other may come apart.
    assert len(server.rounds) <= 12, server.rounds


def test_the_caller_of_async_save_waits_for_no_answer(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, storage = proxy
    released = threading.Event()
    real = server.hold
    monkeypatch.setattr(server, "hold", lambda *request: (released.wait(patient(20)), real(*request)))
    handle = fastload.async_save(_SMALL, new_url(), storage_options=storage)
    returned_early = not released.is_set()
    released.set()
    handle.wait(patient(60))
    assert returned_early
    assert server.rounds != []


def save_parts(rank: int, world: int, url: str, storage: Any, sharded: bool, **how: Any) -> None:
    s3_uploads._PART_BYTES = s3_uploads._LEAST_PART_BYTES = 1 << 20  # which rclone takes
    tensor = torch.zeros(44 << 10, 1024, dtype=torch.uint8)
    if sharded:
        tensor = placed(tensor, init_device_mesh("cpu", (world,)), [Shard(1)])  # each part is of all ranks
    options = fastload.SaveOptions(writers=1, timeout_s=patient(60), **how)
    fastload.save({"weight": tensor}, url, storage_options=storage, options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "how", "num_parts"),
    [
        (1, {}, 32),
        (1, {"write_threads": 7}, 7),
        (2, {"write_threads": 40}, 40),
        (2, {"staging_bytes": 20 << 20}, 13),
    ],
    ids=["default", "by hand", "shards", "little memory"],
)
def test_parts_under_way_at_once(
    s3: dict[str, Any], num_ranks: int, how: Mapping[str, int], num_parts: int
) -> None:
    with serving(RoundTrips(s3["endpoint"], num_parts)) as server:
        storage = {**s3, "endpoint": server.url}
        run_ranks(save_parts, num_ranks, url=new_url(), storage=storage, sharded=num_ranks > 1, **how)
    assert server.parts_at_once == num_parts
