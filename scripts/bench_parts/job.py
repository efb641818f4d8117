"""Shared parts of the benchmarks on one machine: jobs, and measurements of the system."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from fastload.errors import OptionError
from fastload.options import parse_bytes
from fastload.planning.units import parse_duration_s

MIB, GIB = 2**20, 2**30


class Bytes(click.ParamType[int]):
    """A size such as 512MiB, or with ``/s`` a rate such as 150MB/s."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value.removesuffix("/s"))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType[float]):
    """A time such as 50ms."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_duration_s(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)


def run_on_ranks(script: str, ranks: int, folder: str, **settings: Any) -> Any:
    """Runs a script's command `rank` under torchrun; returns rank 0's results."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*launcher, script, "rank", json.dumps({"folder": folder, **settings})], check=True)
    return json.loads(Path(folder, "rows.json").read_text())


def write_json(path: str | None, rows: Any) -> None:
    if path:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def all_ranks(value: Any) -> list[Any]:
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def forget_peak() -> int:
    """Returns this process's resident bytes, from which `peak_bytes` starts to count."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory
    Path("/proc/self/clear_refs").write_text("5")
    return proc_bytes("/proc/self/status", "VmRSS")


def peak_bytes() -> int:
    """Returns the peak resident bytes since `forget_peak`."""
    return proc_bytes("/proc/self/status", "VmHWM")


def available_bytes() -> int:
    return proc_bytes("/proc/meminfo", "MemAvailable")


def proc_bytes(path: str, field: str) -> int:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
