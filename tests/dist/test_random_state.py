"""Random states of each rank: saved, restored, and drawn from again."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import fastload
from fastload import CheckpointManager, LoadOptions, PerRank, SaveOptions
from fastload.errors import MismatchError
from tests.dist.harness import ranks, run_ranks

OPTIONS = SaveOptions(timeout_s=30)
TITAN = Path(sys.prefix) / "titan"  # where torchdata is


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)  # of all devices, too
    np.random.randn()  # of which NumPy keeps the second of two


def draw(devices: list[str]) -> list[Any]:
    return [
        random.random(),
        np.random.randn(),
        np.random.randint(1 << 30),
        *(torch.rand(3, device=device).tolist() for device in devices),
    ]


def check(rank: int, tmp_path: Path, devices: list[str]) -> None:
    seed(100 + rank)
    draw(devices)
    state = {"w": torch.ones(2), "random": fastload.random_state()}
    with CheckpointManager(tmp_path / "run", options=OPTIONS) as manager:
        manager.save(1, state)
        expected = [draw(devices) for _ in range(2)]
        seed(rank)
        manager.wait()
        manager.restore(into=state)
        assert [draw(devices) for _ in range(2)] == expected
        own = manager.restore()["random"]
    fastload.random_state().load_state_dict(own)
    assert draw(devices) == expected[0]
    before = fastload.random_state().state_dict()
    expected = draw(devices)
    fastload.random_state().load_state_dict(before)
    assert draw(devices) == expected
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, expected)
    assert all(everyone[0] != other for other in everyone[1:])


@pytest.mark.slow(but=["3-ranks"])
@ranks(1, 3)
def test_each_rank_draws_again_what_it_drew(rank: int, world: int, tmp_path: Path) -> None:
    check(rank, tmp_path, ["cpu"])


@ranks(2, accelerator=True)
def test_devices_draw_again_what_they_drew(rank: int, world: int, tmp_path: Path) -> None:
    check(rank, tmp_path, ["cpu", "emu:0", "emu:1"])


@pytest.mark.slow(but=["2-2"])
@ranks(2)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.skipif(not TITAN.exists(), reason="torchdata is not installed")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_goes_on_with_the_next_batch(
    rank: int, world: int, tmp_path: Path, num_workers: int
) -> None:
    sys.path.append(str(TITAN))
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make_state() -> dict[str, Any]:
        loader = StatefulDataLoader(
            range(80),
            batch_size=4,
            sampler=DistributedSampler(range(80), seed=3),  # type: ignore[arg-type]
            num_workers=num_workers,
            generator=torch.Generator(),
        )
        return {"random": fastload.random_state(), "loader": PerRank(loader), "step": 0}

    seed(rank)
    state = make_state()
    batches = iter(state["loader"].value)
    before = [next(batches).tolist() for _ in range(3)]
    fastload.save(state, tmp_path / "a", options=OPTIONS)
    expected = [(batch.tolist(), draw(["cpu"])) for batch in batches]
    assert len(before) + len(expected) == 10
    seed(50)
    again = make_state()
    fastload.load(tmp_path / "a", into=again)
    assert [(batch.tolist(), draw(["cpu"])) for batch in again["loader"].value] == expected


def test_another_number_of_ranks_leaves_the_generators_as_they_are(tmp_path: Path) -> None:
    run_ranks(save_it, 2, path=tmp_path / "a")
    state = {"w": torch.zeros(2), "random": fastload.random_state()}
    seed(5)
    expected = draw(["cpu"])
    seed(5)
    with pytest.raises(MismatchError, match="random: saved for each of 2 ranks"):
        fastload.load(tmp_path / "a", into=state)
    fastload.load(tmp_path / "a", into=state, options=LoadOptions(per_rank_mismatch="skip"))
    assert state["w"].tolist() == [1, 1]
    assert draw(["cpu"]) == expected


def save_it(rank: int, world: int, path: Path) -> None:
    fastload.save({"w": torch.ones(2), "random": fastload.random_state()}, path, options=OPTIONS)
