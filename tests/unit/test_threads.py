"""Threads that make calls: fewer where the system lets no more begin, and none that nobody hears of."""

from __future__ import annotations

import threading

import pytest

from fastload.base.threads import Workers


def refuse_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets the system refuse to start any thread but the first few."""
    honest, started = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        started.append(self)
        honest(self)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_calls_are_made_by_the_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_after(monkeypatch, 1)
    workers, ended = Workers(3, "test"), threading.Event()
    assert [workers.submit(lambda n=n: n * n).result(30) for n in range(4)] == [0, 1, 4, 9]
    workers.at_end(ended.set)
    assert workers.close(wait_s=30)
    assert ended.wait(30)


def test_without_any_thread_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_after(monkeypatch, 0)
    workers, ended = Workers(2, "test"), threading.Event()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            workers.submit(lambda: None)
    workers.at_end(ended.set)
    assert ended.is_set()
    assert workers.close(wait_s=0)


def test_what_is_to_be_done_at_the_end_is_all_done() -> None:
    workers, may_end = Workers(2, "test"), threading.Event()
    ends: list[str] = []
    work = workers.submit(lambda: may_end.wait(30))
    workers.at_end(lambda: ends.append("first"))
    workers.at_end(lambda: ends.append("second"))
    assert ends == []
    may_end.set()
    assert work.result(30)
    assert workers.close(wait_s=30)
    assert ends == ["first", "second"]
