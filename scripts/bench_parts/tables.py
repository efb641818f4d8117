"""Tables of what a benchmark measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 2**30
FLOOR = "floor: one rank streams all"
DEQUANTISED = "fastload dequantised"
AS_IT_WAS = "fastload, as it was"  # from another directory than the other arms


def print_arms(rows: list[dict[str, Any]], title: str) -> None:
    """Prints seconds of the arms, relative to the floor or else to the best arm that owns its memory."""
    on_link = "data_bytes" in rows[0]
    fair = [row for row in rows if not row["arm"].startswith(("lazy", "fastload"))]
    best = next((row for row in rows if row["arm"] == FLOOR), None) or min(
        fair or rows, key=lambda row: statistics.median(row["seconds"])
    )
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    heads = ["median s", "min-max", "÷ floor" if best["arm"] == FLOOR else "÷ best other"]
    heads += ["read ÷ checkpoint", "header bytes"] if on_link else []
    for name in [*heads, "CPU s per GiB, all ranks"]:
        table.add_column(name, justify="right")
    reference = statistics.median(best["seconds"])
    for row in rows:
        seconds, median = row["seconds"], statistics.median(row["seconds"])
        cells = [f"{median:.2f}", f"{min(seconds):.2f}-{max(seconds):.2f}", f"{median / reference:.3f}"]
        if on_link:
            cells += [f"{row['data_bytes'][-1] / row['wanted']:.4f}", f"{row['header_bytes'][-1]:,}"]
        table.add_row(row["arm"], *cells, f"{statistics.median(row['cpu_s']) / (row['wanted'] / GIB):.2f}")
    print_table(table)


def print_cold(rows: list[dict[str, Any]], title: str) -> None:
    """Prints seconds of the arms, and at what part of the rate of the best reference they got the bytes."""
    medians = {row["arm"]: statistics.median(row["seconds"]) for row in rows}
    reference = min((s for arm, s in medians.items() if arm.startswith("reference")), default=math.nan)
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    for name in (
        "median s", "min-max", "rate ÷ reference", "disk ÷ checkpoint", "CPU s per GiB, all ranks",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        seconds, median = row["seconds"], medians[row["arm"]]
        disk, cpu_s = statistics.median(row["disk_bytes"]), statistics.median(row["cpu_s"])
        cells = f"{median:.2f}", f"{min(seconds):.2f}-{max(seconds):.2f}", f"{reference / median:.2f}"
        table.add_row(
            row["arm"], *cells, f"{disk / row['wanted']:.2f}", f"{cpu_s / (row['wanted'] / GIB):.2f}"
        )
    print_table(table)


def print_stages(rows: list[dict[str, Any]]) -> None:
    """Prints where fastload's last run of each arm spent its time, by its own report."""
    names = ("read_s", "exchange_s", "place_s", "exposed_s", "total_s")
    table = Table(title="Inside fastload, last run, maximum over ranks")
    for name in ("arm", "strategy", "chunk KiB", "rounds", "depth", *names):
        table.add_column(name.replace("_s", " s"), justify="left" if name in ("arm", "strategy") else "right")
    for row in rows:
        if report := row["report"]:
            counts = [f"{report['chunk_bytes'] // 1024}", str(report["num_rounds"]), str(report["depth"])]
            seconds = [f"{max(rank[name] for rank in report['ranks']):.2f}" for name in names]
            table.add_row(row["arm"], report["strategy"], *counts, *seconds)
    if table.rows:
        print_table(table)


def print_table(table: Table) -> None:
    Console(width=150).print(table)


def print_failed(failed: dict[str, str], where: str = "") -> None:
    """Prints why arms did not run."""
    for arm, why in failed.items():
        Console(width=150).print(f"{where}{arm}: {why}", markup=False)


def by_arm(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Sorts runs by their arms."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return found


def median(rows: Sequence[dict[str, Any]], field: str) -> float:
    """Returns the median of a number over the runs of an arm."""
    return statistics.median(row[field] for row in rows)
