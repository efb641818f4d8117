"""Ranks of which one makes calls that the others do not; and what a call leaves in the rendezvous store."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.errors import FastloadError, PeerError, PlanMismatch
from fastload.saving import write
from fastload.storage.local_target import LocalTarget
from tests.dist.harness import ranks, run_ranks
from tests.dist.patience import patient

STATE = {"weights": torch.arange(1000), "step": 3}
LOADING = fastload.LoadOptions(timeout_s=20, strategy="allgather")
SAVING = fastload.SaveOptions(timeout_s=20, overwrite=True)


def loads(path: Path) -> bool:
    state = fastload.load(path, options=LOADING)
    return bool(torch.equal(state["weights"], STATE["weights"]))


@ranks(3)
def test_ranks_meet_again_after_a_call_that_one_of_them_made(rank: int, world: int, tmp_path: Path) -> None:
    path = tmp_path / "step_00000001"
    fastload.save(STATE, path, metadata={"step": "1"}, options=SAVING)
    briefly = {"timeout_s": patient(0.6)}
    manager = fastload.CheckpointManager(tmp_path, options=fastload.SaveOptions(**briefly))
    alone: list[Callable[[], Any]] = [
        lambda: fastload.save(STATE, tmp_path / "alone", options=replace(SAVING, **briefly)),
        lambda: fastload.async_save(STATE, tmp_path / "alone", options=replace(SAVING, **briefly)).wait(20),
        lambda: fastload.load(path, options=replace(LOADING, **briefly)),  # the others make it later
        lambda: fastload.verify(path, options=replace(LOADING, **briefly)),
        manager.latest,
    ]
    for number, call in enumerate(alone):
        if rank == number % 2:
            with pytest.raises(
                PeerError, match=r"or did not make this call .as inside of `if rank == 0:`"
            ) as raised:
                call()
            assert set(raised.value.failures) == set(range(world)) - {rank}
        dist.barrier()
        assert loads(path)
        fastload.async_save(STATE, tmp_path / "next", options=SAVING)
        assert loads(path)
        assert manager.latest() == 1
    manager.close()


@ranks(3)
def test_a_group_made_anew_meets_whatever_some_did_before(rank: int, world: int, tmp_path: Path) -> None:
    store = dist.distributed_c10d._get_default_store()
    for life in range(2):
        if rank == 1 + life:
            with pytest.raises(PeerError):
                fastload.load(tmp_path / "a", options=replace(LOADING, timeout_s=patient(0.4)))
        dist.barrier()
        dist.destroy_process_group()
        anew = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", store=anew, rank=rank, world_size=world)
    fastload.save(STATE, tmp_path / "a", options=SAVING)
    assert loads(tmp_path / "a")


@ranks(3)
def test_ranks_in_different_calls_are_told_at_once(rank: int, world: int, tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    fastload.save(STATE, path, options=SAVING)
    patient = {"timeout_s": 200.0}
    began = time.monotonic()

    def call() -> None:
        if rank == 0:
            fastload.save(STATE, other, options=replace(SAVING, **patient))
        else:
            fastload.load(path, options=replace(LOADING, **patient))

    with pytest.raises(PlanMismatch) as raised:
        call()
    text = f"the ranks are out of step: rank 0 is saving to {other}, ranks 1, 2 are opening {path}"
    assert str(raised.value) == text
    assert time.monotonic() - began < 100
    assert loads(path)
    assert os.listdir(tmp_path) == ["a"]


def attempt(call: Callable[[], Any]) -> None:
    with suppress(FastloadError):
        call()


def call_all(rank: int, folder: Path) -> None:
    """Calls of all kinds, those that succeed and those that fail."""
    path = folder / "a"
    fastload.save(STATE, path, options=SAVING)
    fastload.async_save(STATE, folder / "b", options=SAVING).wait(20)
    many = torch.arange(3 << 20, dtype=torch.int32)  # whose checksums do not fit into the decision
    fastload.save({"many": many}, folder / "many", options=replace(SAVING, block_bytes=4096))
    assert torch.equal(fastload.load(folder / "many", options=LOADING)["many"], many)
    with fastload.open(path, options=LOADING) as checkpoint:
        for _ in range(2):
            checkpoint.load()
        checkpoint.verify()
    fastload.load(path, options=replace(LOADING, trace=folder / "trace.json"))
    fastload.stage(path, folder / "staged", options=fastload.StageOptions(overwrite=True))
    attempt(lambda: fastload.load(folder / "nothing", options=LOADING))
    attempt(lambda: fastload.save(STATE, path, options=replace(SAVING, overwrite=False)))
    attempt(lambda: fastload.save({"step": rank}, folder / "c", options=SAVING))
    attempt(lambda: fastload.save({"step": print if rank == 0 else 1}, folder / "c", options=SAVING))
    attempt(lambda: fastload.load(folder / "ab"[rank % 2], options=LOADING))
    attempt(lambda: fastload.load(path, options=replace(LOADING, progress=refuse if rank == 0 else None)))
    if rank == 0:
        attempt(lambda: fastload.load(path, options=replace(LOADING, timeout_s=0.2)))
    if dist.is_initialized():
        dist.barrier()


def refuse(done: int, total: int) -> None:
    raise RuntimeError("no progress")


def count_keys(rank: int, world: int, folder: Path) -> None:
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(3):
        call_all(rank, folder)
        assert loads(folder / "a")
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    # Some keys stay until a later call, for late ranks: one more or less, and not more with each turn.
    assert counts[-1] < counts[0] + 2, counts


@pytest.mark.slow(but=["2-rank0"])
@pytest.mark.parametrize(("world", "store"), [(2, "rank0"), (3, "agent"), (5, "agent")])
def test_calls_leave_nothing_in_the_store(
    world: int, store: Literal["agent", "rank0"], tmp_path: Path
) -> None:
    run_ranks(count_keys, world, store=store, folder=tmp_path)


@pytest.mark.slow(but=["writing"])
@pytest.mark.parametrize("stage", ["writing", "publishing"])
@ranks(3)
def test_a_failed_save_leaves_nothing_in_the_store(rank: int, world: int, tmp_path: Path, stage: str) -> None:
    """Neither the checksums of the ranks for the leader, nor their traces for rank 0."""
    pytest.MonkeyPatch().setattr(write, "_SHORT_BYTES", 0)
    store, counts = dist.distributed_c10d._get_default_store(), []
    options = replace(SAVING, writers="all", trace=tmp_path / "trace.json" if stage == "publishing" else None)
    fastload.save(STATE, tmp_path / "a", options=SAVING)

    def fail(*_: Any, **__: Any) -> None:
        time.sleep(0.5)  # in which the others hand in what they have
        raise RuntimeError("no")

    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(LocalTarget, {"writing": "flush", "publishing": "publish"}[stage], fail)
            with pytest.raises(PeerError, match=r"rank 0 .*: RuntimeError: no"):
                fastload.save(STATE, tmp_path / "b", options=options)
        assert loads(tmp_path / "a")
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert max(counts) - min(counts) < 2, counts  # each save would leave several


CALLS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: fastload.load(path / "a", options=LOADING),
    "open": lambda path: fastload.open(path / "a", options=LOADING),
    "verify": lambda path: fastload.verify(path / "a", options=LOADING),
    "save": lambda path: fastload.save(STATE, path / "b", options=SAVING),
    "async_save": lambda path: fastload.async_save(STATE, path / "b", options=SAVING).wait(20),
    "stage": lambda path: fastload.stage(path / "a", path / "b"),
    "fails": lambda path: attempt(lambda: fastload.load(path / "none", options=LOADING)),
}


def call_and_go(rank: int, world: int, path: Path, call: str) -> bool:
    fastload.save(STATE, path / "a", options=SAVING)
    dist.barrier()
    CALLS[call](path)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


@pytest.mark.slow(but=["load", "fails"])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_takes_the_store_along_leaves_after_all_have_heard(call: str, tmp_path: Path) -> None:
    ends = run_ranks(call_and_go, 4, dies={0: signal.SIGKILL}, store="rank0", path=tmp_path, call=call)
    assert ends[1:] == [True] * 3


@ranks(2)
def test_ranks_may_name_a_place_of_their_own(rank: int, world: int, tmp_path: Path) -> None:
    """By a relative path, in working directories that differ, as on hosts with disks of their own."""
    own = tmp_path / str(rank)
    (own / "runs").mkdir(parents=True)
    before = os.getcwd()
    os.chdir(own)
    try:
        alone = fastload.SaveOptions(shared=False, timeout_s=20)
        fastload.save(STATE, "runs/step_00000001", options=alone)
        with fastload.CheckpointManager("runs", options=alone) as manager:
            assert manager.latest() == 1
    finally:
        os.chdir(before)
