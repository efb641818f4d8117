"""Programs that end after a load: with and without `destroy_process_group`, none may hang."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

import fastload
from gpu_check_parts.failures import ENDING_S
from gpu_check_parts.ranks import Rank, Ranks, problems_of
from gpu_check_parts.stages import Job
from gpu_check_parts.streams import small_options, small_state

_WAYS = {"destroy_process_group, then the end": True, "the end without it": False}


def run(job: Job) -> None:
    path = job.folder / "tensors.safetensors"
    fastload.save(small_state(), path)
    began = {
        name: Ranks(job.kind, _load_and_end, 2, path, destroys, as_programs=True)
        for name, destroys in _WAYS.items()
    }
    for name, ranks in began.items():
        ends = ranks.wait(job.left_s - ENDING_S)
        problem = problems_of(ends)
        job.results.check(name, not problem, problem)
        if not problem:
            slowest_s = max(end.at_s - end.value for end in ends)
            job.results.value("End of a program after its last load", name, s=slowest_s)


def _load_and_end(rank: Rank, path: Path, destroys: bool) -> float:
    dist.all_reduce(torch.ones(1, device=rank.device.device))
    fastload.load(path, device=rank.device.device, options=small_options())
    if destroys:
        dist.destroy_process_group()
    return time.time()
