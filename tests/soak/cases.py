"""One iteration of the soak: a world, a storage, a strategy, the faults, and the outcomes that are allowed.

Two kinds of faults are mixed. A load has to survive transient faults: bad responses of the server, or a short
outage. There is at most one permanent fault, which decides how the load has to end.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import fastload
from fastload.errors import FastloadError, PeerError
from fastload.transfer import demand
from tests.checkpoints import assert_same_bits, load_reference, write_sharded
from tests.dist import faults
from tests.dist.draws import Target, draw_target
from tests.dist.flaky_server import FlakyServer
from tests.dist.harness import run_ranks
from tests.dist.test_readers import own_disk
from tests.dist.test_sharded import emptied, locals_of

_SLACK_S = 10.0  # on a busy machine a process may wait for seconds
_TRANSIENT_S = 15.0  # a stalled response and the pauses between attempts, or an outage
_STALLS = ("stall", "trickle")
_BAD_RESPONSES = ("503", "429", "reset-before", "reset", "short", "wrong-length", *_STALLS)
_STRATEGIES = ("auto", "allgather", "allgather", "broadcast", "direct")
_FAULTS = ("SIGKILL", "SIGKILL", "SIGSTOP", "SIGSTOP", "storage lost", "storage lost", "raise")
_LOCAL_ONLY, _REMOTE_ONLY = ("truncate",), ("403", "replaced")
_ROWS = {f"t{number}": (9_000 + number, 3) for number in range(6)}
_ALL = 10_000
_SIGNALS = ("SIGKILL", "SIGSTOP")

__all__ = ["Case", "draw", "run"]


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        world: Number of ranks.
        strategy: Strategy of the load.
        chunk_bytes: Length of a chunk.
        remote: Whether the checkpoint is behind the HTTP server.
        transient: Faults of the server's next responses, or one outage.
        fault: The permanent fault; empty for none. Signals and the caller's own error hit the victim,
            ``storage lost`` takes its storage away; ``truncate``, ``403`` and ``replaced`` hit all ranks.
        victim: The rank that is hit.
        stage: Stage of the load in which a signal is sent; empty to send it after `after_s`.
        after_s: Time from the start of the load to the signal, if there is no stage.
        store: Location of the rendezvous store, as in `run_ranks`.
        target: What the ranks load into; None for new tensors, the same on all.
    """

    world: int
    strategy: str
    chunk_bytes: int
    remote: bool
    transient: tuple[str, ...]
    fault: str
    victim: int
    stage: str
    after_s: float
    store: Any
    target: Target | None = None

    @property
    def dies(self) -> dict[int, Signals]:
        """The rank that a signal ends, and the signal."""
        return {self.victim: Signals[self.fault]} if self.fault in _SIGNALS else {}

    @property
    def timeout_s(self) -> float:
        """Long enough to outlast the transient faults on a busy machine."""
        return 60.0 if "outage" in self.transient else 40.0 if self.transient else 20.0

    @property
    def own_disks(self) -> bool:
        """Whether each rank has its own copy."""
        return self.fault == "storage lost" and not self.remote

    @property
    def label(self) -> str:
        """The line of the tally that counts this case."""
        storage = "" if self.fault != "storage lost" else " (own disk)" if self.own_disks else " (route)"
        when = f" in stage {self.stage}" if self.stage else " at any time" if self.dies else ""
        return f"{self.fault or 'no permanent fault'}{storage}{when}"


def draw(rng: random.Random, *, sharded: bool = False) -> Case:
    """Draws a case, with shards to load into or without."""
    world, remote, strategy = rng.randint(1, 5), rng.random() < 0.6, rng.choice(_STRATEGIES)
    victim = rng.randrange(world)
    fault = rng.choice(["", "", *_FAULTS, *(_REMOTE_ONLY if remote else _LOCAL_ONLY)])
    if world == 1 and fault in _SIGNALS:
        fault = ""  # no other rank could notice
    transient = _draw_transient(rng) if remote and rng.random() < (0.4 if fault else 0.9) else ()
    if "outage" in transient and fault == "SIGSTOP":
        transient = ()  # noticing takes the whole timeout, here a minute
    stages = _stages(strategy, remote, victim)
    return Case(
        world=world,
        strategy=strategy,
        chunk_bytes=rng.choice([5_000, 16_384, 65_536, 200_001]),
        remote=remote,
        transient=transient,
        fault=fault,
        victim=victim,
        stage=rng.choice(["", *stages]) if fault in _SIGNALS else "",
        after_s=rng.choice([0, 1, 1]) * rng.random() * 0.4,
        store=rng.choice(["agent", "agent", "rank0"]),
        target=_draw_target(rng, world) if sharded else None,
    )


def _draw_target(rng: random.Random, world: int) -> Target:
    """Draws what the ranks request; all request the first tensor, so each rank passes all stages."""
    state = {name: torch.empty(shape, device="meta") for name, shape in _ROWS.items()}
    target = draw_target(rng, state, world)
    first = {"t0": [Replicate()] * len(target.placements["t0"])}
    stages = {"t0": range(target.shape[0])} if target.stages else {}
    return replace(target, placements={**target.placements, **first}, stages={**target.stages, **stages})


def _draw_transient(rng: random.Random) -> tuple[str, ...]:
    """Draws at most as many bad responses as a read has retries, at most one of them a slow one."""
    if rng.random() < 0.15:
        return ("outage",)
    quick = [answer for answer in _BAD_RESPONSES if answer not in _STALLS]
    answers = [rng.choice(_BAD_RESPONSES), *rng.choices(quick, k=rng.randint(0, 3))]
    rng.shuffle(answers)
    return tuple(answers)


def _stages(strategy: str, remote: bool, victim: int) -> list[str]:
    """Returns the stages of the victim: rank 0 reads headers, the other ranks compare files with them."""
    passed = set(faults.STAGES)
    passed -= {"open", "compare"} if remote else set()
    passed -= {"compare"} if victim == 0 else {"headers"}
    passed -= {"read"} if strategy == "broadcast" and victim else set()
    return [stage for stage in faults.STAGES if stage in passed]


def attempt(rank: int, world: int, case: Case, url: str, folder: Path) -> tuple[str, str, float, str]:
    """Loads on one rank; returns the outcome, its cause, the seconds it took, and the error message."""
    reference = load_reference(folder)
    if case.own_disks:
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        own_disk(folder, rank)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    into = None if case.target is None else case.target.of(reference, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demand, "_SLACK_BYTES", 0)  # so that all ranks read
        if rank in case.dies:
            _arm(case, patch)
        began = time.monotonic()
        kind, why, text = _load(rank, case, url, folder, reference, into)
        seconds = time.monotonic() - began
    if rank in case.dies:
        # If the stage was never reached, judge() sees that the load did not fail.
        faults.die(case.dies[rank]) if case.stage else time.sleep(60)
    return kind, why, seconds, text


def _arm(case: Case, patch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        faults.die(case.dies[case.victim])

    if case.stage:
        faults.strike(patch, case.stage, die)
    else:
        threading.Timer(case.after_s, die).start()


def _load(
    rank: int,
    case: Case,
    url: str,
    folder: Path,
    reference: dict[str, torch.Tensor],
    into: dict[str, torch.Tensor] | None,
) -> tuple[str, str, str]:
    """Returns "loaded" and the ranks that stopped reading, or "raised", the error and its message."""

    def progress(done: int, total: int) -> None:
        if case.fault == "raise" and rank == case.victim:
            raise ValueError("the caller's own error")

    options = fastload.LoadOptions(
        strategy=case.strategy, chunk_bytes=case.chunk_bytes, timeout_s=case.timeout_s, progress=progress
    )
    expected = reference if into is None else locals_of(into)
    name_tag = {"client_options": {"default_headers": {"X-Rank": str(rank)}}} if case.remote else None
    try:
        with fastload.open(url, storage_options=name_tag, options=options) as checkpoint:
            if (case.fault == "truncate" and rank == 0) or (case.own_disks and rank == case.victim):
                for file in folder.glob("*.safetensors"):
                    os.truncate(file, file.stat().st_size // 2)
            if into is None:
                loaded = checkpoint.load()
            else:
                checkpoint.load(into=emptied(into), strict=False)
                loaded = locals_of(into)
    except FastloadError as error:
        failures = sorted(error.failures) if isinstance(error, PeerError) else []
        return "raised", f"{type(error).__name__} {failures}", str(error)
    except ValueError as error:  # in a world of 1: the caller's own
        return "raised", f"{type(error).__name__}", str(error)
    assert_same_bits(loaded, expected)
    assert checkpoint.report is not None
    stopped = [own.rank for own in checkpoint.report.ranks if "stopped" in own.note]
    return "loaded", f"without {stopped}", ""


def judge(case: Case, ends: list[Any]) -> str:
    """Returns the outcome of all ranks; raises if it is not allowed."""
    living = [end for rank, end in enumerate(ends) if rank not in case.dies]
    assert len({end[:2] for end in living}) == 1, f"the ranks ended differently: {ends}"
    kind, why, _, _ = living[0]
    limit_s = case.timeout_s + _SLACK_S + _TRANSIENT_S * bool(case.transient)
    assert max(seconds for _, _, seconds, _ in living) < limit_s, f"too late: {ends}"
    expected = _expected(case)
    assert kind in expected, f"not one of {expected}: {ends}"
    if kind == "loaded":
        healed = [case.victim] * (case.fault == "storage lost" and _reads(case))
        assert why == f"without {healed}", f"other ranks stopped reading: {ends}"
    elif case.world > 1 and case.fault in (*_SIGNALS, "storage lost", "raise"):
        assert f"[{case.victim}]" in why, f"the wrong rank is named: {ends}"
    return kind


def _expected(case: Case) -> tuple[str, ...]:
    if case.fault == "":
        return ("loaded",)
    if case.fault in _SIGNALS and not case.stage:
        return ("loaded", "raised")  # whichever comes first
    if case.fault != "storage lost":
        return ("raised",)
    # Another rank takes over where the ranks read for each other.
    alone = case.world == 1 or case.strategy == "direct" or (case.strategy == "auto" and case.own_disks)
    only_reader = case.strategy == "broadcast" and case.victim == 0
    return ("raised",) if alone or only_reader else ("loaded",)


def _reads(case: Case) -> bool:
    return case.strategy != "broadcast" or case.victim == 0


def run(case: Case, server: FlakyServer, root: Path) -> str:
    """Runs one case on a fresh checkpoint."""
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name)
        rows = [(name, "F32", shape) for name, shape in _ROWS.items()]
        write_sharded(folder, {"a.safetensors": rows[:4], "b.safetensors": rows[4:]}, index=True)
        server.faults[:] = [case.fault] * _ALL if case.fault in _REMOTE_ONLY else case.transient
        server.cut_off = str(case.victim) if case.fault == "storage lost" and case.remote else ""
        server.dead_until = 0.0
        url = f"{server.url}/{folder.name}" if case.remote else str(folder)
        ends = run_ranks(
            attempt, case.world, deadline_s=case.timeout_s + 60, dies=case.dies, store=case.store,
            case=case, url=url, folder=folder,
        )  # fmt: skip
        return judge(case, ends)
