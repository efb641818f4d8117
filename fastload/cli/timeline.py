"""``fastload timeline``: a picture of a trace."""

from __future__ import annotations

from typing import Any

import click

from fastload.cli.console import errors_to_exit_code
from fastload.cli.quantities import PNG
from fastload.cli.tracks import Trace, read_trace
from fastload.errors import FastloadError

__all__ = ["timeline"]

_MOST_ROWS = 32


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
    with errors_to_exit_code(rank=0):
        trace = read_trace(file)
        try:
            from fastload.cli.picture import draw
        except ImportError as error:
            raise FastloadError(f"pictures need {error.name}: pip install 'fastload-torch[plot]'") from None
        try:
            draw(trace, png, *_floor(trace, floor_s), most_rows=_MOST_ROWS)
        except OSError as error:
            raise FastloadError(f"{png}: {error.strerror or error}") from None
    click.echo(f"{png}: {len(trace.rows)} ranks, {trace.end_s:.3f} s")


def _floor(trace: Trace, given_s: float | None) -> tuple[float, str]:
    if given_s is not None:
        return given_s, "floor"
    if "floor_s" in trace.about:
        return float(trace.about["floor_s"]), "floor: one client streams all"
    return trace.reading_s, "floor: the reads without gaps"
