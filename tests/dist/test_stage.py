"""Staging: one copy on each host, read once in all; what is there already; loads that use the copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.formats.state import state_digest
from tests.checkpoints import (
    assert_same_bits,
    flip,
    load_reference,
    record_by_hand,
    rot,
    write_file,
    write_sharded,
)
from tests.dist.flaky_server import FlakyServer, serve
from tests.dist.harness import ranks
from tests.dist.hosts import can_mount, mount_disk

pytestmark = pytest.mark.skipif(
    not can_mount(),
    reason="needs root: every host gets mounts of its own, like a host with a disk of its own",
)

RECEIPT = ".fastload-stage.json"


@pytest.fixture
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a commit record, and what lies beside one."""
    folder = tmp_path_factory.mktemp("shared") / "step-7"
    rows = [(f"t{number}", "F32", (2000 + number, 3)) for number in range(6)]
    rows.append(("empty", "F32", (0, 5)))
    write_sharded(folder, {"a.safetensors": rows[:3], "b.safetensors": rows[3:]}, index=True)
    (folder / "config.json").write_text('{"layers": 6}')
    (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 50)
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("hidden")
    (folder / "runs").mkdir()
    (folder / "runs" / "log").write_text("not a part of it")
    return folder


@pytest.fixture
def saved(source: Path) -> Path:
    """The same with a commit record."""
    record_by_hand(source, 1000)
    return source


@pytest.fixture
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


def stage(source: Path, path: Path, **changes: object) -> fastload.StageReport:
    given = {"timeout_s": 20, "chunk_bytes": 4096, **changes}
    return fastload.stage(source, path, options=fastload.StageOptions(**given))  # type: ignore[arg-type]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file() and file.name != RECEIPT)


def assert_copy(copy: Path, source: Path) -> None:
    """Byte for byte, with a receipt, and nothing else beside it."""
    names = {file.name for file in source.iterdir() if file.is_file()}
    assert {file.name for file in copy.iterdir()} == names | {RECEIPT}
    for name in names:
        assert (copy / name).read_bytes() == (source / name).read_bytes(), name
    assert [entry.name for entry in copy.parent.iterdir()] == [copy.name]


def load(path: Path, source: Path) -> fastload.LoadReport:
    with fastload.open(path, options=fastload.LoadOptions(timeout_s=20, chunk_bytes=4096)) as checkpoint:
        assert_same_bits(checkpoint.load(names="*"), load_reference(source))
    assert checkpoint.report is not None
    return checkpoint.report


@pytest.mark.slow(but=["3-ranks-source", "1-ranks-saved"])
@pytest.mark.parametrize("kind", ["source", "saved"])
@ranks(1, 3)
def test_every_host_gets_a_copy_and_loads_use_it(
    rank: int, world: int, tmp_path: Path, disks: Path, kind: str, request_folder: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    report = stage(request_folder, disk / "copy")
    assert_copy(disk / "copy", request_folder)
    whole = size_of(request_folder)
    assert (report.nbytes, report.num_hosts) == (whole, world)
    assert report.bytes_read == whole
    assert report.read_amplification == 1.0
    assert report.bytes_written == whole * world
    for own in report.ranks:
        assert own.leads
        assert own.bytes_read + own.bytes_received == own.bytes_written == whole
        assert abs(own.bytes_read - whole / world) < 2 * 4096 + 1000
        assert (own.bytes_verified > 0) == (kind == "saved")
    loaded = load(disk / "copy", request_folder)
    assert loaded.strategy == "direct"
    if world > 1:
        assert loaded.why == "each host has the files on a disk of its own"


@pytest.fixture
def request_folder(kind: str, request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(kind)
    return folder


@ranks(5)
def test_several_ranks_of_a_host_make_one_copy(
    rank: int, world: int, tmp_path: Path, disks: Path, saved: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank // 2)
    report = stage(saved, disk / "below" / "copy")
    assert_copy(disk / "below" / "copy", saved)
    assert [own.leads for own in report.ranks] == [True, False, True, False, True]
    assert report.num_hosts == 3
    assert report.bytes_read == size_of(saved)
    assert report.bytes_written == 3 * size_of(saved)


@pytest.mark.slow(but=["False"])
@pytest.mark.parametrize("verify", [True, False])
@ranks(2)
def test_what_is_there_is_not_read_again(
    rank: int, world: int, tmp_path: Path, disks: Path, source: Path, verify: bool
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    first = stage(source, disk / "copy")
    before = (disk / "copy").stat()
    report = stage(source, disk / "copy", verify=verify)
    assert report.bytes_read == report.bytes_written == 0
    assert [own.bytes_kept for own in report.ranks] == [size_of(source)] * 2
    assert report.digest == first.digest
    assert ((disk / "copy").stat().st_ino, (disk / "copy").stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


@ranks(3)
def test_a_host_that_has_no_copy_is_fed_by_the_others(
    rank: int, world: int, tmp_path: Path, disks: Path, source: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    stage(source, disk / "copy")
    if rank == 1:
        for file in (disk / "copy").iterdir():
            file.unlink()
        (disk / "copy").rmdir()
    loaded = load(disk / "copy", source)
    assert loaded.strategy == "allgather"
    assert [own.reader for own in loaded.ranks] == [True, False, True]
    report = stage(source, disk / "copy")
    assert_copy(disk / "copy", source)
    assert report.bytes_read == 0
    assert sum(own.bytes_fed for own in report.ranks) == size_of(source)
    assert [own.bytes_written for own in report.ranks] == [0, size_of(source), 0]


@pytest.mark.slow(but=["saved"])
@pytest.mark.parametrize("kind", ["source", "saved"])
@ranks(2)
def test_a_damaged_copy_is_made_anew(
    rank: int, world: int, tmp_path: Path, disks: Path, kind: str, request_folder: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    stage(request_folder, disk / "copy")
    if rank == 1:
        rot(disk / "copy" / "b.safetensors", -5)
    report = stage(request_folder, disk / "copy")
    assert_copy(disk / "copy", request_folder)
    assert report.bytes_read == 0
    assert [own.bytes_written for own in report.ranks] == [0, size_of(request_folder)]
    if rank == 0:
        rot(disk / "copy" / "config.json", 2)
    (disk / "copy" / "tokenizer.model").unlink()
    report = stage(request_folder, disk / "copy")  # nobody has a whole one
    assert_copy(disk / "copy", request_folder)
    assert report.bytes_read == size_of(request_folder)


@pytest.mark.slow(but=["as long", "longer"])
@pytest.mark.parametrize("change", ["as long", "longer", "replaced"])
@ranks(2)
def test_a_copy_that_its_user_changed_is_not_replaced_unless_asked_for(
    rank: int, world: int, tmp_path: Path, disks: Path, source: Path, change: str
) -> None:
    """Trained on in place, with notes beside it: on rank 1's host, which also has rotten bytes."""
    disk = mount_disk(tmp_path, disks, rank)
    stage(source, disk / "copy")
    copy = disk / "copy"
    if rank == 1:
        (copy / "notes.txt").write_text("lr 3e-4")
        (copy / "optimizer.pt").write_bytes(b"moments")
        rot(copy / "tokenizer.model", 100)
        if change == "as long":
            os.utime(copy / "a.safetensors", ns=(0, 0))  # the clock's ticks may be longer than this test
            flip(copy / "a.safetensors", -5)
        elif change == "longer":
            with open(copy / "config.json", "a") as file:
                file.write(" ")
        else:
            (copy / "config.json").unlink()
            (copy / "config.json").symlink_to("elsewhere")
    before = {file.name: file.read_bytes() for file in copy.iterdir() if file.exists()}
    name = "a.safetensors" if change == "as long" else "config.json"
    with pytest.raises(fastload.CheckpointExists, match=rf"changed since: \['{name}'\]"):
        stage(source, copy)
    assert {file.name: file.read_bytes() for file in copy.iterdir() if file.exists()} == before
    assert os.listdir(disk) == ["copy"]
    stage(source, copy, overwrite=True)
    if rank == 1:
        assert (copy / "notes.txt").read_text() == "lr 3e-4"
        assert (copy / "optimizer.pt").read_bytes() == b"moments"
        for added in ("notes.txt", "optimizer.pt"):
            (copy / added).unlink()
    assert_copy(copy, source)


@ranks(2)
def test_healing_a_copy_keeps_what_its_user_added(
    rank: int, world: int, tmp_path: Path, disks: Path, source: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    stage(source, disk / "copy")
    (disk / "copy" / "notes.txt").write_text("lr 3e-4")
    rot(disk / "copy" / "b.safetensors", -5)
    report = stage(source, disk / "copy")
    assert report.bytes_read == size_of(source)
    assert (disk / "copy" / "notes.txt").read_text() == "lr 3e-4"
    (disk / "copy" / "notes.txt").unlink()
    assert_copy(disk / "copy", source)


@ranks(2)
def test_another_checkpoint_is_not_replaced_unless_asked_for(
    rank: int, world: int, tmp_path: Path, disks: Path, source: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    stage(source, disk / "copy")
    other = source.parent / "step-8"
    if rank == 0:
        rows = [(f"t{number}", "F32", (2000 + number, 3)) for number in range(6)]
        for file, part in {"a": rows[:3], "b": rows[3:]}.items():
            write_file(other / f"{file}.safetensors", part, seed=8)
        while not (other / "b.safetensors").exists():
            pass
    with pytest.raises(fastload.CheckpointNotFound):
        stage(source.parent / "nothing", disk / "copy")  # the ranks have met, and rank 0 has written
    with pytest.raises(
        (fastload.CheckpointExists, fastload.PeerError),
        match=r"exists: pass options=fastload.StageOptions\(overwrite=True\)",
    ):
        stage(other, disk / "copy")
    assert_copy(disk / "copy", source)
    report = stage(other, disk / "copy", overwrite=True)
    assert_copy(disk / "copy", other)
    assert report.bytes_read == size_of(other)
    (disk / "mine").mkdir()
    (disk / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(
        (fastload.OptionError, fastload.PeerError), match="replaces only checkpoints of fastload"
    ):
        stage(source, disk / "mine", overwrite=True)
    assert os.listdir(disk / "mine") == ["thesis.tex"]


@ranks(3)
def test_hosts_that_do_not_see_the_source_only_receive(
    rank: int, world: int, tmp_path: Path, disks: Path, source: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    if rank == 1:
        (disk / "own").mkdir()
        for file in source.iterdir():
            if file.is_file():
                (disk / "own" / file.name).write_bytes(file.read_bytes())
    report = stage(disk / "own", disk / "below" / "copy")
    assert_copy(disk / "below" / "copy", source)
    assert [own.bytes_read for own in report.ranks] == [0, size_of(source), 0]
    assert [bool(own.note) for own in report.ranks] == [True, False, True]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlakyServer]:
    """HTTP, which lists nothing: what is there is what the index names."""
    folder = tmp_path_factory.mktemp("www")
    rows = [(f"t{number}", "F32", (2000 + number, 3)) for number in range(6)]
    write_sharded(folder / "step-7", {"a.safetensors": rows[:3], "b.safetensors": rows[3:]}, index=True)
    with serve(folder) as server:
        yield server


@pytest.fixture
def url(server: FlakyServer) -> str:
    return f"{server.url}/step-7"


@pytest.fixture
def served(server: FlakyServer) -> Path:
    return server.folder / "step-7"


@ranks(3)
def test_from_a_server(rank: int, world: int, tmp_path: Path, disks: Path, url: str, served: Path) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    for wanted in (size_of(served), 0):
        report = fastload.stage(
            url, disk / "copy", options=fastload.StageOptions(timeout_s=20, chunk_bytes=4096)
        )
        assert_copy(disk / "copy", served)
        assert report.bytes_read == wanted


@ranks(2, same=True)
def test_a_staged_copy_can_be_staged(rank: int, world: int, tmp_path: Path, disks: Path, saved: Path) -> str:
    disk = mount_disk(tmp_path, disks, rank)
    stage(saved, disk / "one" / "copy")
    stage(disk / "one" / "copy", disk / "two" / "copy")
    assert_copy(disk / "two" / "copy", saved)
    return state_digest(fastload.load(disk / "two" / "copy", names="*"))


@ranks(3)
def test_one_file(rank: int, world: int, tmp_path: Path, disks: Path, url: str, served: Path) -> None:
    disk = mount_disk(tmp_path, disks, rank)
    if rank == 0:
        torch.save({"model": {"w": torch.arange(9_000)}, "step": 3}, served / "last.pt")
        torch.save({"w": torch.zeros(5)}, tmp_path / "other.pt")
    dist.barrier()
    options = fastload.StageOptions(timeout_s=20, chunk_bytes=4096)
    for src, wanted in ((f"{url}/last.pt", 1), (f"{url}/last.pt", 0), (served / "a.safetensors", 1)):
        copy = disk / Path(src).suffix
        report = fastload.stage(src, copy, options=options)
        assert (report.num_files, report.bytes_read > 0) == (1, bool(wanted))
        assert sorted(path.name for path in copy.iterdir()) == [RECEIPT, Path(report.path).name]
        assert Path(report.path).parent == copy
    shutil.rmtree(disk / ".pt") if rank == 2 else None
    found = fastload.load(fastload.stage(f"{url}/last.pt", disk / ".pt", options=options).path)
    assert found["step"] == 3
    assert found["model"]["w"].equal(torch.arange(9_000))
    with pytest.raises(fastload.CheckpointExists):
        fastload.stage(tmp_path / "other.pt", disk / ".pt", options=options)
    stage(tmp_path / "other.pt", disk / ".pt", overwrite=True)
    assert sorted(path.name for path in (disk / ".pt").iterdir()) == [RECEIPT, "other.pt"]


@ranks(1)
def test_what_cannot_be_staged(rank: int, world: int, tmp_path: Path, source: Path) -> None:
    with pytest.raises(fastload.OptionError, match=r"cannot stage to s3://bucket/copy"):
        stage(source, "s3://bucket/copy")  # type: ignore[arg-type]
    with pytest.raises(fastload.CheckpointNotFound):
        stage(tmp_path / "nothing", tmp_path / "copy")
    with pytest.raises(fastload.OptionError, match="overwrite=1"):
        stage(source, tmp_path / "copy", overwrite=1)
    assert list(tmp_path.iterdir()) == []
