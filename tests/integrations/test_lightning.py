"""fastload in Lightning, with the real one."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from tests.dist.harness import run_ranks, there

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # what others warn of is not ours to mend
    pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed"),
]


def body(name: str) -> Any:
    return there("tests.integrations.lightning_ranks", name)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind"), [(2, "ddp"), (2, "fsdp2")])
def test_a_training_that_was_killed_ends_as_if_it_had_not_been(world: int, kind: str, tmp_path: Path) -> None:
    def run(name: str, *, kill_at: int = -1, resumes: bool = False) -> dict[str, Any]:
        dies = dict.fromkeys(range(world), signal.SIGKILL) if kill_at > 0 else None
        given = {"folder": tmp_path / name, "kind": kind, "kill_at": kill_at, "resumes": resumes}
        first, *_ = run_ranks(body("trains"), world, dies=dies, **given)
        return first

    num_steps = 16 // world  # in an epoch
    whole = run("whole")
    assert whole["kept"] == sorted({"last.ckpt", whole["best"]})
    run("killed", kill_at=3 * num_steps)
    resumed = run("killed", resumes=True)
    assert resumed["began_at"] in (num_steps, 2 * num_steps)
    del whole["began_at"], resumed["began_at"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["best"] == whole["best"]
    run_ranks(body("loads_elsewhere"), 6 - world, folder=tmp_path / "whole", kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies_when", "in_background", "begins_at"),
    [("writing", True, 1), ("written", True, 2), ("removing", True, 2), ("removing", False, 2)],
)
def test_links_to_the_last_checkpoint(
    dies_when: str, in_background: bool, begins_at: int, tmp_path: Path
) -> None:
    """They point to the newest complete one, whenever the training is killed."""
    given = {"folder": tmp_path / "run", "in_background": in_background}
    dies = dict.fromkeys(range(1 if dies_when == "removing" else 2), signal.SIGKILL)
    run_ranks(body("saves_and_is_killed"), 2, dies=dies, **given, dies_when=dies_when, resumes=False)
    began_at = run_ranks(body("saves_and_is_killed"), 2, **given, dies_when="", resumes=True)
    assert began_at == [begins_at, begins_at]


@pytest.mark.slow
def test_the_last_checkpoint_after_a_link_to_it(tmp_path: Path) -> None:
    run_ranks(body("saves_after_a_link"), 2, folder=tmp_path / "run")


@pytest.mark.slow
def test_checkpoints_of_an_error(tmp_path: Path) -> None:
    run_ranks(body("stumbles"), 2, folder=tmp_path / "run")


@pytest.mark.slow
def test_a_link_that_cannot_be_made(tmp_path: Path) -> None:
    run_ranks(body("cannot_link"), 2, folder=tmp_path / "run")


def test_trainings_that_it_cannot_save(tmp_path: Path) -> None:
    run_ranks(body("refuses"), 2, folder=tmp_path)


@pytest.mark.slow
def test_averages_of_weights_that_a_callback_keeps(tmp_path: Path) -> None:
    run_ranks(body("averages"), 2, folder=tmp_path / "run")


@pytest.mark.slow
def test_sharded_tensors_that_a_callback_adds(tmp_path: Path) -> None:
    run_ranks(body("shadows"), 2, folder=tmp_path / "run")


def test_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time it finds that it has ended
        run_ranks(body("runs_the_recipe"), 2)


def test_the_recipe_for_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the same weights if it goes on from step 40."""
    monkeypatch.chdir(tmp_path)
    of_another = fastload.LoadOptions(per_rank_mismatch="skip")  # number of ranks
    run_ranks(body("runs_the_recipe_for_fabric"), 2)
    folder = tmp_path / "runs" / "fabric"
    newest = max(path for path in folder.iterdir() if path.is_dir())
    whole = fastload.load(newest, options=of_another)["model"]
    assert set(whole) == {"weight", "bias"}
    shutil.rmtree(newest)
    run_ranks(body("runs_the_recipe_for_fabric"), 2)
    resumed = fastload.load(newest, options=of_another)["model"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow  # tests/integrations/test_transformers.py trains adapters
@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed")
def test_adapters_of_peft_train_and_come_back(tmp_path: Path) -> None:
    run_ranks(body("adapts"), 2, folder=tmp_path)
