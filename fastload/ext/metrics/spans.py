"""Spans of loads and saves and of their phases, below the span of the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from fastload.base.stopwatch import Stopwatch
from fastload.base.version import __version__


class _Phase:
    """The pieces of work of a phase, which several threads may do at once.

    Attributes:
        began: `time.perf_counter` of the first one; None before.
        ended: That of the end of the last one.
        num_pieces: Their number.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.ended = 0.0
        self.num_pieces = 0
        self._lock = threading.Lock()

    def note(self, began: float, ended: float, facts: Mapping[str, Any]) -> None:
        """Notes a piece of work; a listener of a stopwatch."""
        with self._lock:
            self.began = began if self.began is None else min(self.began, began)
            self.ended = max(self.ended, ended)
            self.num_pieces += 1


class SpanObserver:
    """Makes the spans of a call once it has ended: an `Observer`.

    The thread that makes the call has the context of the caller; helper threads have none, so it is kept.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tracer = trace.get_tracer("fastload", __version__)
        self._thread = threading.get_ident()
        self._caller: Context = get_current()
        self._phases: dict[str, _Phase] = {}
        self._ended: tuple[str, float, float, tuple[str, str] | None] | None = None

    def begin(self, hosts: Sequence[str]) -> None:
        """Needs no step of the ranks."""

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """Notes when the work of each phase begins and ends."""
        current = get_current()
        if current or threading.get_ident() == self._thread:  # a load of a checkpoint that was opened before
            self._caller = current
        for name, watch in watches.items():
            watch.listeners += (self._phases.setdefault(name, _Phase()).note,)

    def add(self, stage: str, began_s: float) -> None:
        """Notes a phase that ends now."""
        self._phases.setdefault(stage, _Phase()).note(began_s, time.perf_counter(), {})

    def end(self, name: str, began_s: float, error: BaseException | None) -> None:
        """Notes the end of this rank's part."""
        problem = (type(error).__name__, str(error)) if error is not None else None
        self._ended = name, began_s, time.perf_counter(), problem

    def close(self, about: Mapping[str, Any]) -> None:
        """Makes the spans."""
        phases, self._phases = self._phases, {}
        ended, self._ended = self._ended, None
        if ended is None:
            return
        name, began, end, problem = ended
        zero_ns = time.time_ns() - time.perf_counter_ns()
        attributes = {"fastload.rank": self._rank, **{f"fastload.{key}": about[key] for key in about}}
        call = self._start(f"fastload.{name}", began, self._caller, zero_ns, attributes)
        if problem is not None:
            call.set_attribute("error.type", problem[0])
            call.set_status(Status(StatusCode.ERROR, problem[1]))
        within = set_span_in_context(call, self._caller)
        for stage, phase in phases.items():
            if phase.began is not None:
                number = {"fastload.pieces": phase.num_pieces}
                span = self._start(f"fastload.{name}.{stage}", phase.began, within, zero_ns, number)
                span.end(zero_ns + int(phase.ended * 1e9))
        call.end(zero_ns + int(end * 1e9))

    def _start(
        self, name: str, began: float, within: Context, zero_ns: int, attributes: Mapping[str, Any]
    ) -> Span:
        start_ns = zero_ns + int(began * 1e9)
        return self._tracer.start_span(name, within, attributes=attributes, start_time=start_ns)
