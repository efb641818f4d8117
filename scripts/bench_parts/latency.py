"""Loads from a storage with latency and a rate for each connection, and from the same storage without them.

Arms take turns in one job. Clients alone run on rank 0, and stand for what the storage gives one process.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.table import Table
from safetensors.torch import load_file

import fastload
from bench_parts.baselines import State
from bench_parts.job import GIB, MIB, all_ranks, run_on_ranks
from bench_parts.lab_arms import parse_tuned
from bench_parts.slow_storage import Limits, http_storage, traffic
from bench_parts.tables import print_table
from fastload import LoadOptions
from fastload.base.memory import allocate_staging
from fastload.formats.state import state_digest

PLAIN = "plain client, {} in flight"
REFERENCE = PLAIN.format(32)
RANGE_BYTES = 8 * MIB
NUM_FILES = 8
_CHECKPOINT = "checkpoint"
_LOGGED_S = 0.1  # after an answer's last byte, its line of the log


@dataclass(frozen=True)
class Store:
    """One way to the checkpoint.

    Attributes:
        name: ``slow`` or ``fast``.
        port: Of its server, as its log names it.
        url: Of the checkpoint.
        files: The checkpoint's files, and their bytes.
    """

    name: str
    port: int
    url: str
    files: dict[str, int]


# ---- the launcher


def measure(
    script: str, folder: Path, ranks: Sequence[int], size: int, limits: Limits, **settings: Any
) -> list[dict[str, Any]]:
    """Makes a checkpoint, serves it, and runs a job for each number of ranks; returns a row for each arm."""
    place = folder / "served" / _CHECKPOINT
    maker = [sys.executable, str(Path(__file__).parents[1] / "make_checkpoint.py"), str(place)]
    subprocess.run([*maker, "--size", str(size), "--files", str(NUM_FILES)], check=True)
    files = sorted(place.glob("*.safetensors"))
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    settings |= {"digest": state_digest(state), "nbytes": sum(tensor.nbytes for tensor in state.values())}
    del state
    settings["files"] = {file.name: file.stat().st_size for file in files}
    rows: list[dict[str, Any]] = []
    with http_storage(folder, folder / "served", limits) as server:
        settings["server"] = server
        for count in ranks:
            rows += run_on_ranks(script, count, str(folder), part="latency", **settings)
    return rows


def print_latency(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Prints a table for each number of ranks: seconds with the limits and without, ratios, and requests.

    Requests are those of the last run with the limits.
    """
    for count in sorted({row["ranks"] for row in rows}):
        table = Table(
            box=SIMPLE_HEAD,
            padding=0,
            collapse_padding=True,
            title=f"{title}, {count} rank{'s' if count > 1 else ''}",
        )
        heads = ("arm", "limits, s", "without, s", "÷\nwithout", "÷ plain\n32", "CPU s\nper GiB")
        for head in (*heads, "requests", "at once,\nmean", "at once,\nmost", "chain", "503"):
            table.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
        of_count = [row for row in rows if row["ranks"] == count]
        seconds = {(row["arm"], row["store"]): row["seconds"] for row in of_count}
        reference = seconds.get((REFERENCE, "slow"))
        for row in of_count:
            if row["store"] != "slow":
                continue
            slow, fast, seen = row["seconds"], seconds[row["arm"], "fast"], row["traffic"][-1]
            cells = [_spread(slow), _spread(fast), f"{median(slow) / median(fast):.2f}"]
            cells.append(f"{median(slow) / median(reference):.2f}" if reference else "")
            cells.append(f"{median(row['cpu_s']) / (row['nbytes'] / GIB):.2f}")
            cells += [f"{seen['requests']:,}", f"{seen['mean_at_once']:.1f}", f"{seen['most_at_once']}"]
            table.add_row(row["arm"], *cells, f"{seen['chain']}", f"{seen['refused']}")
        print_table(table)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


# ---- the ranks


def run(
    folder: str,
    digest: str,
    nbytes: int,
    files: dict[str, int],
    server: dict[str, Any],
    repeats: int,
    arms: str,
    tuned: Sequence[str],
) -> list[dict[str, Any]]:
    """Runs all arms by turns against both servers; returns their rows."""
    stores = [
        Store(name, server[name], f"http://127.0.0.1:{server[name]}/{_CHECKPOINT}", files)
        for name in ("slow", "fast")
    ]
    named = {
        name: load for name, load in make_arms(tuned).items() if any(part in name for part in arms.split(","))
    }
    rows = {
        (name, store.name): {
            "arm": name,
            "store": store.name,
            "ranks": dist.get_world_size(),
            "nbytes": nbytes,
            "seconds": [],
            "cpu_s": [],
            "traffic": [],
        }
        for name in named
        for store in stores
    }
    for turn in range(-1, repeats):  # the first one finishes imports, and checks what arrived
        for name, load in named.items():
            for store in stores:
                reports: list[dict[str, Any]] = []
                warm_memory(nbytes)
                logged = Path(server["log"]).stat().st_size
                dist.barrier()
                cpu_s, began = time.process_time(), time.perf_counter()
                state = load(store, reports)
                everyone = all_ranks((time.perf_counter() - began, time.process_time() - cpu_s))
                if turn < 0 and state:
                    assert state_digest(state) == digest, f"{name}: rank {dist.get_rank()} got other bytes"
                del state
                gc.collect()
                if turn >= 0:
                    row = rows[name, store.name]
                    row["seconds"].append(max(seconds for seconds, _ in everyone))
                    row["cpu_s"].append(sum(used for _, used in everyone))
                    row["report"] = reports[0] if reports else None
                    time.sleep(_LOGGED_S)
                    row["traffic"].append(asdict(traffic(new_lines(server["log"], logged, store.port))))
                dist.barrier()
    return list(rows.values())


def new_lines(log: str, begin: int, port: int) -> list[str]:
    """Returns the log's lines of one server from a position on."""
    with Path(log).open() as file:
        file.seek(begin)
        return [line for line in file if line.split()[2] == str(port)]


def warm_memory(nbytes: int) -> None:
    """Touches as much memory as the state takes, and frees it: a first touch may be slow."""
    allocate_staging(nbytes, pinned=False).zero_()


Load = Callable[[Store, list[dict[str, Any]]], State]


def make_arms(tuned: Sequence[str]) -> dict[str, Load]:
    """Returns the arms by name, and fastload once more for each of `tuned`: ``read_threads=32,…``."""
    arms: dict[str, Load] = {PLAIN.format(count): partial(plain_client, count) for count in (32, 64)}
    for text in ("", *tuned):
        arms[f"fastload {text}".strip()] = partial(fastload_all, parse_tuned(text) if text else {})
    return arms


def plain_client(in_flight: int, store: Store, reports: list[dict[str, Any]]) -> State:
    """Reads all files in ranges on rank 0, and keeps the bytes until all have arrived."""
    if dist.get_rank() == 0:
        received = asyncio.run(_get_all(store, in_flight))
        assert received == sum(store.files.values()), f"{received} bytes arrived"
    return {}


async def _get_all(store: Store, in_flight: int) -> int:
    from obstore.store import HTTPStore

    client = HTTPStore.from_url(store.url, client_options={"allow_http": True})
    wanted = iter(
        [
            (name, at, min(at + RANGE_BYTES, size))
            for name, size in store.files.items()
            for at in range(0, size, RANGE_BYTES)
        ]
    )
    parts = await asyncio.gather(*(_get_some(client, wanted) for _ in range(in_flight)))
    return sum(len(part) for some in parts for part in some)


async def _get_some(client: Any, wanted: Iterator[tuple[str, int, int]]) -> list[Any]:
    return [await client.get_range_async(name, start=begin, end=end) for name, begin, end in wanted]


def fastload_all(options: dict[str, Any], store: Store, reports: list[dict[str, Any]]) -> State:
    keep = LoadOptions(**options, on_report=lambda report: reports.append(report.to_dict()))
    return fastload.load(store.url, options=keep)
