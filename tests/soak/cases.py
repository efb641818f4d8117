"""One iteration of the soak: a world, a way to load, a storage and a fault, and how that may end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fastload
from fastload.errors import FastloadError, PeerError
from tests.checkpoints import assert_same_bits, load_reference, write_sharded
from tests.dist.flaky_server import FlakyServer
from tests.dist.harness import run_ranks

_TIMEOUT_S = 6.0
_SLACK_S = 3.0
_PASSING = ("503", "429", "reset-before", "reset", "short", "wrong-length", "stall")
_PERMANENT = ("403", "replaced")

__all__ = ["draw", "run"]


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        world: Number of ranks.
        strategy: How to load.
        chunk_bytes: Unit of reading and of exchange.
        remote: Whether the checkpoint is behind the HTTP server.
        fault: What goes wrong.
        burst: How many answers of the server go wrong.
        victim: The rank that is killed, stopped or raises, or -1.
        after_s: How long after the start that happens.
    """

    world: int
    strategy: str
    chunk_bytes: int
    remote: bool
    fault: str
    burst: int = 0
    victim: int = -1
    after_s: float = 0.0

    @property
    def dies(self) -> dict[int, signal.Signals]:
        """Which rank a signal ends."""
        return {self.victim: signal.Signals[self.fault]} if self.fault.startswith("SIG") else {}


def draw(rng: random.Random) -> Case:
    """Draws a case."""
    case = Case(
        world=rng.randint(1, 5),
        strategy=rng.choice(["auto", "allgather", "allgather", "broadcast", "direct"]),
        chunk_bytes=rng.choice([5_000, 16_384, 65_536, 200_001]),
        remote=rng.random() < 0.6,
        fault="none",
    )
    kinds = ["none", "SIGKILL", "SIGSTOP", "raise", "truncate"] + ["passing", "permanent"] * 2 * case.remote
    kind = rng.choice(kinds)
    if kind in ("SIGKILL", "SIGSTOP", "raise"):
        if case.world == 1:
            return case
        return replace(
            case,
            fault=kind,
            victim=rng.randrange(case.world),
            after_s=rng.choice([0, 1, 1]) * rng.random() * 0.4,
        )
    if kind == "passing":
        fault = rng.choice(_PASSING)
        return replace(case, fault=fault, burst=1 if fault == "stall" else rng.randint(1, 4))
    if kind == "permanent":
        return replace(case, fault=rng.choice(_PERMANENT), burst=10_000)
    return replace(case, fault=kind) if kind != "truncate" or not case.remote else case


def attempt(rank: int, world: int, case: Case, url: str, folder: Path) -> tuple[str, str, float]:
    """Loads on one rank; returns how it ended, why, and after how long."""
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        if case.fault == "raise" and rank == case.victim:
            raise ValueError("the caller's own error")

    if rank in case.dies:
        threading.Timer(case.after_s, os.kill, (os.getpid(), case.dies[rank])).start()
    options = fastload.LoadOptions(
        strategy=case.strategy, chunk_bytes=case.chunk_bytes, timeout_s=_TIMEOUT_S, progress=progress
    )
    try:
        with fastload.open(url, options=options) as checkpoint:
            if case.fault == "truncate" and rank == 0:
                for file in folder.glob("*.safetensors"):
                    os.truncate(file, file.stat().st_size // 2)
            tensors = checkpoint.load()
    except FastloadError as error:
        failures = sorted(error.failures) if isinstance(error, PeerError) else []
        ended = ("raised", f"{type(error).__name__} {failures}", time.monotonic() - began)
    except ValueError as error:  # world of 1: the caller's own
        ended = ("raised", f"{type(error).__name__}", time.monotonic() - began)
    else:
        with contextlib.suppress(FileNotFoundError):
            assert_same_bits(tensors, load_reference(folder / "reference"))
        ended = ("loaded", "", time.monotonic() - began)
    if rank in case.dies:
        time.sleep(60)  # the signal is on its way
    return ended


def judge(case: Case, ends: list[Any]) -> str:
    """Returns how all ranks ended; raises if that is not how it may end."""
    living = [end for rank, end in enumerate(ends) if rank not in case.dies]
    kinds = {(kind, why) for kind, why, _ in living}
    assert len(kinds) == 1, f"the ranks ended differently: {ends}"
    kind, why = kinds.pop()
    slowest = max(seconds for _, _, seconds in living)
    if kind == "raised":
        assert slowest < _TIMEOUT_S + _SLACK_S, f"too late: {ends}"
        assert case.fault != "none", f"nothing was wrong: {ends}"
        assert case.fault not in _PASSING or case.strategy == "direct", f"it would have passed: {ends}"
        if case.dies or (case.fault == "raise" and case.world > 1):
            assert f"[{case.victim}]" in why, f"the wrong rank is named: {ends}"
    else:
        assert case.fault not in ("raise", *_PERMANENT), f"wrong bytes were taken: {ends}"
    return f"{case.fault}: {kind}"


def run(case: Case, server: FlakyServer, root: Path) -> str:
    """Runs one case on a fresh checkpoint."""
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name)
        rows = [(f"t{number}", "F32", (9_000 + number, 3)) for number in range(6)]
        shards = {"a.safetensors": rows[:4], "b.safetensors": rows[4:]}
        write_sharded(folder, shards, index=True)
        write_sharded(folder / "reference", shards, index=True)
        server.faults[:] = [case.fault] * case.burst
        url = f"{server.url}/{folder.name}" if case.remote else str(folder)
        ends = run_ranks(
            attempt, case.world, deadline_s=40, dies=case.dies, case=case, url=url, folder=folder
        )
        return judge(case, ends)
