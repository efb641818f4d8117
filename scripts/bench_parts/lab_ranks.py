"""Shared parts of the jobs on the lab's hosts: exchange between ranks, link counters, results of rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

_MOUNT_S = 20.0


@dataclass(frozen=True)
class Crossed:
    """Bytes that crossed the lab's links.

    Attributes:
        read: From the storage to hosts.
        written: From hosts to the storage.
        exchanged: From hosts to hosts.
        entered: Into each host.
        left: Out of each host.
    """

    read: int
    written: int
    exchanged: int
    entered: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    def __sub__(self, earlier: Crossed) -> Crossed:
        return Crossed(
            self.read - earlier.read,
            self.written - earlier.written,
            self.exchanged - earlier.exchanged,
            tuple(now - before for now, before in zip(self.entered, earlier.entered, strict=True)),
            tuple(now - before for now, before in zip(self.left, earlier.left, strict=True)),
        )


class Ranks:
    """One rank's view of a job.

    Args:
        settings: Written by lab_control.py: `results` is the file for the lines, `counter` the command that
            prints the bytes on each link.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.rank = dist.get_rank()

    def gather(self, error: str, row: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Returns every rank's row, or None on all ranks if one of them has an error, which is written."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (error, row))
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(everyone) if error]
        if errors:
            self.write({"error": errors[0]})
            return None
        return [row for _, row in everyone]

    def crossed(self) -> Crossed:
        """Bytes that have crossed the links so far; on rank 0, elsewhere 0."""
        if self.rank != 0:
            return Crossed(0, 0, 0)
        shown = subprocess.run(self.settings["counter"], stdout=subprocess.PIPE, check=True, text=True)
        counts = json.loads(shown.stdout)
        hosts = counts["hosts"].values()
        return Crossed(
            counts["storage_tx"],
            counts["storage_rx"],
            sum(host["tx"] for host in hosts) - counts["storage_rx"],
            tuple(host["rx"] for host in hosts),
            tuple(host["tx"] for host in hosts),
        )

    def write(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            with Path(self.settings["results"]).open("a") as file:
                file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def mounted(server: str, port: int, folder: Path, options: str) -> Iterator[int]:
    """Mounts the storage over SFTP without a cache; yields the pid of the client."""
    folder.mkdir(exist_ok=True)
    client = subprocess.Popen(["sshfs", "-f", "-o", f"{options},directport={port}", server, str(folder)])
    try:
        until = time.monotonic() + _MOUNT_S
        while not folder.is_mount():
            if client.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"sshfs {server} does not mount on {socket.gethostname()}")
            time.sleep(0.01)
        yield client.pid
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(_MOUNT_S)
        client.kill()
        client.wait()


def describe(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


def own_cpu_s() -> float:
    """User and system seconds of this process."""
    return sum(os.times()[:2])
