"""``fastload flush``, and ``--memory`` of ``ls`` and ``prune``: checkpoints in the memory of the hosts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click
from rich.filesize import decimal

from fastload.base.units import count
from fastload.cli.console import (
    age,
    json_option,
    print_json,
    print_table,
    set_rank,
    shown,
    stdout,
    table_of,
)
from fastload.comm.launch import initialize
from fastload.errors import UnsupportedVersion
from fastload.ext.memory.folder import JobUsage, find_jobs, find_memory, remove_dead
from fastload.ext.memory.manifest import HostManifest
from fastload.ext.memory.recovery import recover


@click.command(short_help="After a crash, write what is left in memory to storage.")
@click.argument("root")
@click.option(
    "--memory",
    metavar="DIR",
    default="auto",
    show_default=True,
    help="Directory of the memory tier on each host, as given to the CheckpointManager.",
)
@json_option
def flush(root: str, memory: str, as_json: bool) -> None:
    """Write the newest complete in-memory checkpoint of a run to its ROOT, unless storage has one as new.

    For a run whose processes have all died. Start one process on each host of the job, together:

    srun --ntasks-per-node=1 python -m fastload flush ROOT

    Every byte is verified. The checkpoint also stays in memory, from where a restart restores it.
    """
    rank, _ = initialize()
    set_rank(rank)
    done = recover(root, memory)
    if rank == 0 and as_json:
        print_json(asdict(done))
    elif rank == 0 and done.step is None:
        click.echo(f"{done.root}: nothing to write: {done.why}")
    elif rank == 0:
        click.echo(f"{done.root}: step {done.step} written from memory, {decimal(done.nbytes)}")


def ls(directory: str | None, *, as_json: bool) -> None:
    """Lists the jobs with checkpoints in the memory of this host.

    Args:
        directory: That of the tier; None for the largest tmpfs.
        as_json: Whether to print JSON.
    """
    place = directory or find_memory()
    jobs = find_jobs(place)
    if as_json:
        print_json({"memory": place, "jobs": [_job_as_json(job) for job in jobs]})
        return
    if not jobs:
        click.echo(f"no job has checkpoints in {place}")
        return
    table = table_of("root", "step", "shares", "size", "used", "", text=("root", "step", "shares", ""))
    for job in jobs:
        manifests = _manifests(job)
        table.add_row(
            shown(job.root),
            ", ".join(str(each.step) for each in manifests) or "–",
            ", ".join(f"{len(each.held)} of {len(each.shares)}" for each in manifests) or "–",
            decimal(job.nbytes),
            f"{age(job.used_s)} ago",
            "in use" if job.is_alive else "left behind",
        )
    console = stdout()
    print_table(table)
    total = f"{count(len(jobs), 'job')} in {place}, {decimal(sum(job.nbytes for job in jobs))}"
    console.print(total, style="bold")


def prune(directory: str | None, *, dry_run: bool) -> None:
    """Removes the memory of jobs without a living process on this host.

    Args:
        directory: That of the tier; None for the largest tmpfs.
        dry_run: Whether to print only what would be removed.
    """
    place = directory or find_memory()
    removed = [job for job in find_jobs(place) if not job.is_alive]
    if not dry_run:
        removed = remove_dead(place, older_s=0.0)
    for job in removed:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {job.path}, which is of {shown(job.root)}")
    nbytes = sum(job.nbytes for job in removed)
    click.echo(f"{count(len(removed), 'job')}, {decimal(nbytes)}{' to delete' if dry_run else ''}")


def _manifests(job: JobUsage) -> list[HostManifest]:
    found = []
    for _, text in job.records:
        with suppress(UnsupportedVersion):
            found.append(HostManifest.parse(text))
    return sorted((each for each in found if each is not None), key=lambda each: (each.branch, each.step))


def _job_as_json(job: JobUsage) -> dict[str, Any]:
    return {
        "path": job.path,
        "root": job.root,
        "in_use": job.is_alive,
        "used_s": job.used_s,
        "nbytes": job.nbytes,
        "checkpoints": [
            {"step": each.step, "branch": each.branch, "held": each.held, "num_shares": len(each.shares)}
            for each in _manifests(job)
        ],
    }
