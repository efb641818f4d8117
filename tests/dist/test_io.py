"""Direct and buffered reads of local files: the same bytes, and the report says which it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fastload
from fastload.storage.local import LocalStorage
from tests.checkpoints import assert_same_bits, load_reference, write_file
from tests.dist.harness import ranks

_NUM_BYTES = 24 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_file(path, [("a", "U8", (_NUM_BYTES - 1001,)), ("b", "U8", (1001,))])
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # cold
    os.close(descriptor)
    return path


def takes_direct_reads(path: Path) -> bool:
    storage = LocalStorage(str(path), "direct")
    storage.read_into("", 0, [memoryview(bytearray(1 << 20))])
    direct = storage.direct_bytes_read
    storage.close()
    return direct > 0


@ranks(1, 3)
@pytest.mark.parametrize("io", ["auto", "buffered", "direct"])
@pytest.mark.parametrize("strategy", ["allgather", "direct"])
def test_same_bytes_either_way(rank: int, world: int, path: Path, io: str, strategy: str) -> None:
    options = fastload.LoadOptions(strategy=strategy, io=io, chunk_bytes=3_000_001, timeout_s=30)
    with fastload.open(path, options=options) as checkpoint:
        tensors = checkpoint.load()
    assert checkpoint.report is not None
    direct = sum(own.direct_bytes_read for own in checkpoint.report.ranks)
    shares_cache = strategy == "direct" and world > 1
    if io == "buffered" or (io == "auto" and shares_cache) or not takes_direct_reads(path):
        assert direct == 0
    elif io == "direct":
        # Head and tail of a chunk, which fill no page, stay buffered.
        assert 0.99 * checkpoint.report.bytes_read < direct < checkpoint.report.bytes_read
    assert_same_bits(tensors, load_reference(path))


@ranks(1)
def test_cold_reads_are_direct_where_the_file_system_takes_them(rank: int, world: int, path: Path) -> None:
    with fastload.open(path, options=fastload.LoadOptions(io="auto", timeout_s=30)) as checkpoint:
        checkpoint.load()
        assert checkpoint.report is not None
        cold = checkpoint.report.ranks[0].direct_bytes_read
        path.read_bytes()
        checkpoint.load()
        warm = checkpoint.report.ranks[0].direct_bytes_read
    assert warm == 0
    assert cold > 0 or not takes_direct_reads(path)
