"""Verification while loading: every block that is read is checked by the rank that reads it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import ChecksumError
from fastload.ext.remote.obstore import FIRST_BYTES
from fastload.formats.names import NAMES
from fastload.formats.state import state_digest
from fastload.storage.local import LocalStorage
from tests.checkpoints import assert_same_bits, flip, load_reference, record_by_hand, write_sharded
from tests.dist.faults import fastload_threads
from tests.dist.flaky_server import serve
from tests.dist.harness import ranks, run_ranks
from tests.dist.test_healing import truncate
from tests.dist.test_readers import own_disk
from tests.dist.test_readers import pytestmark as needs_mounts

STRATEGIES = ["allgather", "broadcast", "direct"]
BLOCK_BYTES = 512
ROWS = [(f"t{number}", "F32", (200 + number, 3)) for number in range(5)] + [("empty", "F32", (0,))]
NUM_BYTES = sum((200 + number) * 3 * 4 for number in range(5))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "recorded"
    write_sharded(folder, {"a.safetensors": ROWS[:3], "b.safetensors": ROWS[3:]}, index=True)
    record_by_hand(folder, BLOCK_BYTES)
    return folder


def options(**changes: Any) -> fastload.LoadOptions:
    return fastload.LoadOptions(**{"timeout_s": 20, "chunk_bytes": 700, **changes})


def load(path: Any, *, given: fastload.LoadOptions, **arguments: Any) -> tuple[Any, fastload.LoadReport]:
    with fastload.open(path, options=given) as checkpoint:
        tensors = checkpoint.load(**arguments)
    assert checkpoint.report is not None
    return tensors, checkpoint.report


@pytest.mark.slow(but=["3-ranks-allgather", "2-ranks-direct", "1-ranks-broadcast"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2, 3, same=True)
def test_intact(rank: int, world: int, recorded: Path, strategy: str) -> str:
    tensors, report = load(recorded, given=options(strategy=strategy))
    assert_same_bits(tensors, load_reference(recorded))
    copies = world if strategy == "direct" else 1
    assert report.bytes_verified == report.bytes_read == copies * report.bytes_wanted
    assert all(own.bytes_verified == own.bytes_read for own in report.ranks)
    if strategy == "allgather":
        assert all(own.bytes_verified for own in report.ranks)
    unchecked, report = load(recorded, given=options(strategy=strategy, verify=False))
    assert report.bytes_verified == 0
    assert report.chunk_bytes == min(700, -(-NUM_BYTES // world)) or strategy != "allgather"
    assert_same_bits(unchecked, tensors)
    return state_digest(tensors)


@pytest.mark.slow(but=["allgather"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(3, same=True)
def test_a_part_is_verified_without_a_byte_more(rank: int, world: int, recorded: Path, strategy: str) -> str:
    names = ["t1", "t3"]
    tensors, report = load(recorded, given=options(strategy=strategy), names=names)
    reference = load_reference(recorded)
    assert_same_bits(tensors, {name: reference[name] for name in names})
    copies = world if strategy == "direct" else 1
    assert (
        report.bytes_read
        == report.bytes_verified
        == copies * sum(tensor.nbytes for tensor in tensors.values())
    )
    return state_digest(tensors)


@pytest.mark.slow(but=["3-ranks-cast", "1-ranks-as-stored"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as-stored", "cast"])
@ranks(1, 3)
def test_casts_and_strided_targets_are_verified_too(
    rank: int, world: int, recorded: Path, dtype: torch.dtype | None
) -> None:
    into = {f"t{n}": torch.zeros(3, 200 + n, dtype=dtype).t() for n in range(5)}
    into["empty"] = torch.zeros(0, dtype=dtype)
    _, report = load(recorded, given=options(strategy="allgather"), into=into, dtype=dtype)
    assert report.bytes_verified == NUM_BYTES
    torch.distributed.barrier()
    if rank == 0:
        flip(recorded / "b.safetensors", -1)
    torch.distributed.barrier()
    with pytest.raises(ChecksumError, match=r"b.safetensors: block 9 .* of tensor 't4'"):
        load(recorded, given=options(strategy="allgather"), into=into, dtype=dtype)


def spoiled(rank: int, world: int, recorded: Path, strategy: str) -> tuple[str, str, tuple[str, ...]]:
    with pytest.raises(ChecksumError) as raised:
        load(recorded, given=options(strategy=strategy))
    text, lines = str(raised.value), raised.value.blocks
    raised.value.__traceback__ = None
    assert fastload_threads() == []
    # What is not damaged can still be had.
    _, report = load(recorded, given=options(strategy=strategy), names=["t0", "t3"])
    assert report.bytes_verified == report.bytes_read
    return type(raised.value).__name__, text, lines


@pytest.mark.slow(but=["allgather", "direct-1"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_flipped_bit_is_the_same_error_on_all_ranks(recorded: Path, strategy: str, world: int) -> None:
    begin = 8 + int.from_bytes((recorded / "a.safetensors").read_bytes()[:8], "little")
    place = begin + 200 * 12 + 2 * BLOCK_BYTES  # t1, first byte of its third block
    flip(recorded / "a.safetensors", place)
    ends = run_ranks(spoiled, world, recorded=recorded, strategy=strategy)
    assert ends == [ends[0]] * world
    kind, text, lines = ends[0]
    assert kind == "ChecksumError"
    wanted = (
        f"{recorded}/a.safetensors: block 7 [bytes {place}-{place + BLOCK_BYTES}] of tensor 't1': checksum "
    )
    assert lines[0].startswith(wanted)
    assert text == f"damaged: {lines[0]}"


@pytest.mark.slow(but=["1"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_bit_flipped_anywhere_is_found(recorded: Path, world: int) -> None:
    path = recorded / "b.safetensors"
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for at in range(begin, path.stat().st_size, 701):
        flip(path, at)
        run_ranks(notices, world, recorded=recorded)
        flip(path, at)


def notices(rank: int, world: int, recorded: Path) -> None:
    with pytest.raises(ChecksumError, match=r"b\.safetensors: block "):
        load(recorded, given=options(strategy="allgather"))


@pytest.mark.slow(but=["allgather"])
@pytest.mark.parametrize("strategy", ["allgather", "broadcast"])
@ranks(4)
def test_staging_is_kept(rank: int, world: int, tmp_path: Path, strategy: str) -> None:
    folder = tmp_path / "large"
    if rank == 0:
        write_sharded(
            folder, {"m.safetensors": [("w", "U8", (3_000_001,)), ("v", "U8", (5_000,))]}, index=False
        )
        record_by_hand(folder, 50_000)
    torch.distributed.barrier()
    for chunk_bytes in (None, 40_000, 120_000):
        given = options(strategy=strategy, staging_bytes=1 << 20, chunk_bytes=chunk_bytes)
        tensors, report = load(folder, given=given)
        assert_same_bits(tensors, load_reference(folder))
        assert report.bytes_verified == report.bytes_read == report.bytes_wanted
        for own in report.ranks:
            assert 0 < own.peak_staging_bytes <= 1 << 20
        shares = [own.bytes_read for own in report.ranks if own.bytes_read]
        assert max(shares) - min(shares) <= report.chunk_bytes + 50_000
    with pytest.raises(fastload.OptionError, match="checksum blocks have 50000: verify=False reads without"):
        load(folder, given=options(strategy="allgather", staging_bytes=1 << 16))
    load(folder, given=options(strategy="allgather", staging_bytes=1 << 16, chunk_bytes=None, verify=False))


# A flip on the way, that is not on storage.


def flip_on_the_way(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Lets this process see a flipped bit in the first reads of data."""
    real, lock, left = LocalStorage.read_into, threading.Lock(), [times]

    def read_into(self: Any, name: str, offset: int, buffers: list[memoryview], *more: Any) -> None:
        real(self, name, offset, buffers, *more)
        with lock:
            if left[0] and name == "a.safetensors" and offset > 200 and sum(map(len, buffers)) > 200:
                left[0] -= 1
                buffers[-1][-1] ^= 1

    monkeypatch.setattr(LocalStorage, "read_into", read_into)


@pytest.mark.slow(but=["3-ranks-direct", "allgather"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 3)
def test_a_flip_on_the_way_heals(rank: int, world: int, recorded: Path, strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            flip_on_the_way(patch, 1)
        tensors, report = load(recorded, given=options(strategy=strategy, read_threads=1))
    assert_same_bits(tensors, load_reference(recorded))
    assert [own.retries for own in report.ranks] == [1] + [0] * (world - 1)
    copies = world if strategy == "direct" else 1
    assert 0 < report.bytes_read - copies * report.bytes_wanted <= BLOCK_BYTES
    assert report.bytes_verified == copies * report.bytes_wanted


@ranks(2)
def test_a_path_that_flips_again_and_again_is_an_error(rank: int, world: int, recorded: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        flip_on_the_way(patch, 1_000_000)
        with pytest.raises(ChecksumError, match=r"a.safetensors: block"):
            load(recorded, given=options(strategy="allgather"))


def load_served(rank: int, world: int, url: str, folder: Path) -> int:
    tensors, report = load(url, given=options(strategy="allgather", chunk_bytes=64 << 10))
    assert_same_bits(tensors, load_reference(folder))
    assert report.bytes_verified == report.bytes_wanted
    return sum(own.retries for own in report.ranks)


def test_over_http(tmp_path: Path) -> None:
    folder = tmp_path / "served" / "ckpt"
    rows = [(f"t{number}", "F32", (20_000 + number, 3)) for number in range(5)]
    write_sharded(folder, {"a.safetensors": rows[:3], "b.safetensors": rows[3:]}, index=True)
    record_by_hand(folder, 16 << 10)
    with serve(folder.parent) as server:
        server.faults += ["flip", "503"]  # a second flip might hit the same block again
        assert run_ranks(load_served, 3, url=f"{server.url}/ckpt", folder=folder) == [2, 2, 2]
        of_guess = f"bytes=0-{FIRST_BYTES - 1}"
        stats = [path for method, path, wanted in server.log if method == "HEAD" or wanted == of_guess]
        guesses = [f"/ckpt/{name}" for name in NAMES.likely]
        assert sorted(stats) == sorted(guesses)
        gets = [wanted for method, _, wanted in server.log if method == "GET" and wanted != of_guess]
        small = [wanted for wanted in gets if wanted.startswith("bytes=0-")]
        assert len(small) == 2, "headers, with the sizes; the record has come with the guess"


@pytest.mark.skipif(*needs_mounts.args, reason="needs root, for mounts")
@pytest.mark.parametrize("keep", [0.0, 0.4, 0.7])
@ranks(3)
def test_healing_verifies_too(rank: int, world: int, tmp_path: Path, recorded: Path, keep: float) -> None:
    expected, files = load_reference(recorded), {p.name: p.read_bytes() for p in recorded.iterdir()}
    disk = own_disk(tmp_path, rank)
    for name, data in files.items():
        (disk / name).write_bytes(data)
    with fastload.open(disk, options=options(strategy="allgather")) as checkpoint:
        if rank == 1:
            truncate(disk, keep)
        assert_same_bits(checkpoint.load(), expected)
        report = checkpoint.report
    assert report is not None
    assert "stopped reading" in report.ranks[1].note
    assert report.bytes_verified >= report.bytes_wanted


@pytest.mark.skipif(*needs_mounts.args, reason="needs root, for mounts")
@ranks(3, same=True)
def test_one_bad_copy_fails_all_without_healing(rank: int, world: int, tmp_path: Path, recorded: Path) -> str:
    files = {path.name: path.read_bytes() for path in recorded.iterdir()}
    disk = own_disk(tmp_path, rank)
    for name, data in files.items():
        (disk / name).write_bytes(data)
    if rank == 2:
        for at in range(-NUM_BYTES // 3, 0, 400):
            flip(disk / "b.safetensors", at)
    with pytest.raises(ChecksumError, match=r"b.safetensors: block") as raised:
        load(disk, given=options(strategy="allgather"))
    return str(raised.value)


@pytest.mark.skipif(*needs_mounts.args, reason="needs root, for mounts")
@pytest.mark.parametrize("missing", [False, True])
@ranks(3, same=True)
def test_a_host_with_another_step_does_not_read(
    rank: int, world: int, tmp_path: Path, recorded: Path, missing: bool
) -> str:
    expected, files = load_reference(recorded), {path.name: path.read_bytes() for path in recorded.iterdir()}
    disk = own_disk(tmp_path, rank)
    for name, data in files.items():
        (disk / name).write_bytes(data)
    if rank == 1:  # the same names and shapes, other values
        flip(disk / "a.safetensors", -1)
        record_by_hand(disk, BLOCK_BYTES)
        if missing:
            (disk / "fastload.json").unlink()
    os.utime(disk / "a.safetensors", ns=(rank, rank))  # equal copies differ in this too
    tensors, report = load(disk, given=options(strategy="allgather"))
    assert_same_bits(tensors, expected)
    assert [own.reader for own in report.ranks] == [True, False, True]
    assert report.ranks[1].note == "sees another fastload.json than rank 0: not the same checkpoint"
    return state_digest(tensors)
