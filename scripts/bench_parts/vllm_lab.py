"""Loads of a model by the workers of one vLLM engine, one on each lab host: the jobs of bench_engines.py.

python -m bench_parts.vllm_lab SETTINGS.json     (under torchrun)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench_parts.lab_control import S3_ROOT, SFTP, Checkpoint, Lab, run_arms, services
from bench_parts.lab_ranks import Ranks, describe, mounted
from bench_parts.tables import FLOOR
from bench_parts.vllm_loads import load
from tests.engines.engine import ENVIRONMENT, engine

__all__ = ["ARMS", "measure"]

ARMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    FLOOR: ("", "HTTP", {}),
    "auto": ("auto", "mount", {}),
    "runai_streamer": ("runai_streamer", "mount", {}),
    "runai_streamer, S3": ("runai_streamer", "S3", {}),
    "runai_streamer, S3, distributed": ("runai_streamer", "S3", {"distributed": True}),
    "fastload, mount": ("fastload", "mount", {}),
    "fastload, S3": ("fastload", "S3", {}),
    "fastload, HTTP": ("fastload", "HTTP", {}),
}
"""Name → load format, what is read, extra config."""

_NAME = "llama"
_PEERS = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0", "RUNAI_STREAMER_DIST": "1"}
_BLOCK_BYTES = 4 << 20
_TIMEOUT_S = 600.0


def measure(
    folder: Path, hosts: int, rates: Sequence[str], repeats: int, arms: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Brings a lab up, and measures loads of the model in a folder; as root.

    Returns:
        The medians of each arm, and why arms did not run.
    """
    os.environ["VIRTUAL_ENV"] = sys.prefix  # the lab runs its python
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with Lab(hosts, rates, {_NAME: Checkpoint(folder, "", nbytes)}):
        given = {"folder": str(folder), "repeats": repeats, "sftp": SFTP}
        outcome = run_arms("bench_parts.vllm_lab", arms, given)
    rows = [
        {
            "arm": arm,
            **{
                name: statistics.median(row[name] for row in outcome.rows if row["arm"] == arm)
                for name in ("seconds", "cpu_s", "storage_bytes", "exchanged_bytes", "peak_bytes")
            },
        }
        for arm in dict.fromkeys(row["arm"] for row in outcome.rows)
    ]
    return rows, outcome.failed


class Job(Ranks):
    """What a rank does: all arms in turn; the first turn does not count."""

    def run(self, llm: Any) -> None:
        working = self.settings["arms"]
        for turn in range(-1, self.settings["repeats"]):
            working = [arm for arm in working if self.run_once(llm, arm, turn)]

    def run_once(self, llm: Any, arm: str, turn: int) -> bool:
        """Runs one arm on all ranks; returns whether all of them managed."""
        self.write({"begin": arm, "turn": turn})
        load_format, reads, extra = ARMS[arm]
        with contextlib.ExitStack() as stack:
            error, place, row = "", "", (0.0, 0.0, 0)
            try:
                place = self.place(reads, stack)
            except Exception as caught:
                error = describe(caught)
            if self.gather(error, {}) is None:
                return False
            before = self.crossed()
            try:
                if load_format:
                    (row,) = llm.collective_rpc(load, args=(load_format, extra, place))
                elif self.rank == 0:
                    row = stream(place, Path(self.settings["folder"]))
            except Exception as caught:
                error = describe(caught)
            rows = self.gather(error, dict(zip(("seconds", "cpu_s", "peak_bytes"), row, strict=True)))
            if rows is None:
                return False
            crossed = self.crossed() - before
        self.write(
            {
                "arm": arm,
                "turn": turn,
                "seconds": max(row["seconds"] for row in rows),
                "cpu_s": sum(row["cpu_s"] for row in rows),
                "peak_bytes": max(row["peak_bytes"] for row in rows),
                "storage_bytes": crossed.read,
                "exchanged_bytes": crossed.exchanged,
            }
        )
        return True

    def place(self, reads: str, stack: contextlib.ExitStack) -> str:
        """Returns where the model is; a mount is made for this run, so that nothing of it is cached."""
        if reads == "mount":
            folder = Path(self.settings["results"]).with_name("mount")
            stack.enter_context(mounted(*self.settings["sftp"], folder, "ro"))
            return str(folder / _NAME)
        return f"{S3_ROOT if reads == 'S3' else services.HTTP_URL}/{_NAME}"


def stream(url: str, folder: Path) -> tuple[float, float, int]:
    """Reads every byte once, and drops it: the least time that the link allows."""
    began, cpu = time.perf_counter(), time.process_time()
    for path in sorted(folder.glob("*.safetensors")):
        with urllib.request.urlopen(f"{url}/{path.name}") as response:
            while response.read(_BLOCK_BYTES):
                pass
    return time.perf_counter() - began, time.process_time() - cpu, 0


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0", **_PEERS)
    communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    # Lab hosts are on one machine, but hosts share no memory.
    communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda own: False
    workers = int(os.environ["WORLD_SIZE"])
    with engine(
        Path(settings["folder"]), "dummy", workers, distributed_executor_backend="external_launcher"
    ) as started:
        Job(settings).run(started.llm)
        dist.barrier()


if __name__ == "__main__":
    main()
