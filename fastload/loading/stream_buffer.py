"""The tensors of a stream on their way: from the bytes that arrive to tensors that are complete, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastload.base.devices import is_accelerator, synchronize
from fastload.base.memory import allocate, allocate_staging
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.geometry.box import row_major
from fastload.geometry.dtensors import narrowed
from fastload.geometry.extents import Extent, Space
from fastload.loading.place import Destination, Placer, Sources
from fastload.storage.local import Mapped

_SMALL_PART = 4  # of the room for tensors on their way


@dataclass(frozen=True)
class Wanted:
    """A tensor that is to be handed out.

    Attributes:
        entry: The tensor of the checkpoint.
        names: What it is handed out as: tied tensors have several names.
        is_complex128: Whether it is stored as pairs of its real and imaginary parts.
    """

    entry: TensorEntry
    names: tuple[str, ...]
    is_complex128: bool


class StreamBuffer:
    """Has memory for a tensor from when its first bytes come until it is handed out.

    Bytes are read or received right where they belong as long as the tensors on their way fit into some
    room. Others are placed once it is their turn; what of a round has to wait until the tensors before it
    were handed out stays in its buffer.

    Args:
        manifest: The checkpoint.
        wanted: In the order in which they are handed out.
        device: Where the tensors live.
        room_bytes: For the tensors on their way, in which one has room whatever its size.
        mapped: The files, if tensors are handed out as views of them: no bytes are to come.
    """

    def __init__(
        self,
        manifest: Manifest,
        wanted: Sequence[Wanted],
        device: torch.device,
        room_bytes: int,
        mapped: MappedFiles | None = None,
    ) -> None:
        self._manifest = manifest
        self._wanted = wanted
        self._device = device
        self._room_bytes = room_bytes
        self._mapped = mapped
        lengths = [
            0 if mapped is not None else sum(extent.nbytes for extent in _extents(one.entry))
            for one in wanted
        ]
        self._filled = [index for index, nbytes in enumerate(lengths) if nbytes]
        self._space = Space([Extent(0, 0, lengths[index]) for index in self._filled])
        self._left = lengths
        self._next = 0
        self._held: dict[int, _Filling] = {}
        self._waiting: deque[tuple[int, Tensor]] = deque()
        self._is_closed = False

    @property
    def is_mapped(self) -> bool:
        """Whether tensors are views of their files."""
        return self._mapped is not None

    @property
    def extents(self) -> list[TensorEntry | Piece]:
        """Where the bytes are that are to come, in the order of the tensors."""
        return [extent for one in self._wanted for extent in _extents(one.entry)]

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns host memory that a range belongs to, in pieces; None if it is to be placed."""
        pieces: list[Tensor] = []
        for index, begin, end in self._cut(start, nbytes):
            filling = None if self._is_closed else self._memory(index)
            if filling is None:
                return None
            targets = filling.placer.targets(begin, end - begin, at_most - len(pieces))
            if targets is None:
                return None
            pieces += targets
        return pieces

    def place(self, start: int, data: Tensor) -> None:
        """Takes a range of what is wanted to its tensors, or keeps it for when they have memory."""
        position = 0
        for index, begin, end in self._cut(start, data.numel()):
            piece = data[position : position + end - begin]
            position += end - begin
            if self._is_closed:
                continue
            filling = None if self._waiting else self._memory(index)
            if filling is None:
                self._waiting.append((start + position - (end - begin), piece))
            else:
                self._fill(index, filling, begin, piece)

    def settle(self) -> None:
        """Returns once everything placed so far has left the buffers it came from."""
        if is_accelerator(self._device):
            synchronize(self._device)

    def hand_out(self, in_place: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that a round has completed.

        Args:
            in_place: (start, length) of what is wanted that came right to where it belongs.
        """
        for start, nbytes in in_place:
            for index, begin, end in self._cut(start, nbytes):
                self._left[index] -= end - begin
        while True:
            self.settle()
            while not self._is_closed and self._next < len(self._wanted) and not self._left[self._next]:
                yield from self._take()
            if not self._waiting or self._is_closed:
                break
            self._place_next()
        if self._mapped is not None and not self._is_closed:
            self._mapped.close()

    def close(self) -> None:
        """Lets go of all that was not handed out: nobody will take it."""
        self._is_closed = True
        self._held.clear()
        self._waiting.clear()

    def _take(self) -> Iterator[tuple[str, Tensor]]:
        wanted, filling = self._wanted[self._next], self._held.pop(self._next, None)
        self._next += 1
        if self._mapped is not None:
            tensor = self._mapped.tensor(wanted.entry, 1 + wanted.is_complex128)
        else:
            tensor = filling.finish() if filling is not None else self._allocate(wanted.entry)
        del filling
        tensor = torch.view_as_complex(tensor) if wanted.is_complex128 else tensor
        *others, last = wanted.names
        for name in others:
            yield name, tensor
        held = [tensor]
        del tensor  # whoever takes it under its last name has it alone
        yield last, held.pop()

    def _place_next(self) -> None:
        """Places what has waited longest, whether there is room or not: what came before it is gone."""
        start, piece = self._waiting.popleft()
        for index, begin, _ in self._cut(start, piece.numel()):
            self._fill(index, self._held.get(index) or self._hold(index), begin, piece)

    def _fill(self, index: int, filling: _Filling, begin: int, piece: Tensor) -> None:
        filling.placer.place(begin, piece)
        self._left[index] -= piece.numel()

    def _memory(self, index: int) -> _Filling | None:
        """Returns what a tensor is filled by; None if there is no room for it now."""
        if (filling := self._held.get(index)) is not None:
            return filling
        held_bytes = sum(filling.nbytes for filling in self._held.values())
        if self._held and held_bytes + self._wanted[index].entry.nbytes > self._room_bytes:
            return None
        return self._hold(index)

    def _hold(self, index: int) -> _Filling:
        entry = self._wanted[index].entry
        filling = self._held[index] = _Filling.of(self._manifest, entry, self._allocate(entry))
        return filling

    def _allocate(self, entry: TensorEntry) -> Tensor:
        dtype, shape = torch_spec(entry)
        # An allocator keeps what is small for the next tensor, which saves touching new pages. What is large
        # goes back to the system with the tensor: kept, it would be more than this rank may use.
        if self._device.type != "cpu" or entry.nbytes <= self._room_bytes // _SMALL_PART:
            return allocate(shape, dtype, self._device)
        return allocate_staging(entry.nbytes, pinned=False).view(dtype).view(shape)

    def _cut(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Cuts a range of what is wanted into (index of the tensor, begin, end) in bytes of that."""
        return ((self._filled[at], begin, end) for at, begin, end in self._space.cut(start, nbytes))


@dataclass(frozen=True)
class _Filling:
    """A tensor that is being filled.

    Attributes:
        tensor: The tensor.
        placer: Takes bytes there.
        copy: To be called once all have come.
    """

    tensor: Tensor
    placer: Placer
    copy: Callable[[], None]

    @classmethod
    def of(cls, manifest: Manifest, entry: TensorEntry, tensor: Tensor) -> _Filling:
        sources = Sources(manifest)
        stored, _ = torch_spec(entry)
        sources.add(entry, stored, tensor, None)
        destinations = sources.destinations()
        if all(destination.runs is None for destination in destinations):
            return cls(tensor, Placer(destinations), sources.copy)
        # What lies between its elements comes, too.
        raw = [allocate((piece.nbytes,), torch.uint8, tensor.device) for piece in entry.pieces]
        placer = Placer(
            [
                Destination(entry, torch.uint8, one, None, piece)
                for one, piece in zip(raw, entry.pieces, strict=True)
            ]
        )

        def copy() -> None:
            for one, (box, _, _, _, strides) in zip(raw, entry.pieces, strict=True):
                elements = one.view(stored).as_strided(box.sizes, strides or row_major(box.sizes))
                narrowed(tensor, box).copy_(elements)

        return cls(tensor, placer, copy)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def finish(self) -> Tensor:
        """Returns the tensor, complete."""
        self.copy()
        return self.tensor


def _extents(entry: TensorEntry) -> Sequence[TensorEntry | Piece]:
    return entry.pieces or (entry,)


class MappedFiles:
    """Files of a checkpoint in this process's memory, as they are; each until its last tensor is let go of.

    Args:
        files: By their index in the manifest.
    """

    def __init__(self, files: Mapping[int, Mapped]) -> None:
        self._files = dict(files)
        self._at = -1
        self._bytes = torch.empty(0)

    def tensor(self, entry: TensorEntry, num_together: int = 1) -> Tensor:
        """Returns the next tensor, in the order of the files.

        Args:
            entry: The tensor.
            num_together: So many of its elements are to be taken for one, in the end.

        Raises:
            StorageError: Somebody has written to the file before.
        """
        dtype, shape = torch_spec(entry)
        if not entry.nbytes:
            return torch.empty(shape, dtype=dtype)
        if entry.file != self._at:
            self._leave()
            self._at = entry.file
            self._bytes = torch.frombuffer(self._files[entry.file].data, dtype=torch.uint8)
        raw = self._bytes[entry.offset : entry.offset + entry.nbytes]
        if entry.offset % (dtype.itemsize * num_together):
            raw = raw.clone()  # torch has no tensors at such addresses
        return raw.view(dtype).view(shape)

    def close(self) -> None:
        """Lets go of the files, after the last tensor.

        Raises:
            StorageError: Somebody has written to the last one.
        """
        self._leave()
        self._files.clear()

    def _leave(self) -> None:
        """Lets go of a file; if it has changed, tensors of it may be older in some places than in others."""
        self._bytes = torch.empty(0)
        if (file := self._files.pop(self._at, None)) is not None:
            file.check()
