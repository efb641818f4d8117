"""The drawing of ``fastload cadence``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastload.base.units import format_duration
from fastload.cli.console import DASHED, GRID, INK, MUTED, new_figure, save_png
from fastload.planning.cadence import Recommendation, Tier, ettr

_CURVE, _BEST, _TOO_OFTEN = "#1f6feb", "#d1480b", "#8c959f"
_MARKERS = {"Young": ("o", 17), "Daly": ("D", 11)}  # concentric if they coincide
_NUM_POINTS = 400
_REACH = 16  # the plot ends at intervals this many times longer and shorter than the recommended one
_TICKS = {
    f"{number} {unit}": number * seconds
    for unit, seconds, numbers in (
        ("ms", 0.001, (1, 10, 100)),
        ("s", 1, (1, 2, 5, 10, 30)),
        ("min", 60, (1, 2, 5, 10, 30)),
        ("h", 3600, (1, 2, 4, 8)),
        ("d", 86400, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
    )
    for number in numbers
}


def draw_ettr(
    path: str, rules: Sequence[Mapping[str, Any]], best: Recommendation, storage: Tier, mtbf_s: float
) -> None:
    """Plots the effective training time ratio (ETTR) against the interval, with the published rules.

    Args:
        path: PNG file to write.
        rules: Rows with ``rule``, ``kind`` (``best`` or ``at least``) and ``interval_s`` above 0.
        best: The recommendation.
        storage: The costs of a save.
        mtbf_s: Mean time between failures.

    Raises:
        FastloadError: matplotlib is not installed, or the file cannot be written.
    """

    def value(interval_s: float) -> float:
        return ettr(interval_s, stall_s=storage.stall_s, mtbf_s=mtbf_s, restart_s=storage.lost_s)

    figure, axes = new_figure((9, 5), dpi=160)
    low_s, high_s = best.interval_s / _REACH, best.interval_s * _REACH
    bottom = max(
        0.0, 1 - 4 * max(1 - best.ettr, 0.001)
    )  # a quarter of the height is lost at the best interval
    xs = np.geomspace(low_s, high_s, _NUM_POINTS)
    ys = [value(float(x)) for x in xs]
    axes.plot(xs, ys, color=_CURVE, linewidth=2.5, zorder=3)
    axes.fill_between(xs, ys, bottom, color=_CURVE, alpha=0.07, linewidth=0, zorder=1)
    for row in rules:
        if row["rule"] in _MARKERS:
            at_s, (marker, size) = row["interval_s"], _MARKERS[row["rule"]]
            axes.plot(
                at_s, value(at_s), marker, color="none", markeredgecolor=INK, markeredgewidth=1.2,
                markersize=size, zorder=4, label=f"{row['rule']}: {format_duration(at_s)}",
            )  # fmt: skip
    axes.plot(
        best.interval_s, best.ettr, "o", color=_BEST, markersize=7, zorder=5,
        label=f"recommended: {format_duration(best.interval_s)}",
    )  # fmt: skip
    axes.vlines(best.interval_s, bottom, best.ettr, color=_BEST, linewidth=1.2, linestyle=DASHED, zorder=2)
    _shade_too_often(axes, rules, low_s)
    _label_ettr(axes, (low_s, high_s), bottom)
    background = storage.background_s
    written = f", {format_duration(background)} in the background" if background else ""
    about = (
        f"a save stalls training for {format_duration(storage.stall_s)}{written}; "
        f"a failure every {format_duration(mtbf_s)}, {format_duration(storage.restart_s)} to restart"
    )
    axes.set_title(about, loc="left", fontsize=10, color=MUTED, pad=10)
    axes.annotate(
        f"Save every {best}: {best.ettr * 100:.3g} % of the time makes progress",
        (0, 1), (0, 30), xycoords="axes fraction", textcoords="offset points",
        weight="bold", fontsize=13, color=INK,
    )  # fmt: skip
    axes.legend(
        loc="upper right", framealpha=0.9, edgecolor="none", fontsize=9.5, labelspacing=0.7, markerscale=0.75
    )
    save_png(figure, path)


def _shade_too_often(axes: Any, rules: Sequence[Mapping[str, Any]], low_s: float) -> None:
    """Shades the intervals that are shorter than the strictest rule allows."""
    bounds = [row for row in rules if row["kind"] == "at least"]
    strictest = max(bounds, key=lambda row: float(row["interval_s"]), default=None)
    if strictest is not None and strictest["interval_s"] > low_s:
        axes.axvspan(
            low_s, strictest["interval_s"], color=_TOO_OFTEN, alpha=0.16, linewidth=0, zorder=2,
            label=f"too often: {strictest['rule']}",
        )  # fmt: skip


def _label_ettr(axes: Any, xlim: tuple[float, float], bottom: float) -> None:
    from matplotlib.ticker import NullLocator, PercentFormatter

    axes.set_xscale("log")
    axes.set(xlim=xlim, ylim=(bottom, 1))
    ticks = {label: at for label, at in _TICKS.items() if xlim[0] <= at <= xlim[1]}
    axes.set_xticks(list(ticks.values()), list(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    decimals = 0 if 1 - bottom > 0.04 else 1 if 1 - bottom > 0.004 else 2
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=decimals, symbol=" %"))
    axes.set_xlabel("time trained between saves", color=INK)
    axes.set_ylabel("expected training time ratio (ETTR)", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
