"""Tensors that move from the ranks that hold them to the ranks that want them."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastload
from fastload.errors import MismatchError, OptionError, PeerError, PlanMismatch
from fastload.loading import prepare
from tests.checkpoints import assert_same_bits
from tests.dist.harness import ranks

RANKS_IMPORT = ("torch.distributed.tensor", "fastload.ext.redistribute")
Layouts = dict[str, tuple[tuple[int, ...], list[Any]]]

_SHAPES = {"wide": (24, 10), "long": (60_001, 3), "odd": (7, 5, 3), "tiny": (1,), "empty": (0, 4)}


def options(**changes: Any) -> fastload.LoadOptions:
    return fastload.LoadOptions(**{"timeout_s": 20, "chunk_bytes": 30_000, **changes})


def values(add: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) + add
        for name, shape in _SHAPES.items()
    }


def spread(tensors: dict[str, torch.Tensor], mesh_ranks: Any, placements: list[Any]) -> Any:
    """The tensors on a mesh; None on the ranks outside of it."""
    mesh = DeviceMesh("cpu", mesh_ranks)
    if mesh.get_coordinate() is None:
        return None
    return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in tensors.items()}


def local(state: Any) -> dict[str, torch.Tensor]:
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in (state or {}).items()}


_LAYOUTS = {
    "rows of some, columns of others": (([0, 1], [Shard(0)]), ([2, 3], [Shard(1)])),
    "rows of all, replicas of some": (([0, 1, 2, 3], [Shard(0)]), ([1, 3], [Replicate()])),
    "replicas of some, rows of all": (([0, 2], [Replicate()]), ([0, 1, 2, 3], [Shard(0)])),
    "a grid, turned": (
        ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
        ([[0, 2], [1, 3]], [Shard(0), Shard(1)]),
    ),
    "a grid, into one rank": (([[0, 1], [2, 3]], [Shard(0), Shard(1)]), ([2], [Replicate()])),
}


@ranks(4, ranks_per_host=2)
def test_any_mesh_to_any_mesh(rank: int, world: int) -> None:
    del _SHAPES["tiny"], _SHAPES["empty"]  # torch has no second dimension to cut in one of them
    for name, (source, target) in _LAYOUTS.items():
        state, into = spread(values(), *source), spread(values(-1e6), *target)
        report = fastload.redistribute(state, into, options=options())
        assert_same_bits(local(into), local(spread(values(), *target)))
        nbytes = sum(tensor.nbytes for tensor in values().values())
        sent = [own.bytes_read for own in report.ranks]
        assert sum(sent) == report.bytes_wanted == nbytes, name
        if name == "replicas of some, rows of all":
            assert sent[1] == sent[3] == 0
            assert abs(sent[0] - sent[2]) <= 0.05 * nbytes, "they share the sending"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.first(inputs)


@ranks(3)
def test_modules_optimizers_and_values(rank: int, world: int) -> None:
    """Stages of a pipeline on two ranks, and a state of everything on the third, which has tied weights."""
    torch.manual_seed(0)
    trained = Net()
    optimizer = torch.optim.AdamW(trained.parameters())
    trained.second(trained.first(torch.ones(1, 8))[:, :6].repeat(1, 2)[:, :8]).sum().backward()
    optimizer.step()
    torch.manual_seed(rank)
    net = Net()
    own = torch.optim.AdamW(net.parameters())
    wanted: dict[str, Any] = {"net": net, "optimizer": own, "step": 0}
    parts = [{"net": trained}, {"optimizer": optimizer, "step": 7}, None]
    fastload.redistribute(parts[rank], wanted if rank == 2 else None, options=options())
    if rank == 2:
        assert_same_bits(net.state_dict(), trained.state_dict())
        assert net.second.weight is net.first.weight
        assert_same_bits(own.state_dict()["state"][0], optimizer.state_dict()["state"][0])
        assert wanted["step"] == 7


@ranks(2)
def test_casts_names_and_what_does_not_fit(rank: int, world: int) -> None:
    state = values() if rank == 0 else None
    into = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in values().items()}
    with pytest.raises(MismatchError, match="dtype"):
        fastload.redistribute(state, into, options=options())
    assert not any(tensor.any() for tensor in into.values())
    fastload.redistribute(state, into, dtype="bfloat16", options=options())
    assert_same_bits(into, {name: tensor.bfloat16() for name, tensor in values().items()})

    some = {"wide": torch.zeros(24, 10)}
    with pytest.raises(MismatchError, match="long"):
        fastload.redistribute(state, some, options=options())
    fastload.redistribute(state, some, names=["wide"], options=options())
    fastload.redistribute(state, some if rank else None, strict=False, options=options())
    assert torch.equal(some["wide"], values()["wide"])
    with pytest.raises(MismatchError, match="other"):
        fastload.redistribute(state, {"other": torch.zeros(2)}, options=options())

    with pytest.raises(OptionError, match="no rank has a tensor"):
        fastload.redistribute(None, into, options=options())
    with pytest.raises(PeerError, match="wide: into= has memory of the state"):
        fastload.redistribute(whole := values(), whole if rank else None, options=options())
    with pytest.raises(
        PlanMismatch, match=r"nothing has moved:\s+wide: rank 0 F32 \[3\], rank 1 F32 \[24, 10\]"
    ):
        fastload.redistribute(
            {"wide": torch.ones(24, 10) if rank else torch.ones(3)}, into, options=options()
        )
    with pytest.raises(PeerError, match="PerRank"):
        fastload.redistribute({"a": fastload.PerRank(1) if rank else 1}, into, options=options())
    fastload.redistribute(state, some if rank else None, strict=False, options=options())


class Plans:
    """Counts the plans that this rank makes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_made = 0
        real = prepare.plan_routes

        def plan(*arguments: Any, **given: Any) -> Any:
            self.num_made += 1
            return real(*arguments, **given)

        patch.setattr(prepare, "plan_routes", plan)


@ranks(4, ranks_per_host=2)
def test_the_second_call_does_not_plan_again(rank: int, world: int) -> None:
    """Unless anything differs on any rank; and what it keeps, it keeps no longer than the tensors."""
    gc.disable()
    del _SHAPES["tiny"], _SHAPES["empty"]
    rows, columns = ([0, 1], [Shard(0)]), ([2, 3], [Shard(1)])
    state, into = spread(values(), *rows), spread(values(-1e6), *columns)
    with pytest.MonkeyPatch.context() as patch:
        plans = Plans(patch)

        def move(add: float, num_made: int, **given: Any) -> None:
            for tensor, new in zip((state or {}).values(), values(add).values(), strict=False):
                tensor.copy_(distribute_tensor(new, tensor.device_mesh, tensor.placements))
            report = fastload.redistribute(state, into, options=options(**given))
            assert_same_bits(local(into), local(spread(values(add), *columns)))
            assert report.bytes_wanted == sum(own.bytes_read for own in report.ranks)
            assert plans.num_made == num_made

        move(0.0, 1)
        move(1.0, 1)
        if into is not None:  # new dicts of the same tensors
            into = dict(into)
        move(2.0, 1)
        move(3.0, 2, staging_bytes=1 << 20)
        move(4.0, 3)
        if rank == 3:
            into = spread_here(into)
        move(5.0, 4)
        move(6.0, 4)
        with pytest.raises(PeerError, match="rank 1"):
            fastload.redistribute(object() if rank == 1 else state, into, options=options())
        move(7.0, 5)

        shard = next(iter((state or into).values())).to_local()  # type: ignore[union-attr]
        memory = weakref.ref(shard.untyped_storage())
        del shard, state, into
        assert memory() is None
        state, into = spread(values(8.0), *rows), spread(values(-1e6), *columns)
        move(8.0, 6)


def spread_here(into: Any) -> Any:
    """The same DTensors in other memory, on this rank alone."""
    return {
        name: DTensor.from_local(tensor.to_local().clone(), tensor.device_mesh, tensor.placements,
                                 run_check=False, shape=tensor.shape, stride=tensor.stride())
        for name, tensor in into.items()
    }  # fmt: skip


@ranks(2)
def test_plans_of_modules_are_kept(rank: int, world: int) -> None:
    """Tied weights, casts, FSDP2 after a forward pass; and nothing is kept of what `load_state_dict` does."""
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    trained, served = Net(), Net()
    for net in (trained, served):
        fully_shard(net, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        plans = Plans(patch)
        for step in range(3):
            trained(torch.ones(1, 8))
            torch.nn.init.constant_(trained.first.bias, step)
            state, into = {"net": trained, "lr": 0.1}, {"net": served.bfloat16() if step else served}
            dtype = None if step == 0 else "bfloat16"
            fastload.redistribute(state, into, dtype=dtype, strict=False, options=options())
            expected = {name: tensor.full_tensor() for name, tensor in sharded(trained).items()}
            for name, tensor in sharded(served).items():
                assert torch.equal(tensor.full_tensor(), expected[name].to(tensor.dtype)), (step, name)
        assert plans.num_made == 2
        whole, step = Net(), {"step": 0}
        for number in (5, 5):
            fastload.redistribute(
                {"net": whole, "step": number}, {"net": Net(), **step, "step": 0}, options=options()
            )
        assert plans.num_made == 4


def sharded(net: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in net.state_dict().items() if isinstance(each, DTensor)}


@ranks(2)
def test_a_part_that_no_rank_has_is_named(rank: int, world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    wide = distribute_tensor(values()["wide"], mesh, [Shard(0)])
    state = {"wide": wide} if rank else None
    with pytest.raises(PlanMismatch, match=r"rows 0-11 of wide are on no rank"):
        fastload.redistribute(state, {"wide": torch.zeros(24, 10)}, options=options())


@ranks(4, dies={1: signal.SIGKILL}, ranks_per_host=2)
def test_a_rank_that_is_killed_is_named(rank: int, world: int) -> None:
    def progress(now: int, wanted: int) -> None:
        if rank == 1 and now:
            os.kill(os.getpid(), signal.SIGKILL)

    state = {"wide": torch.ones(64, 1 << 10)} if rank < 2 else None
    into = {"wide": torch.zeros(64, 1 << 10)}
    with pytest.raises(PeerError) as raised:
        fastload.redistribute(state, into, options=options(progress=progress, timeout_s=10))
    assert list(raised.value.failures) == [1]
    assert dist.is_initialized()
