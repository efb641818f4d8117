"""Puts ranges of what a rank wants into tensors: any dtype, device, layout, and cut anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from ctypes import memmove
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from fastload.base.devices import accelerators_of, copy_async, synchronize
from fastload.base.memory import allocate, byte_view, round_up, runs
from fastload.errors import ManifestError, MismatchError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.formats.state import SavedTensor
from fastload.geometry.box import Box, Runs, row_major, runs_of, strided_runs
from fastload.geometry.dtensors import empty_like, is_dtensor, local_of, local_parts, narrowed
from fastload.geometry.extents import Extent, Space


class Sources:
    """Takes what is wanted of tensors apart into what is wanted of each of their pieces.

    Args:
        manifest: The checkpoint.

    Attributes:
        copies: Pairs of a tensor and the one to copy it from, once that is there, in this order.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._manifest = manifest
        self._destinations: list[Destination] = []

    def add(self, entry: TensorEntry, stored: torch.dtype, tensor: Tensor, box: Box | None) -> None:
        """Wants a tensor of the checkpoint, or a box of it.

        Args:
            entry: The tensor.
            stored: Its dtype there, as torch has it.
            tensor: What receives it, of the shape of the box.
            box: What of it, not empty; None is all of it.
        """
        if not entry.pieces:
            runs = None
            if box is not None:
                runs = runs_of(box, torch_spec(entry)[1]).scaled(stored.itemsize)
            self._destinations.append(Destination(entry, stored, tensor, runs))
            return
        wanted = Box.whole(tensor.shape) if box is None else box
        for piece in entry.pieces:
            common = wanted.intersect(piece.box)
            if common is not None:
                view = narrowed(tensor.detach(), common.relative_to(wanted))
                self._add_piece(entry, stored, view, common.relative_to(piece.box), piece)

    def _add_piece(
        self, entry: TensorEntry, stored: torch.dtype, view: Tensor, within: Box, piece: Piece
    ) -> None:
        strides = piece.strides or row_major(piece.box.sizes)
        for dim, stride in enumerate(strides):
            if not stride and view.shape[dim] > 1:
                first = view.narrow(dim, 0, 1)
                self.copies.insert(0, (view.narrow(dim, 1, view.shape[dim] - 1), first))  # inner ones first
                view, within = first, Box(within.offsets, (*within.sizes[:dim], 1, *within.sizes[dim + 1 :]))
        # In the order of the file, the elements are those of the view that has its longest stride first.
        view = view.permute(sorted(range(view.dim()), key=lambda dim: -strides[dim]))
        runs = strided_runs(within, strides).scaled(stored.itemsize)
        is_all = runs == Runs(0, piece.nbytes, ())
        self._destinations.append(Destination(entry, stored, view, None if is_all else runs, piece))

    def destinations(self) -> list[Destination]:
        """Returns all that is wanted, in the order of `Manifest.extents`."""
        extents = self._manifest.extents
        if extents is not self._manifest.tensors:
            places = {id(extent): place for place, extent in enumerate(extents)}
            self._destinations.sort(key=lambda destination: places[id(destination.extent)])
        return self._destinations

    def copy(self) -> None:
        """Copies what was read once, and is there more than once."""
        for target, source in self.copies:
            target.copy_(source)


_SMALL_BYTES = 16 << 10  # below, to make two tensors takes longer than to copy the one into the other


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one tensor of the checkpoint, a piece of it, or what is wanted of either, goes.

    Attributes:
        entry: The tensor in the checkpoint.
        stored: Its dtype there, as torch has it.
        tensor: What receives it, in row-major order: another dtype means a cast; any strides; any device.
        runs: What is wanted, in bytes of `extent`; None is all of it.
        piece: Of which piece of the tensor; None if it has none.
    """

    entry: TensorEntry
    stored: torch.dtype
    tensor: Tensor
    runs: Runs | None = None
    piece: Piece | None = None

    @property
    def extent(self) -> TensorEntry | Piece:
        """Where it lies."""
        return self.entry if self.piece is None else self.piece

    @property
    def nbytes(self) -> int:
        """Bytes of what is wanted, as they are stored."""
        return self.extent.nbytes if self.runs is None else self.runs.total

    @property
    def is_plain(self) -> bool:
        """Whether bytes can be copied as they are."""
        lazy = self.tensor.is_conj() or self.tensor.is_neg()  # torch negates when it reads the bytes
        return self.tensor.dtype == self.stored and self.tensor.is_contiguous() and not lazy


class Placer:
    """Takes what a rank wants to its destinations.

    Args:
        destinations: Laid end to end, they are what the rank wants.
    """

    def __init__(self, destinations: Sequence[Destination]) -> None:
        # Detached, these keep the memory that is written to, whatever the caller does meanwhile.
        self._destinations = [
            Destination(d.entry, d.stored, d.tensor.detach(), d.runs, d.piece)
            for d in destinations
            if d.nbytes
        ]
        self._wanted = Space([Extent(d.extent.file, d.extent.offset, d.nbytes) for d in self._destinations])
        self._addresses = [_address(d) for d in self._destinations]
        self._shared = _overlapping(self._addresses, [d.nbytes for d in self._destinations])
        self._cut: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._devices = accelerators_of(d.tensor for d in self._destinations)

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns the memory that a range of what is wanted belongs to, flat uint8, piece by piece.

        None if that is more than `at_most` pieces, or if some of it is on a device, strided, cast, or also
        part of another destination: those bytes have to be placed.
        """
        indexes = self._wanted.within(start, nbytes)
        if len(indexes) > at_most:
            return None
        if not all(self._addresses[index] and index not in self._shared for index in indexes):
            return None
        pieces = self._wanted.cut(start, nbytes)
        return [byte_view(self._destinations[index].tensor)[begin:end] for index, begin, end in pieces]

    def place(self, start: int, data: Tensor) -> None:
        """Places a range of what is wanted; ranges may come in any order, each byte once.

        Args:
            start: First byte in what is wanted.
            data: The bytes, flat uint8, on any device.
        """
        source, starts = data.data_ptr() if data.is_cpu else 0, self._wanted.starts
        by_bytes = _SMALL_BYTES if torch.get_num_threads() > 1 else data.numel() + 1  # as `copy_flat`
        for index, begin, end in self._wanted.cut(start, data.numel()):
            offset = starts[index] + begin - start
            if source and self._addresses[index] and end - begin < by_bytes:
                memmove(self._addresses[index] + begin, source + offset, end - begin)
            else:
                destination = self._destinations[index]
                with torch.inference_mode() if destination.tensor.is_inference() else nullcontext():
                    self._place_piece(destination, begin, data[offset : offset + end - begin])

    def settle(self) -> None:
        """Returns once everything placed so far has left the buffers it came from."""
        for device in self._devices:
            synchronize(device)

    def _place_piece(self, destination: Destination, begin: int, piece: Tensor) -> None:
        if destination.is_plain:
            flat = byte_view(destination.tensor)[begin : begin + piece.numel()]
            if flat.is_cpu:
                flat.copy_(piece)  # `settle` does not wait for copies to host memory
            else:
                copy_async(piece, flat)
        else:
            self._place_elements(destination, begin, piece)

    def _place_elements(self, destination: Destination, begin: int, piece: Tensor) -> None:
        """Casts or scatters whole elements; the bytes of an element that is cut wait for its rest."""
        size = destination.stored.itemsize
        whole_begin = round_up(begin, size)
        whole_end = max(whole_begin, (begin + piece.numel()) // size * size)
        head = min(whole_begin - begin, piece.numel())
        self._place_cut_element(destination, begin, piece[:head])
        # A clone, since a view as another dtype needs memory aligned to it.
        elements = piece[head : head + whole_end - whole_begin].clone().view(destination.stored)
        _copy_elements(destination.tensor, whole_begin // size, elements)
        self._place_cut_element(destination, whole_end, piece[head + whole_end - whole_begin :])

    def _place_cut_element(self, destination: Destination, begin: int, piece: Tensor) -> None:
        """Keeps some bytes of one element until all of its bytes are here, in whatever order."""
        if piece.numel() == 0:
            return
        size = destination.stored.itemsize
        element, offset = divmod(begin, size)
        key = (id(destination), element)
        kept, num_kept = self._cut.pop(key, (torch.empty(size, dtype=torch.uint8, device="cpu"), 0))
        kept[offset : offset + piece.numel()] = piece.cpu()
        if num_kept + piece.numel() < size:
            self._cut[key] = (kept, num_kept + piece.numel())
        else:
            _copy_elements(destination.tensor, element, kept.view(destination.stored))


def _address(destination: Destination) -> int:
    """Returns where in host memory the bytes of a tensor belong, one after the other; 0 if nowhere."""
    in_host = destination.tensor.is_cpu and destination.is_plain
    return destination.tensor.data_ptr() if in_host else 0


def _overlapping(addresses: Sequence[int], lengths: Sequence[int]) -> set[int]:
    """Returns the indexes of memory, at these addresses but 0, that has some in common with another."""
    found: set[int] = set()
    last_end, last = 0, -1
    for index in sorted(range(len(addresses)), key=addresses.__getitem__):
        begin, end = addresses[index], addresses[index] + lengths[index]
        if begin and begin < last_end:
            found |= {last, index}
        if begin and end > last_end:
            last_end, last = end, index
    return found


def _copy_elements(target: Tensor, start: int, elements: Tensor) -> None:
    """Copies a run of elements, in row-major order, into a tensor of any strides; cast to its dtype."""
    position = 0
    for run in runs(target, start, elements.numel()):
        run.copy_(elements[position : position + run.numel()].view(run.shape))
        position += run.numel()


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
