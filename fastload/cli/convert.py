"""``fastload convert``: what other tools saved becomes a checkpoint with a commit record."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.filesize import decimal

import fastload
from fastload.cli.console import errors_to_exit_code, progress

__all__ = ["convert"]


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(src: str, dst: str, overwrite: bool, as_json: bool) -> None:
    """Save what is at SRC as a checkpoint of fastload's at DST, with checksums.

    SRC is a file that torch.save wrote, of which nothing is executed, a safetensors file, or a directory or
    URL with such files.
    """
    with errors_to_exit_code(rank=0):
        state, metadata = _load(src, as_json)
        with progress(0, shown=not as_json, what="saving") as show:
            options = fastload.SaveOptions(progress=show, overwrite=overwrite)
            report = fastload.save(state, dst, metadata=metadata, options=options)
        if as_json:
            click.echo(json.dumps(report.to_dict()))
        else:
            what = f"{report.num_tensors} tensors, {decimal(report.nbytes)} in {report.num_files} files"
            click.echo(f"{report.url}: {what}")


def _load(src: str, as_json: bool) -> tuple[Any, dict[str, str]]:
    with progress(0, shown=not as_json, what="loading") as show:
        options = fastload.LoadOptions(progress=show)
        with fastload.open(src, options=options) as checkpoint:
            # What ranks had of their own is for as many ranks; that it is left out is logged.
            is_own = checkpoint.manifest.format == "fastload"
            return checkpoint.load(strict=not is_own), checkpoint.metadata
