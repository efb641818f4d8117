"""Loads and saves of Megatron Core's sharded states on several hosts: TP 2 × DP, by fastload and by Megatron.

They need Megatron Core: ``PYTHONPATH=$(tests/megatron/setup)``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench_parts.baselines import State
from bench_parts.lab_arms import Arm, Places
from fastload import LoadOptions, SaveOptions, SaveReport

LAYOUT = "megatron"


def load_arms() -> list[Arm]:
    """Returns the ways to load into the module of `Places`, whose parameters are DTensors on DP × TP."""
    return [
        Arm("Megatron Core (mount)", load_by_megatron, reads="mount"),
        Arm("fastload megatron", load_by_fastload),
    ]


def load_by_megatron(places: Places) -> State:
    from megatron.core import dist_checkpointing

    torch.cuda.synchronize = lambda *_: None  # there is none
    torch.cuda.current_device = lambda: "cpu"  # type: ignore
    loaded: State = dist_checkpointing.load(_state_of(places.target), f"{places.folder}/dcp")
    return loaded


def load_by_fastload(places: Places) -> State:
    from fastload.integrations import megatron

    options = LoadOptions(on_report=lambda report: places.reports.append(report.to_dict()))
    url = f"{places.http}/safetensors"
    loaded: State = megatron.load(_state_of(places.target), url, options=options)
    return loaded


class Save:
    """Saves a state of DTensors on DP × TP as Megatron's.

    Args:
        writers: How many of the ranks write.
    """

    def __init__(self, writers: int) -> None:
        self._writers = writers

    def __call__(self, state: Mapping[str, Tensor], url: str) -> SaveReport:
        from fastload.integrations import megatron

        reports: list[SaveReport] = []
        options = SaveOptions(writers=self._writers, on_report=reports.append)
        megatron.save(sharded(state), url, options=options)
        return reports[0]


def make_megatrons(folder: Path) -> None:
    """Makes a directory of DCP one of Megatron's."""
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backends | common))
    torch.save({}, folder / "common.pt")


def sharded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DTensors, replicated over the first dimension of their mesh, as Megatron's sharded tensors."""
    from megatron.core.dist_checkpointing import ShardedTensor

    found = {}
    for name, tensor in state.items():
        mesh: Any = tensor.device_mesh
        replica, part = mesh.get_coordinate()
        local, rows = tensor.to_local(), tensor.shape[0]
        first = min(rows, part * -(-rows // mesh.size(1)))  # as torch cuts them, evenly or not
        offset = (first, *(0,) * (tensor.dim() - 1))
        shapes = tuple(local.shape), tuple(tensor.shape)
        found[name] = ShardedTensor(name, local, local.dtype, *shapes, offset, None, replica)
    return found


def _state_of(module: nn.Module | None) -> dict[str, Any]:
    assert module is not None
    return sharded(dict(module.named_parameters()))
