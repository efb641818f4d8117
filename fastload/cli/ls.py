"""``fastload ls`` and ``fastload prune``: the checkpoints of one run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import click
from rich.filesize import decimal
from rich.table import Table

from fastload.catalog import Catalog, Summary, metrics_of
from fastload.cli.console import errors_to_exit_code, progress, shown, stdout
from fastload.errors import CheckpointError, CheckpointNotFound
from fastload.options import LoadOptions
from fastload.retention import Retention, Saved

__all__ = ["ls", "prune"]


@dataclass(frozen=True)
class _Row:
    """One checkpoint, as it is shown."""

    step: int
    state: str
    saved_s: float
    summary: Summary | None

    @property
    def nbytes(self) -> int:
        return self.summary.nbytes if self.summary is not None else 0

    @property
    def metrics(self) -> dict[str, float]:
        return metrics_of(self.summary.metadata) if self.summary is not None else {}


@click.command()
@click.argument("root")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ls(root: str, as_json: bool) -> None:
    """List the checkpoints below ROOT that a CheckpointManager has saved: step, size, age, metrics.

    Their commit records are read, their data are not: see `fastload verify`.
    """
    with errors_to_exit_code(rank=0):
        rows = _read(_catalog(root))
        if as_json:
            click.echo(json.dumps({"root": root, "checkpoints": [_as_json(row) for row in rows]}))
        else:
            _print(rows)


@click.command()
@click.argument("root")
@click.option("--keep-last", type=click.IntRange(1), required=True, help="Newest ones to keep.")
@click.option("--keep-every", type=click.IntRange(1), help="Keep multiples of this step, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def prune(root: str, keep_last: int, keep_every: int | None, dry_run: bool) -> None:
    """Delete old checkpoints below ROOT, and what dead saves left there.

    Incomplete and damaged ones count for nothing and are not touched; the newest complete one always stays.
    """
    with errors_to_exit_code(rank=0):
        catalog = _catalog(root)
        rows = {row.step: row for row in _read(catalog)}
        saved = [Saved(row.step) for row in rows.values() if row.state == "complete"]
        steps = Retention(keep_last=keep_last, keep_every=keep_every).expendable(saved, needed=())
        if not dry_run:
            _remove(catalog, [rows[step] for step in steps])
        for step in steps:
            click.echo(f"{'would delete' if dry_run else 'deleted'} {catalog.path(step)}")
        nbytes = sum(rows[step].nbytes for step in steps)
        left = len(saved) - len(steps)
        click.echo(
            f"{len(steps)} checkpoints, {decimal(nbytes)}{' to delete' if dry_run else ''}; {left} stay"
        )


def _remove(catalog: Catalog, rows: list[_Row]) -> None:
    with progress(0, shown=True, what="deleting") as show:
        done, total = 0, sum(row.nbytes for row in rows)
        for row in rows:
            catalog.remove(row.step)
            done += row.nbytes
            if show is not None:
                show(done, total)
    for path in catalog.clean_abandoned():
        click.echo(f"deleted {path}, which a save that died left behind")


def _catalog(root: str) -> Catalog:
    options = LoadOptions()
    return Catalog(root, None, timeout_s=options.timeout_s, retries=options.retries)


def _read(catalog: Catalog) -> list[_Row]:
    rows = []
    for entry in catalog.entries():
        summary, state = None, "incomplete"
        if entry.complete:
            try:
                summary, state = catalog.summary(entry.step), "complete"
            except CheckpointError:
                state = "damaged"
        rows.append(_Row(entry.step, state, entry.saved_s, summary))
    if not rows:
        raise CheckpointNotFound(f"{catalog.root}: no checkpoints named step_00000001 and so on")
    return rows


def _as_json(row: _Row) -> dict[str, Any]:
    return {
        "step": row.step,
        "state": row.state,
        "saved_s": row.saved_s or None,
        "nbytes": row.summary.nbytes if row.summary is not None else None,
        "num_files": row.summary.num_files if row.summary is not None else None,
        "metrics": row.metrics,
    }


def _print(rows: list[_Row]) -> None:
    names = sorted({name for row in rows for name in row.metrics})
    table = Table("step", "", "size", "files", "age", *map(shown, names))
    for row in rows:
        size = decimal(row.nbytes) if row.summary is not None else "–"
        files = str(row.summary.num_files) if row.summary is not None else "–"
        metrics = (f"{row.metrics[name]:g}" if name in row.metrics else "–" for name in names)
        table.add_row(str(row.step), row.state, size, files, _age(row.saved_s), *metrics)
    console = stdout()
    console.print(table)
    total = f"{len(rows)} checkpoints, {decimal(sum(row.nbytes for row in rows))}"
    console.print(total, style="bold", highlight=False)


def _age(saved_s: float) -> str:
    if not saved_s:
        return "–"
    age_s = max(0.0, time.time() - saved_s)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
