"""Ctrl-C on one rank, and errors in the background that nobody waits for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

import fastload
from fastload.errors import CheckpointExists, PeerError
from fastload.saving.background import await_end
from tests.crash.saves import (
    leftovers,
    options,
    require_named,
    require_whole,
    save,
    save_again,
    save_struck,
    state,
    version_of,
)
from tests.crash.tracer import needs_strace, striking
from tests.dist.faults import fastload_threads
from tests.dist.harness import ranks

# See test_killed.py for which call is which.
INTERRUPTS = [("pwrite64", 2, 1), ("fsync", 1, 2), ("pwrite64", 3, 0), ("fsync", 2, 0), ("fallocate", 1, 0)]


@pytest.mark.slow(but=["fsync-2", "pwrite64-3"])
@needs_strace
@pytest.mark.parametrize(("call", "count", "rank"), INTERRUPTS)
def test_interrupted(tmp_path: Path, call: str, count: int, rank: int) -> None:
    path = tmp_path / "a"
    save(state(1), path, background=False)
    faults = {rank: [(call, f"signal=SIGINT:when={count}")]}
    ends = save_struck(path, faults, overwrite=True, background=False)
    own = ends.pop(rank)
    assert own.kind == "KeyboardInterrupt", own
    assert own.threads == [], own
    require_named(ends, {rank: "KeyboardInterrupt"})
    require_whole(path, 1)
    assert leftovers(tmp_path) == []
    save_again(path)


@needs_strace
@ranks(3)
def test_an_error_that_nobody_waited_for_is_raised_by_the_next_save(
    rank: int, world: int, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    faults = [("pwrite64", "error=EIO:when=2")] if rank == 1 else []
    with striking(faults):
        handle = fastload.async_save(state(1), path, options=options(timeout_s=20.0))
        while not handle.done():
            time.sleep(0.01)
    assert handle.report is None
    with pytest.raises(PeerError, match=r"rank 1.* Input/output error \(EIO\)") as raised:
        save(state(2), tmp_path / "b", background=rank < 0, timeout_s=20.0)
    assert str(raised.value).startswith(f"the earlier save to {path}")
    assert str(raised.value).count("EIO") == 1
    assert list(raised.value.failures) == [1]
    assert not path.exists()
    save(state(2), path, background=False, timeout_s=20.0)  # it is raised once
    with pytest.raises(PeerError, match="EIO"):
        handle.wait()  # but whoever asks that save itself hears the same again
    dist.barrier()
    assert version_of(fastload.load(path)) == 2
    assert fastload_threads() == []
    assert leftovers(tmp_path) == []


@ranks(2)
def test_an_error_that_one_rank_has_not_seen_is_raised_by_all_in_the_same_call(
    rank: int, world: int, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    save(state(1), path, background=False, timeout_s=20.0)
    for begin in (fastload.save, fastload.async_save):
        failing = fastload.async_save(state(2), path, options=options(timeout_s=20.0))
        await_end(failing)
        if rank == 0:
            with pytest.raises(CheckpointExists):
                failing.wait()
        dist.barrier()
        with pytest.raises(CheckpointExists, match=f"^the earlier save to {path} failed: {path} exists"):
            begin(state(2), tmp_path / "b", options=options(timeout_s=20.0))
        save(state(2), tmp_path / "b", background=True, timeout_s=20.0, overwrite=True)  # it is raised once
    failing = fastload.async_save(state(3), path, options=options(timeout_s=20.0))
    await_end(failing)
    if rank == 1:
        with pytest.raises(PeerError):  # with the patience of the caller, although there is an error to raise
            fastload.save(state(3), tmp_path / "c", options=options(timeout_s=0.5))
    dist.barrier()
    if rank == 0:
        with pytest.raises(CheckpointExists):
            failing.wait()
    save(state(3), tmp_path / "c", background=True, timeout_s=20.0)


@ranks(2)
def test_a_report_that_cannot_be_told_is_no_failed_save(rank: int, world: int, tmp_path: Path) -> None:
    def refuse(report: fastload.SaveReport) -> None:
        raise RuntimeError("no room for reports")

    given = options(timeout_s=20.0, on_report=refuse if rank == 1 else None)
    handle = fastload.async_save(state(1), tmp_path / "a", options=given)
    await_end(handle)
    dist.barrier()
    for background in (True, False):
        save(state(2), tmp_path / "b", background=background, timeout_s=20.0, overwrite=True)
    with pytest.raises(PeerError, match=r"on_report failed on 1 of 2 ranks .*rank 1 .*no room"):
        handle.wait()
    assert version_of(fastload.load(tmp_path / "a")) == 1
