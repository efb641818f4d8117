"""Random sharded targets: states, meshes and placements, the same on all ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.dist.test_sharded import placed

__all__ = ["KINDS", "Target", "draw_state", "draw_target"]

KINDS = ("fsdp", "hsdp", "tp", "fsdp of tp", "pp of fsdp")
_SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 13, 16, 24, 31, 64, 101, 1009)
_DTYPES = (
    torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float64, torch.float8_e4m3fn,
    torch.int64, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
_MOST_ELEMENTS = 100_000


def draw_state(rng: random.Random, num_tensors: int) -> dict[str, Tensor]:
    """Draws plain tensors of any bits, also empty ones and scalars."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return {f"t{number}": _draw_tensor(rng, generator) for number in range(num_tensors)}


def _draw_tensor(rng: random.Random, generator: torch.Generator) -> Tensor:
    shape = rng.choices(_SIZES, k=rng.choice([0, 1, 1, 2, 2, 2, 3]))
    while prod(shape) > _MOST_ELEMENTS:
        shape[shape.index(max(shape))] = 3
    dtype = rng.choice(_DTYPES)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator).to(torch.uint8)
    return (raw % 2 == 1)[..., 0] if dtype == torch.bool else raw.view(dtype).reshape(shape)


@dataclass(frozen=True)
class Target:
    """What the ranks of a world are to hold.

    Attributes:
        kind: One of `KINDS`.
        shape: Of the mesh.
        placements: Of each tensor on it, or on the last of its dimensions.
        stages: Of each tensor, the stages of the pipeline that have it; empty without a pipeline.
        whole: The rank that has all tensors plain; -1 for none.
    """

    kind: str
    shape: tuple[int, ...]
    placements: Mapping[str, Sequence[Any]]
    stages: Mapping[str, Sequence[int]]
    whole: int

    def of(self, state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Returns what a rank is to hold in the end, in memory of its own."""
        mesh = _mesh(self.shape)  # which all ranks make together
        if rank == self.whole:
            return {name: tensor.clone() for name, tensor in state.items()}
        if self.stages:
            stage = mesh.get_local_rank(0)
            names = [name for name in state if stage in self.stages[name]]
            mesh = mesh["dim1"]
        else:
            names = list(state)
        return {name: placed(state[name].clone(), mesh, self.placements[name]) for name in names}


def draw_target(rng: random.Random, state: Mapping[str, Tensor], world: int) -> Target:
    """Draws a mesh, and how each tensor lies on it."""
    kind = rng.choice(KINDS)
    outer = rng.choice([size for size in range(1, world + 1) if world % size == 0])
    shape = (world,) if kind == "fsdp" else (outer, world // outer)
    return Target(
        kind,
        shape,
        {name: _draw_placements(rng, kind, tensor, shape) for name, tensor in state.items()},
        {name: sorted({rng.randrange(outer), rng.randrange(outer)}) for name in state}
        if kind == "pp of fsdp"
        else {},
        rng.randrange(world) if rng.random() < 0.2 else -1,
    )


def _draw_placements(rng: random.Random, kind: str, tensor: Tensor, shape: Sequence[int]) -> list[Any]:
    inner = rng.choice([Shard(0), Shard(0), Shard(1), Shard(2), Replicate()])
    if kind in ("fsdp", "pp of fsdp"):
        return [inner]
    if kind == "hsdp":
        return [Replicate(), Shard(0)]
    if kind == "tp":
        return [Replicate(), inner]
    is_even = tensor.dim() > 0 and tensor.shape[0] % prod(shape) == 0
    if is_even and inner == Shard(0) and shape[1] > 1:
        return [_StridedShard(0, split_factor=shape[1]), Shard(0)]
    return [Shard(0), inner]


@cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=[f"dim{number}" for number in range(len(shape))])
