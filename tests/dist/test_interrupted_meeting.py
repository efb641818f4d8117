"""Ctrl-C on one rank while the ranks meet: the others hear of it soon, whoever has not come yet."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import CheckpointManager, LoadOptions, SaveOptions, api
from fastload.comm.tree import TreeRendezvous
from fastload.ext.memory import tier
from tests.dist.faults import PATIENT_S, TOLD_S, Outcome, outcome_of
from tests.dist.harness import run_ranks

MOST_KEPT = 8  # keys in the store, of the tree that was made last, and the one before

SAVING, LOADING = SaveOptions(timeout_s=PATIENT_S), LoadOptions(timeout_s=PATIENT_S)
CALLS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: fastload.load(path / "a", options=LOADING),
    "save": lambda path: fastload.save({"x": torch.ones(3)}, path / "b", options=SAVING),
    "manager": lambda path: CheckpointManager(path / "run", options=SAVING).close(),
    "tier": lambda path: CheckpointManager(
        path / "run", memory=path, memory_every_steps=1, options=SAVING
    ).close(),
}


@dataclass(frozen=True)
class Case:
    """Who is interrupted in which call, and when: while it waits for one that is late, or before it meets.

    Attributes:
        victim: The rank.
        call: The call.
        late: Whom all wait for meanwhile.
        owner: What has the function at whose beginning it happens instead.
        name: Of that function.
    """

    victim: int
    call: str
    late: int | None = None
    owner: Any = None
    name: str = ""


CASES = [
    Case(1, "load", late=2),  # who find no tree yet, as all others do that was made before
    Case(0, "load", late=1),
    Case(2, "save", late=0),
    Case(1, "manager", late=2),
    Case(2, "load", owner=api, name="locate"),
    Case(1, "load", owner=TreeRendezvous, name="begin"),
    Case(1, "tier", owner=tier, name="JobFolder"),
]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def meet_and_be_interrupted(rank: int, world: int, path: Path) -> list[Outcome]:
    store, num_keys, ends = dist.distributed_c10d._get_default_store(), [], []
    alone = dist.new_group([0])
    if rank == 0:
        fastload.save({"x": torch.ones(3)}, path / "a", process_group=alone)
    signal.signal(signal.SIGALRM, interrupt)
    for case in CASES:
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if rank == case.late:
                time.sleep(1.0)
            elif rank == case.victim and case.late is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            elif rank == case.victim:
                patch.setattr(case.owner, case.name, interrupt)
            ends.append(outcome_of(lambda case=case: CALLS[case.call](path)))
        dist.barrier()
        CALLS["load"](path)
        dist.barrier()
        num_keys.append(store.num_keys())
    assert max(num_keys[1:]) <= num_keys[0] + MOST_KEPT, num_keys
    return ends


def test_all_hear_of_an_interrupt_while_they_meet(tmp_path: Path) -> None:
    of_ranks = run_ranks(meet_and_be_interrupted, 3, path=tmp_path)
    for case, ends in zip(CASES, zip(*of_ranks, strict=True), strict=True):
        for rank, end in enumerate(ends):
            assert end.kind == ("KeyboardInterrupt" if rank == case.victim else "PeerError"), (case, ends)
            assert end.seconds < TOLD_S, (case, ends)
            if rank != case.victim:
                assert set(end.causes) == {case.victim}, (case, ends)
                assert "KeyboardInterrupt" in end.text, (case, ends)
