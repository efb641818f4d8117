"""Saves of a training's state in the background, by turns with DCP and torch.save; the steps meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fastload
from gpu_check_parts.devices import Device
from gpu_check_parts.stages import Job

Done = Callable[[], bool]
Wait = Callable[[], object]
Begin = Callable[[Any, Path], tuple[Done, Wait]]
_BYTES_PER_WEIGHT = 12  # float32, and two moments of AdamW
_NUM_ALONE, _MOST_STEPS = 10, 2000
_BATCH = 1024


class Training:
    """Layers that learn with AdamW on a device.

    Args:
        device: The device.
        nbytes: About, of the state with the moments.
        width: Of the layers.
    """

    def __init__(self, device: Device, nbytes: int, width: int) -> None:
        torch.manual_seed(0)
        num_layers = max(1, round(nbytes / _BYTES_PER_WEIGHT / width**2))
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(num_layers)]
        self._device = device
        self._model = torch.nn.Sequential(*layers).to(device.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5)
        self._samples = torch.randn(_BATCH if device.kind == "cuda" else 8, width).to(device.device)

    def state(self) -> dict[str, Any]:
        """Returns what a user saves."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def step(self) -> float:
        """Does a step; returns its seconds, until the device has done it."""
        began = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._samples).square().mean().backward()
        self._optimizer.step()
        self._device.synchronize()
        return time.perf_counter() - began


def run(job: Job) -> None:
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = Device(job.kind)
    device.use_all_cores()
    dist.init_process_group(  # DCP asks for one
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    room = shutil.disk_usage(job.folder).free // 3
    training = Training(device, min(job.sizes.save_bytes, room), job.sizes.width)
    training.step()
    training.step()
    nbytes = sum(tensor.nbytes for tensor in _tensors(training.state()))
    title = f"{nbytes / 1e9:.2f} GB to {job.folder.parent.parent}"
    for turn in range(job.sizes.turns):
        for name, begin in _ARMS.items():
            if turn and job.left_s < 6:
                return
            path = job.folder / f"{name} {turn}".replace(" ", "-")
            try:
                columns = _save(training, device, begin, path)
            except Exception as error:
                if name.startswith("fastload"):
                    raise
                job.results.skip(f"{name}, turn {turn}", f"{type(error).__name__}: {error}")
            else:
                first = " (first, allocates)" if turn == 0 else ""
                job.results.value(title, name + first, **columns)
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            gc.collect()


def _save(training: Training, device: Device, begin: Begin, path: Path) -> dict[str, float]:
    """Saves once, and trains until the checkpoint is there.

    Returns:
        Seconds until the call returns and until the checkpoint exists, in milliseconds what the training has
        lost in all and its steps take, alone and meanwhile, and memory beyond that of a step.
    """
    alone = [training.step() for _ in range(_NUM_ALONE)]
    before_step = statistics.median(alone)
    own_bytes = _peak_of_steps(training, device)
    before = _forget_host_peak()
    device.forget_peak()
    began = time.perf_counter()
    done, wait = begin(training.state(), path)
    returned = time.perf_counter() - began
    steps: list[float] = []
    while not done() and len(steps) < _MOST_STEPS:
        steps.append(training.step())
    wait()
    ended = time.perf_counter() - began
    lost = returned + sum(steps) - len(steps) * before_step
    found = {
        "returns s": returned,
        "exists s": ended,
        "training lost ms": 1000 * lost,
        "step alone ms": 1000 * before_step,
    }
    if steps:
        found |= {"step meanwhile ms": 1000 * statistics.median(steps), "longest ms": 1000 * max(steps)}
    found["device MB"] = max(0, device.peak_bytes() - own_bytes) / 1e6
    found["host MB"] = max(0, _host_peak() - before) / 1e6
    return found


def _peak_of_steps(training: Training, device: Device) -> int:
    device.forget_peak()
    training.step()
    return device.peak_bytes()


def _in_background(snapshot: Any) -> Begin:
    def begin(state: Any, path: Path) -> tuple[Done, Wait]:
        handle = fastload.async_save(state, path, options=fastload.SaveOptions(snapshot=snapshot))
        return handle.done, handle.wait

    return begin


def _dcp(state: Any, path: Path) -> tuple[Done, Wait]:
    response: Any = dcp.async_save(state, checkpoint_id=path)
    future = getattr(response, "upload_completion", response)
    return future.done, future.result


def _torch_save(state: Any, path: Path) -> tuple[Done, Wait]:
    torch.save(state, path)
    return lambda: True, lambda: None


_ARMS: dict[str, Begin] = {
    "fastload.async_save, block": _in_background("block"),
    "fastload.async_save, overlap": _in_background("overlap"),
    "dcp.async_save": _dcp,
    "torch.save": _torch_save,
}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in _tensors(each)]
    return []


def _forget_host_peak() -> int:
    """Returns this process's resident bytes, from which `_host_peak` counts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _host_peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
