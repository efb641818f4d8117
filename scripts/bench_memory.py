"""The memory tier on hosts of the lab: the cost of saves to memory, and of restores from memory.

    python scripts/bench_memory.py --hosts 4

As root, see scripts/lab. A job on all hosts saves a checkpoint to storage and keeps checkpoints in memory;
then its processes are killed. The next jobs restore from memory, from memory after a host has lost its
memory, and from storage. Links are capped, and count their bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click

LAB = Path(__file__).resolve().parent / "lab"
GOODPUT = 0.957  # of a capped link
NUM_TENSORS = 147
NUM_GENERATIONS = 9
TIMEOUT_S = 60.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default=4, show_default=True)
@click.option("--size", default=512, show_default=True, help="MiB of state.")
@click.option("--copies", default=2, show_default=True)
@click.option("--storage-rate", default="400mbit", show_default=True)
@click.option("--host-rate", default="2gbit", show_default=True)
@click.option("--memory", default="/dev/shm", show_default=True, help="Where each host gets a directory.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write all numbers there.")
def main(
    hosts: int, size: int, copies: int, storage_rate: str, host_rate: str, memory: str, json_path: str | None
) -> None:
    """Measure, and print a table."""
    rates = ["--host-rate", host_rate, "--storage-rate", storage_rate]
    subprocess.run([LAB / "up", str(hosts), *rates], check=True, stdout=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(dir=memory) as place:
            given = {"hosts": hosts, "size": size, "copies": copies, "place": place}
            rows = {"save": run("save", given), "memory": run("restore", given)}
            shutil.rmtree(Path(place, names(place)[1]))
            rows["one host replaced"] = run("restore", given)
            for name in names(place):
                shutil.rmtree(Path(place, name))
            rows["storage"] = run("restore", given)
    finally:
        subprocess.run([LAB / "down"], check=True, stdout=sys.stderr)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(rows, indent=1))
    show(rows, hosts, size << 20, bytes_per_s(storage_rate), bytes_per_s(host_rate))


def names(place: str) -> list[str]:
    return sorted(os.listdir(place))


def bytes_per_s(rate: str) -> float:
    match = re.fullmatch(r"(\d+)([mg])bit", rate)
    assert match is not None, rate
    return GOODPUT * int(match[1]) * {"m": 1e6, "g": 1e9}[match[2]] / 8


def counters() -> dict[str, Any]:
    done = subprocess.run([LAB / "bytes"], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(phase: str, given: dict[str, Any]) -> dict[str, Any]:
    """Runs a job on all hosts; returns rank 0's measurements, and the bytes that crossed the links."""
    with tempfile.NamedTemporaryFile("r") as results:
        settings = json.dumps({**given, "phase": phase, "results": results.name})
        before = counters()
        command = [LAB / "run", "--timeout", "280", "--", "python", __file__, settings]
        root = str(LAB.parents[1])
        subprocess.run(
            command, check=phase != "save", env=os.environ | {"PYTHONPATH": root}, stdout=sys.stderr
        )
        after = counters()
        row: dict[str, Any] = json.loads(results.read())
    row["storage_bytes"] = after["storage_tx"] - before["storage_tx"]
    row["most_in"] = max(after["hosts"][host]["rx"] - before["hosts"][host]["rx"] for host in after["hosts"])
    return row


def show(rows: dict[str, Any], hosts: int, nbytes: int, storage: float, link: float) -> None:
    floor_s, saved = nbytes / storage, rows.pop("save")
    print(f"{nbytes >> 20} MiB, {hosts} hosts: storage needs {floor_s:.1f} s")
    print(
        f"a save to memory: training waits for {saved['stall_s'] * 1e3:.0f} ms, the copy alone takes "
        f"{saved['copy_s'] * 1e3:.0f} ms; it counts after {saved['total_s']:.2f} s"
    )
    for name, row in rows.items():
        # Each byte is read by one host and sent to the others; an empty host needs all of them.
        need_s = nbytes * (1 if name == "one host replaced" else 1 - 1 / hosts) / link
        print(
            f"restore, {name:18} {row['restore_s']:6.2f} s = {row['restore_s'] / floor_s:.2f} x storage's, "
            f"{row['restore_s'] / need_s:.2f} x what the links need; from {row['source']}; "
            f"{row['storage_bytes'] / nbytes:.3f} x over the storage link, "
            f"{row['most_in'] / nbytes:.2f} x into a host; {row['cpu_s']:.1f} s of {os.cpu_count()} CPUs"
        )


# ---- the ranks


def job(settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import fastload

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    memory = Path(settings["place"], socket.gethostname())
    memory.mkdir(exist_ok=True)
    each = (settings["size"] << 20) // NUM_TENSORS // 4096 * 2048

    def state(step: int) -> dict[str, Any]:
        return {f"layer.{n}": torch.full((each,), n + step, dtype=torch.bfloat16) for n in range(NUM_TENSORS)}

    manager = fastload.CheckpointManager(
        "s3://lab/bench-memory",
        memory=memory,
        memory_every_steps=1,
        memory_copies=settings["copies"],
        options=fastload.SaveOptions(timeout_s=TIMEOUT_S),
    )
    keeper = manager._tier
    assert keeper is not None
    if settings["phase"] == "save":
        row = keep(manager, keeper, state, dist.get_world_size())
    else:
        into = state(0)
        dist.barrier()
        began, used_s = time.perf_counter(), sum(os.times()[:2])
        manager.restore(into=into)
        restore_s = slowest(time.perf_counter() - began)
        cpu_s = torch.tensor(sum(os.times()[:2]) - used_s)
        dist.all_reduce(cpu_s)
        assert manager.restored_step is not None
        wanted = state(manager.restored_step)
        assert all(torch.equal(into[name], wanted[name]) for name in wanted)
        row = {"restore_s": restore_s, "cpu_s": float(cpu_s), "source": manager.restored_from}
    if rank == 0:
        Path(settings["results"]).write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)  # like a kill: the memory tier stays


def slowest(seconds: float) -> float:
    """Returns the time of the slowest rank."""
    import torch
    import torch.distributed as dist

    most_s = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most_s, dist.ReduceOp.MAX)
    return float(most_s)


def keep(manager: Any, keeper: Any, state: Any, num_ranks: int) -> dict[str, Any]:
    """Saves to storage once, and to memory several times."""
    import torch
    import torch.distributed as dist

    manager.save(1, state(1))
    manager.wait()
    stalls, totals, copies = [], [], []
    for step in range(2, 2 + NUM_GENERATIONS):
        tensors = state(step)
        share = list(tensors.values())[: NUM_TENSORS // num_ranks + 1]
        into = [torch.empty_like(tensor).fill_(0) for tensor in share]
        dist.barrier()
        began = time.perf_counter()
        for tensor, copy in zip(share, into, strict=True):
            copy.copy_(tensor)
        copies.append(slowest(time.perf_counter() - began))
        assert manager.should_save(step)
        began = time.perf_counter()
        manager.save(step, tensors)
        stalls.append(slowest(time.perf_counter() - began))
        keeper.wait()
        assert keeper.last.report is not None, keeper.last.error
        totals.append(keeper.last.report.total_s)
    return {"stall_s": median(stalls[1:]), "total_s": median(totals[1:]), "copy_s": median(copies[1:])}


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        job(json.loads(sys.argv[1]))
    else:
        main()
