"""Saves from accelerators: what the caller's streams have computed, whoever copies it; managers and tiers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import fastload
from fastload.formats.state import state_digest
from tests.checkpoints import assert_same_bits
from tests.gpu.devices import Devices, on_devices

NUM_ROWS = 4000


def state_on(devices: Devices, fill: int = 0) -> dict[str, Any]:
    """Returns a state of many dtypes and layouts, the same on all ranks; some of it in host memory."""
    wide = (torch.arange(NUM_ROWS * 500, dtype=torch.float32) + fill).view(NUM_ROWS, 500).to(devices.device)
    return {
        "wide": wide,
        "turned": wide[:99, :77].clone().t(),
        "every other": wide[0, ::2].clone().to(torch.float8_e4m3fn),
        "odd": (torch.arange(12_345) + fill).to(torch.uint8).to(devices.device),
        "on the host": torch.arange(1000),
        "scalar": torch.tensor(True, device=devices.device),
        "empty": torch.empty(0, 3, device=devices.device),
    }


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}


@pytest.mark.slow(but=["1-ranks"])
@on_devices(1, 2)
@pytest.mark.parametrize("aside", [False, True], ids=["default stream", "another stream"])
def test_a_save_waits_for_what_its_callers_stream_computes(
    devices: Devices, rank: int, world: int, tmp_path: Path, aside: bool
) -> None:
    """As a whole and in the background; three times, the last ones in memory that the first has pinned."""
    state = state_on(devices)
    expected = on_host(state) | {"wide": -state["wide"].cpu()}
    devices.slow(3)
    stream = torch.Stream(devices.device) if aside else torch.accelerator.current_stream(devices.device)
    stream.wait_stream(torch.accelerator.current_stream(devices.device))
    torch.accelerator.set_stream(stream)
    for number in range(3):
        devices.busy(0.05)
        state["wide"].neg_()
        if number == 1:
            fastload.save(state, tmp_path / str(number))
            state["wide"].neg_()
        else:
            saving = fastload.async_save(state, tmp_path / str(number))
            state["wide"].neg_()
            saving.wait(60)
    torch.accelerator.synchronize(devices.device)
    for number in range(3):
        assert_same_bits(fastload.load(tmp_path / str(number)), expected)
    devices.check_group()


@pytest.mark.slow(but=["1-ranks"])
@on_devices(1, 2)
def test_an_overlapped_save_does_not_wait_for_its_callers_stream(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    """The host goes on while the stream cannot, also through the step; twice, in the same pinned memory."""
    weight = torch.nn.Parameter(torch.ones(NUM_ROWS, 50, device=devices.device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = state_on(devices) | {"weight": weight}
    expected = on_host(state)
    options = fastload.SaveOptions(snapshot="overlap", writers="all")
    devices.slow(5)
    for number in range(2):
        with devices.aside(), devices.held():
            state["wide"].neg_()
            weight.grad = torch.full_like(weight, 2.0)
            devices.counts()
            saving = fastload.async_save(state, tmp_path / str(number), options=options)
            counts = devices.counts()
            assert not {"blocking_copies", "device_syncs", "event_syncs", "items"} & counts.keys()
            assert counts.get("stream_syncs", 0) <= 1, "of the stream that copies, by its own thread"
            optimizer.step()
        saving.wait(60)
        expected["wide"] = -expected["wide"]
        assert_same_bits(fastload.load(tmp_path / str(number)), expected)
        expected["weight"] = expected["weight"] - 2.0
    devices.check_faults()
    with devices.held():
        saving = fastload.async_save(state, tmp_path / "changed", options=options)
        state["wide"].neg_()
    with pytest.raises(fastload.FastloadError, match="wide changed while"):
        saving.wait(60)
    devices.forget_faults()
    devices.check_group()


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4)
def test_shards(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """Rows that other ranks write leave by another thread; the files are those of a save from the host."""
    mesh = init_device_mesh(devices.device.type, (world,) if world == 2 else (2, 2))
    placements: list[Any] = [Shard(0)] if world == 2 else [Replicate(), Shard(1)]
    whole = torch.arange(300 * 70, dtype=torch.float32).view(300, 70)
    fastload.save({"w": -whole, "odd": torch.arange(301)}, tmp_path / "host")
    for number in range(4):
        in_background = bool(number % 2)
        state = {
            "w": devices.cut(whole, mesh, placements),
            "odd": torch.arange(301, device=devices.device),
        }
        devices.slow(number)
        with devices.aside():
            devices.busy(0.03)
            state["w"].to_local().neg_()
            path = tmp_path / f"device{number}"
            if in_background:
                saving = fastload.async_save(state, path)
                state["w"].to_local().neg_()
                saving.wait(60)
            else:
                fastload.save(state, path, options=fastload.SaveOptions(check_replicas="full"))
        for host_file in sorted((tmp_path / "host").glob("*.safetensors")):
            assert (path / host_file.name).read_bytes() == host_file.read_bytes()
    devices.check_group()


@on_devices(2)
def test_a_training_with_a_manager_resumes_where_it_stopped(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    """FSDP2 and AdamW on the device; saved in the background every step, restored in place."""
    mesh = init_device_mesh(devices.device.type, (world,))

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
        model.to(devices.device)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(torch.full((4, 40), float(number % 3), device=devices.device)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    devices.slow(1, longest_s=0.0005)
    with fastload.CheckpointManager(tmp_path, every_steps=1, keep_last=2) as manager:
        for number in range(1, 4):
            step(model, optimizer, number)
            manager.should_save(number)
            manager.save(number, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected = {n: p.to_local().detach().cpu() for n, p in model.named_parameters()}
        step(model, optimizer, 4)
    again, its_optimizer = make()
    step(again, its_optimizer, 0)
    with fastload.CheckpointManager(tmp_path, every_steps=1) as manager:
        manager.restore(into={"model": again, "optimizer": its_optimizer})
        assert manager.restored_step == 3
    assert_same_bits({n: p.to_local().detach().cpu() for n, p in again.named_parameters()}, expected)
    step(again, its_optimizer, 4)
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one.to_local().detach().cpu(), other.to_local().detach().cpu()), name
    devices.check_group()


@on_devices(2, ranks_per_host=1)
def test_the_memory_tier_brings_steps_back_to_the_device(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    (tmp_path / f"memory{rank}").mkdir()
    devices.slow(2)
    tier: Any = {"memory": tmp_path / f"memory{rank}", "memory_every_steps": 1}
    with fastload.CheckpointManager(tmp_path / "root", **tier) as manager, devices.aside():
        kept: list[int] = []
        for number in range(1, 1000):  # the tier says no while it is still busy with the step before
            if manager.should_save(number):
                state = state_on(devices, number)
                manager.save(number, state)
                state["wide"].zero_()
                kept.append(number)
            if len(kept) == 2:
                break
            time.sleep(0.02)
        manager.wait()
        found = manager.restore(device=devices.device)
        assert (manager.restored_step, manager.restored_from) in [(step, "memory") for step in kept]
        assert_same_bits(on_host(found), on_host(state_on(devices, manager.restored_step)))
    devices.check_group()


@on_devices(2)
def test_refreshes_of_a_model(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """One open checkpoint after the other into the same tensors, while the caller computes with them."""
    into: dict[str, Tensor] = {"w": torch.zeros(300, 70, device=devices.device)}
    sums = []
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=5000, timeout_s=60)
    with devices.aside():
        for number in range(4):
            devices.slow(number)
            path = tmp_path / str(number)
            fastload.save({"w": torch.full((300, 70), float(number))}, path)
            fastload.load(path, into=into, options=options)
            devices.busy(0.01)
            sums.append(into["w"].sum())
    assert [value.item() for value in sums] == [number * 21_000.0 for number in range(4)]
    devices.check_group()


@on_devices(1)
def test_a_state_of_the_device_is_what_the_host_would_have_saved(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    state = state_on(devices)
    fastload.save(state, tmp_path / "device", options=fastload.SaveOptions(check_replicas="full"))
    fastload.save(on_host(state), tmp_path / "host")
    device, host = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("device", "host"))
    assert device == host
    assert state_digest(fastload.load(tmp_path / "device", device=devices.device)) == state_digest(
        on_host(state)
    )
