"""Direct and buffered reads of local files: the same bytes, and the report says which it was."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

import fastload
from fastload.storage.local import LocalStorage
from tests.checkpoints import assert_same_bits, load_reference, write_file
from tests.dist.harness import ranks
from tests.storage.disks import small_disk_in

_NUM_BYTES = 24 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_file(path, [("a", "U8", (_NUM_BYTES - 1001,)), ("b", "U8", (1001,))])
    forget(path)
    return path


def forget(path: Path) -> None:
    """Takes a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def takes_direct_reads(path: Path) -> bool:
    storage = LocalStorage(str(path), "direct")
    storage.read_into("", 0, [memoryview(bytearray(1 << 20))])
    direct = storage.direct_bytes_read
    storage.close()
    return direct > 0


@pytest.mark.slow(but=["1-ranks"])
@ranks(1, 3)
def test_same_bytes_either_way(rank: int, world: int, path: Path) -> None:
    takes_direct, expected = takes_direct_reads(path), load_reference(path)
    for io, strategy in itertools.product(("auto", "buffered", "direct"), ("allgather", "direct")):
        dist.barrier()
        forget(path)
        options = fastload.LoadOptions(strategy=strategy, io=io, chunk_bytes=3_000_001, timeout_s=30)
        with fastload.open(path, options=options) as checkpoint:
            tensors = checkpoint.load()
        assert checkpoint.report is not None
        direct = sum(own.direct_bytes_read for own in checkpoint.report.ranks)
        shares_cache = strategy == "direct" and world > 1
        if io == "buffered" or (io == "auto" and shares_cache) or not takes_direct:
            assert direct == 0
        elif io == "direct":
            assert 0.99 * checkpoint.report.bytes_read < direct <= checkpoint.report.bytes_read
        assert_same_bits(tensors, expected)


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


@pytest.mark.slow(but=["8192-4095", "8192-4096", "5000003-70001", "12289-1", "12289-0"])
@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 70_001])
@pytest.mark.parametrize("nbytes", [8192, 12_289, 5_000_003])
def test_direct_reads_go_straight_into_buffers_that_lie_as_the_file_does(
    path: Path, offset: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the pages at the ends; buffers that lie elsewhere get the same bytes."""
    if not takes_direct_reads(path):
        pytest.skip("the file system takes no direct reads")
    content = path.read_bytes()[offset : offset + nbytes]
    pages = memoryview(mmap.mmap(-1, nbytes + 4 * mmap.PAGESIZE))
    first = ctypes.addressof(ctypes.c_byte.from_buffer(pages))
    end = first + len(pages)
    straight: list[int] = []
    read = os.preadv

    def note(opened: int, buffers: Sequence[memoryview], at: int, flags: int = 0) -> int:
        for buffer in buffers:
            if first <= ctypes.addressof(ctypes.c_byte.from_buffer(buffer)) < end:
                straight.append(len(buffer))
        return read(opened, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", note)
    storage = LocalStorage(str(path), "direct")
    for shift in (offset % mmap.PAGESIZE, offset % mmap.PAGESIZE + 1):
        pages[:] = bytes(len(pages))
        straight.clear()
        storage.read_into("", offset, [pages[shift : shift + nbytes]])
        assert pages == bytes(shift) + content + bytes(len(pages) - shift - nbytes)
        if shift == offset % mmap.PAGESIZE:
            assert sum(straight) > nbytes - 2 * mmap.PAGESIZE
    storage.close()


@pytest.fixture
def cold_file(tmp_path: Path) -> Iterator[Path]:
    """A file on a disk that nobody else reads, of which nothing is in memory."""
    with small_disk_in(tmp_path, 64) as folder:
        path = folder / "model.safetensors"
        write_file(path, [(f"t{number}", "U8", ((3 << 20) + 1001,)) for number in range(8)])
        forget(path)
        yield path


@pytest.mark.slow(but=["broadcast"])
@ranks(4)
@pytest.mark.parametrize("strategy", ["allgather", "broadcast"])
def test_a_cold_disk_reads_every_byte_once(rank: int, world: int, cold_file: Path, strategy: str) -> None:
    before = disk_bytes(cold_file)
    dist.barrier()
    options = fastload.LoadOptions(strategy=strategy, timeout_s=30)
    with fastload.open(cold_file, options=options) as checkpoint:
        tensors = checkpoint.load()
    dist.barrier()
    read = disk_bytes(cold_file) - before
    dist.barrier()  # before anybody reads it again, to compare
    assert checkpoint.report is not None
    assert 1.0 <= read / checkpoint.report.bytes_wanted < 1.02
    assert_same_bits(tensors, load_reference(cold_file))


def disk_bytes(path: Path) -> int:
    """Bytes read so far from the block device of a file."""
    device = path.stat().st_dev
    sectors = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()[2]
    return int(sectors) * 512
