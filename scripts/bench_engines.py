"""The cost of integrations: `Checkpoint.tensors`, refreshes of a model, and DCP with fastload as its storage.

    python scripts/bench_engines.py --ranks 4 --size 440MiB --repeats 5 --folder /dev/shm
    $(tests/engines/setup) scripts/bench_engines.py vllm --size 1340MB --repeats 3
    $(tests/engines/setup) scripts/bench_engines.py lab --hosts 2 --storage-rate 400mbit     (as root)

The second command loads a model in vLLM's workers, with vLLM's own loader and with others. The third one does
so on lab hosts (scripts/lab) that share one link to the storage.

Arms run interleaved in one job, each from a barrier until the slowest rank is done; the first run of each is
not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_parts.job import MIB, Bytes, all_ranks, forget_peak, peak_bytes, run_on_ranks
from bench_parts.tables import print_table
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastload
from fastload import LoadOptions
from fastload.integrations.dcp import Reader, Writer

WIDTH = 1024


@click.group(invoke_without_command=True)
@click.option("--ranks", default=4, show_default=True, help="Processes.")
@click.option("--size", type=Bytes(), default="440MiB", show_default=True, help="Of the model, in bf16.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each arm.")
@click.option("--folder", type=click.Path(), help="Where checkpoints are.")
@click.option("--arms", default="", help="Only arms whose name contains one of these (a,b,c).")
@click.pass_context
def main(context: click.Context, ranks: int, size: int, repeats: int, folder: str | None, arms: str) -> None:
    """Benchmarks of the integrations on one machine."""
    if context.invoked_subcommand is not None:
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-engines-") as root:
        rows = run_on_ranks(__file__, ranks, root, size=size, repeats=repeats, arms=arms)
    table = Table(title=f"{size // MIB} MiB, {ranks} ranks, median of {repeats}")
    for name in ("arm", "seconds", "least", "most", "MiB a rank beyond what it keeps"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for row in rows:
        seconds = row["seconds"]
        numbers = (statistics.median(seconds), min(seconds), max(seconds))
        peak = max(row["peak_bytes"]) / MIB
        table.add_row(row["arm"], *(f"{value:.3f}" for value in numbers), f"{peak:.0f}")
    print_table(table)


@main.command()
@click.option("--size", type=Bytes(), default="1340MB", show_default=True, help="Of the model, in bf16.")
@click.option("--repeats", default=3, show_default=True, help="Loads of each arm that count.")
@click.option("--folder", type=click.Path(), help="Where the model is, on a disk.")
@click.option("--tp", "sizes", multiple=True, type=int, default=(1, 2), show_default=True, help="Workers.")
@click.option("--arms", default="auto,runai_streamer,fastload", show_default=True, help="Load formats.")
@click.option("--cold", is_flag=True, help="Also with files that are not in the page cache.")
def vllm(size: int, repeats: int, folder: str | None, sizes: tuple[int, ...], arms: str, cold: bool) -> None:
    """Load one model in the workers of vLLM."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bench_parts import vllm_loads

    table = Table(title=f"vLLM, {size / 1e9:.2f} GB, median of {repeats}")
    for name in ("arm", "TP", "files", "seconds", "CPU seconds", "least", "MiB a rank at its peak"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-vllm-") as root:
        vllm_loads.make_model(Path(root), size)
        for tp in sizes:
            for is_cold in (False, True)[: 1 + cold]:
                for row in vllm_loads.measure(Path(root), tp, repeats, arms.split(","), is_cold):
                    numbers = (f"{row[name]:.2f}" for name in ("seconds", "cpu_s", "least_cpu_s"))
                    peak = f"{row['peak_bytes'] / MIB:.0f}"
                    table.add_row(row["arm"], str(tp), "cold" if is_cold else "cached", *numbers, peak)
    print_table(table)


@main.command()
@click.option("--hosts", default=2, show_default=True, help="Lab hosts, each with one worker.")
@click.option("--size", type=Bytes(), default="512MB", show_default=True, help="Of the model, in bf16.")
@click.option("--storage-rate", default="400mbit", show_default=True, help="The storage's link.")
@click.option("--host-rate", default="2gbit", show_default=True, help="Each host's link.")
@click.option("--repeats", default=3, show_default=True, help="Loads of each arm that count.")
@click.option("--arms", default="", help="Only arms whose name contains one of these (a,b,c).")
def lab(hosts: int, size: int, storage_rate: str, host_rate: str, repeats: int, arms: str) -> None:
    """Loads of one model in the workers of one vLLM engine, one on each lab host."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bench_parts import vllm_lab, vllm_loads
    from bench_parts.tables import FLOOR

    names = [arm for arm in vllm_lab.ARMS if arm == FLOOR or any(part in arm for part in arms.split(","))]
    table = Table(title=f"vLLM, {size / 1e9:.2f} GB, TP {hosts}, {storage_rate}, median of {repeats}")
    heads = ("arm", "seconds", "÷ floor", "off the storage ÷ model", "between hosts ÷ model", "CPU seconds")
    for name in (*heads, "MiB a rank at its peak"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as root:
        vllm_loads.make_model(Path(root), size)
        nbytes = sum(path.stat().st_size for path in Path(root).glob("*.safetensors"))
        rates = ["--storage-rate", storage_rate, "--host-rate", host_rate]
        rows, failed = vllm_lab.measure(Path(root), hosts, rates, repeats, names)
    floor_s = next((row["seconds"] for row in rows if row["arm"] == FLOOR), float("nan"))
    for row in rows:
        shares = (row["seconds"] / floor_s, row["storage_bytes"] / nbytes, row["exchanged_bytes"] / nbytes)
        numbers = (row["seconds"], *shares, row["cpu_s"])
        table.add_row(row["arm"], *(f"{value:.2f}" for value in numbers), f"{row['peak_bytes'] / MIB:.0f}")
    print_table(table)
    for arm, why in failed.items():
        click.echo(f"{arm}: {why}")


@main.command(hidden=True)
@click.argument("settings")
def rank(settings: str) -> None:
    """Run one rank of the job."""
    given = json.loads(settings)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    folder = Path(given["folder"])
    num_layers = max(1, given["size"] // (2 * WIDTH * WIDTH))
    arms = {
        name: arm
        for name, arm in make_arms(folder, num_layers).items()
        if not given["arms"] or any(part in name for part in given["arms"].split(","))
    }
    rows: dict[str, dict[str, list[Any]]] = {name: {"seconds": [], "peak_bytes": []} for name in arms}
    for turn in range(1 + given["repeats"]):
        for name, arm in arms.items():
            dist.barrier()
            before, began = forget_peak(), time.perf_counter()
            arm()
            everyone = all_ranks((time.perf_counter() - began, peak_bytes() - before))
            if turn:
                rows[name]["seconds"].append(max(seconds for seconds, _ in everyone))
                rows[name]["peak_bytes"].append(max(peak for _, peak in everyone))
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps([{"arm": name, **row} for name, row in rows.items()]))
    dist.barrier()
    dist.destroy_process_group()


def make_arms(folder: Path, num_layers: int) -> dict[str, Callable[[], object]]:
    """Writes the checkpoints, and returns the arms."""
    torch.manual_seed(0)
    model = layers(num_layers)
    fastload.save(model.state_dict(), folder / "new")
    sharded = layers(num_layers)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.save(sharded.state_dict(), checkpoint_id=folder / "dcp")
    gather = LoadOptions(strategy="allgather")

    def load(options: LoadOptions) -> None:
        fastload.load(folder / "new", options=options)

    def tensors(options: LoadOptions) -> None:
        with fastload.open(folder / "new", options=options) as checkpoint:
            for _ in checkpoint.tensors():
                pass

    def through_dcp(target: nn.Module, reader: Any) -> None:
        dcp.load(target.state_dict(), storage_reader=reader)

    state = sharded.state_dict()
    return {
        "load": lambda: load(LoadOptions()),
        "tensors, dropped": lambda: tensors(LoadOptions()),
        "load, allgather": lambda: load(gather),
        "tensors, allgather, dropped": lambda: tensors(gather),
        "refresh, into=model": lambda: fastload.load(folder / "new", into=model),
        "refresh, allgather": lambda: fastload.load(folder / "new", into=model, options=gather),
        "FSDP2: load, into=model": lambda: fastload.load(folder / "new", into=sharded, options=gather),
        "FSDP2: dcp.load, Reader": lambda: through_dcp(sharded, Reader(folder / "new", options=gather)),
        "FSDP2: dcp.load, its own": lambda: through_dcp(sharded, dcp.FileSystemReader(folder / "dcp")),
        "replicated: dcp.load, Reader": lambda: through_dcp(model, Reader(folder / "new")),
        "replicated: dcp.load, its own": lambda: through_dcp(model, dcp.FileSystemReader(folder / "dcp")),
        "FSDP2: fastload.save": lambda: fastload.save(
            state, folder / "saved", options=fastload.SaveOptions(overwrite=True)
        ),
        "FSDP2: dcp.save, Writer": lambda: dcp.save(state, storage_writer=Writer(folder / "saved")),
        "FSDP2: dcp.save, its own": lambda: dcp.save(state, checkpoint_id=folder / "saved-dcp"),
    }


def layers(num_layers: int) -> nn.Module:
    """Returns a model of square matrices."""
    return nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(num_layers)]
    )


if __name__ == "__main__":
    main()
