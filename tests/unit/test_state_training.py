"""Optimizers, schedulers, random states, scalers: put back, training goes on the same."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fastload.formats.encoder import encode_state
from tests.unit.test_state import assert_same, round_trip


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
    model[4].weight = model[0].weight
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Tensor:
    loss = torch.zeros(())
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "AdamW with a tensor as lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-3)),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True),
    **{name: getattr(torch.optim, name) for name in ("Adafactor", "Adagrad", "NAdam", "Rprop", "ASGD")},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_from_what_was_restored(name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    restored = round_trip(state)
    assert_same(restored, state)
    wanted = train(model, optimizer, 3)

    other = make_model()
    other_optimizer = OPTIMIZERS[name](other.parameters())
    other.load_state_dict(restored["model"])
    other_optimizer.load_state_dict(restored["optimizer"])
    torch.set_rng_state(restored["rng"])
    assert torch.equal(train(other, other_optimizer, 3), wanted)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


def test_the_names_of_an_optimizer_are_its_paths() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    names = list(encode_state({"optimizer": optimizer.state_dict()}).tensors)
    fields = ("step", "exp_avg", "exp_avg_sq")
    assert names == [f"optimizer.state.{index}.{field}" for index in (0, 1) for field in fields]


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_comes_back(name: str) -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    state = scheduler.state_dict()
    restored = round_trip(state)
    assert_same(restored, state)
    SCHEDULERS[name](optimizer).load_state_dict(restored)


def test_every_scheduler_of_torch_is_tried() -> None:
    found = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type)
        and issubclass(value, lr_scheduler.LRScheduler)
        and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == SCHEDULERS.keys()


def test_a_scaler_and_an_average_come_back() -> None:
    average = torch.optim.swa_utils.AveragedModel(make_model())
    state = {
        "scaler": torch.amp.GradScaler("cpu", init_scale=3.0).state_dict(),
        "average": average.state_dict(),
        "best": math.inf,
        "step": np.int64(7),
        "loss": np.float32(0.1),
        "history": [{"loss": torch.tensor(1.5).item(), "shape": torch.zeros(2, 3).shape}],
    }
    assert_same(round_trip(state), state)


def test_random_states_come_back() -> None:
    generator = torch.Generator().manual_seed(3)
    bit_generators = [np.random.PCG64(1), np.random.MT19937(2), np.random.Philox(3), np.random.SFC64(4)]
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "generator": generator.get_state(),
        "modern": [bit_generator.state for bit_generator in bit_generators],
    }
    restored = round_trip(state)
    assert_same(restored, state)
    random.setstate(restored["python"])
    np.random.set_state(restored["numpy"])
    torch.set_rng_state(restored["torch"])
    generator.set_state(restored["generator"])
    for bit_generator, saved in zip(bit_generators, restored["modern"], strict=True):
        bit_generator.state = saved
