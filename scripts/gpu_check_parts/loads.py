"""Loads of one checkpoint in memory to the device, by turns with other libraries."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

import fastload
from gpu_check_parts.devices import Device
from gpu_check_parts.stages import Job

State = dict[str, torch.Tensor]
_LAYER = {"norm": 1, "attention": 4096, "up": 14336, "down": 14336}  # rows of 4096, as in a model of 8B
_ROW, _EMBEDDING = 4096, 0.08


def run(job: Job) -> None:
    device = Device(job.kind)
    device.use_all_cores()
    nbytes = _that_fit(job, device)
    state = make_state(device, nbytes)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    where = f"{nbytes / 1e9:.2f} GB from {job.folder.parent.parent}"
    path = job.folder / "checkpoint"
    device.synchronize()
    began = time.perf_counter()
    options = fastload.SaveOptions(max_shard_bytes=nbytes // 8, write_threads=8)
    fastload.save(state, path, options=options)
    seconds = time.perf_counter() - began
    job.results.value(
        "To memory", "fastload.save, eight threads", s=seconds, **{"GB/s": nbytes / seconds / 1e9}
    )
    arms = _arms(path, device)
    for turn in range(1 + job.sizes.turns):  # the first warms up: memory is pinned, and allocated
        for name, arm in list(arms.items()):
            if turn and job.left_s < 3:
                return
            gc.collect()
            device.synchronize()
            began = time.perf_counter()
            try:
                found = arm()
            except Exception as error:  # another library lacks what it needs, or does not know the device
                if name.startswith("fastload"):
                    raise
                job.results.skip(name, f"{type(error).__name__}: {error}")
                del arms[name]
                continue
            device.synchronize()
            seconds = time.perf_counter() - began
            if turn:
                job.results.value(where, name, s=seconds, **{"GB/s": nbytes / seconds / 1e9})
            else:
                job.results.value(where, name, **{"first s": seconds})
                job.results.check(f"{name}: the bytes are right", same(found, state))
            del found


def make_state(device: Device, nbytes: int) -> State:
    """Returns tensors of a language model with random bits, about so many bytes in all, on a device."""
    scale = min(1.0, (nbytes / 8 / 2 / _ROW / sum(_LAYER.values())))  # several layers of whatever fits
    shapes = {"embedding": (int(nbytes * _EMBEDDING) // 2 // _ROW + 1, _ROW)}
    left = nbytes - shapes["embedding"][0] * _ROW * 2
    for number in range(10_000):
        if left <= 0:
            break
        for name, rows in _LAYER.items():
            shapes[f"layers.{number}.{name}"] = (max(1, int(rows * scale)), _ROW)
            left -= shapes[f"layers.{number}.{name}"][0] * _ROW * 2
    torch.manual_seed(0)
    return {name: _noise(shape, device) for name, shape in shapes.items()}


def same(found: State, state: State) -> bool:
    """Whether tensors are on one device and equal, bit for bit."""
    return found.keys() == state.keys() and all(
        found[name].device == tensor.device
        and torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in state.items()
    )


def _noise(shape: tuple[int, ...], device: Device) -> torch.Tensor:
    made_on = device.device if device.kind == "cuda" else "cpu"
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=made_on)
    return bits.to(device.device).view(torch.bfloat16)


def _that_fit(job: Job, device: Device) -> int:
    """Returns how many bytes are loaded: a third of the memory, if what was asked for does not fit."""
    room = [shutil.disk_usage(job.folder).free]
    if (free := device.free_bytes()) is not None:
        room.append(free)
    if (most := int(min(room) / 3)) < job.sizes.load_bytes:
        job.results.fact("less than asked for", f"{most / 1e9:.1f} GB, a third of what is free")
        return most
    return job.sizes.load_bytes


def _arms(path: Path, device: Device) -> dict[str, Callable[[], State]]:
    files = [str(file) for file in sorted(path.glob("*.safetensors"))]
    mapped = "" if device.has_streams else ", mapped and not read"
    return {
        "fastload": partial(_fastload, path, device, verify=True),
        "fastload, verify=False": partial(_fastload, path, device, verify=False),
        f"safetensors.torch.load_file{mapped}": partial(_load_file, files, device),
        "fastsafetensors, without GDS": partial(_fastsafetensors, files, device),
        "Run:ai streamer": partial(_runai, files, device),
    }


def _fastload(path: Path, device: Device, *, verify: bool) -> State:
    return fastload.load(path, device=device.device, options=fastload.LoadOptions(verify=verify))


def _load_file(files: list[str], device: Device) -> State:
    found: State = {}
    for file in files:
        found.update(safetensors.torch.load_file(file, device=str(device.device)))
    return found


def _fastsafetensors(files: list[str], device: Device) -> State:
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, device=str(device.device), nogds=True)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    try:
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}
    finally:
        buffers.close()
        loader.close()


def _runai(files: list[str], device: Device) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device=str(device.device))
        return {name: tensor.clone() if tensor.is_cpu else tensor for name, tensor in streamer.get_tensors()}
