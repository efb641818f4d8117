"""How long saving to S3 takes on several hosts whose links are the bottleneck: by how many writers share it.

    scripts/lab/setup
    .venv/bin/python scripts/bench_save_lab.py --hosts 4 --json save.json     (as root)

The hosts are those of scripts/lab, on this machine, and so is the store, SeaweedFS; its link is not
capped. All ranks hold the same state. All arms run interleaved in one job for each number of hosts, each
from a barrier until the slowest rank is done, and every arm has saved a small state before. Each link's
counters say what crossed it. What was saved is checked, and removed, outside of the timing.

The arms with s3fs need it: .venv/bin/pip install s3fs boto3 (which may replace boto3 by an older one that
s3fs's client goes with).
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from bench_lab import environment, need, words
from bench_parts.job import Bytes
from bench_parts.lab_control import S3_ROOT, STORE_URL, Lab, run_arms
from bench_parts.save_lab_arms import make_arms
from bench_parts.save_lab_tables import print_saves_on_lab


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default="4", show_default=True, callback=words, help="Numbers of hosts.")
@click.option("--size", type=Bytes(), default="256MiB", show_default=True, help="Bytes of the state.")
@click.option("--repeats", default=3, show_default=True, help="Saves of each arm.")
@click.option("--arms", default="", callback=words, help="Only arms whose names contain one of these.")
@click.option("--host-rate", default="100mbit", show_default=True, help="Each host's link.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Longest wait in s.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all numbers there.")
def main(
    hosts: Sequence[str],
    size: int,
    repeats: int,
    arms: Sequence[str],
    host_rate: str,
    timeout_s: float,
    json_path: Path | None,
) -> None:
    """Measure how long saving to S3 takes on several hosts."""
    need("ip", "nginx")
    for number in (signal.SIGINT, signal.SIGTERM):  # either way the lab goes down, in the background too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    jobs: list[dict[str, Any]] = []
    result = {"environment": environment(), "repeats": repeats, "host_rate": host_rate, "jobs": jobs}
    settings = {"size": size, "repeats": repeats, "timeout_s": timeout_s, "root": f"{S3_ROOT}/saved"}
    settings["endpoint"] = STORE_URL
    for count in map(int, hosts):
        names = [name for name in make_arms(count) if not arms or any(part in name for part in arms)]
        with Lab(count, ["--host-rate", host_rate], {}) as running:
            running.serve_store()
            outcome = run_arms("bench_parts.save_lab_job", names, settings)
        jobs.append({"hosts": running.hosts, "rows": outcome.rows, "failed": outcome.failed})
        if json_path:  # so far
            json_path.write_text(json.dumps(result, indent=1) + "\n")
    print_saves_on_lab(result)


if __name__ == "__main__":
    main()
