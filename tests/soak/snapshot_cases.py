"""Random trainings that overlap saves with steps: the state as of each call, or an error, never a mixture.

A draw is a model, an optimizer, and what happens between a save and its end: steps, changes that wait and
changes that do not, exceptions, other saves, sometimes the death of a rank.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastload
from fastload import SaveHandle, SaveOptions
from fastload.errors import FastloadError, PeerError, StateChanged
from fastload.geometry.dtensors import local_of

__all__ = ["expected_at", "require_same", "run_killed", "run_some"]

_TIMEOUT_S = 20.0
_NUM_ROUNDS = 3
# Replicas differ after changes on single ranks; all ranks write, so that each saves its own part of them.
_OPTIONS = SaveOptions(timeout_s=_TIMEOUT_S, writers="all", check_replicas="off")


def _optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
        "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        "loop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, foreach=False),
    }


class Draw:
    """One draw on one rank.

    Attributes:
        rng: The same on all ranks.
        own_rng: Of this rank.
    """

    def __init__(self, rank: int, world: int, seed: str, folder: Path) -> None:
        self.rng, self.own_rng = random.Random(seed), random.Random(f"{seed} {rank}")
        self.rank, self.folder = rank, folder
        self.log: list[str] = []
        torch.manual_seed(self.rng.randrange(1 << 30))
        self.width = self.rng.choice([40, 130, 200, 700])
        layers = [nn.Linear(self.width, self.width, bias=self.rng.random() < 0.5) for _ in range(2)]
        norm = nn.BatchNorm1d(self.width) if self.rng.random() < 0.5 else nn.Identity()
        self.model = nn.Sequential(layers[0], norm, layers[1])
        self.is_sharded = self.rng.random() < 0.5
        if self.is_sharded:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        kinds = _optimizers()
        if self.is_sharded:
            del kinds["fused sgd"]  # torch has none for DTensors
        name, make = self.rng.choice(list(kinds.items()))
        self.optimizer = make(self.model.parameters())
        self.average = torch.randn(self.width, self.width)
        self.array = np.zeros((self.width, self.width))
        self.in_backward = self.rng.random() < 0.2
        if self.in_backward:  # a step for each gradient, inside of backward
            for parameter in self.model.parameters():
                own = make([parameter])
                parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        self.log.append(f"{name}, width {self.width}{', sharded' * self.is_sharded}")
        self._train()
        self.objects = self.rng.random() < 0.7

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if not self.objects:
            parts = {name: each.state_dict() for name, each in parts.items()}
        extra = {"average": self.average, "turned": self.average.t(), "array": self.array, "n": 1}
        return {**parts, **extra}

    def run(self, tally: Counter[str]) -> None:
        """Saves a few times."""
        for number in range(_NUM_ROUNDS):
            self.round(self.folder / str(number), tally)

    def round(self, path: Path, tally: Counter[str]) -> None:
        """Saves once; checks how that ends."""
        self.save(path)
        self.is_late = False  # whether this rank changed the state without a wait
        self.may_change = False
        others = []
        for _ in range(self.rng.randint(0, 4)):
            action = self.rng.choice([self.train, self.fail, self.save_another, self.alone, self.alone])
            if (handle := action()) is not None:
                others.append(handle)
        late: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(late, self.is_late)
        ended = self.end_of(self.handle, path, is_late=any(late))
        for handle in others:
            with contextlib.suppress(FastloadError):  # its state may be in the middle of a change, too
                handle.wait(_TIMEOUT_S)
        tally[ended] += 1

    def save(self, path: Path) -> None:
        fastload.save(self.state(), expected_at(path), options=_OPTIONS)
        self.handle = self.begin(path)

    def begin(self, path: Path) -> SaveHandle:
        options = SaveOptions(snapshot="overlap", writers="all", timeout_s=_TIMEOUT_S, check_replicas="off")
        return fastload.async_save(self.state(), path, options=options)

    def end_of(self, handle: SaveHandle, path: Path, *, is_late: bool) -> str:
        try:
            handle.wait(2 * _TIMEOUT_S)
        except StateChanged:
            is_refused = is_late
        except PeerError as error:
            is_refused = is_late and all(isinstance(one, StateChanged) for one in error.failures.values())
        else:
            is_refused = False
        if is_refused:
            assert not path.exists()
            return "a change without a wait: error"
        require_same(path)  # fails where there is nothing
        return "a change without a wait: too late to matter" if is_late else "saved"

    # What happens meanwhile

    def train(self) -> None:
        self.log.append("train")
        self._train()
        self.may_change = True

    def _train(self) -> None:
        self.model(torch.randn(4, self.width)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fail(self) -> None:
        """An exception between the save and the step, after a forward pass."""
        self.log.append("fail")
        with contextlib.suppress(KeyError):
            raise KeyError(self.model(torch.randn(4, self.width)))

    def save_another(self) -> SaveHandle:
        self.log.append("another save")
        return self.begin(self.folder / f"another {len(self.log)}")

    def alone(self) -> None:
        """Something that ranks do by themselves."""
        rng = self.own_rng
        kinds = [self.nothing, self.wait, self.change, self.change, self.change_aside, self.replace]
        kind = rng.choice(kinds)
        self.log.append(kind.__name__)
        kind()

    def nothing(self) -> None:
        time.sleep(self.own_rng.random() * 0.01)

    def wait(self) -> None:
        self.handle.wait_snapshot()
        self.may_change = True

    def replace(self) -> None:
        """Changes that need not wait: other memory for a tensor, and arrays, which were copied at once."""
        self.average.data = self.average + 1
        self.array += 1

    def change(self) -> None:
        time.sleep(self.own_rng.choice([0, 0, 0.002]))
        self.is_late |= not self.may_change
        self._change()

    def change_aside(self) -> None:
        self.is_late = True  # what it does when another one waits is its own affair
        thread = threading.Thread(target=self._change)
        thread.start()
        self.nothing()
        thread.join()

    def _change(self) -> None:
        moments = [each for each in self.optimizer.state.values() if each]
        values = [value for each in moments for value in each.values() if isinstance(value, Tensor)]
        tensors = [*self.model.parameters(), *values, self.average]
        tensor = self.own_rng.choice(tensors)
        is_shard = self.objects and self.own_rng.random() < 0.5  # torch does not count it in state dicts
        tensor = local_of(tensor) if is_shard else tensor.detach()
        with torch.no_grad():
            self.own_rng.choice([lambda: tensor.mul_(1.5), lambda: tensor.add_(1), tensor.zero_])()


def expected_at(path: Path) -> Path:
    """Returns where a save that blocks saves what the one at a path has to save."""
    return path.with_name(f"{path.name} expected")


def require_same(path: Path, beside: Path | None = None) -> None:
    """Compares a checkpoint with the expected one beside it, or in another folder."""
    expected = expected_at((beside or path.parent) / path.name)
    files = sorted(file.name for file in expected.glob("*.safetensors"))
    assert files
    for name in files:
        assert (path / name).read_bytes() == (expected / name).read_bytes(), f"a mixture: {path / name}"


def run_some(rank: int, world: int, seed: int, first: int, num: int, folder: Path) -> Counter[str]:
    """Runs several draws on one rank; returns how the saves ended."""
    tally: Counter[str] = Counter()
    for number in range(first, first + num):
        draw = Draw(rank, world, f"{seed}/{number}", folder / str(number))
        try:
            draw.run(tally)
        except BaseException as error:
            raise AssertionError(f"draw {number} with {world} ranks: {draw.log}") from error
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / str(number))
    return tally


def run_killed(rank: int, world: int, seed: int, number: int, victim: int, folder: Path) -> bool:
    """Saves once while a rank is killed; returns whether that was in time."""
    draw = Draw(rank, world, f"{seed}/{number}", folder)
    delay_s = draw.rng.random() ** 2 * 0.1
    path = folder / "0"
    fastload.save(draw.state(), expected_at(path), options=_OPTIONS)
    dist.barrier()
    if rank == victim:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        draw.begin(path).wait(2 * _TIMEOUT_S)
    except FastloadError:
        return False
    finally:
        if rank == victim:
            time.sleep(_TIMEOUT_S)
    return True
