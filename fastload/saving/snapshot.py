"""State → host memory: the only thing an asynchronous save keeps training waiting for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fastload.base.devices import Streams, accelerators_of
from fastload.base.memory import (
    PAGE_BYTES,
    allocate_staging,
    byte_view,
    copy_flat,
    host_view,
    round_up,
    runs,
)
from fastload.base.stopwatch import Stopwatch
from fastload.formats.dtensors import local_parts
from fastload.geometry.box import Box
from fastload.saving.assign import FileRange, tensors_within
from fastload.saving.layout import Layout
from fastload.saving.spares import Spares, spares

__all__ = ["Copies", "HasBytes", "ReusedSlabs", "Slabs", "Snapshot", "Source", "copy_bytes"]

_SLAB_BYTES = 64 << 20  # a power of two, and a small part of a share that is worth counting


class HasBytes(Protocol):
    """What can be copied: bytes of files, or of tensors."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...


ItemT = TypeVar("ItemT", bound=HasBytes, contravariant=True)


class Copies(Protocol[ItemT]):
    """What copies bytes of the state.

    Attributes:
        on_device: Whether some of the state is on an accelerator.
    """

    @property
    def on_device(self) -> bool: ...  # noqa: D102

    def copy(self, wanted: ItemT, slab: Tensor) -> None:
        """Starts to copy bytes into the beginning of a flat uint8 host tensor."""
        ...

    def settle(self) -> None:
        """Returns once all copies that were started are done."""
        ...


class Source:
    """The bytes of a layout's files, taken from the tensors of the state.

    Args:
        layout: The files.
        tensors: By name; any strides, any device.
        watch: Counts the time; None makes one.

    Attributes:
        watch: Time spent copying.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], watch: Stopwatch | None = None) -> None:
        self._layout = layout
        self._tensors = tensors
        self._parts: dict[str, list[tuple[Box, Tensor]]] = {}
        self._streams = Streams(accelerators_of(tensors.values()))
        self.watch = watch if watch is not None else Stopwatch()

    def laid_out(self, layout: Layout) -> Source:
        """Returns the same tensors as parts of other files."""
        source = Source(layout, self._tensors, self.watch)
        source._parts, source._streams = self._parts, self._streams
        return source

    @property
    def on_device(self) -> bool:
        """Whether some of the state is on an accelerator."""
        return bool(self._streams)

    def copy(self, wanted: FileRange, slab: Tensor) -> None:
        """Starts to copy a range of a file into the beginning of a flat uint8 host tensor; see `settle`."""
        header = self._layout.files[wanted.file].header
        with self.copying(wanted.end - wanted.begin):
            if wanted.begin < len(header):
                text = header[wanted.begin : wanted.end]
                host_view(slab[: len(text)])[:] = text
            for entry in tensors_within(self._layout, wanted):
                begin, end = max(wanted.begin, entry.offset), min(wanted.end, entry.offset + entry.nbytes)
                out = slab[begin - wanted.begin : end - wanted.begin]
                copy_bytes(self.tensor(entry.name), begin - entry.offset, end - entry.offset, out)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor of the state, detached."""
        return self._tensors[name].detach()

    def parts(self, name: str) -> list[tuple[Box, Tensor]]:
        """Returns what this rank holds of a tensor, detached; see `dtensors.local_parts`.

        Found once: to ask a DTensor takes longer than to copy a little of it.
        """
        if name not in self._parts:
            self._parts[name] = [(box, view.detach()) for box, view in local_parts(self._tensors[name])]
        return self._parts[name]

    def forget(self) -> None:
        """Lets go of the state."""
        self._tensors = {}
        self._parts.clear()

    def settle(self) -> None:
        """Returns once all copies that were started are done."""
        with self.watch:
            self._streams.synchronize()

    @contextmanager
    def copying(self, nbytes: int) -> Iterator[None]:
        """Counts the time of a copy from the state, and orders it after what the caller has queued."""
        with self.watch.span(nbytes=nbytes), self._streams.current():
            yield


def copy_bytes(tensor: Tensor, begin: int, end: int, out: Tensor) -> None:
    """Starts to copy a range of the bytes of a tensor, of any strides, on any device, in row-major order.

    Args:
        tensor: Detached.
        begin: First byte.
        end: The byte after the last one.
        out: Flat uint8 host tensor of that length.
    """
    if tensor.is_contiguous():
        copy_flat(byte_view(tensor)[begin:end], out)
        return
    size = tensor.element_size()
    first, last = begin // size, -(-end // size)
    dense = torch.empty(last - first, dtype=tensor.dtype, device=tensor.device)
    position = 0
    for run in runs(tensor, first, last - first):
        dense[position : position + run.numel()].view(run.shape).copy_(run)
        position += run.numel()
    copy_flat(byte_view(dense)[begin - first * size : end - first * size], out)


class Slabs(Protocol):
    """Host memory with the pieces of a rank's share, to be asked for in order.

    Attributes:
        depth: So many pieces stay valid at once: that of piece i until piece i + depth is asked for.
        nbytes: Host memory that it takes, in bytes.
    """

    @property
    def depth(self) -> int:
        """See above."""
        ...

    @property
    def nbytes(self) -> int:
        """See above."""
        ...

    def piece(self, index: int) -> memoryview:
        """Returns the bytes of a piece."""
        ...


class Snapshot:
    """All pieces at once: when it is made, the state may change.

    It is not one slab: torch rounds page-locked memory up to a power of two.

    Args:
        source: What to copy from.
        pieces: What to copy.
        memory: Where its memory comes from, and is kept for the next one.
    """

    def __init__(self, source: Copies[ItemT], pieces: Sequence[ItemT], memory: Spares = spares) -> None:
        places, lengths = _pack([_whole_pages(piece) for piece in pieces])
        self._memory = memory
        self._slabs = memory.take(lengths, pinned=source.on_device)
        self._pieces = [
            self._slabs[slab][start : start + piece.nbytes]
            for (slab, start), piece in zip(places, pieces, strict=True)
        ]
        for piece, slab in zip(pieces, self._pieces, strict=True):
            source.copy(piece, slab)
        source.settle()

    @property
    def depth(self) -> int:
        """All of them."""
        return max(1, len(self._pieces))

    @property
    def nbytes(self) -> int:
        """Length of the whole snapshot."""
        return sum(slab.numel() for slab in self._slabs)

    def piece(self, index: int) -> memoryview:
        """Returns the bytes of a piece."""
        return host_view(self._pieces[index])

    def tensor(self, index: int) -> Tensor:
        """Returns the bytes of a piece as a flat uint8 tensor."""
        return self._pieces[index]

    def keep(self) -> None:
        """Leaves the memory to the next snapshot; this one cannot be used any more."""
        slabs, self._slabs = self._slabs, []
        self._pieces.clear()
        self._memory.keep(slabs)


class ReusedSlabs:
    """A few slabs, filled one after the other while earlier ones are written.

    Args:
        source: What to copy from.
        pieces: What to copy.
        num_slabs: Pieces in memory at once.
    """

    def __init__(self, source: Source, pieces: Sequence[FileRange], *, num_slabs: int) -> None:
        self._source = source
        self._pieces = pieces
        self.depth = max(1, min(num_slabs, len(pieces)))
        largest = max(map(_whole_pages, pieces), default=PAGE_BYTES)
        # Each by itself: torch rounds page-locked memory up to a power of two, which a piece mostly is.
        self._slabs = [allocate_staging(largest, pinned=source.on_device) for _ in range(self.depth)]

    @property
    def nbytes(self) -> int:
        """Length of all slabs."""
        return sum(slab.numel() for slab in self._slabs)

    def piece(self, index: int) -> memoryview:
        """Copies a piece, and returns its bytes."""
        slab, wanted = self._slabs[index % self.depth], self._pieces[index]
        self._source.copy(wanted, slab)
        self._source.settle()
        return host_view(slab[: wanted.end - wanted.begin])


def _pack(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns in which slab each piece is, and where, and the lengths of the slabs: at least one."""
    places, lengths = [], [0]
    for size in sizes:
        if lengths[-1] and lengths[-1] + size > _SLAB_BYTES:
            lengths.append(0)
        places.append((len(lengths) - 1, lengths[-1]))
        lengths[-1] += size
    return places, [max(length, PAGE_BYTES) for length in lengths]


def _whole_pages(piece: HasBytes) -> int:
    return round_up(piece.nbytes, PAGE_BYTES)
