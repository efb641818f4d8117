"""``fastload stage``, which runs on all ranks of a job."""

from __future__ import annotations

from typing import Any

import click
from rich.filesize import decimal

from fastload.base.units import count
from fastload.cli.console import (
    json_option,
    print_json,
    print_notes,
    print_table,
    progress,
    seconds,
    set_rank,
    stdout,
    table_of,
)
from fastload.comm.launch import initialize
from fastload.ext.staging import api
from fastload.options import StageOptions
from fastload.report import StageReport


@click.command(short_help="Copy a checkpoint to every host of a job.")
@click.argument("src")
@click.argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace another checkpoint at DST.")
@click.option("--no-verify", is_flag=True, help="Check only the sizes of files that are at DST already.")
@json_option
def stage(src: str, dst: str, overwrite: bool, no_verify: bool, as_json: bool) -> None:
    """Copy the checkpoint at SRC to the directory DST of every host of a torchrun or srun job.

    DST is on a disk of each host, or in /dev/shm. SRC is read once in the whole job, and verified.
    A complete copy is left alone; an incomplete one is completed. Loads of DST do not need SRC.
    """
    rank, _ = initialize()
    set_rank(rank)
    with progress(rank, shown=not as_json, what="staging") as show:
        verify: dict[str, Any] = {"verify": False} if no_verify else {}
        options = StageOptions(overwrite=overwrite, progress=show, **verify)
        report = api.stage(src, dst, options=options)
    if rank == 0 and as_json:
        print_json(report.to_dict())
    elif rank == 0:
        _print(report)


def _print(report: StageReport) -> None:
    console = stdout()
    rate = report.nbytes / report.total_s if report.total_s else 0.0
    console.print(
        f"{report.url}: {decimal(report.nbytes)} in {count(report.num_files, 'file')}, "
        f"at {report.path} of {count(report.num_hosts, 'host')}"
    )
    console.print(
        f"{report.total_s:.2f} s, {decimal(int(rate))}/s on each host; "
        f"read from there: {decimal(report.bytes_read)} = {report.read_amplification:.2f} × the checkpoint; "
        f"digest {report.digest}"
    )
    heads = "host", "kept", "read", "fed", "received", "written", "reading", "exchange", "writing", "total"
    table = table_of(*heads, text=("host",))
    for own in report.ranks:
        if own.leads:
            sizes = own.bytes_kept, own.bytes_read, own.bytes_fed, own.bytes_received, own.bytes_written
            times = own.read_s, own.exchange_s, own.write_s, own.total_s
            table.add_row(own.host, *map(decimal, sizes), *map(seconds, times))
    print_table(table)
    print_notes(report)
