"""Sharded tensors as destinations: what each rank wants of a checkpoint, and where it is to go."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import fastload
from fastload.errors import MismatchError, OptionError
from fastload.formats.dtypes import torch_spec
from fastload.geometry.box import Box, row_major
from fastload.loading.match import LoadRequest, Match
from fastload.loading.targets import Destination
from tests.dist.harness import ranks

CPU = torch.device("cpu")


def matched(path: Path, into: Any, **arguments: Any) -> Match:
    """Matches as a load does, and loads nothing."""
    with fastload.open(path) as checkpoint:
        manifest = checkpoint.manifest
    group = tuple(range(dist.get_world_size()))
    return LoadRequest(into, **arguments).match(manifest, members=group)


def fill(found: Match, saved: Mapping[str, Tensor]) -> Any:
    """Does what a load does with a match, from tensors that are at hand; returns its result."""
    for destination in found.destinations:
        whole = saved[destination.entry.name]
        box = box_of(destination) or Box.whole(whole.shape)
        assert destination.tensor.shape == box.sizes
        destination.tensor.copy_(cut(whole, box))
    return found.finish()


def box_of(destination: Destination) -> Box | None:
    """What of its tensor it wants; None if that is all."""
    if destination.runs is None:
        return None
    at, offsets = destination.runs.start // destination.stored.itemsize, []
    for stride in row_major(torch_spec(destination.entry)[1]):
        offsets.append(at // stride)
        at %= stride
    return Box(tuple(offsets), tuple(destination.tensor.shape))


def cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def distributed(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Each rank has the whole and takes its part of it."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def emptied(tensor: Tensor) -> Tensor:
    """The same tensor, its values overwritten."""
    with torch.no_grad():
        return tensor.zero_()


def assert_same_shards(tensor: Tensor, like: Tensor) -> None:
    assert isinstance(tensor, DTensor)
    assert isinstance(like, DTensor)
    assert (tensor.shape, tensor.placements, tensor.device_mesh) == (
        like.shape,
        like.placements,
        like.device_mesh,
    )
    assert torch.equal(tensor.to_local(), like.to_local())


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    return init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))


def layouts() -> dict[str, tuple[tuple[int, ...], DeviceMesh, list[Any]]]:
    """Shapes on meshes, by a name for each."""
    line, square = meshes()
    deep = init_device_mesh("cpu", (1, 2, 2, 1))
    return {
        "even": ((8, 3), line, [Shard(0)]),
        "uneven": ((10, 3), line, [Shard(0)]),
        "empty": ((5, 2), line, [Shard(0)]),  # the last rank has nothing
        "nothing": ((0, 2), line, [Shard(0)]),
        "columns": ((3, 7), line, [Shard(1)]),
        "everywhere": ((3, 2), line, [Replicate()]),
        "scalar": ((), line, [Replicate()]),
        "hybrid": ((6, 2), square, [Replicate(), Shard(0)]),
        "both": ((5, 5), square, [Shard(0), Shard(1)]),
        "twice": ((9, 2), square, [Shard(0), Shard(0)]),
        "interleaved": ((13, 2), square, [_StridedShard(0, split_factor=2), Shard(0)]),
        "strided": ((11, 3), line, [_StridedShard(0, split_factor=2)]),
        "strided both": (
            (8, 9),
            square,
            [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)],
        ),
        "deep": ((4, 3, 5), deep, [Shard(2), Shard(0), Shard(2), Replicate()]),
    }


@ranks(4)
def test_each_rank_wants_what_distribute_tensor_gives_it(rank: int, world: int, tmp_path: Path) -> None:
    saved = {name: numbered(*shape) for name, (shape, _, _) in layouts().items()}
    fastload.save({**saved, "plain": numbered(3)}, tmp_path / "c")
    whole = {
        name: distributed(saved[name], mesh, placements) for name, (_, mesh, placements) in layouts().items()
    }
    into: dict[str, Tensor] = {name: emptied(tensor.clone()) for name, tensor in whole.items()}
    into["plain"] = torch.zeros(3)
    found = matched(tmp_path / "c", into)

    wanted: dict[str, int] = {}
    for destination in found.destinations:
        assert destination.tensor.numel()
        wanted[destination.entry.name] = wanted.get(destination.entry.name, 0) + destination.tensor.numel()
    held = {name: tensor.to_local().numel() for name, tensor in whole.items()}
    assert wanted == {"plain": 3, **{name: size for name, size in held.items() if size}}
    assert [box_of(d) for d in found.destinations if d.entry.name in ("plain", "everywhere", "scalar")] == [
        None
    ] * 3
    boxes = [(d.entry.name, box_of(d)) for d in found.destinations]
    assert len(boxes) == len(set(boxes))
    with fastload.open(tmp_path / "c") as checkpoint:
        places = {entry.name: place for place, entry in enumerate(checkpoint.manifest.tensors)}
    order = [(places[name], box or Box((), ())) for name, box in boxes]
    assert order == sorted(order)

    result = fill(found, {**saved, "plain": numbered(3)})
    for name, tensor in whole.items():
        assert_same_shards(into[name], tensor)
        assert result[name] is into[name]
    assert torch.equal(into["plain"], numbered(3))


@ranks(4)
def test_complex_numbers_casts_and_strides(rank: int, world: int, tmp_path: Path) -> None:
    line, square = meshes()
    numbers = torch.complex(numbered(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64))
    dist.broadcast(torch.view_as_real(numbers), 0)
    saved = {"z": numbers, "half": numbered(7, 3), "turned": numbered(7, 6)}
    fastload.save(saved, tmp_path / "c")
    turned = distributed(numbered(6, 7), square, [Shard(1), Replicate()]).t()
    into = {
        "z": emptied(distributed(numbers, line, [_StridedShard(0, split_factor=2)])),
        "half": distributed(torch.zeros(7, 3, dtype=torch.bfloat16), square, [Shard(0), Shard(1)]),
        "turned": emptied(turned),
    }
    assert not turned.to_local().is_contiguous() or turned.to_local().shape[1] == 1
    stored = {"z": torch.view_as_real(numbers), "half": saved["half"], "turned": saved["turned"]}
    with pytest.raises(MismatchError, match=r"half: dtype torch.float32 in the checkpoint, torch.bfloat16"):
        matched(tmp_path / "c", into)
    for name in ("z", "turned"):
        fill(matched(tmp_path / "c", {name: into[name]}, names=name), stored)
    fill(matched(tmp_path / "c", {"half": into["half"]}, names="half", dtype=torch.bfloat16), stored)
    assert_same_shards(into["z"], distributed(numbers, line, [_StridedShard(0, split_factor=2)]))
    assert_same_shards(into["half"], distributed(saved["half"].bfloat16(), square, [Shard(0), Shard(1)]))
    assert torch.equal(into["turned"].full_tensor(), saved["turned"])


@ranks(2)
def test_what_is_wanted_twice_is_read_once(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight, bias = numbered(6, 2), numbered(4)
    fastload.save(
        {"a": {"weight": weight, "bias": bias}, "b": {"weight": weight, "bias": bias}}, tmp_path / "c"
    )
    rows = distributed(torch.zeros(6, 2), mesh, [Shard(0)])
    into = {
        "a": {"weight": rows, "bias": distributed(torch.zeros(4), mesh, [Replicate()])},
        "b": {"weight": emptied(rows.clone()), "bias": torch.zeros(4)},
    }
    found = matched(tmp_path / "c", into)
    assert [d.entry.name for d in found.destinations] == ["a.weight", "a.bias"]
    fill(found, {"a.weight": weight, "a.bias": bias})
    for part in into.values():
        assert_same_shards(part["weight"], distributed(weight, mesh, [Shard(0)]))
    assert torch.equal(into["a"]["bias"].to_local(), bias)
    assert torch.equal(into["b"]["bias"], bias)

    columns = distributed(torch.zeros(6, 2), mesh, [Shard(1)])
    into["b"]["weight"] = columns
    boxes = [box_of(d) for d in matched(tmp_path / "c", into).destinations if d.entry.name == "a.weight"]
    assert boxes == sorted([Box((3 * rank, 0), (3, 2)), Box((0, rank), (6, 1))])


@ranks(2)
def test_tied_shards_are_one_destination(rank: int, world: int, tmp_path: Path) -> None:
    """By another name they may be missing in the checkpoint, on ranks that hold none of them, too."""
    mesh = init_device_mesh("cpu", (2,))
    fastload.save({"a": numbered(1, 3)}, tmp_path / "c")
    tensor = distributed(torch.zeros(1, 3), mesh, [Shard(0)])
    tied = DTensor.from_local(tensor.to_local(), mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())
    found = matched(tmp_path / "c", {"a": tensor, "b": tied})
    assert len(found.destinations) == (1 if rank == 0 else 0)


def fully_sharded(mesh: DeviceMesh, *, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


@ranks(2)
def test_a_module_has_its_shards_filled_after_a_forward(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    saved = {name: torch.rand_like(t.float()).to(t.dtype) for name, t in plain_state().items()}
    fastload.save(saved, tmp_path / "c")
    model = fully_sharded(mesh)
    model(torch.rand(4, 5))
    assert not all(isinstance(one, DTensor) for one in model.parameters())
    found = matched(tmp_path / "c", model)
    for destination in found.destinations:
        assert (box_of(destination) is None) == (
            "running" in destination.entry.name or destination.entry.shape == ()
        )
    fill(found, saved)
    assert_state(model, saved)


@ranks(2)
def test_a_part_of_a_module_has_its_shards_filled_after_a_forward(
    rank: int, world: int, tmp_path: Path
) -> None:
    """It is sharded as a part of the whole, and knows nothing of that itself."""
    fastload.save({"head.running_mean": torch.ones(3), "head.weight": numbered(3)}, tmp_path / "c")
    model = fully_sharded(init_device_mesh("cpu", (2,)))
    model(torch.rand(4, 5))
    found = matched(tmp_path / "c", {"head": model[3]}, names=["head.running_mean", "head.weight"])
    assert [box_of(d) for d in found.destinations if d.entry.name == "head.weight"] == [
        Box((2 * rank,), (2 - rank,))
    ]
    fill(found, {"head.running_mean": torch.ones(3), "head.weight": numbered(3)})
    assert torch.equal(model.state_dict()["3.weight"].full_tensor(), numbered(3))


@pytest.mark.slow(but=["9-"])
@ranks(6)
@pytest.mark.parametrize("rows", [7, 9, 25])
def test_shards_of_uneven_shards(rank: int, world: int, tmp_path: Path, rows: int) -> None:
    """FSDP2 cuts what TP has cut; the placements say something else, and torch copes with it."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    saved = numbered(rows, 2)
    fastload.save({"0.weight": saved}, tmp_path / "c")

    def made(weight: Tensor) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, rows, bias=False))
        model[0].weight = nn.Parameter(weight)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    model, expected = made(torch.zeros(rows, 2)), made(saved)
    fill(matched(tmp_path / "c", model), {"0.weight": saved})
    assert_same_shards(model[0].weight, expected[0].weight)


@pytest.mark.slow(but=["2-ranks"])
@ranks(2, 5)
def test_a_module_on_the_meta_device_gets_real_shards(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    saved = {name: torch.rand_like(t.float()).to(t.dtype) for name, t in plain_state().items()}
    fastload.save(saved, tmp_path / "c")
    model = fully_sharded(mesh, device="meta")
    model[0].bias.requires_grad_(False)
    model[2].weight.note = "kept"  # type: ignore[assignment]
    fill(matched(tmp_path / "c", model), saved)
    assert all(isinstance(one, nn.Parameter) and isinstance(one, DTensor) for one in model.parameters())
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["0.bias"]
    assert model[2].weight.note == "kept"
    assert_state(model, saved)
    plain = plain_model()
    plain.load_state_dict(saved)
    torch.manual_seed(1)
    batch = torch.rand(4, 5)
    output, expected = model(batch), plain(batch)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(model[2].bias.grad.full_tensor(), plain[2].bias.grad)


@ranks(2)
def test_fsdp2_hears_of_parameters_that_were_replaced_and_of_no_others(
    rank: int, world: int, tmp_path: Path
) -> None:
    plain, batch = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.rand(4, 5)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)))
        for number in range(3):
            saved = {name: torch.rand_like(t) for name, t in plain.state_dict().items()}
            fastload.save(saved, tmp_path / f"{device}{number}")
            found = matched(tmp_path / f"{device}{number}", model)
            assert found.calls == (device == "meta" and number == 0)
            fill(found, saved)
            plain.load_state_dict(saved)
            torch.testing.assert_close(model(batch), plain(batch))  # whose whole parameters stay after that


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3))


def plain_state() -> dict[str, Tensor]:
    return plain_model().state_dict()


def assert_state(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    assert isinstance(model, FSDPModule)
    state = model.state_dict()
    assert state.keys() == saved.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, saved[name]), name


def trained(model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    """Returns an optimizer that has made steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    for _ in range(steps):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1 + number)
        optimizer.step()
    return optimizer


def gathered(state: Any) -> Any:
    """The same nested state with plain lists for tensors."""
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    if isinstance(state, DTensor):
        return state.full_tensor().tolist()
    return state.tolist() if isinstance(state, Tensor) else state


@ranks(2)
def test_an_optimizer_gets_the_state_of_its_shards(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = plain_model()
    plain_optimizer = trained(plain, 3)
    fastload.save({"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}, tmp_path / "c")
    saved = fastload.load(tmp_path / "c", names="*")
    for steps in (0, 1):
        model = fully_sharded(mesh)
        optimizer = trained(model, steps)
        found = matched(tmp_path / "c", {"model": model, "optimizer": optimizer})
        read = {d.entry.name: d.tensor.numel() for d in found.destinations if "exp_avg" in d.entry.name}
        held = [parameter.to_local().numel() for parameter in model.parameters()]
        assert sum(read.values()) == 2 * sum(held)
        fill(found, saved)
        for parameter in model.parameters():
            assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements
            assert not isinstance(optimizer.state[parameter]["step"], DTensor)
        assert gathered(optimizer.state_dict()) == gathered(plain_optimizer.state_dict())
    plain_optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        one.grad = distributed(other.grad, mesh, one.placements)
    optimizer.step()
    assert gathered(model.state_dict()) == gathered(plain.state_dict())


@pytest.mark.slow(but=["False"])
@ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_state_dicts_of_an_optimizer_are_filled(rank: int, world: int, tmp_path: Path, flat: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    plain = plain_model()
    whole = {"optimizer": get_optimizer_state_dict(plain, trained(plain, 2), options=options)}
    fastload.save(whole, tmp_path / "c")
    model = fully_sharded(mesh)
    into = {"optimizer": get_optimizer_state_dict(model, trained(model), options=options)}
    fill(matched(tmp_path / "c", into), fastload.load(tmp_path / "c", names="*"))
    assert gathered(into) == gathered(whole)


@ranks(2)
def test_a_complex_parameter_has_complex_state(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.complex(numbered(3, 2, dtype=torch.float64), -numbered(3, 2, dtype=torch.float64))
    state = {0: {"momentum_buffer": numbers}}
    own = nn.Parameter(distributed(torch.zeros(3, 2, dtype=torch.complex128), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([own], lr=0.1, momentum=0.5)
    fastload.save({"sgd": {**optimizer.state_dict(), "state": state}}, tmp_path / "c")
    fill(
        matched(tmp_path / "c", {"sgd": optimizer}),
        {"sgd.state.0.momentum_buffer": torch.view_as_real(numbers)},
    )
    assert_same_shards(optimizer.state[own]["momentum_buffer"], distributed(numbers, mesh, [Shard(0)]))


@ranks(4)
def test_what_cannot_be_filled_is_said(rank: int, world: int, tmp_path: Path) -> None:
    line = init_device_mesh("cpu", (4,))
    half = DeviceMesh("cpu", [0, 1])
    fastload.save({"a": numbered(8, 2)}, tmp_path / "c")

    def refuses(tensor: Tensor, why: str, **arguments: Any) -> None:
        with pytest.raises(MismatchError, match=why) as error:
            matched(tmp_path / "c", {"a": tensor}, **arguments)
        assert error.value.mismatched

    def made(local: Tensor, placement: Any) -> DTensor:
        return DTensor.from_local(local, line, [placement], shape=torch.Size((8, 2)), stride=(2, 1))

    refuses(made(torch.zeros(8, 2), Partial()), "a: into= has a DTensor with placement P.*redistribute it")
    refuses(
        made(torch.zeros(3, 2), Shard(0)),
        r"a: .*local tensor of shape \[3, 2\].* do not match it for the shape \[8, 2\]",
    )
    refuses(
        made(torch.zeros(1, 2).expand(2, 2), Shard(0)), "a: into= has a tensor whose elements share memory"
    )
    packed: Any = TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2))
    why = r"a: into= has a DTensor whose local tensor is a TwoTensor: only plain local tensors"
    refuses(DTensor.from_local(packed, line, [Shard(0)], run_check=False), why)
    with pytest.raises(
        OptionError, match=r"\['a'\] is a DTensor whose local .*TwoTensor: it is not on the list"
    ):
        fastload.save({"a": DTensor.from_local(packed, line, [Shard(0)], run_check=False)}, tmp_path / "d")
    refuses(distributed(torch.zeros(8, 3), line, [Shard(0)]), r"a: shape \[8, 2\] .*, \[8, 3\] in into=")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as these are deprecated
        old = sharded_tensor.empty(ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)]), 8, 2)
        refuses(old, "a: into= has a ShardedTensor, as FSDP1 makes them: use fully_shard")
    whole = distributed(torch.zeros(8, 2), line, [Shard(0)])
    with (
        fastload.open(tmp_path / "c") as checkpoint,
        pytest.raises(MismatchError, match="on a mesh with ranks 2, 3,"),
    ):
        LoadRequest({"a": whole}).match(checkpoint.manifest, members=(0, 1))
    on_half = DTensor.from_local(torch.zeros(4, 2), half, [Shard(0)], shape=torch.Size((8, 2)), stride=(2, 1))
    assert len(matched(tmp_path / "c", {"a": on_half}).destinations) == (1 if rank < 2 else 0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.inner = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers: Tensor) -> Any:
        return self.head(self.inner(self.embedding(numbers)))


@pytest.mark.slow(but=["False"])
@ranks(4)
@pytest.mark.parametrize("is_named", [False, True])
def test_tied_and_tensor_parallel_parameters_on_the_meta_device(
    rank: int, world: int, tmp_path: Path, is_named: bool
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Tied()
    saved = dict(plain.state_dict())
    if is_named:
        del saved["head.weight"]
        write_tensors(tmp_path, saved)
    else:
        fastload.save(plain.state_dict(), tmp_path / "c")
    with torch.device("meta"):
        model = Tied()
    parallelize_module(model.inner, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model.inner, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    found = matched(tmp_path / "c", model)
    wanted = {d.entry.name: d.tensor.numel() for d in found.destinations}
    assert wanted == {
        "embedding.weight": (20, 16)[rank // 2],
        "inner.0.weight": (8, 4)[rank // 2],
        "inner.1.weight": 6,
        "inner.1.bias": 2,
    }
    fill(found, saved)
    assert model.head.weight is model.embedding.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), plain.state_dict()[name]), name
    numbers = torch.arange(9)
    with torch.no_grad():
        torch.testing.assert_close(model(numbers), plain(numbers))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, as other programs write it."""
    (path / "c").mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(tensors, path / "c" / "model.safetensors")
    dist.barrier()


@ranks(2)
def test_each_rank_may_bring_names_of_its_own(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save({"a": numbered(2), "b": numbered(3), "c": numbered(4), "epoch": 7}, tmp_path / "c")
    found = matched(tmp_path / "c", {"a": torch.zeros(2)} if rank == 0 else {})
    assert found.surplus.names == (("b", "c", "epoch") if rank == 0 else ("a", "b", "c", "epoch"))
    found.surplus.raise_unwanted("", ())
    with pytest.raises(MismatchError, match="unexpected in the checkpoint: b\n") as error:
        found.surplus.raise_unwanted("", ["b", "epoch"])
    assert error.value.unexpected == ("b", "epoch")
    assert not matched(tmp_path / "c", {}, strict=False).surplus.names
    with pytest.raises(MismatchError, match="missing in the checkpoint: d"):
        matched(tmp_path / "c", {"d": torch.zeros(2)})
