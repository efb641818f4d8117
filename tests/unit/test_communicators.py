"""How communicators of NCCL are made, by the version of torch; what NCCL does with them needs a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastload.transfer import communicators

_VARIABLES = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


class Nccl:
    """Stands for torch's backend, which torch has on machines with GPUs only."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None, max_ctas=None)

    def __init__(self, store: Any, rank: int, size: int, options: Nccl.Options) -> None:
        self.blocking = options.config.blocking
        self.environment = [os.environ.get(variable) for variable in _VARIABLES]

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device


@pytest.mark.parametrize(
    ("version", "blocking"), [((2, 6), None), ((2, 9), None), ((2, 10), 0), ((2, 13), 0)]
)
def test_communicators_of_nccl(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], blocking: int | None
) -> None:
    """Those that do not block hang at random before torch 2.10. None has a watchdog."""
    monkeypatch.setattr(communicators, "_TORCH", version)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv(_VARIABLES[1], "3")
    monkeypatch.delenv(_VARIABLES[0], raising=False)
    device = torch.device("cuda", 1)
    made = communicators._make_backend("nccl", dist.HashStore(), 0, 2, device)
    assert made.blocking == blocking
    assert made.environment == ["1", "0"]
    assert made.connected == device
    assert [os.environ.get(variable) for variable in _VARIABLES] == [None, "3"]
