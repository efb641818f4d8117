"""`fastload.verify`: all of a checkpoint, split among ranks, in little memory; each bad block is told."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import ChecksumError, Interrupted, PeerError, StorageError
from fastload.storage.local import LocalStorage
from tests.checkpoints import flip, record_by_hand, write_sharded
from tests.dist.faults import fastload_threads
from tests.dist.harness import ranks, run_ranks
from tests.dist.test_readers import own_disk
from tests.dist.test_readers import pytestmark as needs_mounts

BLOCK_BYTES = 5_000
ROWS = [
    ("a", "U8", (123_456,)),
    ("b", "BF16", (40_000,)),
    ("c", "F32", (0, 3)),
    ("d", "I64", ()),
    ("e", "U8", (7,)),
]
NUM_BYTES = 123_456 + 80_000 + 8 + 7
NUM_BLOCKS = 25 + 16 + 1 + 1
OPTIONS = fastload.LoadOptions(timeout_s=20)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "recorded"
    write_sharded(folder, {"x.safetensors": ROWS[:1], "y.safetensors": ROWS[1:]}, index=True)
    record_by_hand(folder, BLOCK_BYTES)
    return folder


def options(**changes: Any) -> fastload.LoadOptions:
    return fastload.LoadOptions(**{"timeout_s": 20, **changes})


def begin_of(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.slow(but=["3-ranks", "1-ranks"])
@ranks(1, 2, 3, 7)
def test_intact(rank: int, world: int, recorded: Path) -> None:
    for chunk_bytes in (None, 9_000):
        seen: list[tuple[int, int]] = []
        given = options(
            chunk_bytes=chunk_bytes,
            verify=False,
            staging_bytes=1 << 16,
            progress=lambda *now, seen=seen: seen.append(now),
        )
        report = fastload.verify(recorded, options=given)
        assert (report.url, report.num_files, report.num_blocks) == (str(recorded), 2, NUM_BLOCKS)
        assert report.nbytes == report.bytes_verified == NUM_BYTES
        assert [own.bytes_read for own in report.ranks] == [own.bytes_verified for own in report.ranks]
        assert all(own.peak_staging_bytes <= 1 << 16 for own in report.ranks)
        shares = [own.bytes_read for own in report.ranks]
        assert max(shares) - min(shares) <= 2 * 10_000
        assert seen[-1] == (NUM_BYTES, NUM_BYTES)
        assert report.to_dict()["bytes_verified"] == NUM_BYTES
    assert fastload_threads() == []


def verify_damaged(rank: int, world: int, recorded: Path) -> tuple[str, tuple[str, ...]]:
    with pytest.raises(ChecksumError) as raised:
        fastload.verify(recorded, options=OPTIONS)
    text, blocks = str(raised.value), raised.value.blocks
    raised.value.__traceback__ = None
    assert fastload_threads() == []
    return text, blocks


@pytest.mark.parametrize("world", [1, 3])
def test_every_bad_block_is_listed(recorded: Path, world: int) -> None:
    x, y = recorded / "x.safetensors", recorded / "y.safetensors"
    flip(y, -1)
    flip(x, begin_of(x) + 24 * BLOCK_BYTES)
    flip(x, begin_of(x) + 2 * BLOCK_BYTES - 1)
    flip(y, begin_of(y) + 3 * BLOCK_BYTES + 17)
    ends = run_ranks(verify_damaged, world, recorded=recorded)
    assert ends == [ends[0]] * world
    text, blocks = ends[0]
    title, *lines = text.split("\n")
    assert title == f"{recorded}: 4 of {NUM_BLOCKS} blocks are damaged:"
    assert tuple(lines) == blocks
    begin = begin_of(x)
    wanted = [
        f"{x}: block 1 [bytes {begin + 5_000}-{begin + 10_000}] of tensor 'a': checksum ",
        f"{x}: block 24 [bytes {begin + 120_000}-{begin + 123_456}] of tensor 'a': checksum ",
        f"{y}: block 3 [bytes ",
        f"{y}: block 17 [bytes {y.stat().st_size - 7}-{y.stat().st_size}] of tensor 'e': checksum ",
    ]
    assert [line[: len(start)] for line, start in zip(lines, wanted, strict=True)] == wanted


@pytest.mark.parametrize("world", [1, 3])
def test_a_long_list_is_cut(tmp_path: Path, world: int) -> None:
    folder = tmp_path / "rotten"
    write_sharded(folder, {"x.safetensors": [("a", "U8", (300_000,))]}, index=False)
    record_by_hand(folder, 100)
    path = folder / "x.safetensors"
    begin = begin_of(path)
    path.write_bytes(path.read_bytes()[:begin] + bytes(300_000))
    text, blocks = run_ranks(verify_damaged, world, recorded=folder)[0]
    assert text.startswith(f"{folder}: 3000 of 3000 blocks are damaged:")
    assert text.endswith("\n... and 2980 more")
    numbers = [int(line.split("block ")[1].split()[0]) for line in blocks]
    assert numbers == list(range(20))


def with_a_break(rank: int, world: int, recorded: Path) -> dict[int, str]:
    real, broken = LocalStorage.read_into, threading.Event()

    def read_into(self: Any, name: str, offset: int, buffers: list[memoryview], *more: Any) -> None:
        if rank == 1 and name == "y.safetensors" and offset > 400:
            broken.set()
            raise StorageError("gone", url=name, offset=offset, nbytes=1)
        real(self, name, offset, buffers, *more)

    with (
        pytest.MonkeyPatch.context() as patch,
        fastload.open(recorded, options=options(chunk_bytes=BLOCK_BYTES)) as checkpoint,
    ):
        patch.setattr(LocalStorage, "read_into", read_into)
        with pytest.raises(PeerError) as raised:
            checkpoint.verify()
        assert not isinstance(raised.value, Interrupted)
        with pytest.raises(fastload.WorldError, match="open it again"):
            checkpoint.verify()
    return {failed: type(cause).__name__ for failed, cause in raised.value.failures.items()}


def test_a_rank_that_cannot_read_is_named(recorded: Path) -> None:
    assert run_ranks(with_a_break, 3, recorded=recorded) == [{1: "StorageError"}] * 3


@ranks(2)
def test_verify_and_load_take_turns(rank: int, world: int, recorded: Path) -> None:
    with fastload.open(recorded, options=OPTIONS) as checkpoint:
        assert checkpoint.verify().bytes_verified == NUM_BYTES
        tensors = checkpoint.load(names="d")
        assert checkpoint.report is not None
        assert checkpoint.report.bytes_verified == checkpoint.report.bytes_read
        assert checkpoint.verify().bytes_verified == NUM_BYTES
    assert tensors["d"].shape == ()
    with fastload.open(recorded, options=OPTIONS) as checkpoint, pytest.raises(fastload.PlanMismatch):
        checkpoint.verify() if rank else checkpoint.load()


@pytest.mark.skipif(*needs_mounts.args, reason="needs root, for mounts")
@ranks(2, 3, same=True)
def test_each_host_checks_its_own_copy(rank: int, world: int, tmp_path: Path, recorded: Path) -> str:
    files = {path.name: path.read_bytes() for path in recorded.iterdir()}
    disk = own_disk(tmp_path, rank)
    for name, data in files.items():
        if rank != 2:
            (disk / name).write_bytes(data)
    report = fastload.verify(disk, options=OPTIONS)
    assert [own.bytes_verified for own in report.ranks] == [NUM_BYTES, NUM_BYTES, 0][:world]
    torch.distributed.barrier()
    if rank == 1:
        flip(disk / "x.safetensors", os.stat(disk / "x.safetensors").st_size - 1)
    with pytest.raises(
        ChecksumError, match=r"1 of 43 blocks.*\non host1: .*x.safetensors: block 24 "
    ) as raised:
        fastload.verify(disk, options=OPTIONS)
    return str(raised.value)
