"""Copies of a state that are under way in the background, for whoever is about to change the state."""

from __future__ import annotations

import os
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastload.base.threads import ProcessLock


class StateCopy(Protocol):
    """A copy of a state."""

    def wait(self) -> bool:
        """Waits until it has ended."""
        ...

    def hold_step(self) -> None:
        """Keeps the step of an optimizer from changing what is not copied yet."""
        ...


class StateCopies:
    """The copies under way in this process.

    Steps of all optimizers wait for them, by a hook of torch that is there only while there are copies. It
    is removed by the thread that begins copies and waits for them: torch fails if a hook goes while it calls
    hooks in another thread. A forked child has no copies.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._copies: list[StateCopy] = []
        self._hook: Any = None
        os.register_at_fork(after_in_child=self._copies.clear)

    def add(self, copy: StateCopy) -> None:
        """Has steps wait for a copy."""
        with self._lock:
            self._copies.append(copy)
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(self._before_step)

    def discard(self, copy: StateCopy) -> None:
        """Forgets a copy."""
        with self._lock:
            if copy in self._copies:
                self._copies.remove(copy)

    def remove_hook(self) -> None:
        """Removes the hook if there are no copies."""
        with self._lock:
            if self._hook is not None and not self._copies:
                self._hook.remove()
                self._hook = None

    def wait(self) -> None:
        """Waits until all have ended."""
        for copy in list(self._copies):
            copy.wait()

    def _before_step(self, *_: object) -> None:
        for copy in list(self._copies):
            copy.hold_step()


state_copies = StateCopies()
"""The copies under way in this process."""
