"""Puts ranges of the wanted space into tensors: any dtype, device, layout, and cut anywhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fastload.formats.manifest import TensorEntry
from fastload.memory import byte_view, round_up, runs

__all__ = ["Destination", "Placer"]


@dataclass(frozen=True)
class Destination:
    """Where one tensor of the checkpoint goes.

    Attributes:
        entry: The tensor in the checkpoint.
        stored: Its dtype there, as torch has it.
        tensor: What receives it: same shape; another dtype means a cast; any strides; any device.
    """

    entry: TensorEntry
    stored: torch.dtype
    tensor: Tensor

    @property
    def is_plain(self) -> bool:
        """Whether bytes can be copied as they are."""
        lazy = self.tensor.is_conj() or self.tensor.is_neg()  # torch negates when it reads the bytes
        return self.tensor.dtype == self.stored and self.tensor.is_contiguous() and not lazy


class Placer:
    """Takes the wanted space to its destinations.

    Args:
        destinations: In the order of the plan's wanted space.
    """

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self._destinations = [d for d in destinations if d.entry.nbytes]
        self._starts = list(accumulate((d.entry.nbytes for d in self._destinations), initial=0))
        self._bytes = [byte_view(d.tensor.detach()) if d.is_plain else None for d in self._destinations]
        self._shared = _overlapping(self._bytes)
        self._cut: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._devices = {d.tensor.device for d in self._destinations if d.tensor.device.type == "cuda"}

    def targets(self, start: int, nbytes: int) -> list[Tensor] | None:
        """Returns the memory that a range of the wanted space belongs to, flat uint8, piece by piece.

        None if some of it is on a device, strided, cast, or also part of another destination: those bytes
        have to be placed.
        """
        pieces: list[Tensor] = []
        for index, begin, end in self._pieces(start, nbytes):
            flat = self._bytes[index]
            if flat is None or flat.device.type != "cpu" or index in self._shared:
                return None
            pieces.append(flat[begin:end])
        return pieces

    def place(self, start: int, data: Tensor) -> None:
        """Places a range of the wanted space; ranges may come in any order, each byte once.

        Args:
            start: First byte in the wanted space.
            data: The bytes, flat uint8, on any device.
        """
        for index, begin, end in self._pieces(start, data.numel()):
            offset = self._starts[index] + begin - start
            piece = data[offset : offset + end - begin]
            flat = self._bytes[index]
            if flat is not None:
                # A copy to host memory would not be waited for by `settle`.
                flat[begin:end].copy_(piece, non_blocking=flat.is_cuda)
            else:
                self._place_elements(self._destinations[index], begin, piece)

    def settle(self) -> None:
        """Returns once everything placed so far has left the buffers it came from."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def _pieces(self, start: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Cuts a range of the wanted space into (destination, begin, end) in bytes of that tensor."""
        pieces = []
        position, stop = start, start + nbytes
        index = bisect_right(self._starts, position) - 1
        while position < stop:
            end = min(stop, self._starts[index + 1])
            pieces.append((index, position - self._starts[index], end - self._starts[index]))
            position, index = end, index + 1
        return pieces

    def _place_elements(self, destination: Destination, begin: int, piece: Tensor) -> None:
        """Casts or scatters whole elements; the bytes of an element that is cut wait for its rest."""
        size = destination.stored.itemsize
        whole_begin = round_up(begin, size)
        whole_end = max(whole_begin, (begin + piece.numel()) // size * size)
        head = min(whole_begin - begin, piece.numel())
        self._place_cut_element(destination, begin, piece[:head])
        # A clone, since a view as another dtype needs memory aligned to it.
        elements = piece[head : head + whole_end - whole_begin].clone().view(destination.stored)
        _copy_elements(destination.tensor.detach(), whole_begin // size, elements)
        self._place_cut_element(destination, whole_end, piece[head + whole_end - whole_begin :])

    def _place_cut_element(self, destination: Destination, begin: int, piece: Tensor) -> None:
        """Keeps some bytes of one element until all of its bytes are here, in whatever order."""
        if piece.numel() == 0:
            return
        size = destination.stored.itemsize
        element, offset = divmod(begin, size)
        key = (destination.entry.name, element)
        kept, num_kept = self._cut.pop(key, (torch.empty(size, dtype=torch.uint8, device="cpu"), 0))
        kept[offset : offset + piece.numel()] = piece.cpu()
        if num_kept + piece.numel() < size:
            self._cut[key] = (kept, num_kept + piece.numel())
        else:
            _copy_elements(destination.tensor.detach(), element, kept.view(destination.stored))


def _overlapping(flats: Sequence[Tensor | None]) -> set[int]:
    """Returns which of some host tensors have memory in common with another one."""
    found: set[int] = set()
    extents = sorted(
        (flat.data_ptr(), flat.data_ptr() + flat.numel(), index)
        for index, flat in enumerate(flats)
        if flat is not None and flat.device.type == "cpu"
    )
    last_end, last = 0, -1
    for begin, end, index in extents:
        if begin < last_end:
            found |= {last, index}
        if end > last_end:
            last_end, last = end, index
    return found


def _copy_elements(target: Tensor, start: int, elements: Tensor) -> None:
    """Copies a run of elements, in row-major order, into a tensor of any strides; cast to its dtype."""
    position = 0
    for run in runs(target, start, elements.numel()):
        run.copy_(elements[position : position + run.numel()].view(run.shape))
        position += run.numel()
