"""fastload in transformers and accelerate, with the real ones."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload import OptionError
from fastload.integrations import directory_save
from fastload.integrations.frameworks import require_signatures
from fastload.storage import folders
from tests.dist.harness import run_ranks, there

AO = Path(sys.prefix) / "ao"  # apart, for transformers and others change where torchao is installed

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # what others warn of is not ours to mend
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
        reason="transformers and accelerate are not installed",
    ),
]


def body(name: str) -> Any:
    return there("tests.integrations.transformers_ranks", name)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_models_are_loaded_as_transformers_does(world: int, tmp_path: Path) -> None:
    run_ranks(body("loads_as_transformers_does"), world, tmp_path=tmp_path)


@pytest.mark.slow
def test_models_that_transformers_converts(tmp_path: Path) -> None:
    run_ranks(body("names_what_loads_converted_models"), 2, tmp_path=tmp_path)


needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed")


@pytest.mark.slow
@needs_peft
def test_adapters_of_peft_share_a_base(tmp_path: Path) -> None:
    run_ranks(body("shares_adapters"), 2, tmp_path=tmp_path)


@pytest.mark.slow
@needs_peft
def test_adapters_that_peft_computes_the_tensors_of(tmp_path: Path) -> None:
    run_ranks(body("loads_what_peft_computes"), 2, tmp_path=tmp_path)


@pytest.mark.slow
@needs_peft
def test_adapters_of_a_group(tmp_path: Path) -> None:
    run_ranks(body("saves_adapters_of_a_group"), 3, tmp_path=tmp_path)


@needs_peft
def test_adapters_that_are_refused(tmp_path: Path) -> None:
    run_ranks(body("refuses_adapters"), 2, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "fsdp", "has_adapters"),
    [(2, 2, False), (2, 0, False), pytest.param(2, 2, True, marks=needs_peft)],
    ids=["fsdp2", "ddp", "adapters"],
)
def test_a_training_that_was_killed_ends_as_if_it_had_not_been(
    world: int, fsdp: int, has_adapters: bool, tmp_path: Path
) -> None:
    def run(name: str, *, kill_at: int = -1, resumes: bool = False) -> dict[str, Any]:
        folder = tmp_path / name
        dies = dict.fromkeys(range(world), signal.SIGKILL) if kill_at > 0 else None
        given = {"folder": folder, "fsdp": fsdp, "kill_at": kill_at, "resumes": resumes}
        given["has_adapters"] = has_adapters
        first, *_ = run_ranks(body("trains"), world, dies=dies, **given)
        return first

    whole = run("whole")
    assert whole["kept"] == sorted({"checkpoint-6", whole["best"], *whole["kept"]})
    assert len(whole["kept"]) == 2
    run("killed", kill_at=5)
    (tmp_path / "killed" / "pending-checkpoint-99-training_state").mkdir()  # of a save that was cut off
    (tmp_path / "killed" / "pending-of-mine").mkdir()
    resumed = run("killed", resumes=True)
    resumed["kept"].remove("pending-of-mine")
    assert resumed["began_at"] in (2, 4)
    del whole["began_at"], resumed["began_at"]
    assert resumed == whole


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_that_is_replaced_is_there_whenever_that_is_killed(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the next start, that is, which tidies up."""
    new, there, num_left = tmp_path / "pending-checkpoint-5", tmp_path / "checkpoint-5", 0

    def dying(step: Any) -> Any:
        def dies(*given: Any, **how: Any) -> None:
            nonlocal num_left
            if not num_left:
                raise KeyboardInterrupt
            num_left -= 1
            step(*given, **how)

        return dies

    def cannot(*_: Any) -> None:
        raise OSError(errno.EINVAL, "no exchange")

    for steps in range(9):
        for folder, content in ((new, "new"), (there, "old")):
            folder.mkdir()
            (folder / "content").write_text(content)
        num_left, is_over = steps, False
        with monkeypatch.context() as patch:
            patch.setattr(folders, "exchange", dying(folders.exchange) if can_exchange else cannot)
            patch.setattr(os, "replace", dying(os.replace))
            patch.setattr(directory_save.shutil, "rmtree", dying(shutil.rmtree))
            with contextlib.suppress(KeyboardInterrupt):
                directory_save.replace(str(new), str(there))
                is_over = True
        directory_save.clear_pending(str(tmp_path), "checkpoint")
        assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-5"]
        assert (there / "content").read_text() in (["new"] if is_over else ["new", "old"])
        shutil.rmtree(there)
        if is_over:
            break
    assert is_over
    assert steps == (2 if can_exchange else 4)


@pytest.mark.slow
def test_checkpoints_of_others_are_resumed(tmp_path: Path) -> None:
    run_ranks(body("resumes_from_others"), 2, tmp_path=tmp_path)


def test_trainings_that_it_cannot_save(tmp_path: Path) -> None:
    run_ranks(body("refuses_trainings"), 2, tmp_path=tmp_path)


def test_optimizers_that_it_cannot_save(tmp_path: Path) -> None:
    run_ranks(body("refuses_optimizers"), 2, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not AO.exists(), reason="torchao is not installed")
@pytest.mark.parametrize("fsdp", [0, 2], ids=["ddp", "fsdp2"])
def test_optimizers_of_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsdp: int) -> None:
    monkeypatch.syspath_prepend(AO)
    run_ranks(body("trains_with_torchao"), 2, tmp_path=tmp_path, fsdp=fsdp)


@pytest.mark.slow(but=["fsdp2"])
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_the_state_of_an_accelerator(fsdp: bool, tmp_path: Path) -> None:
    run_ranks(body("saves_states"), 2, tmp_path=tmp_path, fsdp=fsdp)


def test_a_library_that_is_laid_out_in_another_way() -> None:
    import json

    known = {"JSONEncoder.default": (json.JSONEncoder, "self o")}
    require_signatures(json, "1", known)
    for signatures in (
        {"JSONEncoder.default": (json.JSONEncoder, "self")},
        {"JSONEncoder.gone": (json.JSONEncoder, "")},
    ):
        with pytest.raises(OptionError, match=r"does not know json [\d.]+: JSONEncoder\.\w+ (takes|is not)"):
            require_signatures(json, "1", signatures)


@pytest.mark.slow
def test_the_recipe_for_fsdp2_on_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for world, num_steps in ((2, 2), (3, 4)):
        run_ranks(body("tunes"), world, num_steps=num_steps)


def test_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time it finds that it has ended
        run_ranks(body("runs_the_recipes"), 2)
