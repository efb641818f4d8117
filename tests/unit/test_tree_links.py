"""The connections of a tree: what was sent arrives, also from a rank that has gone since."""

from __future__ import annotations

import socket

import pytest

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
