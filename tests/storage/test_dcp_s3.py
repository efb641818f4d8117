"""What torch saved, read from a real S3 server: how often it is asked, and for how much."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import fastload
from fastload.ext.remote.obstore import ObjectStorage
from fastload.integrations.dcp import Writer
from tests.dist.harness import run_ranks
from tests.dist.test_sharded import placed
from tests.dist.test_sharded_states import assert_equal, whole
from tests.storage.s3_server import BUCKET, client_of, seaweed_server

NUM_LAYERS, SIZE = 12, 512


def state() -> dict[str, Tensor]:
    generator = torch.manual_seed(8)
    return {
        f"layers.{number}.{name}": torch.randn(shape, generator=generator)
        for number in range(NUM_LAYERS)
        for name, shape in {"up": (SIZE, SIZE), "down": (SIZE, SIZE), "bias": (SIZE,)}.items()
    }


def few() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state().items() if name.split(".")[1] in "078"}


def turned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same but for one tensor, which has other strides than those that are called like it."""
    return state | {"layers.7.up": state["layers.7.up"].t()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The options of the clients of a server, which has several checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "many", state())
    save(folder / "turned", turned(state()))
    save(folder / "parts", turned(few()))
    torch.save(turned(few()), folder / "parts.pt")
    save(folder / "old", few())
    (folder / "old" / "config.json").write_text("{}")
    with seaweed_server(tmp_path_factory.mktemp("server")) as options:
        client = client_of(options)
        for path in (path for path in folder.rglob("*") if path.is_file()):
            client.put_object(Bucket=BUCKET, Key=str(path.relative_to(folder)), Body=path.read_bytes())
        yield options


def save(folder: Path, state: dict[str, Tensor]) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what an object store is asked for."""
    counts: Counter[str] = Counter()
    original = ObjectStorage.read_into

    def counted(self: ObjectStorage, name: str, offset: int, buffers: Any, *others: Any) -> None:
        counts["reads"] += 1
        counts["bytes"] += sum(map(len, buffers))
        original(self, name, offset, buffers, *others)

    monkeypatch.setattr(ObjectStorage, "read_into", counted)
    return counts


@pytest.mark.slow
def test_items_are_not_asked_for_one_by_one(server: dict[str, Any], requests: Counter[str]) -> None:
    saved = state()
    with fastload.open(f"s3://{BUCKET}/many", storage_options=server) as checkpoint:
        assert requests["reads"] <= 1 + 2 * 3  # the metadata, and one item of each kind
        assert_equal(checkpoint.load(), saved)
        assert len(checkpoint.manifest.guards) == len(saved)
    assert requests["reads"] <= 7 + len(saved)
    assert requests["bytes"] <= 1.02 * sum(tensor.nbytes for tensor in saved.values())


def test_an_item_that_is_not_like_the_others_is_found_out(
    server: dict[str, Any], requests: Counter[str]
) -> None:
    saved = turned(state())
    with fastload.open(f"s3://{BUCKET}/turned", storage_options=server) as checkpoint:
        first = checkpoint.load()
        before = requests["reads"]
        assert_equal(first, saved)
        assert not checkpoint.manifest.guards
        assert_equal(checkpoint.load(names="*.up"), {k: v for k, v in saved.items() if k.endswith("up")})
    assert requests["reads"] - before <= NUM_LAYERS
    with fastload.open(f"s3://{BUCKET}/turned", storage_options=server) as checkpoint:
        assert_equal(dict(checkpoint.tensors()), saved)
    with fastload.prefetch(f"s3://{BUCKET}/turned", storage_options=server) as checkpoint:
        assert_equal(checkpoint.load(), saved)
        assert checkpoint.report is not None
        assert checkpoint.report.bytes_read == 0


def load(rank: int, world: int, url: str, storage: Any, expected: dict[str, Tensor]) -> bool:
    """Into parts that begin within items, so that nobody wants their first bytes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    options = fastload.LoadOptions(timeout_s=40)
    into = {
        name: placed(torch.zeros_like(tensor), init_device_mesh("cpu", (world,)), [Shard(tensor.dim() - 1)])
        for name, tensor in expected.items()
    }
    part = torch.zeros(4, 6)
    boxes = {"layers.7.up": [(fastload.Box((3, 5), part.shape), part)]} if rank == 0 else {}
    with fastload.open(url, options=options, storage_options=storage) as checkpoint:
        checkpoint.read(boxes)
        was_closer = not checkpoint.manifest.guards
        fastload.load(url, into=into, options=options, storage_options=storage)
    assert_equal(whole(into), expected)
    atomic = fastload.LoadOptions(timeout_s=40, atomic=True)
    fastload.load(url, into={n: t.zero_() for n, t in into.items()}, options=atomic, storage_options=storage)
    assert_equal(whole(into), expected)
    if rank == 0:
        assert torch.equal(part, expected["layers.7.up"][3:7, 5:11])
    replicated = fastload.load(f"{url}.pt", options=options, storage_options=storage)
    assert_equal(replicated, expected)
    return was_closer


def test_ranks_want_parts_of_what_is_not_like_the_others(server: dict[str, Any]) -> None:
    assert all(run_ranks(load, 2, url=f"s3://{BUCKET}/parts", storage=server, expected=turned(few())))


def test_what_torch_saved_is_replaced_as_dcp_does(server: dict[str, Any]) -> None:
    url, new = f"s3://{BUCKET}/old", {"w": torch.ones(3)}
    for overwrite in (False, True):
        options = fastload.SaveOptions(overwrite=overwrite)
        with pytest.raises(fastload.FastloadError):
            fastload.save(new, url, storage_options=server, options=options)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(new, storage_writer=Writer(url, storage_options=server), no_dist=True)
    assert_equal(fastload.load(url, storage_options=server), new)
    there = client_of(server).list_objects_v2(Bucket=BUCKET, Prefix="old/")["Contents"]
    names = ["config.json", "fastload.json", "model.safetensors"]
    assert sorted(found["Key"] for found in there) == [f"old/{name}" for name in names]
