"""`fastload.save_stream`: tensors that come one by one, in memory for one of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import fastload
from fastload.errors import OptionError, PeerError
from tests.accelerator import accelerator
from tests.dist.harness import ranks
from tests.dist.hosts import can_mount, mount_memory

NUM = 24
OPTIONS = fastload.SaveOptions(max_shard_bytes=1 << 20, staging_bytes=8 << 20, timeout_s=30)


def tensors() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for number in range(NUM):
        wide = torch.rand(400, 301 + number, generator=generator)
        yield f"layers.{number}.weight", wide.t() if number % 3 else wide.bfloat16()
        yield f"layers.{number}.steps", torch.tensor([number] * (number % 4), dtype=torch.int8)
    yield "scale", torch.tensor(2.5).to(torch.float8_e4m3fn)
    yield "mask", torch.tensor([True, False])
    yield "empty", torch.empty(0, 7)
    yield "conjugate", torch.tensor([1 + 2j]).conj()
    yield "parameter", torch.nn.Parameter(torch.ones(3))
    yield "frozen", torch.nn.Parameter(torch.ones(3), requires_grad=False)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow(but=["3-ranks"])
@ranks(1, 3)
def test_the_files_are_those_of_a_save(rank: int, world: int, tmp_path: Path) -> None:
    spool = tmp_path / f"spool-{rank}"
    spool.mkdir()
    share = [pair for number, pair in enumerate(tensors()) if number % world == rank]
    parts = fastload.SaveOptions(max_shard_bytes=1 << 20, parts=True, timeout_s=30)
    fastload.save(dict(share), tmp_path / "saved", options=parts)
    report = fastload.save_stream(iter(share), tmp_path / "streamed", spool=spool, options=OPTIONS)
    assert report.num_files > 1
    assert files_in(tmp_path / "streamed") == files_in(tmp_path / "saved")
    assert list(spool.iterdir()) == []


@pytest.mark.slow
@ranks(4)
def test_shards_of_dtensors(rank: int, world: int, tmp_path: Path) -> None:
    """Ranks yield their shards, each of its own mesh; the files are those of a save of all."""
    spool = tmp_path / f"spool-{rank}"
    spool.mkdir()
    complete = {name: tensor for name, tensor in tensors() if tensor.dim() == 2 and tensor.numel()}
    complete["short"] = torch.rand(2, 3)  # fewer rows than ranks
    meshes = {
        "fsdp": (init_device_mesh("cpu", (4,)), [Shard(0)]),
        "hsdp": (init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(1)]),
        "pair": (init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"], [Shard(0)]),
    }

    def shards() -> Iterator[tuple[str, Tensor]]:
        for number, (name, tensor) in enumerate(complete.items()):
            for kind, (mesh, placements) in meshes.items():
                if kind != "pair" or number % 2 == rank // 2:  # as stages of a pipeline
                    shard = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
                    yield f"{kind}.{name}", nn.Parameter(shard) if number == 3 else shard
            if number % world == rank:
                yield f"plain.{name}", tensor

    parts = fastload.SaveOptions(max_shard_bytes=1 << 20, parts=True, timeout_s=30)
    fastload.save(dict(shards()), tmp_path / "saved", options=parts)
    fastload.save_stream(shards(), tmp_path / "streamed", spool=spool, options=OPTIONS)
    assert files_in(tmp_path / "streamed") == files_in(tmp_path / "saved")
    loaded = fastload.load(tmp_path / "streamed")
    assert len(loaded) == 4 * len(complete)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, complete[name.partition(".")[2]])
    partial = DTensor.from_local(torch.ones(3), meshes["fsdp"][0], [Partial()], run_check=False)
    with pytest.raises(OptionError, match="partial"):
        fastload.save_stream([("partial", partial)], tmp_path / "none", spool=spool, options=OPTIONS)
    assert list(spool.iterdir()) == []
    assert not (tmp_path / "none").exists()


@ranks(2, accelerator=True)
def test_shards_on_an_accelerator(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("emu", (2,))

    def shards() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            yield f"{number}", distribute_tensor(torch.full((33, 700), number + 0.5), mesh, [Shard(0)])

    parts = fastload.SaveOptions(max_shard_bytes=1 << 20, parts=True, timeout_s=30)
    fastload.save(dict(shards()), tmp_path / "saved", options=parts)
    fastload.save_stream(shards(), tmp_path / "streamed", spool=tmp_path, options=OPTIONS)
    assert files_in(tmp_path / "streamed") == files_in(tmp_path / "saved")
    assert accelerator().faults() == []


@ranks(2)
def test_replicas_and_nothing(rank: int, world: int, tmp_path: Path) -> None:
    """What all ranks have is saved once; a rank may have nothing."""
    for number, share in enumerate((tensors(), tensors() if rank == 0 else iter(()))):
        fastload.save_stream(share, tmp_path / f"{number}", spool=tmp_path, options=OPTIONS)
    assert files_in(tmp_path / "0") == files_in(tmp_path / "1")
    loaded = fastload.load(tmp_path / "0")
    assert {name: tensor.shape for name, tensor in loaded.items()} == {
        name: tensor.shape for name, tensor in tensors()
    }


def anonymous_bytes() -> int:
    """The memory of this process that is not that of a file."""
    [kib] = re.findall(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) << 10


@pytest.mark.slow
@ranks(1)
def test_memory_is_bounded(rank: int, world: int, tmp_path: Path) -> None:
    peaks, nbytes = list[int](), 40 << 20  # beyond what the C library keeps of freed memory
    mesh = init_device_mesh("cpu", (1,))

    def large() -> Iterator[tuple[str, Tensor]]:
        for number in range(8):
            tensor = torch.full((nbytes,), number, dtype=torch.uint8)
            yield f"{number}", DTensor.from_local(tensor, mesh, [Shard(0)]) if number % 2 else tensor
            del tensor
            peaks.append(anonymous_bytes())

    options = fastload.SaveOptions(
        staging_bytes=8 << 20, timeout_s=50, progress=lambda *_: peaks.append(anonymous_bytes())
    )
    before = anonymous_bytes()
    report = fastload.save_stream(large(), tmp_path / "streamed", spool=tmp_path, options=options)
    assert report.nbytes > 8 * nbytes
    assert max(peaks) - before < 3 * nbytes


@ranks(2)
def test_an_error_of_one_rank_is_raised_on_all(rank: int, world: int, tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from tensors()
        raise RuntimeError("no such expert")

    def slow() -> Iterator[tuple[str, Tensor]]:
        for number in range(3000):
            time.sleep(0.01)
            yield f"slow.{number}", torch.zeros(4)

    with pytest.raises(PeerError, match=r"rank 1.*no such expert"):
        fastload.save_stream(failing() if rank else slow(), tmp_path / "a", spool=tmp_path, options=OPTIONS)
    missing = tmp_path / "nothing" if rank else tmp_path
    with pytest.raises(PeerError, match="nothing"):
        fastload.save_stream(tensors(), tmp_path / "a", spool=missing, options=OPTIONS)
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace")
@ranks(3)
def test_the_disk_of_one_rank_is_full(rank: int, world: int, tmp_path: Path) -> None:
    spool = tmp_path
    if rank == 1:
        (spool := tmp_path / "small").mkdir()
        mount_memory(spool, rank, 1 << 20)
    with pytest.raises(PeerError, match=r"rank 1.*small.*[Nn]o space left"):
        fastload.save_stream(tensors(), tmp_path / "a", spool=spool, options=OPTIONS)
    assert not (tmp_path / "a").exists()


@ranks(1)
def test_what_cannot_be_streamed(rank: int, world: int, tmp_path: Path) -> None:
    for given, message in (
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' comes twice"),
        ([("a", 3)], r"\('a', int\): must be a name and a tensor"),
        ([(3, torch.ones(1))], r"\(3, Tensor\): must be a name and a tensor"),
        ([("a", torch.ones(2).to_sparse())], "only dense tensors are kept"),
        ([("a", torch.ones(2, device="meta"))], "has no values"),
    ):
        with pytest.raises(OptionError, match=message):
            fastload.save_stream(given, tmp_path / "a", spool=tmp_path, options=OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="cannot keep tensors in s3://"):
        fastload.save_stream(tensors(), tmp_path / "a", spool="s3://bucket/x", options=OPTIONS)
