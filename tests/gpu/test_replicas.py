"""Replicas on accelerators are compared by digests that the devices compute, while nobody waits for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastload
from fastload import SaveOptions
from fastload.errors import DeadlineExceeded
from fastload.ext.device_digests import PendingDigests
from fastload.formats.dtypes import safetensors_spec
from fastload.saving.layout import TensorSpec, lay_out
from fastload.saving.messages import ShardRange
from fastload.saving.reader import StateReader
from fastload.saving.shard_map import ShardMap
from tests.accelerator import accelerator
from tests.dist.test_manager import warned
from tests.dist.test_memory_tier import keep
from tests.gpu.devices import Devices, on_devices

OPTIONS = SaveOptions(timeout_s=60, writers="all")
HOW = ("now", "block", "overlap")


def save(state: Any, path: Path, how: str, **changes: Any) -> None:
    options = replace(OPTIONS, **changes)
    if how == "now":
        fastload.save(state, path, options=options)
    else:
        fastload.async_save(state, path, options=replace(options, snapshot=how)).wait(60)


def replicas(devices: Devices, odd: bool = False) -> dict[str, Any]:
    """Tensors that differ, if they do, in one element of each that is in `ODD`."""
    change = 1 if odd else 0
    state = {
        "bfloat16": torch.arange(300 * 700).view(300, 700).bfloat16(),
        "turned": torch.arange(400 * 99.0).view(400, 99),
        "bytes": torch.arange(100_003).to(torch.uint8),
        "fp8": torch.ones(100, 1000).to(torch.float8_e4m3fn),
        "small": torch.zeros(5),
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 3),
    }
    state["bfloat16"][299, 699] += 1000 * change
    state["turned"][0, 98] *= 1 - 2 * change
    state["bytes"][100_002] += change
    state["small"][0] *= 1 - 2 * change  # -0.0
    found = {name: tensor.to(devices.device) for name, tensor in state.items()}
    found["turned"] = found["turned"].t().contiguous().t()
    return {**found, "on the host": torch.arange(1000.0)}


ODD = ("bfloat16", "turned", "bytes", "small")


@contextmanager
def no_warnings() -> Iterator[None]:
    with warned("fastload.saving.agree") as lines:
        yield
    assert lines == []


@pytest.mark.slow(but=["3-ranks"])
@on_devices(2, 3)
def test_a_difference_is_a_warning_that_names_tensors_and_ranks(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    """What the caller's stream does right before and right after the call is no difference."""
    others = "the 2 others" if world == 3 else "the 1 other"
    devices.slow(world)
    for how in HOW:
        with devices.aside():
            devices.busy(0.02)
            state = replicas(devices)
            for tensor in state.values():
                tensor.copy_(tensor.clone())
            with no_warnings():
                options = replace(OPTIONS, snapshot="overlap" if how == "overlap" else "block")
                path = tmp_path / f"{how} equal"
                if how == "now":
                    fastload.save(state, path, options=options)
                else:
                    saving = fastload.async_save(state, path, options=options)
                    if how == "overlap":
                        saving.wait_snapshot()
                    for tensor in state.values():
                        tensor.zero_()
                    saving.wait(60)
        state = replicas(devices, odd=rank == 1)
        (tmp_path / how).mkdir(exist_ok=True)
        with warned("fastload.saving.agree") as lines:
            for step in range(2):
                save({**state, "step": step}, tmp_path / how / str(step), how)
            save(state, tmp_path / f"{how} off", how, check_replicas="off")
        assert len(lines) == (rank == 0), lines
        for line in lines:
            for name in ODD:
                assert f"  {name}: rank {'1' if world == 3 else ''}" in line
                assert world == 2 or f"  {name}: rank 1 not as {others}" in line
            assert line.count(": rank") == len(ODD), line
            assert "check_replicas='full'" in line
        for step in range(2):
            fastload.verify(tmp_path / how / str(step))
    devices.check_group()


@on_devices(2)
def test_nobody_waits_for_the_digests(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """Saves next to training return while the caller's stream cannot go on, also if the ranks meet first."""
    parameter = torch.nn.Parameter(torch.ones(500, 500, device=devices.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    model = torch.nn.BatchNorm1d(40_000).to(devices.device)
    devices.slow(3)
    for number, changes in enumerate([{}, {"writers": "host"}]):
        with no_warnings():
            with devices.aside():
                state = {**replicas(devices), "model": model, "parameter": parameter}
                shapes = [(tensor.shape, tensor.dtype) for tensor in replicas(devices).values()]
                with devices.held():
                    parameter.grad = torch.full_like(parameter, 2.0)
                    devices.counts()
                    options = replace(OPTIONS, snapshot="overlap", **changes)
                    saving = fastload.async_save(state, tmp_path / str(number), options=options)
                    counts = devices.counts()
                    model.running_mean.add_(1)  # as a forward pass does
                    state.clear()
                    for shape, dtype in shapes:  # in memory that nobody but the save may use
                        torch.zeros(shape, dtype=dtype, device=devices.device)
                    optimizer.step()
            assert (
                not {"blocking_copies", "device_syncs", "event_syncs", "items", "fallbacks"} & counts.keys()
            )
            assert counts.get("stream_syncs", 0) <= 1, "of the stream that copies, by its own thread"
            saving.wait(60)
    devices.check_group()


@on_devices(2)
def test_everything_is_compared_by_digests_on_request(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    """Without a copy to the host of what another rank writes."""
    for how in HOW:
        devices.counts()
        save(replicas(devices), tmp_path / how, how, check_replicas="full")
        counts = devices.counts()
        total = sum(tensor.nbytes for tensor in replicas(devices).values())
        assert counts.get("d2h_pinned_bytes", 0) + counts.get("d2h_pageable_bytes", 0) < 0.8 * total
        for name in ODD:
            state = replicas(devices)
            state[name] = replicas(devices, odd=rank == 1)[name]
            with pytest.raises(
                fastload.ReplicaMismatch, match=rf"(?m)^  {name}: rank \d not as the 1 other$"
            ):
                save(state, tmp_path / "never", how, check_replicas="full")
    dist.barrier()
    assert not (tmp_path / "never").exists()


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 3)
def test_ranks_with_tensors_in_host_memory(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """They are left out, or compared with the others as completely as asked for."""

    def state(odd: bool) -> dict[str, Any]:
        found = replicas(devices, odd)
        return {name: tensor.cpu() for name, tensor in found.items()} if rank == 1 else found

    for how in HOW:
        with no_warnings():
            save(state(odd=False), tmp_path / how, how)
            save(state(odd=rank == 1), tmp_path / f"{how} odd", how)
            save(state(odd=False), tmp_path / f"{how} full", how, check_replicas="full")
        with pytest.raises(fastload.ReplicaMismatch) as raised:
            save(state(odd=rank == 1), tmp_path / "never", how, check_replicas="full")
        assert all(f"  {name}: rank " in str(raised.value) for name in ODD), raised.value
        if world == 3:
            with warned("fastload.saving.agree") as lines:
                save(state(odd=rank == 2), tmp_path / f"{how} third", how)
            assert sum(line.count(": rank") for line in lines) == (
                len(ODD) if rank == 0 and how == "now" else 0
            )


@pytest.mark.slow
@on_devices(4)
def test_replicas_of_shards(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh(devices.device.type, (2, 2))
    cases = itertools.product([[Replicate(), Shard(0)], [Replicate(), Shard(1)]], ({}, {"parts": True}))
    for number, (placements, changes) in enumerate(cases):
        whole = torch.arange(301 * 200.0).view(301, 200)
        for how in HOW:
            parts = {"w": devices.cut(whole, mesh, placements), "b": devices.cut(whole[0], mesh, placements)}
            folder = tmp_path / f"{number} {how}"
            folder.mkdir(exist_ok=True)
            with no_warnings():
                save(parts, folder / "equal", how, **changes)
            if rank == 3:
                parts["w"].to_local()[5, 50] += 1
            with warned("fastload.saving.agree") as lines:
                save(parts, folder / "odd", how, **changes)
            assert len(lines) == (rank == 0), lines
            assert all("  w: rank 3 not as rank 1" in line and ": rank" in line for line in lines)
    devices.check_group()


@on_devices(2)
def test_different_tensors_of_one_name_are_an_error(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    for size, how in itertools.product((3, 300), HOW):
        state = {"experts.0": torch.full((size, size), float(rank), device=devices.device)}
        with pytest.raises(fastload.ReplicaMismatch, match=r"(?s)experts\.0: rank .*different names"):
            save(state, tmp_path / "never", how, parts=True)
    dist.barrier()
    assert not any(tmp_path.iterdir())


@on_devices(4)
def test_replicas_on_several_meshes(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """Compared completely, since they may be no replicas: one element is an error."""
    mesh = init_device_mesh(devices.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(301 * 200.0).view(301, 200)
    for how in HOW:
        local = whole.chunk(2)[mesh["dp"].get_local_rank()].to(devices.device)
        given: Any = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        parts = {"w": DTensor.from_local(local, mesh["dp"], [Shard(0)], **given)}
        with no_warnings():
            save(parts, tmp_path / how, how)
        if rank == 3:
            parts["w"].to_local()[5, 50] += 1
        with pytest.raises(fastload.ReplicaMismatch, match="w: rank 3 not as rank 2"):
            save(parts, tmp_path / "never", how)
    devices.check_group()


@on_devices(2)
def test_a_memory_tier_and_deltas_warn_as_well(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir(exist_ok=True)
    state = replicas(devices)
    tier: Any = {"memory": tmp_path / "memory", "memory_every_steps": 1, "options": OPTIONS}
    with warned("fastload.saving.agree") as lines:
        with fastload.CheckpointManager(tmp_path / "root", **tier) as manager:
            keep(manager, 1, state=lambda step: replicas(devices, odd=rank == 1))
        fastload.save(state, tmp_path / "base", options=OPTIONS)
        save(replicas(devices, odd=rank == 1), tmp_path / "delta", "block", base=tmp_path / "base")
    assert len(lines) == 2 * (rank == 0), lines
    assert all("  bfloat16: rank" in line for line in lines)


@on_devices(2, only_emulated=True)
def test_a_full_device_is_no_reason_not_to_save(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    state = {"w": torch.full((1000, 1000), float(rank), device=devices.device)}
    index = devices.device.index
    accelerator().limit(index, torch.accelerator.memory_reserved(index))
    try:
        with warned("fastload.saving.agree") as lines:
            save(state, tmp_path / "a", "block")
        assert len(lines) == 1
        assert "replicas on accelerators are not compared: cannot allocate" in lines[0]
        with pytest.raises(fastload.FastloadError, match="cannot allocate"):
            save(state, tmp_path / "never", "block", check_replicas="full")
    finally:
        accelerator().limit(index, 1 << 34)
    fastload.verify(tmp_path / "a")


@on_devices(1)
def test_the_wait_has_a_deadline(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"w": torch.ones(100, 100, device=devices.device)}
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]
    layout = lay_out(specs, max_shard_bytes=1 << 40, block_bytes=None)
    [(number, shard)] = ShardMap(layout, 2).replicated(0)
    with devices.held():
        pending = PendingDigests(
            StateReader(layout, tensors), [ShardRange(number, shard, 0, shard.runs.total)]
        )
        with pytest.raises(
            DeadlineExceeded, match=r"digests of tensors on devices did not end within 0\.1 s"
        ):
            pending.get(0.1)
    assert len(pending.get(60)) == 1
