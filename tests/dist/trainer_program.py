"""A training that saves one version after the other: trainer_program.py ROOT NUM_VERSIONS PAUSE_S"""

from __future__ import annotations

import sys
import time

import torch

import fastload


def main(root: str, num_versions: int, pause_s: float) -> None:
    options = fastload.SaveOptions(timeout_s=30, block_bytes=1 << 14)
    with fastload.CheckpointManager(root, every_steps=1, keep_last=2, options=options) as manager:
        for step in range(1, num_versions + 1):
            weights = {name: torch.full((300, 70), float(step)) for name in "ab"}
            manager.save(step, weights, metrics={"reward": step / 10})
            time.sleep(pause_s)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
