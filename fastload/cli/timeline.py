"""``fastload timeline``: a picture of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from fastload.cli.options import PNG
from fastload.cli.pictures import draw_timeline
from fastload.errors import FastloadError

Intervals = list[tuple[float, float]]
"""Begin and end in seconds, ascending, without overlaps."""

_STAGES = ("read", "exchange", "place", "snapshot", "write", "commit")
_WHOLE = ("load", "save")


@click.command(short_help="Draw where the time of a load or a save went.")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option("--png", required=True, type=PNG, help="Draw it into this file.")
@click.option(
    "--floor-s", type=click.FloatRange(min=0, min_open=True), help="Mark the floor at so many seconds."
)
def timeline(file: Any, png: str, floor_s: float | None) -> None:
    """Draw the trace in FILE: ranks as rows, stages as colours, idle time visible.

    FILE is what `fastload load --trace`, `fastload plan --trace`, or a load or save with the option `trace`
    wrote. The dashed line is the floor: as given, or as the trace says, or else the time in which at least
    one rank was reading.
    """
    trace = _read(file)
    if floor_s is not None:
        floor, label = floor_s, "floor"
    elif trace.floor_s is not None:
        floor, label = trace.floor_s, "floor: one client streams all"
    else:
        floor, label = trace.reading_s, "floor: the reads without gaps"
    draw_timeline(png, trace, floor, label)
    click.echo(f"{png}: {len(trace.rows)} ranks, {trace.end_s:.3f} s")


@dataclass(frozen=True)
class Row:
    """What one rank did.

    Attributes:
        title: Rank and host, and what else there is to say.
        stages: When each stage was under way.
        end_s: When the rank was done.
    """

    title: str
    stages: Mapping[str, Intervals]
    end_s: float


@dataclass(frozen=True)
class Trace:
    """A trace of a load or a save.

    Attributes:
        rows: By rank.
        what: What was done.
        num_ranks: Ranks of the job, of which the trace may have some.
        nbytes: Bytes that were loaded; 0 if the trace does not say.
        floor_s: How long one client needs to stream them; None if the trace does not say.
    """

    rows: Sequence[Row]
    what: str
    num_ranks: int
    nbytes: int
    floor_s: float | None

    @property
    def end_s(self) -> float:
        """When the last rank was done."""
        return max(row.end_s for row in self.rows)

    @property
    def reading_s(self) -> float:
        """For how long at least one rank was reading."""
        reads = _union(interval for row in self.rows for interval in row.stages.get("read", []))
        return sum(end - begin for begin, end in reads)


def _read(file: Any) -> Trace:
    """Reads a trace that this package wrote."""
    try:
        events = json.load(file)
        about: dict[str, Any] = next((event["args"] for event in events if event["name"] == "fastload"), {})
        rows = list(_rows(events))
        trace = Trace(
            rows,
            what=str(about.get("what", "timeline")),
            num_ranks=int(about.get("num_ranks", len(rows))),
            nbytes=int(about.get("bytes_wanted", 0)),
            floor_s=float(about["floor_s"]) if "floor_s" in about else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FastloadError(f"{file.name}: not a trace of fastload: {error!r}") from None
    if not any(row.stages and row.end_s > 0 for row in rows):
        raise FastloadError(f"{file.name}: a trace without any work in it")
    return trace


def _rows(events: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    titles = {e["pid"]: str(e["args"]["name"]) for e in events if e["name"] == "process_name"}
    stages: dict[int, dict[str, Intervals]] = {rank: {} for rank in sorted(titles)}
    ends: dict[int, float] = dict.fromkeys(titles, 0.0)
    for event in events:
        if event["ph"] != "X":
            continue
        begin = event["ts"] / 1e6
        end = begin + event["dur"] / 1e6
        rank, stage = event["pid"], event["name"]
        ends[rank] = max(ends[rank], end)
        if stage not in _WHOLE:
            stages[rank].setdefault(stage, []).append((begin, end))
    for rank, found in stages.items():
        order = [stage for stage in _STAGES if stage in found] + sorted(set(found) - set(_STAGES))
        yield Row(titles[rank], {stage: _union(found[stage]) for stage in order}, ends[rank])


def _union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
