"""Shared parts of the commands: errors and exit statuses, ``--json``, progress bars, tables, drawings."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

import fastload
from fastload.base.registry import extensions
from fastload.comm.launch import initialize
from fastload.errors import FastloadError, OptionError, PeerError

Command = Callable[..., Any]

INK, MUTED, GRID = "#1b1f24", "#59636e", "#e4e7eb"
DASHED = (0, (5, 3))

_RANK, _AS_JSON = "fastload.rank", "fastload.as_json"  # in click's `Context.meta`

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on rank 0.")


class CommandGroup(click.Group):
    """Commands whose errors become one line on stderr, a JSON object with ``--json``, and an exit status.

    The status is 2 for invalid options or arguments, and 1 for other errors. All commands are extensions, or
    entry points of other packages in the group ``fastload.commands``; they are imported when they are called.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands."""
        return sorted(extensions("commands"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command, one that fails when it is called if it cannot be imported; None without one."""
        if not (known := extensions("commands")):  # those of fastload are missing, too
            raise OptionError(f"{cmd_name}: this fastload is not installed completely: install it again")
        if cmd_name not in known:
            return None
        try:
            command = known[cmd_name].load()
        except OptionError as error:
            return _Failing(cmd_name, error)
        if not isinstance(command, click.Command):
            return _Failing(cmd_name, OptionError(f"{known[cmd_name]} is no command of click"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Notes whether ``--json`` is given, before other options can fail."""
        ctx.meta[_AS_JSON] = "--json" in args
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command in the arguments."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            _print_json_error(ctx, error, error.format_message())
            raise
        except FastloadError as error:
            _print_error(ctx, error)
            causes = error.failures.values() if isinstance(error, PeerError) else [error]
            ctx.exit(2 if causes and all(isinstance(cause, OptionError) for cause in causes) else 1)


class _Failing(click.Command):
    """A command that cannot be imported."""

    def __init__(self, name: str, error: OptionError) -> None:
        super().__init__(name, short_help="(cannot be imported)", add_help_option=False)
        self._error = error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises the error of the import."""
        raise self._error


def source_options(command: Command) -> Command:
    """Adds an option for each kind of `fastload.formats.sources.ByteSource` that is installed."""
    for name in sorted(extensions("sources")):
        help_text = f"Sources to ask before storage; also FASTLOAD_{name.upper()}."
        command = click.option(f"--{name}", metavar="ADDRESSES", help=help_text)(command)
    return command


def chosen_sources(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option `sources` for the values of `source_options`; nothing if none is given."""
    known = extensions("sources")
    given = [known[name].load()(text) for name, text in values.items() if name in known and text]
    return {"sources": given} if given else {}


def set_rank(rank: int) -> None:
    """From now on only rank 0, and ranks that caused an error, print it; before, every process does."""
    click.get_current_context().meta[_RANK] = rank


def _print_error(ctx: click.Context, error: FastloadError) -> None:
    rank = ctx.meta.get(_RANK, 0)
    at_fault = error.failures if isinstance(error, PeerError) else {}
    if rank == 0 or 0 in at_fault or rank in at_fault:  # rank 0 may be dead
        click.echo(f"fastload: {type(error).__name__}: {_as_flags(str(error))}", err=True)
    if rank == 0:
        _print_json_error(ctx, error, _as_flags(str(error)))


def _as_flags(message: str) -> str:
    """Returns the message of a library for a user of the command line, who has flags in place of options."""
    return re.sub(r"options=fastload\.\w+\(overwrite=True\)|\boverwrite=True\b", "--overwrite", message)


def _print_json_error(ctx: click.Context, error: Exception, message: str) -> None:
    if ctx.meta.get(_AS_JSON):
        click.echo(json.dumps(_error_as_json(error, message)))


def _error_as_json(error: Exception, message: str) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": message}}


@contextmanager
def progress(rank: int, *, shown: bool, what: str = "loading") -> Iterator[Any]:
    """Yields a callable (done, total) in bytes that draws a bar, on rank 0 in a terminal; otherwise None."""
    console = Console(stderr=True)
    if rank != 0 or not shown or not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(what, *columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(fields: Mapping[str, Any], error: FastloadError | None = None) -> None:
    """Prints the JSON object of a command on one line, with the error of the command, if any."""
    click.echo(json.dumps({**fields, **(_error_as_json(error, str(error)) if error else {})}))
    click.get_current_context().meta[_AS_JSON] = False


def read_all(read: Callable[..., fastload.VerifyReport], path: str, what: str, *, as_json: bool) -> None:
    """Reads a complete checkpoint on all ranks, and prints the report.

    Args:
        read: Reads it.
        path: The checkpoint.
        what: What the ranks do, for the progress.
        as_json: Whether to print JSON.
    """
    rank, _ = initialize()
    set_rank(rank)
    with progress(rank, shown=not as_json, what=what) as show:
        report = read(path, options=fastload.LoadOptions(progress=show))
    if rank:
        return
    if as_json:
        print_json(report.to_dict())
        return
    click.echo(report)


def stdout() -> Console:
    """Returns a console without markup and emoji, and without line breaks in a pipe."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def table_of(*heads: str, text: tuple[str, ...]) -> Table:
    """Returns a table with these headings; columns are right-aligned, except for those in `text`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in text else "right")
    return table


def print_table(table: Table, narrow: Table | None = None) -> None:
    """Prints a table without cutting cells; the terminal wraps long lines.

    Args:
        table: The table.
        narrow: A narrower table for terminals in which the first does not fit.
    """
    console = stdout()
    room = console.options.update(max_width=10_000)
    if narrow is not None and console.measure(table, options=room).maximum > console.width:
        table = narrow
    console.width = max(console.width, console.measure(table, options=room).maximum)
    console.print(table, crop=False)


def shown(text: str) -> str:
    """Returns a text from a checkpoint with control characters escaped."""
    return text if text.isprintable() else repr(text)


def age(since_s: float) -> str:
    """Returns the age of a time in seconds since 1970, with a unit; a dash for 0."""
    if not since_s:
        return "–"
    age_s = max(0.0, time.time() - since_s)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def parse_png(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Checks the value of an option that names a drawing; a callback of click."""
    if path is not None and not path.lower().endswith(".png"):
        raise OptionError(f"{param.opts[0]}: {path}: its name has to end in .png")
    return path


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
