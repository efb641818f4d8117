"""Loads from a storage with latency and a rate for each connection, and from the same storage without them.

Arms take turns in one job. Clients alone run on rank 0, and stand for what the storage gives one process.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
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
from bench_parts.lab_arms import parse_tuned, set_peer_env
from bench_parts.slow_storage import (
    BUCKET,
    KEY,
    REGION,
    SECRET,
    Limits,
    http_storage,
    s3_client,
    s3_storage,
    traffic,
)
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
        is_s3: Whether it is one of S3, and not of HTTP.
        files: The checkpoint's files, and their bytes.
    """

    name: str
    port: int
    is_s3: bool
    files: dict[str, int]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """URL of the checkpoint."""
        return f"s3://{BUCKET}/{_CHECKPOINT}" if self.is_s3 else f"{self.endpoint}/{_CHECKPOINT}"

    @property
    def settings(self) -> dict[str, Any]:
        """How obstore and fastload reach it."""
        if not self.is_s3:
            return {}
        keys = {"access_key_id": KEY, "secret_access_key": SECRET, "region": REGION}
        return {"endpoint": self.endpoint, **keys}


Arm = Callable[[Store, list[dict[str, Any]]], State]


# ---- the launcher


def measure(
    script: str, folder: Path, ranks: Sequence[int], size: int, limits: Limits, is_s3: bool, **settings: Any
) -> Iterator[list[dict[str, Any]]]:
    """Makes a checkpoint, serves it, and runs a job for each number of ranks; yields a row for each arm."""
    place = folder / "served" / _CHECKPOINT
    maker = [sys.executable, str(Path(__file__).parents[1] / "make_checkpoint.py"), str(place)]
    subprocess.run([*maker, "--size", str(size), "--files", str(NUM_FILES)], check=True)
    files = sorted(place.glob("*.safetensors"))
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    settings |= {"digest": state_digest(state), "nbytes": sum(tensor.nbytes for tensor in state.values())}
    del state
    settings["files"] = {file.name: file.stat().st_size for file in files}
    storage = s3_storage(folder, limits) if is_s3 else http_storage(folder, folder / "served", limits)
    with storage as server:
        if is_s3:
            client = s3_client(server["store"])
            for file in place.iterdir():
                client.upload_file(str(file), BUCKET, f"{_CHECKPOINT}/{file.name}")
        settings["server"] = server
        for count in ranks:
            yield run_on_ranks(script, count, str(folder), part="latency", **settings)


def print_latency(rows: Sequence[dict[str, Any]], title: str, reference: str, short: str) -> None:
    """Prints a table for each number of ranks: seconds with the limits and without, ratios, and requests.

    Requests are those of the last run with the limits.

    Args:
        rows: Of all arms.
        title: Of each table.
        reference: The arm to compare with.
        short: Its name in the table's head.
    """
    for count in sorted({row["ranks"] for row in rows}):
        table = Table(
            box=SIMPLE_HEAD,
            padding=0,
            collapse_padding=True,
            title=f"{title}, {count} rank{'s' if count > 1 else ''}",
        )
        heads = ("arm", "limits, s", "without, s", "÷\nwithout", f"÷\n{short}", "CPU s\nper GiB")
        for head in (*heads, "requests", "at once,\nmean", "at once,\nmost", "chain", "503"):
            table.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
        of_count = [row for row in rows if row["ranks"] == count]
        seconds = {(row["arm"], row["store"]): row["seconds"] for row in of_count}
        other = seconds.get((reference, "slow"))
        for row in of_count:
            if row["store"] != "slow":
                continue
            slow, fast, seen = row["seconds"], seconds[row["arm"], "fast"], row["traffic"][-1]
            cells = [_spread(slow), _spread(fast), f"{median(slow) / median(fast):.2f}"]
            cells.append(f"{median(slow) / median(other):.2f}" if other else "")
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
    stores = [Store(name, server[name], "store" in server, files) for name in ("slow", "fast")]
    made = make_arms(tuned, is_s3="store" in server)
    named = {name: load for name, load in made.items() if any(part in name for part in arms.split(","))}
    return by_turns(named, stores, server["log"], nbytes, repeats, digest=digest)


def by_turns(
    named: dict[str, Arm],
    stores: Sequence[Store],
    log: str,
    nbytes: int,
    repeats: int,
    *,
    digest: str = "",
    clean: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs all arms by turns against both servers; returns their rows.

    Args:
        named: The arms.
        stores: The servers.
        log: Path of their log.
        nbytes: Bytes that an arm moves.
        repeats: Runs that count; one before them finishes imports.
        digest: Of the state that arms return, if they do; that of the first run is compared.
        clean: Called on rank 0 after each run.
    """
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
    for turn in range(-1, repeats):
        for name, arm in named.items():
            for store in stores:
                reports: list[dict[str, Any]] = []
                warm_memory(nbytes)
                logged = Path(log).stat().st_size
                dist.barrier()
                cpu_s, began = time.process_time(), time.perf_counter()
                state = arm(store, reports)
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
                    seen = traffic(new_lines(log, logged, store.port))
                    assert seen.requests, f"{name} asked another server"
                    row["traffic"].append(asdict(seen))
                if clean is not None and dist.get_rank() == 0:
                    clean()
                dist.barrier()
    return list(rows.values())


def new_lines(log: str, begin: int, port: int) -> list[str]:
    """Returns the log's lines of one server from a position on."""
    with Path(log).open() as file:
        file.seek(begin)
        return [line for line in file if line.split()[2] == str(port)]


def warm_memory(nbytes: int) -> None:
    """Touches as much memory as the state takes, and frees it, so that no run finds memory of its own kind.

    On a virtual machine the first touch of memory that the host has taken back is slow. Memory that an arm
    has freed, but that malloc keeps, would be of use to that arm alone.
    """
    ctypes.CDLL(None).malloc_trim(0)
    allocate_staging(nbytes, pinned=False).zero_()


def make_arms(tuned: Sequence[str], *, is_s3: bool) -> dict[str, Arm]:
    """Returns the arms by name, and fastload once more for each of `tuned`: ``read_threads=32,…``."""
    arms: dict[str, Arm] = {PLAIN.format(count): partial(plain_client, count) for count in (32, 64)}
    if is_s3:
        others: dict[str, tuple[str, Arm]] = {
            "boto3, as aws s3 cp does": ("boto3", boto3_client),
            "s3fs, all files": ("s3fs", s3fs_client),
            "runai streamer": ("runai_model_streamer_s3", runai_streamer),
        }
        arms |= {name: load for name, (module, load) in others.items() if importlib.util.find_spec(module)}
    arms["fastload, into tensors that exist"] = partial(fastload_into, {})
    for text in ("", *tuned):
        arms[f"fastload {text}".strip()] = partial(fastload_all, parse_tuned(text) if text else {})
    return arms


# ---- clients alone: rank 0 keeps the bytes until all have arrived


def plain_client(in_flight: int, store: Store, reports: list[dict[str, Any]]) -> State:
    """Reads all files in ranges with obstore."""
    if dist.get_rank() == 0:
        check(store, asyncio.run(_get_all(store, in_flight)))
    return {}


async def _get_all(store: Store, in_flight: int) -> int:
    from obstore.store import HTTPStore, S3Store

    options: Any = {"client_options": {"allow_http": True}}
    if store.is_s3:
        client: Any = S3Store(BUCKET, prefix=_CHECKPOINT, **store.settings, **options)
    else:
        client = HTTPStore.from_url(store.url, **options)
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


def boto3_client(store: Store, reports: list[dict[str, Any]]) -> State:
    """Downloads all files as ``aws s3 cp --recursive`` does by default, but into memory: 10 at once."""
    from s3transfer.manager import TransferConfig, TransferManager

    if dist.get_rank() == 0:
        client = s3_client(store.port, max_pool_connections=10)
        with TransferManager(client, TransferConfig(max_request_concurrency=10)) as manager:
            buffers = [BytesIO() for _ in store.files]
            waiting = [
                manager.download(BUCKET, f"{_CHECKPOINT}/{name}", buffer)
                for name, buffer in zip(store.files, buffers, strict=True)
            ]
            for download in waiting:
                download.result()
        check(store, sum(buffer.getbuffer().nbytes for buffer in buffers))
    return {}


def s3fs_client(store: Store, reports: list[dict[str, Any]]) -> State:
    """Reads all files at once, each with one request."""
    import s3fs

    if dist.get_rank() == 0:
        client = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=store.endpoint)
        found = client.cat([f"{BUCKET}/{_CHECKPOINT}/{name}" for name in store.files])
        check(store, sum(map(len, found.values())))
    return {}


def check(store: Store, received: int) -> None:
    assert received == sum(store.files.values()), f"{received} bytes arrived"


# ---- loads of all ranks


def runai_streamer(store: Store, reports: list[dict[str, Any]]) -> State:
    set_peer_env()
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
    os.environ["AWS_ENDPOINT_URL"] = store.endpoint
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        files = [f"{store.url}/{name}" for name in store.files]
        streamer.stream_files(files, device="cpu", is_distributed=dist.get_world_size() > 1)
        # Each tensor is of use only until the next one arrives, unless the load is distributed.
        return {name: tensor.clone().detach() for name, tensor in streamer.get_tensors()}


def fastload_into(into: State, store: Store, reports: list[dict[str, Any]]) -> State:
    """Loads into the same tensors each time; the first run makes them."""
    into.update(into or fastload.load(store.url, storage_options=store.settings or None))
    options = LoadOptions(on_report=lambda report: reports.append(report.to_dict()))
    fastload.load(store.url, into=into, storage_options=store.settings or None, options=options)
    return dict(into)


def fastload_all(options: dict[str, Any], store: Store, reports: list[dict[str, Any]]) -> State:
    keep = LoadOptions(**options, on_report=lambda report: reports.append(report.to_dict()))
    return fastload.load(store.url, storage_options=store.settings or None, options=keep)
