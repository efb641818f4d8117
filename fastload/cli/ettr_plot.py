"""The drawing of the ETTR over the interval between saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastload.errors import FastloadError, OptionError
from fastload.estimate.cadence import Recommendation, ettr
from fastload.estimate.units import format_duration

__all__ = ["draw_ettr"]

_INK, _MUTED, _GRID = "#1b1f24", "#59636e", "#e4e7eb"
_CURVE, _BEST, _TOO_OFTEN = "#1f6feb", "#d1480b", "#8c959f"
_MARKERS = {"Young": ("o", 17), "Daly": ("D", 11)}  # around each other where they coincide
_NUM_POINTS = 400
_REACH = 16  # shown: intervals up to so many times longer or shorter than what is recommended
_TICKS = {
    **{f"{count} ms": count / 1000 for count in (1, 10, 100)},
    **{f"{count} s": count for count in (1, 2, 5, 10, 30)},
    **{f"{count} min": count * 60 for count in (1, 2, 5, 10, 30)},
    **{f"{count} h": count * 3600 for count in (1, 2, 4, 8)},
    **{f"{count} d": count * 86400 for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)},
}


def draw_ettr(
    path: str,
    rules: Sequence[Mapping[str, Any]],
    best: Recommendation,
    *,
    stall_s: float,
    background_s: float,
    mtbf_s: float,
    restart_s: float,
) -> None:
    """Draws the expected training time ratio over the interval, with what the rules say.

    Args:
        path: PNG file to write.
        rules: Rows with ``rule``, ``kind`` (``best`` or ``at least``) and ``interval_s`` above 0.
        best: What is recommended.
        stall_s: Time that training stands still for a save.
        background_s: Time after that until it is durable.
        mtbf_s: Mean time between failures.
        restart_s: Time from a failure until training goes on.

    Raises:
        OptionError: matplotlib is not installed.
        FastloadError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator, PercentFormatter
    except ImportError:
        raise OptionError("a drawing needs matplotlib: pip install 'fastload-torch[plot]'") from None

    def value(interval_s: float) -> float:
        return ettr(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s + background_s)

    low, high = best.interval_s / _REACH, best.interval_s * _REACH
    xs = [low * (high / low) ** (index / _NUM_POINTS) for index in range(_NUM_POINTS + 1)]
    ys = [value(x) for x in xs]
    # What is lost at the recommended interval fills a quarter of the height.
    bottom = max(0.0, 1 - 4 * max(1 - best.ettr, 0.001))

    figure = Figure(figsize=(9, 5), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set(xlim=(low, high), ylim=(bottom, 1))
    axes.plot(xs, ys, color=_CURVE, linewidth=2.5, zorder=3)
    axes.fill_between(xs, ys, bottom, color=_CURVE, alpha=0.07, linewidth=0, zorder=1)
    for row in rules:
        if row["rule"] in _MARKERS:
            at, (marker, size) = row["interval_s"], _MARKERS[row["rule"]]
            axes.plot(
                at, value(at), marker, color="none", markeredgecolor=_INK, markeredgewidth=1.2,
                markersize=size, zorder=4, label=f"{row['rule']}: {format_duration(at)}",
            )  # fmt: skip
    steps = "" if best.interval_steps is None else f" ({best.interval_steps:,} steps)"
    axes.plot(
        best.interval_s, best.ettr, "o", color=_BEST, markersize=7, zorder=5,
        label=f"recommended: {format_duration(best.interval_s)}",
    )  # fmt: skip
    axes.vlines(
        best.interval_s, bottom, best.ettr, color=_BEST, linewidth=1.2, linestyle=(0, (4, 3)), zorder=2
    )
    _shade_too_often(axes, rules, low)

    ticks = {label: at for label, at in _TICKS.items() if low <= at <= high}
    axes.set_xticks(list(ticks.values()), list(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    decimals = 0 if 1 - bottom > 0.04 else 1 if 1 - bottom > 0.004 else 2
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=decimals, symbol=" %"))
    axes.set_xlabel("time trained between saves", color=_INK)
    axes.set_ylabel("expected training time ratio (ETTR)", color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_MUTED)
    written = f", {format_duration(background_s)} in the background" if background_s else ""
    about = (
        f"a save stalls training for {format_duration(stall_s)}{written}; "
        f"a failure every {format_duration(mtbf_s)}, {format_duration(restart_s)} to restart"
    )
    axes.set_title(about, loc="left", fontsize=10, color=_MUTED, pad=10)
    axes.annotate(
        f"Save every {format_duration(best.interval_s)}{steps}: "
        f"{best.ettr * 100:.3g} % of the time makes progress",
        (0, 1), (0, 30), xycoords="axes fraction", textcoords="offset points",
        weight="bold", fontsize=13, color=_INK,
    )  # fmt: skip
    axes.legend(
        loc="upper right",
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
        fontsize=9.5,
        labelspacing=0.7,
        markerscale=0.75,
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise FastloadError(f"{path}: cannot write the drawing: {error.strerror or error}") from None


def _shade_too_often(axes: Any, rules: Sequence[Mapping[str, Any]], low: float) -> None:
    """Shades the intervals that are shorter than the strictest rule allows."""
    bounds = [row for row in rules if row["kind"] == "at least"]
    strictest = max(bounds, key=lambda row: float(row["interval_s"]), default=None)
    if strictest is None or strictest["interval_s"] <= low:
        return
    axes.axvspan(
        low, strictest["interval_s"], color=_TOO_OFTEN, alpha=0.16, linewidth=0, zorder=2,
        label=f"too often: {strictest['rule']}",
    )  # fmt: skip
