"""The connections of a tree: what was sent arrives, also from a rank that has gone since."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastload.comm import tree
from fastload.comm.tree import TreeBroken, TreeLinks


def test_what_came_before_the_other_end_went_is_received() -> None:
    """Although this end has something for it, of another call, which nobody takes any more."""
    above, below = socket.socketpair()
    first, second = TreeLinks(0, {1: above}), TreeLinks(1, {0: below})
    first.send([1], (1, 0), "verdict", b"along")
    first.drop()
    second.send([0], (2, 0), "answer", b"")
    assert second.receive([0], (1, 0), lambda: 1.0) == [("verdict", b"along")]
    with pytest.raises(TreeBroken):
        second.receive([0], (2, 0), lambda: 1.0)
    second.drop()


def test_a_long_message_leaves_at_once_while_another_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a save in the background, whose thread moves the messages of all."""
    monkeypatch.setattr(tree, "_LONGEST_S", 60.0, raising=False)
    above, below = socket.socketpair()
    first, second = TreeLinks(0, {1: above}), TreeLinks(1, {0: below})
    waits, deadline = threading.Event(), time.monotonic() + 20

    def look() -> float:
        waits.set()
        return 60.0

    def look_briefly() -> float:
        if time.monotonic() > deadline:
            raise TreeBroken
        return 1.0

    with ThreadPoolExecutor(2) as pool:
        try:
            saving = pool.submit(first.receive, [1], (1, 0), look)
            waits.wait(20)
            time.sleep(0.1)  # after which it most likely polls
            arrived = pool.submit(second.receive, [0], (2, 0), look_briefly)
            first.send([1], (2, 0), "table", bytes(4 << 20))
            first.flush([1], look_briefly)
            assert arrived.result(20) == [("table", bytes(4 << 20))]
            second.send([0], (1, 0), "saved", b"")
            assert saving.result(20) == [("saved", b"")]
        finally:
            first.drop()
            second.drop()
