"""Files of torch.save on several ranks: read once, in parts, from any storage, converted by all together."""

from __future__ import annotations

import zipfile
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fastload
from fastload.errors import CheckpointError, CheckpointExists, FastloadError, ManifestError, OptionError
from fastload.ext.formats.convert import load_parts, write_torch_file
from fastload.geometry.dtensors import local_of
from tests.dist.flaky_server import serve
from tests.dist.harness import ranks, run_ranks
from tests.unit.test_torch_files import assert_same

TIMEOUT_S = 30.0


def make(rank: int, path: Path) -> Any:
    """A state with tensors that lie in every way; rank 0 saves it."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(600, 1000, generator=generator)
    state = {
        "model": OrderedDict(a=base, tied=base, turned=torch.randn(900, 700, generator=generator).t()),
        "slice": base[5:50, 3:999:2],
        "row": torch.randn(1, 400_000, generator=generator),
        "bits": base.to(torch.float8_e4m3fn),
        "pairs": torch.randn(50, 60, dtype=torch.complex128, generator=generator).t(),
        "one": torch.ones(1).expand(1000),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "none": torch.zeros(0, 3),
    }
    if rank == 0:
        torch.save(state, path)
    torch.distributed.barrier()
    return state


@ranks(3)
def test_a_file_is_read_once_whoever_wants_what(rank: int, world: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    state = make(rank, path)
    options = fastload.LoadOptions(strategy="allgather", io="buffered", chunk_bytes=64 << 10)
    with fastload.open(path, options=options) as checkpoint:
        assert_same(checkpoint.load(), state)
        report = checkpoint.report
        assert report is not None
        # Beside the tensors, the slice and what lies between its rows.
        assert report.bytes_read <= 1.02 * path.stat().st_size + state["model"]["a"].nbytes
        mesh = init_device_mesh("cpu", (world,))
        into: dict[str, Any] = {"model": {}}
        wanted: dict[str, DTensor] = {}
        for name, dim in (("a", 0), ("turned", 0), ("tied", 1)):
            wanted[name] = distribute_tensor(state["model"][name], mesh, [Shard(dim)], src_data_rank=None)
            into["model"][name] = distribute_tensor(
                torch.zeros_like(wanted[name].full_tensor()), mesh, [Shard(dim)]
            )
        checkpoint.load(into=into, strict=False)
        for name, tensor in wanted.items():
            assert torch.equal(into["model"][name].to_local(), tensor.to_local())
        report = checkpoint.report
        assert report is not None
        assert report.bytes_wanted == state["model"]["a"].nbytes + state["model"]["turned"].nbytes


@ranks(2)
def test_what_is_bad_is_said_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    if rank == 0:
        torch.save({"good": torch.ones(3), "odd": deque()}, path)
    torch.distributed.barrier()
    for call in (fastload.load, lambda where: load_parts(fastload.open(where))):
        with pytest.raises(ManifestError, match=r"state\['odd'\] is collections.deque"):
            call(path)
    assert fastload.load(path, strict=False)["odd"] is None
    if rank == 0:
        path.write_bytes(path.read_bytes()[:-9])
    torch.distributed.barrier()
    with pytest.raises(ManifestError, match="no end record"):
        fastload.load(path)


@pytest.mark.slow
@ranks(3)
def test_all_ranks_convert_and_none_holds_the_whole(rank: int, world: int, tmp_path: Path) -> None:
    state = make(rank, tmp_path / "a.pt")
    with fastload.open(tmp_path / "a.pt") as checkpoint:
        parts = load_parts(checkpoint)
        total = checkpoint.manifest.nbytes
    assert sum(local_of(tensor).nbytes for tensor in parts.tensors.values()) < 0.55 * total
    fastload.save(parts.state(), tmp_path / "new")
    assert_same(fastload.load(tmp_path / "new"), state)
    new = str(tmp_path / "new.pt")
    write_torch_file(parts, new, overwrite=False, timeout_s=TIMEOUT_S)
    assert_same(torch.load(new, weights_only=True), state)
    with zipfile.ZipFile(new) as archive:
        assert archive.testzip() is None
    for error, path, overwrite in (
        (CheckpointExists, new, False),
        (CheckpointExists, str(tmp_path / "new"), True),
        (OptionError, "s3://bucket/new.pt", False),
        (FastloadError, str(tmp_path / "nowhere" / "new.pt"), False),
    ):
        with pytest.raises(error):
            write_torch_file(parts, path, overwrite=overwrite, timeout_s=TIMEOUT_S)
    write_torch_file(parts, new, overwrite=True, timeout_s=TIMEOUT_S)
    torch.distributed.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "new", "new.pt"]
    torch.distributed.barrier()
    if rank == 0:
        (tmp_path / "bin").mkdir()
        (tmp_path / "a.pt").rename(tmp_path / "bin" / "pytorch_model.bin")
    torch.distributed.barrier()
    options = fastload.StageOptions(timeout_s=TIMEOUT_S)
    fastload.stage(tmp_path / "bin", tmp_path / "staged", options=options)
    assert_same(fastload.load(tmp_path / "staged"), state)
    one = fastload.stage(tmp_path / "bin" / "pytorch_model.bin", tmp_path / "other", options=options)
    assert_same(fastload.load(one.path), state)
    with pytest.raises(CheckpointError, match="no checksums to verify") as raised:
        fastload.verify(tmp_path / "staged")
    assert raised.type is CheckpointError


def load_over_http(rank: int, world: int, url: str, path: Path) -> int:
    with fastload.open(
        url, options=fastload.LoadOptions(strategy="allgather", timeout_s=TIMEOUT_S)
    ) as checkpoint:
        assert_same(checkpoint.load(), torch.load(path, weights_only=True))
    assert checkpoint.report is not None
    return sum(own.retries for own in checkpoint.report.ranks)


def test_small_tensors_are_few_requests_and_what_passes_is_outlasted(tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    tensors = {f"{number}": torch.full((number,), number) for number in range(100)}
    torch.save({**tensors, "large": torch.arange(100_000)}, path)
    with serve(tmp_path) as server:
        server.faults += ["503", "reset"]
        assert run_ranks(load_over_http, 2, url=f"{server.url}/any.name", path=path) == [2, 2]
        gets = [wanted for method, _, wanted in server.log if method == "GET"]
    assert len(gets) < 20
