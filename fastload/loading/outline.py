"""The state in a checkpoint, without the data of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastload.formats.decoder import StateDecoder, decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.state import SavedTensor, leaves
from fastload.loading.selection import RankView


class _Gap:
    def __repr__(self) -> str:
        return "a value that cannot be loaded here"


GAP: Any = _Gap()
"""Stands in a state for a value that cannot be loaded here."""


@dataclass(frozen=True)
class Outline:
    """A state without data.

    Attributes:
        state: The saved state with tensors on the meta device; without a structure, tensors by name. `GAP`
            stands for values that this rank cannot load.
        stored: Names of stored tensors, by the meta storage that stands for each.
        left_out: A line for each gap.
    """

    state: Any
    stored: Mapping[int, str]
    left_out: Sequence[str] = ()

    def stored_of(self, tensor: Tensor) -> str:
        """Returns the name of the stored tensor for a tensor of the state. Complex128 is stored as pairs."""
        return self.stored[tensor.untyped_storage()._cdata]


def outline(
    manifest: Manifest, rank: int, size: int, load: Callable[[Sequence[str]], Mapping[str, Tensor]]
) -> Outline:
    """Builds the state without the data of its tensors.

    Args:
        manifest: The checkpoint.
        rank: This rank.
        size: Number of ranks.
        load: Loads stored tensors on all ranks; called once, with those of plain values.

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
    view = RankView.of(manifest, rank, size)
    structure = view.manifest.structure
    left_out = [f"{name}: each of {num} ranks has its own" for name, num in view.own.elsewhere]
    left_out += view.own.refused
    values = {saved.stored: saved for saved in leaves(structure) if saved.kind in ("ndarray", "json")}
    data = load(sorted(values))
    exact = {**metas, **{name: _as_stored(saved, data[name]) for name, saved in values.items()}}
    return Outline(decode_state(structure, StateDecoder(exact, gap=GAP)), stored, left_out)


def _as_stored(saved: SavedTensor, tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if saved.is_complex128 and tensor.is_complex() else tensor
