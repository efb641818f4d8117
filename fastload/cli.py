"""The command line: ``fastload inspect`` and, under torchrun, ``python -m fastload load``."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import click
    from rich import box
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Table
except ImportError as error:
    sys.exit(f"the command line needs {error.name}: pip install 'fastload[cli]'")

import fastload
from fastload.errors import FastloadError, PeerError
from fastload.memory import state_digest
from fastload.options import SETTINGS, STRATEGIES
from fastload.world import initialize, join

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(fastload.__version__, prog_name="fastload")
@click.option("-v", "--verbose", is_flag=True, help="Log what goes on, to stderr.")
def main(verbose: bool) -> None:
    """Gets checkpoints into multi-host PyTorch jobs: every byte is read once."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, stream=sys.stderr)


@main.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(path: str, as_json: bool) -> None:
    """Show the tensors, dtypes, sizes and files of the checkpoint at PATH, without reading its data."""
    with _errors_to_exit_code(rank=0):
        manifest = fastload.inspect(path)
        if as_json:
            click.echo(json.dumps(_manifest_as_json(manifest)))
        else:
            _print_manifest(manifest)


@main.command()
@click.argument("path")
@click.option("--device", default="cpu", show_default=True, help="Where the tensors go: cpu, cuda, cuda:1.")
@click.option("--strategy", type=click.Choice(STRATEGIES), help=f"How to load: {SETTINGS['strategy'].help}.")
@click.option(
    "--names", multiple=True, metavar="NAME", help="Name or glob pattern of tensors to load; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, from rank 0.")
@click.option("--digest", is_flag=True, help="Compute one xxh3 digest of the loaded state on each rank.")
def load(
    path: str, device: str, strategy: str | None, names: tuple[str, ...], as_json: bool, digest: bool
) -> None:
    """Load the checkpoint at PATH on all ranks of a torchrun job, and report how it went.

    Without torchrun it loads in this one process.
    """
    rank, device = initialize(device)
    with _errors_to_exit_code(rank):
        with _progress(rank, shown=not as_json) as progress:
            given: dict[str, Any] = {"strategy": strategy} if strategy is not None else {}
            options = fastload.LoadOptions(progress=progress, **given)
            with fastload.open(path, options=options) as checkpoint:
                tensors = checkpoint.load(device=device, names=list(names) or None)
        report = checkpoint.report
        assert report is not None
        digests = None
        if digest:
            world = join(timeout_s=options.timeout_s)
            digests = world.agree("comparing digests", lambda: state_digest(tensors))
        if rank == 0 and as_json:
            click.echo(json.dumps({**report.to_dict(), "digests": digests}))
        elif rank == 0:
            _print_report(report, digests)
        if digests is not None and len(set(digests)) > 1:
            raise FastloadError(f"the ranks hold different states: {digests}")


@contextmanager
def _errors_to_exit_code(rank: int) -> Iterator[None]:
    """Prints an error once for the whole job: on rank 0, or, if it has none to print, where it happened."""
    try:
        yield
    except FastloadError as error:
        at_fault = error.failures if isinstance(error, PeerError) else {}
        if rank == 0 or 0 in at_fault or rank in at_fault:
            click.echo(f"fastload: {type(error).__name__}: {error}", err=True)
        sys.exit(1)


@contextmanager
def _progress(rank: int, *, shown: bool) -> Iterator[Any]:
    console = Console(stderr=True)
    if rank != 0 or not shown or not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("loading", *columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _stdout() -> Console:
    """A console that prints names as they are: no markup, no emoji, and in a pipe no line cut at 80."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def _shown(text: str) -> str:
    """A text of the checkpoint, with what a terminal would obey spelled out."""
    return text if text.isprintable() else repr(text)


def _print_manifest(manifest: fastload.Manifest) -> None:
    console = _stdout()
    table = Table("tensor", "dtype", "shape", "size", "file")
    for entry in manifest.tensors:
        name = manifest.files[entry.file].name or manifest.url
        size = decimal(entry.nbytes)
        table.add_row(_shown(entry.name), entry.dtype, str(list(entry.shape)), size, _shown(name))
    console.print(table)
    for dtype, (count, nbytes) in _by_dtype(manifest).items():
        console.print(f"{dtype}: {count} tensors, {decimal(nbytes)}")
    total = f"{len(manifest.tensors)} tensors, {decimal(manifest.nbytes)} in {len(manifest.files)} files"
    console.print(total, style="bold")


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
        "nbytes": manifest.nbytes,
        "metadata": dict(manifest.metadata),
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in manifest.files],
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "file": manifest.files[entry.file].name,
                "offset": entry.offset,
                "nbytes": entry.nbytes,
            }
            for entry in manifest.tensors
        ],
    }


def _print_report(report: fastload.LoadReport, digests: list[str] | None) -> None:
    console = _stdout()
    rate = report.bytes_wanted / report.total_s if report.total_s else 0.0
    console.print(
        f"{report.url}: {report.num_tensors} tensors, {decimal(report.bytes_wanted)}",
        highlight=False,
    )
    console.print(f"{report.strategy}: {report.why}", highlight=False)
    console.print(
        f"{report.total_s:.2f} s, {decimal(int(rate))}/s on each of {len(report.ranks)} ranks; "
        f"read from storage: {decimal(report.bytes_read)} = {report.read_amplification:.2f} × the checkpoint",
        highlight=False,
    )
    console.print(
        f"{report.num_rounds} rounds of {decimal(report.chunk_bytes)} chunks, {report.depth} in flight; "
        f"exchange: {report.transport}",
        highlight=False,
    )
    heads = ("rank", "host", "read", "received", "reading", "exchange", "placing", "total", "staging")
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for own in report.ranks:
        table.add_row(
            str(own.rank),
            own.host,
            decimal(own.bytes_read) if own.reader else "–",
            decimal(own.bytes_received),
            *(f"{seconds:.2f} s" for seconds in (own.read_s, own.exchange_s, own.place_s, own.total_s)),
            decimal(own.peak_staging_bytes),
        )
    console.print(table)
    for rank, digest in enumerate(digests or []):
        console.print(f"digest of rank {rank}: {digest}", highlight=False)
    for own in report.ranks:
        if own.note:
            console.print(f"rank {own.rank} on {own.host} {own.note}", highlight=False)
