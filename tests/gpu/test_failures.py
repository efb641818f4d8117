"""Ranks that die and calls that fail between devices: the others hear of it in time, and load again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fastload
from fastload.base.devices import poll
from fastload.transfer import communicators, device_transport
from fastload.transfer.communicators import Communicators, CommunicatorSet
from tests.dist.patience import patient
from tests.dist.test_sharded_failures import before_reads
from tests.gpu.devices import Devices, on_devices

_LENGTH = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(_LENGTH)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def options(**more: Any) -> fastload.LoadOptions:
    return fastload.LoadOptions(
        **{"strategy": "allgather", "chunk_bytes": 50_000, "timeout_s": patient(3.0), **more}
    )


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def require_quiet(*but: str) -> None:
    """Requires that no thread of fastload's is at work, but those of some names."""
    deadline = time.monotonic() + patient(10.0)
    names = ["?"]
    while names:
        names = [one.name for one in threading.enumerate() if one.name.startswith("fastload-")]
        names = [name for name in names if name not in but]
        assert time.monotonic() < deadline, f"threads that never end: {names}"
        time.sleep(0.05)


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4, dies={1: signal.SIGKILL})
def test_a_rank_is_killed(devices: Devices, rank: int, world: int, path: Path) -> None:
    """Its peers' collectives never end; no watchdog ends their processes, and nothing waits for ever."""
    fastload.load(path, device=devices.device, options=options())  # makes the communicators
    with pytest.MonkeyPatch.context() as patch:
        num_reads = 0

        def die_later(*_: object) -> None:
            nonlocal num_reads
            num_reads += 1
            if rank == 1 and num_reads == 5:
                die()

        before_reads(patch, die_later)
        if devices.emulated:  # a backend that cannot abort; with NCCL, processes of stuck kernels never end
            patch.setattr(CommunicatorSet, "drop", lambda made: None)
        with pytest.raises(fastload.PeerError, match="rank 1"):
            fastload.load(path, device=devices.device, options=options())
    time.sleep(0.5)  # a watchdog would act now
    if devices.mode != "one queue":  # in which a stuck device is stuck for all
        assert torch.ones(3, device=devices.device).sum().item() == 3
    require_quiet()


@pytest.mark.slow(but=["False"])
@on_devices(4, ranks_per_host=2, dies={3: signal.SIGKILL})
@pytest.mark.parametrize("sharded", [False, True])
def test_survivors_load_again(
    devices: Devices, rank: int, world: int, path: Path, tmp_path: Path, sharded: bool
) -> None:
    """Communicators of two axes, or of several groups, are aborted at once; their devices are free again."""
    group = dist.new_group([0, 1, 2])
    mesh = dist.device_mesh.init_device_mesh(devices.device.type, (2, 2))

    def into() -> dict[str, torch.Tensor]:
        if not sharded:
            return {"a": torch.zeros(_LENGTH, dtype=torch.int64, device=devices.device)}
        placements = [dist.tensor.Replicate(), dist.tensor.Shard(0)]
        return {"a": devices.cut(torch.zeros(_LENGTH, dtype=torch.int64), mesh, placements)}

    strategy = "auto" if sharded else "allgather"
    fastload.load(path, into=into(), options=options(strategy=strategy))
    with pytest.MonkeyPatch.context() as patch:
        num_starts = 0
        start: Callable[..., None] = device_transport._BackendTransport.start

        def die_later(*arguments: Any) -> None:
            nonlocal num_starts
            num_starts += 1
            if rank == 3 and num_starts == 4:
                die()
            start(*arguments)

        patch.setattr(device_transport._BackendTransport, "start", die_later)
        with pytest.raises(fastload.PeerError, match="rank 3"):
            fastload.load(path, into=into(), options=options(strategy=strategy))
    require_quiet()
    for stream in [torch.accelerator.current_stream(), *(torch.Stream(devices.device) for _ in range(4))]:
        poll(stream.record_event().query, "what is left on the device", patient(10.0))
    found = fastload.load(path, device=devices.device, process_group=group, options=options())
    assert torch.equal(found["a"].cpu(), torch.arange(_LENGTH))
    time.sleep(0.3)  # a monitor would act now
    require_quiet()


@pytest.mark.slow(but=["once connected"])
@on_devices(2, dies={1: signal.SIGKILL})
@pytest.mark.parametrize("when", ["before it comes", "once all have come", "once connected"])
def test_a_rank_is_killed_while_they_connect(
    devices: Devices, rank: int, world: int, path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if rank == 1:
        connect: Callable[..., Any] = Communicators.connect

        def die_connected(*arguments: Any) -> None:
            connect(*arguments)
            die()

        if when == "before it comes":
            monkeypatch.setattr(communicators, "_meet", die)
        elif when == "once all have come":
            monkeypatch.setattr(communicators, "_make_backend", die)
        else:
            monkeypatch.setattr(Communicators, "connect", die_connected)
    with pytest.raises(fastload.PeerError, match="rank 1"):
        fastload.load(path, device=devices.device, options=options())
    # What makes a communicator, and what aborts it, wait for all ranks, and cannot be interrupted.
    require_quiet(*(("fastload-call", "fastload-down") if when == "once all have come" else ()))
    assert torch.ones(3, device=devices.device).sum().item() == 3


@on_devices(4, ranks_per_host=2)
def test_a_call_that_fails_leaves_nothing_open(
    devices: Devices, rank: int, world: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of several calls that are to be launched together, on one rank."""
    broadcast: Callable[..., Any] = communicators.broadcast
    is_broken = rank == 2

    def break_once(*arguments: Any) -> Any:
        nonlocal is_broken
        if is_broken:
            is_broken = False
            raise RuntimeError("an odd error of the backend")
        return broadcast(*arguments)

    monkeypatch.setattr(device_transport, "broadcast", break_once)
    with pytest.raises(fastload.FastloadError, match="odd error"):
        fastload.load(path, device=devices.device, options=options(strategy="broadcast"))
    devices.check_group()
    for strategy in ("broadcast", "allgather"):
        found = fastload.load(path, device=devices.device, options=options(strategy=strategy))
        assert torch.equal(found["a"].cpu(), torch.arange(_LENGTH))
    devices.check_group()


@on_devices(1)
def test_a_call_that_fails_closes_the_group_of_its_thread(devices: Devices, rank: int, world: int) -> None:
    """Else whatever the thread called later, on any communicator, would never be launched."""
    first, second = (
        communicators._make_backend(devices.backend, dist.HashStore(), 0, 1, devices.device) for _ in range(2)
    )

    def fail() -> None:
        raise RuntimeError("an odd error of the backend")

    with pytest.raises(RuntimeError, match="odd error"):
        device_transport._coalesced(first, [fail])
    ones, gathered = torch.ones(3, device=devices.device), torch.zeros(3, device=devices.device)
    communicators.join_stream(second, communicators.all_gather(second, ones, gathered))
    assert gathered.tolist() == [1, 1, 1]
    first.abort()
    second.abort()


@pytest.mark.slow(but=["1-ranks"])
@on_devices(1, 2, only_emulated=True)
def test_a_device_that_does_not_go_on(devices: Devices, rank: int, world: int, path: Path) -> None:
    """The caller's own kernels never end, as those of CUDA do: loads and saves say so in time."""
    with devices.held():
        with pytest.raises(fastload.FastloadError, match="the copies of round 0 to devices did not end"):
            fastload.load(path, device=devices.device, options=options(strategy="direct", timeout_s=1.0))
        state = {"a": torch.ones(100, device=devices.device)}
        with pytest.raises(fastload.FastloadError, match="the work queued on emu"):
            fastload.save(state, path.with_name("saved"), options=fastload.SaveOptions(timeout_s=1.0))
    devices.check_group()
