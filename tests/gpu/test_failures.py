"""Ranks that die in the middle of an exchange between devices: the others hear of it, in time, and live."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fastload
from fastload.transfer.communicators import CommunicatorSet
from tests.dist.patience import patient
from tests.dist.test_sharded_failures import before_reads
from tests.gpu.devices import Devices, on_devices


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(1_000_000)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@on_devices(2, 4, dies={1: signal.SIGKILL})
def test_a_rank_is_killed(devices: Devices, rank: int, world: int, path: Path) -> None:
    """Its peers' collectives never end; no watchdog ends their processes, and nothing waits for ever."""
    timeout_s = patient(3.0)
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=50_000, timeout_s=timeout_s)
    fastload.load(path, device=devices.device, options=options)  # makes the communicators
    with pytest.MonkeyPatch.context() as patch:
        num_reads = 0

        def die(*_: object) -> None:
            nonlocal num_reads
            num_reads += 1
            if rank == 1 and num_reads == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        before_reads(patch, die)
        patch.setattr(CommunicatorSet, "drop", lambda made: None)  # a backend that cannot abort
        with pytest.raises(fastload.PeerError, match="rank 1"):
            fastload.load(path, device=devices.device, options=options)
    time.sleep(0.5)  # a watchdog would act now
    assert torch.ones(3, device=devices.device).sum().item() == 3
    deadline = time.monotonic() + patient(10.0)
    while any(thread.name == "fastload-events" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread waits for a round that will never end"
        time.sleep(0.05)
