"""A checkpoint of which each rank of a job holds a share: what is converted need not fit into any of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastload.formats.decoder import decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.state import leaves, own_view, raise_refused
from fastload.geometry.box import Box
from fastload.loading.checkpoint import Checkpoint

if TYPE_CHECKING:  # it takes long to import
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Share", "Shares", "load_shares", "num_ranks"]

_SMALL_BYTES = 1 << 20  # what each rank may have as a whole

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """What this rank has of a tensor.

    Attributes:
        entry: The tensor.
        box: What of it.
        tensor: The elements, of the dtype that is stored; contiguous.
        dim: Which dimension is cut between the ranks; None if all of them have all of it.
    """

    entry: TensorEntry
    box: Box
    tensor: Tensor
    dim: int | None


@dataclass(frozen=True)
class Shares:
    """A checkpoint, in shares.

    Attributes:
        structure: Of the state; None if it is a dict of the tensors by name.
        tensors: What this rank has of each stored tensor.
    """

    structure: Any
    tensors: tuple[Share, ...]

    def state(self) -> Any:
        """Returns the state, with DTensors for what is cut; all ranks of the job call it."""
        from torch.distributed import tensor

        mesh: DeviceMesh | None = None
        found: dict[str, Tensor] = {}
        for share in self.tensors:
            found[share.entry.name] = share.tensor
            if share.dim is not None:
                mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
                whole = torch.empty(torch_spec(share.entry)[1], dtype=share.tensor.dtype, device="meta")
                found[share.entry.name] = tensor.DTensor.from_local(
                    share.tensor,
                    mesh,
                    [tensor.Shard(share.dim)],
                    run_check=False,
                    shape=whole.shape,
                    stride=whole.stride(),
                )
        return found if self.structure is None else decode_state(self.structure, found)


def num_ranks() -> int:
    """Returns how many ranks the job has; 1 without a job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def load_shares(checkpoint: Checkpoint, rank: int, size: int, *, strict: bool = True) -> Shares:
    """Loads a share of each tensor into this rank's memory; all ranks of the job call it.

    What ranks had of their own (`fastload.PerRank`) is left out.

    Args:
        checkpoint: Where from.
        rank: This rank.
        size: Number of ranks.
        strict: Whether all of it has to be loaded; else what cannot be is None in the state.

    Raises:
        ManifestError: Not all of it can be loaded, and `strict` is on.
        FastloadError: As for `fastload.load`.
    """
    manifest = checkpoint.manifest
    structure = _structure(manifest, strict=strict)
    whole, wanted = set[str](), {entry.name for entry in manifest.tensors}
    if structure is not None:
        found = leaves(structure)
        whole = {saved.stored for saved in found if saved.is_exact or saved.is_text}
        wanted &= {saved.stored for saved in found}
    shares = tuple(
        _share(entry, rank, 1 if entry.name in whole else size)
        for entry in manifest.tensors
        if entry.name in wanted
    )
    checkpoint.read({share.entry.name: [(share.box, share.tensor)] for share in shares})
    return Shares(structure, shares)


def _structure(manifest: Manifest, *, strict: bool) -> Any:
    if manifest.structure is None:
        return None
    view = own_view(manifest.structure, 0, 0)
    if strict:
        raise_refused(
            manifest.url, view.refused, advice="--no-strict leaves these out, and converts the rest"
        )
    if view.elsewhere:
        _log.warning("%s: left out: %s", manifest.url, ", ".join(name for name, _ in view.elsewhere))
    for line in view.refused:
        _log.warning("%s: left out: %s", manifest.url, line)
    return view.structure


def _share(entry: TensorEntry, rank: int, size: int) -> Share:
    """Cuts a tensor as torch does it: along its first dimension that is long enough."""
    dtype, shape = torch_spec(entry)
    if size == 1 or entry.nbytes < _SMALL_BYTES:
        return Share(entry, Box.whole(shape), torch.empty(shape, dtype=dtype), None)
    dim = next((dim for dim, length in enumerate(shape) if length >= size), shape.index(max(shape)))
    length = -(-shape[dim] // size)
    begin = min(rank * length, shape[dim])
    sizes = (*shape[:dim], min(length, shape[dim] - begin), *shape[dim + 1 :])
    offsets = tuple(begin if each == dim else 0 for each in range(len(shape)))
    return Share(entry, Box(offsets, sizes), torch.empty(sizes, dtype=dtype), dim)
