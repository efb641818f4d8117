"""``fastload size``: the size of a checkpoint, and the bandwidth to save and restore it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from fastload.base.units import count, format_bytes
from fastload.cli.console import json_option, print_json, print_table, table_of
from fastload.errors import OptionError
from fastload.planning.commands.options import (
    COUNT,
    RATE,
    TIME,
    GivenModel,
    csv_option,
    job_options,
    model_options,
    print_csv,
)
from fastload.planning.sizing import (
    RECIPES,
    Topology,
    Transfer,
    checkpoint_bytes,
    overhead,
    topology,
    transfers,
)
from fastload.planning.units import format_duration, format_rate


@click.command(short_help="Compute the size of a checkpoint, and the bandwidth that it needs.")
@model_options
@click.option("--tp", type=COUNT, default="1", show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=COUNT, default="1", show_default=True, help="Pipeline stages.")
@click.option("--dp", type=COUNT, help="Replicas; computed from the GPUs by default.")
@job_options
@click.option("--at", "rate", type=RATE, help="Bandwidth of storage, to compute the time.")
@click.option("--within", type=TIME, multiple=True, help="Time, to compute the bandwidth; repeatable.")
@click.option("--every", type=TIME, help="Interval between saves, to compute their overhead.")
@json_option
@csv_option
def size(
    model: GivenModel,
    tp: int,
    pp: int,
    dp: int | None,
    job: dict[str, Any],
    rate: float | None,
    within: tuple[float, ...],
    every: float | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Compute the size of a checkpoint, and the bandwidth or time to save and restore it.

    SOURCE is a number of parameters (70B, 1.3e12), a Hugging Face config.json, or a checkpoint.
    """
    world = topology(tp=tp, pp=pp, dp=dp, **job)
    if model.nbytes is None:
        raise OptionError("size of what? Give a SOURCE, --size, or --layers with --hidden")
    if rate is not None and within:
        raise OptionError("give one of --at and --within: each follows from the other")
    if every is not None and rate is None and not within:
        raise OptionError("--every needs --at or --within: how long is a save?")
    times_s = within if rate is None else (model.nbytes / rate,)
    rows = [row for time_s in times_s for row in transfers(model.nbytes, world, time_s)]
    recipes = _recipes(model)
    overheads = [
        {"stall_s": time_s, "interval_s": every, "overhead": overhead(time_s, every)}
        for time_s in times_s
        if every is not None
    ]
    if as_json:
        print_json(
            {
                **model.to_dict(),
                "recipes": recipes,
                "world": asdict(world) | {"num_gpus": world.num_gpus, "num_hosts": world.num_hosts},
                "transfers": [asdict(row) for row in rows],
                "overheads": overheads,
            }
        )
        return
    if as_csv:
        print_csv([asdict(row) for row in rows] or recipes or [{"checkpoint_bytes": model.nbytes}])
        return
    for line in model.lines():
        click.echo(line)
    if rows and world.num_gpus > 1:
        _print_transfers(world, rows)
    elif recipes and not rows:
        _print_recipes(recipes)
    else:
        for row in rows:
            time, needed = format_duration(row.time_s), format_rate(row.storage_bytes_per_s)
            click.echo(f"to {row.what} it within {time} takes storage of {needed}")
    if rate is not None and world.dp > 1:
        once, often = format_duration(times_s[0]), format_duration(times_s[0] * world.dp)
        click.echo(f"at {format_rate(rate)} restoring takes {once} read once, {often} read {world.dp} times")
    for each in overheads:
        stall, interval = format_duration(each["stall_s"]), format_duration(each["interval_s"])
        click.echo(
            f"training that stands still for {stall} every {interval} loses {each['overhead'] * 100:.3g} %"
        )


def _recipes(model: GivenModel) -> list[dict[str, Any]]:
    if model.parameters is None:
        return []
    return [
        {
            "recipe": name,
            "bytes_per_parameter": recipe.bytes_per_parameter,
            "checkpoint_bytes": checkpoint_bytes(model.parameters.num, recipe.bytes_per_parameter),
        }
        for name, recipe in RECIPES.items()
    ]


def _print_recipes(recipes: list[dict[str, Any]]) -> None:
    table = table_of("recipe", "bytes each", "checkpoint", "", text=("recipe",))
    for row in recipes:
        sizes = (format_bytes(row["checkpoint_bytes"], binary=binary) for binary in (False, True))
        table.add_row(row["recipe"], f"{row['bytes_per_parameter']:g}", *sizes)
    print_table(table)


def _print_transfers(world: Topology, rows: list[Transfer]) -> None:
    parts = f"TP {world.tp} × PP {world.pp} × DP {world.dp}"
    click.echo(f"{parts} = {world.num_gpus:,} GPUs on {count(world.num_hosts, 'host')}")
    table = table_of("", "", "GPUs", "bytes", "time", "storage", "per host", "per GPU", text=("",))
    for row in rows:
        table.add_row(
            row.what,
            row.how,
            f"{row.num_gpus:,}",
            format_bytes(row.nbytes),
            format_duration(row.time_s),
            *map(format_rate, (row.storage_bytes_per_s, row.host_bytes_per_s, row.gpu_bytes_per_s)),
        )
    print_table(table)
