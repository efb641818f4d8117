"""``fastload stage``, under torchrun or srun: a checkpoint onto a disk of every host."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.filesize import decimal
from rich.table import Table

import fastload
from fastload.cli.console import errors_to_exit_code, progress, stdout
from fastload.comm.group import initialize
from fastload.doctor.wording import count
from fastload.options import StageOptions

__all__ = ["stage"]


@click.command(short_help="Copy a checkpoint to every host of a job.")
@click.argument("src")
@click.argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace another checkpoint that is at DST.")
@click.option("--no-verify", is_flag=True, help="Of what is at DST already check the sizes only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, from rank 0.")
def stage(src: str, dst: str, overwrite: bool, no_verify: bool, as_json: bool) -> None:
    """Copy the checkpoint at SRC to the directory DST of every host of a torchrun or srun job.

    DST is on a disk that each host has for itself, or in /dev/shm. SRC is read once in all, and checked.
    A copy that is whole already is left as it is; one that was begun is finished. Loads of DST then need
    SRC no more.
    """
    with errors_to_exit_code(rank=0):  # each rank has its own to say of its environment
        rank, _ = initialize()
    with errors_to_exit_code(rank):
        with progress(rank, shown=not as_json, what="staging") as show:
            trust: dict[str, Any] = {"verify": False} if no_verify else {}
            options = StageOptions(overwrite=overwrite, progress=show, **trust)
            report = fastload.stage(src, dst, options=options)
        if rank == 0 and as_json:
            click.echo(json.dumps(report.to_dict()))
        elif rank == 0:
            _print_report(report)


def _print_report(report: fastload.StageReport) -> None:
    console = stdout()
    rate = report.nbytes / report.total_s if report.total_s else 0.0
    console.print(
        f"{report.url}: {decimal(report.nbytes)} in {count(report.num_files, 'file')}, "
        f"at {report.path} of {count(report.num_hosts, 'host')}",
        highlight=False,
    )
    console.print(
        f"{report.total_s:.2f} s, {decimal(int(rate))}/s on each host; "
        f"read from there: {decimal(report.bytes_read)} = {report.read_amplification:.2f} × the checkpoint; "
        f"digest {report.digest}",
        highlight=False,
    )
    heads = ("host", "kept", "read", "fed", "received", "written", "reading", "exchange", "writing", "total")
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for own in report.ranks:
        if own.leads:
            counts = (own.bytes_kept, own.bytes_read, own.bytes_fed, own.bytes_received, own.bytes_written)
            times = (own.read_s, own.exchange_s, own.write_s, own.total_s)
            table.add_row(own.host, *map(decimal, counts), *(f"{seconds:.2f} s" for seconds in times))
    console.print(table)
    for own in report.ranks:
        if own.note:
            console.print(f"rank {own.rank} on {own.host} {own.note}", highlight=False)
