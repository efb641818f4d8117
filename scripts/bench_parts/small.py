"""Loads and saves of a small state, again and again: what a call costs, not a byte."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import fastload
from fastload import LoadOptions

from .job import all_ranks
from .tables import print_table


def run(folder: str, nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """Measures each kind of call, the first of which is not counted, on all ranks."""
    state = {f"layers.{index}": torch.arange(nbytes // 32, dtype=torch.float32) + index for index in range(8)}
    numbers = itertools.count()
    options = LoadOptions(strategy="allgather")

    def save() -> None:
        fastload.save(state, f"{folder}/{next(numbers)}")

    rows = [_measure("save", save, repeats)]
    rows.append(_measure("load", lambda: fastload.load(f"{folder}/0", options=options), repeats))
    with fastload.open(f"{folder}/0", options=options) as checkpoint:
        rows.append(_measure("load of an open checkpoint", checkpoint.load, repeats))
        one = checkpoint.load(names="layers.7")
        assert torch.equal(one["layers.7"], state["layers.7"])
        rows.append(_measure("one tensor of eight", lambda: checkpoint.load(names="layers.7"), repeats))
    return rows


def _measure(name: str, call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Times a call from a barrier until the last rank has returned; the first one is not counted."""
    seconds, cpu_s = [], []
    for _ in range(1 + repeats):
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        call()
        everyone = all_ranks((time.perf_counter() - began, time.process_time() - cpu))
        seconds.append(max(taken for taken, _ in everyone))
        cpu_s.append(sum(used for _, used in everyone))
    return {"call": name, "seconds": seconds[1:], "cpu_s": cpu_s[1:]}


def print_small(rows: list[dict[str, Any]], title: str) -> None:
    """Prints milliseconds of each kind of call."""
    table = Table(title=title)
    table.add_column("call", no_wrap=True)
    for name in ("median ms", "least", "most", "most ÷ median", "CPU ms, all ranks"):
        table.add_column(name, justify="right")
    for row in rows:
        seconds, median = row["seconds"], statistics.median(row["seconds"])
        shown = [1e3 * median, 1e3 * min(seconds), 1e3 * max(seconds)]
        cells = [*(f"{value:.0f}" for value in shown), f"{max(seconds) / median:.1f}"]
        table.add_row(row["call"], *cells, f"{1e3 * statistics.median(row['cpu_s']):.0f}")
    print_table(table)
