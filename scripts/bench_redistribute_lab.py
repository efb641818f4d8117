"""Times to move a state between ranks on several hosts: from FSDP shards to tensor parallelism.

    scripts/lab/setup
    .venv/bin/python scripts/bench_redistribute_lab.py --json redistribute.json     (as root)

The hosts are those of scripts/lab, on this machine. One half of them holds the state, sharded by rows; the
other half wants it, each host one part of every tensor: rows of one half of the tensors, columns of the rest.
No storage takes part. All arms run interleaved in one job, each from a barrier until the slowest rank is
done. The result is compared with the state once for each arm, outside of the timing. Each link counts its
bytes.

The floor is what the busiest link needs: each holder streams its shards to one host that wants as much.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from bench_lab import environment, need, words
from bench_parts.job import Bytes
from bench_parts.lab_control import Lab, exit_on_signals, run_arms
from bench_parts.redistribute_lab_job import ARMS, STREAMS
from bench_parts.tables import by_arm, median, print_failed, print_table
from rich.table import Table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default=8, show_default=True, help="Number of hosts: half hold, half want.")
@click.option("--size", type=Bytes(), default="512MiB", show_default=True, help="Bytes of the state.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each arm.")
@click.option("--arms", default="", callback=words, help="Only arms whose names contain one of these.")
@click.option("--host-rate", default="400mbit", show_default=True, help="Each host's link.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Longest wait in s.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all numbers there.")
def main(
    hosts: int,
    size: int,
    repeats: int,
    arms: Sequence[str],
    host_rate: str,
    timeout_s: float,
    json_path: Path | None,
) -> None:
    """Measure how long a state takes from some hosts to others."""
    need("ip", "nginx")
    exit_on_signals()
    names = [name for name in ARMS if not arms or name == STREAMS or any(part in name for part in arms)]
    settings = {"size": size, "repeats": repeats, "timeout_s": timeout_s}
    with Lab(hosts, ["--host-rate", host_rate], {}):
        outcome = run_arms("bench_parts.redistribute_lab_job", names, settings)
    result = {
        "environment": environment(), "hosts": hosts, "size": size, "host_rate": host_rate,
        "rows": outcome.rows, "failed": outcome.failed,
    }  # fmt: skip
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def show(result: dict[str, Any]) -> None:
    """Prints the arms, relative to the floor of the same round."""
    runs = by_arm(result["rows"])
    floor = {row["turn"]: row["seconds"] for row in runs.get(STREAMS, [])}
    half, mib = result["hosts"] // 2, result["size"] / 2**20
    title = f"{mib:.0f} MiB from {half} hosts to {half} others, {result['host_rate']} each, medians"
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    for head in (
        "s",
        "min-max",
        "× floor",
        "most out of a host ÷ share",
        "most into a host ÷ share",
        "CPU s, all ranks",
    ):
        table.add_column(head, justify="right")
    for arm, rows in runs.items():
        seconds, share = [row["seconds"] for row in rows], result["size"] / half
        over = statistics.median(row["seconds"] / floor[row["turn"]] for row in rows if row["turn"] in floor)
        table.add_row(
            arm,
            f"{median(rows, 'seconds'):.2f}",
            f"{min(seconds):.2f}-{max(seconds):.2f}",
            f"{over:.3f}",
            f"{median(rows, 'most_left_bytes') / share:.3f}",
            f"{median(rows, 'most_entered_bytes') / share:.3f}",
            f"{median(rows, 'cpu_s'):.1f}",
        )
    print_table(table)
    print_failed(result["failed"])


if __name__ == "__main__":
    main()
