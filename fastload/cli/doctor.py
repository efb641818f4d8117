"""``fastload doctor``, alone or, under torchrun or srun, ``python -m fastload doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich import box
from rich.table import Table

from fastload.cli.console import errors_to_exit_code, stdout
from fastload.comm.launch import from_env
from fastload.doctor.examine import examine
from fastload.doctor.findings import Finding, findings
from fastload.options import LoadOptions
from fastload.storage import locate

__all__ = ["doctor"]

_MARKS = {"ok": ("✓", "green"), "note": ("i", "yellow"), "problem": ("✗", "bold red")}


@click.command(short_help="Look at the hosts of a job, and say what to mend.")
@click.argument("path", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, from rank 0.")
def doctor(path: str | None, as_json: bool) -> None:
    """Look at the hosts of a job, and say what stands in the way of loads and saves, and what to do.

    PATH is a checkpoint that is to be loaded, or a directory for checkpoints. Nothing is written, and of a
    checkpoint only the headers are read. Under torchrun or srun all ranks look, and the hosts send each
    other bytes for some seconds:

    torchrun … -m fastload doctor PATH

    Rank 0 exits with 1 if there is a problem.
    """
    with errors_to_exit_code(rank=0):
        launch = from_env()
        location = locate(path) if path is not None else None
        options = LoadOptions()
    with errors_to_exit_code(launch.rank):
        site = examine(launch, location, options)
    found = findings(site)
    if launch.rank == 0 and as_json:
        click.echo(json.dumps({"findings": [asdict(one) for one in found], **asdict(site)}))
    elif launch.rank == 0:
        _print(found)
    # Of rank 0 only: torchrun tells at length of each host where a rank does.
    sys.exit(int(launch.rank == 0 and any(one.level == "problem" for one in found)))


def _print(found: Sequence[Finding]) -> None:
    console = stdout()
    table = Table("", "subject", "found", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in found:
        mark, style = _MARKS[one.level]
        advice = f"\n→ {one.advice}" if one.advice else ""
        table.add_row(mark, one.subject, one.found + advice, style=style if one.level == "problem" else None)
    console.print(table, highlight=False)
    counts = {level: sum(one.level == level for one in found) for level in ("problem", "note")}
    console.print(", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in counts.items()))
