"""One iteration of the soak of the memory tier: a job, how it is killed, and what the next one finds."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fastload import CheckpointManager, LoadOptions, SaveOptions
from fastload.report import LoadReport
from tests.checkpoints import flip
from tests.dist.harness import run_ranks
from tests.dist.test_memory_tier import manage

__all__ = ["draw", "run"]

RANKS_IMPORT = ("fastload.ext.memory.tier", "torch.distributed.tensor")
_STORED = 1  # the step that is on storage
_TIMEOUT_S = 4.0


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        ranks: Ranks of the first job.
        per_host: Ranks on each of its hosts.
        copies: Copies of each share.
        sharded: Whether the state is sharded over the ranks.
        numel: Elements of the state.
        killed_s: Time from the start to the kill, for each rank.
        lost: Hosts that lose their memory.
        flipped: (host, position) of damaged bytes; the position is a fraction of the file.
        again: Ranks of the second job.
        per_host_again: Ranks on each of its hosts.
        sharded_again: Whether the second job is sharded.
    """

    ranks: int
    per_host: int
    copies: int
    sharded: bool
    numel: int
    killed_s: tuple[float, ...]
    lost: tuple[int, ...]
    flipped: tuple[tuple[int, float], ...]
    again: int
    per_host_again: int
    sharded_again: bool

    @property
    def num_hosts(self) -> int:
        return self.ranks // self.per_host

    @property
    def same_hosts(self) -> bool:
        """Whether the second job has all hosts of the first one."""
        return self.again // self.per_host_again >= self.num_hosts


def draw(rng: random.Random) -> Case:
    per_host = rng.choice([1, 1, 2])
    hosts = rng.randint(1, 4 if per_host == 1 else 2)
    ranks = hosts * per_host
    begins = rng.uniform(0.3, 1.5)
    late = rng.choice([0.0, 0.0, 0.4])
    per_host_again = rng.choice([1, 1, 2])
    again = rng.choice([hosts, hosts, hosts, rng.randint(1, 4)]) * per_host_again
    return Case(
        ranks=ranks,
        per_host=per_host,
        copies=rng.choice([1, 2, 2, 2, 3]),
        sharded=rng.random() < 0.4,
        numel=rng.choice([1000, 300_000, 900_000]),
        killed_s=tuple(begins + rng.uniform(0, late) if late else begins for _ in range(ranks)),
        lost=tuple(sorted(rng.sample(range(hosts), rng.choice([0, 0, 1, 1, min(2, hosts)])))),
        flipped=tuple((rng.randrange(hosts), rng.random()) for _ in range(rng.choice([0, 0, 0, 1, 2]))),
        again=min(again, 4),
        per_host_again=per_host_again if min(again, 4) % per_host_again == 0 else 1,
        sharded_again=rng.random() < 0.4,
    )


def values(step: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32).view(-1, 10) * 3 + step


def state_of(step: int, case: Case, sharded: bool) -> dict[str, Any]:
    rows = values(step, case.numel)
    if sharded:
        rows = distribute_tensor(rows, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"rows": rows, "few": torch.full((5,), float(step)), "step": step}


def open_manager(folder: Path, case: Case) -> CheckpointManager:
    logging.getLogger("fastload").setLevel(logging.CRITICAL)
    options = SaveOptions(timeout_s=_TIMEOUT_S, block_bytes=1 << 14)
    return manage(folder, folder / "memory", memory_copies=case.copies, options=options)


def train(rank: int, world: int, folder: Path, case: Case) -> None:
    """Trains until it is killed; notes the newest step that counts, as known to this rank."""
    manager = open_manager(folder, case)
    manager.save(_STORED, state_of(_STORED, case, case.sharded))
    manager.wait()
    killer = threading.Timer(case.killed_s[rank], lambda: os.kill(os.getpid(), signal.SIGKILL))
    dist.barrier()
    killer.start()
    counted = folder / f"counted-{rank}"
    step = _STORED
    while True:
        step += 1
        with contextlib.suppress(Exception):  # another rank was killed
            if manager.should_save(step):
                manager.save(step, state_of(step, case, case.sharded))
            tier = manager._tier
            if tier is not None and tier.last is not None and tier.last.report is not None:
                counted.with_suffix(".new").write_text(str(tier.last.report.step))
                counted.with_suffix(".new").rename(counted)
        time.sleep(0.01)


def restore(rank: int, world: int, folder: Path, case: Case) -> tuple[int, str, str]:
    """Restores; returns the step, its source and the reason for the source."""
    manager = open_manager(folder, case)
    into = state_of(0, case, case.sharded_again)
    reports: list[LoadReport] = []
    manager.restore(into=into, options=LoadOptions(timeout_s=_TIMEOUT_S, on_report=reports.append))
    step, source = manager.restored_step, manager.restored_from
    assert step is not None
    assert source is not None
    rows = into["rows"].full_tensor() if isinstance(into["rows"], DTensor) else into["rows"]
    assert torch.equal(rows, values(step, case.numel)), "other bytes"
    assert into["step"] == step
    assert into["few"].tolist() == [step] * 5
    return step, source, reports[-1].source_why


def run(case: Case, folder: Path) -> str:
    """Runs a case; returns the outcome."""
    everyone = dict.fromkeys(range(case.ranks), signal.SIGKILL)
    given: dict[str, Any] = {"folder": folder, "case": case}
    run_ranks(train, case.ranks, dies=everyone, ranks_per_host=case.per_host, **given)
    memory = folder / "memory"
    for host, part in case.flipped:
        for file in sorted((memory / f"host{host}").glob("fastload-*/*/*/model.safetensors")):
            flip(file, int(part * file.stat().st_size))
    for host in case.lost:
        shutil.rmtree(memory / f"host{host}")
    found = run_ranks(restore, case.again, same=True, ranks_per_host=case.per_host_again, **given)
    step, source, why = found[0]
    texts = [path.read_text() for path in folder.glob("counted-?")]
    counted = max(map(int, texts), default=0)  # one rank that knows is enough
    survivable = len(case.lost) < min(case.copies, case.num_hosts) and case.same_hosts and not case.flipped
    if survivable and counted:
        assert source == "memory", f"step {counted} was on enough hosts, but {why}"
        assert step >= counted, f"step {counted} counted, step {step} came back"
    if source == "storage":
        assert step == _STORED
        assert why
    state = "killed before any counted" if not counted else "some counted"
    return f"{source}, {'must be memory' if survivable and counted else 'may be either'} ({state})"
