"""Ways to save a state and to load it back into the same memory: arms of a benchmark, called on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from rich.table import Table

import fastload
from bench_parts.job import GIB
from bench_parts.save_arms import torch_checkpointing_manager
from bench_parts.save_tables import Row, ratio
from bench_parts.tables import print_table

OURS = "fastload"


class Arm(NamedTuple):
    """A way to save a state to a path, and to load it from there into its own tensors."""

    save: Callable[[Any, Path], object]
    load: Callable[[Any, Path], object]


def arms() -> dict[str, Arm]:
    """Returns the arms that can run here."""
    named = {
        "torch.distributed.checkpoint": Arm(
            lambda state, path: dcp.save(state, checkpoint_id=path),
            lambda state, path: dcp.load(state, checkpoint_id=path),
        ),
        OURS: Arm(fastload.save, lambda state, path: fastload.load(path, into=state)),
    }
    if manager := torch_checkpointing_manager(background=False):
        theirs = Arm(
            lambda state, path: manager.save(str(path), {"state": state}),
            lambda state, path: manager.load(str(path), into={"state": state}),
        )
        named = {"torch_checkpointing, not synced": theirs} | named
    return named


def print_round_trips(rows: list[Row], title: str) -> None:
    """Prints seconds of saves and loads, and how many times as long as fastload's each took."""
    ours = next(row for row in rows if row["arm"] == OURS)
    table = Table(title=title)
    heads = (
        "save s",
        "min-max",
        "÷ fastload",
        "bytes ÷ state",
        "load s",
        "min-max",
        "÷ fastload",
        "CPU s per GiB",
    )
    for head in ("arm", *heads):
        table.add_column(head, justify="left" if head == "arm" else "right")
    for row in rows:
        cells = []
        for field, extra in (("seconds", [f"{row['stored'] / row['wanted']:.2f}"]), ("load_s", [])):
            times = row[field]
            cells += [f"{statistics.median(times):.2f}", f"{min(times):.2f}-{max(times):.2f}"]
            cells += [f"{ratio(row, ours, field):.2f}", *extra]
        cpu = (statistics.median(row[field]) / (row["wanted"] / GIB) for field in ("cpu_s", "load_cpu_s"))
        table.add_row(row["arm"], *cells, " + ".join(f"{each:.2f}" for each in cpu))
    print_table(table)
