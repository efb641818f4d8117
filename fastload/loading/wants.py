"""Where each stored tensor goes: what is read of it is copied from there to wherever else it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from fastload.base.memory import allocate, byte_view
from fastload.errors import ManifestError, MismatchError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.state import SavedTensor
from fastload.geometry.box import Box
from fastload.geometry.dtensors import empty_like, is_dtensor, local_of, local_parts
from fastload.loading.pieces import Sources
from fastload.loading.place import Destination

__all__ = ["Arrivals", "Wants", "castable", "entry_of", "identity", "materialize", "target_dtype"]


@dataclass(frozen=True)
class Arrivals:
    """Where what is wanted will be.

    Attributes:
        destinations: In the order of the bytes, see `Sources`.
        copies: Pairs of a tensor and the one to copy it from, once that is there.
        new: New tensors, by stored name.
        exact: Those of them that have the stored dtype whatever was to be cast, by stored name.
    """

    destinations: list[Destination]
    copies: list[tuple[Tensor, Tensor]]
    new: dict[str, Tensor]
    exact: dict[str, Tensor]

    def copy(self) -> None:
        """Takes what has been read to where else it is wanted."""
        for target, source in self.copies:
            target = target.detach()
            if target.is_complex() and not source.is_complex():
                source = torch.view_as_complex(source)
            is_alike = target.dtype == source.dtype and target.shape == source.shape
            if is_alike and _is_plain(target) and _is_plain(source):
                byte_view(target).copy_(byte_view(source))
            else:
                target.copy_(source)


class Wants:
    """Collects what is wanted of a checkpoint.

    Args:
        manifest: The checkpoint.
        device: Where new tensors live.
        dtype: Cast of floating point tensors, or None for none.
    """

    def __init__(self, manifest: Manifest, device: torch.device, dtype: torch.dtype | None) -> None:
        self._manifest = manifest
        self._device = device
        self._dtype = dtype
        self._places: dict[str, list[Tensor]] = {}
        self._parts: dict[str, dict[Box, list[Tensor]]] = {}
        self._later: list[tuple[Tensor, Tensor]] = []
        self._new: dict[tuple[str, torch.dtype], Tensor] = {}

    def fill(self, saved: SavedTensor, tensor: Tensor) -> None:
        """Wants one in a tensor that is there, and that it fits: what this rank holds of it."""
        for box, part in local_parts(tensor):
            is_whole = box.sizes == tensor.shape
            if saved.is_complex128:
                box, part = Box((*box.offsets, 0), (*box.sizes, 2)), self._real_view(part)
            if is_whole:
                places = self._places.setdefault(saved.stored, [])
            else:
                places = self._parts.setdefault(saved.stored, {}).setdefault(box, [])
            if not places or identity(part) not in map(identity, places):
                places.append(part)

    def _real_view(self, tensor: Tensor) -> Tensor:
        """Views complex numbers as pairs; where torch negates what it reads, those of a stand-in."""
        if not (tensor.is_conj() or tensor.is_neg()):
            return torch.view_as_real(tensor.detach())
        stand_in = allocate((*tensor.shape, 2), torch.float64, tensor.device)
        self._later.append((tensor, stand_in))
        return stand_in

    def make(self, saved: SavedTensor, *, exact: bool) -> Tensor:
        """Wants one in a new tensor, the same whoever wants it.

        Args:
            saved: What is wanted.
            exact: Whether it is to be as it was stored.

        Raises:
            MismatchError: It cannot be cast.
            MemoryError: There is no room for it.
        """
        return self._make(entry_of(self._manifest, saved), exact=exact)

    def make_like(self, saved: SavedTensor, like: Tensor) -> Tensor:
        """Wants one, as it was stored, in a new DTensor that is placed like another of its shape.

        Raises:
            MemoryError: There is no room for it.
        """
        stored, _ = torch_spec(entry_of(self._manifest, saved))
        tensor = empty_like(like, like.device, torch.complex128 if saved.is_complex128 else stored)
        self.fill(saved, tensor)
        return tensor

    def make_all(self) -> None:
        """Wants all that is stored in new tensors; see `make`."""
        for entry in self._manifest.tensors:
            self._make(entry, exact=False)

    def make_together(self, together: Mapping[str, Sequence[str]]) -> set[str]:
        """Wants what the other ranks have of their own where this one wants what it has of its own.

        So all ranks want the same. Returns the names of what nobody here wants otherwise.
        """
        own = [name for name in together if name in self._places]
        others = {other for name in own for other in together[name]} - self._places.keys()
        for name in sorted(others):
            self.make(SavedTensor(name, name), exact=True)
        return others

    def _make(self, entry: TensorEntry, *, exact: bool) -> Tensor:
        stored, shape = torch_spec(entry)
        target = stored if exact else target_dtype(stored, self._dtype)
        tensor = self._new.get((entry.name, target))
        if tensor is None:
            if not castable(stored, target):
                line = f"{entry.name}: torch cannot cast {stored} to {target}"
                raise MismatchError(line, mismatched=(line,))
            tensor = self._new[entry.name, target] = allocate(shape, target, self._device)
            self._places.setdefault(entry.name, []).append(tensor)
        return tensor

    def arrivals(self) -> Arrivals:
        """Decides where each tensor is read to."""
        sources = Sources(self._manifest)
        copies: list[tuple[Tensor, Tensor]] = []
        new: dict[str, Tensor] = {}
        exact: dict[str, Tensor] = {}
        for entry in self._manifest.tensors:
            wanted = self._wanted_of(entry.name)
            if not wanted:
                continue
            stored, _ = torch_spec(entry)
            for box, places in wanted:
                # What is copied from must not have been cast.
                first = places[0]
                if len(places) > 1:
                    first = next((place for place in places if place.dtype == stored), first)
                    copies += [(place, first) for place in places if place is not first]
                sources.add(entry, stored, first, box)
            if not self._new:
                continue
            cast = self._new.get((entry.name, target_dtype(stored, self._dtype)))
            if cast is not None:
                new[entry.name] = cast
            if (entry.name, stored) in self._new:
                exact[entry.name] = self._new[entry.name, stored]
        return Arrivals(sources.destinations(), [*sources.copies, *copies, *self._later], new, exact)

    def _wanted_of(self, name: str) -> list[tuple[Box | None, list[Tensor]]]:
        """Returns where a stored tensor is wanted: all of it, and boxes of it."""
        whole = self._places.get(name)
        parts = self._parts.get(name, {})
        return [*([] if whole is None else [(None, whole)]), *((box, parts[box]) for box in sorted(parts))]


def entry_of(manifest: Manifest, saved: SavedTensor) -> TensorEntry:
    """Returns what a checkpoint says of a tensor.

    Raises:
        ManifestError: It has no such tensor.
    """
    entry = manifest.by_name.get(saved.stored)
    if entry is None:
        raise ManifestError(f"the structure of the state: there is no tensor {saved.stored[:200]!r}")
    return entry


def identity(tensor: Tensor) -> object:
    """Tells tied tensors: the same object, or the same bytes."""
    if is_dtensor(tensor) and not tensor.is_meta:
        # Also where this rank holds nothing: what is tied is so on all ranks.
        local = local_of(tensor)
        address = local.untyped_storage()._cdata, local.storage_offset()
        return (*address, tuple(local.shape), local.stride(), tuple(tensor.shape))
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


def target_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Returns what a stored dtype becomes where floating point is cast."""
    return dtype if dtype is not None and stored.is_floating_point else stored


@cache
def castable(stored: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch can cast what is stored."""
    if stored == target:
        return True
    try:
        torch.zeros(1, dtype=torch.uint8).expand(stored.itemsize).clone().view(stored).to(target)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def materialize(meta: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor, or a Parameter, with memory in place of one that has none."""
    tensor = empty_like(meta, device) if is_dtensor(meta) else allocate(meta.shape, meta.dtype, device)
    if not isinstance(meta, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=meta.requires_grad)
    for name, value in meta.__dict__.items():
        parameter.__dict__.setdefault(name, value)  # a DTensor has its local tensor there
    return parameter


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
