"""A training that is going to be killed: flush_trainer.py ROOT MEMORY RANKS_PER_HOST COPIES SAVE_EVERY"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

import fastload

__all__ = ["state_of"]

ROW = 256


def state_of(step: int, rank: int, num_rows: int = 12_000) -> dict[str, Any]:
    """A state every byte of which tells the step; 12 MB, so that each rank has a share."""
    values = torch.arange(num_rows * ROW, dtype=torch.int32).view(num_rows, ROW) * 7 + step
    return {"weight": values, "step": step, "own": fastload.PerRank(torch.tensor([rank, step]))}


def main(root: str, memory: str, ranks_per_host: int, num_copies: int, save_every: int) -> None:
    rank, _ = fastload.world.initialize()
    own = Path(memory, f"host{rank // ranks_per_host}")
    options = fastload.SaveOptions(timeout_s=10, block_bytes=1 << 16)
    with fastload.CheckpointManager(
        root,
        every_steps=save_every,
        memory=own,
        memory_every_steps=1,
        memory_copies=num_copies,
        options=options,
    ) as manager:
        for step in itertools.count(1):
            if manager.should_save(step):
                manager.save(step, state_of(step, rank))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:6]))
