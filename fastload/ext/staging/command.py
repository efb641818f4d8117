"""``fastload stage``, which runs on all ranks of a job."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import click

from fastload.base.registry import extension, extensions
from fastload.cli.console import (
    Command,
    chosen_sources,
    json_option,
    print_json,
    progress,
    set_rank,
    source_options,
)
from fastload.comm.launch import initialize
from fastload.ext.staging import api
from fastload.ext.staging.options import StageOptions
from fastload.formats.sources import CopyInProgress


class StageFollower(Protocol):
    """Does something with the copy that ``fastload stage`` makes.

    What makes it is an entry point of the group ``fastload.stage``: an object with a method ``add_options``,
    which adds options to the command, and ``follow``, which is given their values and returns a context
    manager of this, or of None.
    """

    def begin(self, copy: CopyInProgress) -> None:
        """A copy begins, on the rank of its host that makes it; not if there is a complete one."""

    def end(self, path: str) -> None:
        """The copy of this rank's host is complete, at this path."""


def _extension_options(command: Command) -> Command:
    for each in extensions("stage").values():
        command = each.load().add_options(command)
    return command


@click.command(short_help="Copy a checkpoint to every host of a job.")
@click.argument("src")
@click.argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace another checkpoint at DST.")
@click.option("--no-verify", is_flag=True, help="Check only the sizes of files that are at DST already.")
@json_option
@source_options
@_extension_options
def stage(src: str, dst: str, overwrite: bool, no_verify: bool, as_json: bool, **extras: Any) -> None:
    """Copy the checkpoint at SRC to the directory DST of every host of a torchrun or srun job.

    DST is on a disk of each host, or in /dev/shm. SRC is read once in the whole job, and verified.
    A complete copy is left alone; an incomplete one is completed. Loads of DST do not need SRC.
    """
    rank, _ = initialize()
    set_rank(rank)
    with ExitStack() as stack:
        opened = [stack.enter_context(each.load().follow(extras)) for each in extensions("stage").values()]
        followers: list[StageFollower] = [follower for follower in opened if follower is not None]

        def on_copy(copy: CopyInProgress) -> None:
            for follower in followers:
                follower.begin(copy)

        with progress(rank, shown=not as_json, what="staging") as show:
            given: dict[str, Any] = {"verify": False} if no_verify else {}
            given |= chosen_sources(extras)
            options = StageOptions(overwrite=overwrite, progress=show, on_copy=on_copy, **given)
            report = api.stage(src, dst, options=options)
        if rank == 0 and as_json:
            print_json(report.to_dict())
        elif rank == 0:
            click.echo(extension("reports", "table", "printing a report")(report, is_complete=True))
        if report.ranks[rank].leads:
            for follower in followers:
                follower.end(report.path)
