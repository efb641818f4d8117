"""How long one rank's planning takes, whatever the size of the job."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
import xxhash

from bench_parts.job import MIB, forget_peak, peak_bytes
from fastload.base.memory import uncollected
from fastload.comm.rendezvous import GroupState, StoreRendezvous, StoreStep
from fastload.comm.responses import Each, write_response
from fastload.comm.steps import GatheringStep, Step
from fastload.comm.store import Member
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.geometry.box import Runs
from fastload.planning.parallel import Cut, Model, Parallel, requests_of
from fastload.transfer.demand import RankRequest, RankRequests, SharingGroups
from fastload.transfer.plan import TransferPlan, plan_transfer
from fastload.transfer.routed_plan import RoutedPlan, RoutedView, plan_routes

_LAYER = [  # shapes, and which dimension tensor parallel ranks cut
    *(((rows, 4096), 0) for rows in (4096, 1024, 1024, 14336, 14336)),
    *(((4096, columns), 1) for columns in (4096, 14336)),
    *[((4096,), None)] * 2,
]
_NUM_HELPERS = 4
_TELLING, _PLANNING = "telling what each rank wants", "planning"


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
            tuple(range(num_ranks)),
            tuple(range(num_ranks)),
            staging_bytes=256 * MIB,
            chunk_bytes=None,
            block_bytes=block_bytes,
        )
        planned = time.perf_counter()
        made.digest()
        digested = time.perf_counter()
        for index in range(made.num_rounds):
            made.byte_ranges(made.chunk(index, num_ranks // 2))
        own = time.perf_counter()
        _places_of_a_round(made)
        slots = (time.perf_counter() - own) * made.num_rounds
        values = planned - began, digested - planned, own - digested, slots
        for name, value in zip(names, values, strict=True):
            seconds[name].append(value)
    row |= {"extents": len(made.ranges), "readers": len(made.readers), "rounds": made.num_rounds}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {**row, **medians, "plan_to_spans": sum(list(medians.values())[:3])}


def _places_of_a_round(made: TransferPlan) -> None:
    """What the pipeline asks of the plan for each round: what goes where."""
    for one in made.readers_in(0):
        made.chunk(0, one)


def compare_plans(num_ranks: int, block_bytes: int) -> list[dict[str, Any]]:
    """Plans a load of 42 GB on all ranks as one, and as a sharded load with one sharing group."""
    wanted = [
        TensorEntry(f"layers.{index}", "BF16", (10 * MIB,), index // 1000, index % 1000 * 20 * MIB, 20 * MIB)
        for index in range(2000)
    ]
    ranks, staging_bytes = tuple(range(num_ranks)), 256 * MIB

    def replicated() -> TransferPlan:
        how: dict[str, Any] = {"staging_bytes": staging_bytes, "chunk_bytes": None}
        return plan_transfer(wanted, ranks, ranks, block_bytes=block_bytes, **how)

    def routed() -> RoutedPlan:
        parts = ((index, (Runs(0, each.nbytes, ()),)) for index, each in enumerate(wanted))
        sharing = SharingGroups(wanted, RankRequests((RankRequest.of(parts),), (ranks,)), block_bytes)
        return plan_routes(sharing, ranks, order=ranks, staging_bytes=staging_bytes, chunk_bytes=None)

    rows = []
    for kind, make in ("replicated", replicated), ("one sharing group", routed):
        row: dict[str, Any] = {"plan": kind, "ranks": num_ranks, "block_bytes": block_bytes}
        began = time.process_time()
        try:
            made = make()
            view = made.view(0)
            view.incoming(0)  # finds the windows of readers
        except OptionError:
            values: tuple[Any, ...] = "does not fit", "", "", ""
        else:
            planned = time.process_time()
            num_rounds = min(made.num_rounds, 5)
            rounds = [(view.reads(at), view.outgoing(at), view.incoming(at)) for at in range(num_rounds)]
            round_s = (time.process_time() - planned) / num_rounds
            num_messages = statistics.mean(len(out) + len(into) for _, out, into in rounds)
            round_bytes = statistics.mean(sum(one.nbytes for one in (*out, *into)) for _, out, into in rounds)
            values = planned - began, made.chunk_bytes, num_messages, round_s * 1e6 * MIB / round_bytes
        rows.append(row | dict(zip(("plan_s", "chunk_bytes", "messages", "us_per_MiB"), values, strict=True)))
    return rows


# ---- sharded


def measure_sharded_plan(num_tensors: int, parallel: Parallel, *, repeats: int) -> dict[str, Any]:
    """Times what rank 0 does before a sharded load: it hears what all ranks want, and plans.

    Its store is real; a few processes have left in it what the other ranks say.
    """
    model = _model(num_tensors)
    requests = requests_of(model, parallel)
    by_rank = {
        rank: request.packed
        for request, ranks in zip(requests.distinct, requests.ranks, strict=True)
        for rank in ranks
    }
    packed = [by_rank[rank] for rank in range(parallel.num_ranks)]
    row = {
        "job": str(parallel),
        "tensors": num_tensors,
        "ranks": len(packed),
        "requests": len(requests.distinct),
    }
    row["requests_MB"] = sum(map(len, set(packed))) / 1e6
    del requests, by_rank
    names = "hear", "unpack", "sharing", "plan", "routes", "agree"
    turns = [_plan_once(model, packed) for _ in range(repeats)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in names}
    total = statistics.median(sum(turn[name] for name in names) for turn in turns)
    return {**row, **medians, "total": total, "peak_MiB": max(turn["peak_MiB"] for turn in turns)}


def _model(num_tensors: int) -> Model:
    tensors, offset = [], 0
    for index in range(num_tensors):
        layer, place = divmod(index, len(_LAYER))
        shape, dim = _LAYER[place]
        tensors.append(Cut(0, offset, 2 * prod(shape), shape, dim, layer))
        offset += 2 * prod(shape)
    return Model(tensors, layer + 1)


def _plan_once(model: Model, packed: Sequence[bytes]) -> dict[str, float]:
    """Returns the seconds of each step, and the most memory beyond what was there before."""
    context = multiprocessing.get_context("fork")
    helpers = []
    for number in range(_NUM_HELPERS):  # before the store, whose threads would not survive it
        ours, theirs = context.Pipe()
        ranks = range(1 + number, len(packed), _NUM_HELPERS)
        process = context.Process(target=_leave_answers, args=(theirs, packed, ranks))
        process.start()
        helpers.append((process, ours))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, pipe in helpers:
        pipe.send(store.port)
    for process, _ in helpers:
        process.join()
        assert process.exitcode == 0
    world = world_of(store, 0, len(packed))
    before = forget_peak()
    times = [time.perf_counter()]
    with GatheringStep(world, _TELLING, place="") as telling:
        telling.answer(packed[0])
    times.append(time.perf_counter())
    plan = _plan(model, telling.answers, times)
    with Step(world, _PLANNING, place="") as planning:
        planning.answer(plan.digest())
    times.append(time.perf_counter())
    steps = zip(("hear", "unpack", "sharing", "plan", "routes", "agree"), pairwise(times), strict=True)
    seconds = {name: end - begin for name, (begin, end) in steps}
    return {**seconds, "peak_MiB": (peak_bytes() - before) / MIB}


@uncollected  # as in a load
def _plan(model: Model, heard: Sequence[bytes], times: list[float]) -> RoutedPlan:
    requests = RankRequests.unpack(heard)
    times.append(time.perf_counter())
    sharing = SharingGroups(model.tensors, requests, 0)
    times.append(time.perf_counter())
    ranks = tuple(range(len(heard)))
    plan = plan_routes(sharing, ranks, order=ranks, staging_bytes=256 * MIB, chunk_bytes=None)
    times.append(time.perf_counter())
    RoutedView(plan, 0)
    times.append(time.perf_counter())
    return plan


def _leave_answers(pipe: Connection, packed: Sequence[bytes], ranks: Sequence[int]) -> None:
    """Leaves what other ranks say in each of the steps that rank 0 takes."""
    store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    for rank in ranks:
        world_of(store, rank, len(packed)).show_bytes(_TELLING, "gathered/0", packed[rank])
        digest = xxhash.xxh3_128_hexdigest(packed[rank])
        for step, value in enumerate(({"value": digest, "call": ""}, {"value": 0}, {"value": "0" * 32})):
            answer = {"node": Each([f"host{rank // 8}/"]), "error": None, "place": "", **value}
            StoreStep(store, str(step), len(packed)).respond(write_response(rank, answer))


def world_of(store: dist.Store, rank: int, size: int, group: dist.ProcessGroup | None = None) -> World:
    """Returns the world of a rank, whether or not there are others."""
    member = Member(rank, size, 0, "its host is gone")
    return World(StoreRendezvous(store, GroupState(), member, call="", timeout_s=300.0), group=group)
