"""The buffer of a tensor stream: collects the bytes that arrive, and hands out complete tensors in order."""

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
from fastload.geometry.ranges import ByteRange, Space
from fastload.loading.targets import Destination, DestinationBuilder, TensorWriter
from fastload.storage.local import Mapped

_SMALL_PART = 4  # of the room for tensors on their way


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor to hand out.

    Attributes:
        entry: The tensor in the checkpoint.
        names: Its names; tied tensors have several.
        is_complex128: Whether it is stored as pairs of real and imaginary parts.
    """

    entry: TensorEntry
    names: tuple[str, ...]
    is_complex128: bool


class StreamBuffer:
    """Allocates each tensor when its first bytes arrive, and hands it out once it is complete.

    Bytes are read or received into their tensors, as long as the incomplete tensors fit into `room_bytes`.
    Other bytes wait in the staging buffer of their round, until the tensors before them have been handed out.

    Args:
        manifest: The checkpoint.
        wanted: The tensors, in the order in which they are handed out.
        device: Device of the tensors.
        room_bytes: Memory for incomplete tensors. A single tensor always fits.
        mapped: The mapped files, if tensors are views of them and no bytes arrive.
    """

    def __init__(
        self,
        manifest: Manifest,
        wanted: Sequence[StreamedTensor],
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
        self._space = Space([ByteRange(0, 0, lengths[index]) for index in self._filled])
        self._left = lengths
        self._next = 0
        self._filling: dict[int, _Filling] = {}
        self._waiting: deque[tuple[int, Tensor]] = deque()
        self._is_closed = False

    @property
    def is_mapped(self) -> bool:
        """Whether tensors are views of their files."""
        return self._mapped is not None

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns the host memory of a byte range, in pieces; None if it has to be placed."""
        pieces: list[Tensor] = []
        for index, begin, end in self._cut(start, nbytes):
            filling = None if self._is_closed else self._memory(index)
            if filling is None:
                return None
            targets = filling.writer.targets(begin, end - begin, at_most - len(pieces))
            if targets is None:
                return None
            pieces += targets
        return pieces

    def place(self, start: int, data: Tensor) -> None:
        """Writes a byte range into its tensors, or keeps it until they have memory."""
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
        """Returns once all bytes placed so far have left their buffers."""
        if is_accelerator(self._device):
            synchronize(self._device)

    def hand_out(self, in_place: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that a round has completed.

        Args:
            in_place: (start, length) of byte ranges that were read or received into their tensors.
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
        """Drops all tensors that were not handed out."""
        self._is_closed = True
        self._filling.clear()
        self._waiting.clear()

    def _take(self) -> Iterator[tuple[str, Tensor]]:
        wanted, filling = self._wanted[self._next], self._filling.pop(self._next, None)
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
        alone = [tensor]
        del tensor  # the caller has the only reference under its last name
        yield last, alone.pop()

    def _place_next(self) -> None:
        """Writes the bytes that have waited longest, room or not: all tensors before theirs are gone."""
        start, piece = self._waiting.popleft()
        for index, begin, _ in self._cut(start, piece.numel()):
            self._fill(index, self._filling.get(index) or self._begin(index), begin, piece)

    def _fill(self, index: int, filling: _Filling, begin: int, piece: Tensor) -> None:
        filling.writer.place(begin, piece)
        self._left[index] -= piece.numel()

    def _memory(self, index: int) -> _Filling | None:
        """Returns the memory of a tensor; None if there is no room for it now."""
        if (filling := self._filling.get(index)) is not None:
            return filling
        filling_bytes = sum(filling.nbytes for filling in self._filling.values())
        if self._filling and filling_bytes + self._wanted[index].entry.nbytes > self._room_bytes:
            return None
        return self._begin(index)

    def _begin(self, index: int) -> _Filling:
        entry = self._wanted[index].entry
        filling = self._filling[index] = _Filling.of(self._manifest, entry, self._allocate(entry))
        return filling

    def _allocate(self, entry: TensorEntry) -> Tensor:
        dtype, shape = torch_spec(entry)
        # The allocator reuses the memory of small tensors, which saves page faults. The memory of large ones
        # returns to the system with the tensor, so that this rank stays within its limit.
        if self._device.type != "cpu" or entry.nbytes <= self._room_bytes // _SMALL_PART:
            return allocate(shape, dtype, self._device)
        return allocate_staging(entry.nbytes, pinned=False).view(dtype).view(shape)

    def _cut(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Cuts a byte range at tensors: (index of the tensor, begin, end), in bytes of the tensor."""
        return ((self._filled[at], begin, end) for at, begin, end in self._space.cut(start, nbytes))


@dataclass(frozen=True)
class _Filling:
    """An incomplete tensor.

    Attributes:
        tensor: The tensor.
        writer: Writes its bytes.
        copy: Called once all bytes are written.
    """

    tensor: Tensor
    writer: TensorWriter
    copy: Callable[[], None]

    @classmethod
    def of(cls, manifest: Manifest, entry: TensorEntry, tensor: Tensor) -> _Filling:
        builder = DestinationBuilder(manifest)
        stored, _ = torch_spec(entry)
        builder.add(entry, stored, tensor, None)
        destinations = builder.build()
        if all(destination.runs is None for destination in destinations):
            return cls(tensor, TensorWriter(destinations), builder.copy)
        # The bytes between its elements arrive, too.
        raw = [allocate((piece.nbytes,), torch.uint8, tensor.device) for piece in entry.pieces]
        writer = TensorWriter(
            [
                Destination(entry, torch.uint8, one, None, piece)
                for one, piece in zip(raw, entry.pieces, strict=True)
            ]
        )

        def copy() -> None:
            for one, (box, _, _, _, strides) in zip(raw, entry.pieces, strict=True):
                elements = one.view(stored).as_strided(box.sizes, strides or row_major(box.sizes))
                narrowed(tensor, box).copy_(elements)

        return cls(tensor, writer, copy)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def finish(self) -> Tensor:
        """Returns the complete tensor."""
        self.copy()
        return self.tensor


def _extents(entry: TensorEntry) -> Sequence[TensorEntry | Piece]:
    return entry.pieces or (entry,)


class MappedFiles:
    """Mapped files of a checkpoint; each stays mapped while a tensor of it is alive.

    Args:
        files: By index in the manifest.
    """

    def __init__(self, files: Mapping[int, Mapped]) -> None:
        self._files = dict(files)
        self._at = -1
        self._bytes = torch.empty(0)

    def tensor(self, entry: TensorEntry, num_together: int = 1) -> Tensor:
        """Returns the next tensor, in the order of the files.

        Args:
            entry: The tensor.
            num_together: Number of its elements that are viewed as one: 2 for complex numbers.

        Raises:
            StorageError: The file before it has changed.
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
        """Releases the files, after the last tensor.

        Raises:
            StorageError: The last file has changed.
        """
        self._leave()
        self._files.clear()

    def _leave(self) -> None:
        """Releases a file, and checks that it has not changed: its tensors may be mixed otherwise."""
        self._bytes = torch.empty(0)
        if (file := self._files.pop(self._at, None)) is not None:
            file.check()
