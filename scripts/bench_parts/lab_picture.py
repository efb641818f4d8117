"""The picture of scripts/bench_lab.py: load time over the floor's, for each regime and number of hosts."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from bench_parts.lab_tables import Cell, cells
from bench_parts.tables import FLOOR

_OURS = "#c1121f"
_REFERENCE = "#9a9a9a"
_PEERS = ("#1d4e89", "#e08e00", "#2a9d8f", "#6a4c93", "#8c564b", "#3a86c8", "#6b8e23", "#444444")
_LABEL_LINE = 0.043  # height of a line of a label, as a fraction of the axis
_LABEL_WIDTH = 40  # letters
_SAME = 0.015  # arms that differ by less, relatively, share a line and a label
_TITLES = {
    "shared": "One storage link, which all hosts share",
    "share": "A storage link for each host",
}
_TICKS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws one panel per regime."""
    regimes = list(result["rates"])
    plt.rcParams |= {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, len(regimes), figsize=(8.2 * len(regimes), 7), squeeze=False)
    for panel, regime in zip(axes[0], regimes, strict=True):
        _draw_panel(panel, result, regime)
    axes[0][0].set_ylabel("load time ÷ time in which one host streams every byte once")
    size = f"{result['nbytes'] / 2**20:.0f} MiB of bf16 in safetensors files"
    into = f"hosts as {result['shards']}" if result.get("shards") else "every host"
    figure.suptitle(f"Loading {size} into {into}: CPU tensors, Gloo, cold", fontsize=13)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_panel(panel: Axes, result: dict[str, Any], regime: str) -> None:
    measured = cells(result, regime)
    hosts = sorted(measured)
    rates = [word for word in result["rates"][regime] if not word.startswith("--")]
    panel.set_title(f"{_TITLES[regime]}\nstorage link {rates[0]}, host links {rates[1]}", fontsize=11)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(hosts))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("hosts")
    ends = _draw_lines(panel, result["arms"], measured, hosts)
    _draw_bound(panel, regime, hosts)
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    _write_labels(panel, hosts[-1], ends)


def _draw_lines(
    panel: Axes, arms: list[str], measured: dict[int, dict[str, Cell]], hosts: list[int]
) -> list[tuple[float, str, str]]:
    """Draws one line per group of arms; returns the end, the label and the colour of each."""
    colours = dict(zip((arm for arm in arms if arm != FLOOR and not _is_ours(arm)), _PEERS * 2, strict=False))
    ends: list[tuple[float, str, str]] = []
    for names, points in _groups(arms, measured, hosts):
        main = "fastload auto" in names
        reference = names == ["fastload direct"]
        colour = _REFERENCE if reference else colours.get(names[0], _OURS)
        panel.plot(
            *zip(*points, strict=True),
            color=colour,
            marker="o",
            markersize=6 if main else 4,
            linewidth=3 if main else 1.5,
            linestyle="-" if main or names[0] in colours else "--" if reference else ":",
            zorder=4 if main else 3 if _is_ours(names[0]) else 2,
        )
        if points[-1][0] == hosts[-1]:
            ends.append((points[-1][1], _label(names, points[-1][1]), colour))
    return ends


def _groups(
    arms: list[str], measured: dict[int, dict[str, Cell]], hosts: list[int]
) -> list[tuple[list[str], list[tuple[int, float]]]]:
    """Returns the arms to draw, each with those that would lie on its line, and the points of the line."""
    groups: list[tuple[list[str], list[tuple[int, float]]]] = []
    for arm in arms:
        points = [(count, measured[count][arm].ratio) for count in hosts if arm in measured[count]]
        if arm == FLOOR or not points:
            continue
        for names, known in groups:
            if _is_ours(names[0]) == _is_ours(arm) and _is_one_line(known, points):
                names.append(arm)
                break
        else:
            groups.append(([arm], points))
    return groups


def _is_ours(arm: str) -> bool:
    return arm.startswith("fastload")


def _is_one_line(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    return len(one) == len(other) and all(
        a == b and abs(math.log(y / z)) < _SAME for (a, y), (b, z) in zip(one, other, strict=True)
    )


def _label(names: list[str], ratio: float) -> str:
    """Returns the names of arms, fastload's own once, and the number at the end of their line."""
    first, *others = names
    listed = ", ".join([first, *(name.removeprefix("fastload ") for name in others)])
    return textwrap.fill(f"{listed}  {ratio:.2f}", _LABEL_WIDTH)


def _draw_bound(panel: Axes, regime: str, hosts: list[int]) -> None:
    """Draws the lower bound: the floor, or in `share` the time with all links always busy."""
    best = [1.0 if regime == "shared" else 1 / count for count in hosts]
    panel.plot(hosts, best, color="#222222", linewidth=1, linestyle=(0, (6, 3)), zorder=1)
    text = "floor: storage link always busy" if regime == "shared" else "all storage links always busy"
    panel.annotate(
        text,
        (hosts[-1], best[-1]),
        xytext=(-6, -5),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
    )


def _write_labels(panel: Axes, last: int, ends: list[tuple[float, str, str]]) -> None:
    """Writes each label at the end of its line, or as near as its neighbours allow."""
    low, high = (math.log(limit) for limit in panel.get_ylim())
    ends = sorted(ends)
    places = [(math.log(value) - low) / (high - low) for value, _, _ in ends]
    places = _apart(places, [label.count("\n") + 1 for _, label, _ in ends])
    for place, (value, label, colour) in zip(places, ends, strict=True):
        panel.annotate(
            label,
            (last, value),
            xytext=(1.045, place),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=9.5,
            fontweight="bold" if label.startswith(("fastload auto,", "fastload auto  ")) else "normal",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 3,
            },
            annotation_clip=False,
        )


def _apart(places: list[float], lines: list[int]) -> list[float]:
    """Moves ascending positions apart, as little as possible: groups that touch keep their centre.

    Args:
        places: The positions of labels.
        lines: The lines of each.
    """
    groups: list[tuple[float, list[int]]] = []  # the centre, and the lines of each label
    for place, count in zip(places, lines, strict=True):
        groups.append((place, [count]))
        while len(groups) > 1:
            (below, few), (above, more) = groups[-2:]
            if above - below >= _LABEL_LINE * (sum(few) + sum(more)) / 2:
                break
            total = len(few) + len(more)
            groups[-2:] = [((below * len(few) + above * len(more)) / total, few + more)]
    return [
        centre + (sum(of_group[:index]) + count / 2 - sum(of_group) / 2) * _LABEL_LINE
        for centre, of_group in groups
        for index, count in enumerate(of_group)
    ]
