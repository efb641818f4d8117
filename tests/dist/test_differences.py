"""Ranks that do not hold alike what they save together are told so by default, in what, and what to do."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import PerRank, PlanMismatch, ReplicaMismatch, SaveOptions
from fastload.comm.world import World
from fastload.saving import agree as agree_module
from fastload.saving import save as save_module
from tests.dist.harness import ranks

OPTIONS = SaveOptions(timeout_s=20, writers="all", block_bytes=4096)
HINT = "What each rank has of its own goes into a fastload.PerRank."


def in_background(*given: Any, **more: Any) -> None:
    fastload.async_save(*given, **more).wait(20)


@ranks(3)
def test_what_differs_is_named(rank: int, world: int, tmp_path: Path) -> None:
    alike = {"model": {"w": torch.ones(3, 3)}, "losses": [0.1, 0.2, 0.3, 0.4], "step": 4}
    rng = torch.full((5056,), max(1, rank), dtype=torch.uint8)
    cases: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
        ({"position": torch.tensor(rank)}, ReplicaMismatch,
         ["  state['position']: rank 0 I64 [] 0, rank 1 I64 [] 1, rank 2 I64 [] 2"]),
        ({"losses": [0.1, 0.2, 0.3, rank / 2]}, PlanMismatch,
         ["  state['losses'][3]: rank 0 0.0, rank 1 0.5, rank 2 1.0"]),
        ({"name": "b" if rank == 1 else "a", "rng": rng}, PlanMismatch,
         ["  state['name']: rank 0 'a', rank 1 'b'",
          "  state['rng']: rank 0 U8 [5056] with digest 6ab4a78ef4ad4b3d, rank 2 U8 [5056] with digest"]),
    ]  # fmt: skip
    for more, kind, lines in cases:
        for save in (fastload.save, in_background):
            with pytest.raises(kind) as raised:
                save({**alike, **more}, tmp_path / "never", options=OPTIONS)
            told = str(raised.value).split("\n")
            what = "tensors" if kind is ReplicaMismatch else "states"
            assert told[0] == f"the ranks hold different {what}, so nothing was saved:"
            shown = [line.split(" with digest ")[0] for line in told[1:-1]]
            assert shown == [line.split(" with digest ")[0] for line in lines]
            assert told[-1].startswith(HINT)
    with pytest.raises(PlanMismatch, match=r"state\['python'\]\[1\]\[1\]: rank 0 \d+, rank 1 \d+") as raised:
        fastload.save({"python": random.Random(rank).getstate()}, tmp_path / "never", options=OPTIONS)
    assert len(str(raised.value).split("\n")) == 6
    assert "\n  and at least 620 more\n" in str(raised.value)
    dist.barrier()
    assert os.listdir(tmp_path) == []
    fastload.save(
        {**alike, "python": PerRank(random.Random(rank).getstate())}, tmp_path / "a", options=OPTIONS
    )


@ranks(2)
def test_it_can_be_left(rank: int, world: int, tmp_path: Path) -> None:
    state = {"running_mean": torch.full((4,), float(rank))}
    with pytest.raises(
        ReplicaMismatch, match=r"(?s)state\['running_mean'\].* dist\.broadcast.* With check_replicas='off'"
    ):
        fastload.save(state, tmp_path / "a", options=OPTIONS)
    fastload.save(state, tmp_path / "a", options=replace(OPTIONS, check_replicas="off"))
    assert fastload.load(tmp_path / "a")["running_mean"].unique().numel() == 1


@ranks(2)
def test_it_costs_no_step_more(rank: int, world: int, tmp_path: Path) -> None:
    """Neither in the foreground nor in the background; and asynchronous saves still meet nobody first."""
    steps: list[str] = []
    gather = World.gather

    def count(self: World, what: str, *given: Any, **more: Any) -> Any:
        steps.append(what)
        return gather(self, what, *given, **more)

    World.gather = count  # type: ignore[method-assign]
    counts: dict[str, list[int]] = {}
    model = {"w": torch.ones(30, 30), "large": torch.ones(300, 300)}
    state = {"model": model, "step": 3, "own": PerRank(rank)}
    for how in ("off", "small"):
        steps.clear()
        options = replace(OPTIONS, check_replicas=how)
        fastload.save(state, tmp_path / how, options=options)
        counts[how] = [len(steps)]
        steps.clear()
        slow = fastload.async_save(state, tmp_path / f"{how}2", options=options)
        slow.wait(20)
        counts[how].append(len(steps))
    assert counts["off"] == counts["small"]
    order: list[str] = []
    for name in ("agree", "Snapshot"):
        real = getattr(save_module, name)

        def note(*given: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            made = real(*given, **more)
            order.append(name)
            return made

        setattr(save_module, name, note)
    fastload.async_save(state, tmp_path / "last", options=OPTIONS).wait(20)
    assert order == ["Snapshot", "agree"], "the copy was there before the ranks met"


@ranks(2)
def test_where_tensors_are_on_a_device_on_some_ranks_only(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 1:
        agree_module.small_tensors = lambda *given: {}  # type: ignore[assignment]  # as if on a device
    fastload.save({"a": torch.ones(3)}, tmp_path / "a", options=OPTIONS)
    assert fastload.load(tmp_path / "a")["a"].tolist() == [1, 1, 1]
