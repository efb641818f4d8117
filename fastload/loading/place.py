"""Puts ranges of what a rank wants into tensors: any dtype, device, layout, and cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from ctypes import memmove
from dataclasses import dataclass

import torch
from torch import Tensor

from fastload.base.devices import accelerators_of, copy_async, synchronize
from fastload.base.memory import byte_view, round_up, runs
from fastload.formats.manifest import Piece, TensorEntry
from fastload.geometry.box import Runs
from fastload.geometry.extents import Extent, Space

__all__ = ["Destination", "Placer"]

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
