"""The same save in another process, which shares nothing with the training but cores, memory and storage.

Control for what a save in the background costs its own process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fastload
from bench_parts.save_arms import Wait
from bench_parts.save_training import Training


class SaveBeside:
    """Begins saves in another process for each rank, which trains the same model, one step of it.

    Args:
        folder: A folder of all ranks, in which these processes meet.
        model: Arguments of `Training`.
    """

    def __init__(self, folder: str, model: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        place = str(Path(folder, "beside"))
        given = (other, place, dist.get_rank(), dist.get_world_size(), dict(model))
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        other.close()

    def __call__(self, state: Any, path: Path) -> Wait:
        """Returns once that process has copied its own state."""
        self._connection.send(str(path))
        self._connection.recv()
        return self.wait

    def done(self) -> bool:
        """Whether the save has ended."""
        return self._connection.poll()

    def wait(self) -> None:
        """Waits for its end."""
        self._connection.recv()

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, place: str, rank: int, size: int, model: Mapping[str, Any]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
    job = Training(**model)
    job.steps(1)
    try:
        while True:
            path = connection.recv()
            handle = fastload.async_save(job.state(), path)
            connection.send("copied")
            handle.wait()
            connection.send("saved")
    except EOFError:  # the rank has ended
        dist.destroy_process_group()
