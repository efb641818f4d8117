"""Directories that stay open while others come and go in them: each listing shows what is there by then.

On btrfs (Linux 6.5 and newer) the first listing through a descriptor shows what was there when it was opened.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

import fastload
from fastload import CheckpointManager, SaveOptions
from fastload.errors import FastloadError
from fastload.ext.memory.folder import JobFolder
from fastload.storage import folders
from fastload.storage.local_target import LocalTarget
from tests.storage.disks import small_disk_in
from tests.storage.test_tier import JOB, ONE, TWO, make, names

_BTRFS_MIB = 120  # its mkfs makes none much smaller


def state_of(step: int) -> dict[str, object]:
    return {"weight": torch.full((1000,), float(step)), "step": step}


def test_btrfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays behind on it: of saves that replace a checkpoint, that fail, and of the memory tier."""
    with small_disk_in(tmp_path, _BTRFS_MIB, "btrfs") as disk:
        checkpoint = disk / "checkpoint"
        for step in (1, 2):
            fastload.save(state_of(step), checkpoint, options=SaveOptions(overwrite=True))
        assert os.listdir(disk) == ["checkpoint"], "what was replaced is gone"
        (checkpoint / "notes.txt").write_text("mine")
        fastload.save(state_of(3), checkpoint, options=SaveOptions(overwrite=True))
        assert (checkpoint / "notes.txt").read_text() == "mine"

        def fail(self: LocalTarget, *given: object, **more: object) -> None:
            raise OSError("no more room")

        with monkeypatch.context() as broken:
            broken.setattr(LocalTarget, "publish", fail)
            with pytest.raises((FastloadError, OSError), match="no more room"):
                fastload.save(state_of(4), disk / "failed")
        assert os.listdir(disk) == ["checkpoint"], "so is what a failed save had written"
        assert fastload.load(checkpoint)["step"] == 3

        job = JobFolder(str(disk), JOB, "root")
        with closing(make(job, ONE)):
            assert job.records() == {}
            job.record(ONE, [], b"one")
        assert job.records() == {ONE: b"one"}
        job.retire(TWO)
        assert job.records() == {}
        with closing(make(job, TWO)):  # where the one that was retired was
            assert names(job) == {TWO}
        job.close(remove=True)
        assert not os.path.exists(job.path)

        with CheckpointManager(disk / "runs", keep_last=1) as manager:
            for step in (1, 2, 3):
                manager.save(step, state_of(step))
        assert os.listdir(disk / "runs") == ["step_00000003"]


def test_a_listing_begins_at_the_beginning(tmp_path: Path) -> None:
    """Wherever the one before has ended: a file system tells what is new only to who begins anew."""
    for name in ("a", "b"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    folder = folders.open_folder(str(tmp_path))
    try:
        for _ in range(2):
            os.lseek(folder, 1 << 62, os.SEEK_SET)
            assert folders.names(folder) == ["a", "b", "folder"]
            os.lseek(folder, 1 << 62, os.SEEK_SET)
            assert folders.kinds(folder) == {"a": False, "b": False, "folder": True}
        os.lseek(folder, 1 << 62, os.SEEK_SET)
        folders.empty(folder)
    finally:
        os.close(folder)
    assert os.listdir(tmp_path) == []
