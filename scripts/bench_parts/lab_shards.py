"""Sharded loads on several hosts: the targets and arms of ``scripts/bench_lab.py --shards …``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import empty

from bench_parts import lab_arms, megatron_arms, quantised_weights, sharded
from bench_parts.baselines import State
from bench_parts.lab_arms import Arm, Places, floor, make_arms, parse_tuned, prefetch
from bench_parts.tables import AS_IT_WAS, DEQUANTISED, FLOOR
from fastload import LoadOptions
from fastload.ext.load_verify import Sharding
from fastload.formats.state import state_digest

_TP = 4
LAYOUTS: dict[str, Callable[[int], tuple[str, str]]] = {
    "fsdp": lambda ranks: (f"{ranks}", "shard(0)"),
    "hsdp": lambda ranks: (f"2x{ranks // 2}", "replicate,shard(0)"),
    megatron_arms.LAYOUT: lambda ranks: (f"{ranks // 2}x2", "replicate,shard(0)"),
    "tp": lambda ranks: (f"{ranks // min(_TP, ranks)}x{min(_TP, ranks)}", "replicate,shard(1)"),
}


@dataclass(frozen=True)
class Target:
    """What a rank is to get.

    Attributes:
        module: Into whose parameters, DTensors, time and again; None if every load makes tensors of its own.
        digest: Of what this rank gets.
        nbytes: Of it.
    """

    module: nn.Module | None
    digest: str
    nbytes: int


def make_target(layout: str, checkpoint: dict[str, Any], *, dequantised: bool) -> Target:
    """Makes what is to be loaded of a checkpoint: all of it, or this rank's part in a layout.

    What the part has to be is looked up in the checkpoint's folder, which all hosts of the lab see.
    """
    if not layout and not dequantised:
        return Target(None, checkpoint["digest"], checkpoint["nbytes"])
    files = Path(checkpoint["folder"], "safetensors")
    whole = quantised_weights.load_alone(files) if dequantised else sharded.mapped(files)
    if not layout:
        return Target(None, state_digest(whole), sum(tensor.nbytes for tensor in whole.values()))
    sharding = Sharding.parse(*LAYOUTS[layout](dist.get_world_size()), dist.get_world_size())
    mesh = dist.init_device_mesh("cpu", sharding.mesh)
    parts = {
        name: empty(
            each.shape, dtype=each.dtype, device_mesh=mesh, placements=sharding.placements(each.dim())
        )
        for name, each in whole.items()
    }
    module = sharded.module_of(parts)
    nbytes = sum(part.nbytes for part in sharded.local_parts(module).values())
    return Target(module, sharded.expected_digest(module, whole), nbytes)


def arms_of(layout: str, tuned: Sequence[str]) -> list[Arm]:
    """Returns the arms that can load into a layout; see `make_arms`."""
    if not layout:
        return make_arms(tuned)
    if layout == megatron_arms.LAYOUT:
        return [Arm(FLOOR, floor), *megatron_arms.load_arms()]
    peers = {
        "torch DCP": (sharded.dcp_directory, "dcp"),
        "torch DCP, safetensors": (sharded.dcp_safetensors, "safetensors"),
        "rank 0 + set_model_state_dict": (sharded.first_rank_sets, "safetensors"),
    }
    arms = [Arm(FLOOR, floor)]
    arms += [Arm(name, partial(_peer, load, below), reads="mount") for name, (load, below) in peers.items()]
    arms += [
        Arm("fastload auto", fastload_http),
        Arm(AS_IT_WAS, fastload_http),
        Arm(DEQUANTISED, fastload_dequantised),
        Arm("fastload prefetched", fastload_prefetched, prepare=prefetch),
        Arm("fastload auto (mount)", fastload_mounted, reads="mount"),
        Arm("fastload DCP", fastload_dcp),
        Arm("fastload DCP (mount)", fastload_dcp_mounted, reads="mount"),
        Arm("fastload DCP (s3)", fastload_dcp_s3, reads="S3"),
    ]
    arms += [Arm(f"fastload {text}", partial(fastload_http, **parse_tuned(text))) for text in tuned]
    return arms


def fastload_prefetched(places: Places) -> State:
    lab_arms.fastload_prefetched(places)
    assert places.target is not None
    return sharded.local_parts(places.target)


def fastload_http(places: Places, **options: Any) -> State:
    return _fastload(places.http, places, LoadOptions(**options))


def fastload_dequantised(places: Places) -> State:
    return _fastload(places.http, places, LoadOptions(dequantize=True), dtype="bfloat16")


def fastload_mounted(places: Places) -> State:
    return _fastload(str(places.folder), places, LoadOptions())


def fastload_dcp(places: Places) -> State:
    return _fastload(places.http, places, LoadOptions(), "dcp")


def fastload_dcp_mounted(places: Places) -> State:
    return _fastload(str(places.folder), places, LoadOptions(), "dcp")


def fastload_dcp_s3(places: Places) -> State:
    return _fastload(places.s3, places, LoadOptions(), "dcp")


def _peer(load: Callable[[Path, nn.Module], None], below: str, places: Places) -> State:
    assert places.folder is not None
    assert places.target is not None
    load(places.folder / below, places.target)
    return sharded.local_parts(places.target)


def _fastload(
    url: str, places: Places, options: LoadOptions, below: str = "safetensors", dtype: str | None = None
) -> State:
    assert places.target is not None
    report = sharded.by_fastload(f"{url}/{below}", options, places.target, dtype)
    places.reports.append(report.to_dict())
    return sharded.local_parts(places.target)
