"""Rates of everything that a load consists of, each alone: what a load can reach at best."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from gpu_check_parts.devices import Device
from gpu_check_parts.stages import Job

_READ_BYTES = 8 << 20
_THREADS = (1, 4, 8)


def run(job: Job) -> None:
    device, nbytes = Device(job.kind), job.sizes.copy_bytes
    title = f"{nbytes / 1e9:.2f} GB at once"

    def measure(name: str, call: Callable[[], object], moved: int = nbytes) -> None:
        call()
        for _ in range(job.sizes.turns):
            if job.left_s < 1:
                return
            device.synchronize()
            began = time.perf_counter()
            call()
            device.synchronize()
            job.results.value(title, name, **{"GB/s": moved / (time.perf_counter() - began) / 1e9})

    pageable, other = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    measure("host to host, one thread", lambda: other.copy_(pageable))
    measure("xxh3, one thread", lambda: xxhash.xxh3_64_digest(memoryview(pageable.numpy())))
    pinned = _pinned(job, nbytes, device)
    if pinned is not None:
        _measure_link(measure, device, pageable, pinned)
    into = pinned[0] if pinned is not None else other
    path = job.folder / "bytes"
    path.write_bytes(memoryview(pageable.numpy()))
    for threads in _THREADS:
        with ThreadPoolExecutor(threads) as pool:
            measure(f"file to host, {threads} threads", lambda: _read(path, into, pool))


def _pinned(job: Job, nbytes: int, device: Device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns pinned memory, and notes how fast it is pinned."""
    if not device.has_streams:
        job.results.skip("pinned and device memory", "the CPU has none")
        return None
    made = []
    for _ in range(2):
        began = time.perf_counter()
        made.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        job.results.value("Memory", "pinned", **{"GB/s": nbytes / (time.perf_counter() - began) / 1e9})
    return made[0], made[1]


def _measure_link(
    measure: Callable[..., None],
    device: Device,
    pageable: torch.Tensor,
    pinned: tuple[torch.Tensor, torch.Tensor],
) -> None:
    one, other = (torch.empty_like(pageable, device=device.device) for _ in range(2))
    streams = [device.new_stream() for _ in range(2)]

    def both_ways() -> None:
        for stream, into, source in zip(streams, (one, pinned[1]), (pinned[0], other), strict=True):
            torch.accelerator.set_stream(stream)
            into.copy_(source, non_blocking=True)
        torch.accelerator.set_stream(before)

    before = torch.accelerator.current_stream(device.device)
    measure("pinned to device", lambda: one.copy_(pinned[0], non_blocking=True))
    measure("device to pinned", lambda: pinned[0].copy_(one, non_blocking=True))
    measure("both ways at once", both_ways, 2 * pageable.numel())
    measure("pageable to device", lambda: one.copy_(pageable))
    measure("device to pageable", lambda: pageable.copy_(one))
    measure("device to device", lambda: other.copy_(one))


def _read(path: Path, into: torch.Tensor, pool: ThreadPoolExecutor) -> None:
    view, file = memoryview(into.numpy()), os.open(path, os.O_RDONLY)

    def read(offset: int) -> None:
        os.preadv(file, [view[offset : offset + _READ_BYTES]], offset)

    try:
        list(pool.map(read, range(0, len(view), _READ_BYTES)))
    finally:
        os.close(file)
