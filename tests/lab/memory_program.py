"""What a rank on a lab host runs: steps that are kept in memory, and a line on disk for each.

memory_program.py FOLDER
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fastload


def main() -> None:
    folder = Path(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    own = folder / socket.gethostname()
    own.mkdir(parents=True, exist_ok=True)
    options = fastload.SaveOptions(timeout_s=6)
    manager = fastload.CheckpointManager(folder / "root", memory=own, memory_every_steps=1, options=options)
    tier = manager._tier
    assert tier is not None
    with (folder / f"{dist.get_rank()}.lines").open("w", buffering=1) as lines:
        for step in itertools.count(1):
            last = tier.last
            if last is not None and last.done():
                counted = int(last.report.url.rpartition("_")[2]) if last.report is not None else 0
                lines.write(json.dumps({"step": step, "counted": counted, "error": last.error}) + "\n")
            if manager.should_save(step):
                manager.save(step, {"weight": torch.full((3_000_000,), float(step))})
            time.sleep(0.05)


if __name__ == "__main__":
    main()
