"""``fastload ls`` and ``fastload prune``: the checkpoints of one run."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.filesize import decimal

from fastload.cli.console import age, errors_to_exit_code, progress, shown, stdout, table_of
from fastload.cli.memory import list_memory, prune_memory
from fastload.doctor.wording import count
from fastload.errors import CheckpointNotFound
from fastload.options import LoadOptions
from fastload.training.catalog import Catalog, Entry
from fastload.training.retention import Retention

__all__ = ["ls", "prune"]


@click.command(short_help="List the checkpoints of a run, or of memory.")
@click.argument("root", required=False)
@click.option("--memory", is_flag=True, help="What jobs have in the memory of this host; ROOT is the place.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ls(root: str | None, memory: bool, as_json: bool) -> None:
    """List the checkpoints below ROOT that a CheckpointManager has saved: step, size, age, metrics.

    They come in the order in which they were saved, the newest last. Whether one is complete is judged by its
    commit record, and the names and sizes of its files; the data are not read: see `fastload verify`.
    """
    with errors_to_exit_code(rank=0):
        if memory:
            return list_memory(root, as_json=as_json)
        catalog = _catalog(_required(root))
        rows = _entries(catalog)
        if as_json:
            found = [_as_json(row) for row in rows]
            click.echo(json.dumps({"root": catalog.root.url, "checkpoints": found}))
        else:
            _print(rows)


@click.command(short_help="Delete old checkpoints, and what dead saves left.")
@click.argument("root", required=False)
@click.option("--keep-last", type=click.IntRange(1), help="Newest ones to keep.")
@click.option("--keep-every", type=click.IntRange(1), help="Keep multiples of this step, too.")
@click.option("--memory", is_flag=True, help="What dead jobs left in this host's memory; ROOT is the place.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def prune(
    root: str | None, keep_last: int | None, keep_every: int | None, memory: bool, dry_run: bool
) -> None:
    """Delete old checkpoints below ROOT, and what dead saves left there.

    What is incomplete, damaged or unreadable counts for nothing and is left alone, as `fastload ls` shows it;
    so are links, and what they lead to. The newest complete one always stays.
    """
    with errors_to_exit_code(rank=0):
        if memory:
            return prune_memory(root, dry_run=dry_run)
        if keep_last is None:
            raise click.UsageError("Missing option '--keep-last'.")
        catalog = _catalog(_required(root))
        entries = {entry.step: entry for entry in _entries(catalog)}
        retention = Retention(keep_last=keep_last, keep_every=keep_every)
        steps = catalog.expendable(list(entries.values()), retention)
        if not dry_run:
            _remove(catalog, [entries[step] for step in steps])
        for step in steps:
            click.echo(f"{'would delete' if dry_run else 'deleted'} {catalog.path(step)}")
        for note in filter(None, map(_note, entries.values())):
            click.echo(f"left alone: {note}")
        nbytes = sum(_nbytes(entries[step]) for step in steps)
        left = sum(entry.is_complete for entry in entries.values()) - len(steps)
        verb = " to delete" if dry_run else ""
        click.echo(f"{count(len(steps), 'checkpoint')}, {decimal(nbytes)}{verb}; {left} stay")


def _required(root: str | None) -> str:
    if root is None:
        raise click.UsageError("Missing argument 'ROOT'.")
    return root


def _remove(catalog: Catalog, entries: list[Entry]) -> None:
    with progress(0, shown=True, what="deleting") as show:
        done, total = 0, sum(map(_nbytes, entries))
        for entry in entries:
            catalog.remove(entry.step)
            done += _nbytes(entry)
            if show is not None:
                show(done, total)
    for path in catalog.clean_abandoned():
        click.echo(f"deleted {path}, which a save that died left behind")


def _catalog(root: str) -> Catalog:
    options = LoadOptions()
    return Catalog(root, None, timeout_s=options.timeout_s, retries=options.retries)


def _entries(catalog: Catalog) -> list[Entry]:
    entries = catalog.entries()
    if not entries:
        raise CheckpointNotFound(f"{catalog.root}: no checkpoints named step_00000001 and so on")
    return entries


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "step": entry.step,
        "branch": entry.point.branch,
        "state": entry.state,
        "problem": entry.problem or None,
        "link": entry.place if entry.is_link else None,
        "saved_s": entry.saved_s or None,
        "nbytes": entry.summary.nbytes if entry.summary is not None else None,
        "num_files": len(entry.summary.files) if entry.summary is not None else None,
        "metrics": entry.saved.metrics,
    }


def _print(entries: list[Entry]) -> None:
    names = sorted({name for entry in entries for name in entry.saved.metrics})
    branched = ("branch",) if any(entry.point.branch for entry in entries) else ()
    measures = tuple(map(shown, names))
    numbers = ("step", *branched, "size", "files", "age", *measures)
    table = table_of("step", *branched, "", "size", "files", "age", *measures, right=numbers)
    for entry in entries:
        size = decimal(entry.summary.nbytes) if entry.summary is not None else "–"
        files = str(len(entry.summary.files)) if entry.summary is not None else "–"
        measured = entry.saved.metrics
        metrics = (f"{measured[name]:g}" if name in measured else "–" for name in names)
        branch = (str(entry.point.branch),) if branched else ()
        table.add_row(str(entry.step), *branch, entry.state, size, files, age(entry.saved_s), *metrics)
    console = stdout()
    console.print(table)
    for note in filter(None, map(_note, entries)):
        console.print(note, highlight=False)
    total = f"{count(len(entries), 'checkpoint')}, {decimal(sum(map(_nbytes, entries)))}"
    console.print(total, style="bold", highlight=False)


def _note(entry: Entry) -> str:
    """Says what is special about a checkpoint; empty if nothing is."""
    link = f"a link to {entry.place}" if entry.is_link else ""
    state = f"{entry.state}: {entry.problem}" if entry.problem else ""
    about = ", ".join(filter(None, (link, state)))
    return shown(f"step {entry.step}: {about}") if about else ""


def _nbytes(entry: Entry) -> int:
    return entry.summary.nbytes if entry.summary is not None else 0
