"""A training that keeps steps in memory: each rank as if it were a host of its own."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench_parts.save_arms import Wait
from fastload import CheckpointManager, SaveOptions


class Generations:
    """Keeps states in memory, and counts none that does not count.

    Args:
        root: Where the checkpoints would be.
        copies: How many ranks keep each share.
        memory: Below it each rank gets a directory.
    """

    def __init__(self, root: Path, copies: int, memory: str = "/dev/shm") -> None:
        self._own = tempfile.mkdtemp(prefix="bench-save-", dir=memory)
        self._manager = CheckpointManager(
            root / f"{copies} copies",
            memory=self._own,
            memory_every_steps=1,
            memory_copies=copies,
            options=SaveOptions(),
        )
        self._step = 0

    def __call__(self, state: Any, path: Path) -> Wait:
        """Keeps a state in memory."""
        self._step += 1
        assert self._manager.should_save(self._step)
        self._manager.save(self._step, state)
        keeper = self._manager._tier
        assert keeper is not None
        assert keeper.last is not None
        return keeper.last.wait

    def close(self) -> None:
        """Ends it; nothing is left."""
        dist.barrier()
        self._manager.close()
        with suppress(FileNotFoundError):
            shutil.rmtree(self._own)
