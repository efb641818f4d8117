"""Two ranks on one device: the backend alone, with communicators made as fastload makes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastload.transfer import communicators, device_transport
from gpu_check_parts import mps
from gpu_check_parts.ranks import Rank, problems_of, run_ranks
from gpu_check_parts.results import Results
from gpu_check_parts.stages import Job

MPS_WORKS = "MPS works"
_COUNT = 1 << 16  # elements of a message
_NUM_SMALL = 20


def run(job: Job) -> None:
    """Tries with MPS first; without, processes that share the device take turns."""
    if job.kind == "cuda" and mps.is_there():
        problem = _try(job, "with MPS", job.left_s / 2)
        job.results.fact(MPS_WORKS, not problem)
        if not problem:
            job.results.check("with MPS", True)
            return
        job.results.skip("with MPS", problem)
    problem = _try(job, "without MPS", job.left_s)
    job.results.check("without MPS", not problem, problem)


def _try(job: Job, way: str, limit_s: float) -> str:
    """Returns what goes wrong; empty if nothing does."""
    try:
        with mps.service(way == "with MPS"):
            return problems_of(run_ranks(job.kind, _body, 2, job.results, way, limit_s=limit_s))
    except RuntimeError as error:
        return str(error)


def communicator(rank: Rank, name: str) -> Any:
    """Returns a communicator as fastload makes its own; on the CPU, where it makes none, one of Gloo's."""
    store = rank.store_of(name)
    if rank.device.kind == "cpu":
        return dist.ProcessGroupGloo(store, rank.rank, rank.world, timedelta(seconds=60))
    return communicators._make_backend(rank.device.backend, store, rank.rank, rank.world, rank.device.device)


def abort_all(communicators: list[Any], limit_s: float) -> bool:
    """Aborts communicators at once, a thread each; returns whether all aborts ended within the limit."""
    threads = [threading.Thread(target=one.abort, daemon=True) for one in communicators]
    limit = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _body(rank: Rank, results: Results, way: str) -> None:
    device, title = rank.device, f"Two ranks, {way}"

    def step(name: str, call: Callable[[], Any], expected: Any = None) -> Any:
        began = time.perf_counter()
        found = call()
        device.synchronize()
        if rank.rank == 0:
            results.value(title, name, ms=1000 * (time.perf_counter() - began))
        if expected is not None:
            assert found.cpu().unique().tolist() == expected, f"{name}: {found}"
        return found

    ours = torch.full((_COUNT,), float(rank.rank), device=device.device)

    def reduce() -> torch.Tensor:
        ones = torch.ones(_COUNT, device=device.device)
        dist.all_reduce(ones)
        return ones

    step("the caller's all_reduce, first", reduce, [2.0])
    made = [
        step(f"communicator {name} is made", partial(communicator, rank, name)) for name in ("one", "other")
    ]
    step("both gather at once", lambda: _gather(rank, made, ours), [0.0, 1.0])
    step("coalesced broadcasts", lambda: _broadcast(rank, made[0]), [0.0, 1.0])
    step("send and receive", lambda: _send(rank, made[0], ours), [0.0])
    for _ in range(_NUM_SMALL):
        step("a small all_reduce of the caller's", reduce, [2.0])
    assert step("abort of both", lambda: abort_all(made, 10.0)), "the aborts do not end"
    step("the caller's all_reduce, after the aborts", reduce, [2.0])


def _gather(rank: Rank, made: list[Any], ours: torch.Tensor) -> torch.Tensor:
    into = [torch.empty(2 * _COUNT, device=rank.device.device) for _ in made]
    works = [group._allgather_base(each, ours) for group, each in zip(made, into, strict=True)]
    for work in works:
        work.wait()
    return torch.cat(into)


def _broadcast(rank: Rank, group: Any) -> torch.Tensor:
    into = torch.full((2, _COUNT), float(rank.rank), device=rank.device.device)
    calls = [partial(communicators.broadcast, group, row, root) for root, row in enumerate(into)]
    if rank.device.kind == "cpu":  # where no stream waits for a work
        for call in calls:
            call().wait()
    else:
        device_transport._coalesced(group, calls)
    return into


def _send(rank: Rank, group: Any, ours: torch.Tensor) -> torch.Tensor:
    if rank.rank == 0:
        group.send([ours], 1, 0).wait()
        return ours
    into = torch.full((_COUNT,), -1.0, device=rank.device.device)
    group.recv([into], 0, 0).wait()
    return into
