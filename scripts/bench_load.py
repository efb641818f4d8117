"""Load times on one machine: fastload and common ways to load without it.

    python scripts/bench_load.py throttled --ranks 4 --size 512MiB --rate 150MB/s
    python scripts/bench_load.py warm
    python scripts/bench_load.py cold --ranks 4 --size 1GiB --repeats 5
    python scripts/bench_load.py first
    python scripts/bench_load.py tiny --tensors 300000
    python scripts/bench_load.py small --ranks 16
    python scripts/bench_load.py agree
    python scripts/bench_load.py memory
    python scripts/bench_load.py memory --fsdp
    python scripts/bench_load.py fsdp
    python scripts/bench_load.py plan
    python scripts/bench_load.py quantised
    python scripts/bench_load.py reading
    python scripts/bench_load.py latency --ranks 1,2,4 --latency 50ms --connection-rate 60MB/s --size 1GiB

Arms run interleaved in one job that this script launches itself, each from a barrier until the
slowest rank has the complete state, and are verified, outside of the timing, by one digest. Those of
`first` and `tiny` each run in fresh processes.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

import click
import safetensors.torch
import torch
import torch.distributed as dist
from bench_parts import agree as agreements
from bench_parts import baselines, cold, fresh, fsdp, latency, quantised_weights, reading, small
from bench_parts.job import (
    GIB,
    MIB,
    Bytes,
    Seconds,
    all_ranks,
    available_bytes,
    forget_peak,
    peak_bytes,
    run_on_ranks,
    write_json,
)
from bench_parts.lab_control import exit_on_signals
from bench_parts.planning import compare_plans, measure_plan, measure_sharded_plan
from bench_parts.slow_storage import Limits
from bench_parts.tables import FLOOR, print_arms, print_cold, print_stages, print_table
from bench_parts.throttled_storage import Link, ThrottledFiles
from fsspec.implementations.local import LocalFileSystem
from rich.table import Table

import fastload
from fastload import LoadOptions, LoadReport
from fastload.formats.state import state_digest
from fastload.planning.parallel import Parallel

Arm = Callable[[], baselines.State]


# ---- commands


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Benchmarks of loading on one machine."""


ranks_option = click.option("--ranks", default=4, show_default=True, help="Processes that load together.")
size_option = click.option(
    "--size", type=Bytes(), default="512MiB", show_default=True, help="Of the checkpoint."
)
repeats_option = click.option("--repeats", default=3, show_default=True, help="Runs of each arm.")
arms_option = click.option("--arms", default="", help="Only arms whose name contains one of these (a,b,c).")
json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write all numbers there."
)


@main.command()
@ranks_option
@size_option
@click.option("--rate", type=Bytes(), default="150MB/s", show_default=True, help="Bandwidth for all ranks.")
@repeats_option
@arms_option
@json_option
def throttled(ranks: int, size: int, rate: int, repeats: int, arms: str, json_path: str | None) -> None:
    """Load from storage of fixed bandwidth that all ranks share, without a cache."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        digest = make_checkpoint(Path(folder, "checkpoint"), size)
        settings = {"digest": digest, "rate": rate, "repeats": repeats, "arms": arms}
        rows = run_on_ranks(__file__, ranks, folder, part="throttled", **settings)
    print_arms(rows, f"{size / MIB:.0f} MiB over a shared {rate / 1e6:.0f} MB/s to {ranks} ranks")
    print_stages(rows)
    write_json(json_path, rows)
    for row in rows:
        if row["report"] and row["report"]["strategy"] in ("allgather", "broadcast"):
            wanted = row["report"]["bytes_wanted"]
            assert set(row["data_bytes"]) == {wanted}, f"{row['arm']} did not read every byte once"


@main.command()
@ranks_option
@size_option
@repeats_option
@arms_option
@json_option
def warm(ranks: int, size: int, repeats: int, arms: str, json_path: str | None) -> None:
    """Load local files that are in the page cache, where reading once has no advantage."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        digest = make_checkpoint(Path(folder, "checkpoint"), size)
        rows = run_on_ranks(__file__, ranks, folder, part="warm", digest=digest, repeats=repeats, arms=arms)
    print_arms(rows, f"{size / MIB:.0f} MiB, local and warm, to {ranks} ranks of one host")
    print_stages(rows)
    write_json(json_path, rows)


@main.command("cold")
@ranks_option
@click.option("--size", type=Bytes(), default="1GiB", show_default=True, help="Of the checkpoint.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each arm.")
@click.option("--folder", default=None, help="Where to put the checkpoint: a folder on the disk to measure.")
@arms_option
@json_option
def cold_files(
    ranks: int, size: int, repeats: int, folder: str | None, arms: str, json_path: str | None
) -> None:
    """Load local files after the page cache is emptied (root only)."""
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=folder) as place:
        checkpoint = Path(place, "checkpoint")
        checkpoint.mkdir()
        digest = make_checkpoint(checkpoint / "safetensors", size)
        cold.prepare(checkpoint)
        rows = run_on_ranks(__file__, ranks, place, part="cold", digest=digest, repeats=repeats, arms=arms)
    print_cold(rows, f"{size / MIB:.0f} MiB, local and cold, to {ranks} ranks of one host")
    print_stages(rows)
    write_json(json_path, rows)


@main.command()
@ranks_option
@click.option("--size", type=Bytes(), default="440MB", show_default=True, help="Of the checkpoint.")
@repeats_option
@arms_option
@json_option
def first(ranks: int, size: int, repeats: int, arms: str, json_path: str | None) -> None:
    """Load warm local files in fresh processes, like a new job."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        digest = make_checkpoint(Path(folder, fresh.PLAIN), size)
        fresh.save_too(Path(folder))
        rows = fresh.measure(__file__, ranks, folder, digest=digest, repeats=repeats, only=arms)
    title = f"{size / MIB:.0f} MiB, local and warm, to {ranks} ranks of one host, processes new each time"
    fresh.print_fresh(rows, fresh.CLONED, title)
    write_json(json_path, rows)


@main.command()
@click.option("--ranks", default=1, show_default=True, help="Processes that load together.")
@click.option("--tensors", default=300_000, show_default=True, help="How many, of 16 bytes each.")
@repeats_option
@arms_option
@json_option
def tiny(ranks: int, tensors: int, repeats: int, arms: str, json_path: str | None) -> None:
    """Load very many very small tensors: the cost of a tensor rather than of a byte."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        digest = fresh.make_tiny(Path(folder, fresh.PLAIN), tensors)
        fresh.save_too(Path(folder))
        rows = fresh.measure(__file__, ranks, folder, digest=digest, repeats=repeats, only=arms)
    fresh.print_fresh(rows, fresh.MAPPED, f"{tensors:,} tensors of 16 bytes, to {ranks} ranks of one host")
    write_json(json_path, rows)


@main.command("small")
@ranks_option
@click.option("--size", type=Bytes(), default="1MiB", show_default=True, help="Of the state.")
@click.option("--repeats", default=50, show_default=True, help="Calls of each kind.")
@json_option
def small_states(ranks: int, size: int, repeats: int, json_path: str | None) -> None:
    """Load and save a small state repeatedly: the cost of a call rather than of its bytes."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        rows = run_on_ranks(__file__, ranks, folder, part="small", nbytes=size, repeats=repeats)
    small.print_small(rows, f"{size / MIB:.1f} MiB, local and warm, {ranks} ranks of one host")
    write_json(json_path, rows)


@main.command()
@click.option("--ranks", "sizes", default="8,64,256", show_default=True, help="Numbers of ranks.")
@click.option("--repeats", default=10, show_default=True, help="Calls of each number.")
@json_option
def agree(sizes: str, repeats: int, json_path: str | None) -> None:
    """Let many ranks agree, as threads of one process: the cost by their number."""
    rows = agreements.measure([int(size) for size in sizes.split(",")], repeats)
    agreements.print_agreements(rows)
    parts = agreements.measure_parts(16384, 200 * repeats)
    agreements.print_parts(parts)
    write_json(json_path, {"agreements": rows, "parts": parts})


@main.command("fsdp")
@ranks_option
@click.option("--size", type=Bytes(), default="440MB", show_default=True, help="Of the checkpoint.")
@repeats_option
@arms_option
@json_option
def fsdp_shards(ranks: int, size: int, repeats: int, arms: str, json_path: str | None) -> None:
    """Load warm local files into a model that FSDP2 shards over all ranks: seconds and memory."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        make_checkpoint(Path(folder, "checkpoint"), size)
        rows = run_on_ranks(__file__, ranks, folder, part="fsdp", repeats=repeats, arms=arms)
    fsdp.print_fsdp(rows, f"{size / MIB:.0f} MiB, local and warm, FSDP2 on {ranks} ranks of one host")
    write_json(json_path, rows)


@main.command()
@ranks_option
@click.option("--size", type=Bytes(), default="2GiB", show_default=True, help="Bytes of the checkpoint.")
@click.option("--fsdp", "sharded", is_flag=True, help="Each rank gets its part of a model that FSDP2 shards.")
@json_option
def memory(ranks: int, size: int, sharded: bool, json_path: str | None) -> None:
    """Measure the peak memory of a load beyond the state; one tensor is half of the checkpoint."""
    needed = (2 if sharded else ranks + 1) * size + 2 * GIB
    if available_bytes() < needed:
        raise click.ClickException(f"needs {needed / GIB:.0f} GiB, free are {available_bytes() / GIB:.0f}")
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        digest = make_checkpoint(Path(folder, "checkpoint"), size, big_part=0.5)
        if sharded:
            rows = run_on_ranks(__file__, ranks, folder, part="memory of shards")
        else:
            rows = run_on_ranks(__file__, ranks, folder, part="memory", digest=digest)
    held = "a rank's shards" if sharded else "the state"
    table = Table(title=f"Memory beyond {held}: {size / GIB:.1f} GiB, half of it one tensor, {ranks} ranks")
    heads = "strategy", "staging MiB", "slabs MiB", "peak beyond it, by rank, MiB", "allowed MiB", "holds"
    for name in heads:
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in rows:
        extra = ", ".join(f"{value / MIB:.0f}" for value in row["extra_bytes"])
        allowed = row["staging_bytes"] + 64 * MIB
        holds = "yes" if max(row["extra_bytes"]) <= allowed else "NO"
        staging, slabs = f"{row['staging_bytes'] / MIB:.0f}", f"{row['slab_bytes'] / MIB:.0f}"
        table.add_row(row["strategy"], staging, slabs, extra, f"{allowed / MIB:.0f}", holds)
    print_table(table)
    write_json(json_path, rows)


@main.command()
@repeats_option
@json_option
def plan(repeats: int, json_path: str | None) -> None:
    """Time one rank's planning: the reads of all ranks, their digest, its own chunks and file ranges.

    Also rank 0's work before a sharded load, from the requests of all ranks on.
    """
    rows = [
        measure_plan(tensors, ranks, every=every, block_bytes=block_bytes, repeats=repeats)
        for tensors, ranks in ((100_000, 1024), (1_000_000, 4096))
        for every, block_bytes in ((1, 0), (2, 0), (1, MIB), (2, MIB))
    ]
    _print_plans("Planning, seconds on one rank (median)", rows)
    jobs = [Parallel(tp=8, pp=16, dp=8, fsdp=fsdp) for fsdp in (False, True)]
    sharded = [measure_sharded_plan(100_000, job, repeats=repeats) for job in jobs]
    _print_plans("Planning a sharded load, seconds on rank 0 (median)", sharded)
    compared = [row for size in (8, 64, 1024, 16384) for at in (0, MIB) for row in compare_plans(size, at)]
    _print_plans("Planning a replicated load as a sharded one", compared)
    write_json(json_path, [*rows, *sharded, *compared])


@main.command()
@click.option("--size", type=Bytes(), default="512MiB", show_default=True, help="Of the quantised weights.")
@click.option("--repeats", default=7, show_default=True, help="Runs of each arm.")
@click.option("--folder", default=None, help="Where to put the checkpoints: a folder on the disk to measure.")
@json_option
def quantised(size: int, repeats: int, folder: str | None, json_path: str | None) -> None:
    """Dequantise weights to bfloat16 while loading, next to plain loads; one process, into tensors.

    Plain loads are of the same files, as stored, and of a checkpoint of the result.
    """
    rows = []
    for kind in quantised_weights.KINDS:
        with tempfile.TemporaryDirectory(prefix="bench-load-", dir=folder) as made:
            rows += quantised_weights.measure(kind, Path(made), size, repeats)
    quantised_weights.print_rows(rows, f"{size / MIB:.0f} MiB of quantised weights, one process")
    write_json(json_path, rows)


@main.command("reading")
@click.option("--size", type=Bytes(), default="1GiB", show_default=True, help="Of the checkpoint.")
@click.option("--threads", default="1,2,4", show_default=True, help="Numbers of reads at once.")
@click.option("--repeats", default=9, show_default=True, help="Runs of each arm.")
@click.option("--folder", default=None, help="Where to put the checkpoint; its files have to stay cached.")
@arms_option
@json_option
def read_and_verify(
    size: int, threads: str, repeats: int, folder: str | None, arms: str, json_path: str | None
) -> None:
    """Read and verify cached local files in one process, next to memcpy, pread and xxh3 alone."""
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=folder) as made:
        reading.save(Path(made, "checkpoint"), size)
        numbers = [int(number) for number in threads.split(",")]
        rows = reading.measure(Path(made, "checkpoint"), repeats, numbers, arms)
    reading.print_rows(rows, f"{size / MIB:.0f} MiB of cached files, read and verified by one rank")
    write_json(json_path, rows)


@main.command("latency")
@click.option("--ranks", default="1,2,4", show_default=True, help="Numbers of processes that load together.")
@click.option("--size", type=Bytes(), default="1GiB", show_default=True, help="Of the checkpoint.")
@click.option(
    "--latency", "latency_s", type=Seconds(), default="50ms", show_default=True,
    help="Before the first byte of an answer: evenly distributed between 0.6 and 1.2 times this.",
)  # fmt: skip
@click.option(
    "--connection-rate", type=Bytes(), default="60MB/s", show_default=True, help="Rate of one answer."
)
@click.option("--protocol", default="http", show_default=True, type=click.Choice(["http", "s3"]))
@click.option("--requests-rate", default=0, help="Requests a second above which it answers 503.")
@click.option("--tuned", multiple=True, metavar="OPTION=VALUE,…", help="One more arm: fastload with these.")
@repeats_option
@arms_option
@json_option
def with_latency(
    ranks: str,
    size: int,
    latency_s: float,
    connection_rate: int,
    protocol: str,
    requests_rate: int,
    tuned: tuple[str, ...],
    repeats: int,
    arms: str,
    json_path: str | None,
) -> None:
    """Load from a storage with a time to first byte and a rate for each connection, and without them."""
    exit_on_signals()  # and the servers end
    limits = Limits(latency_s, connection_rate, requests_rate)
    counts = [int(count) for count in ranks.split(",")]
    given = {"is_s3": protocol == "s3", "repeats": repeats, "arms": arms, "tuned": tuned}
    limited = f"{latency_s * 1000:g} ms, {connection_rate / 1e6:g} MB/s a connection"
    title = f"{size / MIB:.0f} MiB over {protocol.upper()}, {limited}"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        for of_job in latency.measure(__file__, Path(folder), counts, size, limits, **given):
            latency.print_latency(of_job, title, latency.REFERENCE, "plain 32")
            rows += of_job
    write_json(json_path, rows)


def _print_plans(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        shown = {float: "{:,.3f}", int: "{:,}", str: "{}"}
        table.add_row(*(shown[type(value)].format(value) for value in row.values()))
    print_table(table)


def make_checkpoint(folder: Path, nbytes: int, *, big_part: float = 0.25) -> str:
    """Writes one big bf16 tensor and layers of smaller ones, in five files; returns the state's digest."""
    folder.mkdir()
    torch.manual_seed(0)
    big = int(nbytes * big_part) // 4096 * 2048
    layer = [("norm", 2048), ("attention", 1 << 20), ("mlp", 3 << 20), ("bias", 1025)]  # some not aligned
    num_layers = max(4, (nbytes - 2 * big) // (2 * sum(count for _, count in layer)))
    parts: list[baselines.State] = [{"embedding.weight": _noise(big)}, {}, {}, {}, {}]
    for index in range(num_layers):
        tensors = {f"layers.{index}.{name}": _noise(count) for name, count in layer}
        parts[1 + index * 4 // num_layers].update(tensors)
    for index, part in enumerate(parts):
        safetensors.torch.save_file(part, folder / f"model-{index + 1:05}-of-00005.safetensors")
    return state_digest({name: tensor for part in parts for name, tensor in part.items()})


def _noise(count: int) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16).view(torch.bfloat16)


# ---- the ranks


@main.command(hidden=True)
@click.argument("settings")
def rank(settings: str) -> None:
    """Run one rank of the job."""
    given = json.loads(settings)
    dist.init_process_group("gloo")
    parts: dict[str, Callable[..., Any]] = {
        "throttled": throttled_rows,
        "warm": warm_rows,
        "cold": cold_rows,
        "memory": memory_rows,
        "memory of shards": fsdp.run_memory,
        "fsdp": fsdp.run,
        "fresh": fresh.run,
        "small": small.run,
        "latency": latency.run,
    }
    rows = parts[given.pop("part")](**given)
    if dist.get_rank() == 0:
        Path(given["folder"], "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def throttled_rows(folder: str, digest: str, rate: int, repeats: int, arms: str) -> list[dict[str, Any]]:
    root = f"{folder}/checkpoint"
    manifest = fastload.inspect(root)
    ThrottledFiles.link = link = Link(f"{folder}/link", rate)
    for index, file in enumerate(manifest.files):
        begin = min(entry.offset for entry in manifest.tensors if entry.file == index)
        ThrottledFiles.data_starts[f"{root}/{file.name}"] = begin
    files, url = ThrottledFiles(), f"throttled://{root}"
    named: dict[str, Arm] = {
        FLOOR: partial(baselines.stream_once, files, root),
        "every rank reads all, safetensors": partial(baselines.every_rank_reads, files, root),
        "rank 0 reads, broadcast per tensor": partial(baselines.first_rank_broadcasts, files, root),
        "own share, then ring all-gather": partial(baselines.own_share_then_ring, files, root, url),
    }
    return measure(named, url, digest, repeats, arms, link=link, wanted=manifest.nbytes)


def warm_rows(folder: str, digest: str, repeats: int, arms: str) -> list[dict[str, Any]]:
    root, files = f"{folder}/checkpoint", LocalFileSystem()
    named: dict[str, Arm] = {
        "lazy: load_file, mapped, not in memory yet": partial(baselines.every_rank_maps, files, root),
        "load_file, then clone of each tensor": partial(baselines.every_rank_maps_and_clones, files, root),
        "read whole files, safetensors.load": partial(baselines.every_rank_reads, files, root),
        "rank 0 reads, broadcast per tensor": partial(baselines.first_rank_broadcasts, files, root),
    }
    return measure(named, root, digest, repeats, arms, wanted=fastload.inspect(root).nbytes)


def cold_rows(folder: str, digest: str, repeats: int, arms: str) -> list[dict[str, Any]]:
    root, files = f"{folder}/checkpoint/safetensors", Path(folder, "checkpoint")
    wanted = fastload.inspect(root).nbytes
    return measure(cold.arms(files), root, digest, repeats, arms, wanted=wanted, cold_folder=root)


def measure(
    named: dict[str, Arm],
    url: str,
    digest: str,
    repeats: int,
    only: str,
    *,
    wanted: int,
    link: Link | None = None,
    cold_folder: str = "",
) -> list[dict[str, Any]]:
    """Runs all arms in turn, so that other load of the machine affects them equally."""
    reports: list[LoadReport] = []
    for strategy in ("allgather", "broadcast", "auto", "direct"):
        options = LoadOptions(strategy=strategy, on_report=reports.append)
        named[f"fastload {strategy}"] = partial(fastload.load, url, options=options)
    named = {name: arm for name, arm in named.items() if any(part in name for part in only.split(","))}
    fastload.load(
        url, names="layers.0.*", options=LoadOptions(strategy="allgather")
    )  # the first use is slower
    rows: dict[str, dict[str, Any]] = {
        name: {"arm": name, "wanted": wanted, "seconds": [], "cpu_s": []} for name in named
    }
    for turn in range(repeats):
        for name, arm in named.items():
            reports.clear()
            before = link.counts() if link else None
            row = rows[name]
            if cold_folder:
                cold.make_cold(wanted + 256 * MIB)
            disk_bytes = cold.disk_bytes(cold_folder) if cold_folder else 0
            dist.barrier()
            state, seconds, cpu_s = timed(arm)
            everyone = all_ranks((seconds, cpu_s))
            disk_bytes_after = cold.disk_bytes(cold_folder) if cold_folder else 0
            if turn == 0 and state:
                assert state_digest(state) == digest, f"{name}: rank {dist.get_rank()} got other bytes"
            del state
            gc.collect()
            row["seconds"].append(max(one for one, _ in everyone))
            row["cpu_s"].append(sum(one for _, one in everyone))
            row["report"] = reports[0].to_dict() if reports else None
            if link and before:
                data, header = (now - then for now, then in zip(link.counts(), before, strict=True))
                row.setdefault("data_bytes", []).append(data)
                row.setdefault("header_bytes", []).append(header)
            if cold_folder:
                row.setdefault("disk_bytes", []).append(disk_bytes_after - disk_bytes)
            dist.barrier()
    return list(rows.values())


def timed(arm: Arm) -> tuple[baselines.State, float, float]:
    """Returns the loaded state, the seconds, and this process's CPU seconds, user and system."""
    cpu, began = sum(os.times()[:2]), time.perf_counter()
    state = arm()
    return state, time.perf_counter() - began, sum(os.times()[:2]) - cpu


def memory_rows(folder: str, digest: str) -> list[dict[str, Any]]:
    root, rows = f"{folder}/checkpoint", []
    fastload.load(
        root, names="layers.0.*", options=LoadOptions(strategy="allgather")
    )  # imported code is not staging
    for strategy in ("allgather", "broadcast"):
        for staging_bytes in (LoadOptions().staging_bytes, 32 * MIB):
            reports: list[LoadReport] = []
            options = LoadOptions(strategy=strategy, staging_bytes=staging_bytes, on_report=reports.append)
            dist.barrier()
            before = forget_peak()
            state = fastload.load(root, options=options)
            extra = peak_bytes() - before - reports[0].bytes_wanted
            assert state_digest(state) == digest
            del state
            slabs = max(one.peak_staging_bytes for one in reports[0].ranks)
            row = {"strategy": strategy, "staging_bytes": staging_bytes, "slab_bytes": slabs}
            rows.append({**row, "extra_bytes": all_ranks(extra)})
    return rows


if __name__ == "__main__":
    main()
