"""Loads of models and optimizers that are sharded over the ranks, or of which each rank has its own part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastload
from fastload.errors import MismatchError, PeerError
from tests.dist.harness import ranks

_WIDTH = 21  # uneven on every mesh below


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        return batch + self.down(torch.relu(self.up(batch)))


class Model(nn.Module):
    """Tied ends, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, _WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(_WIDTH, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, numbers: Tensor) -> Tensor:
        batch = self.embedding(numbers)
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch) * self.scale.sum()


def sharded(model: Model, mesh: DeviceMesh) -> Model:
    """Shards in place: over the one dimension of a mesh, or over ``dp`` what is parallel over ``tp``."""
    data = mesh if mesh.ndim == 1 else mesh["dp"]
    for block in model.blocks:
        if mesh.ndim > 1:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data)


def reference() -> Model:
    torch.manual_seed(7)
    model = Model()
    with torch.no_grad():
        model.scale.copy_(torch.rand(3))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.arange(8) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(state: Any) -> Any:
    """The same nested state, its tensors plain."""
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{where}.{index}")
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def options(reports: list[fastload.LoadReport] | None = None) -> fastload.LoadOptions:
    return fastload.LoadOptions(
        strategy="allgather", timeout_s=20, on_report=None if reports is None else reports.append
    )


def read(report: fastload.LoadReport) -> int:
    return sum(one.bytes_read for one in report.ranks)


@pytest.mark.slow(but=["fsdp-4"])
@ranks(4)
@pytest.mark.parametrize("names", ["fsdp", "fsdp and tp"])
def test_a_model_on_the_meta_device(rank: int, world: int, tmp_path: Path, names: str) -> None:
    mesh = (
        init_device_mesh("cpu", (4,))
        if names == "fsdp"
        else init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    )
    plain = reference()
    fastload.save(plain.state_dict(), tmp_path / "c")
    with torch.device("meta"):
        model = Model()
    model = sharded(model, mesh)
    reports: list[fastload.LoadReport] = []
    fastload.load(tmp_path / "c", into=model, options=options(reports))
    stored = sum(tensor.nbytes for name, tensor in plain.state_dict().items() if name != "head.weight")
    assert reports[0].bytes_wanted == stored
    assert read(reports[0]) == stored
    assert model.head.weight is model.embedding.weight
    assert_equal(whole(model.state_dict()), dict(plain.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.arange(9)), plain(torch.arange(9)))
        plain.blocks[1].up.weight.mul_(2)  # and once more, now that there has been a forward
        fastload.save(plain.state_dict(), tmp_path / "d")
        fastload.load(tmp_path / "d", into=model, options=options())
        torch.testing.assert_close(model(torch.arange(9)), plain(torch.arange(9)))


@ranks(2)
def test_training_goes_on_where_it_was(rank: int, world: int, tmp_path: Path) -> None:
    """A model and its optimizer: saved whole, loaded into shards."""
    mesh = init_device_mesh("cpu", (world,))
    plain = reference()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, plain_optimizer, 3)
    state = {"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict(), "step": 3}
    fastload.save(state, tmp_path / "c")
    for steps in (0, 1):
        model = sharded(Model(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        train(model, optimizer, steps)
        into = {"model": model, "optimizer": optimizer, "step": 0}
        reports: list[fastload.LoadReport] = []
        fastload.load(tmp_path / "c", into=into, options=options(reports))
        assert read(reports[0]) == reports[0].bytes_wanted
        assert into["step"] == 3
        assert_equal(whole(model.state_dict()), dict(plain.state_dict()))
        assert_equal(whole(optimizer.state_dict()), plain_optimizer.state_dict())
        for parameter in model.parameters():
            assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements
        held = sum(parameter.to_local().nbytes for parameter in model.parameters())
        small = reports[0].bytes_wanted - 3 * sum(one.nbytes for one in plain.parameters())
        assert reports[0].ranks[rank].bytes_received <= 3 * held + small
    train(plain, plain_optimizer, 1)
    train(model, optimizer, 1)
    for name, tensor in whole(model.state_dict()).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name])


@pytest.mark.slow(but=["False"])
@ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_state_dicts_of_torch(rank: int, world: int, tmp_path: Path, flat: bool) -> None:
    """What get_optimizer_state_dict returns, with plain tensors among the sharded ones."""
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    plain = reference()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    train(plain, plain_optimizer, 2)
    state = {
        "model": plain.state_dict(),
        "optim": get_optimizer_state_dict(plain, plain_optimizer, options=how),
    }
    fastload.save(state, tmp_path / "c")
    model = sharded(Model(), init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    into = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=how)}
    fastload.load(tmp_path / "c", into=into, options=options())
    assert_equal(whole(into), {"model": dict(state["model"]), "optim": whole(state["optim"])})


@pytest.mark.slow(but=["Adagrad", "SGD"])
@ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_optimizers_go_on_with_their_state(rank: int, world: int, tmp_path: Path, kind: Any) -> None:
    settings = {"lr": 0.01} | ({"momentum": 0.5} if kind is torch.optim.SGD else {})
    plain = reference()
    plain_optimizer = kind(plain.parameters(), **settings)
    train(plain, plain_optimizer, 2)
    fastload.save({"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}, tmp_path / "c")
    model = sharded(Model(), init_device_mesh("cpu", (world,)))
    optimizer = kind(model.parameters(), **settings)
    fastload.load(tmp_path / "c", into={"model": model, "optimizer": optimizer}, options=options())
    train(plain, plain_optimizer, 2)
    train(model, optimizer, 2)
    for name, tensor in whole(model.state_dict()).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name])


@pytest.mark.slow(but=["cpu"])
@ranks(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_with_activation_checkpointing(rank: int, world: int, tmp_path: Path, device: str) -> None:
    """Its hooks rename what was saved, and FSDP2's put the shards back."""
    mesh = init_device_mesh("cpu", (world,))
    plain = reference()
    fastload.save(plain.state_dict(), tmp_path / "c")
    with torch.device(device):
        model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    if device == "cpu":
        with torch.no_grad():
            model(torch.arange(4))
    reports: list[fastload.LoadReport] = []
    fastload.load(tmp_path / "c", into=model, options=options(reports))
    assert reports[0].ranks[rank].bytes_received < 0.7 * reports[0].bytes_wanted
    assert_equal(whole(model.state_dict()), dict(plain.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.arange(9)), plain(torch.arange(9)))


def stage_of(rank: int) -> dict[str, Tensor]:
    """What a stage of a pipeline has; the last rank has none."""
    return {f"layers.{layer}.weight": torch.zeros(40, 10) for layer in (2 * rank, 2 * rank + 1) if layer < 4}


@ranks(3)
def test_stages_of_a_pipeline(rank: int, world: int, tmp_path: Path) -> None:
    saved = {f"layers.{layer}.weight": torch.rand(40, 10) + layer for layer in range(4)}
    if rank == 0:
        safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    dist.barrier()
    expected = safetensors.torch.load_file(tmp_path / "model.safetensors")
    into, reports = stage_of(rank), list[fastload.LoadReport]()
    fastload.load(tmp_path, into=into, options=options(reports))
    assert_equal(into, {name: expected[name] for name in into})
    assert read(reports[0]) == 4 * 1600

    # What no rank wants is an error; what is missing is one of the rank that misses it.
    into = {name: tensor for name, tensor in stage_of(rank).items() if name != "layers.2.weight"}
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: layers.2.weight\n") as error:
        fastload.load(tmp_path, into=into, options=options())
    assert error.value.unexpected == ("layers.2.weight",)
    fastload.load(tmp_path, into=into, options=options(), strict=False)
    assert_equal(into, {name: expected[name] for name in into})
    into = {**stage_of(rank), **({"layers.9.weight": torch.zeros(2)} if rank == 1 else {})}
    with pytest.raises(PeerError, match=r"(?s)rank 1 on .*missing in the checkpoint: layers.9.weight"):
        fastload.load(tmp_path, into=into, options=options())


@ranks(4)
def test_a_mesh_of_some_ranks(rank: int, world: int, tmp_path: Path) -> None:
    """The others take part, and get what is theirs; one that does not take part is named."""
    fastload.save({"a": torch.arange(10.0), "b": torch.arange(3)}, tmp_path / "c")
    half = DeviceMesh("cpu", [1, 3])
    tensor = distribute_tensor(torch.zeros(10), half, [Shard(0)])
    into = {"a": tensor, "b": torch.zeros(3, dtype=torch.int64)}
    fastload.load(tmp_path / "c", into=into, options=options())
    assert torch.equal(into["b"], torch.arange(3))
    if rank in (1, 3):
        assert torch.equal(tensor.to_local(), torch.arange(10.0)[5 * (rank // 2) :][:5])
    group = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(
            MismatchError, match="a: into= has a DTensor on a mesh with ranks 3, which take no part"
        ):
            fastload.load(tmp_path / "c", into=into, process_group=group, options=options())
