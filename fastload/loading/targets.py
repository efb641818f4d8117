"""The tensors that a load fills, of any dtype, device and layout, and the writer of byte ranges into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import nullcontext
from ctypes import memmove
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fastload.base.devices import (
    accelerators_of,
    copy_async,
    follow,
    is_accelerator,
    parse_device,
    with_index,
)
from fastload.base.memory import allocate, byte_view, round_up, touch
from fastload.base.threads import Workers
from fastload.errors import ManifestError, MismatchError, OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.formats.state import SavedTensor
from fastload.geometry.box import Box, Runs, row_major, runs_of, strided_runs
from fastload.geometry.dtensors import BoxedTensor, empty_like, is_dtensor, local_of, local_parts, narrowed
from fastload.geometry.ranges import ByteRange, Space
from fastload.loading.aliases import (
    Alias,
    AliasedMemory,
    any_differ,
    copy_elements,
    differing_line,
    find_aliases,
    raise_differing,
)

if TYPE_CHECKING:
    from fastload.formats.layers import Decoding


class Copy(NamedTuple):
    """A copy that a load makes once all bytes are read.

    Attributes:
        name: The tensor of the checkpoint.
        target: The tensor to copy to.
        source: The tensor to copy from.
        rivals: Copies that share memory with this one, among them those that are made before; or None.
    """

    name: str
    target: Tensor
    source: Tensor
    rivals: list[Copy] | None = None

    def make(self) -> None:
        """Copies, and casts."""
        target, source = self.target.detach(), self._values
        is_identical = target.dtype == source.dtype and target.shape == source.shape
        if is_identical and _is_plain(target) and _is_plain(source):
            byte_view(target).copy_(byte_view(source))
        else:
            target.copy_(source)

    @property
    def is_lost(self) -> bool:
        """Whether something else has been written over it since."""
        return any_differ(self.target.detach(), self._values)

    @property
    def _values(self) -> Tensor:
        source = self.source
        if self.target.is_complex() and not source.is_complex():
            source = torch.view_as_complex(source)
        return source


class _Target(NamedTuple):
    """A tensor of the checkpoint, or a box of it, and the tensor to fill; see `DestinationBuilder.add`."""

    entry: TensorEntry
    stored: torch.dtype
    tensor: Tensor
    box: Box | None


class DestinationBuilder:
    """Makes destinations of wanted tensors and boxes: one for each of their pieces.

    Args:
        manifest: The checkpoint.

    Attributes:
        copies: Copies to make after the load, in this order.
        decodings: Decode boxes of tensors; from `build` on.
        aliases: Memory of several tensors of the checkpoint; from `build` on.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.copies: list[Copy] = []
        self.decodings: list[Decoding] = []
        self.aliases: list[AliasedMemory] = []
        self._manifest = manifest
        self._targets: list[_Target] = []
        self._of_pieces: list[Copy] = []  # of elements that are stored once for a dimension

    @property
    def may_differ(self) -> bool:
        """Whether `copy` may find that tensors of one memory differ."""
        return any(copy.rivals is not None for copy in self.copies)

    def add(self, entry: TensorEntry, stored: torch.dtype, tensor: Tensor, box: Box | None) -> None:
        """Adds a tensor of the checkpoint, or a box of it.

        Args:
            entry: The tensor.
            stored: Its stored dtype.
            tensor: The tensor to fill, of the shape of the box.
            box: A box that is not empty; None for the complete tensor.
        """
        self._targets.append(_Target(entry, stored, tensor, box))

    def build(self) -> list[Destination]:
        """Returns the destinations in the order of `Manifest.extents`.

        Raises:
            MemoryError: Stand-ins for what cannot be compared in shared memory do not fit into memory.
        """
        targets, later = self._targets, self.copies
        groups = find_aliases([*(target.tensor for target in targets), *(copy.target for copy in later)])
        shared = {index for group in groups for index in group}
        made = {index: self._make(target) for index, target in enumerate(targets) if index not in shared}
        restored: list[Copy] = []
        for group in groups:
            in_group = {index: targets[index] for index in group if index < len(targets)}
            if len(in_group) < len(group) or (of_group := self._share(list(in_group.values()))) is None:
                rivals: list[Copy] = []
                of_group = [self._make_apart(target, restored, rivals) for target in in_group.values()]
                for index in group[len(in_group) :]:
                    later[index - len(targets)] = later[index - len(targets)]._replace(rivals=rivals)
            made |= zip(in_group, of_group, strict=True)
        self.copies = [*self._of_pieces, *restored, *later]
        destinations = [destination for index in range(len(targets)) for destination in made[index]]
        extents = self._manifest.extents
        if extents is not self._manifest.tensors:
            places = {id(extent): place for place, extent in enumerate(extents)}
            destinations.sort(key=lambda destination: places[id(destination.extent)])
        return destinations

    def copy(self) -> None:
        """Decodes what is left of tensors, and copies what is stored once and wanted more than once.

        Raises:
            MismatchError: Tensors of one memory differ.
        """
        for decoding in self.decodings:
            decoding.finish()
        differing: dict[str, None] = {}
        for copy in self.copies:
            copy.make()
            if copy.rivals is not None:
                lost = (before for before in copy.rivals if before.is_lost)
                differing |= {differing_line(before.name, copy.name): None for before in lost}
                copy.rivals.append(copy)
        raise_differing(self._manifest.url, list(differing))

    def _share(self, targets: Sequence[_Target]) -> list[list[Destination]] | None:
        """Makes destinations that share memory; None if what arrives cannot be compared with that.

        It can if all are contiguous, or all have the same shape and strides.
        """
        names = [target.entry.name for target in targets]
        if len(set(names)) < len(names):
            offsets = [list(target.box.offsets if target.box else ()) for target in targets]
            names = [f"{name} {at}" for name, at in zip(names, offsets, strict=True)]
        num_copies, num_decodings = len(self._of_pieces), len(self.decodings)
        made = [self._make(target) for target in targets]
        tensors = [destination.tensor for of_target in made for destination in of_target]
        are_contiguous = all(one.is_contiguous() for one in tensors)
        are_same = len(tensors) == len(targets) and len({(identity(one), one.dtype) for one in tensors}) == 1
        is_lazy = any(one.is_conj() or one.is_neg() for one in tensors)
        has_more = len(self._of_pieces) > num_copies or len(self.decodings) > num_decodings
        if not (are_contiguous or are_same) or is_lazy or has_more:
            del self._of_pieces[: len(self._of_pieces) - num_copies], self.decodings[num_decodings:]
            return None
        self.aliases.append(memory := AliasedMemory(names))
        return [
            [replace(destination, alias=Alias(memory, number)) for destination in of_target]
            for number, of_target in enumerate(made)
        ]

    def _make_apart(self, target: _Target, copies: list[Copy], rivals: list[Copy]) -> list[Destination]:
        """Makes destinations in new memory, which is copied later."""
        tensor = target.tensor.detach()
        stand_in = allocate(tensor.shape, tensor.dtype, tensor.device)
        copies.append(Copy(target.entry.name, tensor, stand_in, rivals))
        return self._make(target._replace(tensor=stand_in))

    def _make(self, target: _Target) -> list[Destination]:
        """Makes the destinations of a tensor or a box."""
        entry, stored, tensor, box = target
        if (decoding := entry.decoding(tensor, box)) is not None:
            parts = [_Target(part.entry, part.memory.dtype, part.memory, part.box) for part in decoding.parts]
            made = [destination for part in parts for destination in self._make(part)]
            self.decodings.append(decoding)  # after those of its parts
            return [replace(one, decoding=decoding) if one.decoding is None else one for one in made]
        if not entry.pieces:
            runs = None
            if box is not None:
                runs = runs_of(box, torch_spec(entry)[1]).scaled(stored.itemsize)
            return [Destination(entry, stored, tensor, runs)]
        wanted = Box.whole(tensor.shape) if box is None else box
        placed: list[Destination] = []
        for piece in entry.pieces:
            common = wanted.intersect(piece.box)
            if common is not None:
                view = narrowed(tensor.detach(), common.relative_to(wanted))
                placed.append(self._make_piece(entry, stored, view, common.relative_to(piece.box), piece))
        return placed

    def _make_piece(
        self, entry: TensorEntry, stored: torch.dtype, view: Tensor, within: Box, piece: Piece
    ) -> Destination:
        strides = piece.strides or row_major(piece.box.sizes)
        for dim, stride in enumerate(strides):
            if not stride and view.shape[dim] > 1:
                first = view.narrow(dim, 0, 1)
                rest = view.narrow(dim, 1, view.shape[dim] - 1)
                self._of_pieces.insert(0, Copy(entry.name, rest, first))  # inner ones first
                view, within = first, Box(within.offsets, (*within.sizes[:dim], 1, *within.sizes[dim + 1 :]))
        # In the order of the file, the elements are those of the view that has its longest stride first.
        view = view.permute(sorted(range(view.dim()), key=lambda dim: -strides[dim]))
        runs = strided_runs(within, strides).scaled(stored.itemsize)
        is_all = runs == Runs(0, piece.nbytes, ())
        return Destination(entry, stored, view, None if is_all else runs, piece)


_SMALL_BYTES = 16 << 10  # copied faster by memmove than by torch


@dataclass(frozen=True, slots=True)
class Destination:
    """The tensor that receives a tensor of the checkpoint, a piece of it, or byte ranges of either.

    Attributes:
        entry: The tensor in the checkpoint.
        stored: Its stored dtype.
        tensor: The tensor to fill in row-major order, with any strides, on any device; cast to its dtype.
        runs: The wanted byte ranges of `extent`; None for all of it.
        piece: The piece of the tensor; None if it has no pieces.
        decoding: Has to have all of its bytes; None if they are those of the tensor itself.
        alias: Knows what is written of memory that other destinations share; None if none do.
    """

    entry: TensorEntry
    stored: torch.dtype
    tensor: Tensor
    runs: Runs | None = None
    piece: Piece | None = None
    decoding: Decoding | None = None
    alias: Alias | None = None

    @property
    def extent(self) -> TensorEntry | Piece:
        """The byte range in the checkpoint."""
        return self.entry if self.piece is None else self.piece

    @property
    def nbytes(self) -> int:
        """Number of wanted bytes, as stored."""
        return self.extent.nbytes if self.runs is None else self.runs.total

    @property
    def is_plain(self) -> bool:
        """Whether bytes can be copied without a cast or strides."""
        lazy = self.tensor.is_conj() or self.tensor.is_neg()  # torch negates when it reads the bytes
        return self.tensor.dtype == self.stored and self.tensor.is_contiguous() and not lazy


def device_of(destinations: Sequence[Destination], default: torch.device) -> torch.device:
    """Returns the first device of destinations that is not the CPU; else the default."""
    return next((d.tensor.device for d in destinations if not d.tensor.is_cpu), default)


class TensorWriter:
    """Writes byte ranges into tensors. Offsets count the bytes that the rank wants, laid end to end.

    Args:
        destinations: Everything that the rank wants, in order.
        num_threads: Most threads that decode tensors, while the next bytes arrive.
    """

    def __init__(self, destinations: Sequence[Destination], num_threads: int = 1) -> None:
        # Detached tensors keep their memory alive, whatever the caller does meanwhile.
        self._destinations = [replace(d, tensor=d.tensor.detach()) for d in destinations if d.nbytes]
        self._wanted = Space(
            [ByteRange(d.extent.file, d.extent.offset, d.nbytes) for d in self._destinations]
        )
        self._addresses = [_address(d) for d in self._destinations]
        self._cut: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._devices = accelerators_of(d.tensor for d in self._destinations)
        self._scratch = _make_scratch(self._destinations)
        # Between devices, chunks that could not be read are placed, too, before they are read again.
        self._counts = not self._devices and any(d.decoding is not None for d in self._destinations)
        self._num_threads = num_threads
        self._workers = Workers(num_threads, "fastload-decode")
        self._begun: list[Future[None]] = []

    @property
    def destinations(self) -> Sequence[Destination]:
        """Everything that the rank wants; none of it empty, and with detached tensors."""
        return self._destinations

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns the host memory of a byte range, in flat uint8 pieces.

        None if these are more than `at_most` pieces, or if some of it is on a device, strided, cast, or
        shared with another destination: such bytes have to be placed.
        """
        indexes = self._wanted.within(start, nbytes)
        if len(indexes) > at_most:
            return None
        if not all(self._addresses[index] for index in indexes):
            return None
        pieces = self._wanted.cut(start, nbytes)
        return [byte_view(self._destinations[index].tensor)[begin:end] for index, begin, end in pieces]

    def place(self, start: int, data: Tensor) -> None:
        """Writes a byte range. Ranges may come in any order, each byte once.

        Args:
            start: Offset of the first byte.
            data: The bytes, flat uint8, on any device.
        """
        source, starts = data.data_ptr() if data.is_cpu else 0, self._wanted.starts
        by_bytes = _SMALL_BYTES if torch.get_num_threads() > 1 else data.numel() + 1  # as `copy_flat`
        for index, begin, end in self._wanted.cut(start, data.numel()):
            offset = starts[index] + begin - start
            if source and self._addresses[index] and end - begin < by_bytes:
                touch(self._addresses[index] + begin, end - begin)
                memmove(self._addresses[index] + begin, source + offset, end - begin)
            else:
                destination = self._destinations[index]
                with torch.inference_mode() if destination.tensor.is_inference() else nullcontext():
                    self._place_piece(destination, begin, data[offset : offset + end - begin])
        self.count([(start, data.numel())])

    def count(self, in_place: Sequence[tuple[int, int]]) -> None:
        """Begins to decode what is there of tensors now.

        Args:
            in_place: (start, length) of byte ranges that were read or received into their tensors, and that
                no other rank is still sent.
        """
        for start, nbytes in in_place if self._counts else ():
            for index, begin, end in self._wanted.cut(start, nbytes):
                one = self._destinations[index]
                if one.decoding is None:
                    continue
                at = begin if one.piece is None else None
                num_threads = min(one.decoding.arrived(one.entry, at, end - begin), self._num_threads)
                self._begun += [self._workers.submit(one.decoding.run) for _ in range(num_threads)]

    def close(self) -> None:
        """Waits for the tensors that are being decoded.

        Raises:
            MemoryError: Decoding one needs more memory than there is.
        """
        begun, self._begun = self._begun, []
        wait_for(begun)
        self._workers.close(wait_s=0.0)
        for one in begun:
            one.result()

    def follow(self) -> Callable[[], bool]:
        """Returns a function that tells whether all bytes placed so far have left their buffers."""
        return follow(self._devices)

    def _place_piece(self, destination: Destination, begin: int, piece: Tensor) -> None:
        if not destination.is_plain:
            self._place_elements(destination, begin, piece)
        elif destination.alias is not None:
            for at, part in self._at_destination(destination, piece):
                destination.alias.write(byte_view(destination.tensor), begin + at, part)
        else:
            flat = byte_view(destination.tensor)[begin : begin + piece.numel()]
            if flat.is_cpu:
                flat.copy_(piece)  # `follow` does not follow copies to host memory
            else:
                copy_async(piece, flat)

    def _place_elements(self, destination: Destination, begin: int, piece: Tensor) -> None:
        """Casts or scatters complete elements; the bytes of a cut element wait for the rest of it."""
        size = destination.stored.itemsize
        whole_begin = round_up(begin, size)
        whole_end = max(whole_begin, (begin + piece.numel()) // size * size)
        head = min(whole_begin - begin, piece.numel())
        tail = head + whole_end - whole_begin
        self._place_cut_element(destination, begin, piece[:head])
        for at, part in self._at_destination(destination, piece[head:tail]):
            elements = part.view(destination.stored)
            self._write_elements(destination, (whole_begin + at) // size, elements)
        self._place_cut_element(destination, whole_end, piece[tail:])

    def _at_destination(self, destination: Destination, piece: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields the parts of a piece on the device of its destination, aligned to its stored dtype.

        A part may be overwritten by the next one, in the order of the device.
        """
        scratch = self._scratch.get(destination.tensor.device)
        size = destination.stored.itemsize
        is_aligned = piece.storage_offset() % size == 0 and piece.data_ptr() % size == 0
        if is_aligned and piece.device == destination.tensor.device:
            yield 0, piece
        elif scratch is None:
            yield 0, piece.to("cpu", copy=True)
        else:
            for at in range(0, piece.numel(), scratch.numel()):
                part = piece[at : at + scratch.numel()]
                copy_async(part, scratch[: part.numel()])
                yield at, scratch[: part.numel()]

    def _place_cut_element(self, destination: Destination, begin: int, piece: Tensor) -> None:
        """Collects the bytes of one element, and writes it once it is complete."""
        if piece.numel() == 0:
            return
        size = destination.stored.itemsize
        element, offset = divmod(begin, size)
        key = (id(destination), element)
        kept, num_kept = self._cut.pop(key, (None, 0))
        if kept is None:
            kept = torch.empty(size, dtype=torch.uint8, device=destination.tensor.device)
        copy_async(piece, kept[offset : offset + piece.numel()])
        if num_kept + piece.numel() < size:
            self._cut[key] = (kept, num_kept + piece.numel())
        else:
            self._write_elements(destination, element, kept.view(destination.stored))

    def _write_elements(self, destination: Destination, start: int, elements: Tensor) -> None:
        if destination.alias is None:
            copy_elements(destination.tensor, start, elements)
        else:
            destination.alias.write(destination.tensor, start, elements)


_SCRATCH_BYTES = 8 << 20  # a copy of as much takes far longer than to start it


def _make_scratch(destinations: Sequence[Destination]) -> dict[torch.device, Tensor]:
    """Allocates memory on devices, flat uint8, for stored bytes that are cast, scattered or compared there.

    Raises:
        MemoryError: A device has too little memory.
    """
    sizes: dict[torch.device, int] = {}
    for destination in destinations:
        device = destination.tensor.device
        if is_accelerator(device) and not (destination.is_plain and destination.alias is None):
            sizes[device] = max(sizes.get(device, 0), min(round_up(destination.nbytes, 16), _SCRATCH_BYTES))
    with torch.inference_mode(False):
        return {device: allocate((nbytes,), torch.uint8, device) for device, nbytes in sizes.items()}


def _address(destination: Destination) -> int:
    """Returns the host address of a tensor whose bytes are copied as they are, whatever is there; else 0."""
    in_host = destination.tensor.is_cpu and destination.is_plain and destination.alias is None
    return destination.tensor.data_ptr() if in_host else 0


class TargetBuilder(DestinationBuilder):
    """Collects the tensors that a load fills, existing and new ones, and makes their destinations.

    Args:
        manifest: The checkpoint.
        device: Device of new tensors.
        dtype: The dtype that floating point tensors are cast to; None for none.

    Attributes:
        device: As given.
        new: New tensors, by stored name; from `build` on.
        exact: New tensors with their stored dtype, even where others are cast, by stored name; likewise.
    """

    def __init__(self, manifest: Manifest, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__(manifest)
        self.device = device
        self.new: dict[str, Tensor] = {}
        self.exact: dict[str, Tensor] = {}
        self._dtype = dtype
        self._complete: dict[str, list[Tensor]] = {}
        self._boxes: dict[str, dict[Box, list[Tensor]]] = {}
        self._later: list[Copy] = []
        self._new: dict[tuple[str, torch.dtype], Tensor] = {}

    def fill(self, saved: SavedTensor, tensor: Tensor) -> None:
        """Adds an existing tensor that a saved one fits: the shards of it on this rank."""
        for box, part in local_parts(tensor):
            is_whole = box.sizes == tensor.shape
            if saved.is_complex128:
                box, part = Box((*box.offsets, 0), (*box.sizes, 2)), self._real_view(saved, part)
            if is_whole:
                places = self._complete.setdefault(saved.stored, [])
            else:
                places = self._boxes.setdefault(saved.stored, {}).setdefault(box, [])
            if not places or identity(part) not in map(identity, places):
                places.append(part)

    def _real_view(self, saved: SavedTensor, tensor: Tensor) -> Tensor:
        """Views complex numbers as pairs; of a lazily conjugated or negated tensor, those of a stand-in."""
        if not (tensor.is_conj() or tensor.is_neg()):
            return torch.view_as_real(tensor.detach())
        stand_in = allocate((*tensor.shape, 2), torch.float64, tensor.device)
        self._later.append(Copy(saved.stored, tensor, stand_in))
        return stand_in

    def make(self, name: str, *, exact: bool) -> Tensor:
        """Returns the new tensor for a stored one; the same for each call.

        Args:
            name: Name of the stored tensor.
            exact: Whether it keeps its stored dtype.

        Raises:
            ManifestError: The checkpoint has none of this name.
            MismatchError: It cannot be cast.
            MemoryError: It does not fit into memory.
        """
        entry = entry_of(self._manifest, name)
        stored, shape = torch_spec(entry)
        target = stored if exact else target_dtype(stored, self._dtype)
        tensor = self._new.get((name, target))
        if tensor is None:
            if not castable(stored, target):
                line = f"{name}: torch cannot cast {stored} to {target}"
                raise MismatchError(line, mismatched=(line,))
            strides = self._manifest.strides_of(entry)
            tensor = self._new[name, target] = allocate(shape, target, self.device, strides=strides)
            self._complete.setdefault(name, []).append(tensor)
        return tensor

    def make_like(self, saved: SavedTensor, like: Tensor) -> Tensor:
        """Returns a new DTensor of the stored dtype, with the placements of another one of its shape.

        Raises:
            MemoryError: It does not fit into memory.
        """
        stored, _ = torch_spec(entry_of(self._manifest, saved.stored))
        tensor = empty_like(like, like.device, torch.complex128 if saved.is_complex128 else stored)
        self.fill(saved, tensor)
        return tensor

    def make_all(self) -> None:
        """Makes a new tensor for every stored one; see `make`."""
        for entry in self._manifest.tensors:
            self.make(entry.name, exact=False)

    def make_together(self, together: Mapping[str, Sequence[str]]) -> set[str]:
        """Adds the other ranks' own tensors at the places whose own tensors this rank loads.

        So all ranks want the same bytes. Returns the names of those that this rank does not need.
        """
        complete = [name for name in together if name in self._complete]
        others = {other for name in complete for other in together[name]} - self._complete.keys()
        for name in sorted(others):
            self.make(name, exact=True)
        return others

    def build(self) -> list[Destination]:
        """As `DestinationBuilder.build`. Tensors that are wanted twice have one destination, and a copy."""
        copies: list[Copy] = []
        for entry in self._manifest.tensors:
            wanted = self._wanted_of(entry.name)
            if not wanted:
                continue
            stored, _ = torch_spec(entry)
            for box, places in wanted:
                # The source of the copies must not have been cast.
                first = places[0]
                if len(places) > 1:
                    first = next((place for place in places if place.dtype == stored), first)
                    copies += [Copy(entry.name, place, first) for place in places if place is not first]
                self.add(entry, stored, first, box)
            if not self._new:
                continue
            cast = self._new.get((entry.name, target_dtype(stored, self._dtype)))
            if cast is not None:
                self.new[entry.name] = cast
            if (entry.name, stored) in self._new:
                self.exact[entry.name] = self._new[entry.name, stored]
        self.copies += [*copies, *self._later]
        return super().build()

    def _wanted_of(self, name: str) -> list[tuple[Box | None, list[Tensor]]]:
        """Returns the tensors for a stored one, by box; the box of complete ones is None."""
        complete = self._complete.get(name)
        parts = self._boxes.get(name, {})
        return [
            *([] if complete is None else [(None, complete)]),
            *((box, parts[box]) for box in sorted(parts)),
        ]


def target_device(device: torch.device | str | None) -> torch.device:
    """Returns the device of new tensors; the CPU for None.

    Raises:
        OptionError: torch has no such device in this process, or it has no memory.
    """
    target = parse_device(device if device is not None else "cpu")
    if target.type == "meta":
        raise OptionError(f"device={device!r}: the meta device has no memory to load into; name a real one")
    return with_index(target)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the dtype that ``dtype=`` names, with or without ``torch.``.

    Raises:
        OptionError: It names none, or one of integers.
    """
    if dtype is None:
        return None
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: must be a torch.dtype or the name of one, such as bfloat16")
    if not (parsed.is_floating_point or parsed.is_complex):
        raise OptionError(
            f"dtype={dtype!r}: must be a floating point dtype, since a cast to others cuts off the fractions "
            "of weights: load them without dtype=, and quantise them with a library that scales them"
        )
    return parsed


def entry_of(manifest: Manifest, name: str) -> TensorEntry:
    """Returns the entry of a stored tensor.

    Raises:
        ManifestError: The checkpoint has none.
    """
    entry = manifest.by_name.get(name)
    if entry is None:
        raise ManifestError(f"the structure of the state: there is no tensor {name[:200]!r}")
    return entry


def identity(tensor: Tensor) -> object:
    """Returns a key that tied tensors share: the same object, or the same bytes."""
    if is_dtensor(tensor) and not tensor.is_meta:
        # Also for empty shards: tied tensors are tied on all ranks.
        local = local_of(tensor)
        address = local.untyped_storage()._cdata, local.storage_offset()
        return (*address, tuple(local.shape), local.stride(), tuple(tensor.shape))
    is_plain = not isinstance(tensor, BoxedTensor) and not hasattr(tensor, "__tensor_flatten__")
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided or not is_plain:
        return id(tensor)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


def target_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a tensor after a cast of floating point tensors."""
    return dtype if dtype is not None and stored.is_floating_point else stored


@cache
def castable(stored: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch can cast one dtype to another."""
    if stored == target:
        return True
    try:
        torch.zeros(1, dtype=torch.uint8).expand(stored.itemsize).clone().view(stored).to(target)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def materialize(meta: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor, or a Parameter, with memory in place of a meta tensor."""
    tensor = empty_like(meta, device) if is_dtensor(meta) else allocate(meta.shape, meta.dtype, device)
    if not isinstance(meta, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=meta.requires_grad)
    for name, value in meta.__dict__.items():
        parameter.__dict__.setdefault(name, value)  # a DTensor has its local tensor there
    return parameter


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
