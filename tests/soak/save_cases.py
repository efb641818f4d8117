"""One iteration of the soak of saves: a world, a way to save, a fault, and the outcomes that are allowed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import fastload
from fastload.errors import FastloadError
from tests.crash import saves
from tests.crash.saves import End, leftovers, save, shards, state, version_of
from tests.crash.tracer import Fault, striking
from tests.dist.harness import run_ranks

__all__ = ["draw", "run", "watch"]

_TIMEOUT_S = 3.0
_SLACK_S = 4.0
_CALLS = "pwrite64 pwrite64 fsync fsync renameat renameat2 fallocate openat unlinkat mkdirat".split()
_ERRORS = "EIO ENOSPC EDQUOT EROFS EACCES".split()


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        world: Number of ranks.
        background: Whether `async_save` saves.
        overwrite: Whether the save replaces the checkpoint; otherwise it makes another one next to it.
        io: `SaveOptions.io`.
        threads: Writing threads of each rank.
        sharded: Whether the state is sharded, so that most bytes reach their writers through the exchange.
        kind: The fault: ``nothing``, ``kill at`` a time, ``kill in`` or ``fail`` a system call.
        victim: The rank that is hit.
        after_s: Time from the start to the kill.
        call: The system call.
        count: Which of the calls of each thread.
        error: The error that the call returns.
    """

    world: int
    background: bool
    overwrite: bool
    io: str
    threads: int
    sharded: bool
    kind: str
    victim: int
    after_s: float
    call: str
    count: int
    error: str

    @property
    def kills(self) -> bool:
        """Whether the victim dies."""
        return self.kind.startswith("kill")

    @property
    def faults(self) -> list[Fault]:
        """The faults that strace injects."""
        if self.kind == "kill in":
            return [(self.call, f"signal=SIGKILL:when={self.count}")]
        return [(self.call, f"error={self.error}:when={self.count}")] if self.kind == "fail" else []


def draw(rng: random.Random, *, sharded: bool = False) -> Case:
    """Draws a case; with `sharded`, always a sharded state."""
    world = rng.randint(2 if sharded else 1, 4)
    return Case(
        world=world,
        background=rng.random() < 0.5,
        overwrite=rng.random() < 0.7,
        io=rng.choice(["auto", "buffered", "direct"]),
        threads=rng.randint(1, 3),
        sharded=sharded or (world > 1 and rng.random() < 0.5),
        kind=rng.choice(["nothing"] + ["kill at"] * 8 + ["kill in"] * 8 + ["fail"] * 3),
        victim=rng.choice([0, rng.randrange(world)]),
        after_s=rng.random() ** 2 * 0.25,
        call=rng.choice(_CALLS),
        count=rng.choice([1, 1, 2, 2, 3, 4, 5]),
        error=rng.choice(_ERRORS),
    )


def attempt(rank: int, world: int, case: Case, path: Path, version: int) -> End:
    """Saves on one rank; a victim that is still alive at the end dies then."""
    value = shards(state(version), init_device_mesh("cpu", (world,))) if case.sharded else state(version)
    torch.distributed.barrier()
    struck = rank == case.victim
    if struck and case.kind == "kill at":  # from another process, since a thread here may have to wait
        kill = f"import os, time; time.sleep({case.after_s}); os.kill({os.getpid()}, 9)"
        subprocess.Popen([sys.executable, "-S", "-E", "-c", kill])
    with striking(case.faults if struck else ()):
        end = saves.end_of(
            lambda: save(
                value, path, background=case.background, overwrite=case.overwrite,
                timeout_s=_TIMEOUT_S, io=case.io, write_threads=case.threads,
            )
        )  # fmt: skip
    if struck and case.kills:
        time.sleep(case.after_s if case.kind == "kill at" else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    return end


def judge(case: Case, ends: list[End | None], before: int, after: int | None) -> str:
    """Returns the outcome; raises if it is not allowed."""
    living = [end for end in ends if end is not None]
    kinds = {end.kind for end in living}
    assert len(kinds) <= 1, f"the ranks ended differently: {ends}"
    assert after in (before, before + 1), f"{before} became {after}"
    for end in living:
        assert end.seconds < _TIMEOUT_S + _SLACK_S, f"too late: {ends}"
        assert end.threads == [], f"threads are left: {ends}"
    said = "all killed" if not living else "saved" if kinds == {"saved"} else "raised"
    if said == "saved":
        assert after == before + 1, f"it was not saved: {ends}"
    elif said == "raised":
        assert case.kind != "nothing", f"nothing was wrong: {ends}"
        if case.world > 1:
            assert kinds == {"PeerError"}, ends
            assert all(set(end.causes) == {case.victim} for end in living), f"the wrong rank is named: {ends}"
        if not case.kills:
            assert after == before, f"a failed save published its checkpoint: {ends}"
    kind = "sharded" if case.sharded else "complete"
    return f"{kind:8} {case.kind + ':':9} {said + ',':14}{'new' if after != before else 'old'}"


def run(case: Case, root: Path, before: int) -> tuple[str, int]:
    """Runs one case; returns the outcome, and the version of the checkpoint afterwards."""
    path = root / ("one" if case.overwrite else "other")
    dies = {case.victim: 9} if case.kills else {}
    ends = run_ranks(attempt, case.world, deadline_s=60, dies=dies, case=case, path=path, version=before + 1)
    found: int | None = before
    if path.exists():
        found = version_of(fastload.load(path))
        fastload.verify(path)
    ended = judge(case, ends, before, found)
    if not case.overwrite:
        assert version_of(fastload.load(root / "one")) == before
        shutil.rmtree(path, ignore_errors=True)
    if case.victim != 0 or case.kind == "nothing":
        assert leftovers(root) == [], f"the leader lived and left {leftovers(root)}"
    left = len(leftovers(root))
    after = before + 2
    saves.save(state(after), root / "one", background=False, overwrite=True, timeout_s=60.0)
    assert version_of(fastload.load(root / "one")) == after
    assert leftovers(root) == [], f"the next save left {leftovers(root)}"
    return f"{ended}{', a pending directory left for the next save to clean' if left else ''}", after


def watch(path: Path, stop: Path) -> None:
    """Loads until `stop` exists; prints a tally, and fails on anything but one complete state."""
    tally: Counter[str] = Counter()
    last = 0
    while not stop.exists():
        try:
            version = version_of(fastload.load(path))
        except FastloadError as error:
            tally[f"reader: {type(error).__name__}"] += 1
            print(f"reader: {error}", file=sys.stderr, flush=True)
            continue
        assert version >= last, f"{last} was followed by {version}"
        last = version
        tally["reader: one complete state"] += 1
        time.sleep(0.02)
    for line, count in sorted(tally.items()):
        print(f"{count:5d}  {line}")
