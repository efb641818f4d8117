"""Meshes whose ranks do not ascend: what `full_tensor` says is saved and loaded, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fastload
from fastload.errors import MismatchError, OptionError, PeerError
from tests.dist.harness import ranks
from tests.soak import shard_cases

OPTIONS = fastload.SaveOptions(timeout_s=20, overwrite=True)
PLACEMENTS: dict[str, list[Any]] = {
    "twice": [Shard(0), Shard(0)],
    "rows of columns": [Shard(1), Shard(0)],
    "hsdp": [Replicate(), Shard(0)],
    "outer": [Shard(0), Replicate()],
    "strided": [_StridedShard(0, split_factor=2), Shard(0)],
    "replicated": [Replicate(), Replicate()],
}
CUT_TWICE = ("twice", "rows of columns", "strided")
ORDERS = {  # of four ranks in a square, and whether they are in one order along each line
    (3, 2, 1, 0): True,
    (1, 0, 3, 2): True,
    (2, 0, 3, 1): True,
    (0, 1, 3, 2): False,
}


def filled(local: Tensor, like: DTensor) -> DTensor:
    given = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, **given)


def refused(text: str, call: Callable[[], Any]) -> None:
    with pytest.raises((OptionError, MismatchError, PeerError), match=text):
        call()


@ranks(4)
def test_a_square_of_ranks_in_any_order(rank: int, world: int, tmp_path: Path) -> None:
    whole = torch.arange(48.0).reshape(8, 6)
    fastload.save(dict.fromkeys(CUT_TWICE, whole), tmp_path / "plain", options=OPTIONS)
    for order, is_one in ORDERS.items():
        mesh = DeviceMesh("cpu", torch.tensor(order).reshape(2, 2))
        state = {name: distribute_tensor(whole, mesh, each) for name, each in PLACEMENTS.items()}
        bad = {} if is_one else {name: state.pop(name) for name in CUT_TWICE}
        state = {name: filled(one.to_local() * 2 + 1, one) for name, one in state.items()}
        wanted = {name: one.full_tensor() for name, one in state.items()}
        path = tmp_path / "".join(map(str, order))
        fastload.save(state, path, options=OPTIONS)
        found = fastload.load(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in found), order
        into = {name: filled(torch.zeros_like(one.to_local()), one) for name, one in state.items()}
        fastload.load(path, into=into)
        assert all(torch.equal(into[name].full_tensor(), wanted[name]) for name in into), order
        if bad:
            before = {name: one.to_local().clone() for name, one in bad.items()}
            text = r"twice: .* has a DTensor on a mesh of ranks .* sorted ranks"
            refused(text, lambda bad=bad: fastload.save(bad, tmp_path / "bad", options=OPTIONS))  # type: ignore[misc]
            refused(text, lambda bad=bad: fastload.load(tmp_path / "plain", into=bad))  # type: ignore[misc]
            assert all(torch.equal(one.to_local(), before[name]) for name, one in bad.items())
            assert not (tmp_path / "bad").exists()


def trained(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 13), nn.Tanh(), nn.Linear(13, 5))  # which four ranks share unevenly
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    return [one.full_tensor().detach() for one in (*model.parameters(), *moments)]


@pytest.mark.slow  # the states of the others here are as FSDP2 shards them
@ranks(4)
def test_fsdp2_on_any_line_of_ranks(rank: int, world: int, tmp_path: Path) -> None:
    lines = [
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", [3, 1, 0, 2]),
        DeviceMesh("cpu", [[3, 2], [0, 1]], mesh_dim_names=("replicate", "shard")),  # whose rows differ
        DeviceMesh("cpu", [1, 0, 3, 2]),
    ]
    for number, mesh in enumerate(lines):
        model, optimizer = trained(mesh, number)
        wanted = full(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        fastload.save(state, tmp_path / "c", options=OPTIONS)
        plain = fastload.load(tmp_path / "c")["model"]
        assert all(torch.equal(one, two) for one, two in zip(plain.values(), wanted, strict=False))
        other, its_optimizer = trained(lines[number - 1], 10 + number)
        fastload.load(tmp_path / "c", into={"model": other, "optimizer": its_optimizer})
        found = full(other, its_optimizer)
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True)), number


@ranks(4)
def test_what_is_cut_unevenly_where_full_tensor_fails(rank: int, world: int, tmp_path: Path) -> None:
    """`distribute_tensor` loses rows there; what is cut twice is gathered in sizes that it does not have."""
    fastload.save({"w": torch.ones(7, 2)}, tmp_path / "plain", options=OPTIONS)
    line, square = DeviceMesh("cpu", [3, 2, 1, 0]), DeviceMesh("cpu", [[3, 2], [1, 0]])
    lost = distribute_tensor(torch.ones(7, 2), line, [Shard(0)])
    held = torch.ones(2 if rank < 3 else 1, 2)  # FSDP2 of rows: 4 and 3, then 2, 2, 2 and 1
    given = {"run_check": False, "shape": lost.shape, "stride": lost.stride()}
    twice = DTensor.from_local(held, square, [Shard(0), Shard(0)], **given)
    for dtensor, text in (
        (lost, r"w: .* local tensor of shape \[., 2\]"),
        (twice, "w: .* cut a dimension more"),
    ):
        before = dtensor.to_local().clone()
        refused(text, lambda one=dtensor: fastload.save({"w": one}, tmp_path / "bad", options=OPTIONS))  # type: ignore[misc]
        refused(text, lambda one=dtensor: fastload.load(tmp_path / "plain", into={"w": one}))  # type: ignore[misc]
        assert torch.equal(dtensor.to_local(), before)
        assert not (tmp_path / "bad").exists()


@pytest.mark.slow
@ranks(4)
def test_random_states_on_random_meshes(rank: int, world: int, tmp_path: Path) -> None:
    """A short run of the soak; the long one is `python -m tests.soak.state --sharded`."""
    assert sum(shard_cases.run_some(rank, world, 3, 0, 6, tmp_path).values()) > 6


@ranks(4)
def test_groups_that_are_not_those_of_the_mesh(rank: int, world: int, tmp_path: Path) -> None:
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    groups = [rows.get_group("b"), rows.get_group("a")]  # exchanged
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    sound = distribute_tensor(torch.ones(4, 2), rows, [Shard(0), Replicate()])  # on a mesh that is equal
    fastload.save({"w": sound}, tmp_path / "sound", options=OPTIONS)
    given = {"run_check": False, "shape": torch.Size((4, 2)), "stride": (2, 1)}
    dtensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Replicate()], **given)
    fastload.save({"w": torch.ones(4, 2)}, tmp_path / "plain", options=OPTIONS)
    refused("w: .* process groups", lambda: fastload.save({"w": dtensor}, tmp_path / "bad", options=OPTIONS))
    refused("w: .* process groups", lambda: fastload.load(tmp_path / "plain", into={"w": dtensor}))
    dist.barrier()
