"""Loads into a model that FSDP2 shards on one machine: seconds, and memory beyond a rank's shards."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.table import Table
from torch import nn

from bench_parts import sharded
from bench_parts.job import GIB, MIB, all_ranks, forget_peak, peak_bytes
from bench_parts.tables import print_table
from fastload import LoadOptions, LoadReport
from fastload.formats.state import state_digest

_SAFETENSORS, _DCP = "checkpoint", "dcp"
_STRATEGIES = ("auto", "allgather")


def run(folder: str, repeats: int, arms: str) -> list[dict[str, Any]]:
    """Runs all arms in turn on one rank.

    The first run of each is verified, and its memory is measured; it is not timed.
    """
    files, saved = Path(folder, _SAFETENSORS), Path(folder, _DCP)
    module = sharded.fully_sharded(files)
    digest = sharded.expected_digest(module, sharded.mapped(files))
    sharded.dcp_safetensors(files, module)
    dcp.save(module.state_dict(), checkpoint_id=saved)
    named: dict[str, Callable[[nn.Module], Any]] = {
        "torch DCP, saved on the same mesh": partial(sharded.dcp_directory, saved),
        "torch DCP, safetensors": partial(sharded.dcp_safetensors, files),
        "rank 0 + set_model_state_dict": partial(sharded.first_rank_sets, files),
    }
    for strategy in _STRATEGIES:
        options = LoadOptions(strategy=strategy)
        named[f"fastload {strategy}"] = partial(sharded.by_fastload, str(files), options)
    named = {name: arm for name, arm in named.items() if any(part in name for part in arms.split(","))}
    wanted = sum(part.nbytes for part in sharded.local_parts(module).values())
    rows = [
        {"arm": name, "wanted": sum(all_ranks(wanted)), "seconds": [], "cpu_s": []}
        | {"extra_bytes": all_ranks(extra_bytes(arm, module, digest))}
        for name, arm in named.items()
    ]
    for _ in range(repeats):
        for row, arm in zip(rows, named.values(), strict=True):
            sharded.clear(module)
            gc.collect()
            dist.barrier()
            cpu, began = sum(os.times()[:2]), time.perf_counter()
            arm(module)
            everyone = all_ranks((time.perf_counter() - began, sum(os.times()[:2]) - cpu))
            row["seconds"].append(max(seconds for seconds, _ in everyone))
            row["cpu_s"].append(sum(cpu_s for _, cpu_s in everyone))
    return rows


def extra_bytes(arm: Callable[[nn.Module], Any], module: nn.Module, digest: str) -> int:
    """Returns the peak bytes of a load on this rank beyond its shards, which exist before.

    Pages of mapped files count, though the system could reclaim them.
    """
    arm(module)  # without its imports
    sharded.clear(module)
    dist.barrier()
    before = forget_peak()
    arm(module)
    extra = peak_bytes() - before
    assert state_digest(sharded.local_parts(module)) == digest, f"rank {dist.get_rank()} got other bytes"
    return extra


def run_memory(folder: str) -> list[dict[str, Any]]:
    """Measures the memory of fastload on one rank, with two sizes of staging."""
    files = Path(folder, _SAFETENSORS)
    module = sharded.fully_sharded(files)
    digest = sharded.expected_digest(module, sharded.mapped(files))
    rows = []
    for strategy, staging_bytes in product(_STRATEGIES, (LoadOptions().staging_bytes, 32 * MIB)):
        reports: list[LoadReport] = []
        options = LoadOptions(strategy=strategy, staging_bytes=staging_bytes, on_report=reports.append)
        extra = all_ranks(extra_bytes(partial(sharded.by_fastload, str(files), options), module, digest))
        slabs = max(one.peak_staging_bytes for one in reports[-1].ranks)
        row = {"strategy": strategy, "staging_bytes": staging_bytes, "slab_bytes": slabs}
        rows.append({**row, "extra_bytes": extra})
    return rows


def print_fsdp(rows: list[dict[str, Any]], title: str) -> None:
    """Prints seconds of the arms, and the memory of the rank with the most."""
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    for name in ("median s", "min-max", "CPU s per GiB, all ranks", "peak beyond shards, by rank, MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        seconds, cpu_s = row["seconds"], statistics.median(row["cpu_s"]) / (row["wanted"] / GIB)
        extra = ", ".join(f"{value / MIB:.0f}" for value in row["extra_bytes"])
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        table.add_row(row["arm"], f"{statistics.median(seconds):.2f}", spread, f"{cpu_s:.2f}", extra)
    print_table(table)
