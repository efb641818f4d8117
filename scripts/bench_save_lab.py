"""Save times to S3 on several hosts whose links are the bottleneck, by the number of writers.

    scripts/lab/setup
    .venv/bin/python scripts/bench_save_lab.py --hosts 4 --json save.json     (as root)

The hosts are those of scripts/lab, on this machine, and so is the store, SeaweedFS; its link is not
capped. All ranks hold the same state or, with `--shards`, DTensors of it. All arms run interleaved in one
job for each number of hosts, each from a barrier until the slowest rank is done, and every arm has saved a
small state before. Each link counts its bytes. Checkpoints are checked and removed outside of the timing.

The arm with a mount (sshfs) needs: apt-get install sshfs socat openssh-sftp-server.
The arms with s3fs need: .venv/bin/pip install s3fs boto3 (this may install an older boto3 for s3fs's client).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from bench_lab import environment, need, words
from bench_parts.job import Bytes
from bench_parts.lab_control import S3_ROOT, SFTP, STORE_URL, Lab, exit_on_signals, run_arms
from bench_parts.lab_shards import LAYOUTS
from bench_parts.save_lab_arms import CONSOLIDATED, make_arms
from bench_parts.save_lab_tables import print_saves_on_lab


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default="4", show_default=True, callback=words, help="Numbers of hosts.")
@click.option("--size", type=Bytes(), default="256MiB", show_default=True, help="Bytes of the state.")
@click.option("--repeats", default=3, show_default=True, help="Saves of each arm.")
@click.option("--arms", default="", callback=words, help="Only arms whose names contain one of these.")
@click.option("--shards", type=click.Choice(list(LAYOUTS)), help="What each host has of the state.")
@click.option("--host-rate", default="100mbit", show_default=True, help="Each host's link.")
@click.option("--share-rate", help="Each host's share of the storage, if that is less.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Longest wait in s.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all numbers there.")
def main(
    hosts: Sequence[str],
    size: int,
    repeats: int,
    arms: Sequence[str],
    shards: str | None,
    host_rate: str,
    share_rate: str | None,
    timeout_s: float,
    json_path: Path | None,
) -> None:
    """Measure save times to S3 on several hosts."""
    need("ip", "nginx")
    exit_on_signals()
    jobs: list[dict[str, Any]] = []
    rates = ["--host-rate", host_rate, *(["--per-host-storage-rate", share_rate] if share_rate else [])]
    shown = f"{share_rate} to it and {host_rate} in all" if share_rate else host_rate
    result = {
        "environment": environment(),
        "repeats": repeats,
        "shards": shards,
        "rates": shown,
        "jobs": jobs,
    }
    settings = {"size": size, "repeats": repeats, "timeout_s": timeout_s, "root": f"{S3_ROOT}/saved"}
    settings |= {"endpoint": STORE_URL, "sftp": SFTP, "shards": shards or ""}
    for count in map(int, hosts):
        every = make_arms(count, layout=shards or "")
        names = [name for name in every if not arms or any(part in name for part in arms)]
        with Lab(count, rates, {}) as running:
            running.serve_store()
            if CONSOLIDATED in names:
                running.serve_files()
            outcome = run_arms("bench_parts.save_lab_job", names, settings)
        jobs.append({"hosts": running.hosts, "rows": outcome.rows, "failed": outcome.failed})
        if json_path:  # so far
            json_path.write_text(json.dumps(result, indent=1) + "\n")
    print_saves_on_lab(result)


if __name__ == "__main__":
    main()
