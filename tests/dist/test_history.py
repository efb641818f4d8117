"""Which checkpoints of a run count, in which order, and which are deleted: whatever else is in its root."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

import fastload
from fastload import SaveOptions, api
from fastload.cli import main
from fastload.errors import (
    CheckpointError,
    CheckpointNotFound,
    ChecksumError,
    OptionError,
    UnsupportedVersion,
)
from fastload.formats import values
from fastload.formats.dtypes import DTYPES
from tests.checkpoints import flip, seal
from tests.dist.harness import ranks
from tests.dist.test_manager import manage, state_of, steps_in, warned
from tests.e2e.forked import run_forked

_MESSAGE = "the run went back, or another one begins"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def listed(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(command("ls", root, "--json").stdout)["checkpoints"]
    return found


def save_steps(root: Path, *steps: int, **arguments: Any) -> None:
    with manage(root, **arguments) as manager:
        for step in steps:
            manager.save(step, state_of(step))


# What is whole


def test_what_lacks_files_or_bytes_of_them_does_not_count(tmp_path: Path) -> None:
    """As a copy that ended early leaves it: the record is there, but not all that it names."""
    options = SaveOptions(timeout_s=20, max_shard_bytes=20_000)
    state = {"a": torch.zeros(4000), "b": torch.zeros(4000)}
    with manage(tmp_path, options=options) as manager:
        for step in (1, 2, 3, 4, 5):
            manager.save(step, state)
        manager.wait()
        (tmp_path / "step_00000004/model-00002-of-00002.safetensors").unlink()
        os.truncate(tmp_path / "step_00000005/model-00001-of-00002.safetensors", 100)
        assert manager.all_steps() == [1, 2, 3]
        assert manager.latest() == 3
    states = {row["step"]: (row["state"], row["problem"]) for row in listed(tmp_path)}
    assert states[3] == ("complete", None)
    assert states[4] == ("damaged", "model-00002-of-00002.safetensors is missing")
    state_5, problem_5 = states[5]
    assert state_5 == "damaged"
    assert problem_5.startswith("model-00001-of-00002.safetensors has 100 of 16")
    assert "step 5: damaged: model-00001" in command("ls", tmp_path).stdout
    done = command("prune", tmp_path, "--keep-last", 2)
    assert done.exit_code == 0, done.stderr
    assert "left alone: step 4: damaged: model-00002-of-00002.safetensors is missing" in done.stdout
    assert "1 checkpoint," in done.stdout
    assert steps_in(tmp_path) == [2, 3, 4, 5], "the broken ones are not among the last, nor are they deleted"
    with manage(tmp_path, keep_last=1, options=options) as manager:
        assert torch.equal(manager.restore()["a"], state["a"])
        assert manager.restored_step == 3
        manager.save(6, state)
        manager.wait()
        assert steps_in(tmp_path) == [4, 5, 6]
        with pytest.raises(CheckpointError):
            manager.restore(step=5)
    assert fastload.load(tmp_path / "step_00000006")["a"].shape == (4000,)


@ranks(2)
def test_a_step_that_was_asked_for_and_is_damaged_is_remembered(
    rank: int, world: int, tmp_path: Path
) -> None:
    """Nobody but a load sees that a byte is another one."""
    with manage(tmp_path, keep_last=1) as manager:
        for step in (8, 9):
            with manage(tmp_path) as other:
                other.save(step, state_of(step))
        if rank == 0:
            flip(tmp_path / "step_00000009/model.safetensors", -1)
        dist.barrier()
        with pytest.raises(ChecksumError):
            manager.restore(step=9)
        with pytest.raises(CheckpointNotFound):
            manager.restore(step=7)
        manager.save(10, state_of(10))
        manager.wait()
        dist.barrier()
        assert steps_in(tmp_path) == [9, 10], "9 is neither kept as one of the last, nor deleted"


# Links


def test_a_link_and_what_it_leads_to_are_not_deleted(tmp_path: Path) -> None:
    base, root = tmp_path / "pretrained/base", tmp_path / "run"
    fastload.save(state_of(77), base)
    content = {path.name: path.read_bytes() for path in base.iterdir()}
    root.mkdir()
    (root / "step_00000000").symlink_to(base)
    (tmp_path / "alias").symlink_to(root)
    with manage(tmp_path / "alias", keep_last=1) as manager:
        assert manager.restore()["step"] == 77
        assert manager.restored_step == 0
        with pytest.raises(OptionError, match="step_00000000 is a link"):
            manager.save(0, state_of(0))
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.wait()
        assert steps_in(root) == [0, 2]
        manager.save(3, state_of(3))
        manager.wait()
        (root / "step_00000010").symlink_to("step_00000003")
        assert manager.latest() == 10
        for step in (11, 12):
            manager.save(step, state_of(step))
        manager.wait()
        assert steps_in(root) == [0, 3, 10, 12], "3 is what 10 is"
    done = command("prune", root, "--keep-last", 1)
    assert done.exit_code == 0, done.stderr
    assert f"left alone: step 0: a link to {base}" in done.stdout
    assert steps_in(root) == [0, 3, 10, 12]
    assert {row["step"]: row["link"] for row in listed(root)} == {
        0: str(base), 3: None, 10: str(root / "step_00000003"), 12: None
    }  # fmt: skip
    assert {path.name: path.read_bytes() for path in base.iterdir()} == content
    assert fastload.load(root / "step_00000010")["step"] == 3


# Going back


@ranks(2, same=True)
def test_what_is_saved_after_going_back_is_newer(rank: int, world: int, tmp_path: Path) -> list[Any]:
    with manage(tmp_path) as manager:
        for step in (100, 200, 300):
            manager.save(step, state_of(step))
    with manage(tmp_path, keep_last=3) as manager, warned("fastload.training.history") as lines:
        manager.restore(step=100)
        for step in (101, 102, 103):
            manager.save(step, state_of(step))
        manager.wait()
        dist.barrier()
        assert steps_in(tmp_path) == [101, 102, 103]
        assert len(lines) == (1 if rank == 0 else 0), "loudly, but once"
        assert all("step 101 is saved after step 300" in line and _MESSAGE in line for line in lines)
    with manage(tmp_path, keep_last=3) as manager:  # as a requeued job does
        assert manager.latest() == 103
        manager.save(104, state_of(104))
        assert manager.restore()["step"] == 104
        manager.restore(step=102)
        manager.save(103, state_of(1033))  # replaced, in a branch of its own
        assert manager.latest() == 103
        manager.save(500, state_of(500))
        manager.wait()
        dist.barrier()
        assert manager.all_steps() == [103, 104, 500]
        if rank == 0:
            flip(tmp_path / "step_00000500/model.safetensors", -1)
            rows = listed(tmp_path)
            assert [(row["step"], row["branch"]) for row in rows] == [(104, 1), (103, 2), (500, 2)]
            assert "branch" in command("ls", tmp_path).stdout
            done = command("prune", tmp_path, "--keep-last", 2, "--dry-run")
            assert f"would delete {tmp_path}/step_00000104" in done.stdout
        dist.barrier()
        assert manager.restore()["weight"][0, 0] == 1033, "what was saved before 500, not what is below it"
        return [manager.restored_step, manager.latest()]


@ranks(2)
def test_a_new_run_in_a_used_root(rank: int, world: int, tmp_path: Path) -> None:
    with manage(tmp_path) as manager, warned("fastload.training.history") as lines:
        for step in (10, 20, 30):
            manager.save(step, state_of(step))
        assert lines == []
    with manage(tmp_path, keep_last=2) as manager, warned("fastload.training.history") as lines:
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.wait()
        dist.barrier()
        assert steps_in(tmp_path) == [1, 2]
        assert len(lines) == (1 if rank == 0 else 0)
        assert manager.latest() == 2


def test_a_checkpoint_that_was_given_up_on_is_older_than_what_comes_after(tmp_path: Path) -> None:
    """Damage that only a load finds: the next job must not begin with it again."""
    save_steps(tmp_path, 1, 2, 3)
    flip(tmp_path / "step_00000003/model.safetensors", -1)
    with manage(tmp_path) as manager:
        assert manager.restore()["step"] == 2
        manager.save(2, state_of(22))
    with manage(tmp_path) as manager:
        assert manager.latest() == 2
        assert manager.restore()["weight"][0, 0] == 22


@ranks(2)
def test_a_reader_beside_one_that_prunes(rank: int, world: int, tmp_path: Path) -> None:
    """What it has listed is gone before it loads; twice."""
    with manage(tmp_path, keep_last=1) as writer, manage(tmp_path) as reader:
        writer.save(1, state_of(1))
        writer.wait()
        real, to_come = api.load, [2, 3]

        def load(*arguments: Any, **others: Any) -> Any:
            if to_come:
                writer.save(to_come.pop(0), state_of(0))
                writer.wait()
                dist.barrier()
            return real(*arguments, **others)

        api.load = load
        reader.restore()
        assert (reader.restored_step, to_come) == (3, [])
        with pytest.raises(CheckpointNotFound):
            reader.restore(step=2)


# What cannot be


def test_the_largest_steps_are_found_again(tmp_path: Path) -> None:
    steps = [10**18 - 1, 10**18, 1_763_776_800_123_456_789, 2**63 - 1]
    with manage(tmp_path, keep_last=4) as manager:
        for step in steps:
            manager.save(step, state_of(1))
        assert manager.all_steps() == steps
        assert manager.latest() == 2**63 - 1
        with pytest.raises(OptionError, match="from 0 to 9223372036854775807"):
            manager.save(2**63, {})
    (tmp_path / "step_9223372036854775808").mkdir()
    (tmp_path / f"step_{'1' * 200}").mkdir()
    (tmp_path / ("step_" + "\u0660" * 7 + "\u0661")).mkdir()  # Arabic digits
    assert [row["step"] for row in listed(tmp_path)] == steps


def test_one_entry_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_steps(root, 1, 2, 5)
    (root / "step_00000003").symlink_to("step_00000003")
    (root / "step_00000004").symlink_to("nowhere")
    (root / "step_00000006").write_text("a file")
    unreadable = {3: "Too many levels of symbolic links", 4: "No such file or directory"}
    rows = {row["step"]: row for row in listed(root)}
    assert {step: row["problem"] for step, row in rows.items() if row["state"] == "unreadable"} == unreadable
    assert sorted(rows) == [1, 2, 3, 4, 5]
    with manage(root, keep_last=2) as manager, warned("fastload.training.history") as lines:
        assert manager.latest() == 5
        assert manager.restore()["step"] == 5
        assert len(lines) == 2, "each is told once"
        manager.save(7, state_of(7))
        manager.wait()
        assert manager.all_steps() == [5, 7]
    done = command("prune", root, "--keep-last", 1)
    assert done.exit_code == 0, done.stderr
    assert f"deleted {root}/step_00000005" in done.stdout
    assert "left alone: step 3: a link to " in done.stdout
    assert sorted(path.name[-1] for path in root.iterdir()) == ["3", "4", "6", "7"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_what_another_user_may_not_read() -> None:
    program = """
import os, sys
from fastload.training.catalog import Catalog
from fastload.options import Patience
from fastload.storage import locate
os.setuid(65534)
for one in Catalog(locate(sys.argv[1]), None, Patience(0, 10)).entries():
    print(one.step, one.state, one.problem)
"""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for their user alone
        root = Path(folder)
        save_steps(root, 1, 2, 3)
        root.chmod(0o755)
        (root / "step_00000001/fastload.json").chmod(0)
        (root / "step_00000002").chmod(0)
        found = run_forked(["-c", program, folder], cwd=root, env=os.environ, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "1 unreadable Permission denied (EACCES)",
        "2 unreadable Permission denied",
        "3 complete ",
    ]


# What is damaged, and what this process cannot read


@ranks(2)
def test_what_a_newer_version_saved_is_never_skipped(rank: int, world: int, tmp_path: Path) -> None:
    record = tmp_path / "step_00000003/fastload.json"
    with manage(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        manager.wait()
        if rank == 0:
            seal(record, version=5, more={"of": "what comes later"})
        dist.barrier()
        says = r"step_00000003.* version 5.*[Uu]pdate fastload.*restore\(step=…\)"
        for ask in (manager.latest, manager.restore):
            with pytest.raises(UnsupportedVersion, match=says):
                ask()
        with pytest.raises(UnsupportedVersion, match="version 5"):
            manager.restore(step=3)
        assert manager.restore(step=2)["step"] == 2, "by name an older one is restored"
        with manage(tmp_path) as other:
            for step in (3, 4):
                with pytest.raises(UnsupportedVersion, match=says):
                    other.save(step, state_of(step))
        assert manager.all_steps() == [1, 2]
        if rank == 0:
            [row] = [row for row in listed(tmp_path) if row["step"] == 3]
            assert row["state"] == "unsupported"
            assert "version 5" in row["problem"]
            done = command("prune", tmp_path, "--keep-last", 1)
            assert done.exit_code == 0
            assert "left alone: step 3: unsupported" in done.stdout
            assert steps_in(tmp_path) == [2, 3]
            assert record.read_bytes()
            record.parent.rename(tmp_path / "of another version")
        dist.barrier()
        assert manager.latest() == 2
        manager.save(3, state_of(3))
        assert manager.latest() == 3


LACKS = ["a tag", "NumPy", "a dtype of the model", "a dtype of a value", "a later torch"]


@pytest.mark.parametrize("lack", LACKS)
def test_what_this_process_lacks_is_no_damage(
    tmp_path: Path, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest step stays the newest: nothing older is restored instead, and what is missing is named."""
    state = {"array": numpy.arange(3), "half": torch.ones(3, dtype=torch.bfloat16), "dtype": torch.bfloat16}
    with manage(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {**state, "step": step})
        manager.wait()
        assert manager.restore()["step"] == 2
        record = tmp_path / "step_00000002/fastload.json"
        structure = json.loads(record.read_bytes())["state"]
        lines = structure["dict"]
        with monkeypatch.context() as patched:
            if lack == "a tag":
                seal(record, state={"dict": [*lines[:-1], {"PerTribe": ["x", []]}]})
                says = r"'PerTribe'.*update fastload"
            elif lack == "NumPy":
                patched.setitem(sys.modules, "numpy", None)
                says = "NumPy cannot be imported.*pip install numpy"
            elif lack == "a dtype of the model":
                patched.setitem(DTYPES, "BF16", (16, None))
                says = "dtype BF16 has no equivalent in torch.*newer torch"
            elif lack == "a dtype of a value":
                patched.delitem(values._DTYPES, "bfloat16")
                says = "has no such dtype as 'bfloat16'.*newer torch"
            else:
                seal(record, state={"dict": [*lines[:-1], {"tensor": [None, "Quantized"]}]})
                says = "'Quantized'.*update fastload"
            if lack != "NumPy":
                with pytest.raises(UnsupportedVersion, match=f"(?s){says}"):
                    manager.restore()
            with pytest.raises(CheckpointError, match=f"(?s){says}"):
                manager.restore(step=2)
            with pytest.raises(CheckpointError, match=f"(?s){says}"):
                manager.restore()
            assert (manager.latest(), manager.restored_step) == (2, 2)
            assert manager._catalog.damaged == set()
        seal(record, state=structure)
        assert manager.restore()["step"] == 2


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a file is cut": lambda folder: cut(folder / "model.safetensors"),
    "a file is longer": lambda folder: os.truncate(folder / "model.safetensors", 30_000),
    "a file is gone": lambda folder: (folder / "model.safetensors").unlink(),
    "a header": lambda folder: flip(folder / "model.safetensors", 20),
    "data": lambda folder: flip(folder / "model.safetensors", -1),
    "the record is cut": lambda folder: cut(folder / "fastload.json"),
    "the record is empty": lambda folder: os.truncate(folder / "fastload.json", 0),
    "the record is another one": lambda folder: (folder / "fastload.json").write_text('{"version": 7}'),
    "the version in the record": lambda folder: replace(folder, b'"version":1', b'"version":2'),
    "the format in the record": lambda folder: replace(folder, b'"fastload"', b'"fastloaf"'),
    "a key in the record": lambda folder: replace(folder, b'"metadata"', b'"netadata"'),
    "the checksum of the record": lambda folder: replace(folder, b'"checksum":"', b'"chucksum":"'),
}


def replace(folder: Path, old: bytes, new: bytes) -> None:
    record = folder / "fastload.json"
    assert old in record.read_bytes()
    record.write_bytes(record.read_bytes().replace(old, new))


def test_what_is_damaged_is_passed_over(tmp_path: Path) -> None:
    """Whatever else the damaged bytes say: that of a newer version, too."""
    with manage(tmp_path) as manager:
        for step in range(len(DAMAGES) + 1):
            manager.save(step, state_of(step))
        manager.wait()
        for step, damage in enumerate(DAMAGES.values(), 1):
            damage(tmp_path / f"step_{step:08d}")
        assert manager.latest() in (0, 4, 5), "what only reading finds is not known yet"
        assert manager.restore()["step"] == 0
        assert manager._catalog.damaged == set(range(1, len(DAMAGES) + 1))
        manager.save(3, state_of(33))
        assert manager.restore()["weight"][0, 0] == 33
