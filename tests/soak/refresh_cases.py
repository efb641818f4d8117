"""The servers of the soak of refreshes, and the trainer whose versions they take."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fastload
from fastload.errors import PeerError
from fastload.geometry.dtensors import local_of
from tests.soak.refresh_trainer import content, step_path

__all__ = ["KILLED_AT", "WORLD", "serve"]

RANKS_IMPORT = ("fastload.ext.watch", "torch.distributed.tensor")

_ROOT = Path(__file__).resolve().parents[2]
WORLD = 4
_FAULTS = ("damaged", "damaged delta", "gone", "missing base", "wrong base", "killed trainer", "raced")
KILLED_AT = (15, 45)  # refreshes of a life in which a server is killed
_FIRST_COUNTED = 8  # refreshes after which nothing grows
_MOST_GROWTH_BYTES = 16 << 20
_MOST_DESCRIPTORS = 8  # of each new group


class Trainer:
    """The other job, which the first rank starts, and starts again when it was killed."""

    def __init__(self, python: str, root: Path, orders: Path) -> None:
        self._words = [python, "-m", "tests.soak.refresh_trainer", str(root), str(orders)]
        self._orders = orders
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None

    def order(self, version: int, **given: Any) -> None:
        """Orders a version."""
        if self._process is None or self._process.poll() is not None:
            env = {**os.environ, "PYTHONPATH": str(_ROOT)}
            self._process = subprocess.Popen(self._words, cwd=_ROOT, env=env)
        self._count += 1
        text = {"version": version, "base": "", "keep": "", "fault": "", "after_s": 0, "at_s": 0, "part": 0.5}
        path = self._orders / f"{self._count:06d}"
        path.write_text(json.dumps({**text, **given}))
        path.rename(path.with_suffix(".json"))

    def wait_killed(self) -> None:
        assert self._process is not None
        assert self._process.wait(30) == -signal.SIGKILL

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Servers:
    """One rank of the servers, in one life.

    Attributes:
        tally: How refreshes ended.
    """

    def __init__(self, rank: int, root: Path, seed: str, trainer: Trainer | None) -> None:
        self.tally: Counter[str] = Counter()
        self._rank = rank
        self._alive = list(range(WORLD))
        self._rng = random.Random(seed)  # the same on all ranks
        self._root = root
        self._trainer = trainer
        self._group: Any = dist.group.WORLD
        self._dies_in_place = False
        self._number = 0  # of the last version that was ordered
        self._complete = 0  # of the last one that was saved without a base
        self._is_sharded = self._rng.random() < 0.5
        self._model = self._new_model()
        self._versions = self._watch()

    def live(self, num_refreshes: int) -> list[tuple[int, int]]:
        """Refreshes so often; returns memory and descriptors after each."""
        used = []
        for index in range(1, num_refreshes + 1):
            before = self._versions.version or 0
            fault = self._rng.choice(_FAULTS) if index % 5 == 0 else ""
            if index in KILLED_AT:
                fault = "killed server"
                self._lose_a_server()
            else:
                self._refresh(fault)
            assert (self._versions.version or 0) > before, f"{self._versions.version} after {before}"
            self.tally[fault or "no fault"] += 1
            used.append(usage())
        return used

    def _refresh(self, fault: str) -> None:
        """Takes the next version; with a fault, that one or the one that follows it."""
        least = self._order(fault)
        if fault == "killed trainer" and self._trainer is not None:
            self._trainer.wait_killed()
        if fault == "raced":
            self._number += 1  # which the trainer saves at once
        elif fault:
            following = self._order("", after_s=self._rng.choice([0.0, 0.1]))
            least = least if fault == "killed trainer" else following
        self._follow(least)

    def _order(self, fault: str, **given: Any) -> int:
        """Has the trainer save a version, complete or as a delta of the last complete one."""
        self._number += 1
        is_delta = fault == "damaged delta" or (not fault and self._rng.random() < 0.5)
        at_s, part = self._rng.uniform(0, 0.03), self._rng.random()
        complete = step_path(self._root, self._complete).name if self._complete else ""
        base = complete if is_delta else ""
        if self._trainer is not None:
            done = {"damaged delta": "damaged", "killed trainer": "killed"}.get(fault, fault)
            given |= {"base": base, "keep": complete, "fault": done, "at_s": at_s, "part": part}
            self._trainer.order(self._number, **given)
        if not fault and not base:
            self._complete = self._number
        return self._number

    def _follow(self, least: int) -> None:
        """Takes versions until the last one that was ordered."""
        while self._versions.version != self._number:
            version = next(self._versions)
            self._require(self._versions.version)
            assert version.step >= least, f"{version} before {least}"
            version.load(into=self._model)
            assert self._versions.version == version.step
            self._require(version.step)

    def _lose_a_server(self) -> None:
        """The last rank is killed in a refresh; the others know what they have, and go on without it."""
        victim, at_s = self._alive[-1], self._rng.uniform(0.0, 0.15)
        in_place = self._rng.random() < 0.5  # once tensors change; else at any time
        if self._rank == victim:
            self._dies_in_place = in_place
            if not in_place:
                threading.Timer(at_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:  # until it is dead
                self._follow(self._order(""))
        except PeerError as error:
            failed, is_partial = list(error.failures), error.is_partial
        known = self._versions.version
        assert failed == [len(self._alive) - 1]
        assert (known is None) == is_partial
        self._require(known)
        self.tally[
            f"killed server: {'a mixture' if known is None else 'as it was'} before it is repaired"
        ] += 1
        self._versions.close()
        self._alive.remove(victim)
        self._group = dist.new_group(self._alive, use_local_synchronization=True)
        if self._is_sharded:
            self._is_sharded = False
            self._model = self._new_model()
        self._versions = self._watch()
        self._follow(1)

    def _watch(self) -> fastload.Watch:
        def progress(now: int, wanted: int) -> None:
            if self._dies_in_place and now:
                os.kill(os.getpid(), signal.SIGKILL)

        options = fastload.LoadOptions(timeout_s=20, chunk_bytes=1 << 14, progress=progress)
        return fastload.watch(
            self._root, poll_s=0.01, timeout_s=30, process_group=self._group, options=options
        )

    def _new_model(self) -> dict[str, Any]:
        """Replicas, or shards of all ranks."""
        model = {name: torch.zeros_like(tensor) for name, tensor in content(0).items()}
        if not self._is_sharded:
            return model
        mesh = DeviceMesh("cpu", list(range(WORLD)))
        return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in model.items()}

    def _require(self, version: int | None) -> None:
        """Checks that all of the model is of one version, unless none is known."""
        for name, expected in content(version).items() if version is not None else ():
            held = self._model[name]
            if isinstance(held, DTensor):
                expected, held = expected.chunk(WORLD)[self._rank], held.to_local()
            if not torch.equal(held, expected):
                raise AssertionError(f"{name} is not of version {version}, but of {self._versions_in(name)}")

    def _versions_in(self, name: str) -> dict[int, int]:
        """Returns of how many elements of a tensor, which differ between versions, are of which ones."""
        held = local_of(self._model[name])
        found: Counter[int] = Counter()
        for version in range(self._number + 1):
            expected = content(version)[name]
            if isinstance(self._model[name], DTensor):
                expected = expected.chunk(WORLD)[self._rank]
            found[version] = int((held == expected).flatten()[version % 50 :: 50].sum())
        return dict(found.most_common(4))


def usage() -> tuple[int, int]:
    """Returns the memory of this process in bytes, and the number of its descriptors."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10, len(os.listdir("/proc/self/fd"))
    raise AssertionError("no VmRSS")


def serve(rank: int, world: int, folder: Path, python: str, seed: str, num: int) -> tuple[Any, ...]:
    logging.getLogger("fastload").setLevel(logging.ERROR)
    root, orders = folder / "root", folder / "orders"
    trainer = Trainer(python, root, orders) if rank == 0 else None
    try:
        servers = Servers(rank, root, seed, trainer)
        used = servers.live(num)
    finally:
        if trainer is not None:
            trainer.close()
    settled = used[_FIRST_COUNTED:]
    (first_bytes, first_open), (last_bytes, last_open) = settled[0], settled[-1]
    assert last_bytes - first_bytes <= _MOST_GROWTH_BYTES, [used_bytes >> 20 for used_bytes, _ in used]
    assert last_open - first_open <= _MOST_DESCRIPTORS * len(KILLED_AT), [num_open for _, num_open in used]
    return dict(servers.tally), last_bytes - first_bytes, last_open - first_open
