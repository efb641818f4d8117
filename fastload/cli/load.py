"""``fastload inspect`` and, under torchrun or srun, ``python -m fastload load``."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import click
from rich import box
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor

import fastload
from fastload.cli.console import errors_to_exit_code, progress, shown, stdout, table_of
from fastload.cli.sharded import sharding_of
from fastload.comm.group import agree, initialize
from fastload.doctor.wording import count
from fastload.errors import FastloadError
from fastload.formats.encoder import encode_state
from fastload.formats.manifest import TensorEntry
from fastload.formats.state import OWN_PREFIX, own_view, state_digest
from fastload.geometry.box import row_major
from fastload.options import SETTINGS, STRATEGIES
from fastload.storage import locate
from fastload.storage.single_file import require_writable

__all__ = ["inspect", "load"]


@click.command(short_help="Show what a checkpoint holds, without its data.")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(path: str, as_json: bool) -> None:
    """Show the tensors, dtypes, sizes and files of the checkpoint at PATH, without reading its data."""
    with errors_to_exit_code(rank=0):
        manifest = fastload.inspect(path)
        if as_json:
            click.echo(json.dumps(_manifest_as_json(manifest)))
        else:
            _print_manifest(manifest)


@click.command(short_help="Load a checkpoint on all ranks; report how it went.")
@click.argument("path")
@click.option("--device", default="cpu", show_default=True, help="Where the tensors go: cpu, cuda, cuda:1.")
@click.option("--strategy", type=click.Choice(STRATEGIES), help=f"How to load: {SETTINGS['strategy'].help}.")
@click.option(
    "--names", multiple=True, metavar="NAME", help="Name or glob pattern of tensors to load; repeatable."
)
@click.option("--mesh", metavar="SIZES", help="Load DTensors of a mesh of all ranks: 8, or 2x4.")
@click.option(
    "--placements",
    metavar="LIST",
    help="For each dimension of the mesh replicate or shard(DIMENSION); tensors that lack it are replicated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, from rank 0.")
@click.option("--trace", metavar="FILE", help="Write a Chrome/Perfetto trace of all ranks into this file.")
@click.option("--digest", is_flag=True, help="Compute one xxh3 digest of what was loaded on each rank.")
def load(
    path: str,
    device: str,
    strategy: str | None,
    names: tuple[str, ...],
    mesh: str | None,
    placements: str | None,
    as_json: bool,
    trace: str | None,
    digest: bool,
) -> None:
    """Load the checkpoint at PATH on all ranks of a torchrun or srun job, and report how it went.

    Without a launcher it loads in this one process. With --mesh and --placements each rank gets its part
    of each tensor, as in a job with FSDP, HSDP or tensor parallelism:

    torchrun … -m fastload load PATH --mesh 2x4 --placements 'replicate,shard(0)'
    """
    with errors_to_exit_code(rank=0):  # each rank has its own to say of its environment
        rank, device = initialize(device)
    with errors_to_exit_code(rank):
        sharding = sharding_of(mesh, placements)
        with progress(rank, shown=not as_json) as show:
            asked: dict[str, Any] = {"strategy": strategy, "trace": trace}
            given = {name: value for name, value in asked.items() if value is not None}
            options = fastload.LoadOptions(progress=show, **given)
            if options.trace is not None:
                _look_where_the_trace_goes(rank, options)
            with fastload.open(path, options=options) as checkpoint:
                into = sharding and sharding.empty(_for_all_ranks(checkpoint.manifest), device)
                wanted = list(names) or (list(into) if into else _all_names(checkpoint.manifest))
                state = checkpoint.load(into=into, device=device, names=wanted)
        report = checkpoint.report
        assert report is not None
        digests = None
        if digest:
            digests = agree(
                None,
                "comparing digests",
                lambda: state_digest(_tensors(state, sharded=sharding is not None)),
                timeout_s=options.timeout_s,
            )
        if rank == 0 and as_json:
            click.echo(json.dumps({**report.to_dict(), "digests": digests}))
        elif rank == 0:
            _print_report(report, digests, sharded=sharding is not None)
        if checkpoint.trace_error is not None:
            raise checkpoint.trace_error
        if digests is not None and sharding is None and len(set(digests)) > 1:
            raise FastloadError(f"the ranks hold different states: {digests}")


def _tensors(state: Any, *, sharded: bool) -> dict[str, Tensor]:
    """Returns what this rank has of a loaded state."""
    return {name: t.to_local() for name, t in state.items()} if sharded else encode_state(state).tensors


def _all_names(manifest: fastload.Manifest) -> list[str] | None:
    """Returns the names of all tensors, if not all of them are for all ranks; None stands for all."""
    has_own = len(_for_all_ranks(manifest)) < len(manifest.tensors)
    return [entry.name for entry in manifest.tensors] if has_own else None


def _for_all_ranks(manifest: fastload.Manifest) -> list[TensorEntry]:
    """Returns the tensors that are not some rank's own."""
    return [entry for entry in manifest.tensors if not entry.name.startswith(OWN_PREFIX)]


def _look_where_the_trace_goes(rank: int, options: fastload.LoadOptions) -> None:
    """Finds out on all ranks, before the data move, whether rank 0 will be able to write the trace."""

    def look() -> None:
        if rank == 0:
            require_writable(locate(options.trace).url)

    agree(None, f"looking whether {options.trace} can be written", look, timeout_s=options.timeout_s)


def _print_manifest(manifest: fastload.Manifest) -> None:
    console = stdout()
    is_single = not manifest.files[0].name  # whose name was given
    table = table_of("tensor", "dtype", "shape", "size", *([] if is_single else ["file"]), right=("size",))
    for entry in manifest.tensors:
        where = [] if is_single else [_place_of(entry, manifest)]
        table.add_row(shown(entry.name), entry.dtype, str(list(entry.shape)), decimal(entry.nbytes), *where)
    console.print(table)
    for dtype, (number, nbytes) in _by_dtype(manifest).items():
        console.print(f"{dtype}: {count(number, 'tensor')}, {decimal(nbytes)}")
    whole = f"{count(len(manifest.tensors), 'tensor')}, {decimal(manifest.nbytes)}"
    total = f"{whole} in {count(len(manifest.files), 'file')}"
    console.print(f"{total} ({manifest.format})", style="bold")
    for line in _refused(manifest):
        console.print(f"cannot be loaded: {shown(line)}", highlight=False)


def _refused(manifest: fastload.Manifest) -> list[str]:
    """Says what of the state cannot be loaded, and why."""
    return [] if manifest.format == "fastload" else own_view(manifest.structure, 0, 0).refused


def _place_of(entry: TensorEntry, manifest: fastload.Manifest) -> str:
    """Says in which file a tensor is, or in how many."""
    files = {piece.file for piece in entry.pieces}
    if len(files) > 1:
        return f"{len(entry.pieces)} pieces in {len(files)} files"
    name = shown(manifest.files[entry.file].name)
    return f"{len(entry.pieces)} pieces in {name}" if len(entry.pieces) > 1 else name


def _by_dtype(manifest: fastload.Manifest) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in manifest.tensors:
        counts[entry.dtype] += 1
        sizes[entry.dtype] += entry.nbytes
    return {dtype: (counts[dtype], sizes[dtype]) for dtype in sorted(counts)}


def _manifest_as_json(manifest: fastload.Manifest) -> dict[str, Any]:
    return {
        "url": manifest.url,
        "format": manifest.format,
        "nbytes": manifest.nbytes,
        "metadata": dict(manifest.metadata),
        "refused": _refused(manifest),
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in manifest.files],
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "file": manifest.files[entry.file].name,
                "offset": entry.offset,
                "nbytes": entry.nbytes,
                **({"pieces": _pieces_as_json(entry, manifest)} if entry.pieces else {}),
            }
            for entry in manifest.tensors
        ],
    }


def _pieces_as_json(entry: TensorEntry, manifest: fastload.Manifest) -> list[dict[str, Any]]:
    return [
        {
            "offsets": piece.box.offsets,
            "sizes": piece.box.sizes,
            "file": manifest.files[piece.file].name,
            "offset": piece.offset,
            "nbytes": piece.nbytes,
            "strides": piece.strides or row_major(piece.box.sizes),
        }
        for piece in entry.pieces
    ]


def _print_report(report: fastload.LoadReport, digests: list[str] | None, *, sharded: bool) -> None:
    console = stdout()
    where = "in parts on" if sharded else "on each of" if len(report.ranks) > 1 else "on"
    rate = report.bytes_wanted / report.total_s if report.total_s else 0.0
    console.print(
        f"{report.url}: {count(report.num_tensors, 'tensor')}, {decimal(report.bytes_wanted)}",
        highlight=False,
    )
    console.print(f"{report.strategy}: {report.why}", highlight=False)
    console.print(
        f"{report.total_s:.2f} s, {decimal(int(rate))}/s {where} {count(len(report.ranks), 'rank')}; "
        f"read from storage: {decimal(report.bytes_read)} = {report.read_amplification:.2f} × the checkpoint"
        + (f", verified: {decimal(report.bytes_verified)}" if report.bytes_verified else ""),
        highlight=False,
    )
    console.print(
        f"{count(report.num_rounds, 'round')} of {decimal(report.chunk_bytes)} chunks, "
        f"{report.depth} in flight; exchange: {report.transport}",
        highlight=False,
    )
    heads = (
        "rank",
        "host",
        "read",
        "received",
        "network",
        "reading",
        "exchange",
        "placing",
        "total",
        "staging",
    )
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for own in report.ranks:
        table.add_row(
            str(own.rank),
            own.host,
            decimal(own.bytes_read) if own.reader else "–",
            decimal(own.bytes_received),
            decimal(own.bytes_in),
            *(f"{seconds:.2f} s" for seconds in (own.read_s, own.exchange_s, own.place_s, own.total_s)),
            decimal(own.peak_staging_bytes),
        )
    console.print(table)
    for rank, digest in enumerate(digests or []):
        console.print(f"digest of rank {rank}: {digest}", highlight=False)
    for own in report.ranks:
        if own.note:
            console.print(f"rank {own.rank} on {own.host} {own.note}", highlight=False)
