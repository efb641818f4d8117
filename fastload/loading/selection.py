"""A checkpoint as one rank sees it: its view of the state, selected names, the state without data."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastload.formats.decoder import StateDecoder, decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.names import OWN_STEM
from fastload.formats.state import (
    NO_VALUE,
    OWN_PREFIX,
    OwnView,
    SavedTensor,
    leaves,
    own_view,
    with_replaced,
)
from fastload.formats.untrusted import show
from fastload.options import PerRankMismatch

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class RankView:
    """A checkpoint as one rank sees it.

    Attributes:
        manifest: With the structure for this rank.
        own: What is its own of it, and what it cannot load.
        has_own: Whether any rank has values of its own.
    """

    manifest: Manifest
    own: OwnView
    has_own: bool

    @classmethod
    def of(cls, manifest: Manifest, rank: int, size: int, on_mismatch: PerRankMismatch = "error") -> RankView:
        """Returns the view of a rank in a group of some size; see `own_view`.

        Raises:
            ManifestError: The structure of the checkpoint is malformed.
        """
        structure = manifest.structure
        has_own = structure is not None and any(file.name.startswith(OWN_STEM) for file in manifest.files)
        if structure is None or (manifest.format == "fastload" and not has_own):
            return cls(manifest, OwnView(structure), False)
        of_rank = own_view(structure, rank, size, on_mismatch)
        return cls(replace(manifest, structure=of_rank.structure), of_rank, has_own)

    @property
    def has_gaps(self) -> bool:
        """Whether its structure has places without a value."""
        return bool(self.own.elsewhere or self.own.refused)

    @property
    def left_out(self) -> tuple[str, ...]:
        """A line for each place without a value and each value that cannot be loaded."""
        return *(name for name, _ in self.own.elsewhere), *self.own.refused

    def select(self, names: Sequence[str] | str) -> Selection:
        """Selects tensors by names and patterns."""
        return Selection(names, self)


class Selection:
    """The tensors that ``names=`` selects; see `fastload.load`.

    Attributes:
        chosen: The selected tensors by name, tied ones by each name.
        absent: Names and patterns that select nothing.
    """

    def __init__(self, names: Sequence[str] | str, view: RankView) -> None:
        wanted = [names] if isinstance(names, str) else list(names)
        known = _tensors_by_name(view.manifest)
        # What looks like a pattern is a name first.
        self._exact = {name for name in wanted if name in known or not _GLOB.search(name)}
        self._patterns = {
            name: _pattern(name, view.has_own).match for name in wanted if name not in self._exact
        }
        self.chosen = {name: saved for name, saved in known.items() if self(name)}
        self.absent = [
            name
            for name in dict.fromkeys(wanted)
            if not (name in known or (name in self._patterns and any(map(self._patterns[name], known))))
        ]

    def __call__(self, name: str) -> bool:
        """Whether it selects a name."""
        return name in self._exact or any(fits(name) for fits in self._patterns.values())

    def has(self, saved: SavedTensor) -> bool:
        """Whether it selects a tensor, by either of its names."""
        return self(saved.own_name) or self(saved.name)


def _tensors_by_name(manifest: Manifest) -> dict[str, SavedTensor]:
    """Returns all tensors by all of their names, tied ones by each name."""
    tensors = {entry.name: SavedTensor(entry.name, entry.name) for entry in manifest.tensors}
    if manifest.structure is not None:
        seen: set[str] = set()
        for saved in (saved for saved in leaves(manifest.structure) if not saved.is_text):
            if saved.stored not in seen:  # the first one it is stored for: it may be stored as name~2
                tensors[saved.stored] = saved
            seen.add(saved.stored)
            tensors.setdefault(saved.name, saved)
    return tensors


def _pattern(glob: str, has_own: bool) -> re.Pattern[str]:
    """Compiles a pattern. It matches the ranks' own tensors only if it begins like their names."""
    leaves_out_own = has_own and not glob.startswith(OWN_PREFIX)
    return re.compile((f"(?!{OWN_PREFIX})" if leaves_out_own else "") + fnmatch.translate(glob))


# The state without the data of its tensors


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
    coded: list[str] = []

    def leave_out(payload: Any) -> Any:
        coded.append(f"a value of an extension: {show(payload)}")
        return NO_VALUE

    structure = with_replaced(view.manifest.structure, {"coded": leave_out})
    left_out = [*coded, *(f"{name}: each of {num} ranks has its own" for name, num in view.own.elsewhere)]
    left_out += view.own.refused
    values = {saved.stored: saved for saved in leaves(structure) if saved.kind in ("ndarray", "json")}
    data = load(sorted(values))
    exact = {**metas, **{name: _as_stored(saved, data[name]) for name, saved in values.items()}}
    return Outline(decode_state(structure, StateDecoder(exact, gap=GAP)), stored, left_out)


def _as_stored(saved: SavedTensor, tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if saved.is_complex128 and tensor.is_complex() else tensor
