"""How long something took that several threads do at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Measures for how long at least one of several threads was busy with something.

    Use as a context manager, also nested and from several threads at once.

    Attributes:
        record: Called with (begin, end, facts) of every piece of work whose `span` or beginning is
            known; None, the default, costs nothing.
    """

    def __init__(self) -> None:
        self.record: Callable[[float, float, Mapping[str, Any]], None] | None = None
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
        """Measures a piece of work of which something is to be known in a trace."""
        began = self.start()
        try:
            yield
        finally:
            self.stop(began, **facts)

    def start(self) -> float:
        """Begins one more piece of work; returns when."""
        now = time.perf_counter()
        with self._lock:
            if self._active == 0:
                self._since = now
            self._active += 1
        return now

    def stop(self, began: float | None = None, **facts: Any) -> None:
        """Ends one piece of work.

        Args:
            began: What `start` returned for it, if it is to be in a trace.
            facts: What else is known of it.
        """
        now = time.perf_counter()
        with self._lock:
            self._active -= 1
            if self._active == 0:
                self._total_s += now - self._since
        if self.record is not None and began is not None:
            self.record(began, now, facts)

    @property
    def seconds(self) -> float:
        """Seconds with at least one piece of work under way, so far."""
        with self._lock:
            return self._total_s + (time.perf_counter() - self._since if self._active else 0.0)
