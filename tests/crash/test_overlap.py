"""Saves that meet other saves, or loads, of the same place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fastload
from fastload.errors import FastloadError
from fastload.storage.local import LocalStorage
from tests.crash.saves import (
    End,
    end_of,
    leftovers,
    options,
    require_whole,
    save,
    save_again,
    state,
    version_of,
)
from tests.dist.faults import fastload_threads
from tests.dist.harness import ranks, run_ranks


def two_groups(rank: int, world: int, path: Path, **how: Any) -> End:
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    value = state(1 + rank // 2)
    dist.barrier()
    return end_of(lambda: save(value, path, process_group=groups[rank // 2], **how))


@pytest.mark.slow(but=["async"])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_of_two_groups_one_wins(tmp_path: Path, background: bool) -> None:
    ends = run_ranks(two_groups, 4, path=tmp_path / "a", background=background, timeout_s=20.0)
    winners = {rank // 2 for rank, end in enumerate(ends) if end.kind == "saved"}
    assert len(winners) == 1, ends
    (winner,) = winners
    for end in ends[2 * (1 - winner) :][:2]:
        assert end.kind == "CheckpointExists", ends
        assert str(tmp_path / "a") in end.text, ends
        assert end.threads == [], ends
    assert ends[2 * winner].kind == ends[2 * winner + 1].kind == "saved"
    require_whole(tmp_path / "a", 1 + winner)
    assert leftovers(tmp_path) == []


@pytest.mark.slow(but=["async"])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_two_groups_that_may_replace_each_other(tmp_path: Path, background: bool) -> None:
    save(state(3), tmp_path / "a", background=False)
    how = {"background": background, "overwrite": True, "timeout_s": 20.0}
    ends = run_ranks(two_groups, 4, path=tmp_path / "a", **how)
    assert {end.kind for end in ends} == {"saved"}, ends
    assert version_of(fastload.load(tmp_path / "a")) in (1, 2)
    assert leftovers(tmp_path) == []


@ranks(3, same=True)
def test_of_two_saves_in_the_background_one_wins(rank: int, world: int, tmp_path: Path) -> int:
    both = [
        fastload.async_save(state(version), tmp_path / "a", options=options(timeout_s=20.0))
        for version in (1, 2)
    ]
    ends = [end_of(handle.wait) for handle in both]
    assert sorted(end.kind for end in ends) == ["CheckpointExists", "saved"], ends
    winner = 1 + [end.kind for end in ends].index("saved")
    assert fastload_threads() == []
    dist.barrier()
    assert version_of(fastload.load(tmp_path / "a")) == winner
    assert leftovers(tmp_path) == []
    return winner


def replaced_while_open(rank: int, world: int, path: Path) -> None:
    """Two ranks open what the other two replace; they get what they opened, whole."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    if rank < 2:
        given = fastload.LoadOptions(strategy="allgather", verify=False)
        with fastload.open(path, process_group=groups[0], options=given) as checkpoint:
            dist.barrier()  # they save
            dist.barrier()
            assert version_of(checkpoint.load()) == 1
        assert version_of(fastload.load(path, process_group=groups[0])) == 2
    else:
        dist.barrier()
        save(state(2), path, background=rank < 0, overwrite=True, process_group=groups[1], timeout_s=20.0)
        dist.barrier()


def test_a_load_gets_what_it_opened(tmp_path: Path) -> None:
    save(state(1), tmp_path / "a", background=False)
    run_ranks(replaced_while_open, 4, path=tmp_path / "a")
    assert leftovers(tmp_path) == []


def load_beside(rank: int, world: int, root: Path) -> list[str]:
    """Two ranks load again and again while the other two replace that and make more beside it."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    found = []
    if rank < 2:
        for _ in range(12):
            try:
                version = version_of(fastload.load(root / "a", process_group=groups[0]))
                found.append(f"version {version}")
            except FastloadError as error:
                found.append(f"{type(error).__name__}: {error}")
    else:
        for version in range(2, 8):
            for name in ("a", f"step-{version}"):
                save(
                    state(version), root / name, background=version % 2 > 0, overwrite=True,
                    process_group=groups[1], timeout_s=20.0,
                )  # fmt: skip
    return found


def test_loads_beside_saves(tmp_path: Path) -> None:
    save(state(1), tmp_path / "a", background=False)
    found = run_ranks(load_beside, 4, root=tmp_path)
    assert found[0] == found[1]
    # One that looks while that is being replaced may be told so, but never gets a mixture.
    assert sum(text.startswith("version") for text in found[0]) > 6, found[0]
    assert leftovers(tmp_path) == []


PROGRAM = """
import contextlib, logging, os, sys
import fastload
from tests.crash.saves import options, state
logging.basicConfig(filename=os.devnull)
good, waited, forgotten = sys.argv[1:]
fastload.async_save(state(2), good, options=options())
with contextlib.suppress(fastload.FastloadError):
    fastload.async_save(state(2), waited, options=options()).wait()
fastload.async_save(state(2), forgotten, options=options())
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_program_that_ends_waits_for_its_saves_and_tells_of_those_that_failed(tmp_path: Path) -> None:
    """Wherever its log goes; that it failed cannot be told by the exit status of a program that has ended."""
    good, waited, forgotten = (tmp_path / name for name in ("good", "waited", "forgotten"))
    for path in (waited, forgotten):
        save(state(1), path, background=False)
    command = [sys.executable, "-c", PROGRAM, str(good), str(waited), str(forgotten)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=140)
    advice = "pass options=fastload.SaveOptions(overwrite=True) to replace it"
    why = f"CheckpointExists: {forgotten} exists: {advice}"
    told = f"fastload: the save to {forgotten} failed: {why} (wait() was not called)\n"
    assert (ended.returncode, ended.stderr) == (0, told)
    require_whole(good, 2)
    require_whole(forgotten, 1)
    save_again(forgotten)


def load_what_is_replaced(path: Path, file: str, when: str, replace: Callable[[], None]) -> Any:
    """Loads, and has the checkpoint replaced when the load looks at a file of it."""
    real, looks = LocalStorage.stat, []

    def stat(self: LocalStorage, name: str) -> Any:
        looks.append(name)
        if name != file or looks.count(file) > 1:
            return real(self, name)
        # Either way the directory is open by now: what is deleted in it is seen to be gone.
        found = real(self, name if when == "after" else "nothing")
        replace()
        return found if when == "after" else real(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "stat", stat)
        loaded = fastload.load(path)
    assert file in looks
    return loaded


MOMENTS = [
    # file, whether before or after the look at it, which one is loaded
    ("fastload.json", "before", 2),
    ("fastload.json", "after", 2),
    ("model.safetensors", "after", 1),  # by then all that is needed is open
]


@pytest.mark.slow(but=["2-ranks"])
@ranks(1, 2)
def test_a_load_never_mixes_two(rank: int, world: int, tmp_path: Path) -> None:
    """Between the files that a load opens, all are replaced: all ranks get the old ones or the new ones."""
    alone = dist.new_group([0])
    for number, (file, when, wanted) in enumerate(MOMENTS):
        path = tmp_path / f"{number}"
        save(state(1), path, background=False, timeout_s=20.0)
        replace = partial(save, state(2), path, background=False, overwrite=True, process_group=alone)
        loaded = load_what_is_replaced(path, file, when, replace) if rank == 0 else fastload.load(path)
        assert version_of(loaded) == wanted
