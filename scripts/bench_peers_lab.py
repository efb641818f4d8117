"""Times and bytes of hosts that stage one checkpoint at different times, with each other as peers.

    scripts/lab/setup
    .venv/bin/python scripts/bench_peers_lab.py     (as root)

The hosts are those of scripts/lab, on this machine: network namespaces with capped links. Each is a job of
its own: it serves its copy while it makes it, and stays. Bytes are those over the link of the storage.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from bench_lab import need
from bench_parts.job import Bytes
from bench_parts.lab_control import exit_on_signals, lab

import fastload

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS / "lab"))

import network  # noqa: E402  (the lab's own modules)
import services  # noqa: E402

PORT = 7070
NET_NAMESPACE = 0x40000000  # CLONE_NEWNET
LAG_S = 1.0  # from the fork of the hosts to the first arrival
GOODPUT = 0.957  # of the rate of a link
FLOOR_TEXT = "the time that the link of the storage needs for one copy"


def fork(work: Callable[[], object]) -> int:
    """Runs a function in a fork of this process."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def enter(host: int) -> None:
    """Moves this process to the network of a host."""
    with open(network.NETNS_DIR / network.host_name(host)) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NET_NAMESPACE):
            raise OSError(ctypes.get_errno(), "setns")


def stage(host: int, at_s: float, folder: Path, num_hosts: int, *, with_peers: bool) -> None:
    """Is a host: arrives at a time, stages, says how, and serves its copy until it is killed."""
    enter(host)
    time.sleep(max(0.0, at_s - time.monotonic()))
    address = network.address_of(network.host_name(host))
    addresses = [f"http://{network.address_of(network.host_name(n))}:{PORT}" for n in range(1, num_hosts + 1)]
    with fastload.serve(None, host=address, port=PORT, insecure=True) as server:
        sources = [fastload.peers(*addresses)] if with_peers else []
        options = fastload.StageOptions(sources=sources, on_copy=server.follow, timeout_s=120)
        report = fastload.stage(f"{services.HTTP_URL}/ckpt", folder / str(host) / "ckpt", options=options)
        own = report.ranks[0]
        row = {
            "host": host, "total_s": report.total_s, "bytes_read": own.bytes_read,
            "bytes_supplied": own.bytes_supplied, "problems": own.problems,
        }  # fmt: skip
        (folder / f"{host}.part").write_text(json.dumps(row))
        (folder / f"{host}.part").rename(folder / f"{host}.json")
        time.sleep(600)


def run_arm(
    arrivals: Sequence[float], *, with_peers: bool = True, timeout_s: float = 300.0
) -> tuple[list[dict[str, Any]], int]:
    """Returns what the hosts say, and the bytes that the storage has sent."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fastload-peers-"))
    before = network.counters(network.STORAGE)["tx"]
    begin_s = time.monotonic() + LAG_S
    pids = [
        fork(lambda n=n, s=s: stage(n, begin_s + s, folder, len(arrivals), with_peers=with_peers))
        for n, s in enumerate(arrivals, 1)
    ]
    try:
        while len(found := sorted(folder.glob("*.json"))) < len(arrivals):
            if time.monotonic() > begin_s + timeout_s:
                raise click.ClickException(f"only {len(found)} of {len(arrivals)} hosts have ended")
            time.sleep(0.1)
        rows = [json.loads(path.read_text()) for path in found]
        return rows, network.counters(network.STORAGE)["tx"] - before
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(folder)


def save(folder: Path, nbytes: int) -> None:
    """Saves a checkpoint of random bytes."""
    generator = torch.Generator().manual_seed(0)
    count = nbytes // 64
    state = {f"t{n}": torch.randint(256, (count,), dtype=torch.uint8, generator=generator) for n in range(64)}
    fastload.save(state, folder, options=fastload.SaveOptions(max_shard_bytes=nbytes // 8))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default=8, show_default=True, help="Number of hosts.")
@click.option("--size", type=Bytes(), default="512MiB", show_default=True, help="Bytes of the checkpoint.")
@click.option("--seed", default=0, show_default=True, help="Of the times of arrival.")
@click.option("--alone", is_flag=True, help="Also hosts without peers, which takes long.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all numbers there.")
def main(hosts: int, size: int, seed: int, alone: bool, json_path: Path | None) -> None:
    """Measure how many bytes hosts read that come at the same time, and at different ones."""
    need("ip", "nginx")
    exit_on_signals()
    torch.set_num_threads(1)
    draw = random.Random(seed)
    arms: dict[str, tuple[list[float], bool]] = {
        "in the same second": ([draw.random() for _ in range(hosts)], True),
        "within 60 s": ([60 * draw.random() for _ in range(hosts)], True),
        "one after the first": ([0.0, 40.0], True),
    }
    if alone:
        arms["in the same second, without peers"] = ([0.0] * hosts, False)
    results = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        checkpoint = Path(folder) / "ckpt"
        os.waitpid(fork(lambda: save(checkpoint, size)), 0)
        nbytes = sum(path.stat().st_size for path in checkpoint.iterdir())
        lab("up", str(hosts), "--host-rate", "2gbit", "--storage-rate", "400mbit")
        try:
            lab("put", str(checkpoint), "ckpt")
            floor_s, link_s = (nbytes * 8 / (GOODPUT * rate) for rate in (400e6, 2e9))
            for name, (arrivals, with_peers) in arms.items():
                rows, sent = run_arm(arrivals, with_peers=with_peers)
                slowest = max(row["total_s"] for row in rows)
                last = max(rows, key=lambda row: arrivals[row["host"] - 1])
                results[name] = {"arrivals": arrivals, "rows": rows, "sent": sent}
                click.echo(
                    f"{name}: {sent / nbytes:.3f} × the bytes over the link of the storage; slowest host "
                    f"{slowest:.1f} s = {slowest / floor_s:.2f} × {FLOOR_TEXT}; last host to come "
                    f"{last['total_s']:.2f} s = {last['total_s'] / link_s:.2f} × what its own link needs"
                )
                for row in rows:
                    if row["problems"]:
                        click.echo(f"  host {row['host']}: {row['problems']}")
        finally:
            lab("down")
    if json_path is not None:
        json_path.write_text(json.dumps({"size": size, "nbytes": nbytes, "arms": results}))


if __name__ == "__main__":
    main()
