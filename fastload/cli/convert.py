"""``fastload convert``: a checkpoint of any kind becomes one of fastload's, or one that others read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from rich.filesize import decimal

import fastload
from fastload.cli.console import errors_to_exit_code, progress
from fastload.cli.dcp_folder import write_dcp_folder
from fastload.cli.shares import Shares, load_shares, num_ranks
from fastload.cli.torch_file import local_path, write_torch_file
from fastload.doctor.wording import count
from fastload.ranks.world import initialize

__all__ = ["convert"]


@click.command(short_help="Save a checkpoint again: as fastload's, torch's or dcp's.")
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to", type=click.Choice(["fastload", "torch", "dcp"]), default="fastload", show_default=True,
    help="What to write: safetensors files with checksums, a file for torch.load, a directory for dcp.load.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(src: str, dst: str, to: str, overwrite: bool, as_json: bool) -> None:
    """Save what is at SRC as a checkpoint of fastload's at DST, with checksums, or as torch has them.

    SRC is whatever fastload loads: also a file that torch.save wrote, of which nothing is executed. The ranks
    of a torchrun or srun job share the work: each of them holds its part, and none the whole.

    torchrun … -m fastload convert SRC DST
    """
    with errors_to_exit_code(rank=0):
        rank, _ = initialize()
    with errors_to_exit_code(rank):
        done = _WRITERS[to](src, dst, overwrite, rank, shown=not as_json)
        if rank == 0 and as_json:
            click.echo(json.dumps(done))
        elif rank == 0:
            tensors, files = count(done["num_tensors"], "tensor"), count(done["num_files"], "file")
            click.echo(f"{done['url']}: {tensors}, {decimal(done['nbytes'])} in {files}")


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


def _to_dcp(src: str, dst: str, overwrite: bool, rank: int, *, shown: bool) -> dict[str, Any]:
    local_path(dst)
    shares, _ = _load_shares(src, rank, shown=shown)
    timeout_s = fastload.LoadOptions().timeout_s
    made = write_dcp_folder(shares, dst, overwrite=overwrite, timeout_s=timeout_s)
    counts = {"num_tensors": len(made.tensors), "nbytes": made.nbytes, "num_files": len(made.files)}
    return {"url": made.url, **counts}


_WRITERS: dict[str, Callable[..., dict[str, Any]]] = {
    "fastload": _to_fastload,
    "torch": _to_torch,
    "dcp": _to_dcp,
}


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
