"""State → host memory: the only thing an asynchronous save keeps training waiting for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from fastload.formats.manifest import TensorEntry
from fastload.memory import PAGE_BYTES, allocate_staging, byte_view, host_view, round_up, runs
from fastload.report import Stopwatch
from fastload.saving.layout import Layout
from fastload.saving.partition import FileRange, tensors_within

__all__ = ["Slabs", "Snapshot", "Source", "Staging"]


class Source:
    """The bytes of a layout's files, taken from the tensors of the state.

    Args:
        layout: The files.
        tensors: By name; any strides, any device.

    Attributes:
        watch: Time spent copying.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        self._layout = layout
        self._tensors = tensors
        self._devices = {t.device for t in tensors.values() if t.device.type == "cuda"}
        self.watch = Stopwatch()

    @property
    def on_device(self) -> bool:
        """Whether some of the state is on a CUDA device."""
        return bool(self._devices)

    def copy(self, wanted: FileRange, slab: Tensor) -> None:
        """Starts to copy a range of a file into the beginning of a flat uint8 host tensor; see `settle`."""
        header = self._layout.files[wanted.file].header
        with self.watch:
            if wanted.begin < len(header):
                text = header[wanted.begin : wanted.end]
                host_view(slab[: len(text)])[:] = text
            for entry in tensors_within(self._layout, wanted):
                begin, end = max(wanted.begin, entry.offset), min(wanted.end, entry.offset + entry.nbytes)
                self._copy_tensor(entry, begin, end, slab[begin - wanted.begin : end - wanted.begin])

    def settle(self) -> None:
        """Returns once all copies that were started are done."""
        with self.watch:
            for device in self._devices:
                torch.cuda.current_stream(device).synchronize()

    def _copy_tensor(self, entry: TensorEntry, begin: int, end: int, out: Tensor) -> None:
        tensor, begin, end = self._tensors[entry.name].detach(), begin - entry.offset, end - entry.offset
        if tensor.is_contiguous():
            out.copy_(byte_view(tensor)[begin:end], non_blocking=True)
            return
        size = tensor.element_size()
        first, last = begin // size, -(-end // size)
        dense = torch.empty(last - first, dtype=tensor.dtype, device=tensor.device)
        position = 0
        for run in runs(tensor, first, last - first):
            dense[position : position + run.numel()].view(run.shape).copy_(run)
            position += run.numel()
        out.copy_(byte_view(dense)[begin - first * size : end - first * size])


class Slabs(Protocol):
    """Host memory with the pieces of a rank's share, to be asked for in order."""

    def piece(self, index: int) -> memoryview:
        """Returns the bytes of a piece; they stay until it is released."""
        ...

    def release(self, index: int) -> None:
        """Lets the memory of a piece be used for another one; from any thread."""
        ...

    @property
    def nbytes(self) -> int:
        """Host memory that it takes, in bytes."""
        ...


class Snapshot:
    """All pieces at once: when it is made, the state may change.

    Its memory is kept for the next one of the same size, since the first touch of memory costs several
    times as much as the copy.
    """

    _spare: list[Tensor] = []
    _lock = threading.Lock()

    def __init__(self, source: Source, pieces: Sequence[FileRange]) -> None:
        starts, position = [], 0
        for piece in pieces:
            starts.append(position)
            position = round_up(position + piece.end - piece.begin, PAGE_BYTES)
        self._memory = self._take(max(position, 1), pinned=source.on_device)
        self._pieces = [
            self._memory[start : start + piece.end - piece.begin]
            for start, piece in zip(starts, pieces, strict=True)
        ]
        for piece, slab in zip(pieces, self._pieces, strict=True):
            source.copy(piece, slab)
        source.settle()

    @classmethod
    def _take(cls, nbytes: int, *, pinned: bool) -> Tensor:
        with cls._lock:
            kept, cls._spare = cls._spare, []
        if kept and kept[0].numel() == nbytes and kept[0].is_pinned() == pinned:
            return kept[0]
        kept.clear()
        return allocate_staging(nbytes, pinned=pinned)

    def piece(self, index: int) -> memoryview:
        return host_view(self._pieces[index])

    def release(self, index: int) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def keep(self) -> None:
        """Leaves the memory to the next snapshot; this one cannot be used any more."""
        with self._lock:
            type(self)._spare = [self._memory]
        self._pieces.clear()


class Staging:
    """A few slabs, filled one after the other while earlier ones are written.

    Args:
        source: What to copy from.
        pieces: What to copy.
        num_slabs: Pieces in memory at once.
    """

    def __init__(self, source: Source, pieces: Sequence[FileRange], *, num_slabs: int) -> None:
        self._source = source
        self._pieces = pieces
        largest = round_up(max((piece.end - piece.begin for piece in pieces), default=1), PAGE_BYTES)
        num_slabs = min(num_slabs, max(1, len(pieces)))
        self._memory = allocate_staging(num_slabs * largest, pinned=source.on_device)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._used: dict[int, Tensor] = {}
        for slab in self._memory.split(largest):
            self._free.put(slab)

    def piece(self, index: int) -> memoryview:
        slab, wanted = self._free.get(), self._pieces[index]
        self._used[index] = slab
        self._source.copy(wanted, slab)
        self._source.settle()
        return host_view(slab[: wanted.end - wanted.begin])

    def release(self, index: int) -> None:
        self._free.put(self._used.pop(index))

    @property
    def nbytes(self) -> int:
        return self._memory.numel()


def copy_all(source: Source, wanted: Iterable[FileRange]) -> list[bytes]:
    """Returns some ranges as bytes of their own."""
    copies = []
    for piece in wanted:
        slab = torch.empty(piece.end - piece.begin, dtype=torch.uint8)
        source.copy(piece, slab)
        source.settle()
        copies.append(bytes(host_view(slab)))
    return copies
