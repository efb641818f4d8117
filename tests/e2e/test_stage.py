"""``fastload stage`` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import flip, record_by_hand
from tests.e2e.test_cli import CONTROL, checkpoint, one_object, run

__all__ = ["checkpoint"]  # a fixture

pytestmark = pytest.mark.timeout(120)


def test_stage_on_ranks(checkpoint: Path, tmp_path: Path) -> None:
    record_by_hand(checkpoint, 1000)
    (checkpoint / "config.json").write_text("{}")
    copy = tmp_path / "local" / "copy"
    done = run("stage", str(checkpoint), str(copy), "--json", ranks=2)
    assert done.returncode == 0, done.stderr
    report = one_object(done.stdout)
    whole = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert report["nbytes"] == report["bytes_read"] == report["bytes_written"] == whole
    assert (report["num_hosts"], report["num_files"]) == (1, 5)
    assert [rank["leads"] for rank in report["ranks"]] == [True, False]
    for file in checkpoint.iterdir():
        assert (copy / file.name).read_bytes() == file.read_bytes()


def test_stage_alone_for_people_to_read(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    done = run("stage", str(checkpoint), str(copy))
    assert (done.returncode, done.stderr) == (0, "")
    assert not CONTROL.search(done.stdout)
    assert f"{checkpoint}: " in done.stdout
    assert f"at {copy} of 1 host\n" in done.stdout
    assert "1.00 × the checkpoint" in done.stdout
    flip(checkpoint / "b.safetensors", -1)
    refused = run("stage", str(checkpoint), str(copy))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("fastload: CheckpointExists: ")
    assert "overwrite" in refused.stderr
    replaced = run("stage", str(checkpoint), str(copy), "--overwrite", "--no-verify")
    assert replaced.returncode == 0, replaced.stderr
    assert (copy / "b.safetensors").read_bytes() == (checkpoint / "b.safetensors").read_bytes()
