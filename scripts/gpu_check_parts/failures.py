"""After failures that fastload survives: the caller's process lives on, and the device is free.

torch's watchdogs tell all ranks of a failed communicator through the store. Then the monitor of any process
group, the caller's too, ends its process after a while: `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`, shortened here.
NCCL's abort waits for the device, and so for the kernels of other communicators that nobody will answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastload
from gpu_check_parts.devices import BACKENDS
from gpu_check_parts.nccl import abort_all, communicator
from gpu_check_parts.ranks import Ended, Rank, Ranks, fastload_threads, problems_of
from gpu_check_parts.results import Results
from gpu_check_parts.stages import Job
from gpu_check_parts.streams import small_options, small_state

ENDING_S = 3.0  # of a stage, for ranks that hang to write their stacks
FREE_S = 10.0  # in which a device has to be free, and threads to end
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
_ABORTS = {"a thread each": True, "one after the other": False}  # which NCCL may not survive: it is last


def run(job: Job) -> None:
    path = job.folder / "tensors.safetensors"
    fastload.save(small_state(), path)
    heart = {HEARTBEAT: str(job.sizes.heartbeat_s)}

    def survive(**environment: str) -> Ranks:
        return Ranks(
            job.kind, _survive, 2, path, job.sizes.alive_s,
            environment={**heart, **environment}, ranks_per_host=1,
        )  # fmt: skip

    # They mostly wait, so all of them run at once.
    began = {
        "an error in a loop over tensors()": survive(),
        "the same, TORCH_DISTRIBUTED_DEBUG=DETAIL": survive(**_DETAIL),
        "the same, TORCH_NCCL_DESYNC_DEBUG=1": survive(TORCH_NCCL_DESYNC_DEBUG="1"),
    }
    handling = f"TORCH_{BACKENDS[job.kind].upper()}_ASYNC_ERROR_HANDLING"
    control = Ranks(job.kind, _control, 2, job.sizes.alive_s, environment={**heart, handling: "0"})
    stuck = {name: Ranks(job.kind, _abort_stuck, 2, job.results, name) for name in _ABORTS}
    for name, ranks in began.items():
        note_survivors(job.results, name, ranks.wait(job.left_s - ENDING_S), survivors=(0, 1))
    problem = problems_of(control.wait(job.left_s - ENDING_S))
    job.results.fact("for comparison, torch's own group that one rank aborts", problem or "all live on")
    for name, ranks in stuck.items():
        problem = problems_of(ranks.wait(job.left_s - ENDING_S))
        title = f"two communicators with stuck kernels are aborted, {name}"
        if _ABORTS[name] or not problem:
            job.results.check(title, not problem, problem)
        else:
            job.results.fact(title, problem)  # as NCCL is expected to be


def fail_and_live(
    rank: Rank, path: Path, act: Callable[[int], None], group: Any, alive_s: float, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Fails in a loop over tensors; looks at the rank, loads again, and lives on.

    Args:
        rank: The rank.
        path: A checkpoint.
        act: Called in the loop with the number of the tensor; it fails on one rank.
        group: Of the ranks that are left.
        alive_s: Seconds to live on.
        timeout_s: Of the load that fails.

    Returns:
        The error and when it came, when the device was free (None: not in time), threads that stay, and
        whether the next load and the group work.
    """
    began, failure = time.perf_counter(), None
    try:
        with fastload.open(path, options=small_options(timeout_s)) as opened:
            for number, _ in enumerate(opened.tensors(device=rank.device.device)):
                act(number)
    except (ArithmeticError, fastload.FastloadError) as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    assert failure is not None, "the load did not fail"
    found: dict[str, Any] = {"error": failure, "failed s": time.perf_counter() - began}
    found["device free s"] = rank.device.seconds_until_free(FREE_S)
    found["threads"] = fastload_threads(FREE_S)
    loaded = fastload.load(path, device=rank.device.device, process_group=group, options=small_options())
    found["loads again"] = all(
        torch.equal(loaded[name].cpu(), tensor) for name, tensor in small_state().items()
    )
    del loaded
    time.sleep(alive_s)
    ones = torch.ones(1, device=rank.device.device)
    dist.all_reduce(ones, group=group)
    found["group works"] = int(ones.item()) == dist.get_world_size(group)
    return found


def note_survivors(results: Results, name: str, ends: Sequence[Ended], *, survivors: Sequence[int]) -> None:
    """Notes what `fail_and_live` found on the ranks that are left."""
    others = [rank for rank in range(len(ends)) if rank not in survivors]
    problem = problems_of(ends, but=others)
    results.check(f"{name}: the processes live on", not problem, problem)
    found = [ends[rank].value for rank in survivors if ends[rank].value is not None]
    if not found:
        return
    results.fact(f"{name}: error", found[0]["error"])
    for key in ("failed s", "device free s"):
        values = [each[key] for each in found if each[key] is not None]
        if values:
            results.value("After failures", name, **{f"{key}, slowest rank": max(values)})
    busy = [each for each in found if each["device free s"] is None]
    results.check(f"{name}: the device is free", not busy, f"not within {FREE_S:.0f} s" if busy else "")
    threads = sorted({thread for each in found for thread in each["threads"]})
    results.check(f"{name}: no thread is left", not threads, ", ".join(threads))
    results.check(f"{name}: the next load works", all(each["loads again"] for each in found))
    results.check(f"{name}: the caller's group works", all(each["group works"] for each in found))


def _survive(rank: Rank, path: Path, alive_s: float) -> dict[str, Any]:
    dist.all_reduce(torch.ones(1, device=rank.device.device))  # the caller's communicator, with its monitor

    def act(number: int) -> None:
        if rank.rank == 1 and number == 1:
            raise ArithmeticError("an error of the caller's")

    return fail_and_live(rank, path, act, dist.group.WORLD, alive_s)


def _control(rank: Rank, alive_s: float) -> None:
    """What a failure leads to in a group of torch's own, whose watchdog is to handle no error."""
    ones = torch.ones(1, device=rank.device.device)
    group = dist.new_group()
    for each in (dist.group.WORLD, group):
        dist.all_reduce(ones, group=each)
    rank.device.synchronize()
    if rank.rank == 0:
        dist.all_reduce(ones, group=group, async_op=True)
    else:
        time.sleep(0.5)
        group._get_backend(rank.device.device).abort()
    time.sleep(alive_s)


def _abort_stuck(rank: Rank, results: Results, name: str) -> None:
    """Rank 0 begins a collective on each of two communicators, and rank 1 none; then rank 0 aborts both."""
    made = [communicator(rank, each) for each in ("one", "other")]
    device = rank.device
    done = rank.store_of("aborts")
    if rank.rank == 1:
        for group in made:
            _gather(device.device, group).wait()
        device.synchronize()
        done.set("ready", "")
        done.wait(["done"])
        assert abort_all(made, FREE_S), "the aborts of the other rank do not end"
        return
    for group in made:
        _gather(device.device, group).wait()  # connects
    device.synchronize()
    done.wait(["ready"])
    works = [_gather(device.device, group) for group in made]
    time.sleep(0.5)  # the kernels begin
    began = time.perf_counter()
    try:
        if _ABORTS[name]:
            assert abort_all(made, FREE_S), f"the aborts do not end within {FREE_S:.0f} s"
        else:
            thread = threading.Thread(target=_abort_in_turn, args=(made,), daemon=True)
            thread.start()
            thread.join(FREE_S)
            assert not thread.is_alive(), f"the aborts do not end within {FREE_S:.0f} s"
        aborted_s = time.perf_counter() - began
        free_s = device.seconds_until_free(FREE_S)
        assert free_s is not None, f"the device is not free within {FREE_S:.0f} s"
        results.value("Aborts of two communicators", name, **{"aborted s": aborted_s, "free s": free_s})
    finally:
        done.set("done", "")
        del works


def _gather(device: torch.device, group: Any) -> Any:
    return group._allgather_base(torch.empty(1 << 17, device=device), torch.ones(1 << 16, device=device))


def _abort_in_turn(made: Sequence[Any]) -> None:
    for group in made:
        group.abort()
