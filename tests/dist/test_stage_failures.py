"""Staging that goes wrong: killed midway, no room, damage, a source that changes, hosts that share a path."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.storage.local import LocalStorage
from tests.checkpoints import flip, record_by_hand, write_sharded
from tests.dist.harness import ranks, run_ranks
from tests.dist.hosts import can_mount, mount_disk, mount_memory
from tests.dist.patience import patient
from tests.dist.test_stage import assert_copy, size_of, stage

pytestmark = pytest.mark.skipif(
    not can_mount(),
    reason="needs root: every host gets mounts of its own, like a host with a disk of its own",
)

CHUNK_BYTES = 16 << 10


@pytest.fixture
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "step-7"
    rows = [(f"t{number}", "F32", (20000 + number, 3)) for number in range(6)]
    write_sharded(folder, {"a.safetensors": rows[:3], "b.safetensors": rows[3:]}, index=True)
    (folder / "config.json").write_text('{"layers": 6}')
    return folder


@pytest.fixture
def saved(source: Path) -> Path:
    record_by_hand(source, 5000)
    return source


@pytest.fixture
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


def at(share: float, act: Callable[[], object]) -> Callable[[int, int], None]:
    """Something to happen, once, when so much has been copied."""
    acted: list[bool] = []

    def progress(done: int, total: int) -> None:
        if done >= share * total and not acted:
            acted.append(True)
            act()

    return progress


def killed_body(rank: int, world: int, tmp_path: Path, disks: Path, folder: Path, victim: int) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    kill = at(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    options = {"timeout_s": patient(4.0), "chunk_bytes": CHUNK_BYTES}
    with pytest.raises(fastload.PeerError) as caught:
        stage(folder, disk / "copy", progress=kill if rank == victim else None, **options)
    assert victim in caught.value.failures


def resumed_body(rank: int, world: int, tmp_path: Path, disks: Path, folder: Path) -> fastload.StageReport:
    disk = mount_disk(tmp_path, disks, rank)
    report = stage(folder, disk / "copy", chunk_bytes=CHUNK_BYTES)
    assert_copy(disk / "copy", folder)
    return report


def staging_of(disk: Path) -> Path:
    (staging,) = disk.iterdir()
    assert staging.name.startswith(".copy."), "no copy, only the beginnings of one"
    return staging


@pytest.mark.slow(but=["saved-1"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["source", "saved"])
def test_after_a_kill_the_next_one_goes_on(
    tmp_path: Path, disks: Path, kind: str, victim: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    given: dict[str, Any] = {"tmp_path": tmp_path, "disks": disks, "folder": folder}
    run_ranks(killed_body, 2, dies={victim: signal.SIGKILL}, store="agent", victim=victim, **given)
    # Of what is noted some is not as it was, as after a power cut.
    damaged = staging_of(disks / f"host{1 - victim}") / "data" / "a.safetensors"
    flip(damaged, 1000)
    with open(staging_of(disks / f"host{victim}") / "journal", "ab") as journal:
        journal.write(b"\0" * 7)
    (report, *others) = run_ranks(resumed_body, 2, **given)
    assert others == [report]
    whole = size_of(folder)
    kept = [own.bytes_kept for own in report.ranks]
    assert all(0.3 * whole < each < whole for each in kept)
    assert 0 < report.bytes_read < 0.7 * whole
    assert [own.bytes_written for own in report.ranks] == [whole - each for each in kept]
    again = run_ranks(resumed_body, 2, **given)[0]
    assert again.digest == report.digest
    assert again.bytes_read == 0


def test_a_host_without_its_part_gets_all(tmp_path: Path, disks: Path, source: Path) -> None:
    given: dict[str, Any] = {"tmp_path": tmp_path, "disks": disks, "folder": source}
    run_ranks(killed_body, 2, dies={1: signal.SIGKILL}, victim=1, **given)
    (disks / "host1").rename(disks / "broken")
    report = run_ranks(resumed_body, 2, **given)[0]
    assert report.bytes_read == size_of(source)
    kept = report.ranks[0].bytes_kept
    assert kept > 0
    assert [own.bytes_written for own in report.ranks] == [size_of(source) - kept, size_of(source)]


def test_what_another_source_left_is_cleaned_away(tmp_path: Path, disks: Path, source: Path) -> None:
    given: dict[str, Any] = {"tmp_path": tmp_path, "disks": disks, "folder": source}
    run_ranks(killed_body, 2, dies={0: signal.SIGKILL}, victim=0, **given)
    flip(source / "b.safetensors", 70000)
    report = run_ranks(resumed_body, 2, **given)[0]
    assert [own.bytes_kept for own in report.ranks] == [0, 0]


@ranks(3)
def test_one_host_has_no_room(rank: int, world: int, tmp_path: Path, disks: Path, source: Path) -> None:
    disk = mount_memory(tmp_path, rank, 200_000) if rank == 1 else mount_disk(tmp_path, disks, rank)
    with pytest.raises(fastload.PeerError, match=r"rank 1 on host1: StorageError: .*No space left") as caught:
        stage(source, disk / "copy")
    assert list(caught.value.failures) == [1]
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("kind", ["source", "saved"])
@ranks(2)
def test_the_source_changes(
    rank: int, world: int, tmp_path: Path, disks: Path, kind: str, folder_of_kind: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    change = at(0.3, lambda: flip(folder_of_kind / "config.json", 2)) if rank == 0 else None
    with pytest.raises((fastload.PeerError, fastload.StorageError), match="changed after it was opened"):
        stage(folder_of_kind, disk / "copy", progress=change, chunk_bytes=CHUNK_BYTES)
    assert not (disk / "copy").exists()


@pytest.fixture
def folder_of_kind(kind: str, request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(kind)
    return folder


@ranks(2)
def test_a_damaged_source_is_refused(rank: int, world: int, tmp_path: Path, disks: Path, saved: Path) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    if rank == 0:
        flip(saved / "b.safetensors", -9)
    with pytest.raises(fastload.CheckpointNotFound):
        stage(saved / "nothing", disk / "copy")  # the ranks have met
    with pytest.raises(fastload.ChecksumError, match=r"b\.safetensors \[bytes \d+-\d+\]: checksum"):
        stage(saved, disk / "copy", chunk_bytes=CHUNK_BYTES)
    assert not (disk / "copy").exists()


@ranks(2)
def test_what_was_spoiled_on_the_way_heals(
    rank: int, world: int, tmp_path: Path, disks: Path, saved: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    honest, spoiled = LocalStorage.read_into, []

    def spoil(self: LocalStorage, name: str, offset: int, buffers: Sequence[memoryview], *more: Any) -> None:
        honest(self, name, offset, buffers, *more)
        if rank == 1 and name == "a.safetensors" and offset > 50_000 and not spoiled:
            spoiled.append(offset)
            buffers[0][len(buffers[0]) // 2] ^= 1

    LocalStorage.read_into = spoil  # type: ignore[method-assign]
    report = stage(saved, disk / "copy", chunk_bytes=CHUNK_BYTES)
    assert_copy(disk / "copy", saved)
    assert [own.retries for own in report.ranks] == [1, 1], "each host saw it and read it again"
    assert bool(spoiled) == (rank == 1)


@ranks(2)
def test_hosts_that_share_the_path(rank: int, world: int, tmp_path: Path, source: Path) -> None:
    socket.gethostname = lambda: f"host{rank}"
    with pytest.raises(fastload.PeerError, match=r"in use by process \d+ on host\d; hosts that share"):
        stage(source, tmp_path / "copy")
    torch.distributed.barrier()
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_ranks_of_one_host_name_but_two_disks(
    rank: int, world: int, tmp_path: Path, disks: Path, source: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    socket.gethostname = lambda: "localhost"
    with pytest.raises(
        fastload.PeerError, match="they have the same host name, localhost, but different disks"
    ):
        stage(source, disk / "copy")
    assert list(disk.iterdir()) == []


@ranks(2)
def test_ranks_that_ask_for_different_places(rank: int, world: int, tmp_path: Path, source: Path) -> None:
    with pytest.raises(fastload.PlanMismatch, match=r"dst: rank 0 .*copy0.*rank 1 .*copy1"):
        stage(source, tmp_path / f"copy{rank}")
