"""``fastload plan``: predicts a load on any cluster: who reads what, and how long it takes."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing
from typing import Any

import click

import fastload
from fastload.base.registry import extension
from fastload.base.units import format_bytes
from fastload.cli.console import json_option, print_json, print_table, stdout, table_of
from fastload.errors import OptionError
from fastload.formats.names import NAMES
from fastload.geometry.ranges import ByteRange
from fastload.options import LoadOptions
from fastload.planning.cluster import Cluster, Requests
from fastload.planning.commands.options import COUNT, LINK_RATE, SIZE, TIME
from fastload.planning.exchange import Level
from fastload.planning.parallel import Parallel, model_of_size, model_of_tensors
from fastload.planning.sharded import ShardedLoad
from fastload.planning.simulate import STRATEGIES, Prediction, ReplicatedLoad
from fastload.planning.units import format_duration, format_rate
from fastload.storage import locate, open_storage
from fastload.transfer.pace import far_reads

_MOST_TRACED = 64
_HEADS = (
    "strategy", "time", "÷floor", "off storage", "readers", "share", "max/mean", "exchanged", "rounds",
    "chunk", "bound by",
)  # fmt: skip
_SHORT_S = 0.25  # time to open a checkpoint with few ranks


@click.command(short_help="Predict the time of a load on any cluster.")
@click.argument("path", required=False)
@click.option("--size", type=SIZE, help="Size of a checkpoint, such as 13.8TB or 512GiB, instead of PATH.")
@click.option("--hosts", required=True, type=COUNT, help="Hosts.")
@click.option("--ranks-per-host", default="1", show_default=True, type=COUNT, help="Ranks on each host.")
@click.option(
    "--storage-gbps",
    type=LINK_RATE,
    help="Rate of storage to all hosts together; give this, the next, or both.",
)
@click.option("--per-host-storage-gbps", type=LINK_RATE, help="Highest rate of storage to one host.")
@click.option("--latency", type=TIME, help="Mean time from a request to the first byte, such as 50ms.")
@click.option("--connection-rate", type=LINK_RATE, help="Highest rate of one request, such as 60MB/s.")
@click.option("--host-gbps", required=True, type=LINK_RATE, help="Rate of a host's network link, each way.")
@click.option(
    "--rank-gbps", type=LINK_RATE, help="Rate at which a rank's cores receive and send; 1.6GB/s by default."
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    type=click.Choice(["cpu", "cuda"]),
    help="Device of the tensors; with cuda the exchange uses NCCL.",
)
@click.option("--tp", type=COUNT, help="Tensor-parallel ranks, which are adjacent.")
@click.option("--pp", type=COUNT, help="Pipeline stages.")
@click.option("--dp", type=COUNT, help="Data-parallel ranks: replicas, or shards with --fsdp.")
@click.option("--fsdp", is_flag=True, help="Shard over the data-parallel ranks.")
@click.option("--staging", type=SIZE, help="staging_bytes of each rank; 256MiB by default.")
@click.option("--chunk", type=SIZE, help="chunk_bytes; chosen by default.")
@json_option
@click.option("--trace", metavar="FILE", help="Write a trace of the fastest strategy into this file.")
def plan(
    path: str | None,
    size: int | None,
    hosts: int,
    ranks_per_host: int,
    storage_gbps: float | None,
    per_host_storage_gbps: float | None,
    latency: float | None,
    connection_rate: float | None,
    host_gbps: float,
    rank_gbps: float | None,
    device: str,
    tp: int | None,
    pp: int | None,
    dp: int | None,
    fsdp: bool,
    staging: int | None,
    chunk: int | None,
    as_json: bool,
    trace: str | None,
) -> None:
    """Predict a load of the checkpoint at PATH on a cluster, which need not exist.

    With --tp, --pp or --dp the ranks hold parts of the model, cut by tensor names as in Megatron-LM, or, with
    --size, parts of a transformer with equal layers.

    A rate is a number of Gbit/s, or has a unit: 400Gbit/s, 50GB/s, 46GiB/s. Rates are goodput: some 95 %
    of an Ethernet line rate. Storage and exchange share a host's link.
    """
    shown_path = locate(path).url if path is not None else None
    if (path is None) == (size is None):
        raise OptionError("give either PATH or --size")
    if storage_gbps is None and per_host_storage_gbps is None:
        raise OptionError("how fast is storage? Give --storage-gbps, --per-host-storage-gbps, or both")
    cluster = Cluster(
        num_hosts=hosts,
        ranks_per_host=ranks_per_host,
        host_bytes_per_s=host_gbps,
        storage_bytes_per_s=storage_gbps or math.inf,
        host_storage_bytes_per_s=per_host_storage_gbps or math.inf,
        requests=Requests(latency_s=latency or 0.0, connection_bytes_per_s=connection_rate or math.inf),
        nccl=device == "cuda",
        rank_bytes_per_s=rank_gbps,
    )
    options = LoadOptions(chunk_bytes=chunk)
    if staging is not None:
        options = dataclasses.replace(options, staging_bytes=staging)
    parallel = Parallel(tp=tp or 1, pp=pp or 1, dp=dp or 1, fsdp=fsdp)
    if any((tp, pp, dp, fsdp)):
        _require_fit(parallel, cluster)
    asked = _load(path, size, parallel, cluster)
    predictions = [
        asked.predict(strategy, staging_bytes=options.staging_bytes, chunk_bytes=options.chunk_bytes)
        for strategy in STRATEGIES
    ]
    by_strategy = {prediction.decision.strategy: prediction for prediction in predictions}
    if trace is not None:
        best = min(predictions, key=lambda prediction: prediction.total_s)
        _write_trace(trace, best, asked)
    if as_json:
        print_json(_as_json(shown_path, asked, by_strategy))
    else:
        _print(shown_path, asked, by_strategy)


_Load = ReplicatedLoad | ShardedLoad


def _load(path: str | None, size: int | None, parallel: Parallel, cluster: Cluster) -> _Load:
    if path is None:
        assert size is not None
        if parallel.cuts:
            return ShardedLoad(model_of_size(size, parallel), parallel, cluster)
        return ReplicatedLoad([ByteRange(0, 0, size)], cluster)
    tensors = fastload.inspect(path).tensors
    if parallel.cuts:
        return ShardedLoad(model_of_tensors(tensors), parallel, cluster)
    with closing(open_storage(path, NAMES)) as storage:
        return ReplicatedLoad(tensors, cluster, is_mounted=storage.shared and storage.probes)


def _require_fit(parallel: Parallel, cluster: Cluster) -> None:
    if parallel.fsdp and parallel.dp == 1:
        raise OptionError("--fsdp shards over the ranks of --dp: give more than one")
    if parallel.num_ranks != cluster.num_ranks:
        world = f"{cluster.num_hosts:,} hosts × {cluster.ranks_per_host} have {cluster.num_ranks:,}"
        raise OptionError(f"{parallel} takes {parallel.num_ranks:,} ranks, {world}")


def _floor_s(load: _Load) -> float:
    """Returns the seconds that one client needs to stream everything."""
    return load.nbytes / load.cluster.client_bytes_per_s


def _as_json(path: str | None, load: _Load, predictions: dict[str, Prediction]) -> dict[str, Any]:
    world = _finite(dataclasses.asdict(load.cluster))
    floor_s = _floor_s(load)
    return {
        "path": path,
        "nbytes": load.nbytes,
        "parallel": dataclasses.asdict(load.parallel) if isinstance(load, ShardedLoad) else None,
        "held_bytes": [min(load.held_bytes), max(load.held_bytes)],
        "cluster": world,
        "floor_s": floor_s,
        "least_s": load.least_s,
        "before_s": load.cluster.before_s,
        "strategies": [_prediction_as_json(prediction, floor_s) for prediction in predictions.values()],
    }


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with None for infinity, which JSON does not have."""
    return {
        name: _finite(value) if isinstance(value, dict) else None if value == math.inf else value
        for name, value in fields.items()
    }


def _prediction_as_json(prediction: Prediction, floor_s: float) -> dict[str, Any]:
    plan = prediction.plan
    return {
        "strategy": prediction.decision.strategy,
        "total_s": prediction.total_s,
        "to_floor": prediction.total_s / floor_s if floor_s else None,
        "bound_by": prediction.bound_by,
        "storage_bytes": prediction.storage_bytes,
        "exchanged_bytes": prediction.exchanged_bytes,
        "levels": [level._asdict() for level in prediction.levels],
        "num_readers": len(plan.readers),
        "share_bytes": {"mean": plan.total_bytes / len(plan.readers), "max": plan.most_bytes},
        "chunk_bytes": plan.chunk_bytes,
        "num_rounds": plan.num_rounds,
        "num_turns": plan.num_windows,
        "depth": plan.depth,
        "buffer_bytes": plan.buffer_bytes,
        "round_s": prediction.limits,
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number > 1)}"


def _print(path: str | None, load: _Load, predictions: dict[str, Prediction]) -> None:
    cluster = load.cluster
    console = stdout()
    what = f"{path or 'a checkpoint'}: {format_bytes(load.nbytes)}"
    if isinstance(load, ShardedLoad):
        least, most = format_bytes(min(load.held_bytes)), format_bytes(max(load.held_bytes))
        held = most if least == most else f"{least} to {most}"
        console.print(f"{what}, of which each of {cluster.num_ranks:,} ranks holds {held}", style="bold")
        exchange = f"messages over Gloo; {load.parallel}"
    else:
        num_ranks = cluster.num_ranks
        console.print(f"{what} into {'each of ' * (num_ranks > 1)}{_count(num_ranks, 'rank')}", style="bold")
        exchange = "NCCL" if cluster.nccl else "Gloo"
    world = f"{_count(cluster.num_hosts, 'host')} × {_count(cluster.ranks_per_host, 'rank')}"
    console.print(f"{world}; exchange: {exchange}")
    rates = {
        "storage": cluster.storage_bytes_per_s,
        "storage to each host": cluster.host_storage_bytes_per_s,
        "each host's link": cluster.host_bytes_per_s,
    }
    shown = (f"{name} {_rate(rate)}" for name, rate in rates.items() if math.isfinite(rate))
    console.print("; ".join(shown))
    requests = cluster.requests
    if requests.are_limited:
        limits = [f"{format_duration(requests.latency_s)} to the first byte"] if requests.latency_s else []
        if math.isfinite(requests.connection_bytes_per_s):
            limits.append(f"{_rate(requests.connection_bytes_per_s)} each")
        console.print(
            f"requests: {', '.join(limits)}, at most {far_reads(cluster.num_ranks)[1]} of a rank in flight"
        )
    console.print(
        f"floor, one client streams all: {format_duration(_floor_s(load))}; "
        f"the least possible here: {format_duration(load.least_s)}",
    )
    rows = [_cells(prediction, cluster, _floor_s(load)) for prediction in predictions.values()]
    wide, narrow = table_of(*_HEADS, text=("strategy", "bound by")), table_of("", *predictions, text=("",))
    for row in rows:
        wide.add_row(*row)
    for head, *cells in list(zip(_HEADS, *rows, strict=True))[1:]:
        narrow.add_row(head, *cells)
    print_table(wide, narrow)
    if cluster.before_s > _SHORT_S:
        console.print(f"before the first read: {format_duration(cluster.before_s)}")
    if levels := next((prediction.levels for prediction in predictions.values() if prediction.levels), ()):
        console.print(f"exchanged: {'; '.join(map(_level, levels))}")


def _level(level: Level) -> str:
    hops = f"{level.num_hops} hops" if level.num_hops > 1 else "1 hop"
    return f"{format_bytes(level.nbytes)} {level.name} ({level.how}: {hops})"


def _cells(prediction: Prediction, cluster: Cluster, floor_s: float) -> list[str]:
    plan = prediction.plan
    alone = prediction.decision.strategy == "direct"
    return [
        prediction.decision.strategy,
        format_duration(prediction.total_s),
        f"{prediction.total_s / floor_s:.2f}" if floor_s else "–",
        format_bytes(prediction.storage_bytes),
        f"{cluster.num_ranks if alone else len(plan.readers):,}",
        format_bytes(plan.total_bytes // len(plan.readers)),
        f"{plan.most_bytes * len(plan.readers) / plan.total_bytes:.3f}" if plan.total_bytes else "–",
        format_bytes(prediction.exchanged_bytes),
        f"{plan.num_rounds:,}",
        format_bytes(plan.chunk_bytes),
        prediction.bound_by,
    ]


def _rate(bytes_per_s: float) -> str:
    """Returns a rate in bits and in bytes, against confusion."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:,.4g} Gbit/s = {format_rate(bytes_per_s)}"


def _write_trace(path: str, prediction: Prediction, load: _Load) -> None:
    """Writes the predicted timeline as a trace of all ranks, or of some if there are many."""
    cluster = load.cluster
    step = -(-cluster.num_ranks // _MOST_TRACED)
    readers = set(prediction.plan.readers)
    alone = prediction.decision.strategy == "direct"
    spans = [
        (one.stage, one.begin_s, one.end_s, {"round": one.first_round, "rounds": one.num_rounds})
        for one in prediction.timeline
    ]
    whole = ("load", 0.0, prediction.total_s)
    others = [span for span in spans if span[0] != "read"]
    ranks = {
        rank: (
            f"host {rank // cluster.ranks_per_host}",
            [whole, *(spans if alone or rank in readers else others)],
        )
        for rank in range(0, cluster.num_ranks, step)
    }
    about = {
        "what": f"predicted {prediction.decision.strategy}",
        "bytes_wanted": load.nbytes,
        "num_ranks": cluster.num_ranks,
        "floor_s": _floor_s(load),
    }
    extension("observers", "trace", "--trace").write_trace(path, ranks, about)
