"""``fastload convert``: what other tools saved becomes a checkpoint with a commit record."""

from __future__ import annotations

import json
import re
from contextlib import closing
from typing import Any

import click
import torch
from rich.filesize import decimal

import fastload
from fastload.cli.console import errors_to_exit_code, progress
from fastload.errors import ManifestError, OptionError
from fastload.formats.names import NAMES
from fastload.formats.open import is_torch_file
from fastload.storage import Location, locate, open_storage

__all__ = ["convert"]

_REFUSED_TYPE = re.compile(r"(?:Unsupported global: GLOBAL|unsupported GLOBAL|Unsupported class) ([\w.]+\w)")


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(src: str, dst: str, overwrite: bool, as_json: bool) -> None:
    """Save what is at SRC as a checkpoint of fastload's at DST, with checksums.

    SRC is a file that torch.save wrote (ending in .pt, .pth, .bin, .ckpt or .tar; read with
    weights_only=True, so that nothing in it is executed), a safetensors file, or a directory or URL with
    safetensors files.
    """
    with errors_to_exit_code(rank=0):
        location = locate(src)
        is_torch = _is_torch_file(location)
        state, metadata = _read_torch(location) if is_torch else _load(location, as_json)
        with progress(0, shown=not as_json, what="saving") as show:
            options = fastload.SaveOptions(progress=show, overwrite=overwrite)
            report = fastload.save(state, dst, metadata=metadata, options=options)
        if as_json:
            click.echo(json.dumps(report.to_dict()))
        else:
            what = f"{report.num_tensors} tensors, {decimal(report.nbytes)} in {report.num_files} files"
            click.echo(f"{report.url}: {what}")


def _load(src: Location, as_json: bool) -> tuple[Any, dict[str, str]]:
    with progress(0, shown=not as_json, what="loading") as show:
        options = fastload.LoadOptions(progress=show)
        with fastload.open(src, options=options) as checkpoint:
            return checkpoint.load(strict=False), checkpoint.metadata  # what is left out is logged


def _is_torch_file(src: Location) -> bool:
    """Whether torch.load is to read it.

    Raises:
        OptionError: It cannot reach it.
    """
    with closing(open_storage(src, NAMES)) as storage:
        found = is_torch_file(storage)
    if found and src.scheme:
        raise OptionError(f"{src}: torch.load reads files of this host only: copy it to one first")
    return found


def _read_torch(src: Location) -> tuple[Any, dict[str, str]]:
    """Maps the file where its format allows it, so that its bytes are read as they are saved."""
    try:
        try:
            return torch.load(src, map_location="cpu", weights_only=True, mmap=True), {}
        except RuntimeError:  # the format before torch 1.6
            return torch.load(src, map_location="cpu", weights_only=True), {}
    except Exception as error:  # whatever a stranger's file makes of torch's reader
        text = str(error).strip().split("\n", 1)[0]
        if (found := _REFUSED_TYPE.search(str(error))) is not None:
            text = f"it holds {found[1]}: save it without, from where you trust it"
        raise ManifestError(f"{src}: torch.load with weights_only=True refuses it: {text}") from None
