"""Weights that change: loaded into live modules again and again, from new paths, in one process."""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastload
from tests.dist.faults import fastload_threads
from tests.dist.harness import ranks, run_ranks
from tests.e2e.forked import Forked
from tests.pages import ROOT, page, run_program

MIB = 1 << 20
NUM_REFRESHES = 30


def resident_bytes(field: str = "VmRSS") -> int:
    (kib,) = re.findall(rf"^{field}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
    return int(kib) << 10


def descriptors() -> list[str]:
    """What is open, sockets among it; not the descriptor that looks."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(re.sub(r"\d+", "#", os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:
            continue
    return sorted(found)


@pytest.mark.slow
@ranks(2, ranks_per_host=1, deadline_s=100)
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "fsdp"])
def test_nothing_is_left_behind(rank: int, world: int, tmp_path: Path, sharded: bool) -> None:
    """Memory, threads, descriptors and connections are after 30 refreshes what they were after the third."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))  # 16 MiB
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    addresses = [parameter.data_ptr() for parameter in model.parameters() if not sharded]
    options = fastload.LoadOptions(strategy="allgather", staging_bytes=8 * MIB)
    for version in range(3):
        fastload.save(state_of(version), tmp_path / f"version_{version}")
    counts = []
    for step in range(NUM_REFRESHES):
        path = tmp_path / f"step_{step}"
        if rank == 0:
            shutil.copytree(tmp_path / f"version_{step % 3}", path)
        torch.distributed.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes()
        fastload.load(path, into=model, options=options)
        peak_bytes = resident_bytes("VmHWM") - before
        if step > 2:  # neither a second copy of the weights nor buffers beyond what options say
            assert peak_bytes < 8 * MIB + 4 * MIB, step
        bias = model.state_dict()["1.bias"]
        assert torch.equal(bias.full_tensor() if sharded else bias, state_of(step % 3)["1.bias"]), step
        gc.collect()
        assert fastload_threads(kept=["fastload-host"]) == []  # on a busy machine they end a little later
        counts.append(
            (
                resident_bytes(),
                sorted(t.name for t in threading.enumerate() if t.name != "fastload-idle"),
                descriptors(),
            )
        )
    if not sharded:
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    _, threads, opened = counts[4]
    assert counts[-1][1] == threads
    assert counts[-1][2] == opened
    assert counts[-1][0] - counts[4][0] < 4 * MIB, [resident for resident, *_ in counts]


@cache
def state_of(version: int) -> dict[str, Tensor]:
    """Of 16 MiB."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def shapes() -> dict[str, tuple[int, ...]]:
    return {"0.weight": (2048, 1024), "0.bias": (2048,), "1.weight": (1024, 2048), "1.bias": (1024,)}


def serves(rank: int, world: int, folder: Path) -> None:
    os.chdir(folder)
    run_program("docs/recipes/refresh.md")


def test_the_recipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train, *_ = re.findall(r"^```python\n(.*?)^```$", page("docs/recipes/refresh.md"), re.M | re.S)
    (tmp_path / "train.py").write_text(train)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = Forked(["train.py"], cwd=tmp_path, env=env, out=tmp_path / "out", err=tmp_path / "err")
    try:
        run_ranks(serves, 2, folder=tmp_path)
    finally:
        ended = trainer.end(30)
    assert ended.returncode == 0, ended.stderr
    served = re.findall(r"rank (\d) serves step (\d)", capfd.readouterr().out)
    assert {("0", "5"), ("1", "5")} <= set(served)
    assert [step for rank, step in served if rank == "0"] == [step for rank, step in served if rank == "1"]
