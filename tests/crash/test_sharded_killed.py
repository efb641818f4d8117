"""Ranks that die or stop in the midst of a sharded save: between those who hold bytes and those who write."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from fastload.saving import exchange
from tests.crash.saves import (
    End,
    Struck,
    end_of,
    leftovers,
    require_named,
    require_whole,
    save,
    save_again,
    save_all_struck,
    shards,
    state,
)
from tests.crash.tracer import needs_strace
from tests.dist.harness import run_ranks

LATE = "DeadlineExceeded: did not answer within"


def strike(
    rank: int, world: int, path: Path, victim: int, where: str, signum: signal.Signals, **how: Any
) -> End:
    """The victim gets a signal before it sends a packet, or when it has put a piece together."""
    if rank == victim:
        place, name = (exchange.Wire, "send") if where == "sending" else (exchange.PartAssembler, "part")
        real, left = getattr(place, name), [2]

        def struck(*given: Any) -> Any:
            made = real(*given) if where == "received" else None
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signum)
            return made if where == "received" else real(*given)

        setattr(place, name, struck)
    value = shards(state(2), init_device_mesh("cpu", (world,)))
    return end_of(lambda: save(value, path, overwrite=True, **how))


@pytest.mark.slow(but=["received"])
@pytest.mark.parametrize(
    ("where", "victim", "signum", "background"),
    [
        ("sending", 1, signal.SIGKILL, False),
        ("sending", 0, signal.SIGSTOP, True),
        ("received", 2, signal.SIGKILL, True),
    ],
)
def test_struck_between_exchange_and_write(
    tmp_path: Path, where: str, victim: int, signum: signal.Signals, background: bool
) -> None:
    path = tmp_path / "a"
    save(state(1), path, background=False)
    ends = run_ranks(
        strike, 3, dies={victim: signum},
        path=path, victim=victim, where=where, signum=signum, background=background,
    )  # fmt: skip
    require_named([end for rank, end in enumerate(ends) if rank != victim], {victim: LATE})
    require_whole(path, 1)
    if victim != 0:
        assert leftovers(tmp_path) == []
    save_again(path)


@needs_strace
def test_killed_before_a_system_call(tmp_path: Path) -> None:
    """As `test_killed` has it of whole states: the shards are the same files."""
    cases = [("pwrite64", 2, 1, True, 1), ("pwrite64", 2, 0, False, 1), ("renameat2", 1, 0, True, 1)]
    struck = []
    for number, (call, count, rank, background, _) in enumerate(cases):
        path = tmp_path / str(number) / "a"
        save(state(1), path, background=False)
        faults = {rank: [(call, f"signal=SIGKILL:when={count}")]}
        struck.append(Struck(path, faults, {"overwrite": True, "background": background, "sharded": True}))
    for one, ends, (_, _, rank, _, left) in zip(struck, save_all_struck(struck), cases, strict=True):
        require_named(ends, {rank: LATE})
        require_whole(one.path, left)
    save_again(*(one.path for one in struck))
