"""The picture of a trace; needs matplotlib."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.filesize import decimal

from fastload.cli.tracks import Row, Times, Trace

__all__ = ["draw"]

_COLOURS = {
    "read": "#1d6fa5",
    "exchange": "#f2a541",
    "place": "#3a9d6e",
    "snapshot": "#8e5ea2",
    "write": "#1d6fa5",
    "commit": "#c1121f",
}
_OTHER, _IDLE, _INK, _FLOOR = "#7f7f7f", "#eef0f2", "#2b2d33", "#c1121f"
_WIDTH_PIXELS = 1500  # of the time axis


def draw(trace: Trace, path: str, floor_s: float, floor: str, *, most_rows: int) -> None:
    """Draws ranks as rows and stages as coloured lanes; what stays grey is idle.

    Args:
        trace: What to draw.
        path: The PNG.
        floor_s: Where to mark the floor.
        floor: What it is called.
        most_rows: Of more ranks than this the slowest, the fastest and some in between are shown.
    """
    rows = _representative(trace.rows, most_rows)
    stages = list(dict.fromkeys(stage for row in trace.rows for stage in row.stages))
    until = max(trace.end_s, floor_s)
    height = 1.7 + max(1.2, len(rows) * (0.62 if len(rows) <= 12 else 0.34))
    with plt.rc_context({"font.size": 10, "text.color": _INK, "axes.labelcolor": _INK}):
        figure, axes = plt.subplots(figsize=(12, height), layout="constrained")
        for place, row in enumerate(rows):
            _draw_row(axes, place, row, stages, until)
        axes.axvline(floor_s, color=_FLOOR, linestyle=(0, (5, 3)), linewidth=1.4, zorder=5)
        _label(axes, trace, rows, until)
        _legend(figure, axes, trace, stages, f"{floor} {floor_s:.3g} s", len(rows))
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _representative(rows: Any, most: int) -> list[Row]:
    """Returns all rows, or evenly spread ones with the slowest and the fastest among them."""
    if len(rows) <= most:
        return list(rows)
    by_end = sorted(range(len(rows)), key=lambda index: rows[index].end_s)
    chosen = {by_end[0], by_end[-1]}
    even = [round(index * (len(rows) - 1) / (most - 3)) for index in range(most - 2)]
    return [rows[index] for index in sorted(chosen | set(even))]


def _draw_row(axes: Any, place: int, row: Row, stages: list[str], until: float) -> None:
    lane = 0.84 / max(1, len(stages))
    axes.broken_barh([(0.0, row.end_s)], (place - 0.42, 0.84), color=_IDLE, linewidth=0)
    for number, stage in enumerate(stages):
        top = place - 0.42 + number * lane
        pixels = np.zeros((1, _WIDTH_PIXELS, 4))
        pixels[0, :, :3] = to_rgb(_COLOURS.get(stage, _OTHER))
        pixels[0, :, 3] = _density(row.stages.get(stage, []), until)
        where = (0.0, until, top + lane, top)
        axes.imshow(pixels, extent=where, aspect="auto", interpolation="nearest", zorder=3)
    axes.plot([row.end_s] * 2, [place - 0.42, place + 0.42], color=_INK, linewidth=1.2, zorder=4)


def _density(times: Times, until: float) -> Any:
    """Returns which part of each pixel's time is covered: what is too short to see is pale, not lost."""
    done = np.zeros(_WIDTH_PIXELS + 1)  # covered time before each edge
    edges = np.linspace(0.0, until, _WIDTH_PIXELS + 1)
    if times:
        begins, ends = np.array(times).T
        total = np.concatenate([[0.0], np.cumsum(ends - begins)])
        index = np.searchsorted(begins, edges, side="right")
        done = total[index] - np.where(index > 0, np.maximum(0.0, ends[index - 1] - edges), 0.0)
    return np.clip(np.diff(done) / (until / _WIDTH_PIXELS), 0.0, 1.0)


def _label(axes: Any, trace: Trace, rows: list[Row], until: float) -> None:
    axes.set_xlim(0, until * 1.02)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [_short(row.title) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color="#d9dce0", linewidth=0.7)
    axes.set_axisbelow(False)
    for line in axes.get_xgridlines():
        line.set_zorder(0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _short(title: str) -> str:
    return title if len(title) <= 48 else f"{title[:47]}…"


def _legend(figure: Any, axes: Any, trace: Trace, stages: list[str], floor: str, shown: int) -> None:
    busy = {stage: _busy(trace, stage) for stage in stages}
    patches: list[Any] = [
        Patch(color=_COLOURS.get(stage, _OTHER), label=f"{stage} {busy[stage]:.0%}") for stage in stages
    ]
    patches.append(Patch(color=_IDLE, label="idle"))
    patches.append(Line2D([], [], color=_FLOOR, linestyle=(0, (5, 3)), linewidth=1.4, label=floor))
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=9.5)
    what = str(trace.about.get("what", "timeline"))
    nbytes = trace.about.get("bytes_wanted")
    if nbytes:
        what += f", {decimal(int(nbytes))}"
    what += f", {trace.end_s:.3g} s"
    num_ranks = int(trace.about.get("num_ranks", len(trace.rows)))
    if shown < num_ranks:
        what += f", {shown} of {num_ranks:,} ranks"
    axes.set_title(what, loc="left", fontsize=12, fontweight="bold", pad=10)


def _busy(trace: Trace, stage: str) -> float:
    """The part of the time in which the stage is under way, on average over the ranks that have it."""
    rows = [row for row in trace.rows if stage in row.stages]
    busy = sum(end - begin for row in rows for begin, end in row.stages[stage])
    return busy / (trace.end_s * len(rows)) if rows and trace.end_s else 0.0
