"""What the drawings of commands share: figures of matplotlib, and PNG files."""

from __future__ import annotations

from typing import Any

from fastload.cli.console import Quantity
from fastload.errors import FastloadError, OptionError

INK, MUTED, GRID = "#1b1f24", "#59636e", "#e4e7eb"
DASHED = (0, (5, 3))


def _parse_png(text: str) -> str:
    if not text.lower().endswith(".png"):
        raise OptionError(f"{text}: its name has to end in .png")
    return text


PNG = Quantity("png", _parse_png)


def new_figure(size: tuple[float, float], *, dpi: int) -> tuple[Any, Any]:
    """Returns a figure and its axes.

    Args:
        size: Width and height in inches.
        dpi: Pixels per inch.

    Raises:
        FastloadError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FastloadError("a drawing needs matplotlib: pip install 'fastload-torch[plot]'") from None
    figure = Figure(figsize=size, dpi=dpi, layout="constrained", facecolor="white")
    return figure, figure.add_subplot()


def save_png(figure: Any, path: str) -> None:
    """Writes a figure into a file.

    Raises:
        FastloadError: It cannot be written.
    """
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise FastloadError(f"{path}: cannot write the drawing: {error.strerror or error}") from None
