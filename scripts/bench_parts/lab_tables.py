"""The tables of scripts/bench_lab.py, and the numbers that they and its picture show."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench_parts.tables import FLOOR, GIB, by_arm, print_failed, print_table


@dataclass(frozen=True)
class Cell:
    """One arm on one number of hosts.

    Attributes:
        seconds: Median.
        least: Fastest run.
        most: Slowest run.
        ratio: Median over the floor's.
        amplification: Bytes that left the storage over those of the tensors; median.
        exchanged: Bytes from host to host over those of the tensors; median.
        entered: Bytes into the host that got most over those of the tensors; median.
        least_exchanged: What the hosts want, less the checkpoint once. No less will do if every byte is read
            once; where a part lies strided in files, more, as a reader then gets what others want as well.
        cpu_s: CPU seconds of all ranks and their mounts per GiB of checkpoint; median.
        memory: Most bytes of memory that a rank took beyond the state; median.
        report: fastload's own, of the last run.
    """

    seconds: float
    least: float
    most: float
    ratio: float
    amplification: float
    exchanged: float
    entered: float
    least_exchanged: float
    cpu_s: float
    memory: float
    report: dict[str, Any] | None


def cells(result: dict[str, Any], regime: str) -> dict[int, dict[str, Cell]]:
    """Returns hosts → arm → what was measured."""
    found: dict[int, dict[str, Cell]] = {}
    for job in result["jobs"]:
        if job["regime"] == regime:
            found[job["hosts"]] = _cells_of(job["rows"], result["nbytes"])
    return found


def _cells_of(rows: list[dict[str, Any]], nbytes: int) -> dict[str, Cell]:
    found = by_arm(rows)

    def median(arm: str, *keys: str) -> float:
        return statistics.median(float(sum(row.get(key, math.nan) for key in keys)) for row in found[arm])

    reference = median(FLOOR, "seconds") if FLOOR in found else float("nan")
    return {
        arm: Cell(
            seconds=median(arm, "seconds"),
            least=min(run["seconds"] for run in runs),
            most=max(run["seconds"] for run in runs),
            ratio=median(arm, "seconds") / reference,
            amplification=median(arm, "storage_bytes") / nbytes,
            exchanged=median(arm, "exchanged_bytes") / nbytes,
            entered=median(arm, "most_entered_bytes") / nbytes,
            least_exchanged=median(arm, "wanted_bytes") / nbytes - 1,
            cpu_s=median(arm, "cpu_s", "mount_cpu_s") / (nbytes / GIB),
            memory=median(arm, "memory_bytes"),
            report=runs[-1]["report"],
        )
        for arm, runs in found.items()
    }


def print_regime(result: dict[str, Any], regime: str) -> None:
    """Prints the arms of one regime, what did not run, and fastload's own view of its runs."""
    table, measured = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0)), cells(result, regime)
    rates = " ".join(result["rates"][regime])
    shards = result.get("shards")
    what = f"{result['nbytes'] / 2**20:.0f} MiB" + (
        f" of {result['quantised']}" if result.get("quantised") else ""
    )
    what += f" as {shards}" if shards else ""
    count = result.get("ranks_per_host", 1)
    ranks = f", {count} ranks on each host" if count > 1 else ""
    table.title = f"{regime}: {what}, {rates}{ranks}, median of {result['repeats']}"
    table.caption = "amp: bytes off the storage ÷ checkpoint. exch: bytes from host to host ÷ checkpoint; "
    table.caption += f"{_least_exchanged(measured)}. in: bytes into the host that got most ÷ checkpoint. "
    table.caption += "CPU: s per GiB of checkpoint, all ranks and "
    table.caption += "their sshfs, user + system; servers are not included."
    table.add_column("\narm", no_wrap=True)
    table.add_column("\nreads", no_wrap=True)
    for hosts in measured:
        for head in (f"{hosts} hosts\ns", "\nmin–max", "\n÷floor", "\namp", "\nexch", "\nin", "\nCPU"):
            table.add_column(head, justify="right", no_wrap=True)
    for arm in result["arms"]:
        row = [arm, result["reads"][arm]]
        for of_job in measured.values():
            cell = of_job.get(arm)
            if cell is None:
                row += ["–", "", "", "", "", "", ""]
                continue
            row += [f"{cell.seconds:.2f}", f"{cell.least:.2f}–{cell.most:.2f}", f"{cell.ratio:.2f}"]
            row += [f"{share:.2f}" for share in (cell.amplification, cell.exchanged, cell.entered)]
            row += [f"{cell.cpu_s:.1f}"]
        table.add_row(*row)
    Console(width=190).print(table)
    for job in result["jobs"]:
        if job["regime"] == regime:
            print_failed(job["failed"], f"{job['hosts']} hosts, ")
    _print_stages(measured, regime)


def _least_exchanged(measured: dict[int, dict[str, Cell]]) -> str:
    """Says what has to travel when every byte is read once."""
    least = [max(cell.least_exchanged for cell in of_job.values()) for of_job in measured.values() if of_job]
    return f"at least {' / '.join(f'{each:.2f}' for each in least)}"


def _print_stages(measured: dict[int, dict[str, Cell]], regime: str) -> None:
    """Prints where fastload spent its time by its own report, the longest of all ranks."""
    table = Table(box=SIMPLE_HEAD, title=f"{regime}: inside fastload, last run, maximum over ranks")
    names = ("read_s", "exchange_s", "place_s", "exposed_s", "total_s")
    heads = ("hosts", "arm", "strategy", "chunk KiB", "rounds", "depth", "memory MiB", *names)
    for head in heads:
        table.add_column(
            head.replace("_s", " s"), justify="left" if head in ("arm", "strategy") else "right", no_wrap=True
        )
    for hosts, of_job in measured.items():
        for arm, cell in of_job.items():
            if report := cell.report:
                counts = (report["chunk_bytes"] // 1024, report["num_rounds"], report["depth"])
                memory = "–" if math.isnan(cell.memory) else f"{cell.memory / 2**20:.0f}"
                seconds = (max(rank[name] for rank in report["ranks"]) for name in names)
                table.add_row(
                    str(hosts),
                    arm,
                    report["strategy"],
                    *map(str, counts),
                    memory,
                    *(f"{s:.2f}" for s in seconds),
                )
    if table.rows:
        print_table(table)
