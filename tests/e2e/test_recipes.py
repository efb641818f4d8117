"""The programs of docs/recipes that need torch alone; those of other libraries run next to their tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import fastload
from tests.dist.harness import ranks, run_ranks
from tests.pages import ROOT, run_program


def newest(folder: Path) -> Path:
    return max(path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_"))


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def trains(rank: int, world: int, folder: Path, is_stopped: bool) -> None:
    """Runs the recipe for DDP; one rank gets a signal once there is a checkpoint."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    step = torch.optim.lr_scheduler.CosineAnnealingLR.step
    is_told = threading.Event()

    def slow_step(self: torch.optim.lr_scheduler.CosineAnnealingLR, epoch: int | None = None) -> None:
        if self.last_epoch >= 30:  # else it may end before the signal has come
            assert rank or is_told.wait(60)
        time.sleep(0.05)  # so that they agree to stop within some 15 steps
        step(self, epoch)

    def stop() -> None:
        while not (folder / "checkpoints").is_dir():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        is_told.set()

    if is_stopped:
        torch.optim.lr_scheduler.CosineAnnealingLR.step = slow_step  # type: ignore[method-assign]
        if rank == 0:
            threading.Thread(target=stop, daemon=True).start()
    run_program("docs/recipes/ddp.md")


@pytest.mark.slow
def test_ddp_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = fastload.LoadOptions(per_rank_mismatch="skip")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_ranks(trains, 2, folder=straight, is_stopped=False)
    run_ranks(trains, 2, folder=stopped, is_stopped=True)
    assert fastload.load(newest(stopped), options=options)["step"] < 60
    run_ranks(trains, 2, folder=stopped, is_stopped=False)
    expected, resumed = (fastload.load(newest(folder), options=options) for folder in (straight, stopped))
    assert expected["step"] == 60
    assert same(expected, resumed)


@ranks(2)
def test_from_dcp(rank: int, world: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    run_program("docs/recipes/from-dcp.md")
    state = fastload.load(tmp_path / "new" / "step_2")
    assert state["step"] == 2
    assert {entry["step"].item() for entry in state["optimizer"]["state"].values()} == {2.0}


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs/recipes").glob("*.md")))
def test_every_recipe_is_run(page: str) -> None:
    call = f'run_program("docs/recipes/{page}")'
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if call in path.read_text()] != []
