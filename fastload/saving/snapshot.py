"""Copies of the state in host memory, and the buffers that they go through."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fastload.base.devices import Streams, accelerators_of, can_pin
from fastload.base.memory import PAGE_BYTES, allocate_staging, byte_view, copy_flat, host_view, round_up, runs
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import ProcessLock
from fastload.formats.dtensors import local_parts, narrowed
from fastload.geometry.box import Box
from fastload.saving.layout import FileRange, Layout, tensors_within
from fastload.saving.messages import Packet

__all__ = [
    "Copies",
    "HasBytes",
    "ReusedSlabs",
    "Shards",
    "Slabs",
    "Snapshot",
    "Source",
    "Spares",
    "copy_bytes",
    "spares",
]

Kind = tuple[tuple[int, ...], bool]  # lengths of the slabs in bytes, and whether they are pinned
_lock = ProcessLock()


class Spares:
    """Memory of snapshots, kept for the next ones: its first touch costs several times as much as the copy.

    May be used by several threads.

    Args:
        num_snapshots: How many snapshots there may be at once. The first one takes the memory of all.
        num_kinds: How many states may be saved in turn, such as a model and what else a training needs.
    """

    def __init__(self, num_snapshots: int, *, num_kinds: int = 1) -> None:
        self._num_snapshots = num_snapshots
        self._last: deque[Kind] = deque(maxlen=num_kinds)
        self._free: dict[Kind, list[list[Tensor]]] = {}

    def take(self, lengths: Sequence[int], *, pinned: bool) -> list[Tensor]:
        """Returns slabs of these lengths, in bytes.

        Raises:
            MemoryError: The system refuses that much.
        """
        kind = (tuple(lengths), pinned and can_pin())
        with _lock:
            is_first = kind not in self._last
            self._last.append(kind)
            self._free = {each: self._free.get(each, []) for each in self._last}
            slabs = self._free[kind].pop() if self._free[kind] else None
        if slabs is None:
            slabs = [allocate_staging(nbytes, pinned=pinned) for nbytes in lengths]
        for _ in range(self._num_snapshots - 1 if is_first else 0):
            # Touched, so that what is not there is missed now and not in the middle of a training.
            self.keep([allocate_staging(nbytes, pinned=pinned).zero_() for nbytes in lengths])
        return slabs

    def keep(self, slabs: list[Tensor]) -> None:
        """Takes slabs back, if they are such as were taken last, of as many kinds as there may be."""
        kind = (tuple(slab.numel() for slab in slabs), slabs[0].is_pinned())
        with _lock:
            if kind in self._last and len(self._free[kind]) < self._num_snapshots:
                self._free[kind].append(slabs)

    def clear(self) -> None:
        """Lets go of what is kept."""
        with _lock:
            self._last.clear()
            self._free.clear()


spares = Spares(1, num_kinds=2)
"""Those of a process, for saves that are not of one training."""
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


class Shards:
    """What this rank contributes, packet by packet. May be used by several threads.

    Args:
        layout: The files.
        source: The tensors of this rank's state.
    """

    def __init__(self, layout: Layout, source: Source) -> None:
        self._layout = layout
        self._source = source

    @property
    def on_device(self) -> bool:
        """Whether some of the state is on a accelerator."""
        return self._source.on_device

    def is_in_host_memory(self, name: str) -> bool:
        """Whether a tensor is there, by its name."""
        return self._source.tensor(name).is_cpu

    def copy(self, wanted: Packet, slab: Tensor) -> None:
        """Starts to copy a packet into the beginning of a flat uint8 host tensor; see `settle`."""
        position = 0
        with self._source.copying(wanted.nbytes):
            for number, cell, begin, end in wanted.stretches:
                out = slab[position : position + end - begin]
                copy_bytes(self._view(number, cell.box), begin, end, out)
                position += end - begin

    def settle(self) -> None:
        """Returns once all copies that were started are done."""
        self._source.settle()

    def _view(self, number: int, box: Box) -> Tensor:
        """Returns a box of a tensor that this rank holds."""
        for held, view in self._source.parts(self._layout.space.extents[number].name):
            if held == box:
                return view
            if held.intersect(box) == box:
                return narrowed(view, box.relative_to(held))
        raise AssertionError(f"this rank does not hold {box}")
