"""A state as DTensors, for scripts/bench_save.py and bench_save_lab.py, and what differs then."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, distribute_tensor

import fastload
from bench_parts.lab_shards import LAYOUTS
from fastload.ext.load_verify import Sharding
from fastload.formats.state import state_digest


def shard(state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Returns this rank's part of a state that all ranks hold; nothing else of it stays in memory.

    Args:
        state: The whole.
        layout: One of `LAYOUTS`; empty for the state itself.
    """
    if not layout:
        return state
    size = dist.get_world_size()
    sharding = Sharding.parse(*LAYOUTS[layout](size), size)
    mesh = dist.init_device_mesh("cpu", sharding.mesh)
    parts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        cut = distribute_tensor(tensor, mesh, sharding.placements(tensor.dim()), src_data_rank=None)
        whole = {"shape": tensor.shape, "stride": tensor.stride()}
        local = cut.to_local().clone()
        parts[name] = DTensor.from_local(local, mesh, cut.placements, run_check=False, **whole)
    return parts


def local_parts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what this rank has in memory, by name."""
    return {name: part.to_local() if isinstance(part, DTensor) else part for name, part in state.items()}


def is_saved(state: dict[str, Tensor], url: str) -> bool:
    """Whether fastload loads the same into each rank as this rank has."""
    copy: dict[str, Any] = {name: torch.zeros_like(part) for name, part in state.items()}
    fastload.load(url, into=copy, strict=False)  # there may be more, such as Megatron's common state
    return state_digest(local_parts(copy)) == state_digest(local_parts(state))


def dcp_save_consolidated(state: dict[str, Tensor], path: Path) -> None:
    """What DCP does to get the same files: each rank writes its shards, then rank 0 puts them together.

    What it writes last is not flushed to the disk.
    """
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        dcp.save(state, storage_writer=writer)
