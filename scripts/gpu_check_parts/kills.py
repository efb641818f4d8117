"""Ranks that are killed in the middle of a load: the others hear of it, load again, and live on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastload
from gpu_check_parts.failures import ENDING_S, HEARTBEAT, fail_and_live, note_survivors
from gpu_check_parts.ranks import Rank, Ranks
from gpu_check_parts.stages import Job
from gpu_check_parts.streams import small_options, small_state

_TIMEOUT_S = 5.0  # of the load, after which the others are sure that a rank is gone
_DETAIL = "TORCH_DISTRIBUTED_DEBUG"
_CASES = {
    "one of 2 ranks on 2 hosts is killed": (2, 1, {}),
    f"one of 4 ranks on 2 × 2 hosts is killed, {_DETAIL}=DETAIL": (4, 2, {_DETAIL: "DETAIL"}),
}


def run(job: Job) -> None:
    """Without MPS, which a killed client can break; at once, since the ranks mostly wait."""
    path = job.folder / "tensors.safetensors"
    fastload.save(small_state(), path)
    heart = {HEARTBEAT: str(job.sizes.heartbeat_s)}
    began = {}
    for name, (world, ranks_per_host, environment) in _CASES.items():
        began[name] = Ranks(
            job.kind, _die_or_live, world, path, job.sizes.alive_s,
            environment={**heart, **environment}, ranks_per_host=ranks_per_host, num_leaving=world - 1,
        )  # fmt: skip
    for name, ranks in began.items():
        ends = ranks.wait(job.left_s - ENDING_S)
        note_survivors(job.results, name, ends, survivors=range(len(ends) - 1))


def _die_or_live(rank: Rank, path: Path, alive_s: float) -> dict[str, Any]:
    rest = dist.new_group(list(range(rank.world - 1)))
    dist.all_reduce(torch.ones(1, device=rank.device.device))
    fastload.load(path, device=rank.device.device, options=small_options())  # makes fastload's communicators

    def act(number: int) -> None:
        if rank.rank == rank.world - 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return fail_and_live(rank, path, act, rest, alive_s, _TIMEOUT_S)
