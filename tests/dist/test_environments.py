"""Odd environments: names that are no text, machines of one name, what others set for Gloo."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import CheckpointManager, LoadOptions, SaveOptions
from fastload.comm import hosts
from fastload.storage.mounts import file_system_type, mounts
from tests.dist.harness import ranks
from tests.dist.hosts import mount_memory
from tests.dist.test_readers import own_disk
from tests.dist.test_readers import pytestmark as needs_mounts

STATE = {"weights": torch.arange(50_000.0), "step": 3}


def is_state(found: dict[str, torch.Tensor]) -> bool:
    return bool(torch.equal(found["weights"], STATE["weights"])) and found["step"] == 3


@ranks(2)
def test_a_path_that_is_not_utf8(rank: int, world: int, tmp_path: Path) -> None:
    saving, loading = SaveOptions(timeout_s=20), LoadOptions(timeout_s=20)
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    time.sleep(0.3 * (1 - rank))  # one that waits tells what it waits for
    fastload.save(STATE, folder / "a", options=saving)
    fastload.async_save(STATE, folder / "b", options=saving).wait(20)
    assert is_state(fastload.load(folder / "a", options=loading))
    assert fastload.verify(folder / "b", options=loading).num_blocks
    fastload.stage(folder / "a", folder / "staged")
    with CheckpointManager(folder / "run", options=saving, every_steps=1) as manager:
        assert manager.should_save(1)
        manager.save(1, STATE)
        manager.wait()
        assert is_state(manager.restore())
    dist.barrier()


@needs_mounts
@ranks(2)
def test_two_machines_of_one_name_with_disks_of_their_own(rank: int, world: int, tmp_path: Path) -> None:
    """Cloned machines often have one name. Each has booted by itself, and has a copy of its own."""
    patch = pytest.MonkeyPatch()
    (boot_id := tmp_path / f"boot_id{rank}").write_text(f"{rank:08}-0000")
    patch.setattr(hosts, "_BOOT_ID", boot_id)
    (disk := tmp_path / "disk").mkdir(exist_ok=True)
    own_disk(disk, rank)
    patch.setattr(socket, "gethostname", lambda: "same")
    saving, loading = SaveOptions(timeout_s=20, shared=False), LoadOptions(timeout_s=20)
    fastload.save(STATE, disk / "a", options=saving)
    assert (disk / "a" / "fastload.json").exists()
    assert is_state(fastload.load(disk / "a", options=loading))
    fastload.stage(disk / "a", disk / "staged")
    assert (disk / "staged" / "fastload.json").exists()
    with CheckpointManager(disk / "run", options=saving, every_steps=1, keep_last=1) as manager:
        for step in (1, 2):
            assert manager.should_save(step)
            manager.save(step, STATE)
    assert os.listdir(disk / "run") == ["step_00000002"], "each machine deletes what is too old on its disk"
    patch.undo()


@ranks(2, ranks_per_host=1)
def test_groups_of_gloo_that_connect_when_they_are_used(rank: int, world: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        fastload.save(STATE, tmp_path / "a", options=SaveOptions(timeout_s=20))
        for _ in range(2):
            options = LoadOptions(timeout_s=20, strategy="allgather")
            assert is_state(fastload.load(tmp_path / "a", options=options))
    dist.barrier()


@needs_mounts
@ranks(1)
def test_a_mount_point_whose_name_is_no_text(rank: int, world: int, tmp_path: Path) -> None:
    for name in (b"a blank", b"back\\slash\ttab", b"caf\xe9\nline"):
        point = tmp_path / os.fsdecode(name)
        point.mkdir()
        mount_memory(point, rank, 1 << 20)
        assert file_system_type(str(point / "x")) == "tmpfs"
        assert str(point) in [mounted for mounted, _, _ in mounts()]
    assert file_system_type(str(tmp_path / "a")) != "tmpfs"
