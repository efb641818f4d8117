"""A training whose storage takes longer for a save than it trains between two: what it waits for that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench_parts.save_training import Training
from fastload import CheckpointManager, SaveOptions
from fastload.storage.local_target import LocalTarget


@contextmanager
def storage_that_takes(seconds: float) -> Iterator[None]:
    """Holds every save back until so long after its first write, as slow storage does."""
    write, flush = LocalTarget.write, LocalTarget.flush
    began: dict[int, float] = {}

    def noted(target: LocalTarget, *given: Any) -> None:
        began.setdefault(id(target), time.monotonic())
        write(target, *given)

    def held(target: LocalTarget) -> Any:
        receipt = flush(target)
        since = began.pop(id(target), None)
        if since is not None:
            time.sleep(max(0.0, since + seconds - time.monotonic()))
        return receipt

    LocalTarget.write, LocalTarget.flush = noted, held  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalTarget.write, LocalTarget.flush = write, flush  # type: ignore[method-assign]


def train(
    job: Training, *, every: int, num_saves: int, root: Path | None, max_pending_saves: int = 1
) -> dict[str, Any]:
    """Trains, and saves every so many steps; what is still being written in the end is waited for afterwards.

    Args:
        job: The training.
        every: Steps between saves.
        num_saves: So many are asked for.
        root: Where to; None saves nothing.
        max_pending_saves: As for `CheckpointManager`.

    Returns:
        Seconds that the steps and the saves between them took, and how many checkpoints were written.
    """
    if root is None:
        began = time.perf_counter()
        job.steps(every * num_saves)
        return {"seconds": time.perf_counter() - began, "written": 0}
    reports: list[Any] = []
    options = SaveOptions(on_report=reports.append)
    with CheckpointManager(
        root, max_pending_saves=max_pending_saves, keep_last=1, options=options
    ) as manager:
        manager.save(0, job.state())  # takes the memory
        manager.wait()
        dist.barrier()
        began = time.perf_counter()
        for number in range(1, num_saves + 1):
            manager.save(number, job.state())
            job.steps(every)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "written": len(reports) - 1}


def agreed(value: float) -> float:
    """Returns the value of rank 0 on all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(tensor, 0)
    return float(tensor)
