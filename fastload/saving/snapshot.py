"""Copies of this rank's tensors in host memory, which an asynchronous save makes while training waits."""

from __future__ import annotations

import copy
import ctypes
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fastload.base.devices import DeviceStreams, accelerators_of, can_pin
from fastload.base.memory import (
    PAGE_BYTES,
    allocate_staging,
    borrowed,
    byte_view,
    copy_flat,
    host_view,
    round_up,
    runs,
)
from fastload.base.threads import ProcessLock
from fastload.base.trace import Stopwatch
from fastload.geometry.box import Box
from fastload.geometry.dtensors import is_dtensor, local_of, local_parts, narrowed
from fastload.saving.layout import Layout
from fastload.saving.messages import ShardMessage, ShardRange

_SMALL_BYTES = 64 << 10
_BUFFER_BYTES = 64 << 20  # a power of two, and a small part of a large share

_Kind = tuple[tuple[int, ...], bool]  # lengths of the buffers in bytes, and whether they are pinned

_lock = ProcessLock()


class BufferPool:
    """A pool of buffers for snapshots: the first touch of memory takes several times as long as the copy.

    Thread-safe.

    Args:
        num_snapshots: Most snapshots at once. The first one allocates the memory of all.
        num_kinds: Number of different states that are saved in turn, such as a model and a training state.
    """

    def __init__(self, num_snapshots: int, *, num_kinds: int = 1) -> None:
        self._num_snapshots = num_snapshots
        self._last: deque[_Kind] = deque(maxlen=num_kinds)
        self._free: dict[_Kind, list[list[Tensor]]] = {}

    def take(self, lengths: Sequence[int], *, pinned: bool) -> list[Tensor]:
        """Returns buffers of these lengths, in bytes.

        Raises:
            MemoryError: The system refuses that much.
        """
        kind = (tuple(lengths), pinned and can_pin())
        with _lock:
            is_first = kind not in self._last
            self._last.append(kind)
            self._free = {each: self._free.get(each, []) for each in self._last}
            buffers = self._free[kind].pop() if self._free[kind] else None
        if buffers is None:
            buffers = [allocate_staging(nbytes, pinned=pinned) for nbytes in lengths]
        for _ in range(self._num_snapshots - 1 if is_first else 0):
            # Touched, so that a lack of memory shows now and not in the middle of a training.
            self.give_back([allocate_staging(nbytes, pinned=pinned).zero_() for nbytes in lengths])
        return buffers

    def give_back(self, buffers: list[Tensor]) -> None:
        """Keeps buffers for the next snapshot, if one of the last snapshots had the same lengths."""
        kind = (tuple(buffer.numel() for buffer in buffers), buffers[0].is_pinned())
        with _lock:
            if kind in self._last and len(self._free[kind]) < self._num_snapshots:
                self._free[kind].append(buffers)

    def clear(self) -> None:
        """Frees the free buffers."""
        with _lock:
            self._last.clear()
            self._free.clear()


buffer_pool = BufferPool(1, num_kinds=2)
"""The pool of the process, for saves without a manager."""


class StateReader:
    """Reads the bytes of this rank's tensors. Thread-safe.

    Args:
        layout: The files.
        tensors: Name → tensor; any strides, any device.
        uncounted: Names of tensors that may change without torch counting it; see `StateEncoding`.
        shards: Local tensors with version counters of their own; likewise.

    Attributes:
        watch: Time of copies.
        streams: The streams that copy: the caller's.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        uncounted: Collection[str] = (),
        shards: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        self.watch = Stopwatch()
        self.streams = DeviceStreams.of_caller(accelerators_of(tensors.values()))
        self._layout = layout
        self._tensors = tensors
        self._uncounted = uncounted
        self._shards = shards
        self._parts: dict[str, list[tuple[Box, Tensor]]] = {}

    @classmethod
    def of_parts(cls, layout: Layout, parts: Mapping[str, list[tuple[Box, Tensor]]]) -> StateReader:
        """Returns a reader of parts of tensors, each with its box, in host memory."""
        reader = cls(layout, {})
        reader._parts = dict(parts)
        return reader

    def with_layout(self, layout: Layout) -> StateReader:
        """Returns a reader of the same tensors in another layout."""
        return self._changed(layout, self._tensors)

    def in_background(self, numbers: Iterable[int]) -> StateReader:
        """Returns a reader of some tensors, by their numbers in `Layout.space`, as they are now.

        It reads the same memory even if the caller gives its tensors other memory. On accelerators it has
        streams of its own, which begin after the work that is queued on the caller's.
        """
        parts = {name: self._parts_of(name) for name in map(self.name_of, numbers)}
        tensors = {name: self._tensors[name] for name in parts}
        plain = {name: parts[name][0][1] for name, tensor in tensors.items() if not is_dtensor(tensor)}
        reader = self._changed(self._layout, tensors | plain)
        reader._parts = parts
        reader.streams = self.streams.for_copies()
        return reader

    def borrowing(self) -> StateReader:
        """Returns a reader of the same memory, which does not keep it; see `borrowed`."""
        tensors = {name: borrowed(local_of(tensor)) for name, tensor in self._tensors.items()}
        reader = self._changed(self._layout, tensors)
        reader._parts = {
            name: [(box, borrowed(view)) for box, view in self._parts_of(name)] for name in tensors
        }
        return reader

    def in_current_streams(self) -> StateReader:
        """Returns a reader that copies in the streams that are the caller's now."""
        if not self.streams:
            return self
        reader = copy.copy(self)
        reader.streams = DeviceStreams.of_caller(self.streams.devices)
        return reader

    def _changed(self, layout: Layout, tensors: Mapping[str, Tensor]) -> StateReader:
        reader = copy.copy(self)
        reader._layout, reader._tensors, reader._parts = layout, tensors, {}
        return reader

    def name_of(self, number: int) -> str:
        """Returns the name of a tensor, by its number in `Layout.space`."""
        return self._layout.space.ranges[number].name

    def versions(self, number: int) -> list[tuple[Tensor, int]]:
        """Returns the version counters of a tensor: what has them, and the numbers of changes so far.

        Returns:
            Nothing if torch does not count all changes. It counts none of `BatchNorm` in its statistics,
            which are small.
        """
        name = self.name_of(number)
        tensor = self._tensors[name]
        if name in self._uncounted or tensor.nbytes <= _SMALL_BYTES:
            return []
        parts = self._parts_of(name)
        if sum(part.nbytes for _, part in parts) <= _SMALL_BYTES:
            return []
        local = parts[0][1]  # a view, which shares its counter
        if local.is_inference():
            return []
        counters = [tensor]
        if is_dtensor(tensor):
            counters += [local, self._shards.get(local.data_ptr(), local)]
        return [(each, each._version) for each in counters]

    @property
    def on_device(self) -> bool:
        """Whether some tensors are on an accelerator."""
        return bool(self.streams)

    def is_in_host_memory(self, name: str) -> bool:
        """Whether a tensor is in host memory."""
        return self._tensors[name].is_cpu

    def copy(self, ranges: Iterable[ShardRange], out: Tensor) -> None:
        """Starts to copy ranges of shards into the beginning of a flat uint8 host tensor; see `settle`."""
        position, address = 0, out.data_ptr()
        with self.watch.span(nbytes=out.numel()), self.streams.current():
            for number, shard, begin, end in ranges:
                nbytes = end - begin
                tensor = self._view(number, shard.box)
                if nbytes <= _SMALL_BYTES and tensor.is_cpu and tensor.is_contiguous():
                    # Without views, which take longer to make than a small tensor to copy.
                    ctypes.memmove(address + position, tensor.data_ptr() + begin, nbytes)
                else:
                    _copy_bytes(tensor, begin, end, out[position : position + nbytes])
                position += nbytes

    def view(self, number: int) -> memoryview | None:
        """Returns a complete tensor in place; None if its bytes are not contiguous in host memory."""
        tensor = self._tensors[self.name_of(number)].detach()
        if is_dtensor(tensor) or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
            return None
        return host_view(byte_view(tensor))

    def settle(self) -> None:
        """Waits for all copies that were started."""
        with self.watch:
            self.streams.synchronize()

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Returns the boxes of a tensor that this rank holds."""
        return tuple(box for box, _ in self._parts_of(name))

    def forget(self) -> None:
        """Drops the references to the state."""
        self._tensors, self._shards = {}, {}
        self._parts.clear()

    def _parts_of(self, name: str) -> list[tuple[Box, Tensor]]:
        """Returns the local parts of a tensor, detached; cached, since a DTensor takes long to answer."""
        if name not in self._parts:
            self._parts[name] = [(box, view.detach()) for box, view in local_parts(self._tensors[name])]
        return self._parts[name]

    def _view(self, number: int, box: Box) -> Tensor:
        """Returns a box of a tensor, by its number in `Layout.space`."""
        name = self._layout.space.ranges[number].name
        tensor = self._tensors.get(name)
        if tensor is not None and not is_dtensor(tensor) and box.sizes == tensor.shape:
            return tensor
        for held, view in self._parts_of(name):
            if held == box:
                return view
            if held.intersect(box) == box:
                return narrowed(view, box.relative_to(held))
        raise AssertionError(f"this rank does not hold {box}")


def _copy_bytes(tensor: Tensor, begin: int, end: int, out: Tensor) -> None:
    """Starts to copy a range of the bytes of a tensor, of any strides, on any device, in row-major order."""
    tensor = tensor.detach()
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


class Snapshot:
    """A copy of the bytes that this rank contributes to a save; the state may change afterwards.

    It has several buffers, since torch rounds page-locked memory up to a power of two.

    Args:
        reader: Reads the state. It forgets the state once all is copied.
        messages: The bytes to copy.
        pool: Lends the memory.

    Attributes:
        waited_s: Seconds that training waited for it after the call.
    """

    def __init__(self, reader: StateReader, messages: Sequence[ShardMessage], pool: BufferPool) -> None:
        offsets, lengths = _pack([round_up(message.nbytes, PAGE_BYTES) for message in messages])
        self.waited_s = 0.0
        self._pool = pool
        self._buffers = pool.take(lengths, pinned=reader.on_device)
        numbers = [(message.writer, message.number) for message in messages]
        self._places = dict(zip(numbers, offsets, strict=True))
        self._copy(reader, messages)

    def _copy(self, reader: StateReader, messages: Sequence[ShardMessage]) -> None:
        for message in messages:
            reader.copy(message.ranges, self.get(message))
        reader.settle()
        reader.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(buffer.numel() for buffer in self._buffers)

    def get(self, message: ShardMessage) -> Tensor:
        """Returns the bytes of a message as a flat uint8 tensor."""
        buffer, start = self._places[message.writer, message.number]
        return self._buffers[buffer][start : start + message.nbytes]

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the state may change; returns whether it may, after so many seconds at most."""
        return True

    def await_copies(self) -> None:
        """Waits until all bytes are copied; raises the error of the copy."""

    def require_unchanged(self) -> None:
        """Raises `StateChanged` if the state changed while it was copied."""

    def cancel(self) -> None:
        """Ends the copy, so that nobody has to wait for it."""

    def release(self) -> None:
        """Returns the memory to the pool; the snapshot cannot be used any more."""
        self.cancel()
        buffers, self._buffers = self._buffers, []
        self._pool.give_back(buffers)


def _pack(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the buffer and offset of each message, and the lengths of the buffers, at least one."""
    offsets, lengths = [], [0]
    for size in sizes:
        if lengths[-1] and lengths[-1] + size > _BUFFER_BYTES:
            lengths.append(0)
        offsets.append((len(lengths) - 1, lengths[-1]))
        lengths[-1] += size
    return offsets, [max(length, PAGE_BYTES) for length in lengths]
