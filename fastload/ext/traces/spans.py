"""Spans of work on each rank, and traces of all ranks in Chrome's format."""

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
WHOLES = ("load", "save")
"""Stages that others are parts of."""


class Span(NamedTuple):
    """One piece of work.

    Attributes:
        stage: A stage such as ``read``, ``exchange`` or ``place``.
        begin_s: Its beginning, by the clock of the trace.
        end_s: Its end, by the same clock.
        facts: Further JSON values.
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
        spans: Its spans, in the order in which they ended.
        num_dropped: Number of spans that exceeded the limit.
        error: The error that ended the work, or empty.
    """

    host: str
    spans: tuple[Span, ...]
    num_dropped: int = 0
    error: str = ""

    def to_bytes(self) -> bytes:
        """Packs the trace for rank 0."""
        rest = [self.host, self.num_dropped, self.error]
        return zlib.compress(json.dumps([rest, self.spans]).encode(), level=1)

    @classmethod
    def from_bytes(cls, packed: bytes) -> RankTrace:
        """Unpacks the result of `to_bytes`."""
        (host, num_dropped, error), spans = json.loads(zlib.decompress(packed))
        return cls(host, tuple(Span(*span) for span in spans), num_dropped, error)


class Recorder:
    """Records the spans of one rank; if there are too many, the first and the last of them.

    Args:
        num_ranks: Number of ranks that record, at most two million spans together.
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
        watch.listeners += (partial(self.add, stage),)

    def add(self, stage: str, begin_s: float, end_s: float, facts: Mapping[str, Any]) -> None:
        """Records a span, by `time.perf_counter`."""
        span = Span(stage, begin_s, end_s, facts)
        with self._lock:
            if len(self._first) < self._num_first:
                self._first.append(span)
                return
            self._num_dropped += len(self._last) == self._last.maxlen
            self._last.append(span)

    def trace(self, host: str, offset_s: float, error: BaseException | None) -> RankTrace:
        """Returns the recorded spans.

        Args:
            host: Name of this host.
            offset_s: Offset of the trace's clock from this rank's `time.perf_counter`.
            error: The error that ended the work, or None.
        """
        with self._lock:
            spans = [*self._first, *self._last]
        moved = (
            span._replace(begin_s=span.begin_s + offset_s, end_s=span.end_s + offset_s) for span in spans
        )
        why = f"{type(error).__name__}: {error}" if error is not None else ""
        return RankTrace(host, tuple(moved), self._num_dropped, why)


def chrome_events(
    ranks: Mapping[int, RankTrace], about: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Converts traces to events for Chrome and Perfetto, with one process for each rank.

    Overlapping spans of one stage are in separate tracks (threads). Time zero is the earliest span.

    Args:
        ranks: The traces by rank.
        about: Further values, such as ``floor_s``, in an event that viewers skip.
    """
    spans = [span for trace in ranks.values() for span in trace.spans]
    zero_s = min((span.begin_s for span in spans), default=0.0)
    yield {"name": "fastload", "ph": "M", "pid": 0, "args": dict(about or {})}
    for rank, trace in sorted(ranks.items()):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": _title(rank, trace)}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        stages = dict.fromkeys(
            span.stage for span in sorted(trace.spans, key=lambda span: span.stage not in WHOLES)
        )
        thread = 0
        for stage in stages:
            tracks = _tracks(span for span in trace.spans if span.stage == stage)
            for number, track in enumerate(tracks, start=1):
                name = stage if len(tracks) == 1 else f"{stage} {number}"
                yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
                for span in track:
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
    return f"{title} failed: {trace.error}" if trace.error else title


def _tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Splits spans into as few tracks as possible, without overlaps in a track."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        free = next((track for track in tracks if track[-1].end_s <= span.begin_s), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks
