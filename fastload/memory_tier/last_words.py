"""What a job has in memory goes to storage before it ends, should its training not come to save in time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum, auto

from fastload.base.threads import background
from fastload.comm.world import World
from fastload.errors import FastloadError, Interrupted

__all__ = ["AFTER_S", "LastWords"]

_log = logging.getLogger(__name__)

AFTER_S = 5.0
"""Seconds after a signal in which a training that is well comes to save; what that writes is newer."""


class _State(Enum):
    IDLE = auto()
    WAITING = auto()
    WRITING = auto()
    OVER = auto()


class LastWords:
    """Writes what is in memory to storage some time after a signal, unless the training comes to save before.

    Each rank that has got the signal waits for itself. The ranks do it together or not at all: one that comes
    to save tells the others, and goes on once what had begun has ended.

    Args:
        world: The ranks, which met for this when the training began.
        write: Writes it, given the ranks.
    """

    def __init__(self, world: World, write: Callable[[World], object]) -> None:
        self._world = world
        self._write = write
        self._lock = threading.Lock()
        self._state = _State.IDLE
        self._comes = threading.Event()
        self._has_ended = threading.Event()

    def expect(self) -> None:
        """Notes that there was a signal; from any thread."""
        if self._becomes(_State.WAITING, _State.IDLE):
            background(self._wait, "fastload-last-words").start()

    def come_to_save(self) -> None:
        """Notes that the training has come to save by itself, or to its end; waits for what has begun."""
        self.cancel()
        if self._becomes(_State.OVER, _State.IDLE, _State.WAITING):
            self._world.leave(Interrupted("the training has come to save, or to its end"))
        elif self._state is _State.WRITING:
            self._has_ended.wait()

    def cancel(self) -> None:
        """Has nothing begin any more after some time."""
        self._comes.set()

    def write_now(self) -> None:
        """Writes it, unless that is done or left; all ranks together."""
        self.cancel()
        if self._becomes(_State.WRITING, _State.IDLE, _State.WAITING):
            self._run()
        elif self._state is _State.WRITING:
            self._has_ended.wait()

    def _becomes(self, state: _State, *before: _State) -> bool:
        with self._lock:
            is_so = self._state in before
            if is_so:
                self._state = state
            return is_so

    def _wait(self) -> None:
        if not self._comes.wait(AFTER_S) and self._becomes(_State.WRITING, _State.WAITING):
            self._run()

    def _run(self) -> None:
        try:
            with self._world.together():
                self._write(self._world)
            self._world.heard()
        except FastloadError as error:
            level = logging.WARNING if self._world.rank == 0 else logging.DEBUG
            _log.log(level, "what is in memory is not written to storage: %s", error)
        finally:
            self._state = _State.OVER
            self._has_ended.set()
