"""Deltas: their size, what saving one costs, and how long several hosts take to refresh a model with one.

    scripts/lab/setup
    .venv/bin/python scripts/bench_deltas_lab.py --json deltas.json     (as root)

A model of bfloat16 tensors is saved completely, 2 % of its elements are changed, and it is saved as a delta
and again completely, by one process to a local disk, several times each: the seconds of CPU are those of the
process.

The hosts are those of scripts/lab, on this machine, with one storage link for all. Each holds the base in
CPU tensors. They load the complete checkpoint or the delta into them over HTTP, interleaved in one job, each
from a barrier until the slowest rank is done; opening the checkpoint is included. The model is compared
with the new version once for each arm, outside of the timing. The pause is the time from the first change of
a tensor to the last, on the slowest rank.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from bench_lab import environment, need, words
from bench_parts.delta_lab_job import ARMS, BASE_NAME, DELTA_NAME, FLOOR, FULL_NAME
from bench_parts.job import Bytes
from bench_parts.lab_control import Checkpoint, Lab, exit_on_signals, run_arms
from bench_parts.lab_ranks import own_cpu_s
from bench_parts.tables import by_arm, median, print_failed, print_table
from rich.table import Table

import fastload

_SMALL_BYTES = 8 << 20
_TENSOR_ELEMENTS = 1 << 24
_NAME = "deltas"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default=8, show_default=True, help="Number of hosts; 0 only saves.")
@click.option("--size", type=Bytes(), default="1GiB", show_default=True, help="Bytes of the model.")
@click.option("--changed", default=0.02, show_default=True, help="Part of the elements that differ.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each arm.")
@click.option("--arms", default="", callback=words, help="Only arms whose names contain one of these.")
@click.option("--storage-rate", default="400mbit", show_default=True, help="The storage's link.")
@click.option("--host-rate", default="2gbit", show_default=True, help="Each host's link.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Longest wait in s.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all numbers there.")
def main(
    hosts: int,
    size: int,
    changed: float,
    repeats: int,
    arms: Sequence[str],
    storage_rate: str,
    host_rate: str,
    timeout_s: float,
    json_path: Path | None,
) -> None:
    """Measure saves of deltas, and refreshes with them."""
    if hosts:
        need("ip", "nginx")
    exit_on_signals()
    names = [name for name in ARMS if not arms or name == FLOOR or any(part in name for part in arms)]
    with tempfile.TemporaryDirectory(prefix="bench-deltas-") as folder:
        root = Path(folder)
        saves = {kind: save(root / kind, nbytes, changed, repeats) for kind, nbytes in sizes(size).items()}
        rows, failed = [], {}
        if hosts:
            settings = {"folder": folder, "repeats": repeats, "timeout_s": timeout_s}
            rates = ["--storage-rate", storage_rate, "--host-rate", host_rate]
            with Lab(hosts, rates, {_NAME: Checkpoint(root, "", size)}):
                from bench_parts.lab_control import services

                settings["url"] = f"{services.HTTP_URL}/{_NAME}"
                outcome = run_arms("bench_parts.delta_lab_job", names, settings)
            rows, failed = outcome.rows, outcome.failed
    result = {
        "environment": environment(), "hosts": hosts, "size": size, "changed": changed, "rows": rows,
        "storage_rate": storage_rate, "host_rate": host_rate, "failed": failed, "saves": saves["large"],
    }  # fmt: skip
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def sizes(size: int) -> dict[str, int]:
    """Returns the bytes of the models."""
    return {"small": min(size, _SMALL_BYTES), "large": size}


def save(root: Path, nbytes: int, changed: float, repeats: int) -> list[dict[str, Any]]:
    """Saves a model, and a changed one as a delta and completely; returns a row for each save."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, nbytes // 2 // _TENSOR_ELEMENTS)
    length = nbytes // 2 // count
    state = {
        f"layers.{number}.weight": torch.randn(length, generator=generator).bfloat16().view(-1, 256)
        for number in range(count)
    }
    root.mkdir()
    fastload.save(state, root / BASE_NAME)
    for tensor in state.values():
        bits = tensor.view(torch.int16).view(-1)
        bits[torch.rand(length, generator=generator) < changed] ^= 1
    rows = []
    for turn in range(repeats):
        for name, base in ((FULL_NAME, None), (DELTA_NAME, root / BASE_NAME)):
            shutil.rmtree(root / name, ignore_errors=True)
            began, used = time.perf_counter(), own_cpu_s()
            report = fastload.save(state, root / name, options=fastload.SaveOptions(base=base))
            seconds, cpu_s = time.perf_counter() - began, own_cpu_s() - used
            rows.append(
                {"arm": name, "turn": turn, "seconds": seconds, "cpu_s": cpu_s, "nbytes": report.nbytes}
            )
    return rows


def show(result: dict[str, Any]) -> None:
    """Prints the saves, and the arms relative to the complete checkpoint."""
    mib = result["size"] / 2**20
    table = Table(title=f"saves of {mib:.0f} MiB, {result['changed']:.0%} changed, medians")
    table.add_column("save", no_wrap=True)
    for head in ("bytes ÷ complete", "CPU s", "CPU ÷ complete", "s"):
        table.add_column(head, justify="right")
    saves = by_arm(result["saves"])
    for name, rows in saves.items():
        full = saves[FULL_NAME]
        table.add_row(
            name,
            f"{median(rows, 'nbytes') / median(full, 'nbytes'):.4f}",
            f"{median(rows, 'cpu_s'):.2f}",
            f"{median(rows, 'cpu_s') / median(full, 'cpu_s'):.2f}",
            f"{median(rows, 'seconds'):.2f}",
        )
    print_table(table)
    if not result["rows"]:
        return
    title = f"{mib:.0f} MiB into {result['hosts']} hosts, one link of {result['storage_rate']}, medians"
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    for head in ("s", "min-max", "÷ floor", "read ÷ complete", "CPU s, all ranks", "pause s"):
        table.add_column(head, justify="right")
    runs = by_arm(result["rows"])
    for arm, rows in runs.items():
        seconds = [row["seconds"] for row in rows]
        table.add_row(
            arm,
            f"{median(rows, 'seconds'):.2f}",
            f"{min(seconds):.2f}-{max(seconds):.2f}",
            f"{median(rows, 'seconds') / median(runs[FLOOR], 'seconds'):.3f}",
            f"{median(rows, 'read_bytes') / result['size']:.3f}",
            f"{median(rows, 'cpu_s'):.1f}",
            f"{median(rows, 'pause_s'):.2f}",
        )
    print_table(table)
    print_failed(result["failed"])


if __name__ == "__main__":
    main()
