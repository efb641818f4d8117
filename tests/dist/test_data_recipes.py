"""The recipes for data: every sample is seen exactly once when the number of ranks changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import fastload
from tests.dist.harness import run_ranks
from tests.pages import run_program

TITAN = Path(sys.prefix) / "titan"  # where torchdata is


def trains(rank: int, world: int, folder: Path, page: str, last: str) -> None:
    os.chdir(folder)
    sys.argv = ["train.py", *last.split()]
    if page == "torchdata":
        sys.path.append(str(TITAN))
        run_program("docs/recipes/torchdata.md")
    else:
        run_program("docs/recipes/data.md")


@pytest.mark.slow(but=["data"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("page", ["data", "torchdata"], ids=["data", "workers"])
def test_each_sample_is_seen_once_on_4_then_2_then_6_ranks(tmp_path: Path, page: str) -> None:
    if page == "torchdata" and not TITAN.exists():
        pytest.skip("torchdata is not installed")
    seen = []
    for world, last in ((4, "3"), (2, "8"), (6, "")):
        run_ranks(trains, world, folder=tmp_path, page=page, last=last)
        newest = max((tmp_path / "checkpoints").glob("step_*"))
        seen.append(fastload.load(newest, names="num_seen")["num_seen"])
    assert [int(counts.sum()) for counts in seen] == [3 * 4 * 4, 3 * 4 * 4 + 5 * 2 * 4, 200]
    assert all(bool((counts <= 1).all()) for counts in seen)
    assert torch.equal(seen[-1], torch.ones(200))
