"""How many round trips it takes to open a checkpoint: requests of which each waits for the one before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fastload
from fastload import CheckpointManager, SaveOptions
from fastload.base.threads import in_threads
from tests.checkpoints import write_sharded
from tests.dist.flaky_server import serve
from tests.storage.s3_server import BUCKET, client_of
from tests.storage.waves import Waves, counting_waves

MOST = 5
NUM_SHARDS = 200
LONG = "text" * 40_000  # more than is read of a value at first


def many(count: int, numel: int) -> dict[str, torch.Tensor]:
    """Tensors whose names differ in more than numbers, so that DCP's layouts are not inferred."""
    letters = "abcdefghij"
    names = [letters[number % 10] + letters[number // 10 % 10] + str(number) for number in range(count)]
    return {name: torch.full((numel,), float(number)) for number, name in enumerate(names)}


def save_dcp(path: Path) -> None:
    """In 66 files."""
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": many(64, 20_000), "long": LONG, "short": {"step": 7}}, storage_writer=writer)


def save_hf(path: Path) -> None:
    shards = {
        f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors": [
            (f"layers.{number}.{one}", "U8", (9,)) for one in range(20)
        ]
        for number in range(NUM_SHARDS)
    }
    write_sharded(path, shards, index=True)


def save_own(path: Path) -> None:
    """In 64 files."""
    fastload.save({**many(64, 2000), "step": 7}, path, options=SaveOptions(max_shard_bytes=9_000))


def save_run(path: Path) -> None:
    with CheckpointManager(path, async_=False) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))


def state_of(step: int) -> dict[str, object]:
    return {"weight": torch.full((2000,), float(step)), "step": step}


SAVED: dict[str, Callable[[Path], object]] = {
    "dcp": save_dcp,
    "hf": save_hf,
    "own": save_own,
    "small.pt": lambda path: torch.save({"weights": many(3, 2000)}, path),
    "large.pt": lambda path: torch.save({"weights": many(2000, 100), "long": LONG}, path),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, save in {**SAVED, "run": save_run}.items():
        save(folder / name)
    return folder


@pytest.fixture(scope="module")
def bucket(saved: Path, seaweed: dict[str, Any]) -> dict[str, Any]:
    def put(path: Path) -> None:
        client.put_object(Bucket=BUCKET, Key=f"trips/{path.relative_to(saved)}", Body=path.read_bytes())

    with closing(client_of(seaweed)) as client:
        in_threads(put, [path for path in saved.rglob("*") if path.is_file()])
    return seaweed


class Store(NamedTuple):
    """What was saved, at a URL, with the options of its clients; and their requests."""

    url: str
    options: dict[str, Any]
    waves: Waves


@pytest.fixture
def over_http(saved: Path) -> Iterator[Store]:
    with serve(saved) as server, counting_waves(server.url) as (gateway, waves):
        yield Store(gateway.url, {}, waves)


@pytest.fixture
def over_s3(bucket: dict[str, Any]) -> Iterator[Store]:
    with counting_waves(bucket["endpoint"]) as (gateway, waves):
        yield Store(f"s3://{BUCKET}/trips", {**bucket, "endpoint": gateway.url}, waves)


@pytest.mark.slow(but=["own", "dcp-over_http", "small.pt"])
@pytest.mark.parametrize("kind", ["over_http", "over_s3"])
@pytest.mark.parametrize("name", SAVED)
def test_open(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    store: Store = request.getfixturevalue(kind)
    with fastload.open(f"{store.url}/{name}", storage_options=store.options) as checkpoint:
        num_trips = store.waves.count
        assert checkpoint.manifest.tensors
    assert num_trips <= (3 if (name, kind) == ("hf", "over_s3") else MOST)


def test_manager(over_s3: Store) -> None:
    """The first requests of a manager, which looks for remains of dead saves, too."""
    with CheckpointManager(f"{over_s3.url}/run", storage_options=over_s3.options) as manager:
        assert manager.latest() == 2
        assert over_s3.waves.count == 2, "the listing, and all records"
    with CheckpointManager(f"{over_s3.url}/run", storage_options=over_s3.options) as manager:
        before, state = over_s3.waves.count, state_of(0)
        manager.restore(into=state)
        assert state["step"] == 2
        assert over_s3.waves.count - before <= 6, "two more for its own listing and record, and its data"
