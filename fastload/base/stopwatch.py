"""Stopwatches, which tell observers of each piece of work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_log = logging.getLogger(__name__)


class Stopwatch:
    """Measures the time in which at least one thread does some work.

    Use as a context manager, also nested and in several threads at once.

    Attributes:
        listeners: Called with (begin, end, facts) of each piece of work with a `span` or a beginning. One
            that fails is logged, and called no more.
    """

    def __init__(self) -> None:
        self.listeners: tuple[Callable[[float, float, Mapping[str, Any]], None], ...] = ()
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._total_s = 0.0

    def __enter__(self) -> Stopwatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def span(self, **facts: Any) -> Iterator[None]:
        """Measures a piece of work, with facts for its listeners."""
        began = self.start()
        try:
            yield
        finally:
            self.stop(began, **facts)

    def start(self) -> float:
        """Begins a piece of work; returns the time."""
        now = time.perf_counter()
        with self._lock:
            if self._active == 0:
                self._since = now
            self._active += 1
        return now

    def stop(self, began: float | None = None, **facts: Any) -> None:
        """Ends one piece of work.

        Args:
            began: Result of `start`, to tell the listeners.
            facts: Facts for them.
        """
        now = time.perf_counter()
        with self._lock:
            self._active -= 1
            if self._active == 0:
                self._total_s += now - self._since
        if began is not None:
            for listener in self.listeners:
                try:
                    listener(began, now, facts)
                except Exception:
                    _log.exception("an observer failed")
                    self.listeners = tuple(one for one in self.listeners if one is not listener)

    @property
    def seconds(self) -> float:
        """Seconds so far with at least one piece of work under way."""
        with self._lock:
            return self._total_s + (time.perf_counter() - self._since if self._active else 0.0)
