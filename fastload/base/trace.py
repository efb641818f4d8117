"""When each rank did what: spans recorded as they end, and a trace of all ranks in Chrome's format."""

from __future__ import annotations

import json
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fastload.base.stopwatch import Stopwatch

_MAX_SPANS = 2_000_000  # of all ranks together
_MOST_SPANS, _LEAST_SPANS = 50_000, 256  # of one rank
_WHOLES = ("load", "save")


class Span(NamedTuple):
    """One piece of work.

    Attributes:
        stage: Such as ``read``, ``exchange`` or ``place``.
        begin_s: By the clock of the trace.
        end_s: By the same clock.
        facts: What else is known of it.
    """

    stage: str
    begin_s: float
    end_s: float
    facts: Mapping[str, Any] = {}


@dataclass(frozen=True)
class RankTrace:
    """The spans of one rank.

    Attributes:
        host: Name of its host.
        spans: In the order in which they ended.
        num_dropped: Spans that were one too many.
        synchronized: Whether its clock could be compared with that of rank 0.
        error: What ended the work, if it failed.
    """

    host: str
    spans: tuple[Span, ...]
    num_dropped: int = 0
    synchronized: bool = True
    error: str = ""

    def to_bytes(self) -> bytes:
        """Packs the trace to be sent to rank 0."""
        rest = [self.host, self.num_dropped, self.synchronized, self.error]
        return zlib.compress(json.dumps([rest, self.spans]).encode(), level=1)

    @classmethod
    def from_bytes(cls, packed: bytes) -> RankTrace:
        """Unpacks what `to_bytes` packed."""
        (host, num_dropped, synchronized, error), spans = json.loads(zlib.decompress(packed))
        return cls(host, tuple(Span(*span) for span in spans), num_dropped, synchronized, error)


class Recorder:
    """Keeps the spans of one rank: the first and the last of them, if there are too many.

    Args:
        num_ranks: Ranks that record; together they keep two million spans at most.
    """

    def __init__(self, num_ranks: int) -> None:
        limit = max(_LEAST_SPANS, min(_MOST_SPANS, _MAX_SPANS // num_ranks))
        self._first: list[Span] = []
        self._num_first = limit // 2
        self._last: deque[Span] = deque(maxlen=limit - self._num_first)
        self._num_dropped = 0
        self._lock = threading.Lock()

    def follow(self, stage: str, watch: Stopwatch) -> None:
        """Records every piece of work that a stopwatch measures from now on."""
        watch.record = partial(self.add, stage)

    def add(self, stage: str, begin_s: float, end_s: float, facts: Mapping[str, Any]) -> None:
        """Records a span, by `time.perf_counter`."""
        span = Span(stage, begin_s, end_s, facts)
        with self._lock:
            if len(self._first) < self._num_first:
                self._first.append(span)
                return
            self._num_dropped += len(self._last) == self._last.maxlen
            self._last.append(span)

    def trace(self, host: str, offset_s: float | None, error: BaseException | None) -> RankTrace:
        """Returns what was recorded.

        Args:
            host: Name of this host.
            offset_s: What takes this rank's `time.perf_counter` to the trace's clock; None if unknown.
            error: What ended the work.
        """
        with self._lock:
            spans = [*self._first, *self._last]
        by_s = offset_s or 0.0
        moved = (span._replace(begin_s=span.begin_s + by_s, end_s=span.end_s + by_s) for span in spans)
        why = f"{type(error).__name__}: {error}" if error is not None else ""
        return RankTrace(host, tuple(moved), self._num_dropped, offset_s is not None, why)


def chrome_events(
    ranks: Mapping[int, RankTrace], about: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Turns traces into the events that Chrome and Perfetto show, one process per rank.

    Spans of one stage that overlap get lanes (threads) of their own. Time zero is the earliest span.

    Args:
        ranks: By rank.
        about: What else is known, such as ``floor_s``; kept in an event that viewers skip.
    """
    spans = [span for trace in ranks.values() for span in trace.spans]
    zero_s = min((span.begin_s for span in spans), default=0.0)
    yield {"name": "fastload", "ph": "M", "pid": 0, "args": dict(about or {})}
    for rank, trace in sorted(ranks.items()):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": _title(rank, trace)}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        stages = dict.fromkeys(
            span.stage for span in sorted(trace.spans, key=lambda span: span.stage not in _WHOLES)
        )
        thread = 0
        for stage in stages:
            lanes = _lanes(span for span in trace.spans if span.stage == stage)
            for number, lane in enumerate(lanes, start=1):
                name = stage if len(lanes) == 1 else f"{stage} {number}"
                yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
                for span in lane:
                    yield {
                        "name": stage,
                        "cat": stage,
                        "ph": "X",
                        "pid": rank,
                        "tid": thread,
                        "ts": round((span.begin_s - zero_s) * 1e6, 3),
                        "dur": round((span.end_s - span.begin_s) * 1e6, 3),
                        "args": dict(span.facts),
                    }
                thread += 1


def to_json(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Writes events as a JSON array, one to a line."""
    separator = "[\n"
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]\n" if separator != "[\n" else "[]\n"


def _title(rank: int, trace: RankTrace) -> str:
    title = f"rank {rank} on {trace.host}"
    if trace.num_dropped:
        title += f" ({trace.num_dropped} spans left out in the middle)"
    if not trace.synchronized:
        title += " (its clock could not be compared)"
    return f"{title} failed: {trace.error}" if trace.error else title


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Deals spans to as few lanes as they need not to overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        free = next((lane for lane in lanes if lane[-1].end_s <= span.begin_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes
