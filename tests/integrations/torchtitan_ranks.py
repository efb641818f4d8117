"""What ranks do in the tests of torchtitan."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtitan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torchtitan.components.checkpointer import CheckpointManager as Theirs
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

import fastload
from fastload.integrations.torchtitan import CheckpointManager
from tests.pages import run_program


def is_killed_on_the_page(rank: int, world: int) -> None:
    save = CheckpointManager.save

    def save_and_die(manager: Any, step: int, last_step: bool = False) -> bool:
        saved = save(manager, step, last_step)
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointManager, "save", save_and_die)
        run_page("killed")


def goes_on_as_if_it_had_not_been(rank: int, world: int) -> None:
    saved = Path("killed/outputs/checkpoint")
    assert (saved / "step-4").exists()
    assert not (saved / "step-9").exists()
    states = [run_page(folder) for folder in ("killed", "whole")]
    assert states[0].keys() == states[1].keys() > {"optimizer", "dataloader", "lr_scheduler", "train_state"}
    assert states[0]["dataloader"].keys() == {"dp_rank_0", "dp_rank_1", "world_size"}
    for one, other in (states, [state["optimizer"] for state in states]):
        for name, tensor in one.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor, other[name]), name


def run_page(folder: str) -> dict[str, Any]:
    os.makedirs(folder, exist_ok=True)
    with contextlib.chdir(folder):
        run_program("docs/integrations/torchtitan.md")
        return fastload.load("outputs/checkpoint/step-9")  # type: ignore[no-any-return]


class Step:
    """The state of a training; ranks differ in what they count."""

    def __init__(self, step: int, seen: int) -> None:
        self.state = {"step": step, "seen": seen}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class Adapter(BaseStateDictAdapter):
    """Names in the way of another library."""

    fqn_to_index_mapping = None

    def __init__(self) -> None:
        self.hf_assets_path = None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): tensor for name, tensor in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        raise AssertionError("fastload reads")


def manager_of(kind: Any, seed: int, step: Any, states: Any = None, **config: Any) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizers = default_adamw(implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=9)
    manager = kind.Config(enable=True, **{"keep_latest_k": 0, **config}).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": step, **(states or {})},
        sd_adapter=Adapter(),
    )
    for _ in range(seed):
        model(torch.ones(2, 6)).sum().backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
    return manager


def tensors_of(manager: Any) -> dict[str, torch.Tensor]:
    state = manager.states["model"].state_dict() | manager.states["optimizer"].state_dict()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def saves_both(rank: int, world: int) -> None:
    for kind, folder in ((Theirs, "theirs"), (CheckpointManager, "ours")):
        manager = manager_of(
            kind, 2, Step(7, seen=rank if folder == "ours" else 0), folder=folder, interval=7
        )
        assert manager.save(7)
        if folder == "ours":
            manager.last_save_in_hf = True
            assert manager.save(8, last_step=True)
    with pytest.raises(fastload.OptionError, match=r"async_with_pinned_mem.*say async_mode='async'"):
        manager_of(CheckpointManager, 0, Step(0, 0), async_mode="async_with_pinned_mem")
    with pytest.raises(fastload.OptionError, match=r"(?s)cannot be saved: .*train_state.*step.*object"):
        manager_of(CheckpointManager, 0, Step(object(), 0))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Theirs, "dcp_load", lambda manager, state: None)
        with pytest.raises(
            fastload.OptionError, match=rf"torchtitan {torchtitan.__version__}: .*dcp_load takes"
        ):
            manager_of(CheckpointManager, 0, Step(0, 0))


def loads_both(rank: int, world: int) -> None:
    saved = fastload.load("ours/step-7")
    expected = saved | saved["optimizer"]
    for folder in ("theirs", "ours"):
        step = Step(0, seen=rank)
        manager = manager_of(CheckpointManager, 1, step, folder=folder)
        assert manager.load(7)
        assert step.state == {"step": 7, "seen": 0}
        loaded = tensors_of(manager)
        assert len(loaded) == 4 * (1 + 3)  # AdamW has two moments and a step
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    assert manager._find_load_step() == 8
    assert fastload.inspect("ours/step-8").by_name.keys() == {
        f"model.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }
    path = os.path.abspath("ours/step-8")
    manager = manager_of(
        CheckpointManager, 1, Step(0, 0), folder="new", initial_load_in_hf=True, initial_load_path=path
    )
    assert manager.load()
    loaded = tensors_of(manager)
    assert all(torch.equal(loaded[name], expected[name]) for name in ("0.weight", "1.bias"))


class Average:
    """A state of one's own, with shards, and a number that differs between ranks."""

    def __init__(self, value: float, rank: int) -> None:
        ones = torch.arange(10.0) + value
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self.shards = distribute_tensor(ones, mesh, [Shard(0)])
        self.both = [
            distribute_tensor(ones * 2, mesh, [Shard(0)]),
            distribute_tensor(ones * 3, mesh, [Shard(0)]),
        ]
        self.seen = rank

    def state_dict(self) -> dict[str, Any]:
        return {"shards": {"a": self.shards, "seen": self.seen}, "both": self.both, "bias": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shards, self.seen = state["shards"]["a"], state["shards"]["seen"]
        self.both = state["both"]


def saves_a_state_with_shards(rank: int, world: int) -> None:
    for kind, folder in ((Theirs, "theirs"), (CheckpointManager, "ours")):
        states = {"average": Average(5.0, rank if folder == "ours" else 0)}
        assert manager_of(kind, 1, Step(7, 0), states, folder=folder, interval=7).save(7)


def loads_a_state_with_shards(rank: int, world: int) -> None:
    for folder in ("theirs", "ours"):
        average = Average(0.0, rank)
        assert manager_of(CheckpointManager, 0, Step(0, 0), {"average": average}, folder=folder).load(7)
        for factor, shards in enumerate((average.shards, *average.both), 1):
            assert torch.equal(shards.full_tensor(), (torch.arange(10.0) + 5) * factor)
        assert average.seen == 0
    assert fastload.load("ours/step-7")["average"]["bias"].tolist() == [1, 1]


def new_buffer(self: Any, p: torch.Tensor, signed: bool) -> Any:
    """As the optimizers of torchao make their states."""
    return TwoTensor(p, p)


def keeps_complete_checkpoints(rank: int, world: int) -> None:
    """What is left of killed saves does not count, so that it pushes out no complete one."""
    if rank == 0:
        for name in (
            "step-3",
            "step-5",
            "step-7",
            ".step-8.0123456789abcdef.saving",
        ):
            os.makedirs(f"run/{name}")
    torch.distributed.barrier()
    given = {"folder": "run", "interval": 2, "keep_latest_k": 2, "async_mode": "async"}
    manager = manager_of(CheckpointManager, 1, Step(0, 0), **given)
    for step in (2, 4, 6):
        assert manager.save(step)
    manager.maybe_wait_for_saving()
    manager.close()  # waits for the deletions
    torch.distributed.barrier()
    assert {name for name in os.listdir("run") if name[0] != "."} == {"step-4", "step-5", "step-6", "step-7"}
    assert manager._find_load_step() == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "_new_buffer", new_buffer, raising=False)
        with pytest.raises(fastload.OptionError, match=r"with the optimizer .*AdamW: .*TwoTensor"):
            manager_of(CheckpointManager, 0, Step(0, 0))
