"""What the jobs on the lab's hosts share: what ranks tell each other, the counters, what rank 0 writes."""

from __future__ import annotations

import json
import os
import subprocess
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Ranks:
    """One rank's view of a job.

    Args:
        settings: What lab_control.py wrote: `results` is the file for the lines, `counter` the command
            that prints what crossed each link.
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

    def storage_bytes(self, way: str) -> int:
        """Bytes that have left the storage (`tx`) or entered it (`rx`) so far; on rank 0, elsewhere 0."""
        if self.rank != 0:
            return 0
        shown = subprocess.run(self.settings["counter"], stdout=subprocess.PIPE, check=True, text=True)
        return int(json.loads(shown.stdout)[f"storage_{way}"])

    def write(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            with Path(self.settings["results"]).open("a") as file:
                file.write(json.dumps(line) + "\n")


def describe(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


def own_cpu_s() -> float:
    """User and system seconds of this process."""
    return sum(os.times()[:2])
