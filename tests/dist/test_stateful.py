"""One dict of modules, optimizers, schedulers and the like: saved, and restored, as it is."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import fastload
from fastload import PerRank
from fastload.errors import ChecksumError, MismatchError, OptionError, PeerError
from tests.checkpoints import flip
from tests.dist.harness import ranks
from tests.unit.test_state import assert_same

OPTIONS = fastload.SaveOptions(timeout_s=30)


class Sampler:
    """This rank's part of the data, from a position on."""

    def __init__(self, rank: int, world: int) -> None:
        self.indices = list(DistributedSampler(range(60), num_replicas=world, rank=rank))  # type: ignore[arg-type]
        self.position = 0

    def take(self) -> int:
        self.position += 1
        return self.indices[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def make_training(rank: int, world: int, kind: str, seed: int) -> dict[str, Any]:
    """What a training has, to be saved and restored."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 6))
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 40),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=3),
        "sampler": PerRank(Sampler(rank, world)),
        "step": 0,
    }


def train(training: dict[str, Any], num_steps: int) -> None:
    model, scaler, sampler = training["model"], training["scaler"], training["sampler"].value
    for _ in range(num_steps):
        batch = torch.arange(24.0).view(4, 6).sin() + (0 if model.training else sampler.take())
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(training["optimizer"])
        scaler.update()
        training["scheduler"].step()
        training["optimizer"].zero_grad()
        training["step"] += 1
        sampler.take()


def spelled_out(training: dict[str, Any]) -> dict[str, Any]:
    """The same with all state dicts asked for; copies."""

    def copied(value: Any) -> Any:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            return value.clone()
        if isinstance(value, dict):
            return {key: copied(each) for key, each in value.items()}
        return [copied(each) for each in value] if isinstance(value, list) else value

    plain = {name: getattr(part, "state_dict", lambda p=part: p)() for name, part in training.items()}
    return copied({**plain, "sampler": training["sampler"].value.state_dict()})


def save_by_call(state: Any, path: Path) -> None:
    fastload.save(state, path, options=OPTIONS)


def save_in_background(state: Any, path: Path) -> None:
    fastload.async_save(state, path, options=OPTIONS).wait()


@pytest.mark.slow(but=["save_by_call-fsdp", "background-ddp", "by_call-plain"])
@ranks(2)
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("save", [save_by_call, save_in_background])
def test_one_dict_is_saved_and_restored(
    rank: int, world: int, tmp_path: Path, kind: str, save: Callable[..., None]
) -> None:
    training = make_training(rank, world, kind, 1)
    train(training, 3)
    expected = spelled_out(training)
    save(training, tmp_path / "objects")
    states = {name: getattr(part, "state_dict", lambda p=part: p)() for name, part in training.items()}
    save({**states, "sampler": PerRank(expected["sampler"])}, tmp_path / "states")
    for name in ("model.safetensors", "ranks.safetensors"):
        assert (tmp_path / "objects" / name).read_bytes() == (tmp_path / "states" / name).read_bytes()
    if kind != "fsdp":
        assert_same(fastload.load(tmp_path / "objects"), fastload.load(tmp_path / "states"))
    train(training, 2)
    again = make_training(rank, world, kind, 2)
    fastload.load(tmp_path / "objects", into=again)
    assert_same(spelled_out(again), expected)
    train(again, 2)
    assert_same(spelled_out(again), spelled_out(training))


class Crash(Exception):
    pass


@pytest.mark.slow(but=["memory"])
@ranks(2)
@pytest.mark.parametrize("where", ["storage", "memory"])
def test_a_manager_takes_and_restores_the_same_dict(
    rank: int, world: int, tmp_path: Path, where: str
) -> None:
    own = tmp_path / "memory" / socket.gethostname()
    own.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {"options": OPTIONS}
    given |= {"memory": own, "memory_every_steps": 1} if where == "memory" else {"every_steps": 1}
    training = make_training(rank, world, "fsdp", 1)
    with suppress(Crash), fastload.CheckpointManager(tmp_path / "run", **given) as manager:
        train(training, 3)
        assert manager.should_save(3)
        manager.save(3, training)
        expected = spelled_out(training)
        train(training, 1)
        manager.wait()
        raise Crash  # else memory is written to storage in the end
    again = make_training(rank, world, "fsdp", 2)
    with fastload.CheckpointManager(tmp_path / "run", **given) as manager:
        manager.restore(into=again)
        assert manager.restored_from == where
    assert_same(spelled_out(again), expected)
    assert again["step"] == 3


class Recorded:
    """Notes what is done to it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.calls: list[Any] = []

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(state)


@ranks(2)
def test_no_object_is_touched_before_all_bytes_are_verified(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save({"w": torch.ones(5000), "first": Recorded({"a": torch.ones(3)}), "step": 4}, tmp_path / "c")
    if rank == 0:
        flip(tmp_path / "c" / "model.safetensors", -5000)
    dist.barrier()
    into = {"w": torch.zeros(5000), "first": Recorded(None), "step": 0}
    with pytest.raises(ChecksumError):
        fastload.load(tmp_path / "c", into=into)
    assert into["first"].calls == []
    assert into["step"] == 0


@ranks(3)
def test_a_state_dict_that_fails_on_one_rank_ends_the_save_on_all(
    rank: int, world: int, tmp_path: Path
) -> None:
    class Failing(Recorded):
        def state_dict(self) -> Any:
            if rank == 1:
                raise RuntimeError("of rank 1")
            return 3

    for save in (save_by_call, save_in_background):
        with pytest.raises((PeerError, RuntimeError), match=r"of rank 1") as raised:
            save({"w": torch.ones(3), "x": Failing(0)}, tmp_path / "never")
        if rank != 1:
            assert isinstance(raised.value, PeerError)
            assert set(raised.value.failures) == {1}
        dist.barrier()
        assert not (tmp_path / "never").exists()
        dist.barrier()
    fastload.save({"w": torch.ones(3), "x": Recorded(3)}, tmp_path / "well", options=OPTIONS)


@ranks(1, 2)
def test_one_object_alone(rank: int, world: int, tmp_path: Path) -> None:
    training = make_training(rank, world, "plain", 1)
    train(training, 2)
    for name in ("model", "optimizer"):
        fastload.save(training[name], tmp_path / name, options=OPTIONS)
        other = make_training(rank, world, "plain", 2)[name]
        fastload.load(tmp_path / name, into=other)
        assert_same(other.state_dict(), training[name].state_dict())
    with pytest.raises(OptionError, match="into= is a int: pass a module, or a dict of tensors, modules"):
        fastload.load(tmp_path / "model", into=3)
    with pytest.raises(MismatchError, match="into: parameter groups: 0 in the checkpoint, 1 in into="):
        fastload.load(tmp_path / "model", into=training["optimizer"], strict=False)


class Fresh(Recorded):
    """Makes its arrays when it is asked, none of which torch can look at where it is."""

    def state_dict(self) -> Any:
        return {
            "array": np.arange(20).reshape(4, 5).T + self.value,
            "conj": (torch.ones(2) * self.value).mul(1j).conj(),
        }


@ranks(1)
def test_states_that_are_made_when_asked_for(rank: int, world: int, tmp_path: Path) -> None:
    """Python gives the id of an object that is gone to the next one."""
    saved = {
        "many": [Fresh(number) for number in range(50)],
        "own": PerRank([Fresh(7), (Fresh(8), "x" * 300)]),
    }
    fastload.save(saved, tmp_path / "c")
    loaded = fastload.load(tmp_path / "c")
    assert_same(loaded["many"], [each.state_dict() for each in saved["many"]])
    assert_same(loaded["own"], [Fresh(7).state_dict(), (Fresh(8).state_dict(), "x" * 300)])
    into = {"many": [Fresh(0) for _ in range(50)], "own": PerRank([Fresh(0), (Fresh(0), "")])}
    fastload.load(tmp_path / "c", into=into)
    assert_same([each.calls for each in into["many"]], [[each.state_dict()] for each in saved["many"]])
    assert_same(into["own"].value[1][0].calls, [Fresh(8).state_dict()])
