"""``fastload convert``: what other tools saved becomes a checkpoint with a commit record."""

from __future__ import annotations

import json
import pickle
from typing import Any

import click
import torch
from rich.filesize import decimal

import fastload
from fastload.cli.console import errors_to_exit_code, progress
from fastload.errors import CheckpointNotFound, ManifestError

__all__ = ["convert"]

_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")


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
        state, metadata = _read_torch(src) if src.endswith(_TORCH_ENDINGS) else _load(src, as_json)
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
            return checkpoint.load(), checkpoint.metadata


def _read_torch(src: str) -> tuple[Any, dict[str, str]]:
    """Maps the file where its format allows it, so that its bytes are read as they are saved."""
    try:
        try:
            return torch.load(src, map_location="cpu", weights_only=True, mmap=True), {}
        except RuntimeError:  # the format before torch 1.6
            return torch.load(src, map_location="cpu", weights_only=True), {}
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{src}: {error.strerror}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        text = str(error).strip().split("\n", 1)[0]
        raise ManifestError(f"{src}: torch.load with weights_only=True refuses it: {text}") from None
