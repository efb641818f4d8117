"""A small training with DDP or FSDP2 on CPUs, which saves now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench_parts.save_arms import Begin

_NUM_LAYERS = 8


class Training:
    """One rank's part of it.

    Args:
        width: Of the model's layers.
        batch: Samples of this rank in a step.
        fsdp: With FSDP2 instead of DDP.
        operations: Small operations in each step, next to the model's: Python is busy.

    Attributes:
        lock: Makes the lock that a way to save wants around the updates of the weights.
    """

    def __init__(self, *, width: int, batch: int, fsdp: bool, operations: int = 0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers = [part for _ in range(_NUM_LAYERS) for part in (nn.Linear(width, width), nn.GELU())]
        self._module = nn.Sequential(*layers)
        if fsdp:
            for layer in self._module:
                fully_shard(layer)
            fully_shard(self._module)
        self._model = self._module if fsdp else DistributedDataParallel(self._module)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._samples = torch.randn(batch, width)
        self._num_operations = operations
        self.lock: Callable[[], AbstractContextManager[object]] = nullcontext

    def state(self) -> dict[str, Any]:
        """Returns what a user saves."""
        return {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the state, once there has been a step."""
        return sum(tensor.nbytes for tensor in _tensors(self.state()))

    def run(self, num_steps: int, begin: Begin, path: Path) -> tuple[list[float], list[float]]:
        """Saves, does some steps, and waits for the save, as it would before the next one.

        Returns:
            Seconds of all steps, and of those at whose beginning the save had not ended.
        """
        wait = begin(self.state(), path)
        steps_s, beside_s = [], []
        done = getattr(getattr(wait, "__self__", None), "done", lambda: True)
        for _ in range(num_steps):
            beside, began = not done(), time.perf_counter()
            self._step()
            steps_s.append(time.perf_counter() - began)
            if beside:
                beside_s.append(steps_s[-1])
        wait()
        return steps_s, beside_s

    def steps(self, num_steps: int) -> None:
        """Does some steps."""
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        small = self._samples[0, :8]
        for _ in range(self._num_operations):
            small = small * 0.5
        loss = (self._model(self._samples) - self._samples).square().mean()
        loss.backward()
        with self.lock():
            self._optimizer.step()
        self._optimizer.zero_grad()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
