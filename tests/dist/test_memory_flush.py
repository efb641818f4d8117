"""After a signal, what is in memory goes to storage if the training does not come to save by itself."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fastload
from fastload import SaveOptions
from fastload.ext.memory import flush
from tests.dist.harness import ranks
from tests.dist.test_manager import warned
from tests.dist.test_memory_tier import ROOT, keep, manage

RANKS_IMPORT = ("fastload.ext.memory.tier", "torch.distributed.tensor")
OPTIONS = SaveOptions(timeout_s=20, block_bytes=1 << 16, max_shard_bytes=3 << 20)


def parts(step: int, rank: int) -> dict[str, Any]:
    """A state of which each rank has a part, and something of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(1_200_000, dtype=torch.float32).view(-1, 8) + step
    own = fastload.PerRank(torch.tensor([rank, step]))
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "few": torch.ones(5), "rng": own, "step": step}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "fastload.json"}


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / ROOT).glob("step_*"))


@ranks(3, ranks_per_host=1, deadline_s=90)
def test_what_is_in_memory_is_written_when_training_does_not_come_to_save(
    rank: int, world: int, tmp_path: Path
) -> None:
    flush.AFTER_S = 0.5
    memory, options = tmp_path / "memory", {"options": OPTIONS}
    with manage(tmp_path, memory, **options) as manager:
        keep(manager, 1, 2, state=lambda step: parts(step, rank))
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while steps_in(tmp_path) != [2]:  # the step of the training takes that long
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while not manager.stop_requested:
            manager.should_save(3)
            manager.should_save(4)
        manager.save(4, parts(4, rank))
    assert steps_in(tmp_path) == [2, 4]
    fastload.save(parts(2, rank), tmp_path / "plain", options=OPTIONS)
    assert files(tmp_path / ROOT / "step_00000002") == files(tmp_path / "plain"), "as a save would have it"
    found = fastload.load(tmp_path / ROOT / "step_00000002")
    assert found["step"] == 2
    assert found["rng"].tolist() == [rank, 2]
    assert not any((memory / f"host{rank}" / f"fastload-{os.geteuid()}").iterdir())


@ranks(3, ranks_per_host=1, deadline_s=90)
def test_a_training_that_stops_without_a_save_loses_nothing(rank: int, world: int, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    with manage(tmp_path, memory) as manager:
        manager.save(1, parts(1, rank))
        keep(manager, 2, state=lambda step: parts(step, rank))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        step = 2
        while not manager.stop_requested:
            step += 1
            if manager.should_save(step) and not manager.stop_requested:
                keep(manager, step, state=lambda step: parts(step, rank))
            time.sleep(0.05)
    [last] = steps_in(tmp_path)[1:]
    assert fastload.load(tmp_path / ROOT / f"step_{last:08d}")["step"] == last >= 2
    assert not any((memory / f"host{rank}" / f"fastload-{os.geteuid()}").iterdir())
    # One that comes to save by itself: nothing but that is written.
    with manage(tmp_path / "other", memory) as manager:
        keep(manager, 2, state=lambda step: parts(step, rank))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        asked = itertools.cycle((3, 4))  # of which either is told to save
        while not manager.stop_requested:
            manager.should_save(next(asked))
        manager.save(5, parts(5, rank))
    assert steps_in(tmp_path / "other") == [5]
    # One that ends without a signal, and whose last step was due in memory only.
    with manage(tmp_path / "short", memory) as manager:
        keep(manager, 1, 2, state=lambda step: parts(step, rank))
    assert steps_in(tmp_path / "short") == [2]
    assert not any((memory / f"host{rank}" / f"fastload-{os.geteuid()}").iterdir())


@ranks(2, ranks_per_host=1)
def test_a_training_that_ends_in_its_own_way_after_a_signal(rank: int, world: int, tmp_path: Path) -> None:
    """By `sys.exit(0)`, or before it has heard of the signal at all."""
    flush.AFTER_S = 60.0
    memory = tmp_path / "memory"
    own = memory / f"host{rank}" / f"fastload-{os.geteuid()}"
    for code, steps in ((0, [2]), (3, [])):
        with pytest.raises(SystemExit), manage(tmp_path / str(code), memory) as manager:  # noqa: PT012  (a training)
            keep(manager, 2)
            os.kill(os.getpid(), signal.SIGTERM)
            step = 2
            while not manager.stop_requested:
                step += 1
                manager.should_save(step)
            sys.exit(code)
        assert steps_in(tmp_path / str(code)) == steps
        assert len(list(own.iterdir())) == (code != 0), "whoever crashed is to be restarted"
    flush.AFTER_S = 0.1
    with warned("fastload.ext.memory.flush") as lines:
        with manage(tmp_path / "late", memory) as manager:
            keep(manager, 2)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    assert lines == []
