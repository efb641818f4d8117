"""``fastload verify`` and, under torchrun or srun, ``python -m fastload verify``."""

from __future__ import annotations

import json

import click
from rich.filesize import decimal

import fastload
from fastload.cli.console import errors_to_exit_code, progress, stdout
from fastload.comm.group import initialize
from fastload.doctor.wording import count

__all__ = ["verify"]


@click.command(short_help="Check every byte of a checkpoint.")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, from rank 0.")
def verify(path: str, as_json: bool) -> None:
    """Check every byte of the checkpoint at PATH against the checksums of its commit record.

    The ranks of a torchrun or srun job share the work. Exits with 1, and lists the bad blocks, if there are
    any.
    """
    with errors_to_exit_code(rank=0):  # each rank has its own to say of its environment
        rank, _ = initialize()
    with errors_to_exit_code(rank):
        with progress(rank, shown=not as_json, what="verifying") as show:
            report = fastload.verify(path, options=fastload.LoadOptions(progress=show))
        if rank == 0 and as_json:
            click.echo(json.dumps(report.to_dict()))
        elif rank == 0:
            _print_report(report)


def _print_report(report: fastload.VerifyReport) -> None:
    console = stdout()
    rate = report.bytes_verified / report.total_s if report.total_s else 0.0
    blocks, files = count(report.num_blocks, "block"), count(report.num_files, "file")
    what = f"{blocks}, {decimal(report.nbytes)} in {files}"
    console.print(f"{report.url}: intact: {what}", highlight=False)
    console.print(
        f"{report.total_s:.2f} s on {count(len(report.ranks), 'rank')}, {decimal(int(rate))}/s together",
        highlight=False,
    )
