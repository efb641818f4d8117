"""Copies of this rank's tensors in host memory, for an asynchronous save.

Training waits until they are made, or with an extension goes on meanwhile, until its next weight update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from fastload.base.devices import can_pin
from fastload.base.memory import PAGE_BYTES, allocate_staging, power_of_two, round_up
from fastload.base.threads import ProcessLock
from fastload.saving.messages import ShardMessage
from fastload.saving.reader import StateReader

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
            self._free = {kind_before: self._free.get(kind_before, []) for kind_before in self._last}
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
        reader.wait_copied()
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

    def release_steps(self) -> None:
        """Has no steps of training wait any more; called in the thread that waits for the copy."""

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
    longest, left, room = max(sizes, default=0), sum(sizes), 0
    for size in sizes:
        if lengths[-1] and lengths[-1] + size > room:
            lengths.append(0)
        if not lengths[-1]:
            room = _room(size, left) if longest > _BUFFER_BYTES else _BUFFER_BYTES
        left -= size
        offsets.append((len(lengths) - 1, lengths[-1]))
        lengths[-1] += size
    return offsets, [max(length, PAGE_BYTES) for length in lengths]


def _room(size: int, left: int) -> int:
    """Returns the length of a buffer for long messages: the power of two of which least is not used.

    Args:
        size: Bytes of the first message; others are probably as long.
        left: Bytes of this one and of all later ones.
    """
    lengths = [power_of_two(size) << shift for shift in range(4)]
    return min(lengths, key=lambda length: length / min(left, length // size * size))
