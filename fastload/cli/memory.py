"""``fastload ls --memory`` and ``fastload prune --memory``: what jobs have in the memory of this host."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import click
from rich.filesize import decimal

from fastload.cli.console import age, shown, stdout, table_of
from fastload.doctor.wording import count
from fastload.errors import UnsupportedVersion
from fastload.memory_tier.manifest import HostManifest
from fastload.storage.memory_folder import JobUsage, find_jobs, find_memory, remove_dead

__all__ = ["list_memory", "prune_memory"]


def list_memory(place: str | None, *, as_json: bool) -> None:
    """Prints what jobs of this user have in memory.

    Args:
        place: Where; None for where `CheckpointManager` has it with ``memory="auto"``.
        as_json: Prints one JSON object.
    """
    place = place or find_memory()
    jobs = find_jobs(place)
    if as_json:
        click.echo(json.dumps({"memory": place, "jobs": [_as_json(job) for job in jobs]}))
        return
    if not jobs:
        click.echo(f"no job has checkpoints in {place}")
        return
    table = table_of("root", "step", "shares", "size", "used", "", right=("size", "used"))
    for job in jobs:
        steps = [f"{each.step}" for each in _manifests(job)]
        shares = [f"{len(each.held)} of {len(each.shares)}" for each in _manifests(job)]
        state = "in use" if job.is_alive else "left behind"
        used = f"{age(job.used_s)} ago"
        row = (", ".join(steps) or "–", ", ".join(shares) or "–", decimal(job.nbytes), used, state)
        table.add_row(shown(job.root), *row)
    console = stdout()
    console.print(table)
    total = f"{count(len(jobs), 'job')} in {place}, {decimal(sum(job.nbytes for job in jobs))}"
    console.print(total, style="bold", highlight=False)


def prune_memory(place: str | None, *, dry_run: bool) -> None:
    """Removes what jobs of which no process lives on this host have left in memory.

    Args:
        place: As for `list_memory`.
        dry_run: Only says what would be removed.
    """
    place = place or find_memory()
    dead = [job for job in find_jobs(place) if not job.is_alive]
    removed = dead if dry_run else remove_dead(place, older_s=0.0)
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


def _as_json(job: JobUsage) -> dict[str, Any]:
    return {
        "path": job.path,
        "root": job.root,
        "in_use": job.is_alive,
        "used_s": job.used_s,
        "nbytes": job.nbytes,
        "generations": [
            {"step": each.step, "branch": each.branch, "held": each.held, "num_shares": len(each.shares)}
            for each in _manifests(job)
        ],
    }
