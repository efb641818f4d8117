"""Several ranks on one CUDA device: what the switch changes, which can be seen without a device."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.dist import patience
from tests.dist.harness import ranks
from tests.gpu import devices, one_gpu


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(one_gpu.SWITCH, "1")


@ranks(2)
def test_each_rank_is_a_host_to_nccl(rank: int, world: int, switched_on: None) -> None:
    """On the first device, before its process makes a group."""
    made: list[dict[str, str]] = []

    def init_process_group(*_: Any, **__: Any) -> None:
        made.append(dict(os.environ))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices.dist, "init_process_group", init_process_group)
        patch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        with devices._entered("cuda", "", rank, world):
            pass
    assert [(found["NCCL_HOSTID"], found["CUDA_VISIBLE_DEVICES"]) for found in made] == [(f"rank{rank}", "3")]
    assert {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1"}.items() <= made[0].items()


@pytest.mark.usefixtures("switched_on")
def test_deadlines_are_stretched_and_one_device_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert one_gpu.num_gpus_for(4) == 1
    assert patience.crowd() == patience.stretch() == 3.0
    monkeypatch.delenv(one_gpu.SWITCH)
    assert one_gpu.num_gpus_for(4) == 4
    assert patience.crowd() == patience.stretch() == 1.0
