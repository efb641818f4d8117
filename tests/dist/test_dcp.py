"""What torch.distributed.checkpoint saved, as it saved it, into anything."""

from __future__ import annotations

import os
import resource
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastload
from fastload.errors import CheckpointError, CheckpointExists
from fastload.ext.formats.convert import load_parts, write_dcp_folder
from tests.dist.harness import ranks
from tests.dist.test_sharded_failures import break_reads
from tests.dist.test_sharded_states import assert_equal, options, read, reference, sharded, train, whole


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on a mesh of all ranks, and its optimizer, after some steps."""
    model = sharded(reference(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, 2)
    return model, optimizer


def empty_model(mesh: tuple[int, ...]) -> nn.Module:
    names = ("dp", "tp")[: len(mesh)]
    model = sharded(reference(), init_device_mesh("cpu", mesh, mesh_dim_names=names))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model


def hybrid_model() -> nn.Module:
    """Two replicas, each sharded (HSDP), with nothing in them."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(reference(), mesh=mesh)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model


def zeros(state: Any) -> Any:
    """The same nested state with nothing in it."""
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeros(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, Tensor) else 0


def save_each_way(state: dict[str, Any], folder: Path) -> list[Path]:
    """As programs do: at once, in the background, with several threads, without collectives."""
    ways = {name: folder / name for name in ("plain", "async", "threads", "alone")}
    dcp.save(state, checkpoint_id=ways["plain"])
    dcp.async_save(state, checkpoint_id=ways["async"]).result()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(ways["threads"], thread_count=3))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(ways["alone"]), use_collectives=False)
    return list(ways.values())


@pytest.mark.slow
@ranks(4, deadline_s=110)
def test_a_training_comes_back(rank: int, world: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # torch's own, of what it deprecates
    model, optimizer = trained()
    turned = torch.arange(12.0).reshape(3, 4).t()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "by_name": get_optimizer_state_dict(model, optimizer),
        "turned": turned,
        "more": {"step": 2, "text": "été", "nested": [{"seed": torch.tensor(7)}, 1.5], "pair": (1, None)},
        "complex": torch.randn(3, dtype=torch.complex128, generator=torch.manual_seed(1)),
        "nothing": torch.empty(0, 3),
        "big": torch.randn(700, 500, generator=torch.manual_seed(2)),
    }
    expected = whole(state)
    for path in save_each_way(state, tmp_path):
        reports: list[fastload.LoadReport] = []
        found = fastload.load(path, options=options(reports))
        assert_equal(found, expected, path.name)
        manifest = fastload.inspect(path)
        heads = sum(len(manifest.heads[guard.head]) for guard in manifest.guards)  # small ones add up to much
        assert read(reports[0]) <= 1.01 * reports[0].bytes_wanted + heads
    path = tmp_path / "plain"
    for mesh in (4,), (2, 2):
        other = empty_model(mesh)
        fastload.load(path, into={"model": other}, strict=False, options=options())
        assert_equal(whole(other.state_dict()), expected["model"], str(mesh))
    fastload.stage(path, tmp_path / "staged", options=fastload.StageOptions(timeout_s=20))
    assert_equal(fastload.load(tmp_path / "staged", options=options()), expected)
    with pytest.raises(CheckpointError, match="no checksums to verify") as raised:
        fastload.verify(path)
    assert raised.type is CheckpointError
    with fastload.open(path, options=options()) as checkpoint:
        parts = load_parts(checkpoint)
    shown: list[tuple[int, int]] = []
    show = lambda *now: shown.append(now)  # noqa: E731
    write_dcp_folder(parts, str(tmp_path / "again"), overwrite=False, timeout_s=20, progress=show)
    assert shown[-1][0] == shown[-1][1] > 0
    assert len(fastload.inspect(tmp_path / "again").by_name["big"].pieces) == world
    again = zeros(expected)
    dcp.load(again, checkpoint_id=tmp_path / "again")
    assert_equal(again, expected)
    with pytest.raises(CheckpointExists):
        write_dcp_folder(parts, str(tmp_path / "again"), overwrite=False, timeout_s=20)
    with pytest.MonkeyPatch.context() as patch:
        break_reads(patch, 3 if rank == 1 else None)
        hybrid = hybrid_model()
        into = {"model": hybrid}
        fastload.load(path, into=into, strict=False, options=replace(options(reports), chunk_bytes=16 << 10))
        assert_equal(whole(hybrid.state_dict()), expected["model"])
        found = fastload.load(path, options=replace(options(reports), chunk_bytes=16 << 10))
        assert_equal(found, expected)
        assert all("stopped reading" in report.ranks[1].note for report in reports[-2:])
    other = empty_model((4,))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    into: dict[str, Any] = {"model": other, "optimizer": fresh, "more": {"step": 0}}
    fastload.load(path, into=into, strict=False, options=options())
    assert_equal(whole(fresh.state_dict()), expected["optimizer"])
    assert into["more"]["step"] == 2
    train(model, optimizer, 1)
    train(other, fresh, 1)
    assert_equal(whole(other.state_dict()), whole(model.state_dict()))
    replicated = fastload.load(
        path, names=["model.blocks.*.up.*", "turned"], dtype=torch.float64, options=options()
    )
    assert torch.equal(replicated["turned"], turned.double())
    assert len(replicated) == 5


@ranks(4, deadline_s=60)
def test_hugging_face_shards_come_back(rank: int, world: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    state = trained()[0].state_dict()
    del state["head.weight"]  # which safetensors refuses to store twice
    expected = whole(state)
    for consolidates in (False, True):
        path = tmp_path / str(consolidates)
        writer = dcp.HuggingFaceStorageWriter(
            str(path), save_distributed=True, enable_consolidation=consolidates, thread_count=2
        )
        dcp.save(state, storage_writer=writer)
        for place in (path, path / "sharded") if consolidates else (path,):
            assert_equal(fastload.load(place, options=options()), expected, str(place))
        other = empty_model((2, 2))
        fastload.load(path, into=other, options=options())
        assert_equal(whole(other.state_dict()), expected | {"head.weight": expected["embedding.weight"]})


@ranks(1, 2)
def test_a_directory_that_cannot_be_written_leaves_nothing(rank: int, world: int, tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((300, 300), float(number)) for number in range(4)}
    fastload.save(state, tmp_path / "own")
    with fastload.open(tmp_path / "own") as checkpoint:
        parts = load_parts(checkpoint)
    if rank == world - 1:  # as if its disk were full
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=rf"dcp: .* failed: rank {world - 1}: .* check the space"):
        write_dcp_folder(parts, str(tmp_path / "new" / "dcp"), overwrite=False, timeout_s=20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    dist.barrier()
    assert os.listdir(tmp_path / "new") == []
    write_dcp_folder(parts, str(tmp_path / "new" / "dcp"), overwrite=False, timeout_s=20)
    assert_equal(fastload.load(tmp_path / "new" / "dcp"), state)
    assert os.listdir(tmp_path / "new") == ["dcp"]
