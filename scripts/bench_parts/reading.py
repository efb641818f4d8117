"""One rank reads cached files and verifies them: fastload's stages next to the calls that they consist of."""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from rich.table import Table
from torch import Tensor

import fastload
from bench_parts.tables import print_table
from fastload import LoadOptions
from fastload.base.memory import allocate_staging, host_view
from fastload.geometry.blocks import good_block_bytes
from fastload.loading.prepare import Opened
from fastload.options import IoMode
from fastload.transfer import transport
from fastload.transfer.pipeline import Pipeline
from fastload.transfer.plan import plan_transfer

_CHUNK_BYTES = 16 << 20
_STAGING_BYTES = 256 << 20  # no cache holds as much
_TENSOR_BYTES = 32 << 20


class File(NamedTuple):
    """A file of the checkpoint, open.

    Attributes:
        number: Its descriptor.
        nbytes: Its length.
    """

    number: int
    nbytes: int


Work = Callable[[int, int, memoryview], object]  # with the number of a chunk, its offset, and a buffer


def save(folder: Path, nbytes: int) -> None:
    """Saves tensors of random bytes in one file."""
    count = max(1, nbytes // _TENSOR_BYTES)
    torch.manual_seed(0)
    state = {f"layers.{number}.weight": _noise(_TENSOR_BYTES) for number in range(count)}
    fastload.save(state, folder, options=fastload.SaveOptions(max_shard_bytes=1 << 50))


def _noise(nbytes: int) -> Tensor:
    return torch.randint(-(2**15), 2**15, (nbytes // 2,), dtype=torch.int16).view(torch.bfloat16)


def measure(folder: Path, repeats: int, num_threads: Sequence[int], only: str) -> list[dict[str, Any]]:
    """Runs all arms in turn, so that other load of the machine affects them equally."""
    [path] = folder.glob("*.safetensors")
    file = File(os.open(path, os.O_RDONLY), path.stat().st_size)
    manifest = fastload.inspect(folder)
    state = {
        entry.name: torch.zeros(entry.shape, dtype=torch.bfloat16).fill_(1) for entry in manifest.tensors
    }
    rows = [
        {"arm": name, "threads": threads, "run": run, "seconds": [], "cpu_s": []}
        for name, arm in _arms(folder, file, state, manifest.nbytes).items()
        for threads in num_threads
        for run in [arm(threads)]
        if any(part in name for part in only.split(","))
    ]
    for row in rows:
        row["run"]()
    for _ in range(repeats):
        for row in rows:
            cpu, began = time.process_time(), time.perf_counter()
            row["run"]()
            row["seconds"].append(time.perf_counter() - began)
            row["cpu_s"].append(time.process_time() - cpu)
    return [{**row, "run": None, "nbytes": manifest.nbytes} for row in rows]


def _arms(
    folder: Path, file: File, state: dict[str, Tensor], nbytes: int
) -> dict[str, Callable[[int], Callable[[], object]]]:
    block = good_block_bytes(nbytes)
    hashed = {
        "memcpy": _Copy(nbytes).chunk,
        "pread": partial(_read, file),
        "xxh3": _Copy(nbytes).hashed(block),
        "pread + xxh3": partial(_read_and_hash, file, block),
    }
    return {
        **{name: partial(_in_threads, work, nbytes) for name, work in hashed.items()},
        "fastload, into buffers": lambda threads: partial(_into_buffers, folder, threads, "buffered"),
        "fastload, into buffers, direct": lambda threads: partial(_into_buffers, folder, threads, "direct"),
        "fastload, into tensors": lambda threads: partial(_into_tensors, folder, state, threads),
    }


class _Copy:
    """Host memory as large as the checkpoint, to copy from and to hash."""

    _memory: Tensor | None = None

    def __init__(self, nbytes: int) -> None:
        if _Copy._memory is None:
            _Copy._memory = allocate_staging(nbytes, pinned=False).fill_(1)
        self._data = host_view(_Copy._memory)
        self._address = _Copy._memory.data_ptr()

    def chunk(self, number: int, offset: int, buffer: memoryview) -> None:
        target = ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
        ctypes.memmove(target, self._address + offset, len(buffer))

    def hashed(self, block: int) -> Work:
        return lambda number, offset, buffer: _hash(self._data[offset : offset + len(buffer)], block)


def _read(file: File, number: int, offset: int, buffer: memoryview) -> None:
    os.preadv(file.number, [buffer], offset)


def _read_and_hash(file: File, block: int, number: int, offset: int, buffer: memoryview) -> None:
    os.preadv(file.number, [buffer], offset)
    _hash(buffer, block)


def _hash(data: memoryview, block: int) -> None:
    for at in range(0, len(data), block):
        xxhash.xxh3_64_digest(data[at : at + block])


def _in_threads(work: Work, nbytes: int, threads: int) -> Callable[[], None]:
    """Returns a call that does some work for each chunk, in touched buffers that are used in turn."""
    buffers = list(map(host_view, _kept(_STAGING_BYTES // _CHUNK_BYTES, _CHUNK_BYTES)))

    def share(thread: int) -> None:
        for number in range(thread, -(-nbytes // _CHUNK_BYTES), threads):
            offset = number * _CHUNK_BYTES
            buffer = buffers[number % len(buffers)]
            work(number, offset, buffer[: min(_CHUNK_BYTES, nbytes - offset)])

    def run() -> None:
        begun = [threading.Thread(target=share, args=(thread,)) for thread in range(threads)]
        for thread in begun:
            thread.start()
        for thread in begun:
            thread.join()

    return run


def _into_tensors(folder: Path, state: dict[str, Tensor], threads: int) -> None:
    fastload.load(folder, into=state, options=LoadOptions(read_threads=threads))


class _Nowhere:
    """Takes bytes as tensors on a device do, and copies none."""

    def targets(self, start: int, nbytes: int, at_most: int) -> None:
        return None

    def place(self, start: int, data: Tensor) -> None: ...

    def follow(self) -> Callable[[], bool]:
        return lambda: True


@cache
def _kept(count: int, nbytes: int) -> list[Tensor]:
    return [allocate_staging(nbytes, pinned=False).fill_(1) for _ in range(count)]


def _into_buffers(folder: Path, threads: int, io: IoMode) -> None:
    """Reads and verifies in the buffers from which a load copies to a device.

    They are kept, as torch keeps memory that is page-locked.
    """
    options = LoadOptions(read_threads=threads, io=io, staging_bytes=_STAGING_BYTES)
    with fastload.open(folder, options=options) as opened:
        session: Opened = opened._session.opened
        plan = plan_transfer(
            session.access.stored.tensors,
            (0,),
            (0,),
            staging_bytes=options.staging_bytes,
            chunk_bytes=None,
            block_bytes=session.block_bytes,
            to_device=True,
        )
        reader = session.open_reader(plan, in_parts=False)
        transport.allocate_buffers = lambda count, nbytes, pinned: list(_kept(count, nbytes))
        pipeline = Pipeline(session.world, plan, reader, _Nowhere(), progress=None)
        pipeline.run()
        assert pipeline.placed_bytes == plan.total_bytes
        pipeline.close()
        reader.close(wait_s=1.0)


def print_rows(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Prints medians of rates, and the processor time of fastload beyond that of its reads and hashes."""
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    for name in ("threads", "GB/s", "least", "most", "CPU ms per GB", "µs per chunk beyond pread + xxh3"):
        table.add_column(name, justify="right")
    bare = {row["threads"]: row for row in rows if row["arm"] == "pread + xxh3"}
    for row in rows:
        nbytes = row["nbytes"]
        rates = [nbytes / seconds / 1e9 for seconds in row["seconds"]]
        cpu_s = statistics.median(row["cpu_s"])
        beyond = ""
        if row["arm"].startswith("fastload") and row["threads"] in bare:
            more_s = cpu_s - statistics.median(bare[row["threads"]]["cpu_s"])
            beyond = f"{more_s / (nbytes / _CHUNK_BYTES) * 1e6:.0f}"
        table.add_row(
            row["arm"],
            str(row["threads"]),
            f"{statistics.median(rates):.2f}",
            f"{min(rates):.2f}",
            f"{max(rates):.2f}",
            f"{cpu_s / nbytes * 1e12:.0f}",
            beyond,
        )
    print_table(table)
