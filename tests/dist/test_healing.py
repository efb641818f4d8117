"""A rank whose storage breaks for good while data moves: the others read its chunks.

Every rank has a copy on a disk of its own; the copies of some ranks are truncated once they are open.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import PeerError, StorageError
from fastload.storage.local import LocalStorage
from tests.checkpoints import assert_same_bits, load_reference, write_file
from tests.dist.harness import ranks
from tests.dist.test_readers import copy, own_disk, write_original
from tests.dist.test_readers import pytestmark as needs_mounts

pytestmark = needs_mounts

_NUM_BYTES = sum((200 + number) * 3 * 4 for number in range(5))
OPTIONS = fastload.LoadOptions(strategy="allgather", chunk_bytes=100, timeout_s=20)


@pytest.fixture
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_original(tmp_path_factory.mktemp("original"))


def open_copy(original: Path, disk: Path, rank: int) -> fastload.Checkpoint:
    copy(original, own_disk(disk, rank))
    return fastload.open(disk, options=OPTIONS)


@pytest.mark.slow(but=["3-ranks"])
@ranks(2, 3, 5, ranks_per_host=2)
def test_others_take_over(rank: int, world: int, tmp_path: Path, original: Path) -> None:
    own_disk(tmp_path, rank)
    for number, (keep, cast) in enumerate(itertools.product([0.0, 0.4, 0.99], [None, torch.bfloat16])):
        disk = tmp_path / str(number)
        disk.mkdir()
        copy(original, disk)
        with fastload.open(disk, options=OPTIONS) as checkpoint:
            if rank == 1:
                truncate(disk, keep)
            tensors = checkpoint.load(dtype=cast)
            expected = load_reference(original)
            assert_same_bits(tensors, {name: t.to(cast or t.dtype) for name, t in expected.items()})
            report = checkpoint.report
            assert report is not None
            assert "stopped reading" in report.ranks[1].note
            assert "it shrank after it was opened" in report.ranks[1].note
            assert [own.note for own in report.ranks if own.rank != 1] == [""] * (world - 1)
            assert report.bytes_wanted == _NUM_BYTES
            for own in report.ranks:
                others = sum(peer.bytes_read for peer in report.ranks) - own.bytes_read
                assert own.bytes_received <= others

            # Later loads of the same checkpoint do without it from the start.
            again = checkpoint.load(names="t1")
            assert_same_bits(again, {"t1": expected["t1"]})
            assert checkpoint.report is not None
            assert checkpoint.report.ranks[1].bytes_read == 0


@ranks(3)
def test_others_take_over_short_chunks(rank: int, world: int, tmp_path: Path, original: Path) -> None:
    copy(original, own_disk(tmp_path, rank))
    with fastload.open(tmp_path, options=replace(OPTIONS, chunk_bytes=16)) as checkpoint:
        if rank == 1:
            truncate(tmp_path, 0.9)
        assert_same_bits(checkpoint.load(), load_reference(original))


@ranks(4, ranks_per_host=2)
def test_one_after_the_other_drops_out_until_one_is_left(
    rank: int, world: int, tmp_path: Path, original: Path
) -> None:
    with open_copy(original, tmp_path, rank) as checkpoint:
        if rank != 2:
            truncate(tmp_path, 0.3 * rank)
        tensors = checkpoint.load()
        assert_same_bits(tensors, load_reference(original))
        assert checkpoint.report is not None
        assert [bool(own.note) for own in checkpoint.report.ranks] == [True, True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("draws", [[0, 1, 5], [2, 3, 4, *range(6, 10)]], ids=["some", "others"])
@ranks(5, ranks_per_host=2)
def test_readers_break_at_any_moment(
    rank: int, world: int, tmp_path: Path, original: Path, draws: list[int]
) -> None:
    """Several in one round or in others, again once the rest was dealt anew, some slow: one is whole."""
    copy(original, own_disk(tmp_path, rank))
    # Of the wide one, staging has no room for a chunk of each reader: they take turns, and read ahead.
    write_file(tmp_path / "wide" / "model.safetensors", [(f"w{n}", "F32", (9000 + n,)) for n in range(9)])
    honest = LocalStorage.read_into
    for draw in draws:
        everybodys, own = random.Random(draw), random.Random(f"{draw}/{rank}")
        whole, breaks = everybodys.randrange(world), everybodys.choice([0.0, 0.02, 0.1, 0.5])
        path, chunk_bytes = tmp_path, everybodys.choice([16, 100, 1000])
        if draw % 2:
            path, chunk_bytes = tmp_path / "wide", everybodys.choice([14_000, 24_000])
        given = replace(OPTIONS, chunk_bytes=chunk_bytes, staging_bytes=1 << 16, retries=0)
        dtype = everybodys.choice([None, torch.float64])
        expected = {name: tensor.to(dtype or tensor.dtype) for name, tensor in load_reference(path).items()}

        def read(self: LocalStorage, *args: Any, odds: float = breaks * (rank != whole), **how: Any) -> None:
            time.sleep(own.choice([0.0, 0.0, 0.002]))  # noqa: B023
            if own.random() < odds:  # noqa: B023
                raise StorageError("this disk is broken", url=self.url)
            honest(self, *args, **how)

        with fastload.open(path, options=given) as checkpoint, pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStorage, "read_into", read)
            assert_same_bits(checkpoint.load(dtype=dtype), expected)
            assert checkpoint.report is not None
            if path != tmp_path:
                assert checkpoint.report.num_rounds * chunk_bytes > checkpoint.report.bytes_wanted
            if breaks == 0.0:
                shares = [own.bytes_read for own in checkpoint.report.ranks]
                assert max(shares) - min(shares) <= chunk_bytes


@ranks(3)
def test_if_all_are_broken_all_raise_with_every_cause(
    rank: int, world: int, tmp_path: Path, original: Path
) -> None:
    with open_copy(original, tmp_path, rank) as checkpoint:
        truncate(tmp_path, 0.2 * rank)
        with pytest.raises(PeerError) as raised:
            checkpoint.load()
    assert sorted(raised.value.failures) == [0, 1, 2]
    for cause in raised.value.failures.values():
        assert isinstance(cause, StorageError)
        assert cause.url.startswith(str(tmp_path))
        assert cause.offset is not None


def truncate(disk: Path, keep: float) -> None:
    for file in disk.glob("*.safetensors"):
        os.truncate(file, int(keep * file.stat().st_size))
