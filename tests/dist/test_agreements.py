"""How many agreements each call takes: one more is a round trip of all ranks more, in every call."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import fastload
from fastload import CheckpointManager, LoadOptions, SaveOptions, StageOptions
from fastload.comm.rendezvous import Decision
from fastload.comm.world import World
from tests.dist.harness import ranks

RANKS_IMPORT = ("fastload.ext.memory.tier", "fastload.training.manager", "torch.distributed.tensor")
AGREEMENTS = {
    "save": 4,
    "save again": 4,
    "save, told": 5,
    "async_save": 4,
    "async_save, overlapped": 4,
    "save of shards": 4,
    "async_save of shards": 4,
    "async_save, compared": 5,
    "save of tensors that differ": 3,
    "save of DTensors that differ": 5,
    "save of parts": 9,
    "save of a delta": 9,
    "save of a delta of shards": 9,
    "save_stream": 10,
    "load": 3,
    "load again": 3,
    "load into shards": 7,
    "load of a delta": 4,
    "load by each rank alone": 3,
    "load of a part": 3,
    "open": 1,
    "tensors": 2,
    "close": 0,
    "prefetch": 2,
    "load of what was prefetched": 6,
    "verify": 3,
    "seal": 7,
    "redistribute": 12,
    "world.agree": 1,
    "manager": 1,
    "manager: save": 5,
    "manager: latest": 2,
    "manager: restore": 5,
    "manager: close": 0,
    "manager with memory": 3,
    "manager with memory: save": 9,
    "manager with memory: restore": 11,
    "manager with memory: close": 7,
}
OF_ONE_HOST = {
    "save": 4,
    "load": 3,
    "stage": 8,
    "stage again": 8,
}
SAVING, LOADING = SaveOptions(timeout_s=20, writers="all"), LoadOptions(timeout_s=20)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.arange(6000.0).view(-1, 6) + step, "bias": torch.ones(5), "step": step}


def shards_of(step: int, *, replicated: bool = False) -> dict[str, Any]:
    state, mesh = state_of(step), init_device_mesh("cpu", (2,))
    placement: Placement = Replicate() if replicated else Shard(0)
    return {**state, "weight": distribute_tensor(state["weight"], mesh, [placement], src_data_rank=None)}


def calls_of(rank: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Returns the calls, each of which finds what those before it have left."""
    plain, shards = folder / "plain", folder / "shards"
    (spool := folder / f"spool-{rank}").mkdir()
    (memory := folder / "memory" / socket.gethostname()).mkdir(parents=True)
    part = {f"weight-{rank}": torch.ones(100), "step": 1}
    differing, differing_shards = state_of(rank), shards_of(rank, replicated=True)
    differing["step"] = differing_shards["step"] = 1
    managers: list[CheckpointManager] = []
    checkpoints: list[fastload.Checkpoint] = []

    def save(state: Any, path: Path, **changes: Any) -> None:
        fastload.save(state, path, options=replace(SAVING, **changes))

    def save_in_vain(state: Any) -> None:
        with pytest.raises(fastload.ReplicaMismatch):
            save(state, folder / "refused")

    def save_aside(state: Any, path: Path, **changes: Any) -> None:
        fastload.async_save(state, path, options=replace(SAVING, **changes)).wait()

    def manage(every_steps: int, **arguments: Any) -> None:
        managers[:] = [
            CheckpointManager(folder / "run", every_steps=every_steps, options=SAVING, **arguments)
        ]

    def keep(step: int) -> None:
        assert managers[0].should_save(step)
        managers[0].save(step, state_of(step))
        managers[0].wait()

    return {
        "save": lambda: save(state_of(1), plain),
        "save again": lambda: save(state_of(2), folder / "again"),
        "save, told": lambda: save(state_of(2), folder / "told", on_report=str),
        "async_save": lambda: save_aside(state_of(1), folder / "aside"),
        "async_save, overlapped": lambda: save_aside(state_of(1), folder / "overlap", snapshot="overlap"),
        "save of shards": lambda: save(shards_of(1), shards),
        "async_save of shards": lambda: save_aside(shards_of(1), folder / "shards-aside"),
        "async_save, compared": lambda: save_aside(shards_of(1), folder / "compared", check_replicas="full"),
        "save of tensors that differ": lambda: save_in_vain(differing),
        "save of DTensors that differ": lambda: save_in_vain(differing_shards),
        "save of parts": lambda: save(part, folder / "parts", parts=True),
        "save of a delta": lambda: save(state_of(2), folder / "delta", base=plain),
        "save of a delta of shards": lambda: save(shards_of(2), folder / "delta-shards", base=shards),
        "save_stream": lambda: fastload.save_stream(
            [(f"weight-{rank}", torch.ones(100))], folder / "stream", spool=spool, options=SAVING
        ),
        "load": lambda: fastload.load(plain, options=LOADING),
        "load again": lambda: fastload.load(plain, options=LOADING),
        "load into shards": lambda: fastload.load(plain, into=shards_of(0), options=LOADING),
        "load of a delta": lambda: fastload.load(folder / "delta", options=LOADING),
        "load by each rank alone": lambda: fastload.load(plain, options=replace(LOADING, strategy="direct")),
        "load of a part": lambda: fastload.load(plain, names="bias", options=LOADING),
        "open": lambda: checkpoints.append(fastload.open(plain, options=LOADING)),
        "tensors": lambda: list(checkpoints[0].tensors()),
        "close": lambda: checkpoints.pop().close(),
        "prefetch": lambda: checkpoints.append(fastload.prefetch(plain, options=LOADING)),
        "load of what was prefetched": lambda: checkpoints.pop().load(),
        "verify": lambda: fastload.verify(plain, options=LOADING),
        "seal": lambda: fastload.seal(folder / "others", options=LOADING),
        "redistribute": lambda: fastload.redistribute(shards_of(1), state_of(0), options=LOADING),
        "world.agree": lambda: fastload.world.agree("counting", lambda: rank),
        "manager": lambda: manage(1),
        "manager: save": lambda: keep(1),
        "manager: latest": lambda: managers[0].latest(),
        "manager: restore": lambda: managers[0].restore(),
        "manager: close": lambda: managers[0].close(),
        "manager with memory": lambda: manage(1000, memory=memory, memory_every_steps=1),
        "manager with memory: save": lambda: keep(2),
        "manager with memory: restore": lambda: managers[0].restore(),
        "manager with memory: close": lambda: managers[0].close(),
    }


def count(calls: dict[str, Callable[[], object]]) -> tuple[dict[str, int], str]:
    """Makes calls; returns how many agreements each of them took, and their names."""
    taken: list[str] = []
    gather = World.gather

    def noted(self: World, what: str, *given: Any, place: str, **more: Any) -> Decision:
        if not place.startswith(
            "fastload.transfer.links:"
        ):  # on a busy machine connections may be made again
            taken.append(what)
        return gather(self, what, *given, place=place, **more)

    counted: dict[str, int] = {}
    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "gather", noted)
        for name, call in calls.items():
            taken.clear()
            call()
            counted[name] = len(taken)
            steps += [f"{name}: {what}" for what in taken]
    return counted, "\n".join(steps)


@ranks(2, ranks_per_host=1)
def test_no_call_takes_an_agreement_more(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir(exist_ok=True)
    if rank == 0:
        save_file({"weight": torch.ones(1000)}, tmp_path / "others" / "model.safetensors")
    torch.distributed.barrier()
    counted, steps = count(calls_of(rank, tmp_path))
    assert counted == AGREEMENTS, steps


@ranks(2)
def test_calls_of_one_host_take_no_agreement_more(rank: int, world: int, tmp_path: Path) -> None:
    path, staging = tmp_path / "plain", StageOptions(timeout_s=20)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: fastload.save(state_of(1), path, options=SAVING),
        "load": lambda: fastload.load(path, options=LOADING),
        "stage": lambda: fastload.stage(path, tmp_path / "staged", options=staging),
        "stage again": lambda: fastload.stage(path, tmp_path / "staged", options=staging),
    }
    counted, steps = count(calls)
    assert counted == OF_ONE_HOST, steps
