"""Ranks that meet in a store which still holds what earlier ranks left there."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fastload.comm import launch
from fastload.comm.launch import _in_this_incarnation
from fastload.comm.rendezvous import Decision, StoreStep
from fastload.comm.responses import write_response
from fastload.errors import DeadlineExceeded, WorldError
from tests.dist.harness import ranks


@pytest.fixture
def port() -> Iterator[int]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def meet(port: int, ranks: list[int], size: int) -> list[str]:
    """Lets ranks meet, and returns what rank 0 of those that met has left for each of them."""

    def come(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        own = _in_this_incarnation(store, rank, size)
        if rank == 0:
            assert not own.check(["address"])
            own.set("address", secrets.token_hex())
        return own.get("address").decode()

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(come, ranks))


def test_every_incarnation_has_its_own_namespace(port: int) -> None:
    first, second = meet(port, [0, 1, 2], 3), meet(port, [2, 1, 0], 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_ranks_that_died_before_all_had_come_do_not_count(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.comm.launch._MEETING_S", 0.3)
    with pytest.raises(RuntimeError, match="only 1 of 2 ranks came"):
        meet(port, [0], 2)
    with pytest.raises(RuntimeError, match="rank 0 did not say"):
        meet(port, [1], 2)
    monkeypatch.setattr("fastload.comm.launch._MEETING_S", 20.0)
    for _ in range(5):
        assert len(set(meet(port, [1, 0], 2))) == 1


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_that_never_come_are_waited_for_no_longer(
    launcher: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself torch waits half an hour for a key in an agent's store, or for others to join its own."""
    monkeypatch.setattr(launch, "_MEETING_S", 0.5)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(launcher == "torchrun"))
    rank, place = (1, port) if launcher == "torchrun" else (0, free_port())
    job = launch.Launch(rank, 2, 0, 1, "127.0.0.1", place, launcher)
    with pytest.raises(WorldError, match=f"rank {rank} of 2 did not meet the others"):
        next(launch.join_job(job, "listing", timeout_s=5))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


@ranks(3, dies={0: signal.SIGKILL})
def test_that_rank_0_is_killed_while_it_waits_for_others_is_noticed(rank: int, world: int, port: int) -> None:
    launch._GOING_ON_S = 1.0
    if rank == 0:
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with pytest.raises(RuntimeError, match="rank 0 was killed or stopped while it waited"):
        launch._in_this_incarnation(store, rank, world + 1)


@ranks(2, dies={1: signal.SIGKILL})
def test_that_a_rank_is_killed_when_all_have_come_is_noticed(rank: int, world: int, port: int) -> None:
    launch._GOING_ON_S = 1.0
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    own = launch._in_this_incarnation(store, rank, world)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="reach/1"):
        launch._require_ready(own, launch.Launch(rank, world, 0, 1, "127.0.0.1", port, "torchrun"))


@ranks(2, dies={1: signal.SIGKILL})
def test_that_a_rank_is_killed_while_the_ranks_connect_is_noticed(rank: int, world: int, port: int) -> None:
    dist.destroy_process_group()
    job = launch.Launch(rank, world, 0, 1, "127.0.0.1", port, "torchrun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setattr(launch, "_MEETING_S", 4.0)
        if rank:
            patch.setattr(dist, "init_process_group", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(DeadlineExceeded, match="rank 0 of 2: connecting to the others, one of which may"):
            launch._join_job(job, backend="gloo")


def test_a_decision_of_many_ranks_is_short() -> None:
    """All of them read it: what their answers have in common is told once."""
    store, num_ranks = dist.HashStore(), 200
    steps = [StoreStep(store, "1/0", num_ranks) for _ in range(num_ranks)]
    plan = "fc89f712c219374e6cb510905f7f6283"
    answers = [{"value": {"host": f"host{rank // 8}", "plan": plan}} for rank in range(num_ranks)]
    last = [step.respond(write_response(rank, answers[rank])) for rank, step in enumerate(steps)]
    assert last == [False] * (num_ranks - 1) + [True]
    steps[-1].decide(1.0)
    assert [answer for answer, _ in steps[0].read().runs] == answers[::8]
    assert 8 * len(store.get(steps[0].decision)) < len(store.get(steps[0].log))


def test_a_decision_may_be_longer_than_a_value_of_the_store(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ours, theirs = (StoreStep(store, "1/0", 2) for _ in range(2))
    texts = [
        Decision.write(1.0, write_response(0, {"value": word * (10 << 20), "error": None})) for word in "ab"
    ]
    assert ours.put_decision(texts[0]) == texts[0]
    assert theirs.put_decision(texts[1]) == texts[0], "the first one counts"
    assert theirs.read().came[0][0]["value"] == "a" * (10 << 20)
    assert len(ours.keys_of(texts[0])) == 4
    assert set(ours.keys_of(texts[0])) <= set(theirs.all_keys())
    for key in theirs.all_keys():
        store.delete_key(key)
    assert not any(store.check([key]) for key in ours.keys_of(texts[0]))
