"""``fastload seal``, which runs on all ranks of a job."""

from __future__ import annotations

import click

from fastload.cli.console import json_option, read_all
from fastload.ext.checksums import api


@click.command(short_help="Compute the checksums of a checkpoint of any format.")
@click.argument("path")
@json_option
def seal(path: str, as_json: bool) -> None:
    """Compute the checksums of the checkpoint at PATH, which any program wrote.

    The ranks of a torchrun or srun job share the work. They write fastload.seal.json next to the files, or
    NAME.fastload.seal.json next to a single file, by which loads, verify and stage then check what they read.
    """
    read_all(api.seal, path, "sealing", as_json=as_json)
