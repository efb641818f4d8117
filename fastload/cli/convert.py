"""``fastload convert``: a checkpoint of any kind becomes one of fastload's, or one that others read."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.filesize import decimal

import fastload
from fastload.cli.console import errors_to_exit_code, progress
from fastload.cli.shares import Shares, load_shares, num_ranks
from fastload.cli.torch_file import local_path, write_torch_file
from fastload.ranks.world import initialize

__all__ = ["convert"]


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to", type=click.Choice(["fastload", "torch"]), default="fastload", show_default=True,
    help="What to write: a checkpoint with checksums, in safetensors files; or a file for torch.load.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(src: str, dst: str, to: str, overwrite: bool, as_json: bool) -> None:
    """Save what is at SRC as a checkpoint of fastload's at DST, with checksums, or as a file of torch's.

    SRC is whatever fastload loads: also a file that torch.save wrote, of which nothing is executed. The ranks
    of a torchrun or srun job share the work: each of them holds its part, and none the whole.

    torchrun … -m fastload convert SRC DST
    """
    with errors_to_exit_code(rank=0):
        rank, _ = initialize()
    with errors_to_exit_code(rank):
        done = _to_torch(src, dst, overwrite, rank, shown=not as_json) if to == "torch" else None
        done = done or _to_fastload(src, dst, overwrite, rank, shown=not as_json)
        if rank == 0 and as_json:
            click.echo(json.dumps(done))
        elif rank == 0:
            what = f"{done['num_tensors']} tensors, {decimal(done['nbytes'])} in {done['num_files']} files"
            click.echo(f"{done['url']}: {what}")


def _to_fastload(src: str, dst: str, overwrite: bool, rank: int, *, shown: bool) -> dict[str, Any]:
    if num_ranks() > 1:
        shares, metadata = _load_shares(src, rank, shown=shown)
        state = shares.state()
    else:
        state, metadata = _load_whole(src, shown=shown)
    with progress(rank, shown=shown, what="saving") as show:
        options = fastload.SaveOptions(progress=show, overwrite=overwrite)
        return fastload.save(state, dst, metadata=metadata, options=options).to_dict()


def _to_torch(src: str, dst: str, overwrite: bool, rank: int, *, shown: bool) -> dict[str, Any]:
    path = local_path(dst)
    shares, _ = _load_shares(src, rank, shown=shown)
    timeout_s = fastload.LoadOptions().timeout_s
    nbytes = write_torch_file(shares, dst, overwrite=overwrite, timeout_s=timeout_s)
    return {"url": path, "num_tensors": len(shares.tensors), "nbytes": nbytes, "num_files": 1}


def _load_shares(src: str, rank: int, *, shown: bool) -> tuple[Shares, dict[str, str]]:
    with progress(rank, shown=shown) as show, _open(src, show) as checkpoint:
        return load_shares(checkpoint, rank, num_ranks()), dict(checkpoint.metadata)


def _load_whole(src: str, *, shown: bool) -> tuple[Any, dict[str, str]]:
    with progress(0, shown=shown) as show, _open(src, show) as checkpoint:
        # What ranks had of their own is for as many ranks; that it is left out is logged.
        is_own = checkpoint.manifest.format == "fastload"
        return checkpoint.load(strict=not is_own), dict(checkpoint.metadata)


def _open(src: str, show: Any) -> Any:
    return fastload.open(src, options=fastload.LoadOptions(progress=show))
