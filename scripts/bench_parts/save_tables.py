"""Tables of what scripts/bench_save.py measured. Ratios are medians over the rounds, of one round each."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from rich.table import Table

from bench_parts.job import GIB, MIB
from bench_parts.tables import print_table

Row = dict[str, Any]


def ratio(row: Row, reference: Row, field: str = "seconds") -> float:
    """Returns how many times as long as another arm one took, in the same round."""
    return statistics.median(a / b for a, b in zip(row[field], reference[field], strict=True))


def print_saves(rows: list[Row], title: str) -> None:
    """Prints seconds of the arms, and how many times as long as fastload's each took."""
    ours = next((row for row in rows if row["arm"] == "fastload.save"), rows[-1])
    table = _table(title, "median s", "min-max", "GB/s", f"÷ {ours['arm']}", "CPU s per GiB, all ranks")
    for row in rows:
        median = statistics.median(row["seconds"])
        cpu_s = statistics.median(row["cpu_s"]) / (row["wanted"] / GIB)
        rate = f"{row['wanted'] / median / 1e9:.2f}"
        table.add_row(row["arm"], *_spread(row["seconds"]), rate, f"{ratio(row, ours):.2f}", f"{cpu_s:.2f}")
    print_table(table)


def print_inside(rows: list[Row]) -> None:
    """Prints where fastload spent its time, by its own reports: medians of the slowest ranks."""
    reports = [report for row in rows for report in row.get("reports", ())]
    if reports:
        names = ("snapshot_s", "write_s", "flush_s", "commit_s", "total_s")
        table = _table("Inside fastload.save", *(name.replace("_s", " s") for name in names))
        slowest = [[max(rank[name] for rank in report["ranks"]) for report in reports] for name in names]
        table.add_row("median, slowest rank", *(f"{statistics.median(each):.3f}" for each in slowest))
        print_table(table)


def print_stalls(rows: list[Row], title: str) -> None:
    """Prints stalls, what they are of a copy of the share, and the memory beyond the state."""
    kinds = {"touched": "memory that was touched", "fresh": "fresh memory"}
    copies = {kind: _named(rows, f"copy of the share, to {text}") for kind, text in kinds.items()}
    heads = [f"÷ copy to {kind} memory" for kind in copies]
    table = _table(title, "stall s", "min-max", *heads, "until durable s", "most memory beyond, MiB")
    for row in rows:
        ratios = [f"{ratio(row, copy):.2f}" if copy else "" for copy in copies.values()]
        total_s, extra = statistics.median(row["total_s"]), statistics.median(row["extra_bytes"]) / MIB
        table.add_row(row["arm"], *_spread(row["seconds"]), *ratios, f"{total_s:.2f}", f"{extra:.0f}")
    print_table(table)


def print_training(rows: list[Row], title: str) -> None:
    """Prints what saving adds: in time and CPU, to the same steps without, run in the same round.

    Rounds differ by more than that: beside the median of their ratios are the quartiles, and what follows
    from intervals of which each step, and the rest, takes its median.
    """
    steps_s = statistics.median(itertools.chain.from_iterable(rows[0]["base_steps_s"]))
    title = f"{title}; state of {rows[0]['wanted'] / MIB:.0f} MiB; {steps_s:.3f} s a step without"
    heads = [
        "median s",
        "min-max",
        "without s",
        "% more (quartiles)",
        "% more, by steps",
        "% more CPU (quartiles)",
        "a step beside a save, % more",
        "such",
    ]
    table = _table(title, *heads)
    for row in rows:
        base = {name: row[f"base_{name}"] for name in ("seconds", "cpu_s", "steps_s")}
        more = [
            _quartiles([100 * (a / b - 1) for a, b in zip(row[x], base[x], strict=True)])
            for x in ("seconds", "cpu_s")
        ]
        by_steps = f"{100 * (_interval_s(row) / _interval_s(base) - 1):+.1f}"
        beside = row["beside_s"]
        slower = f"{100 * (statistics.median(beside) / steps_s - 1):+.1f}" if beside else ""
        without = f"{statistics.median(base['seconds']):.3f}"
        cells = [more[0], by_steps, more[1], slower, f"{len(beside)}"]
        table.add_row(row["arm"], *_spread(row["seconds"]), without, *cells)
    print_table(table)


def _interval_s(row: Row) -> float:
    """Returns how long steps take of which each, and what is not in steps, takes its median over rounds."""
    rest = [whole - sum(steps) for whole, steps in zip(row["seconds"], row["steps_s"], strict=True)]
    steps = zip(*row["steps_s"], strict=True)
    return statistics.median(rest) + sum(statistics.median(each) for each in steps)


def _quartiles(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:+.1f}"
    first, middle, last = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:+.1f} ({first:+.1f}, {last:+.1f})"


def print_slow(rows: list[Row], title: str) -> None:
    """Prints how much longer training took than without saves, run just before or after."""
    table = _table(
        title, "median s", "min-max", "without s", "% more", "a save takes, intervals", "saves", "written"
    )
    for row in rows:
        more = 100 * (ratio(row, {**row, "seconds": row["base_seconds"]}) - 1)
        without = f"{statistics.median(row['base_seconds']):.3f}"
        takes = row["save_s"] * row["asked"] / statistics.median(row["base_seconds"])
        counts = [f"{takes:.2f}", str(row["asked"]), f"{statistics.median(row['written']):.0f}"]
        table.add_row(row["arm"], *_spread(row["seconds"]), without, f"{more:+.1f}", *counts)
    print_table(table)


def print_plans(rows: list[Row]) -> None:
    """Prints how long a rank takes to find out what it contributes, and what it writes."""
    table = _table("A save planned on one rank", "ranks", "first s", "later s")
    for row in rows:
        cells = [f"{row['ranks']:,}", *(f"{row[name]:.2f}" for name in ("first", "later"))]
        table.add_row(f"{row['tensors']:,} DTensors", *cells)
    print_table(table)


def _named(rows: list[Row], start: str) -> Row | None:
    return next((row for row in rows if row["arm"].startswith(start)), None)


def _spread(seconds: list[float]) -> tuple[str, str]:
    return f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}-{max(seconds):.3f}"


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    return table
