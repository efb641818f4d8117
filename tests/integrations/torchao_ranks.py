"""What the ranks of test_torchao.py do. Not imported by pytest itself: torchao takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao import optim, quantization
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.prototype import quantized_training

import fastload
from fastload.ext import subclasses
from tests.unit.test_state import assert_same

KINDS = (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8)

torch.compiler.set_stance("force_eager")  # the optimizers compile their steps


def same(got: Any, wanted: Any) -> None:
    """Compares states; of subclasses their contexts and inner tensors."""
    if is_traceable_wrapper_subclass(wanted):
        assert type(got) is type(wanted)
        names, context = wanted.__tensor_flatten__()
        assert got.__tensor_flatten__() == (names, context)
        assert got.shape == wanted.shape
        for name in names:
            same(getattr(got, name), getattr(wanted, name))
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key, value in wanted.items():
            same(got[key], value)
    else:
        assert_same(got, wanted)


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, num_steps: int = 2) -> None:
    torch.manual_seed(seed)
    for _ in range(num_steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trains(rank: int, world: int, folder: Path) -> None:
    for kind in KINDS:
        path, model = folder / kind.__name__, model_of(0)
        optimizer = kind(model.parameters(), lr=1e-2)
        train(model, optimizer, 1)
        options = fastload.SaveOptions(snapshot="overlap")
        fastload.async_save({"model": model, "optimizer": optimizer}, path, options=options).wait(20)
        entries = {entry.name for entry in fastload.inspect(path).tensors}
        assert {"optimizer.state.0.exp_avg.codes", "optimizer.state.0.exp_avg.scale"} < entries
        saved = optimizer.state_dict()["state"]
        same(fastload.load(path)["optimizer"]["state"], saved)
        other = model_of(2)
        again = kind(other.parameters(), lr=1e-2)
        fastload.load(path, into={"model": other, "optimizer": again})
        same(again.state_dict()["state"], saved)
        train(other, again, 3)
        train(model, optimizer, 3)
        assert_same(other.state_dict(), model.state_dict())
        same(again.state_dict(), optimizer.state_dict())


def sharded(kind: Any, seed: int) -> tuple[nn.Module, Any]:
    model = model_of(seed)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, kind(model.parameters(), lr=1e-2)


def saves_shards(rank: int, world: int, folder: Path) -> None:
    for kind in KINDS:
        model, optimizer = sharded(kind, 0)
        train(model, optimizer, 1)
        fastload.save({"model": model, "optimizer": optimizer}, folder / kind.__name__)
        # On another number of ranks, gradients would be added up in another order.
        if rank == 0:
            torch.save(full(optimizer), folder / f"{kind.__name__}.pt")
        else:
            full(optimizer)


def full(optimizer: Any) -> list[dict[str, Any]]:
    """The states of the parameters, dequantised and complete."""
    states = []
    for state in optimizer.state.values():
        whole = {}
        for name, value in state.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            plain = local.dequantize() if is_traceable_wrapper_subclass(local) else local
            if hasattr(value, "to_local"):
                plain = DTensor.from_local(
                    plain, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
                ).full_tensor()
            whole[name] = plain
        states.append(whole)
    return states


def loads_shards(rank: int, world: int, folder: Path) -> None:
    for kind in KINDS:
        path, wanted = folder / kind.__name__, torch.load(folder / f"{kind.__name__}.pt")
        if world == 1:
            model = model_of(2)
            optimizer = kind(model.parameters(), lr=1e-2)
        else:
            model, optimizer = sharded(kind, 2)
        for _ in range(2):  # into nothing, and into the states that the steps have changed
            fastload.load(path, into={"model": model, "optimizer": optimizer})
            assert_same(full(optimizer), wanted)
            train(model, optimizer, 3)
        if world == 2:
            other, again = sharded(kind, 0)
            train(other, again, 1)
            train(other, again, 3)
            fastload.load(path, into={"model": model, "optimizer": optimizer})
            train(model, optimizer, 3)
            assert_same(full(optimizer), full(again))
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(one.to_local(), two.to_local())
            # And filled in place, as parts of a dict.
            states = {"optimizer": {"state": dict(enumerate(again.state.values()))}}
            before = [state["exp_avg"] for state in again.state.values()]
            fastload.load(path, into=states, strict=False)
            assert_same(full(again), wanted)
            assert all(
                one is state["exp_avg"] for one, state in zip(before, again.state.values(), strict=True)
            )


def quantises(rank: int, world: int, folder: Path) -> None:
    for config in (
        quantization.Int8WeightOnlyConfig(),
        quantization.Float8WeightOnlyConfig(),
        quantization.Int8DynamicActivationInt8WeightConfig(),
        quantization.IntxWeightOnlyConfig(),
        quantization.Int8DynamicActivationIntxWeightConfig(),
        quantized_training.int8_weight_only_quantized_training(),
        quantized_training.Int8MixedPrecisionTrainingConfig(),
        quantized_training.bitnet_training(),
    ):
        path, models = folder / type(config).__name__, [model_of(seed) for seed in range(3)]
        for model in models:
            quantization.quantize_(model, config)
        model, other, third = models
        fastload.save({"model": model}, path)
        loaded = fastload.load(path)["model"]
        same(dict(loaded), dict(model.state_dict()))
        before = other[0].weight
        fastload.load(path, into={"model": other})
        assert other[0].weight is before
        same(dict(other.state_dict()), dict(model.state_dict()))
        third.load_state_dict(loaded, assign=True)
        example = torch.randn(3, 64)
        assert_same(other(example), model(example))
        assert_same(third(example), model(example))
    for name in subclasses._allowed:
        subclasses._class_of(name, object)


def trains_in_float8(rank: int, world: int, folder: Path) -> None:
    """FSDP2 that gathers weights in float8: they are subclasses around the weights of the training."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = convert_to_float8_training(model_of(seed), config=config)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, 1, num_steps=1)
        precompute_float8_dynamic_scale_for_fsdp(model)

    model, optimizer = made(0)
    step(model, optimizer)
    fastload.save({"model": model, "optimizer": optimizer}, folder / "a")
    other, again = made(2)
    step(other, again)
    fastload.load(folder / "a", into={"model": other, "optimizer": again})
    assert other[0].weight.to_local()._precomputed_scale is None, "it was that of other weights"
    for _ in range(2):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(plain(one), plain(two))
        step(model, optimizer)
        step(other, again)


def plain(parameter: Any) -> torch.Tensor:
    local = parameter.to_local()
    return local._tensor if is_traceable_wrapper_subclass(local) else local
