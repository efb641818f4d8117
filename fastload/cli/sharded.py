"""``--mesh 2x4 --placements 'replicate,shard(0)'``: the tensors of a checkpoint as DTensors of the job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fastload.base.devices import is_accelerator
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import TensorEntry

if TYPE_CHECKING:  # it takes long to import, and only a sharded load needs it
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["Sharding", "sharding_of"]


@dataclass(frozen=True)
class Sharding:
    """How all tensors are laid out on a mesh of all ranks.

    Attributes:
        mesh: Ranks in each dimension of the mesh.
        cut: For each of these dimensions, the one of the tensors that it cuts; None if it replicates.
    """

    mesh: tuple[int, ...]
    cut: tuple[int | None, ...]

    @classmethod
    def parse(cls, mesh: str, placements: str, num_ranks: int) -> Sharding:
        """Reads what the options say.

        Args:
            mesh: Such as ``8`` or ``2x4``.
            placements: One for each dimension of the mesh, such as ``replicate,shard(0)``.
            num_ranks: Ranks of the job, all of which the mesh is to have.

        Raises:
            OptionError: They cannot be used.
        """
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", mesh):
            raise OptionError(f"mesh={mesh!r} is not written as 8 or 2x4")
        sizes = tuple(map(int, mesh.split("x")))
        cut = tuple(_cut(word.strip().lower()) for word in placements.split(","))
        if len(cut) != len(sizes):
            raise OptionError(
                f"placements={placements!r} are {len(cut)}, dimensions of mesh={mesh!r} are {len(sizes)}"
            )
        if prod(sizes) != num_ranks:
            raise OptionError(f"mesh={mesh!r} has {prod(sizes)} ranks, the job has {num_ranks}")
        return cls(sizes, cut)

    def placements(self, num_dims: int) -> tuple[Placement, ...]:
        """Returns those of a tensor: what would cut a dimension that it lacks replicates it."""
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Replicate() if dim is None or dim >= num_dims else Shard(dim) for dim in self.cut)

    def empty(self, entries: Iterable[TensorEntry], device: str) -> dict[str, DTensor]:
        """Makes this rank's part of each tensor, without contents, by name; all ranks of the job call it.

        Args:
            entries: The tensors.
            device: Where this rank's parts go.

        Raises:
            ManifestError: A tensor has a dtype that torch lacks.
        """
        from torch.distributed import tensor

        target = torch.device(device)
        if is_accelerator(target):
            torch.accelerator.set_device_index(target)
        mesh = dist.init_device_mesh(target.type, self.mesh)
        empty = {}
        for entry in entries:
            dtype, shape = torch_spec(entry)
            placements = self.placements(len(shape))
            empty[entry.name] = tensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
        return empty


def sharding_of(mesh: str | None, placements: str | None) -> Sharding | None:
    """Reads the two options for the ranks of this job; None if neither is given.

    Raises:
        OptionError: They cannot be used; see `Sharding.parse`.
    """
    if mesh is None and placements is None:
        return None
    if mesh is None or placements is None:
        raise OptionError("mesh and placements go together: one of them is not given")
    if not dist.is_initialized():
        raise OptionError(f"mesh={mesh!r}: there are no ranks of a torchrun or srun job")
    return Sharding.parse(mesh, placements, dist.get_world_size())


def _cut(placement: str) -> int | None:
    if placement == "replicate":
        return None
    if placement.startswith("partial"):
        raise OptionError(f"placement {placement!r}: checkpoints hold whole values, not partial sums")
    shard = re.fullmatch(r"shard\((\d+)\)", placement)
    if shard is None:
        raise OptionError(f"placement {placement!r} is neither replicate nor shard(DIMENSION)")
    return int(shard[1])
