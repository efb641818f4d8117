"""Save times on one machine: fastload and common ways to save without it.

    python scripts/bench_save.py local --ranks 4 --size 1GiB
    python scripts/bench_save.py stall
    python scripts/bench_save.py training
    python scripts/bench_save.py slow
    python scripts/bench_save.py round-trip
    python scripts/bench_save.py latency --ranks 1,4 --size 512MiB

With `--shards fsdp` (or `hsdp`, `tp`) the state consists of DTensors.

Arms run interleaved in one job that this script launches itself, each from a barrier until the slowest
rank is done. Every save has its own path. The previous checkpoint is removed, and the file system synced,
outside of the timing.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

import click
import torch.distributed as dist
from bench_parts import latency_saves, save_planning, save_shards, save_slow, save_tables
from bench_parts import round_trip as round_trips
from bench_parts import save_arms as arms_of
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
from bench_parts.latency import print_latency
from bench_parts.save_beside import SaveBeside
from bench_parts.save_memory import Generations
from bench_parts.save_training import Training
from bench_parts.slow_storage import Limits

from fastload.formats.state import state_digest
from fastload.options import SaveOptions
from fastload.saving.snapshot import buffer_pool

_THEIRS = "torch_checkpointing, in the background, not synced"
_BESIDE = "control: the same save by a process of its own"

# ---- commands


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Benchmarks of saving on one machine."""


ranks_option = click.option("--ranks", default=4, show_default=True, help="Processes that save together.")
size_option = click.option("--size", type=Bytes(), default="1GiB", show_default=True, help="Of the state.")
shards_option = click.option(
    "--shards", type=click.Choice(["fsdp", "hsdp", "tp"]), default=None, help="DTensors in this layout."
)
repeats_option = click.option("--repeats", default=7, show_default=True, help="Runs of each arm.")
arms_option = click.option("--arms", default="", help="Only arms whose name contains one of these (a,b,c).")
folder_option = click.option(
    "--folder", type=click.Path(file_okay=False), help="On the file system to save to; else a temporary one."
)
json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write all numbers there."
)


@main.command()
@ranks_option
@size_option
@shards_option
@repeats_option
@arms_option
@folder_option
@json_option
def local(
    ranks: int,
    size: int,
    shards: str | None,
    repeats: int,
    arms: str,
    folder: str | None,
    json_path: str | None,
) -> None:
    """Save to a local file system, until everything is durable."""
    require_memory((ranks + 2) * size + 2 * GIB)
    rows = measured("local", ranks, folder, json_path, size=size, shards=shards, repeats=repeats, arms=arms)
    title = f"{size / MIB:.0f} MiB{_as(shards)} saved by {ranks} ranks of one host, until durable"
    save_tables.print_saves(rows, title)
    save_tables.print_inside(rows)


@main.command("round-trip")
@ranks_option
@size_option
@shards_option
@repeats_option
@arms_option
@folder_option
@json_option
def round_trip(
    ranks: int,
    size: int,
    shards: str | None,
    repeats: int,
    arms: str,
    folder: str | None,
    json_path: str | None,
) -> None:
    """Save to a local file system, and load into the same tensors again, from the page cache."""
    require_memory((ranks + 2) * size + 4 * GIB)
    rows = measured(
        "round trip", ranks, folder, json_path, size=size, shards=shards, repeats=repeats, arms=arms
    )
    title = f"{size / MIB:.0f} MiB{_as(shards)} saved and loaded by {ranks} ranks of one host"
    round_trips.print_round_trips(rows, title)


@main.command()
@ranks_option
@size_option
@shards_option
@repeats_option
@arms_option
@folder_option
@json_option
def stall(
    ranks: int,
    size: int,
    shards: str | None,
    repeats: int,
    arms: str,
    folder: str | None,
    json_path: str | None,
) -> None:
    """Save in the background: the time that training waits, and the memory."""
    require_memory((ranks + 2) * size + 4 * GIB)
    rows = measured("stall", ranks, folder, json_path, size=size, shards=shards, repeats=repeats, arms=arms)
    title = f"{size / MIB:.0f} MiB{_as(shards)} saved in the background by {ranks} ranks"
    save_tables.print_stalls(rows, title)


@main.command()
@click.option("--ranks", default=2, show_default=True, help="Processes that train together.")
@click.option("--width", default=1024, show_default=True, help="Of the model's layers.")
@click.option("--batch", default=64, show_default=True, help="Samples per rank and step.")
@click.option("--fsdp", is_flag=True, help="Train with FSDP2 instead of DDP.")
@click.option("--operations", default=0, help="Small operations in each step, which keep Python busy.")
@click.option("--every", default=20, show_default=True, help="Steps between saves.")
@repeats_option
@arms_option
@folder_option
@json_option
def training(
    ranks: int,
    width: int,
    batch: int,
    fsdp: bool,
    operations: int,
    every: int,
    repeats: int,
    arms: str,
    folder: str | None,
    json_path: str | None,
) -> None:
    """Train with DDP or FSDP2 on CPUs, and save every few steps: the cost in wall time.

    To storage, or to memory, with each rank as its own host.
    """
    model = {"width": width, "batch": batch, "fsdp": fsdp, "operations": operations, "every": every}
    rows = measured("training", ranks, folder, json_path, repeats=repeats, arms=arms, **model)
    how = "FSDP2" if fsdp else "DDP"
    save_tables.print_training(rows, f"{ranks} ranks with {how}, a save every {every} steps")


@main.command()
@click.option("--tensors", default="10000,100000", show_default=True, help="How many DTensors.")
@click.option("--ranks", default=1024, show_default=True, help="Ranks that shard them.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each.")
@json_option
def plan(tensors: str, ranks: int, repeats: int, json_path: str | None) -> None:
    """Plan a save of DTensors on one of many ranks: the time that training waits before the copy."""
    rows = [save_planning.measure_save_plan(int(n), ranks, repeats=repeats) for n in tensors.split(",")]
    write_json(json_path, rows)
    save_tables.print_plans(rows)


def _as(shards: str | None) -> str:
    return f" as DTensors ({shards})" if shards else ""


@main.command()
@click.option("--ranks", default=2, show_default=True, help="Processes that train together.")
@click.option("--width", default=1024, show_default=True, help="Of the model's layers.")
@click.option("--batch", default=64, show_default=True, help="Samples per rank and step.")
@click.option("--every", default=20, show_default=True, help="Steps between saves.")
@click.option("--saves", default=6, show_default=True, help="Saves in a run.")
@click.option("--takes", default=1.6, show_default=True, help="Intervals that storage takes for a save.")
@repeats_option
@folder_option
@json_option
def slow(
    ranks: int,
    width: int,
    batch: int,
    every: int,
    saves: int,
    takes: float,
    repeats: int,
    folder: str | None,
    json_path: str | None,
) -> None:
    """Train, and save to storage that is slower than the interval: the time that training waits."""
    model = {"width": width, "batch": batch, "every": every}
    rows = measured("slow", ranks, folder, json_path, repeats=repeats, saves=saves, takes=takes, **model)
    title = f"{ranks} ranks, a save every {every} steps to storage that takes {takes} intervals for each"
    save_tables.print_slow(rows, title)


@main.command()
@click.option("--ranks", default="1,4", show_default=True, help="Numbers of processes that save together.")
@click.option("--size", type=Bytes(), default="512MiB", show_default=True, help="Of the state.")
@click.option(
    "--latency", "latency_s", type=Seconds(), default="50ms", show_default=True,
    help="Before the answer to a request: evenly distributed between 0.6 and 1.2 times this.",
)  # fmt: skip
@click.option("--requests-rate", default=0, help="Requests a second above which it answers 503.")
@repeats_option
@arms_option
@json_option
def latency(
    ranks: str,
    size: int,
    latency_s: float,
    requests_rate: int,
    repeats: int,
    arms: str,
    json_path: str | None,
) -> None:
    """Save to an S3 store (SeaweedFS) with latency, and without it; all ranks hold the same state."""
    exit_on_signals()  # and the servers end
    limits = Limits(latency_s, requests_rate=requests_rate)
    counts = [int(count) for count in ranks.split(",")]
    title = f"saves of {size / MIB:.0f} MiB to S3, {latency_s * 1000:g} ms"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-save-") as folder:
        for of_job in latency_saves.measure(
            __file__, Path(folder), counts, limits, size=size, repeats=repeats, arms=arms
        ):
            print_latency(of_job, title, latency_saves.BOTO3, "boto3 32")
            rows += of_job
    write_json(json_path, rows)


def measured(
    part: str, ranks: int, folder: str | None, json_path: str | None, **settings: Any
) -> list[dict[str, Any]]:
    """Runs one part on separate ranks that save below the folder; returns and writes its rows."""
    with tempfile.TemporaryDirectory(prefix="bench-save-", dir=folder) as place:
        rows: list[dict[str, Any]] = run_on_ranks(__file__, ranks, place, part=part, **settings)
    write_json(json_path, rows)
    return rows


def require_memory(nbytes: int) -> None:
    if available_bytes() < nbytes:
        raise click.ClickException(f"needs {nbytes / GIB:.0f} GiB, free are {available_bytes() / GIB:.0f}")


# ---- the ranks


@main.command(hidden=True)
@click.argument("settings")
def rank(settings: str) -> None:
    """Run one rank of the job."""
    given = json.loads(settings)
    dist.init_process_group("gloo")
    parts = {
        "local": local_rows,
        "round trip": round_trip_rows,
        "stall": stall_rows,
        "training": training_rows,
        "slow": slow_rows,
        "latency": latency_saves.run,
    }
    rows = parts[given.pop("part")](**given)
    if dist.get_rank() == 0:
        Path(given["folder"], "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def local_rows(folder: str, size: int, shards: str | None, repeats: int, arms: str) -> list[dict[str, Any]]:
    state = save_shards.shard(arms_of.make_state(size), shards or "")
    ours = arms_of.FastloadSave()
    whole = {
        "torch.save + fsync, rank 0": arms_of.torch_save,
        "safetensors.save_file + fsync, rank 0": arms_of.safetensors_save,
    }
    named = {
        **({} if shards else whole),
        "dcp.save": arms_of.dcp_save,
        "dcp.save, consolidating": save_shards.dcp_save_consolidated,
        "plain parallel O_DIRECT write": arms_of.PlainWrite(state),
        "fastload.save": ours,
    }
    named = chosen(named, arms)
    warm_up(folder, named, shards)
    rows = new_rows(named, wanted=arms_of.nbytes_of(state))
    for turn in range(repeats):
        for name, arm in named.items():
            with fresh_path(folder) as path:
                ours.report = None
                cpu, began = sum(os.times()[:2]), time.perf_counter()
                arm(state, path)
                took = time.perf_counter() - began, sum(os.times()[:2]) - cpu
                everyone = all_ranks(took)
                assert stored_bytes(path) >= arms_of.nbytes_of(state)
                if turn == 0 and ours.report:
                    assert save_shards.is_saved(state, str(path))
            rows[name]["seconds"].append(max(seconds for seconds, _ in everyone))
            rows[name]["cpu_s"].append(sum(seconds for _, seconds in everyone))
            if ours.report:
                rows[name].setdefault("reports", []).append(ours.report.to_dict())
    return list(rows.values())


def round_trip_rows(
    folder: str, size: int, shards: str | None, repeats: int, arms: str
) -> list[dict[str, Any]]:
    state = save_shards.shard(arms_of.make_state(size), shards or "")
    own = list(save_shards.local_parts(state).values())
    expected = state_digest(save_shards.local_parts(state))
    named = chosen(round_trips.arms(), arms)
    rows = new_rows(named, wanted=arms_of.nbytes_of(state))
    for turn in range(-1, repeats):  # the first one is warming up
        for name, arm in named.items():
            with fresh_path(folder) as path:
                for seconds, cpu_s, work in (
                    ("seconds", "cpu_s", arm.save),
                    ("load_s", "load_cpu_s", arm.load),
                ):
                    if work is arm.load:
                        warm(path)
                        for tensor in own:
                            tensor.zero_()
                    dist.barrier()
                    cpu, began = sum(os.times()[:2]), time.perf_counter()
                    work(state, path)
                    took = time.perf_counter() - began, sum(os.times()[:2]) - cpu
                    everyone = all_ranks(took)
                    if turn >= 0:
                        rows[name][seconds].append(max(each for each, _ in everyone))
                        rows[name][cpu_s].append(sum(each for _, each in everyone))
                rows[name]["stored"] = stored_bytes(path)
                assert state_digest(save_shards.local_parts(state)) == expected, name
    return list(rows.values())


def stall_rows(folder: str, size: int, shards: str | None, repeats: int, arms: str) -> list[dict[str, Any]]:
    state = save_shards.shard(arms_of.make_state(size), shards or "")
    whole = {} if shards else {"torch.save in a thread, rank 0": arms_of.torch_save_in_thread}
    named = {
        "copy of the share, to memory that was touched": arms_of.CopyShare(state, fresh=False),
        "copy of the share, to fresh memory": arms_of.CopyShare(state, fresh=True),
        **whole,
        "dcp.async_save": arms_of.dcp_async_save,
        "fastload.async_save, first": arms_of.fastload_async_save,
        "fastload.async_save, later": arms_of.fastload_async_save,
        "fastload.async_save, overlapped": arms_of.fastload_overlapped_save,
    }
    named = chosen(named, arms)
    warm_up(folder, named, shards)
    rows = new_rows(named, wanted=arms_of.nbytes_of(state), staging_bytes=SaveOptions().staging_bytes)
    for _ in range(repeats):
        for name, arm in named.items():
            with fresh_path(folder) as path:
                if name.endswith("first"):
                    buffer_pool.clear()  # like the first save of a process
                before, began = forget_peak(), time.perf_counter()
                wait = arm(state, path)
                stall_s = time.perf_counter() - began
                wait()
                total_s = time.perf_counter() - began
                extra = peak_bytes() - before
                del wait
                everyone = all_ranks((stall_s, total_s, extra))
            rows[name]["seconds"].append(max(one for one, _, _ in everyone))
            rows[name]["total_s"].append(max(one for _, one, _ in everyone))
            rows[name]["extra_bytes"].append(max(one for _, _, one in everyone))
    return list(rows.values())


def training_rows(
    folder: str,
    width: int,
    batch: int,
    fsdp: bool,
    operations: int,
    every: int,
    repeats: int,
    arms: str,
) -> list[dict[str, Any]]:
    model = {"width": width, "batch": batch, "fsdp": fsdp}
    job = Training(**model, operations=operations)
    own_group = dist.new_group(backend="gloo")  # dcp's collectives must not mix with those of training
    named = {
        **({} if fsdp else {"torch.save": arms_of.blocking(arms_of.torch_save)}),
        "dcp.save": arms_of.blocking(arms_of.dcp_save),
        "dcp.async_save": arms_of.dcp_async_save_in(own_group),
        "fastload.save": arms_of.blocking(arms_of.FastloadSave()),
        "fastload.async_save": arms_of.fastload_async_save,
        "fastload.async_save, overlapped": arms_of.fastload_overlapped_save,
    }
    closing: list[Any] = []
    if chosen({_THEIRS: None}, arms) and (theirs := arms_of.torch_checkpointing_manager(background=True)):
        closing.append(theirs)
        named[_THEIRS] = lambda state, path: theirs.save(str(path), {"state": state}).result
        job.lock = theirs.lock
    if chosen({_BESIDE: None}, arms):
        closing.append(beside := SaveBeside(folder, model))
        named[_BESIDE] = beside
    kept = {f"in memory, copies: {copies}": Generations(Path(folder), copies) for copies in (1, 2)}
    named = {"no saves": arms_of.nothing, **chosen({**named, **kept}, arms)}
    for arm in named.values():  # to finish imports and first uses
        with fresh_path(folder) as path:
            job.run(2, arm, path)
    rows = new_rows(named, wanted=job.nbytes)
    order = list(named)
    for _ in range(repeats):
        for name in order:
            with fresh_path(folder) as path:
                cpu, began = sum(os.times()[:2]), time.perf_counter()
                steps_s, beside_s = job.run(every, named[name], path)
                everyone = all_ranks((time.perf_counter() - began, sum(os.times()[:2]) - cpu))
            rows[name]["seconds"].append(max(one for one, _ in everyone))
            rows[name]["cpu_s"].append(sum(one for _, one in everyone))
            rows[name]["steps_s"].append(steps_s)
            rows[name]["beside_s"].extend(beside_s)
        order.append(order.pop(0))  # interleaved, and not always in the same order
    for name, field in itertools.product(list(named)[1:], ("seconds", "cpu_s", "steps_s")):
        rows[name][f"base_{field}"] = rows["no saves"][field]
    for each in (*kept.values(), *closing):
        each.close()
    return [rows[name] for name in list(named)[1:]]


def slow_rows(
    folder: str, width: int, batch: int, every: int, saves: int, takes: float, repeats: int
) -> list[dict[str, Any]]:
    job = Training(width=width, batch=batch, fsdp=False)
    job.steps(every)  # to finish imports and first uses
    without = {"every": every, "num_saves": saves, "root": None}
    dist.barrier()
    interval_s = save_slow.agreed(save_slow.train(job, **without)["seconds"] / saves)
    rows = [
        defaultdict(list, arm=f"max_pending_saves={number}", number=number, asked=saves) for number in (1, 2)
    ]
    for row in rows:
        row["save_s"] = takes * interval_s
    with save_slow.storage_that_takes(takes * interval_s):
        for turn, row in itertools.product(range(repeats), rows):
            with fresh_path(folder) as path:
                given = {**without, "root": path, "max_pending_saves": row["number"]}
                pair = [("base_", without), ("", given)]  # interleaved, and not always in the same order
                for field, which in pair if turn % 2 else reversed(pair):
                    dist.barrier()
                    found = save_slow.train(job, **which)
                    row[f"{field}seconds"].append(max(all_ranks(found["seconds"])))
                    if which is given:
                        row["written"].append(found["written"])
    return rows


def chosen(named: dict[str, Any], only: str) -> dict[str, Any]:
    return {name: arm for name, arm in named.items() if any(part in name for part in only.split(","))}


def new_rows(named: dict[str, Any], **facts: Any) -> dict[str, dict[str, Any]]:
    return {name: defaultdict(list, arm=name, **facts) for name in named}


def warm_up(folder: str, named: dict[str, Any], shards: str | None) -> None:
    """Saves something small, to finish imports and first uses."""
    state = save_shards.shard(arms_of.make_state(64 * MIB), shards or "")
    for arm in named.values():
        with fresh_path(folder) as path:
            wait = arm(state, path)
            if wait is not None:
                wait()


@contextmanager
def fresh_path(folder: str) -> Iterator[Path]:
    """Yields a free path, the same on all ranks, and removes it afterwards."""
    path = Path(folder, "saved", "checkpoint")
    gc.collect()
    if dist.get_rank() == 0:
        path.parent.mkdir()
        os.sync()
    dist.barrier()
    yield path
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path.parent)


def warm(path: Path) -> None:
    """Reads all files into the page cache: some savers bypass it."""
    for file in path.rglob("*") if dist.get_rank() == 0 else ():
        with file.open("rb", buffering=0) as stream:
            while stream.read(8 * MIB):
                pass


def stored_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    main()
