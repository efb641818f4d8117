"""Loads in fresh processes: the first of each process, and the second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from rich.table import Table

import fastload
from bench_parts import baselines
from bench_parts.job import MIB, all_ranks, peak_bytes, run_on_ranks
from bench_parts.tables import print_table
from fastload import LoadOptions
from fastload.formats.state import state_digest

PLAIN, SAVED = "checkpoint", "saved"  # checkpoints of safetensors and of fastload
MAPPED, CLONED = "load_file, mapped", "load_file, then clone of each tensor"
_NUM_LOADS = 2

Arm = Callable[[Path], baselines.State]


def _baseline(load: Callable[[LocalFileSystem, str], baselines.State], folder: Path) -> baselines.State:
    return load(LocalFileSystem(), str(folder / PLAIN))


def _fastload(strategy: str, which: str, folder: Path) -> baselines.State:
    state: baselines.State = fastload.load(folder / which, options=LoadOptions(strategy=strategy))
    return state


ARMS: dict[str, Arm] = {
    MAPPED: partial(_baseline, baselines.every_rank_maps),
    CLONED: partial(_baseline, baselines.every_rank_maps_and_clones),
    "fastload auto": partial(_fastload, "auto", PLAIN),
    "fastload allgather": partial(_fastload, "allgather", PLAIN),
    "fastload auto, verified": partial(_fastload, "auto", SAVED),
}


def make_tiny(folder: Path, count: int) -> str:
    """Writes one file with tensors of 4 floats; returns the state's digest."""
    folder.mkdir()
    state = {f"layers.{number}.w": torch.randn(4) for number in range(count)}
    safetensors.torch.save_file(state, folder / "model.safetensors")
    return state_digest(state)


def save_too(folder: Path) -> None:
    """Saves the plain checkpoint of a folder again with fastload."""
    fastload.save(ARMS[MAPPED](folder), folder / SAVED)


def measure(
    script: str, ranks: int, folder: str, *, digest: str, repeats: int, only: str
) -> list[dict[str, Any]]:
    """Runs all arms in turn, each in fresh processes."""
    arms = [name for name in ARMS if any(part in name for part in only.split(","))]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for turn in range(repeats):
        for name in arms:
            check = digest if turn == 0 else ""
            rows[name].append(run_on_ranks(script, ranks, folder, part="fresh", arm=name, digest=check))
    return [{"arm": name, "runs": runs} for name, runs in rows.items()]


def run(folder: str, arm: str, digest: str) -> dict[str, Any]:
    """Runs an arm several times on one rank, in a process that has loaded nothing before."""
    row: dict[str, Any] = {"seconds": [], "cpu_s": []}
    for _ in range(_NUM_LOADS):
        dist.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        state = ARMS[arm](Path(folder))
        everyone = all_ranks((time.perf_counter() - began, time.process_time() - cpu))
        row["seconds"].append(max(seconds for seconds, _ in everyone))
        row["cpu_s"].append(sum(cpu_s for _, cpu_s in everyone))
        row.setdefault("peak_bytes", max(all_ranks(peak_bytes())))
        if digest:
            assert state_digest(state) == digest, f"{arm}: rank {dist.get_rank()} got other bytes"
        del state
    return row


def print_fresh(rows: Sequence[dict[str, Any]], reference: str, title: str) -> None:
    """Prints medians of the first and the second load of a process, next to those of one arm."""
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    heads = ("first s", "÷", "second s", "÷", "CPU s, first, all ranks", "÷", "peak MiB of a rank")
    for name in heads:
        table.add_column(name, justify="right")
    medians = {row["arm"]: _medians(row["runs"]) for row in rows}
    for arm, values in medians.items():
        cells = []
        for value, base in zip(values[:3], medians.get(reference, values), strict=False):
            cells += [f"{value:.2f}", f"{value / base:.2f}"]
        table.add_row(arm, *cells, f"{values[3] / MIB:.0f}")
    print_table(table)


def _medians(runs: Sequence[dict[str, Any]]) -> list[float]:
    picked = zip(*((*run["seconds"], run["cpu_s"][0], run["peak_bytes"]) for run in runs), strict=True)
    return [statistics.median(values) for values in picked]
