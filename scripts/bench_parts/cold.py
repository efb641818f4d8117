"""Cold local files: the limit of the disk, emptying the page cache, and the bytes read."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem

import fastload
from bench_parts import baselines, lab_arms
from fastload import LoadOptions
from fastload.base.memory import allocate_staging

REFERENCE = "reference: direct reads"
_BLOCK_BYTES = 4 << 20
_SECTOR_BYTES = 512


def prepare(folder: Path) -> None:
    """Adds a DCP checkpoint with the tensors of the safetensors files in a folder, and flushes both."""
    state = baselines.every_rank_maps(LocalFileSystem(), f"{folder}/safetensors")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/dcp"), no_dist=True)
    os.sync()


def arms(folder: Path) -> dict[str, Callable[[], baselines.State]]:
    """Returns the arms without fastload or into tensors that exist, and the limit of the disk."""
    safetensors, files = folder / "safetensors", LocalFileSystem()
    places = lab_arms.Places(http="", s3="", folder=folder)
    named: dict[str, Callable[[], baselines.State]] = {
        f"{REFERENCE}, {threads} a rank": DirectReads(safetensors, threads) for threads in (1, 2, 4, 8)
    }
    named |= {
        "no load: every rank touches its memory once": partial(touch_memory, safetensors),
        "load_file, then clone of each tensor": partial(
            baselines.every_rank_maps_and_clones, files, str(safetensors)
        ),
        "read whole files, safetensors.load": partial(baselines.every_rank_reads, files, str(safetensors)),
        "rank 0 reads, broadcast per tensor": partial(
            baselines.first_rank_broadcasts, files, str(safetensors)
        ),
        "torch DCP": partial(lab_arms.torch_dcp, places),
    }
    mapped = baselines.every_rank_maps(files, str(safetensors))
    into = {name: torch.zeros_like(tensor) for name, tensor in mapped.items()}  # touched, as on a restart
    for strategy in ("auto", "allgather"):
        options = LoadOptions(strategy=strategy)
        into_tensors = partial(fastload.load, str(safetensors), into=into, options=options)
        named[f"fastload {strategy}, into tensors that exist"] = into_tensors
    libraries = {
        "fastsafetensors": {
            "fastsafetensors ParallelLoader": lab_arms.fastsafetensors_parallel,
            "fastsafetensors FileLoader": lab_arms.fastsafetensors_files,
        },
        "runai_model_streamer": {"runai streamer": lab_arms.runai_files},
    }
    for library, loads in libraries.items():
        if importlib.util.find_spec(library) is not None:
            named |= {name: partial(load, places) for name, load in loads.items()}
    return named


def touch_memory(folder: Path) -> baselines.State:
    """Writes one byte per page of fresh memory of the state's size, which the system has to clear."""
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    allocate_staging(nbytes, pinned=False)[:: mmap.PAGESIZE] = 1
    return {}


class DirectReads:
    """Reads every byte once with O_DIRECT, a part on each rank, into memory that was touched before."""

    def __init__(self, folder: Path, threads: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        blocks = [
            (path, start)
            for path in sorted(folder.glob("*.safetensors"))
            for start in range(0, path.stat().st_size, _BLOCK_BYTES)
        ]
        mine = blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]
        self._parts = [mine[place::threads] for place in range(threads)]
        self._buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(threads)]
        for buffer in self._buffers:
            buffer.write(bytes(_BLOCK_BYTES))

    def __call__(self) -> baselines.State:
        with ThreadPoolExecutor(len(self._parts)) as pool:
            list(pool.map(self._read, self._parts, self._buffers))
        return {}

    def _read(self, blocks: list[tuple[Path, int]], buffer: mmap.mmap) -> None:
        descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in blocks}
        for path, start in blocks:
            os.preadv(descriptors[path], [buffer], start)
        for descriptor in descriptors.values():
            os.close(descriptor)


def make_cold(nbytes: int) -> None:
    """Empties the page cache (root only), and returns freed memory to the system.

    On a virtual machine, free memory may have returned to the host, and is many times slower to get back. So
    all ranks allocate as much as they will need, and free it at once.
    """
    ctypes.CDLL(None).malloc_trim(0)
    memory = allocate_staging(nbytes, pinned=False).zero_()
    dist.barrier()
    del memory
    if dist.get_rank() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    dist.barrier()


def disk_bytes(folder: str) -> int:
    """Returns the bytes read so far from the block device of a folder by all processes; 0 without one."""
    device = os.stat(folder).st_dev
    found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return int(found.read_text().split()[2]) * _SECTOR_BYTES if found.exists() else 0
