"""Loading to a CUDA device; with one device, NCCL runs as a world of 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fastload
from fastload.memory import state_digest

pytestmark = pytest.mark.gpu


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{n}": torch.randn(300 + n, 1000, generator=generator) for n in range(8)}
    tensors["half"] = torch.randn(777, generator=generator).bfloat16()
    tensors["scalar"] = torch.tensor(3)
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["auto", "direct", "allgather", "broadcast"])
@pytest.mark.parametrize("chunk_bytes", [None, 4097, 1 << 20])
@pytest.mark.usefixtures("nccl")
def test_every_strategy_gives_the_same_bytes(
    checkpoint: Path, strategy: str, chunk_bytes: int | None
) -> None:
    options = fastload.LoadOptions(strategy=strategy, chunk_bytes=chunk_bytes, timeout_s=60)
    with fastload.open(checkpoint, options=options) as opened:
        loaded = opened.load(device="cuda")
    assert opened.report is not None
    assert opened.report.transport == ("nccl" if strategy in ("allgather", "broadcast") else "none")
    assert {tensor.device.type for tensor in loaded.values()} == {"cuda"}
    assert state_digest(loaded) == state_digest(load_file(checkpoint))


@pytest.mark.usefixtures("nccl")
def test_casts_and_strides_on_the_device(checkpoint: Path) -> None:
    into = {"w0": torch.zeros(1000, 300, device="cuda", dtype=torch.bfloat16).t()}
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=4099, timeout_s=60)
    fastload.load(checkpoint, into=into, names=["w0"], dtype=torch.bfloat16, options=options)
    assert torch.equal(into["w0"].cpu(), load_file(checkpoint)["w0"].bfloat16())


def test_without_a_process_group(checkpoint: Path) -> None:
    loaded = fastload.load(checkpoint, device="cuda")
    assert state_digest(loaded) == state_digest(load_file(checkpoint))


def test_a_meta_module_is_materialized_on_the_device(checkpoint: Path) -> None:
    with torch.device("meta"):
        module = torch.nn.Module()
        module.w0 = torch.nn.Parameter(torch.empty(300, 1000))
    fastload.load(checkpoint, into=module, names=["w0"], device="cuda")
    assert module.w0.device.type == "cuda"
    assert torch.equal(module.w0.cpu(), load_file(checkpoint)["w0"])
