"""Ways to save a state of which each rank has all, or a part: arms of a benchmark, called on all ranks.

Whoever returns has made its part durable: the data of the files, and their names.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fastload
from bench_parts.save_shards import local_parts
from fastload import SaveOptions, SaveReport
from fastload.base.memory import PAGE_BYTES, allocate_staging, byte_view, host_view, round_up

State = dict[str, torch.Tensor]
Wait = Callable[[], object]
Save = Callable[[Any, Path], None]
Begin = Callable[[Any, Path], Wait]

_WRITE_BYTES = 8 << 20
_LAYER = [("qkv", 3.0), ("out", 1.0), ("up", 4.0), ("down", 4.0), ("moment", 3.0)]
_NUM_LAYERS = 21
_ROW = 1024


def make_state(nbytes: int) -> State:
    """Returns about 150 tensors of about so many bytes in all, three quarters of them in bf16.

    The large ones have rows of 1024 elements.
    """
    torch.manual_seed(0)
    embedding = nbytes // 8
    layer = (nbytes - embedding) / _NUM_LAYERS / sum(part for _, part in _LAYER)
    state = {"embedding.weight": _rows(embedding, torch.bfloat16)}
    for index in range(_NUM_LAYERS):
        for name, part in _LAYER:
            dtype = torch.float32 if name == "moment" else torch.bfloat16
            state[f"layers.{index}.{name}"] = _rows(int(layer * part), dtype)
        state[f"layers.{index}.norm"] = _noise(2048, torch.float32)
        state[f"layers.{index}.bias"] = _noise(1025, torch.bfloat16)  # what follows is not aligned
    return state


def _rows(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    num_rows = nbytes // dtype.itemsize // _ROW
    return _noise(num_rows * _ROW, dtype).view(num_rows, _ROW)


def _noise(count: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.int16 if dtype == torch.bfloat16 else torch.int32
    return torch.randint(-(2**15), 2**15, (count,), dtype=whole).view(dtype)


def nbytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


# ---- saves that return when all is durable


def torch_save(state: State, path: Path) -> None:
    """Saves on rank 0."""
    if dist.get_rank() == 0:
        torch.save(state, path)
        sync(path)


def safetensors_save(state: State, path: Path) -> None:
    """Saves on rank 0."""
    if dist.get_rank() == 0:
        safetensors.torch.save_file(state, path)
        sync(path)


def dcp_save(state: State, path: Path) -> None:
    """Saves with all defaults: the tensors are spread over the ranks, the files are fsynced."""
    dcp.save(state, checkpoint_id=path)


@dataclass
class FastloadSave:
    """Saves with all defaults; keeps the report."""

    report: SaveReport | None = None

    def __call__(self, state: State, path: Path) -> None:
        self.report = fastload.save(state, path)


class PlainWrite:
    """Each rank writes its part of one preallocated file, from memory that is aligned and was touched.

    Nothing is gathered, hashed or committed: the least that a save can cost here.
    """

    def __init__(self, state: State) -> None:
        part = round_up(-(-nbytes_of(state) // dist.get_world_size()), PAGE_BYTES)
        self._data = host_view(allocate_staging(part, pinned=False).random_())
        self._begin = dist.get_rank() * part
        self._nbytes = part * dist.get_world_size()

    def __call__(self, state: State, path: Path) -> None:
        if dist.get_rank() == 0:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(file, 0, self._nbytes)
            os.close(file)
        dist.barrier()
        file = os.open(path, os.O_WRONLY | os.O_DIRECT)
        for start in range(0, len(self._data), _WRITE_BYTES):
            piece = self._data[start : start + _WRITE_BYTES]
            assert os.pwrite(file, piece, self._begin + start) == len(piece)
        os.fsync(file)
        os.close(file)
        sync_names([path.parent])


# ---- saves that return when training may go on; what they return waits until all is durable


class CopyShare:
    """Copies as many bytes as one rank's share: the least that training has to wait."""

    def __init__(self, state: State, *, fresh: bool) -> None:
        size = dist.get_world_size()
        local = list(local_parts(state).values())
        held = sum(part.nbytes for part in local)
        index, count = (0, 1) if held < nbytes_of(state) else (dist.get_rank(), size)
        self._parts = list(_between(local, held * index // count, held * (index + 1) // count))
        self._kept = None if fresh else torch.zeros(sum(map(len, self._parts)), dtype=torch.uint8)

    def __call__(self, state: State, path: Path) -> Wait:
        size = sum(part.numel() for part in self._parts)
        out = torch.empty(size, dtype=torch.uint8) if self._kept is None else self._kept
        position = 0
        for part in self._parts:
            out[position : position + part.numel()].copy_(part)
            position += part.numel()
        return lambda: out


def _between(tensors: Iterable[torch.Tensor], begin: int, end: int) -> Iterable[torch.Tensor]:
    position = 0
    for tensor in tensors:
        first, last = max(begin - position, 0), min(end - position, tensor.nbytes)
        if first < last:
            yield byte_view(tensor)[first:last]
        position += tensor.nbytes


def nothing(state: State, path: Path) -> Wait:
    """Saves nothing at all."""
    return lambda: None


def blocking(save: Save) -> Begin:
    """Makes training wait until all is durable."""

    def begin(state: State, path: Path) -> Wait:
        save(state, path)
        return lambda: None

    return begin


def torch_save_in_thread(state: State, path: Path) -> Wait:
    """Saves a clone on rank 0."""
    if dist.get_rank() != 0:
        return lambda: None
    copy = {name: tensor.clone() for name, tensor in state.items()}
    thread = threading.Thread(target=lambda: torch_save(copy, path))
    thread.start()
    return thread.join


def dcp_async_save(state: State, path: Path) -> Wait:
    """Saves with all defaults."""
    return dcp.async_save(state, checkpoint_id=path).result


def dcp_async_save_in(group: dist.ProcessGroup) -> Begin:
    """Saves with all defaults but for a group of its own."""
    return lambda state, path: dcp.async_save(state, checkpoint_id=path, process_group=group).result


def fastload_async_save(state: State, path: Path) -> Wait:
    """Saves with all defaults."""
    return fastload.async_save(state, path, options=SaveOptions()).wait


def fastload_overlapped_save(state: State, path: Path) -> Wait:
    """Copies the state while training goes on."""
    return fastload.async_save(state, path, options=SaveOptions(snapshot="overlap")).wait


def torch_checkpointing_manager(*, background: bool) -> Any:
    """Returns a manager of torch_checkpointing for CPUs; None if it is not installed.

    Without direct writes, which fail here, and resharders, whose exchange needs CUDA.
    """
    if importlib.util.find_spec("torch_checkpointing") is None:
        return None
    warnings.simplefilter("ignore")  # of the library, about plain tensors
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config
    chosen = config.with_async_save() if background else config.with_sync_save()
    chosen.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return chosen.build()


# ---- durability


def sync(path: Path) -> None:
    """Makes a file durable, and its name."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)
    sync_names([path.parent])


def sync_names(folders: Iterable[Path]) -> None:
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)
