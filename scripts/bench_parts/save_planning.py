"""How long one of many ranks takes to plan a save of DTensors: what it contributes, what it writes."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench_parts.planning import world_of
from fastload.comm.observers import Observers
from fastload.options import SaveOptions
from fastload.saving import plan
from fastload.saving.agree import describe, predict
from fastload.saving.call import SaveCall
from fastload.storage.location import locate

_ROWS = (4, 4, 7, 1)  # of a shard, by turns; one is uneven
_COLUMNS = 128


def measure_save_plan(num_tensors: int, num_ranks: int, *, repeats: int) -> dict[str, Any]:
    """Times what a rank does before its first save of tensors that all ranks shard evenly, and a later one.

    No other rank is there: with FSDP nobody has to be asked.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=num_ranks // 2, world_size=num_ranks)
    state = _state(num_tensors, num_ranks)
    seconds: dict[str, list[float]] = {"first": [], "later": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            plan._last.clear()
            for taken in seconds.values():
                call = _call(Path(folder, "checkpoint"), num_ranks)
                began = time.perf_counter()
                described = describe(call, state)
                plan.make_plan(call, described, predict(call, described)).target.close()
                taken.append(time.perf_counter() - began)
    dist.destroy_process_group()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"tensors": num_tensors, "ranks": num_ranks, **medians}


def _state(num_tensors: int, num_ranks: int) -> dict[str, torch.Tensor]:
    mesh = dist.init_device_mesh("cpu", (num_ranks,))
    state = {}
    for index in range(num_tensors):
        rows = _ROWS[index % len(_ROWS)]
        local = torch.zeros(rows, _COLUMNS, dtype=torch.bfloat16)
        shape = torch.Size((rows * num_ranks - (rows == 1), _COLUMNS))
        given = {"run_check": False, "shape": shape, "stride": (_COLUMNS, 1)}
        state[f"layers.{index}.weight"] = DTensor.from_local(local, mesh, [Shard(0)], **given)
    return state


def _call(path: Path, num_ranks: int) -> SaveCall:
    world = world_of(dist.HashStore(), num_ranks // 2, num_ranks, dist.group.WORLD)
    location = locate(path)
    now, options = time.perf_counter(), SaveOptions()
    return SaveCall(world, location, {}, None, options, None, Observers(), now)
