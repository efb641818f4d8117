"""``fastload ls --memory`` and ``prune --memory``: what jobs have in the memory of this host."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch
from click.testing import CliRunner

import fastload
from fastload.cli import main


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_what_is_in_memory_is_listed_and_what_dead_jobs_left_is_removed(tmp_path: Path) -> None:
    place = str(tmp_path / "memory")
    Path(place).mkdir()
    root = str(tmp_path / "run [7]")
    manager = fastload.CheckpointManager(root, memory=place, memory_every_steps=1)
    assert manager.should_save(4)
    manager.save(4, {"weight": torch.ones(1000, 1000)})
    assert manager.latest() == 4
    [job] = json.loads(run("ls", "--memory", place, "--json"))["jobs"]
    assert (job["root"], job["in_use"]) == (root, True)
    assert job["checkpoints"] == [{"step": 4, "branch": 0, "held": [0], "num_shares": 1}]
    assert 4_000_000 <= job["nbytes"] < 5_000_000
    assert "in use" in run("ls", "--memory", place)
    assert run("prune", "--memory", place).startswith("0 jobs")
    with contextlib.suppress(ZeroDivisionError), manager:
        raise ZeroDivisionError
    assert "left behind" in run("ls", "--memory", place)
    assert "would delete" in run("prune", "--memory", place, "--dry-run")
    assert "deleted" in run("prune", "--memory", place)
    assert json.loads(run("ls", "--memory", place, "--json"))["jobs"] == []
    for wrong in (("ls",), ("prune", root), ("prune", "--keep-last", "3")):
        assert CliRunner().invoke(main, wrong).exit_code == 2
