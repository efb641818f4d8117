"""``fastload flush``, and ``--memory`` of ``ls`` and ``prune``: what jobs have in the memory of this host."""

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


def test_ls_says_what_a_restore_takes_and_flush_writes_it(tmp_path: Path) -> None:
    place, root = str(tmp_path / "memory"), str(tmp_path / "run")
    Path(place).mkdir()
    state = {"weight": torch.ones(1000, 1000)}
    with fastload.CheckpointManager(root) as manager:
        manager.save(3, state)
    assert run("ls", root).endswith("a restore takes step 3 from storage\n")
    assert (
        run("flush", root) == f"{root}: nothing to write: no training has used a memory tier with this root\n"
    )
    with (
        contextlib.suppress(ZeroDivisionError),
        fastload.CheckpointManager(root, memory=place, memory_every_steps=1) as manager,
    ):
        assert manager.should_save(5)
        manager.save(5, state)
        assert manager.latest() == 5
        lives = CliRunner().invoke(main, ["flush", root, "--memory", place])
        assert lives.exit_code == 1
        assert f"processes of the run in {root} live on" in lives.output
        raise ZeroDivisionError
    assert "a restore takes step 5 from memory: the newest on storage is step 3" in run(
        "ls", root, "--memory", place
    )
    other = run("ls", root, "--memory", str(tmp_path / "other"))
    assert (
        "a restore takes step 3 from storage: nothing is in memory\nthe memory of other hosts was not"
        in other
    )
    assert run("flush", root, "--memory", place) == f"{root}: step 5 written from memory, 4.0 MB\n"
    done = json.loads(run("flush", root, "--memory", place, "--json"))
    assert done["step"] is None
    assert done["why"] == "step 5 is on storage, and memory has nothing newer than step 5"
    restore = json.loads(run("ls", root, "--memory", place, "--json"))["restore"]
    assert [(one["step"], one["source"]) for one in restore] == [
        (5, "memory"),
        (5, "storage"),
        (3, "storage"),
    ]
    (tmp_path / "run" / "step_00000005" / "model.safetensors").unlink()
    assert "a restore passes over step 5, which is damaged\na restore takes step 3" in run("ls", root)
