"""Saves that copy the state during the next step: the state as of the call, or an error of that save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

import fastload
from fastload import CheckpointManager, SaveHandle, SaveOptions
from fastload.errors import FastloadError, PeerError, StateChanged
from fastload.geometry.dtensors import local_of
from fastload.saving.reader import StateReader
from tests.dist.harness import ranks
from tests.soak.snapshot_cases import expected_at, require_same, run_some

OVERLAP = SaveOptions(snapshot="overlap", writers="all", timeout_s=60)
WIDTH = 200  # so that weights are too large to be copied at once
PATIENCE_S = 20.0


class Gate:
    """Keeps copies in the background from beginning until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._saving = threading.local()

    def save(self, state: Any, path: Path) -> SaveHandle:
        self._saving.here = True
        try:
            return fastload.async_save(state, path, options=OVERLAP)
        finally:
            self._saving.here = False

    def open_soon(self) -> None:
        threading.Timer(0.1, self.opened.set).start()

    @contextmanager
    def in_place(self) -> Iterator[Gate]:
        real = StateReader.copy

        def copy(reader: StateReader, *arguments: Any) -> None:
            if not getattr(self._saving, "here", False):
                assert self.opened.wait(PATIENCE_S)
            real(reader, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateReader, "copy", copy)
            try:
                yield self
            finally:
                self.opened.set()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def backward(model: nn.Module) -> None:
    model(torch.randn(8, WIDTH)).square().sum().backward()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(**how: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **how)


@pytest.mark.slow(but=["1-ranks"])
@ranks(1, 2)
def test_a_step_waits_for_the_copy(rank: int, world: int, tmp_path: Path) -> None:
    """Also steps of fused and sharded optimizers, of which torch does not count the changes of parameters."""
    kinds = {
        "sgd": (sgd, False),
        "foreach": (adam(foreach=True), False),
        "fused": (adam(fused=True), False),
        "loop": (adam(foreach=False), False),
        "sharded": (sgd, True),
        "sharded and fused": (adam(fused=True), True),
    }
    for kind, (make_optimizer, is_sharded) in kinds.items():
        model = make_model()
        if is_sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = make_optimizer(model.parameters())
        backward(model)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "step": 1}
        plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
        for number, given in enumerate((state, plain)):
            path = tmp_path / f"{kind} {number}"
            fastload.save(given, expected_at(path))
            with Gate().in_place() as gate:
                handle = gate.save(given, path)
                backward(model)  # changes statistics of BatchNorm
                gate.open_soon()
                optimizer.step()
                assert gate.opened.is_set(), f"{kind}: the step did not wait"
                report = handle.wait(PATIENCE_S)
                assert report.ranks[rank].snapshot_wait_s > 0.0
                assert report.stall_s >= report.ranks[rank].snapshot_wait_s
            require_same(path)
            assert not _global_optimizer_pre_hooks
        dist.barrier()


@ranks(2)
def test_a_change_that_did_not_wait_fails_the_save_on_all_ranks(
    rank: int, world: int, tmp_path: Path
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for number, kind in enumerate(("plain", "sharded", "shard")):
        model = make_model()
        if kind != "plain":
            fully_shard(model, mesh=mesh)
        path = tmp_path / str(number)
        with Gate().in_place() as gate:
            handle = gate.save({"model": model}, path)
            if rank == 1:
                weight = next(model.parameters())
                (local_of(weight) if kind == "shard" else weight.detach()).add_(1)
            gate.opened.set()
            with pytest.raises(PeerError) as raised:
                handle.wait(PATIENCE_S)
        assert list(raised.value.failures) == [1]
        [error] = raised.value.failures.values()
        assert isinstance(error, StateChanged)
        assert error.tensors == ("model.0.weight",)
        assert "wait_snapshot" in str(error)
        assert not path.exists()
        fastload.async_save({"model": model}, path, options=OVERLAP).wait(PATIENCE_S)
        assert path.exists()
        dist.barrier()


@ranks(1)
def test_changes_after_the_wait(rank: int, world: int, tmp_path: Path) -> None:
    """Also by what torch does not count, and with other memory for a tensor."""
    average = torch.zeros(WIDTH, WIDTH)
    moved = torch.ones(WIDTH, WIDTH)
    state = {"average": average, "moved": moved, "half": torch.ones(WIDTH, WIDTH)[:, ::2]}
    with Gate().in_place() as gate:
        handle = gate.save(state, tmp_path / "a")
        moved.data = torch.zeros(WIDTH, WIDTH)
        with pytest.raises(fastload.DeadlineExceeded, match="not copied within"):
            handle.wait_snapshot(0.01)
        gate.open_soon()
        handle.wait_snapshot()
        assert gate.opened.is_set()
        average.data.add_(1)
        handle.wait(PATIENCE_S)
    found = fastload.load(tmp_path / "a")
    assert not found["average"].any()
    assert found["moved"].all()
    assert found["half"].shape == (WIDTH, WIDTH // 2)
    assert found["half"].all()


class Counts(nn.Module):
    """A module whose forward changes a large buffer, in a way that torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, given: Tensor) -> Tensor:
        self.seen.data.add_(1)
        return given @ self.weight


@ranks(1)
def test_what_torch_does_not_count_is_copied_at_once(rank: int, world: int, tmp_path: Path) -> None:
    model, array = Counts(), np.zeros((WIDTH, WIDTH))
    with torch.inference_mode():
        made = torch.zeros(WIDTH, WIDTH)
    with Gate().in_place() as gate:
        handle = gate.save({"model": model, "array": array, "made": made}, tmp_path / "a")
        model(torch.ones(1, WIDTH))
        array += 1
        with torch.inference_mode():
            made += 1
        gate.opened.set()
        handle.wait(PATIENCE_S)
    found = fastload.load(tmp_path / "a")
    assert not found["model"]["seen"].any()
    assert not found["array"].any()
    assert not found["made"].any()


@ranks(2)
def test_a_copy_that_fails_is_an_error_of_the_save(rank: int, world: int, tmp_path: Path) -> None:
    real, model = StateReader.copy, make_model()
    optimizer = sgd(model.parameters())
    backward(model)

    def copy(reader: StateReader, *arguments: Any) -> None:
        if rank == 0 and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device is gone")
        real(reader, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateReader, "copy", copy)
        handle = fastload.async_save({"model": model}, tmp_path / "a", options=OVERLAP)
        until = time.monotonic() + PATIENCE_S
        while not handle.done() and time.monotonic() < until:
            time.sleep(0.005)  # a wait would copy in this thread
        with pytest.raises(PeerError, match="the device is gone"):
            handle.wait(PATIENCE_S)
    optimizer.step()
    assert not (tmp_path / "a").exists()


@ranks(2)
def test_a_training_with_a_manager(rank: int, world: int, tmp_path: Path) -> None:
    """Saves to storage, several at once, while steps go on; every one is what the training had."""
    model = make_model()
    optimizer = adam(foreach=True)(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    options = SaveOptions(snapshot="overlap", writers="all", check_replicas="off")
    with CheckpointManager(tmp_path / "root", every_steps=1, max_pending_saves=2, options=options) as manager:
        for step in range(1, 8):
            backward(model)
            optimizer.step()
            state["step"] = step
            fastload.save(state, expected_at(tmp_path / "expected" / f"step_{step:08d}"), options=options)
            assert manager.should_save(step)
            manager.save(step, state)
        manager.wait()
        steps = manager.all_steps()
        assert 7 in steps
    for step in steps:
        require_same(tmp_path / "root" / f"step_{step:08d}", tmp_path / "expected")
    assert not _global_optimizer_pre_hooks


@ranks(1)
def test_a_load_in_place_waits_for_the_copy(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save({"w": torch.ones(WIDTH, WIDTH)}, tmp_path / "ones")
    state = {"w": torch.zeros(WIDTH, WIDTH)}
    with Gate().in_place() as gate:
        handle = gate.save(state, tmp_path / "zeros")
        gate.open_soon()
        fastload.load(tmp_path / "ones", into=state)
        assert gate.opened.is_set()
        handle.wait(PATIENCE_S)
    assert not fastload.load(tmp_path / "zeros")["w"].any()
    assert state["w"].all()


@ranks(1)
def test_a_failed_save_holds_no_step(rank: int, world: int, tmp_path: Path) -> None:
    model = make_model()
    optimizer = sgd(model.parameters())
    backward(model)
    (tmp_path / "a").write_text("here")
    handle = fastload.async_save({"model": model}, tmp_path / "a", options=OVERLAP)
    with pytest.raises(FastloadError):
        handle.wait(PATIENCE_S)
    assert not _global_optimizer_pre_hooks
    optimizer.step()


@ranks(2)
def test_states_of_the_same_names_and_lengths_saved_in_turn(rank: int, world: int, tmp_path: Path) -> None:
    """Nothing of one save describes the next one: neither shapes, dtypes, placements nor values."""
    mesh, numbers = init_device_mesh("cpu", (2,)), torch.arange(WIDTH * WIDTH, dtype=torch.int32)
    square = numbers.view(WIDTH, WIDTH)
    states: list[tuple[Any, Tensor]] = [
        (lambda of: of, square),
        (lambda of: of, square.view(WIDTH // 2, -1)),
        (lambda of: of, square.view(torch.float32)),
        (lambda of: distribute_tensor(of, mesh, [Shard(0)]), square),
        (lambda of: distribute_tensor(of, mesh, [Shard(1)]), square),
        (lambda of: distribute_tensor(of, mesh, [Replicate()]), square),
    ]
    for number, (place, whole) in enumerate(2 * states):
        handle = fastload.async_save(
            {"w": place(whole + number), "number": number}, tmp_path / str(number), options=OVERLAP
        )
        handle.wait(PATIENCE_S)
        loaded = fastload.load(tmp_path / str(number))
        assert loaded["w"].dtype is whole.dtype
        assert torch.equal(loaded["w"], whole + number)
        assert loaded["number"] == number


@pytest.mark.slow
@ranks(2, deadline_s=90)
def test_draws(rank: int, world: int, tmp_path: Path) -> None:
    """`python -m tests.soak.snapshot` runs more of them."""
    run_some(rank, world, 1, 0, 4, tmp_path)
