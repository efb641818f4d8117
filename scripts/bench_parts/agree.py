"""The cost of agreements by the number of ranks: threads of one process, with a real store."""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from rich.table import Table

from fastload.base.threads import within
from fastload.comm.cache import ConnectionCache
from fastload.comm.failures import require_same
from fastload.comm.group import join_in
from fastload.comm.rendezvous import Decision
from fastload.comm.responses import Each, join_responses, write_response
from fastload.comm.store import Member
from fastload.comm.tree import TreeLinks
from fastload.report import RankReport

from .tables import print_table

_TIMEOUT_S = 120.0
_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
_ANSWER = {"value": {"plan": "fc89f712c219374e6cb510905f7f6283"}}
_TABLE = write_response(0, _ANSWER)
_PLACES = {"tree": True, "store": False}


def measure(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Measures agreements of ranks, along a tree and in the store.

    Returns:
        For each number of ranks and each way: seconds of the call that makes the tree, and of one agreement
        in later calls, CPU seconds of the server for it, and bytes of a rank's response.
    """
    server, port = _serve()
    try:
        return [_measure(port, server.pid, size, way, repeats) for size in sizes for way in _PLACES]
    finally:
        _end(server)


def measure_parts(num_ranks: int, repeats: int) -> dict[str, float]:
    """Measures the parts of an agreement of many ranks in `fastload plan`, in microseconds.

    Returns:
        CPU time of the store for one request, and of a rank for the response of a rank below it and the
        decision to that one; time until the store has a decision, and of a message between two processes; CPU
        time for a rank's description of itself in a load, sent up the tree and parsed; and its size in bytes.
    """
    server, port = _serve()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        for _ in range(2):  # the first one warms up
            began_s = _cpu_s(server.pid)
            for _ in range(repeats):
                store.add("0/lives", 1)
                store.compare_set("1/at/0", "?", "?")
        request_s = (_cpu_s(server.pid) - began_s) / repeats / 2
        decision_s = _median_s(
            lambda step: within(60, "it", lambda: store.compare_set(f"{step}", "", _TABLE)), repeats
        )
    finally:
        _end(server)
    parts = {
        "request": request_s,
        "decision": decision_s,
        "hop": _measure_hop(repeats),
        "answer": _measure_answer(repeats),
    }
    told_s, told_bytes = _measure_descriptions(num_ranks)
    return {name: 1e6 * seconds for name, seconds in {**parts, "told": told_s}.items()} | {
        "bytes": told_bytes
    }


def _measure_hop(repeats: int) -> float:
    near, far = _connected()
    if not (child := os.fork()):
        links = TreeLinks(1, {0: far})
        for step in range(repeats):
            links.receive([0], (1, step), lambda: 1.0)
            links.send([0], (1, step), _TABLE, b"")
        os._exit(0)
    links = TreeLinks(0, {1: near})

    def go(step: int) -> None:
        links.send([1], (1, step), _TABLE, b"")
        links.receive([1], (1, step), lambda: 1.0)

    there_and_back_s = _median_s(go, repeats)
    os.waitpid(child, 0)
    links.drop()
    far.close()
    return there_and_back_s / 2


def _measure_answer(repeats: int) -> float:
    pairs = dict(enumerate((_connected() for _ in range(7)), 1))
    above = TreeLinks(0, {rank: near for rank, (near, _) in pairs.items()})
    below = {rank: TreeLinks(rank, {0: far}) for rank, (_, far) in pairs.items()}
    spent_s = 0.0
    for step in range(repeats):
        for rank, links in below.items():
            links.send([0], (1, step), write_response(rank, _ANSWER), b"")
        began_s = time.thread_time()
        tables = [table for table, _ in above.receive(pairs, (1, step), lambda: 1.0)]
        above.send(pairs, (1, step), join_responses([write_response(0, _ANSWER), *tables]), b"")
        spent_s += time.thread_time() - began_s
        for links in below.values():
            links.receive([0], (1, step), lambda: 1.0)
    for links in (above, *below.values()):
        links.drop()
    return spent_s / repeats / len(pairs)


def _measure_descriptions(num_ranks: int) -> tuple[float, float]:
    """Returns CPU seconds and bytes of a rank's description: joined on each level, parsed by one rank."""
    draw = random.Random(0)

    def report(rank: int) -> RankReport:
        read_s, exchange_s, total_s = (draw.uniform(2, 3) for _ in range(3))
        return RankReport(
            rank=rank, host=f"host{rank // 8}", reader=True, bytes_read=10**9 + rank % 2, read_s=read_s,
            exchange_s=exchange_s, total_s=total_s,
        )  # fmt: skip

    def steps(rank: int) -> Iterator[dict[str, Any]]:
        same = {"files": _TABLE, "plan": _TABLE}
        machine = xxhash.xxh3_64_hexdigest(str(rank // 8).encode())
        yield {"host": Each([f"host{rank // 8}"]), "value": {**same, "machine": Each([machine])}}
        yield {"value": same}
        yield {"value": {**same, "report": Each(report(rank).pack())}}

    spent_s, num_bytes = 0.0, 0
    for answers in zip(*map(steps, range(num_ranks)), strict=True):
        tables = [write_response(rank, {"error": None, **answer}) for rank, answer in enumerate(answers)]
        while len(tables) > 1:
            began_s = time.thread_time()
            tables = [join_responses(tables[begin : begin + 8]) for begin in range(0, len(tables), 8)]
            spent_s += (time.thread_time() - began_s) / len(tables)
        num_bytes += len(tables[0])
        text = Decision.write(1.0, tables[0], in_tree=True)
        began_s = time.thread_time()
        decision = Decision.from_text(text, num_ranks)
        values = decision.values
        require_same(values, "files", "plan")
        if decision.nodes is not None:
            assert len(decision.nodes.by_rank()) == len(values[0]["machine"][0].values())
        spent_s += time.thread_time() - began_s
    return spent_s / num_ranks, num_bytes / num_ranks


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def _median_s(call: Callable[[int], object], repeats: int) -> float:
    taken_s = []
    for step in range(repeats):
        began_s = time.perf_counter()
        call(step)
        taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s)


def _serve() -> tuple[subprocess.Popen[str], int]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    return server, int(server.stdout.readline())


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def _measure(port: int, server: int, size: int, way: str, repeats: int) -> dict[str, Any]:
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(min(size, 64))]
    corners = [dist.PrefixStore(f"{way} {size}", stores[rank % len(stores)]) for rank in range(size)]
    caches = [ConnectionCache() if _PLACES[way] else None for _ in range(size)]
    begun = threading.Barrier(size)
    num_steps = 4
    rows: list[tuple[float, float, float]] = []

    def be(rank: int) -> None:
        for _ in range(1 + repeats):
            begun.wait()
            began, server_s, own_s = time.perf_counter(), _cpu_s(server), time.process_time()
            member, cache = Member(rank, size), caches[rank]
            world = join_in(corners[rank], member, call="agreeing", timeout_s=_TIMEOUT_S, cache=cache)
            for _ in range(num_steps):
                with world.step() as step:
                    step.answer({"plan": "0123456789abcdef", "host": f"host{rank // 8}"})
            world.acknowledge()
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
    for one in filter(None, caches):
        one.close()
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
    """Returns the CPU seconds of a process's threads, exact to some nanoseconds."""
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


def print_parts(parts: dict[str, float]) -> None:
    """Prints the parts of agreements; see `measure_parts`."""
    table = Table(title="What agreements are made of, µs")
    for name in parts:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.1f}" for value in parts.values()))
    print_table(table)
