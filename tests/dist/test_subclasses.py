"""DTensors whose shards are tensor subclasses: saved and loaded as shards of their inner tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import fastload
from fastload.errors import OptionError
from fastload.ext import subclasses
from tests.dist.harness import ranks, run_ranks
from tests.unit.test_subclasses import CONTEXT, How, Pair, Rounding, Scaled, assert_equal, make

ROWS = make(1).shape[0]


def allow() -> None:
    for kind in (Rounding, How, Pair, Scaled):
        subclasses.allow(kind)


def shard(whole: Scaled, dim: int = 0) -> Any:
    """A DTensor whose shards have their part of the inner tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, size = dist.get_rank(), dist.get_world_size()
    elements = whole.elements.chunk(size, dim)[rank].clone()
    scale = whole.scale.chunk(size)[rank].clone() if dim == 0 else whole.scale
    local = Scaled(elements, scale, whole.context)
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def local(sharded: Any) -> Any:
    return sharded._local_tensor


class Momentum(torch.optim.Optimizer):
    """With a subclass of the size of each parameter as its state, once it has made a step."""

    def __init__(self, parameters: Any, state: Any = None) -> None:
        super().__init__(parameters, {"lr": 1.0})
        for group in self.param_groups:
            for parameter in group["params"] if state is not None else ():
                self.state[parameter] = {"average": state}


def saves(rank: int, world: int, path: Path) -> None:
    allow()
    state = {"average": shard(make(1)), "optimizer": Momentum([weight()], shard(make(2)))}
    fastload.save(state, path)
    with pytest.raises(OptionError, match=r"state\['w'\] is a DTensor .*Scaled: its inner tensor scale"):
        fastload.save({"w": shard(make(1), dim=1)}, path.parent / "b")
    assert fastload.verify(path).num_blocks == 4


def weight() -> nn.Parameter:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.zeros(ROWS, 4), mesh, [Shard(0)]))


def loads(rank: int, world: int, path: Path) -> None:
    allow()
    found = fastload.load(path)
    assert_equal(found["average"], make(1))
    average = shard(make(3))
    into = local(average)
    for state in (None, shard(make(3))):
        optimizer = Momentum([weight()], state)
        fastload.load(path, into={"average": average, "optimizer": optimizer})
        assert local(average) is into
        assert_equal(into, local(shard(make(1))))
        [loaded] = optimizer.state.values()
        assert type(loaded["average"]) is DTensor
        assert loaded["average"].shape == (ROWS, 4)
        assert loaded["average"].dtype == torch.float32
        assert_equal(local(loaded["average"]), local(shard(make(2))))


def test_they_are_resharded(tmp_path: Path) -> None:
    run_ranks(saves, 2, path=tmp_path / "a")
    run_ranks(loads, 2, path=tmp_path / "a")
    run_ranks(loads, 3, path=tmp_path / "a")
    for name in ("average", "optimizer.state.0.average"):
        whole = fastload.load(tmp_path / "a", names=f"{name}.*")
        assert whole[f"{name}.elements"].shape == (ROWS, 4)
        assert whole[f"{name}.scale"].shape == (ROWS, 1)


@ranks(2)
def test_ranks_with_different_classes_are_an_error(rank: int, world: int, tmp_path: Path) -> None:
    """As those of torchao, which quantise large shards only."""
    allow()
    plain = weight().detach()  # by all ranks
    one = shard(make(1)) if rank else plain
    with pytest.raises(fastload.PlanMismatch, match=r"state\['w'\]: rank 0 a tensor, rank 1 a coded"):
        fastload.save({"w": one}, tmp_path / "a")
    other = shard(make(1, context=CONTEXT if rank else []))
    with pytest.raises(fastload.PlanMismatch, match=r"state\['w'\]"):
        fastload.save({"w": other}, tmp_path / "a")


@ranks(2)
def test_tensors_that_are_still_being_gathered(rank: int, world: int, tmp_path: Path) -> None:
    """Until it is used, `redistribute(async_op=True)` has a subclass of its own as the local tensor."""
    mesh = init_device_mesh("cpu", (world,))

    def gathered(whole: torch.Tensor) -> DTensor:
        return distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)

    fastload.save({"a": gathered(torch.arange(8.0))}, tmp_path / "a")
    state = {"a": gathered(torch.zeros(8))}
    fastload.load(tmp_path / "a", into=state)
    assert state["a"].to_local().tolist() == fastload.load(tmp_path / "a")["a"].tolist() == [*range(8)]
