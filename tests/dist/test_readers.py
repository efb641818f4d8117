"""Hosts with disks of their own: who reads, who only receives, and what the report says of it.

Each rank gets a mount namespace with a file system of its own at one and the same path, as if it were on
another host.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fastload
from fastload.formats.state import state_digest
from tests.checkpoints import assert_same_bits, flip, load_reference, write_file, write_sharded
from tests.dist.harness import ranks
from tests.dist.hosts import can_mount, mount_memory

pytestmark = pytest.mark.skipif(
    not can_mount(),
    reason="needs root: every rank gets mounts of its own, like a host with a disk of its own",
)


ROWS = [(f"t{number}", "F32", (200 + number, 3)) for number in range(5)]


def own_disk(folder: Path, rank: int) -> Path:
    """Mounts a file system that only this rank sees, and makes it look like a host of its own."""
    return mount_memory(folder, rank, 64 << 20)


@pytest.fixture
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_original(tmp_path_factory.mktemp("original"))


def write_original(folder: Path) -> Path:
    write_sharded(folder, {"a.safetensors": ROWS[:3], "b.safetensors": ROWS[3:]}, index=True)
    return folder


def copy(original: Path, disk: Path) -> None:
    """Equal bytes; inode and time of their own."""
    for file in original.iterdir():
        (disk / file.name).write_bytes(file.read_bytes())


def load(
    disk: Path, original: Path, strategy: str = "auto"
) -> tuple[dict[str, torch.Tensor], fastload.LoadReport]:
    options = fastload.LoadOptions(strategy=strategy, chunk_bytes=100, timeout_s=20)
    with fastload.open(disk, options=options) as checkpoint:
        tensors = checkpoint.load()
    assert_same_bits(tensors, load_reference(original))
    assert checkpoint.report is not None
    assert checkpoint.report.bytes_wanted == sum(tensor.nbytes for tensor in tensors.values())
    return tensors, checkpoint.report


@ranks(4, same=True)
def test_ranks_that_see_it_read_and_the_others_receive(
    rank: int, world: int, tmp_path: Path, original: Path
) -> str:
    disk = own_disk(tmp_path, rank)
    if rank in (1, 2):
        copy(original, disk)
    else:
        assert list(disk.iterdir()) == []
    tensors, report = load(disk / "a.safetensors", original / "a.safetensors")
    assert report.strategy == "allgather"
    assert "2 of 4 ranks can read" in report.why
    assert [own.reader for own in report.ranks] == [False, True, True, False]
    assert [own.host for own in report.ranks] == ["host0", "host1", "host2", "host3"]
    assert report.bytes_read == report.bytes_wanted
    assert report.ranks[0].bytes_read == report.ranks[3].bytes_read == 0
    assert abs(report.ranks[1].bytes_read - report.ranks[2].bytes_read) <= 100
    # The lowest rank that sees it reads the headers; rank 2 compares its own.
    assert report.ranks[0].header_bytes_read == report.ranks[3].header_bytes_read == 0
    assert report.ranks[1].header_bytes_read > 0
    for own in report.ranks:
        assert own.note == ("" if own.reader else f"does not see {disk / 'a.safetensors'}")
    return state_digest(tensors)


@ranks(3, same=True)
def test_one_rank_that_is_not_the_first_feeds_all(
    rank: int, world: int, tmp_path: Path, original: Path
) -> str:
    disk = own_disk(tmp_path, rank) / "checkpoint"
    if rank == 2:
        disk.mkdir()
        copy(original, disk)
    tensors, report = load(disk, original)
    assert (report.strategy, report.why) == ("broadcast", "only rank 2 can read")
    assert [own.bytes_read for own in report.ranks] == [0, 0, report.bytes_wanted]
    assert [own.header_bytes_read > 0 for own in report.ranks] == [False, False, True]
    return state_digest(tensors)


@pytest.mark.slow(but=["allgather", "auto"])
@pytest.mark.parametrize("strategy", ["auto", "allgather", "broadcast", "direct"])
@ranks(3, same=True)
def test_equal_copies_on_every_host_are_all_read(
    rank: int, world: int, tmp_path: Path, original: Path, strategy: str
) -> str:
    disk = own_disk(tmp_path, rank)
    copy(original, disk)
    tensors, report = load(disk, original, strategy)
    assert [own.note for own in report.ranks] == [""] * world
    if strategy == "auto":
        assert (report.strategy, report.why) == ("direct", "each host has the files on a disk of its own")
    elif strategy == "allgather":
        assert all(own.bytes_read > 0 for own in report.ranks)
        assert report.bytes_read == report.bytes_wanted
    return state_digest(tensors)


@pytest.mark.slow(but=["header", "ranks-values", "missing"])
@pytest.mark.parametrize("other", ["size", "header", "missing", "empty", "values", "few values"])
@ranks(3, same=True)
def test_another_file_of_the_same_name_is_not_read(
    rank: int, world: int, tmp_path: Path, original: Path, other: str
) -> str:
    disk = own_disk(tmp_path, rank)
    copy(original, disk)
    if rank == 1:
        file = disk / "b.safetensors"
        whole = file.read_bytes()
        if other == "size":
            write_file(file, [("t3", "F32", (9, 3))])
        elif other == "header":
            file.write_bytes(whole.replace(b'"t3"', b'"x3"'))
            assert len(whole) == file.stat().st_size
        elif other == "missing":
            file.unlink()
        elif other == "values":  # as of another step
            write_file(file, ROWS[3:], seed=1)
            assert len(whole) == file.stat().st_size
        elif other == "few values":
            flip(file, -1000)
        else:
            file.write_bytes(b"")
    tensors, report = load(disk, original, "allgather")
    assert [own.reader for own in report.ranks] == [True, False, True]
    assert report.ranks[1].bytes_read == 0
    note = report.ranks[1].note
    assert "b.safetensors" in note
    wanted = {"size": "not the same file", "header": "another header than rank 0", "missing": "does not see"}
    wanted |= dict.fromkeys(("values", "few values"), "sees other data than rank 0 in b.safetensors [bytes ")
    assert wanted.get(other, "of 0 bytes") in note
    with pytest.raises(fastload.OptionError, match="strategy='direct': rank 1 on host1 cannot read"):
        load(disk, original, "direct")
    return state_digest(tensors)


@ranks(3)
def test_nobody_sees_it(rank: int, world: int, tmp_path: Path) -> None:
    disk = own_disk(tmp_path, rank)
    with pytest.raises(fastload.CheckpointNotFound, match=f"{disk / 'nothing'}: no such checkpoint"):
        fastload.load(disk / "nothing", options=fastload.LoadOptions(timeout_s=20))
    with pytest.raises(FileNotFoundError):
        fastload.load(disk / "nothing" / "below", options=fastload.LoadOptions(timeout_s=20))


@ranks(2)
def test_a_bad_header_on_the_only_rank_that_sees_it_fails_on_all(
    rank: int, world: int, tmp_path: Path
) -> None:
    disk = own_disk(tmp_path, rank)
    if rank == 1:
        (disk / "m.safetensors").write_bytes(b"not a checkpoint at all")
    with pytest.raises(fastload.ManifestError, match="header length"):
        fastload.load(disk / "m.safetensors", options=fastload.LoadOptions(timeout_s=20))


@ranks(3, same=True)
def test_an_empty_mount_point_does_not_hide_the_files_of_others(
    rank: int, world: int, tmp_path: Path, original: Path
) -> str:
    disk = own_disk(tmp_path, rank)
    if rank:
        copy(original, disk)
    tensors, report = load(disk, original)
    assert [own.reader for own in report.ranks] == [False, True, True]
    assert report.ranks[0].note.startswith(f"does not see {disk}")
    return state_digest(tensors)


@ranks(2, deadline_s=90)
def test_other_formats_of_which_hosts_have_other_values(rank: int, world: int, tmp_path: Path) -> None:
    """Metadata, directories and pickles are the same in every step: some of the data tell."""
    disk = own_disk(tmp_path, rank)
    state = {name: torch.full((500, 300), float(number + rank)) for number, name in enumerate("abcd")}
    wanted = {name: torch.full((500, 300), float(number)) for number, name in enumerate("abcd")}
    torch.save(state, disk / "zip.pt")
    torch.save(state, disk / "old.pt", _use_new_zipfile_serialization=False)
    (disk / "bin").mkdir()
    torch.save(state, disk / "bin" / "pytorch_model.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a save of one rank
        dcp.save(state, storage_writer=dcp.FileSystemWriter(disk / "dcp"), no_dist=True)
    save(state, disk / "saved")
    for file in disk.rglob("*"):
        os.utime(file, ns=(rank, rank))  # what one kernel does within a tick has one time
    for name in ("zip.pt", "old.pt", "bin", "dcp", "saved"):
        reports: list[fastload.LoadReport] = []
        options = fastload.LoadOptions(strategy="allgather", timeout_s=20, on_report=reports.append)
        found = fastload.load(disk / name, options=options)
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items()), name
        assert [own.reader for own in reports[0].ranks] == [True, False], name
        assert "sees " in reports[0].ranks[1].note, name


def save(state: dict[str, torch.Tensor], path: Path) -> None:
    """Saves a checkpoint for this rank alone."""
    fastload.save(
        state, path, process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
    )
