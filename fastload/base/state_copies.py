"""Copies of a state that are under way in the background, for whoever is about to change the state."""

from __future__ import annotations

from typing import Protocol


class StateCopy(Protocol):
    """A copy of a state."""

    def wait(self) -> bool:
        """Waits until it has ended."""


under_way: list[StateCopy] = []
"""The copies under way in this process."""


def wait_for_copies() -> None:
    """Waits until all copies have ended."""
    for copy in list(under_way):
        copy.wait()
