"""Threads that make calls: fewer where the system lets no more begin, and none that nobody hears of."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import wait
from functools import partial

import pytest
import torch

from fastload.base import threads
from fastload.base.threads import Task, Workers
from tests.e2e.forked import forking_python


def refuse_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets the system refuse to start any thread but the first few."""
    honest, started = Task.start, []

    def start(self: Task) -> None:
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        started.append(self)
        honest(self)

    monkeypatch.setattr(Task, "start", start)


def test_calls_are_made_by_the_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_after(monkeypatch, 1)
    workers = Workers(3, "test")
    assert [workers.submit(lambda n=n: n * n).result(30) for n in range(4)] == [0, 1, 4, 9]
    assert workers.close(wait_s=30)


def test_without_any_thread_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_after(monkeypatch, 0)
    workers = Workers(2, "test")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            workers.submit(lambda: None)
    assert workers.close(wait_s=0)


def test_calls_one_after_the_other_take_one_thread() -> None:
    workers = Workers(4, "test")
    names = {workers.submit(lambda: threading.current_thread().name).result(30) for _ in range(20)}
    assert workers.close(wait_s=30)
    assert names == {"test-0"}


def test_a_thread_that_has_ended_its_errand_begins_the_next_one() -> None:
    idents = []
    for _ in range(50):
        task = Task(lambda: idents.append(threading.get_ident()), "test")
        task.start()
        task.join(30)
        assert not task.is_alive()
    assert len(set(idents)) < 10


def test_tasks_at_once_have_threads_of_their_own() -> None:
    all_here = threading.Barrier(5)
    tasks = [Task(lambda: all_here.wait(30), "test") for _ in range(5)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(30)
    assert not any(task.is_alive() for task in tasks)


def test_a_thread_without_an_errand_keeps_no_memory_and_ends() -> None:
    class Thing:
        pass

    thing, names = Thing(), []
    there = weakref.ref(thing)
    task = Task(partial(lambda thing: names.append(threading.current_thread().name), thing), "test")
    del thing
    task.start()
    task.join(30)
    assert names == ["test"]
    assert there() is None
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(one.name == "fastload-idle" for one in threading.enumerate()):
        time.sleep(0.05)
    assert not any(one.name == "fastload-idle" for one in threading.enumerate())


def test_threads_are_dismissed_while_tasks_begin() -> None:
    """As at the end of a process of which a save in the background goes on."""
    going_on = [True]

    def begin_many() -> None:
        kept: list[Task] = []
        while going_on:
            kept = [*kept[-300:], Task(lambda: None, "test")]
            kept[-1].start()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    starters = [threading.Thread(target=begin_many) for _ in range(2)]
    try:
        for thread in starters:
            thread.start()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            threads._pool.dismiss()
    finally:
        sys.setswitchinterval(interval_s)
        going_on.clear()
        for thread in starters:
            thread.join(30)


def test_in_a_forked_child_tasks_are_done_by_threads_of_its_own() -> None:
    first = Task(lambda: None, "test")
    first.start()
    first.join(30)
    child = os.fork()
    if child == 0:
        task = Task(lambda: None, "test")
        task.start()
        task.join(20)
        os._exit(task.is_alive())
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif("USE_OPENMP=ON" not in torch.__config__.show(), reason="torch is without OpenMP")
def test_torch_uses_one_thread_for_a_thread_that_asks_for_it() -> None:
    """In a process of its own, since torch keeps threads that do not survive a fork."""
    code = (
        "import threading, torch; from fastload.base.threads import one_torch_thread as one\n"
        "torch.set_num_threads(3); found = []\n"
        "def work():\n"
        "    with one(): found.append(torch.get_num_threads())\n"
        "    found.append(torch.get_num_threads())\n"
        "with one():\n"
        "    found.append(torch.get_num_threads())\n"
        "    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))\n"
        "    other.start(); other.join()\n"
        "work(); other = threading.Thread(target=work); other.start(); other.join()\n"
        "assert found == [1, 3, 1, 3, 1, 3], found\n"
    )
    subprocess.run([forking_python(), "-c", code], check=True, timeout=60)


def test_no_call_is_made_after_the_end() -> None:
    workers = Workers(1, "fastload-ended")
    assert workers.submit(lambda: 3).result() == 3
    assert workers.close(wait_s=30)
    with pytest.raises(RuntimeError, match="fastload-ended: no call after the end"):
        workers.submit(lambda: 4)


def test_calls_that_ask_for_more_threads_after_the_end_leave_none() -> None:
    """As reads do, which know at their end how many there may be at once."""
    workers, go_on = Workers(1, "fastload-grown"), threading.Event()

    def grow() -> None:
        go_on.wait()
        workers.set_most(8)

    futures = [workers.submit(grow) for _ in range(20)]
    workers.close(wait_s=0.0)
    go_on.set()
    wait(futures)
    limit = time.monotonic() + 30
    while any(thread.name.startswith("fastload-grown") for thread in threading.enumerate()):
        assert time.monotonic() < limit
        time.sleep(0.005)
