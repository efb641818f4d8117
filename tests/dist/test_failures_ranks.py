"""A rank that dies, stops or raises at any stage: all others end in time, with one error that names it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import fastload
from tests.dist import faults
from tests.dist.faults import SLACK_S, TIMEOUT_S, Outcome, checkpoint, die, options, outcome_of
from tests.dist.harness import run_ranks

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def load_and_fail(
    rank: int, world: int, path: Path, victims: dict[int, signal.Signals], stage: str, strategy: str
) -> Outcome:
    patch = pytest.MonkeyPatch()
    if rank in victims:
        faults.strike(patch, stage, lambda: die(victims[rank]))
    return outcome_of(lambda: fastload.load(path, options=options(strategy=strategy)))


def require_named(ends: list[Outcome | None], victims: set[int], store_died: bool = False) -> None:
    """All that are left raised the same, in time, and it names the victims and nobody else."""
    left = {rank: end for rank, end in enumerate(ends) if rank not in victims}
    for rank, end in left.items():
        assert end is not None
        assert end.kind == "PeerError", (rank, end)
        assert set(end.causes) == victims, (rank, end)
        assert all(f"rank {victim}" in end.text for victim in victims), (rank, end)
        assert end.seconds < TIMEOUT_S + SLACK_S, (rank, end)
    assert len({tuple(end.causes.items()) for end in left.values() if end is not None}) == 1


def run_victims(path: Path, world: int, victims: dict[int, signal.Signals], **how: Any) -> None:
    store = how.pop("store", "agent")
    arguments: dict[str, Any] = {"stage": "middle", "strategy": "allgather", **how}
    ends = run_ranks(
        load_and_fail, world, deadline_s=20, dies=victims, store=store,
        path=checkpoint(path), victims=victims, **arguments,
    )  # fmt: skip
    require_named(ends, set(victims))


CASES = [
    pytest.param(stage, strategy, (place + turn) % 3, id=f"{stage}-{strategy}-rank{(place + turn) % 3}")
    for place, stage in enumerate(faults.STAGES)
    for turn, strategy in enumerate(("allgather", "broadcast", "direct"))
    if stage not in ("headers", "compare")
]


@pytest.mark.parametrize(("stage", "strategy", "victim"), CASES)
def test_killed_rank_is_named(tmp_path: Path, stage: str, strategy: str, victim: int) -> None:
    run_victims(tmp_path / "x.safetensors", 3, {victim: KILL}, stage=stage, strategy=strategy)


@pytest.mark.parametrize("signum", [KILL, STOP], ids=lambda signum: signum.name)
@pytest.mark.parametrize(("stage", "victim"), [("headers", 0), ("compare", 1)])
def test_rank_that_ends_between_agreements_is_named(
    tmp_path: Path, stage: str, victim: int, signum: signal.Signals
) -> None:
    run_victims(tmp_path / "x.safetensors", 3, {victim: signum}, stage=stage)


@pytest.mark.parametrize(
    ("stage", "victim"),
    [("start", 1), ("open", 2), ("prepare", 0), ("connect", 1), ("first", 0), ("middle", 0), ("middle", 1),
     ("middle", 2), ("last", 1), ("gather", 0)],
)  # fmt: skip
def test_stopped_rank_is_named(tmp_path: Path, stage: str, victim: int) -> None:
    run_victims(tmp_path / "x.safetensors", 3, {victim: STOP}, stage=stage)


@pytest.mark.parametrize("strategy", ["broadcast", "direct"])
def test_stopped_rank_is_named_with_other_strategies(tmp_path: Path, strategy: str) -> None:
    run_victims(tmp_path / "x.safetensors", 3, {0: STOP}, stage="middle", strategy=strategy)


@pytest.mark.parametrize("signum", [KILL, STOP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("stage", ["open", "prepare", "connect", "middle", "gather"])
def test_rank_0_takes_the_rendezvous_store_with_it(
    tmp_path: Path, stage: str, signum: signal.Signals
) -> None:
    run_victims(tmp_path / "x.safetensors", 3, {0: signum}, stage=stage, store="rank0")


def test_two_ranks_killed_at_once_are_both_named(tmp_path: Path) -> None:
    run_victims(tmp_path / "x.safetensors", 4, {1: KILL, 3: KILL}, stage="middle")
    run_victims(tmp_path / "x.safetensors", 4, {0: KILL, 2: STOP}, stage="first")
