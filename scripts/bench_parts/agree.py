"""What ranks take to agree, the more there are: threads of one process, on a real store."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from fastload.ranks.kept import Kept
from fastload.ranks.world import join_in

from .tables import print_table

_TIMEOUT_S = 120.0
_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
_PLACES = {"tree": True, "store": False}


def measure(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Measures agreements of so many ranks, along a tree and in the store.

    Returns:
        For each number of ranks and way: seconds of the call that makes the tree, and of one agreement in the
        calls after it, CPU seconds of the server for it, and bytes of a rank's answer.
    """
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        return [_measure(port, server.pid, size, way, repeats) for size in sizes for way in _PLACES]
    finally:
        server.stdin.close()
        server.wait()


def _measure(port: int, server: int, size: int, way: str, repeats: int) -> dict[str, Any]:
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(min(size, 64))]
    corners = [dist.PrefixStore(f"{way} {size}", stores[rank % len(stores)]) for rank in range(size)]
    kept = [Kept() if _PLACES[way] else None for _ in range(size)]
    begun = threading.Barrier(size)
    num_steps = 4
    rows: list[tuple[float, float, float]] = []

    def be(rank: int) -> None:
        for _ in range(1 + repeats):
            begun.wait()
            began, server_s, own_s = time.perf_counter(), _cpu_s(server), time.process_time()
            world = join_in(
                corners[rank], rank=rank, size=size, call="agreeing", timeout_s=_TIMEOUT_S, kept=kept[rank]
            )
            for _ in range(num_steps):
                world.agree("agreeing", lambda: {"plan": "0123456789abcdef", "host": f"host{rank // 8}"})
            world.heard()
            begun.wait()
            if rank == 0:
                rows.append(
                    (
                        time.perf_counter() - began,
                        _cpu_s(server) - server_s,
                        time.process_time() - own_s,
                    )
                )

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(be, range(size)))
    for one in filter(None, kept):
        one.end()
    first, *later = rows
    wall_s, server_s, own_s = (statistics.median(column) / num_steps for column in zip(*later, strict=True))
    return {
        "ranks": size,
        "way": way,
        "first_call_s": first[0],
        "first_server_s": first[1],
        "agreement_s": wall_s,
        "server_s": server_s,
        "rank_s": own_s / size,
    }


def _cpu_s(pid: int) -> float:
    """Returns what the threads of a process have used, in seconds; exact to some nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def print_agreements(rows: list[dict[str, Any]]) -> None:
    """Prints milliseconds of an agreement."""
    table = Table(title="Agreements of threads of one process")
    table.add_column("ranks", justify="right")
    table.add_column("along", no_wrap=True)
    for name in ("first call, ms", "store's CPU", "an agreement, ms", "store's CPU", "CPU of a rank, µs"):
        table.add_column(name, justify="right")
    for row in rows:
        milliseconds = (
            row[name] * 1e3 for name in ("first_call_s", "first_server_s", "agreement_s", "server_s")
        )
        cells = [*(f"{value:,.1f}" for value in milliseconds), f"{row['rank_s'] * 1e6:,.0f}"]
        table.add_row(f"{row['ranks']:,}", row["way"], *cells)
    print_table(table)
