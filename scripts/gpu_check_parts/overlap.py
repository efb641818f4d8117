"""The caller's stream has work all the time: what that costs a load, and what a load costs that work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fastload
from gpu_check_parts.devices import Device
from gpu_check_parts.loads import make_state
from gpu_check_parts.stages import Job

_AHEAD = 8  # pieces of work that are queued at once


class Work:
    """Products of matrices on the current stream, back to back.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        size = 8192 if device.kind == "cuda" else 256
        self._matrix = torch.randn(size, size).to(
            device.device, torch.bfloat16 if device.kind == "cuda" else None
        )

    def piece(self) -> object:
        """Queues one piece; returns what waits for its end."""
        self._matrix @ self._matrix
        if not self._device.has_streams:
            return None
        ended = torch.Event(self._device.device)
        ended.record()
        return ended

    def run_until(self, over: Callable[[], bool]) -> int:
        """Keeps the stream busy until something is over; returns how many pieces were done."""
        queued: list[object] = []
        num_done = 0
        while not over():
            queued.append(self.piece())
            if len(queued) > _AHEAD:
                ended = queued.pop(0)
                if ended is not None:
                    ended.synchronize()  # type: ignore[attr-defined]
                num_done += 1
        self._device.synchronize()
        return num_done + len(queued)


def run(job: Job) -> None:
    device = Device(job.kind)
    state = make_state(device, job.sizes.load_bytes // 4)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    path = job.folder / "checkpoint"
    fastload.save(state, path)
    del state
    work = Work(device)
    load_s(path, device)
    work.run_until(_after(0.2))
    title = f"{nbytes / 1e9:.2f} GB"
    for _ in range(job.sizes.turns):
        if job.left_s < 2:
            return
        alone_s = load_s(path, device)
        job.results.value(title, "load alone", s=alone_s, **{"GB/s": nbytes / alone_s / 1e9})
        began = time.perf_counter()
        pieces = work.run_until(_after(alone_s))
        job.results.value(title, "work alone", **{"pieces a s": pieces / (time.perf_counter() - began)})
        loaded_s, pieces, seconds = _both(work, path, device)
        job.results.value(
            title, "load while another thread keeps its stream busy", s=loaded_s,
            **{"GB/s": nbytes / loaded_s / 1e9, "pieces a s": pieces / seconds},
        )  # fmt: skip
        seconds = _in_loop(work, path, device)
        job.results.value(
            title, "loop over tensors(), each with a piece of work", s=seconds,
            **{"GB/s": nbytes / seconds / 1e9},
        )  # fmt: skip


def load_s(path: Path, device: Device) -> float:
    """Loads; returns the seconds until the device has everything."""
    device.synchronize()
    began = time.perf_counter()
    fastload.load(path, device=device.device)
    device.synchronize()
    return time.perf_counter() - began


def _after(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() > until


def _both(work: Work, path: Path, device: Device) -> tuple[float, int, float]:
    over, counts = threading.Event(), []
    stream = device.new_stream()

    def keep_busy() -> None:
        device.enter()
        began = time.perf_counter()
        with device.on(stream):
            pieces = work.run_until(over.is_set)
        counts.append((pieces, time.perf_counter() - began))

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        began = time.perf_counter()
        found = fastload.load(path, device=device.device)
        if device.has_streams:
            torch.accelerator.current_stream(device.device).synchronize()
        seconds = time.perf_counter() - began
        del found
    finally:
        over.set()
        thread.join()
    return (seconds, *counts[0])


def _in_loop(work: Work, path: Path, device: Device) -> float:
    device.synchronize()
    began = time.perf_counter()
    with fastload.open(path) as opened:
        for _, tensor in opened.tensors(device=device.device):
            work.piece()
            del tensor
    device.synchronize()
    return time.perf_counter() - began
