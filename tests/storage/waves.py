"""Counts the round trips of this process: the longest chain of requests that wait for each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.storage.gateway import Gateway, Request, serving_gateway

__all__ = ["Waves", "counting_waves"]

_TICK_S = 0.01
_QUIET_TICKS = 4
_BACKGROUND_S = 0.001  # of processor time in a tick, of threads that wait for something and poll


class Waves:
    """Holds the requests of this process until it sends no more, and lets all of them pass at once.

    Requests that pass together do not wait for each other, so the waves are the round trips, however slow or
    busy the machine is.

    Attributes:
        sent: The requests of each wave.
    """

    def __init__(self) -> None:
        self.sent: list[list[Request]] = []
        self._changed = threading.Condition()
        self._held: list[Request] = []
        self._num_passing = 0
        self._is_over = False

    @property
    def count(self) -> int:
        return len(self.sent)

    @contextmanager
    def hold(self, request: Request) -> Iterator[None]:
        """Holds a request before the block, which answers it."""
        with self._changed:
            wave = self.count
            self._held.append(request)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.count > wave or self._is_over)
        try:
            yield
        finally:
            with self._changed:
                self._num_passing -= 1
                self._changed.notify_all()

    @contextmanager
    def releasing(self) -> Iterator[None]:
        """Lets the waves pass until the end of the block."""
        thread = threading.Thread(target=self._release, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            thread.join()

    def _release(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or (self._held and not self._num_passing))
                if self._is_over:
                    return
                before = len(self._held)
            if not _is_quiet():
                continue
            with self._changed:
                if len(self._held) == before:
                    self.sent.append(self._held)
                    self._num_passing, self._held = before, []
                    self._changed.notify_all()


def _is_quiet() -> bool:
    """Whether all other threads of this process sleep, for a while.

    A thread that waits for Python's lock sleeps, too; then another one takes processor time.
    """
    for _ in range(_QUIET_TICKS):
        used_s = time.process_time() - time.thread_time()
        time.sleep(_TICK_S)
        if time.process_time() - time.thread_time() - used_s > _BACKGROUND_S or _others_run():
            return False
    return True


def _others_run() -> bool:
    own = str(threading.get_native_id())
    for task in os.listdir("/proc/self/task"):
        try:
            state = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if task != own and state in "RD":
            return True
    return False


@contextmanager
def counting_waves(upstream: str) -> Iterator[tuple[Gateway, Waves]]:
    """Runs a gateway to a server, which counts the waves of requests to it."""
    waves = Waves()
    with serving_gateway(upstream) as gateway, waves.releasing():
        gateway.hold = waves.hold
        yield gateway, waves
