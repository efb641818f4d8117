"""The tables of scripts/bench_save_lab.py. Speed-ups are medians over the rounds, of one round each."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from bench_parts.save_lab_arms import writers_arm
from bench_parts.tables import GIB, by_arm, median, print_failed, print_table

Row = dict[str, Any]

_STAGES = ("snapshot_s", "write_s", "flush_s", "commit_s", "total_s")


def print_saves_on_lab(result: dict[str, Any]) -> None:
    """Prints the arms of each number of hosts, and where fastload's spent their time."""
    for job in result["jobs"]:
        runs = by_arm(job["rows"])
        nbytes = job["rows"][0]["nbytes"] if job["rows"] else 0
        what = f"{nbytes / 2**20:.0f} MiB" + (
            f" as DTensors ({result['shards']})" if result["shards"] else ""
        )
        title = f"{what} saved to S3 from {job['hosts']} hosts, {result['rates']} each"
        _print_arms(runs, f"{title}, medians of {result['repeats']}")
        print_failed(job["failed"], f"{job['hosts']} hosts, ")
        _print_stages(runs, job["hosts"])


def speed_up(runs: list[Row], reference: list[Row]) -> float:
    """Returns how many times as fast as another arm one was, in the same round."""
    before = {row["turn"]: row["seconds"] for row in reference}
    return statistics.median(before[row["turn"]] / row["seconds"] for row in runs if row["turn"] in before)


def _print_arms(runs: dict[str, list[Row]], title: str) -> None:
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    heads = (
        "s",
        "min–max",
        "× one writer",
        "into storage ÷ state",
        "between hosts ÷ state",
        "CPU s per GiB, all ranks",
        "cores busy",
    )
    for head in heads:
        table.add_column(head, justify="right")
    one = runs.get(writers_arm(1), [])
    for arm, rows in runs.items():
        seconds = [row["seconds"] for row in rows]
        table.add_row(
            arm,
            f"{median(rows, 'seconds'):.2f}",
            f"{min(seconds):.2f}–{max(seconds):.2f}",
            f"{speed_up(rows, one):.2f}" if one else "",
            f"{median(rows, 'storage_bytes') / rows[0]['nbytes']:.3f}",
            f"{median(rows, 'exchanged_bytes') / rows[0]['nbytes']:.3f}",
            f"{median(rows, 'cpu_s') / (rows[0]['nbytes'] / GIB):.1f}",
            f"{100 * median(rows, 'cores_busy'):.0f} %",
        )
    print_table(table)


def _print_stages(runs: dict[str, list[Row]], hosts: int) -> None:
    table = Table(title=f"{hosts} hosts: inside fastload.save, medians of the slowest ranks")
    table.add_column("arm", no_wrap=True)
    for head in ("most bytes of a writer ÷ mean", *(name.replace("_s", " s") for name in _STAGES)):
        table.add_column(head, justify="right")
    for arm, rows in runs.items():
        reports = [row["report"] for row in rows if row["report"]]
        if reports:
            slowest = [[max(rank[name] for rank in r["ranks"]) for r in reports] for name in _STAGES]
            cells = [f"{statistics.median(seconds):.2f}" for seconds in slowest]
            table.add_row(arm, f"{_evenness(reports[-1]):.3f}", *cells)
    if table.rows:
        print_table(table)


def _evenness(report: dict[str, Any]) -> float:
    written = [rank["bytes_written"] for rank in report["ranks"]]
    return float(max(written) / (sum(written) / report["num_writers"]))
