"""``fastload convert``: a checkpoint of any kind becomes one of fastload's, or one that others read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from rich.filesize import decimal

import fastload
from fastload.cli.companions import companions_of, copy_companions
from fastload.cli.console import errors_to_exit_code, progress, shown
from fastload.cli.dcp_folder import write_dcp_folder
from fastload.cli.shares import Shares, load_shares, num_ranks
from fastload.cli.torch_file import local_path, write_torch_file
from fastload.comm.group import initialize
from fastload.doctor.wording import count

__all__ = ["convert"]


@click.command(short_help="Save a checkpoint again: as fastload's, torch's or dcp's.")
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to", type=click.Choice(["fastload", "torch", "dcp"]), default="fastload", show_default=True,
    help="What to write: safetensors files with checksums, a file for torch.load, a directory for dcp.load.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST.")
@click.option("--no-strict", is_flag=True, help="Leave out what cannot be loaded.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(src: str, dst: str, to: str, overwrite: bool, no_strict: bool, as_json: bool) -> None:
    """Save what is at SRC as a checkpoint of fastload's at DST, with checksums, or as torch has them.

    SRC is whatever fastload loads: also a file that torch.save wrote, of which nothing is executed. The ranks
    of a torchrun or srun job share the work: each of them holds its part, and none the whole. Files next to
    the weights, such as config.json and a tokenizer, are copied along, unless DST is one file.

    torchrun … -m fastload convert SRC DST
    """
    with errors_to_exit_code(rank=0):
        rank, _ = initialize()
    with errors_to_exit_code(rank):
        job = _Job(src, dst, rank, overwrite=overwrite, strict=not no_strict, shown=not as_json)
        done = _WRITERS[to](job)
        names = companions_of(src) if rank == 0 else []
        copied = copy_companions(src, dst, names) if to != "torch" else []
        if rank == 0 and as_json:
            click.echo(json.dumps({**done, "copied": copied}))
        elif rank == 0:
            tensors, files = count(done["num_tensors"], "tensor"), count(done["num_files"], "file")
            click.echo(f"{done['url']}: {tensors}, {decimal(done['nbytes'])} in {files}")
            if names:
                click.echo(f"{'copied, too' if copied else 'not copied'}: {shown(', '.join(names))}")


@dataclass(frozen=True)
class _Job:
    """What is converted, where to, and how."""

    src: str
    dst: str
    rank: int
    overwrite: bool
    strict: bool
    shown: bool

    def load(self) -> tuple[Shares, dict[str, str]]:
        """Loads this rank's share; returns it with the metadata of the checkpoint."""
        with progress(self.rank, shown=self.shown) as show:
            options = fastload.LoadOptions(progress=show)
            with fastload.open(self.src, options=options) as checkpoint:
                shares = load_shares(checkpoint, self.rank, num_ranks(), strict=self.strict)
                return shares, dict(checkpoint.metadata)


def _to_fastload(job: _Job) -> dict[str, Any]:
    shares, metadata = job.load()
    with progress(job.rank, shown=job.shown, what="saving") as show:
        options = fastload.SaveOptions(progress=show, overwrite=job.overwrite)
        return fastload.save(shares.state(), job.dst, metadata=metadata, options=options).to_dict()


def _to_torch(job: _Job) -> dict[str, Any]:
    path = local_path(job.dst)
    shares, _ = job.load()
    timeout_s = fastload.LoadOptions().timeout_s
    nbytes = write_torch_file(shares, job.dst, overwrite=job.overwrite, timeout_s=timeout_s)
    return {"url": path, "num_tensors": len(shares.tensors), "nbytes": nbytes, "num_files": 1}


def _to_dcp(job: _Job) -> dict[str, Any]:
    local_path(job.dst)
    shares, _ = job.load()
    timeout_s = fastload.LoadOptions().timeout_s
    made = write_dcp_folder(shares, job.dst, overwrite=job.overwrite, timeout_s=timeout_s)
    counts = {"num_tensors": len(made.tensors), "nbytes": made.nbytes, "num_files": len(made.files)}
    return {"url": made.url, **counts}


_WRITERS: dict[str, Callable[[_Job], dict[str, Any]]] = {
    "fastload": _to_fastload,
    "torch": _to_torch,
    "dcp": _to_dcp,
}
