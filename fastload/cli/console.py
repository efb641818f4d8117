"""What the commands share: errors as exit codes, a console, a progress bar."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fastload.errors import FastloadError, PeerError

__all__ = ["age", "errors_to_exit_code", "progress", "shown", "stdout", "table_of"]


@contextmanager
def errors_to_exit_code(rank: int) -> Iterator[None]:
    """Prints an error once for the whole job: on rank 0, or, if it has none to print, where it happened.

    With ``--json`` rank 0 prints it as an object, too.
    """
    try:
        yield
    except FastloadError as error:
        at_fault = error.failures if isinstance(error, PeerError) else {}
        kind = type(error).__name__
        if rank == 0 or 0 in at_fault or rank in at_fault:
            click.echo(f"fastload: {kind}: {error}", err=True)
        if rank == 0 and _wants_json():
            click.echo(json.dumps({"error": {"type": kind, "message": str(error)}}))
        sys.exit(1)


def _wants_json() -> bool:
    context = click.get_current_context(silent=True)
    given = context.params if context is not None else {}
    return bool(given.get("as_json")) or given.get("output") == "json"


@contextmanager
def progress(rank: int, *, shown: bool, what: str = "loading") -> Iterator[Any]:
    """Gives a callable (done, total) in bytes that draws a bar: on rank 0, in a terminal; else None."""
    console = Console(stderr=True)
    if rank != 0 or not shown or not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(what, *columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def stdout() -> Console:
    """A console that prints names as they are: no markup, no emoji, and in a pipe no line cut at 80."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def shown(text: str) -> str:
    """A text of the checkpoint, with what a terminal would obey spelled out."""
    return text if text.isprintable() else repr(text)


def table_of(*heads: str, right: tuple[str, ...] = ()) -> Table:
    """A table with these heads; the columns of some are numbers, which end at the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left")
    return table


def age(since_s: float) -> str:
    """How long ago a time of the clock was; a dash for none."""
    if not since_s:
        return "–"
    age_s = max(0.0, time.time() - since_s)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
