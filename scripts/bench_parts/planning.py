"""How long one rank's planning takes, whatever the size of the job."""

from __future__ import annotations

import statistics
import time
from typing import Any

from fastload.formats.manifest import TensorEntry
from fastload.transfer.demand import Demand, Supply
from fastload.transfer.plan import TransferPlan, plan_transfer

MIB = 2**20


def measure_plan(
    num_tensors: int, num_ranks: int, *, every: int, block_bytes: int, repeats: int
) -> dict[str, Any]:
    """Times one rank's planning of 1 MiB tensors, 1000 to a file, of which every so many-th is wanted.

    With `block_bytes` the chunks keep checksum blocks of that length whole.
    """
    wanted = [
        TensorEntry(f"layers.{index}.weight", "BF16", (512, 1024), index // 1000, index % 1000 * MIB, MIB)
        for index in range(0, num_tensors, every)
    ]
    row: dict[str, Any] = {"tensors": len(wanted), "ranks": num_ranks, "block_bytes": block_bytes}
    names = "plan", "digest", "own_chunks_and_spans", "places_of_all_rounds"
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        began = time.perf_counter()
        made = plan_transfer(
            wanted,
            Supply(tuple(range(num_ranks))),
            Demand(tuple(range(num_ranks))),
            staging_bytes=256 * MIB,
            chunk_bytes=None,
            block_bytes=block_bytes,
        )
        planned = time.perf_counter()
        made.digest()
        digested = time.perf_counter()
        for index in range(made.num_rounds):
            made.spans(made.chunk(index, num_ranks // 2))
        own = time.perf_counter()
        _places_of_a_round(made)
        slots = (time.perf_counter() - own) * made.num_rounds
        values = planned - began, digested - planned, own - digested, slots
        for name, value in zip(names, values, strict=True):
            seconds[name].append(value)
    row |= {"extents": len(made.extents), "readers": len(made.readers), "rounds": made.num_rounds}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {**row, **medians, "plan_to_spans": sum(list(medians.values())[:3])}


def _places_of_a_round(made: TransferPlan) -> None:
    """What the pipeline asks of the plan for each round: what goes where."""
    for one in made.readers:
        made.chunk(0, one)
