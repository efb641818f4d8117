"""Children that a training forks: signals end them, and the saves of their parent are not theirs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import CheckpointManager
from fastload.errors import FastloadError, WorldError
from tests.dist.harness import ranks

# Forks of processes with threads are risky, newer Pythons say so, and trainings have them all the same.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

_forks = multiprocessing.get_context("fork")
_LIMIT_S = 30


def end_of(child: Callable[[], object], *numbers: int) -> int:
    """Forks a child, sends it signals at once; returns its exit status, or minus the signal that ended it."""
    process = _forks.Process(target=child)
    process.start()
    for number in numbers:
        os.kill(process.pid, number)
    process.join(_LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the child still ran after {_LIMIT_S} s")
    return process.exitcode


def wait_long() -> None:
    """Python looks for signals before it sleeps: what comes between is handled when the sleep ends."""
    for _ in range(200 * _LIMIT_S):
        time.sleep(0.05)


@pytest.mark.slow(but=["15"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@ranks(1)
def test_children_of_a_training_die_of_signals(
    rank: int, world: int, tmp_path: Path, number: signal.Signals
) -> None:
    with CheckpointManager(tmp_path) as manager, CheckpointManager(tmp_path) as other:
        for _ in range(8):  # the signal comes before the child has done anything
            assert end_of(wait_long, number) == -number
        assert not manager.should_save(1), "a child's signal is no signal to its parent"
        os.kill(os.getpid(), number)
        assert manager.should_save(2)
        assert other.should_save(2)
        assert manager.stop_requested


@ranks(1)
def test_children_have_the_handlers_that_were_there_before(rank: int, world: int, tmp_path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with CheckpointManager(tmp_path) as manager:
        ours = signal.getsignal(signal.SIGTERM)
        assert end_of(wait_long, signal.SIGUSR1, signal.SIGTERM) == 7
        # On top of the manager's, and going on to it, as well-behaved ones do.
        signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
        assert end_of(wait_long, signal.SIGTERM) == 7
        assert end_of(manager.close) == 0


def kill_oneself(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@ranks(1)
def test_whatever_the_order_of_closing_the_default_action_comes_back(
    rank: int, world: int, tmp_path: Path
) -> None:
    def in_order() -> None:
        first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
        first.close()
        kill_oneself()
        assert second.should_save(1), "the one that is still open has got it"
        second.close()
        third = CheckpointManager(tmp_path)
        assert not third.should_save(1)
        third.close()
        kill_oneself()

    def put_on_top() -> Callable[[], int]:
        """Somebody else's handler, which counts and goes on to the one before."""
        before, count = signal.getsignal(signal.SIGTERM), [0]

        def handle(number, frame):  # type: ignore[no-untyped-def]
            count[0] += 1
            before(number, frame)

        signal.signal(signal.SIGTERM, handle)
        return lambda: count[0]

    def with_others_between() -> None:
        first = CheckpointManager(tmp_path)
        num_seen = put_on_top()
        second = CheckpointManager(tmp_path)
        kill_oneself()
        assert first.should_save(1)
        assert second.should_save(1)
        assert num_seen() == 1
        first.close()
        kill_oneself()
        assert num_seen() == 2
        second.close()
        kill_oneself()  # the one between goes on to the one of the first, which is closed

    def closed_elsewhere() -> None:
        """Only the main thread may change handlers."""
        manager = CheckpointManager(tmp_path)
        thread = threading.Thread(target=manager.close)
        thread.start()
        thread.join()
        kill_oneself()

    def opened_elsewhere() -> None:
        thread = threading.Thread(target=lambda: CheckpointManager(tmp_path))
        thread.start()
        thread.join()
        kill_oneself()

    for life in (in_order, with_others_between, closed_elsewhere, opened_elsewhere):
        assert end_of(lambda life=life: (life(), wait_long())) == -signal.SIGTERM, life.__name__  # type: ignore[misc]


@ranks(2, deadline_s=90)
def test_children_do_not_speak_for_their_parent(rank: int, world: int, tmp_path: Path) -> None:
    """Not at all: what they would say to the other ranks in its place, these would believe."""
    options = fastload.LoadOptions(timeout_s=20)
    state = {name: torch.arange(1000) for name in "abcd"}
    fastload.save(state, tmp_path / "a")
    checkpoint = fastload.prefetch(tmp_path / "a", options=options)
    refused: list[tuple[Callable[[], object], str]] = [
        (checkpoint.load, "a: the parent of this process has this checkpoint open"),
        (lambda: next(iter(checkpoint.tensors())), "has this checkpoint open"),
        (
            lambda: fastload.load(tmp_path / "a"),
            f"forked by rank {rank}, whose process group",
        ),
        (
            lambda: fastload.save(state, tmp_path / "b"),
            "start this process with the method spawn or forkserver",
        ),
        (lambda: CheckpointManager(tmp_path / "run"), "whose process group only the parent can use"),
    ]

    def child() -> None:
        for call, text in refused:
            with pytest.raises(WorldError, match=text):
                call()
        checkpoint.close()
        with pytest.raises(ZeroDivisionError), checkpoint:
            raise ZeroDivisionError

    assert end_of(child) == 0
    assert checkpoint.load()["a"].equal(state["a"])
    stream = checkpoint.tensors()
    next(stream)

    def child_of_a_stream() -> None:
        for call in (checkpoint.load, lambda: next(stream)):
            with pytest.raises(WorldError, match="has this checkpoint open: use it there"):
                call()
        with pytest.raises(ZeroDivisionError), checkpoint, stream:
            raise ZeroDivisionError

    assert end_of(child_of_a_stream) == 0
    assert [name for name, _ in stream] == ["b", "c", "d"]
    checkpoint.close()
    assert fastload.load(tmp_path / "a", options=options)["a"].equal(state["a"])
    assert not (tmp_path / "b").exists()


@ranks(2)
def test_a_group_that_was_destroyed_is_named(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save({"a": torch.arange(10)}, tmp_path / "a")
    group = dist.new_group([0, 1])
    checkpoint = fastload.open(tmp_path / "a", process_group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(FastloadError, match=r"the process group was destroyed .*open the checkpoint again"):
        checkpoint.load()
    checkpoint.close()
    with pytest.raises(WorldError, match="no group of this process, or was destroyed"):
        fastload.load(tmp_path / "a", process_group=group)


_PROGRAM = """
import os, signal, sys, threading, time, warnings
import torch
import fastload
from fastload.saving.background import await_end
from torch.utils.data import DataLoader

warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads
root, gate, fsync = sys.argv[1], threading.Event(), os.fsync
state = {"weight": torch.arange(1000.0)}
open(root + "/file", "w").close()
os.mkdir(root + "/run")  # a manager makes it durable in the foreground


def slow(descriptor):
    gate.wait()
    fsync(descriptor)


def fork(live):
    if not (pid := os.fork()):
        os.fsync = fsync
        live()
        sys.exit(0)
    for _ in range(3000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def leave_block():
    with manager:
        sys.exit(0)


def wait():
    try:
        handle.wait()
    except fastload.WorldError as error:
        assert "belongs to the parent process" in str(error)
        sys.exit(5)


def ask_manager():
    try:
        manager.should_save(2)
    except fastload.WorldError:
        sys.exit(6)


manager = fastload.CheckpointManager(root + "/run", keep_last=1)
os.fsync = slow
handle = fastload.async_save(state, root + "/slow")
manager.save(1, state)
await_end(fastload.async_save(state, root + "/file"))  # fails, which is told at the end, and once
print("forgets", fork(lambda: None))
print("leaves a block", fork(leave_block))
print("waits", fork(wait))
print("asks", fork(ask_manager))
print("saves", fork(lambda: fastload.save(state, root + "/own")), fork(lambda: fastload.load(root + "/own")))
print("loads data", [int(number) for number in DataLoader(range(3), num_workers=2)])
print("goes on", sum(name.endswith(".saving") for name in os.listdir(root)), handle.done())
gate.set()
handle.wait()
manager.close()
for path in ("/slow", "/own", "/run/step_00000001"):
    assert torch.equal(fastload.load(root + path)["weight"], state["weight"])
print(*sorted(os.listdir(root)))
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_children_have_nothing_to_do_with_the_saves_of_their_parent(tmp_path: Path) -> None:
    """Forked while two saves go on and one has failed, and ended as programs end."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, tmp_path], capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "forgets 0",
        "leaves a block 0",
        "waits 5",
        "asks 6",
        "saves 0 0",
        "loads data [0, 1, 2]",
        "goes on 1 False",
        "file own run slow",
    ]
    told = [line for line in done.stderr.splitlines() if "wait() was not called" in line]
    assert len(told) == 1, done.stderr
    assert f"the save to {tmp_path}/file failed" in told[0]
