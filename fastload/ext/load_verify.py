"""``fastload load`` and ``verify``, which run on all ranks of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

import fastload
from fastload.base.devices import is_accelerator
from fastload.base.registry import extension
from fastload.cli.console import (
    chosen_sources,
    json_option,
    print_json,
    progress,
    read_all,
    set_rank,
    source_options,
)
from fastload.comm.group import separate_call
from fastload.comm.launch import Launch, from_env, initialize
from fastload.errors import FastloadError, OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.encoder import encode_state
from fastload.formats.manifest import TensorEntry
from fastload.formats.state import OWN_PREFIX, state_digest
from fastload.options import STRATEGIES
from fastload.storage import locate
from fastload.storage.single_file import require_writable

if TYPE_CHECKING:  # it takes long to import, and only a sharded load needs it
    from torch.distributed.tensor import DTensor, Placement


@click.command(short_help="Load a checkpoint on all ranks, and print a report.")
@click.argument("path")
@click.option("--device", default="cpu", show_default=True, help="Device of the tensors: cpu, cuda, cuda:1.")
@click.option(
    "--strategy", type=click.Choice(STRATEGIES),
    help="How to load: auto, allgather (each rank reads 1/N), broadcast (one reads), direct (each reads "
    "all).",
)  # fmt: skip
@click.option(
    "--names", multiple=True, metavar="NAME", help="Name or glob pattern of tensors to load; repeatable."
)
@click.option("--mesh", metavar="SIZES", help="Load DTensors on a mesh of all ranks: 8, or 2x4.")
@click.option(
    "--placements",
    metavar="LIST",
    help="For each dimension of the mesh, replicate or shard(DIMENSION); tensors without it are replicated.",
)
@json_option
@click.option("--trace", metavar="FILE", help="Write a Chrome/Perfetto trace of all ranks into this file.")
@click.option("--digest", is_flag=True, help="Print an xxh3 digest of the loaded tensors on each rank.")
@source_options
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
    **sources: str | None,
) -> None:
    """Load the checkpoint at PATH on all ranks of a torchrun or srun job, and print a report.

    Without a launcher, one process loads it. With --mesh and --placements each rank gets its part of each
    tensor, as in a job with FSDP, HSDP or tensor parallelism:

    torchrun … -m fastload load PATH --mesh 2x4 --placements 'replicate,shard(0)'
    """
    sharding = None
    if mesh is not None or placements is not None:
        # Before the ranks connect, since the first one that exits would cut off the others.
        launch = from_env()
        set_rank(launch.rank)
        sharding = _sharding(mesh, placements, launch)
    rank, device = initialize(device)
    set_rank(rank)
    with progress(rank, shown=not as_json) as show:
        asked: dict[str, Any] = {"strategy": strategy, "trace": trace}
        given = {name: value for name, value in asked.items() if value is not None}
        options = fastload.LoadOptions(progress=show, **given, **chosen_sources(sources))
        if options.trace is not None:
            _require_trace(rank, options)
        with fastload.open(path, options=options) as checkpoint:
            shared = [entry for entry in checkpoint.manifest.tensors if not entry.name.startswith(OWN_PREFIX)]
            into = sharding and sharding.empty(shared, device)
            wanted = list(names) or (list(into) if into else _all_names(checkpoint.manifest, shared))
            state = checkpoint.load(into=into, device=device, names=wanted)
    report = checkpoint.report
    assert report is not None
    digests = None
    if digest:
        title = "comparing digests"
        with separate_call(None, title, timeout_s=options.timeout_s) as world, world.step() as step:
            step.answer(state_digest(_local_tensors(state, sharded=sharding is not None)))
        digests = step.answers
    error = checkpoint.trace_error
    if error is None and digests is not None and sharding is None and len(set(digests)) > 1:
        error = FastloadError(f"the ranks hold different states: {digests}")
    if rank == 0 and as_json:
        print_json({**report.to_dict(), "digests": digests}, error)
    elif rank == 0:
        _print_load(report, digests, sharded=sharding is not None)
    if error is not None:
        raise error


def _local_tensors(state: Any, *, sharded: bool) -> dict[str, Tensor]:
    return {name: t.to_local() for name, t in state.items()} if sharded else encode_state(state).tensors


def _all_names(manifest: fastload.Manifest, shared: list[TensorEntry]) -> list[str] | None:
    """Returns the names of all tensors if some belong to single ranks; otherwise None, which means all."""
    return [entry.name for entry in manifest.tensors] if len(shared) < len(manifest.tensors) else None


def _require_trace(rank: int, options: fastload.LoadOptions) -> None:
    """Checks on all ranks, before data move, that rank 0 can write the trace."""
    title = f"checking that {options.trace} can be written"
    with separate_call(None, title, timeout_s=options.timeout_s) as world, world.step():
        if rank == 0:
            require_writable(locate(options.trace).url)


def _print_load(report: fastload.LoadReport, digests: list[str] | None, *, sharded: bool) -> None:
    table = extension("reports", "table", "printing a report")
    click.echo(table(report, is_complete=True, sharded=sharded))
    for rank, digest in enumerate(digests or []):
        click.echo(f"digest of rank {rank}: {digest}")


@click.command(short_help="Check every byte of a checkpoint.")
@click.argument("path")
@json_option
def verify(path: str, as_json: bool) -> None:
    """Check every byte of the checkpoint at PATH against the checksums of its commit record or seal.

    The ranks of a torchrun or srun job share the work. If there are bad blocks, it lists them and exits
    with 1.
    """
    read_all(fastload.verify, path, "verifying", as_json=as_json)


@dataclass(frozen=True)
class Sharding:
    """The layout of all tensors on a mesh of all ranks.

    Attributes:
        mesh: Ranks in each dimension of the mesh.
        dims: For each of these dimensions, the dimension of tensors that it shards; None if it replicates.
    """

    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def parse(cls, mesh: str, placements: str, num_ranks: int) -> Sharding:
        """Parses the values of ``--mesh`` and ``--placements``.

        Args:
            mesh: Sizes such as ``8`` or ``2x4``.
            placements: One for each dimension of the mesh, such as ``replicate,shard(0)``.
            num_ranks: Ranks of the job, all of which must be in the mesh.

        Raises:
            OptionError: A value is invalid.
        """
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", mesh):
            raise OptionError(f"mesh={mesh!r} is not written as 8 or 2x4")
        sizes = tuple(map(int, mesh.split("x")))
        dims = tuple(_sharded_dim(word.strip().lower()) for word in placements.split(","))
        if len(dims) != len(sizes):
            raise OptionError(
                f"placements={placements!r} are {len(dims)}, dimensions of mesh={mesh!r} are {len(sizes)}"
            )
        if prod(sizes) != num_ranks:
            raise OptionError(f"mesh={mesh!r} has {prod(sizes)} ranks, the job has {num_ranks}")
        return cls(sizes, dims)

    def placements(self, num_dims: int) -> tuple[Placement, ...]:
        """Returns the placements of a tensor; a missing dimension is replicated."""
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Replicate() if dim is None or dim >= num_dims else Shard(dim) for dim in self.dims)

    def empty(self, entries: Iterable[TensorEntry], device: str) -> dict[str, DTensor]:
        """Returns uninitialized memory for this rank's part of each tensor, by name; all ranks call it.

        Args:
            entries: The tensors.
            device: Device of this rank.

        Raises:
            ManifestError: A tensor has a dtype that torch lacks.
        """
        from torch.distributed import tensor

        target = torch.device(device)
        if is_accelerator(target):
            torch.accelerator.set_device_index(target)
        mesh = dist.init_device_mesh(target.type, self.mesh)
        empty = {}
        for entry in entries:
            dtype, shape = torch_spec(entry)
            placements = self.placements(len(shape))
            empty[entry.name] = tensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
        return empty


def _sharding(mesh: str | None, placements: str | None, launch: Launch) -> Sharding:
    if mesh is None or placements is None:
        raise OptionError("mesh and placements go together: one of them is not given")
    if launch.launcher == "none":
        raise OptionError(f"mesh={mesh!r}: there are no ranks of a torchrun or srun job")
    return Sharding.parse(mesh, placements, launch.world_size)


def _sharded_dim(placement: str) -> int | None:
    if placement == "replicate":
        return None
    if placement.startswith("partial"):
        raise OptionError(f"placement {placement!r}: checkpoints hold whole values, not partial sums")
    shard = re.fullmatch(r"shard\((\d+)\)", placement)
    if shard is None:
        raise OptionError(f"placement {placement!r} is neither replicate nor shard(DIMENSION)")
    return int(shard[1])
