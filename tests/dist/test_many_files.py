"""Checkpoints of more files than a process may have open."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import SaveOptions
from fastload.errors import FastloadError, StorageError
from tests.dist.harness import ranks


def limit_descriptors(number: int) -> None:
    """For good, as `ulimit -n` does."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def state_of(num_files: int, value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"{number:05}": torch.full((15,), value + number) for number in range(num_files)}


def save(state: dict[str, torch.Tensor], path: Path, **options: object) -> None:
    options = {"max_shard_bytes": 60, "writers": "all", "timeout_s": 100, **options}
    report = fastload.save(state, path, options=SaveOptions(**options))  # type: ignore[arg-type]
    assert report.num_files == len(state)


def round_trip(tmp_path: Path, num_files: int) -> None:
    state = state_of(num_files)
    save(state, tmp_path / "one")
    assert fastload.verify(tmp_path / "one").num_files == num_files
    for _ in range(2):
        report = fastload.stage(tmp_path / "one", tmp_path / "two")
        assert report.num_files == num_files + 2, "with index and record"
    for path in (tmp_path / "one", tmp_path / "two"):
        loaded = fastload.load(path)
        assert loaded.keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())


@pytest.mark.slow
@ranks(2)
def test_more_files_than_descriptors(rank: int, world: int, tmp_path: Path) -> None:
    limit_descriptors(100)
    round_trip(tmp_path, num_files=250)


@pytest.mark.slow
@ranks(2, deadline_s=400)
def test_thousands_of_files_with_the_usual_limit(rank: int, world: int, tmp_path: Path) -> None:
    limit_descriptors(1024)
    round_trip(tmp_path, num_files=10_000)


@ranks(1)
def test_a_file_that_is_opened_again_is_the_same_one(rank: int, world: int, tmp_path: Path) -> None:
    limit_descriptors(100)
    save(state_of(150), tmp_path / "one")
    save(state_of(150, value=0.5), tmp_path / "other")
    with fastload.open(tmp_path / "one") as checkpoint:
        assert checkpoint.load(names="00000")["00000"][0] == 0.0
        assert len(os.listdir("/proc/self/fd")) < 60, "most of the files are not kept open"
        name = checkpoint.manifest.files[7].name
        os.replace(tmp_path / "other" / name, tmp_path / "one" / name)
        with pytest.raises(StorageError, match=f"{name}: it was changed or replaced after"):
            checkpoint.load()
    with fastload.open(tmp_path / "one", options=fastload.LoadOptions(verify=False)) as checkpoint:
        save(state_of(150, value=0.5), tmp_path / "one", overwrite=True)
        with pytest.raises(StorageError, match="removed or replaced after it was opened"):
            checkpoint.load()
    assert fastload.load(tmp_path / "one")["00149"][0] == 149.5


@ranks(2, same=True)
def test_what_a_descriptor_hears_before_it_is_closed_is_not_lost(
    rank: int, world: int, tmp_path: Path
) -> str:
    """The system tells of a failed write once, to the descriptor that wrote."""
    limit_descriptors(100)
    fsync, failed = os.fsync, []

    def fail_once(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "model-00002-" in path and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    os.fsync = fail_once
    with pytest.raises(FastloadError) as raised:
        save(state_of(250), tmp_path / "one")
    dist.barrier()  # the rank that made the pending directory has removed it
    assert list(tmp_path.iterdir()) == []
    assert "model-00002-of-00250.safetensors" in str(raised.value)
    assert "EIO" in str(raised.value)
    return str(raised.value).replace(f"this is rank {rank}", "")
