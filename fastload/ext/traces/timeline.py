"""``fastload timeline``: traces as pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import click
import numpy as np
from rich.filesize import decimal

from fastload.cli.console import DASHED, GRID, INK, new_figure, parse_png, save_png
from fastload.errors import FastloadError
from fastload.ext.traces.spans import WHOLES

Intervals = list[tuple[float, float]]
"""Begin and end in seconds, ascending, without overlaps."""

_STAGE_COLOURS = {
    "read": "#1d6fa5",
    "exchange": "#f2a541",
    "place": "#3a9d6e",
    "snapshot": "#8e5ea2",
    "write": "#1d6fa5",
    "commit": "#c1121f",
}
_STAGES = tuple(_STAGE_COLOURS)
_OTHER, _IDLE, _FLOOR = "#7f7f7f", "#eef0f2", "#c1121f"
_WIDTH_PIXELS = 1500  # length of the time axis
_MAX_ROWS = 32  # of more ranks, some are shown


@click.command(short_help="Draw the timeline of a load or a save.")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option("--png", required=True, metavar="PNG", callback=parse_png, help="File to draw into.")
@click.option(
    "--floor-s", type=click.FloatRange(min=0, min_open=True), help="Mark the floor at this time in seconds."
)
def timeline(file: Any, png: str, floor_s: float | None) -> None:
    """Draw the trace in FILE: ranks as rows, stages as colours, idle time visible.

    FILE was written by `fastload load --trace`, by `fastload plan --trace`, or by a load or save with the
    option `trace`. The dashed line is the floor: as given, as recorded in the trace, or the time in which at
    least one rank was reading, or for a save writing. There is none if no rank did.
    """
    trace = _read(file)
    floor = Floor(floor_s, "floor") if floor_s is not None else trace.floor
    draw_timeline(png, trace, floor)
    note = f", {floor.text}" if floor is not None else ""
    click.echo(f"{png}: {len(trace.rows)} ranks, {trace.end_s:.3f} s{note}")


class Floor(NamedTuple):
    """The least time that a load or a save could take.

    Attributes:
        seconds: The time.
        label: Its meaning.
    """

    seconds: float
    label: str

    @property
    def text(self) -> str:
        """Label and time."""
        return f"{self.label} {self.seconds:.3g} s"


@dataclass(frozen=True)
class Row:
    """The work of one rank.

    Attributes:
        title: Rank and host, and notes.
        stages: The intervals of each stage.
        end_s: End of the rank's work.
    """

    title: str
    stages: Mapping[str, Intervals]
    end_s: float


@dataclass(frozen=True)
class Trace:
    """A trace of a load or a save.

    Attributes:
        rows: The ranks in order.
        what: Description of the work.
        num_ranks: Ranks of the job; the trace may have fewer.
        nbytes: Bytes loaded or saved; 0 if not recorded.
        floor_s: Seconds in which one client streams them; None if not recorded.
    """

    rows: Sequence[Row]
    what: str
    num_ranks: int
    nbytes: int
    floor_s: float | None

    @property
    def end_s(self) -> float:
        """End of the last rank's work."""
        return max(row.end_s for row in self.rows)

    @property
    def floor(self) -> Floor | None:
        """The recorded floor; else the time of storage, which a load reads and a save writes."""
        if self.floor_s is not None:
            return Floor(self.floor_s, "floor: one client streams all")
        for stage, label in (
            ("read", "floor: the reads without gaps"),
            ("write", "floor: the writes without gaps"),
        ):
            if seconds := self._seconds_of(stage):
                return Floor(seconds, label)
        return None

    def _seconds_of(self, stage: str) -> float:
        """Returns the seconds in which at least one rank was in a stage."""
        found = _union(interval for row in self.rows for interval in row.stages.get(stage, []))
        return sum(end - begin for begin, end in found)


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
            nbytes=int(about.get("bytes_wanted", about.get("nbytes", 0))),
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
        if stage not in WHOLES:
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


def draw_timeline(path: str, trace: Trace, floor: Floor | None) -> None:
    """Draws ranks as rows and stages as coloured tracks; idle time is grey.

    Args:
        path: PNG file to write.
        trace: The trace; of many ranks, the slowest, the fastest and some in between are drawn.
        floor: The floor, or None.

    Raises:
        FastloadError: matplotlib is not installed, or the file cannot be written.
    """
    rows = _representative(trace.rows)
    stages = list(dict.fromkeys(stage for row in trace.rows for stage in row.stages))
    until_s = max(trace.end_s, floor.seconds if floor is not None else 0.0)
    height = 1.7 + max(1.2, len(rows) * (0.62 if len(rows) <= 12 else 0.34))
    figure, axes = new_figure((12, height), dpi=130)
    for index, row in enumerate(rows):
        _draw_row(axes, index, row, stages, until_s)
    if floor is not None:
        axes.axvline(floor.seconds, color=_FLOOR, linestyle=DASHED, linewidth=1.4, zorder=5)
    axes.set(xlim=(0, until_s * 1.02), ylim=(len(rows) - 0.4, -0.6), xlabel="seconds")
    titles = [row.title if len(row.title) <= 48 else f"{row.title[:47]}…" for row in rows]
    axes.set_yticks(range(len(rows)), titles)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(False)
    for line in axes.get_xgridlines():
        line.set_zorder(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_timeline_title(trace, len(rows)), loc="left", fontsize=12, fontweight="bold", pad=10)
    _add_legend(figure, trace, stages, floor)
    save_png(figure, path)


def _representative(rows: Sequence[Row]) -> list[Row]:
    """Returns all rows, or evenly spread ones that include the slowest and the fastest."""
    if len(rows) <= _MAX_ROWS:
        return list(rows)
    by_end = sorted(range(len(rows)), key=lambda index: rows[index].end_s)
    even = (round(index * (len(rows) - 1) / (_MAX_ROWS - 3)) for index in range(_MAX_ROWS - 2))
    return [rows[index] for index in sorted({by_end[0], by_end[-1], *even})]


def _draw_row(axes: Any, index: int, row: Row, stages: list[str], until_s: float) -> None:
    from matplotlib.colors import to_rgb

    top, height = index - 0.42, 0.84
    axes.broken_barh([(0.0, row.end_s)], (top, height), color=_IDLE, linewidth=0)
    track = height / max(1, len(stages))
    for number, stage in enumerate(stages):
        pixels = np.zeros((1, _WIDTH_PIXELS, 4))
        pixels[0, :, :3] = to_rgb(_STAGE_COLOURS.get(stage, _OTHER))
        pixels[0, :, 3] = _density(row.stages.get(stage, []), until_s)
        where = (0.0, until_s, top + (number + 1) * track, top + number * track)
        axes.imshow(pixels, extent=where, aspect="auto", interpolation="nearest", zorder=3)
    axes.plot([row.end_s] * 2, [top, top + height], color=INK, linewidth=1.2, zorder=4)


def _density(intervals: Intervals, until_s: float) -> Any:
    """Returns the covered fraction of each pixel's time, so short intervals are pale, not lost."""
    if not intervals:
        return 0.0
    times = np.array(intervals)
    lengths = times[:, 1] - times[:, 0]
    total = np.cumsum(lengths)
    edges = np.linspace(0.0, until_s, _WIDTH_PIXELS + 1)
    covered = np.interp(edges, times.ravel(), np.stack([total - lengths, total], axis=1).ravel())
    return np.clip(np.diff(covered) / (until_s / _WIDTH_PIXELS), 0.0, 1.0)


def _timeline_title(trace: Trace, num_shown: int) -> str:
    parts = [trace.what]
    if trace.nbytes:
        parts.append(decimal(trace.nbytes))
    parts.append(f"{trace.end_s:.3g} s")
    if num_shown < trace.num_ranks:
        parts.append(f"{num_shown} of {trace.num_ranks:,} ranks")
    return ", ".join(parts)


def _add_legend(figure: Any, trace: Trace, stages: list[str], floor: Floor | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=_STAGE_COLOURS.get(stage, _OTHER), label=f"{stage} {_busy(trace, stage):.0%}")
        for stage in stages
    ]
    handles.append(Patch(color=_IDLE, label="idle"))
    if floor is not None:
        handles.append(Line2D([], [], color=_FLOOR, linestyle=DASHED, linewidth=1.4, label=floor.text))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9.5)


def _busy(trace: Trace, stage: str) -> float:
    """Returns the mean fraction of the time that a stage takes, over the ranks that have it."""
    rows = [row.stages[stage] for row in trace.rows if stage in row.stages]
    busy_s = sum(end - begin for intervals in rows for begin, end in intervals)
    return busy_s / (trace.end_s * len(rows)) if rows and trace.end_s else 0.0
