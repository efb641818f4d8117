"""What a trace says of each rank, as the picture needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.errors import FastloadError

__all__ = ["Row", "Times", "Trace", "read_trace"]

Times = list[tuple[float, float]]  # begin and end in seconds, ascending, apart

_STAGES = ("read", "exchange", "place", "snapshot", "write", "commit")
_WHOLE = ("load", "save")


@dataclass(frozen=True)
class Row:
    """What one rank did.

    Attributes:
        title: Rank and host, and what else there is to say.
        stages: When each stage was under way.
        end_s: When the rank was done.
    """

    title: str
    stages: Mapping[str, Times]
    end_s: float


@dataclass(frozen=True)
class Trace:
    """What a picture shows.

    Attributes:
        rows: By rank.
        about: What the writer of the trace knew.
    """

    rows: Sequence[Row]
    about: Mapping[str, Any]

    @property
    def end_s(self) -> float:
        """When the last rank was done."""
        return max(row.end_s for row in self.rows)

    @property
    def reading_s(self) -> float:
        """For how long at least one rank was reading."""
        return sum(
            end - begin for begin, end in union(t for row in self.rows for t in row.stages.get("read", []))
        )


def read_trace(file: Any) -> Trace:
    """Reads a trace that this package wrote.

    Args:
        file: An open text file.

    Raises:
        FastloadError: It is something else.
    """
    try:
        events = json.load(file)
        about: dict[str, Any] = next((event["args"] for event in events if event["name"] == "fastload"), {})
        rows = list(_rows(events))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FastloadError(f"{file.name}: not a trace of fastload: {error!r}") from None
    if not any(row.stages for row in rows):
        raise FastloadError(f"{file.name}: a trace without any work in it")
    return Trace(rows, about)


def _rows(events: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    titles = {e["pid"]: str(e["args"]["name"]) for e in events if e["name"] == "process_name"}
    times: dict[int, dict[str, Times]] = {rank: {} for rank in sorted(titles)}
    ends: dict[int, float] = dict.fromkeys(titles, 0.0)
    for event in events:
        if event["ph"] != "X":
            continue
        begin = event["ts"] / 1e6
        end = begin + event["dur"] / 1e6
        rank, stage = event["pid"], event["name"]
        ends[rank] = max(ends[rank], end)
        if stage not in _WHOLE:
            times[rank].setdefault(stage, []).append((begin, end))
    for rank, stages in times.items():
        order = [stage for stage in _STAGES if stage in stages] + sorted(set(stages) - set(_STAGES))
        yield Row(titles[rank], {stage: union(stages[stage]) for stage in order}, ends[rank])


def union(times: Any) -> Times:
    """Joins intervals that overlap."""
    joined: Times = []
    for begin, end in sorted(times):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
