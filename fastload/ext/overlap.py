"""``snapshot="overlap"``: a snapshot whose large tensors are copied while training goes on."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastload.base import state_copies
from fastload.base.devices import adopt_device, own_device
from fastload.base.threads import ProcessLock, one_torch_thread
from fastload.errors import StateChanged, some_of
from fastload.geometry.dtensors import is_sharded
from fastload.saving.messages import ShardMessage, ShardRange
from fastload.saving.reader import StateReader
from fastload.saving.snapshot import Snapshot

_PIECE_BYTES = 4 << 20  # about a millisecond
_LOW_PRIORITY = 10  # lower ones starve on a host whose cores are all busy, while nobody waits
_TICK_S = 0.001
_LONGEST_OPERATION_S = 1.0

_Piece = tuple[Sequence[ShardRange], ShardMessage, int, int]  # ranges of shards, and bytes of their message


class _PieceQueue:
    """Pieces of a snapshot, which several threads copy at once.

    Args:
        pieces: The pieces.

    Attributes:
        error: The first error of a copy, or None.
    """

    def __init__(self, pieces: Iterable[_Piece]) -> None:
        self.error: Exception | None = None
        self._changed = threading.Condition()  # guards what follows
        self._pieces = deque(pieces)
        self._num_under_way = 0

    def work(self, copy: Callable[[_Piece], None]) -> bool:
        """Copies pieces until there are none; returns whether other threads have ended, too."""
        while True:
            with self._changed:
                if not self._pieces:
                    return not self._num_under_way
                piece = self._pieces.popleft()
                self._num_under_way += 1
            left: _Piece | None = piece
            try:
                copy(piece)
                left = None
            except Exception as error:
                left = None
                self.fail(error)
            finally:
                with self._changed:
                    self._num_under_way -= 1
                    if left is not None:  # a signal's handler raised
                        self._pieces.append(left)
                    if left is not None or not (self._pieces or self._num_under_way):
                        self._changed.notify_all()

    def finish(self, copy: Callable[[_Piece], None]) -> None:
        """Copies pieces until there are none, and waits for those of other threads."""
        while not self.work(copy):
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or not self._num_under_way)

    def fail(self, error: Exception) -> None:
        """Drops all pieces because of an error."""
        with self._changed:
            self.error = self.error or error.with_traceback(None)
            self._pieces.clear()

    def clear(self) -> None:
        """Drops all pieces."""
        with self._changed:
            self._pieces.clear()
            self._changed.notify_all()


class _ChangeCheck:
    """Finds the tensors that change while they are copied, by their version counters.

    Args:
        versions: Name of a tensor → what has its counters, and the numbers of changes at first.

    Attributes:
        changed: Names of the changed tensors, once `compare` was called.
    """

    def __init__(self, versions: Mapping[str, Sequence[tuple[Tensor, int]]]) -> None:
        self.changed: list[str] = []
        self._versions: Mapping[str, Sequence[tuple[Tensor, int]]] | None = versions  # None once compared
        self._lock = threading.Lock()
        self._caller = threading.get_ident()
        self._caller_was_at: object = None

    def copies_ended(self) -> None:
        """Notes where the caller's thread is when the copies end."""
        self._caller_was_at = self._caller_position()

    def compare(self) -> None:
        """Compares the counters, once."""
        with self._lock:
            if self._versions is not None:
                self.changed = [
                    name
                    for name, parts in self._versions.items()
                    if any(part._version != version for part, version in parts)
                ]
                self._versions = None

    def forget(self) -> None:
        """Drops the references to the tensors."""
        with self._lock:
            self._versions = None

    def await_operation(self) -> None:
        """Waits until an operation that the caller was in when the copies ended is over.

        torch counts a change when the operation ends. If the caller's thread has moved on since, or a second
        later, there is none.
        """
        deadline = time.monotonic() + _LONGEST_OPERATION_S
        while (
            self._versions is not None
            and self._caller_was_at is not None
            and self._caller_position() == self._caller_was_at
            and time.monotonic() < deadline
        ):
            time.sleep(_TICK_S)

    def _caller_position(self) -> object:
        """Returns which instruction the caller's thread is at; None if it has ended."""
        frame = sys._current_frames().get(self._caller)
        return (id(frame), frame.f_lasti) if frame is not None else None


class _HeldSteps:
    """Has the steps of all optimizers wait for copies of what they change.

    It does so by a hook of torch that is there only while there are copies. The hook is removed by the thread
    that begins copies and waits for them: torch fails if a hook goes while it calls hooks in another thread.
    A forked child has no copies.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._copies: list[OverlappedSnapshot] = []
        self._hook: Any = None
        os.register_at_fork(after_in_child=self._forget)

    def add(self, copy: OverlappedSnapshot) -> None:
        """Has steps wait for a copy."""
        with self._lock:
            self._copies.append(copy)
            state_copies.under_way.append(copy)
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(self._before_step)

    def discard(self, copy: OverlappedSnapshot) -> None:
        """Forgets a copy."""
        with self._lock:
            if copy in self._copies:
                self._copies.remove(copy)
                state_copies.under_way.remove(copy)

    def remove_hook(self) -> None:
        """Removes the hook if there are no copies."""
        with self._lock:
            if self._hook is not None and not self._copies:
                self._hook.remove()
                self._hook = None

    def _forget(self) -> None:
        self._copies.clear()
        state_copies.under_way.clear()

    def _before_step(self, *_: object) -> None:
        for copy in list(self._copies):
            copy.hold_step()


_held_steps = _HeldSteps()


class OverlappedSnapshot(Snapshot):
    """A snapshot whose large tensors are copied in the background.

    A thread of low priority copies, and whoever waits helps it. On accelerators the copies have a
    stream of their own.

    The state may change once `wait` has returned. Steps of optimizers wait by themselves; see `_HeldSteps`.
    Tensors whose changes torch does not count are copied on construction. The version counters of the others
    are compared when somebody has waited, or in the end. A change that nobody waited for is an error even if
    the copy had ended by chance.
    """

    def _copy(self, reader: StateReader, messages: Sequence[ShardMessage]) -> None:
        numbers = dict.fromkeys(each.tensor for message in messages for each in message.ranges)
        versions = {number: reader.versions(number) for number in numbers}
        pieces: list[_Piece] = []
        for message in messages:
            for ranges, first, last in _cut(message.ranges, versions):
                if versions[ranges[0].tensor]:
                    pieces.append((ranges, message, first, last))
                else:
                    reader.copy(ranges, self.get(message)[first:last])
        late = [number for number, found in versions.items() if found]
        self._reader = _in_background(reader, late)
        self._changes = _ChangeCheck({reader.name_of(number): versions[number] for number in late})
        self._queue = _PieceQueue(pieces)
        self._ended = threading.Event()
        reader.forget()
        _held_steps.add(self)
        try:
            # A `Thread` would wait here until it runs.
            _thread.start_new_thread(self._run, (own_device(),))
        except RuntimeError:  # the system cannot start a thread
            self._run(own_device(), in_background=False)

    def _copy_piece(self, piece: _Piece) -> None:
        ranges, message, first, last = piece
        self._reader.copy(ranges, self.get(message)[first:last])

    def _run(self, device: int | None, *, in_background: bool = True) -> None:
        adopt_device(device)
        if in_background and sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        try:
            with one_torch_thread():  # the others of OpenMP would not have this priority
                self._queue.finish(self._copy_piece)
            self._reader.wait_copied()
        except Exception as error:
            self._queue.fail(error)
        self._changes.copies_ended()
        self._reader.forget()
        self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all is copied; the state may change afterwards."""
        began = time.perf_counter()
        if timeout is None:
            self._queue.work(self._copy_piece)
        if not self._ended.wait(timeout):
            return False
        self._compare()
        self.waited_s += time.perf_counter() - began
        return True

    def release_steps(self) -> None:
        """Removes the hook of `_HeldSteps`, unless another copy needs it."""
        _held_steps.remove_hook()

    def hold_step(self) -> None:
        """Has the following work of this thread begin after the copy: on the host, and on its streams."""
        began = time.perf_counter()
        self._queue.finish(self._copy_piece)
        self._reader.streams.hold_caller()
        self._compare()
        self.waited_s += time.perf_counter() - began

    def await_copies(self) -> None:
        """Waits until all bytes are copied; raises the error of the copy."""
        self._ended.wait()
        if self._queue.error is not None:
            raise self._queue.error

    def require_unchanged(self) -> None:
        """Raises `StateChanged` if the state changed before somebody waited for the copy."""
        self._changes.await_operation()
        self._compare()
        if changed := self._changes.changed:
            raise StateChanged(
                f"{some_of(changed)} changed while the state was copied in the background, so nothing was "
                "saved: call SaveHandle.wait_snapshot() before the change (steps of torch.optim optimizers "
                'wait by themselves), or save with SaveOptions(snapshot="block")',
                tuple(changed),
            )

    def _compare(self) -> None:
        self._changes.compare()
        _held_steps.discard(self)

    def cancel(self) -> None:
        """Ends the copy, so that nobody has to wait for it."""
        self._queue.clear()
        self._ended.wait()
        self._changes.forget()  # the handle of a failed save may be kept
        _held_steps.discard(self)


def _in_background(reader: StateReader, numbers: Iterable[int]) -> StateReader:
    """Returns a reader of some tensors, by their numbers in `Layout.space`, as they are now.

    It reads the same memory even if the caller gives its tensors other memory. On accelerators it has streams
    of its own, which begin after the work that is queued on the caller's.
    """
    parts = {name: reader.parts_of(name) for name in map(reader.name_of, numbers)}
    tensors = {name: reader.tensors[name] for name in parts}
    plain = {name: parts[name][0][1] for name, tensor in tensors.items() if not is_sharded(tensor)}
    return reader.replaced(tensors | plain, parts, reader.streams.for_copies())


def _cut(
    ranges: Sequence[ShardRange], versions: Mapping[int, Sequence[object]]
) -> Iterator[tuple[Sequence[ShardRange], int, int]]:
    """Yields a message in pieces, each either of tensors with version counters or of others.

    Returns:
        The ranges of a piece, and the first and the last of its bytes in the message.
    """
    piece: list[ShardRange] = []
    first = last = 0
    was_counted = False
    for number, shard, start, stop in ranges:
        is_counted = bool(versions[number])
        for begin in range(start, stop, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, stop)
            if piece and (last + end - begin - first > _PIECE_BYTES or is_counted != was_counted):
                yield piece, first, last
                piece, first = [], last
            piece.append(ShardRange(number, shard, begin, end))
            last += end - begin
            was_counted = is_counted
    if piece:
        yield piece, first, last
