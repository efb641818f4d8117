"""What a checkpoint holds, as the state it would load to, without the data of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.state import Rebuilder, SavedTensor, leaves, own_view, rebuild

__all__ = ["Outline", "outline"]


@dataclass(frozen=True)
class Outline:
    """A state without data.

    Attributes:
        state: As it was saved, its tensors on the meta device; of plain files, tensors by name.
        stored: Name of the stored tensor by the meta storage that stands for it.
    """

    state: Any
    stored: Mapping[int, str]

    def stored_of(self, tensor: Tensor) -> str:
        """Returns which stored tensor a tensor of the state stands for; complex128 is stored as pairs."""
        return self.stored[tensor.untyped_storage()._cdata]


def outline(
    manifest: Manifest, rank: int, size: int, load: Callable[[Sequence[str]], Mapping[str, Tensor]]
) -> Outline:
    """Puts a state together without the data of its tensors.

    Args:
        manifest: The checkpoint.
        rank: Whose own values are wanted.
        size: Number of ranks.
        load: Loads stored tensors, on all ranks; called once, with those that plain values are made of.

    Raises:
        ManifestError: The checkpoint is malformed.
    """
    metas: dict[str, Tensor] = {}
    for entry in manifest.tensors:
        dtype, shape = torch_spec(entry)
        metas[entry.name] = torch.empty(shape, dtype=dtype, device="meta")
    stored = {tensor.untyped_storage()._cdata: name for name, tensor in metas.items()}
    if manifest.structure is None:
        return Outline(metas, stored)
    structure = own_view(manifest.structure, rank, size).structure
    if manifest.format != "fastload":
        from fastload.formats.refused import without_refused

        structure = without_refused(structure, [])
    values = {saved.stored: saved for saved in leaves(structure) if saved.kind in ("ndarray", "json")}
    data = load(sorted(values))
    exact = {**metas, **{name: _as_stored(saved, data[name]) for name, saved in values.items()}}
    return Outline(rebuild(structure, Rebuilder(exact)), stored)


def _as_stored(saved: SavedTensor, tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if saved.is_complex128 and tensor.is_complex() else tensor
