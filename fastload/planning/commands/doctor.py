"""``fastload doctor``, which runs on all ranks of a job."""

from __future__ import annotations

from dataclasses import asdict

import click

from fastload.base.units import count
from fastload.cli.console import json_option, print_json, set_rank, stdout, table_of
from fastload.comm.launch import from_env
from fastload.options import LoadOptions
from fastload.planning.doctor.examine import examine
from fastload.planning.doctor.findings import Finding, findings
from fastload.storage import locate

_MARKS = {"ok": ("✓", None), "note": ("i", None), "problem": ("✗", "bold red")}


@click.command(short_help="Find problems of a job and its hosts.")
@click.argument("path", required=False)
@json_option
@click.pass_context
def doctor(ctx: click.Context, path: str | None, as_json: bool) -> None:
    """Find problems of a job and its hosts that affect loads and saves, and say what to do about them.

    PATH is a checkpoint to load, or a directory for checkpoints. Nothing is written, and only the headers of
    a checkpoint are read. Under torchrun or srun all ranks take part, and the hosts send each other bytes
    for some seconds:

    torchrun … -m fastload doctor PATH

    Rank 0 exits with 1 if there is a problem.
    """
    launch = from_env()
    location = locate(path) if path is not None else None
    options = LoadOptions()
    set_rank(launch.rank)
    site = examine(launch, location, options)
    if launch.rank:
        return  # torchrun would print a long report for each rank that exits with an error
    found = findings(site)
    if as_json:
        print_json({"findings": [asdict(one) for one in found], **asdict(site)})
    else:
        _print(found)
    ctx.exit(int(any(one.level == "problem" for one in found)))


def _print(found: list[Finding]) -> None:
    console = stdout()
    table = table_of("", "subject", "found", text=("", "subject", "found"))
    for one in found:
        mark, style = _MARKS[one.level]
        advice = f"\n→ {one.advice}" if one.advice else ""
        table.add_row(mark, one.subject, one.found + advice, style=style)
    console.print(table)
    problems, notes = (sum(one.level == level for one in found) for level in ("problem", "note"))
    console.print(f"{count(problems, 'problem')}, {count(notes, 'note')}")
