"""A restored state has the strides that it was saved with, so that training goes on bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fastload
from fastload.cli import main
from fastload.errors import ManifestError
from tests.checkpoints import seal
from tests.dist.harness import ranks
from tests.dist.test_memory_tier import keep, manage


def _state() -> dict[str, Any]:
    """Tensors whose strides are not those of row-major ones, and some that only seem so."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 5, 4, generator=generator)
    return {
        "channels_last": images.to(memory_format=torch.channels_last),
        "one_pixel": images[:, :, :1, :1].contiguous().to(memory_format=torch.channels_last),
        "column_major": torch.randn(70, 90, generator=generator).t(),
        "parameter": nn.Parameter(torch.randn(8, 9, generator=generator).t()),
        "complex": torch.randn(4, 6, dtype=torch.complex128, generator=generator).t(),
        "array": np.asfortranarray(torch.randn(5, 7, generator=generator).numpy()),
        "permuted": torch.randn(4, 5, 6, generator=generator, dtype=torch.bfloat16).permute(2, 0, 1),
        "with_gaps": torch.randn(9, 12, generator=generator).t()[2:5],
        "expanded": torch.randn(1, 6, generator=generator).expand(4, 6),
        "plain": torch.randn(3, 4, generator=generator),
        "empty": torch.randn(1, 3, 0, 1).permute(3, 1, 2, 0),
    }


def _strides(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: value.strides if isinstance(value, np.ndarray) else value.stride()
        for name, value in state.items()
    }


def _expected() -> dict[str, tuple[int, ...]]:
    # Gaps are not kept, but the order of the dimensions is; expanded and empty tensors have none.
    return _strides(_state()) | {"with_gaps": (1, 3), "expanded": (6, 1), "empty": (3, 1, 1, 1)}


def _assert_restored(found: dict[str, Any]) -> None:
    assert _strides(found) == _expected()
    for name, wanted in _state().items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(wanted)), name


@ranks(2)
def test_new_tensors_have_the_strides_of_those_saved(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save(_state(), tmp_path / "a")
    fastload.async_save(_state(), tmp_path / "b").wait()
    for path in (tmp_path / "a", tmp_path / "b"):
        for strategy in ("direct", "allgather", "broadcast"):
            options = fastload.LoadOptions(strategy=strategy, chunk_bytes=1000)
            _assert_restored(fastload.load(path, options=options))
    named = fastload.load(tmp_path / "a", names=["channels_last", "complex"])
    assert _strides(named) == {name: _expected()[name] for name in ("channels_last", "complex")}
    wide = fastload.load(tmp_path / "a", dtype=torch.float64)
    assert wide["column_major"].stride() == _expected()["column_major"]
    into = {"channels_last": torch.zeros(6, 3, 5, 4), "column_major": torch.zeros(90, 70)}
    strides = _strides(into)
    fastload.load(tmp_path / "a", into=into, names=list(into))
    assert _strides(into) == strides  # memory of the caller's keeps its own
    assert torch.equal(into["channels_last"], _state()["channels_last"])

    # The files are plain: others read the same values.
    plain = load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(plain["channels_last"], _state()["channels_last"])
    assert plain["channels_last"].is_contiguous()


@ranks(2)
def test_strides_survive_in_every_kind_of_save(rank: int, world: int, tmp_path: Path) -> None:
    state = _state()
    rows = torch.arange(4.0 * (rank + 2)).reshape(4, rank + 2)
    own = {"state": state, "mine": fastload.PerRank({"rows": rows if rank else rows.t()})}
    fastload.save(own, tmp_path / "own")
    back = fastload.load(tmp_path / "own")
    _assert_restored(back["state"])
    assert back["mine"]["rows"].stride() == (rows if rank else rows.t()).stride()

    names = list(state)[rank::2]
    parts = fastload.SaveOptions(parts=True)
    fastload.save({name: state[name] for name in names}, tmp_path / "parts", options=parts)
    _assert_restored(fastload.load(tmp_path / "parts"))

    deltas = fastload.SaveOptions(base=tmp_path / "own")
    state["plain"][0, 0] += 1
    state["column_major"][3, 4] += 1
    fastload.save(own, tmp_path / "delta", options=deltas)
    back = fastload.load(tmp_path / "delta")
    assert _strides(back["state"]) == _expected()
    assert torch.equal(back["state"]["column_major"], state["column_major"])

    with manage(tmp_path, tmp_path / "memory") as manager:
        keep(manager, 1, state=lambda step: _state())
        _assert_restored(manager.restore())
        assert manager.restored_from == "memory"


@ranks(2)
def test_tensors_that_come_one_by_one_keep_their_strides(rank: int, world: int, tmp_path: Path) -> None:
    tensors = {name: value for name, value in _state().items() if isinstance(value, Tensor)}
    own = list(tensors)[rank::2]
    fastload.save_stream(((name, tensors[name]) for name in own), tmp_path / "a", spool=tmp_path)
    found = fastload.load(tmp_path / "a")
    assert _strides(found) == {name: _expected()[name] for name in tensors}
    for name, wanted in tensors.items():
        assert torch.equal(found[name], wanted), name


@ranks(2)
def test_equal_replicas_of_other_strides_are_replicas(rank: int, world: int, tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    column_major = value.t().contiguous().t()
    fastload.save({"x": column_major if rank == 0 else value}, tmp_path / "a")
    loaded = fastload.load(tmp_path / "a")["x"]
    assert torch.equal(loaded, value)
    assert loaded.stride() == column_major.stride()
    for first in (0, 1):  # those of the first rank that has it, also where states are merged
        state = {"x": column_major if rank == first else value, str(rank): value.t()}
        parts = fastload.SaveOptions(parts=True, overwrite=True)
        fastload.save(state, tmp_path / "parts", options=parts)
        expected = column_major if first == 0 else value
        assert fastload.load(tmp_path / "parts")["x"].stride() == expected.stride()


def test_strides_of_a_file_of_torch_save_come_back(tmp_path: Path) -> None:
    state = {name: value for name, value in _state().items() if name != "array"}
    torch.save(state, tmp_path / "state.pt")
    found = fastload.load(tmp_path / "state.pt")
    expected = _expected() | {"one_pixel": (3, 1, 1, 1)}  # contiguous for torch, too
    assert _strides(found) == {name: expected[name] for name in state}
    assert all(torch.equal(found[name], value) for name, value in state.items())
    main(["convert", str(tmp_path / "state.pt"), str(tmp_path / "there")], standalone_mode=False)
    main(
        ["convert", str(tmp_path / "there"), str(tmp_path / "back.pt"), "--to", "torch"],
        standalone_mode=False,
    )
    back = torch.load(tmp_path / "back.pt")
    assert _strides(back) == _strides(found)


def test_only_checkpoints_with_strides_need_a_newer_reader(tmp_path: Path) -> None:
    def version(path: Path) -> int:
        number: int = json.loads((path / "fastload.json").read_bytes())["version"]
        return number

    fastload.save({"x": torch.ones(2, 3)[:, :1], "y": torch.ones(1, 4).t()}, tmp_path / "plain")
    fastload.save({"x": torch.ones(2, 3).t()}, tmp_path / "strided")
    assert (version(tmp_path / "plain"), version(tmp_path / "strided")) == (1, 3)


@pytest.mark.parametrize(
    "strides",
    [
        {"x": [1, 1]},
        {"x": [0, 1]},
        {"x": [1]},
        {"x": [1 << 40, 1]},
        {"y": [1, 2]},
        {"x": [1.0, 2]},
        {"x": 1},
        [1],
    ],
)
def test_strides_that_no_save_writes_are_refused(strides: Any, tmp_path: Path) -> None:
    fastload.save({"x": torch.ones(2, 3).t()}, tmp_path / "a")
    seal(tmp_path / "a" / "fastload.json", strides=strides)
    with pytest.raises(ManifestError, match="strides"):
        fastload.load(tmp_path / "a")


class _Lamb(torch.optim.Optimizer):
    """Norms, whose sums depend on the order of the elements in memory; no fused kernel."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["m"].lerp_(parameter.grad, 0.1)
                state["v"].lerp_(parameter.grad * parameter.grad, 0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                parameter -= group["lr"] * (parameter.norm() / update.norm()) * update


_OPTIMIZERS = {
    **{
        name: lambda params, name=name: getattr(torch.optim, name)(params, lr=1e-2, fused=True)
        for name in ("AdamW", "Adam", "Adagrad")
    },
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "LAMB": _Lamb,
}


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_a_channels_last_training_goes_on_bit_for_bit(name: str, has_state: bool, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 4, 1))
        model.to(memory_format=torch.channels_last)
        return model, _OPTIMIZERS[name](model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
        for step in steps:
            images = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(images.to(memory_format=torch.channels_last)) - 1).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    model, optimizer = make()
    train(model, optimizer, range(10))
    fastload.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    wanted = train(model, optimizer, range(10, 30))
    model, optimizer = make()
    if has_state:
        train(model, optimizer, range(3))
    fastload.load(tmp_path / "a", into={"model": model, "optimizer": optimizer})
    assert torch.equal(train(model, optimizer, range(10, 30)), wanted)
