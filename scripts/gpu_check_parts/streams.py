"""Loads with collectives of the caller in the loop, on streams that may be those of fastload.

CUDA hands streams out in turn, from few. If fastload holds a stream behind a collective that other ranks have
not begun, and the stream is the caller's, too, two waits cross and no rank goes on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import fastload
from gpu_check_parts import mps
from gpu_check_parts.ranks import Rank, problems_of, run_ranks
from gpu_check_parts.results import Results
from gpu_check_parts.stages import Job

_NUM_TENSORS, _COUNT = 4, 1 << 16
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues: with 1 all streams are in one order


class Way(NamedTuple):
    """What the caller does.

    Attributes:
        num_connections: Hardware queues of the device.
        is_async: Whether its collectives are asynchronous ones.
        num_streams: How many streams it has made before.
    """

    num_connections: int
    is_async: bool
    num_streams: int

    def __str__(self) -> str:
        call = "all_reduce(async_op=True)" if self.is_async else "all_reduce"
        made = f", {self.num_streams} more streams" if self.num_streams else ""
        return f"{call}, {_CONNECTIONS}={self.num_connections}{made}"


WAYS = [Way(32, False, 0), Way(1, False, 0), Way(32, True, 40)]


def run(job: Job) -> None:
    path = job.folder / "tensors.safetensors"
    fastload.save(small_state(), path)
    with mps.service(job.use_mps):
        for number, way in enumerate(WAYS):
            limit_s = job.left_s / (len(WAYS) - number)
            ends = run_ranks(
                job.kind, _loop, 2, job.results, path, way, job.sizes.num_loops, limit_s=limit_s,
                environment={_CONNECTIONS: str(way.num_connections)},
            )  # fmt: skip
            problem = problems_of(ends)
            job.results.check(f"{job.sizes.num_loops} loads, {way}", not problem, problem)


def small_state() -> dict[str, torch.Tensor]:
    """Returns a few tensors whose sums tell them apart."""
    return {f"t{number}": torch.full((_COUNT,), number + 1.0) for number in range(_NUM_TENSORS)}


def small_options(timeout_s: float = 60.0) -> fastload.LoadOptions:
    """Returns options by which the ranks exchange them, in several rounds."""
    return fastload.LoadOptions(strategy="allgather", chunk_bytes=2 * _COUNT, timeout_s=timeout_s)


def _loop(rank: Rank, results: Results, path: Path, way: Way, num_loops: int) -> None:
    device = rank.device
    kept = [device.new_stream() for _ in range(way.num_streams)]
    for number in range(num_loops):
        began = time.perf_counter()
        sums = {}
        stream = kept[number % len(kept)] if kept else device.new_stream()
        with fastload.open(path, options=small_options()) as opened, device.on(stream):
            for name, tensor in opened.tensors(device=device.device):
                ones = torch.ones(1, device=device.device)
                work = dist.all_reduce(ones, async_op=way.is_async)
                if work is not None:
                    work.wait()
                sums[name] = tensor.sum() * ones
                del tensor
        for name, found in sums.items():
            expected = (int(name[1:]) + 1) * _COUNT * rank.world
            assert found.item() == expected, f"load {number}: {name} is {found.item()}, not {expected}"
        if rank.rank == 0:
            seconds = time.perf_counter() - began
            results.value("Loads with collectives in the loop", str(way), **{"ms a load": 1000 * seconds})
