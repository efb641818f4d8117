"""Streams of tensors, in bounded memory: the rank takes tensors, and does its part for the other ranks."""

from __future__ import annotations

import logging
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore
from types import TracebackType

import torch
from torch import Tensor

from fastload.base.devices import follow, is_accelerator, record_use, synchronize
from fastload.base.memory import allocate, allocate_staging
from fastload.base.threads import Task, raise_first
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.observers import notify, notifying_of_failure
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.formats.state import OWN_PREFIX
from fastload.geometry.box import Box, row_major
from fastload.geometry.dtensors import narrowed
from fastload.geometry.ranges import ByteRange, Space
from fastload.loading.access import Access
from fastload.loading.match import BoxesByName, BoxRequest, Match, compare_boxes, plain_box
from fastload.loading.mismatch import raise_mismatch
from fastload.loading.prepare import Job, Opened, prepare
from fastload.loading.selection import RankView
from fastload.loading.session import Session
from fastload.loading.targets import Destination, DestinationBuilder, TensorWriter, target_device
from fastload.storage.local import Mapped

_log = logging.getLogger(__name__)

_LEAST_STAGING_BYTES = 1 << 16
_MAX_MAPPED_FILES = 256  # each keeps a descriptor
_NUM_BYTES = "Q"

BoxSelection = Mapping[str, Box | Sequence[Box]]


@short_tracebacks
class TensorStream(Iterator[tuple[str, Tensor]]):
    """Pairs of a name and a tensor; made by `Checkpoint.tensors`, for all ranks to iterate over.

    A rank may leave it at any time, with ``break``, `close`, or by dropping it. It then does its part for the
    other ranks until they have their tensors, in the background. If data go from device to device, it does so
    in `close`, in the next call of its checkpoint, or when both are dropped. The transfer ends once all ranks
    have left. As a context manager, or within that of its checkpoint, an exception ends it on all ranks.

    Args:
        owner: Its checkpoint, which lives as long as it does.
        session: The loads of the checkpoint.
        transfer: The transfer.
    """

    def __init__(self, owner: object, session: Session, transfer: StreamTransfer | BoxStreamTransfer) -> None:
        self._owner = owner
        self._session = session
        self._transfer = transfer

    def __next__(self) -> tuple[str, Tensor]:
        self._session.require_own()
        name, tensor = self._transfer.take()
        record_use(tensor)  # it may have been allocated by another thread, on another stream
        return name, tensor

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # no thread can start while the interpreter ends
            if not (self._session.is_inherited or self._transfer.leaves_in_order):
                self._transfer.leave()

    def close(self) -> None:
        """Leaves the stream; does nothing at its end. Later tensors are not handed out."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if not self._session.is_inherited:
            self._transfer.leave(error)


def prepare_stream(
    session: Session,
    names: Sequence[str] | str | None,
    device: torch.device | str | None,
    boxes: BoxSelection | None,
    *,
    borrow: bool,
) -> StreamTransfer | BoxStreamTransfer:
    """Prepares a stream on all ranks; see `Checkpoint.tensors`, also for errors."""
    if boxes is not None:
        return stream_boxes(session, names, boxes, device)
    return stream_tensors(session, names, device, borrow=borrow)


# Tensors that all ranks take


@dataclass(frozen=True)
class StreamRequest:
    """The arguments of `Checkpoint.tensors`, without boxes.

    Attributes:
        names: See there.
        device: See there.
        room_bytes: Memory for the tensors that arrive.
        mapped: The mapped files, if tensors are views of them.
    """

    names: Sequence[str] | str | None
    device: torch.device | str | None
    room_bytes: int
    mapped: MappedFiles | None = None
    dtype: None = None
    is_same: bool = True

    def match(self, manifest: Manifest, rank: int, size: int, members: Sequence[int] | None) -> Match:
        """Selects the tensors, without memory for them.

        Raises:
            MismatchError: No tensor has some name.
            OptionError: The device cannot be used.
            ManifestError: torch lacks a dtype.
        """
        device = target_device(self.device)
        tensors = _select(RankView.of(manifest, rank, size), self.names)
        buffer = StreamBuffer(manifest, tensors, device, self.room_bytes, self.mapped)
        nothing = torch.empty(0)
        destinations = [
            Destination(one.entry, torch_spec(one.entry)[0], nothing, None, piece)
            for one in tensors
            for piece in one.entry.pieces or (None,)
        ]
        return Match(destinations, device, lambda: None, writer=buffer, is_mapped=self.mapped is not None)


def _select(view: RankView, names: Sequence[str] | str | None) -> list[StreamedTensor]:
    """Returns the tensors to hand out, in the order of the checkpoint."""
    selection = view.select("*" if names is None else names)
    if names is not None:
        raise_mismatch(view.manifest.url, missing=selection.absent)
    found: dict[str, list[str]] = {}
    complex128: set[str] = set()
    for name, saved in selection.chosen.items():
        if names is not None or not saved.stored.startswith(OWN_PREFIX) or not view.has_own:
            found.setdefault(saved.stored, []).append(name)
            complex128 |= {saved.stored} if saved.is_complex128 else set()
    return [
        StreamedTensor(entry, tuple(found[entry.name]), entry.name in complex128)
        for entry in view.manifest.tensors
        if entry.name in found
    ]


def stream_tensors(
    session: Session, names: Sequence[str] | str | None, device: torch.device | str | None, *, borrow: bool
) -> StreamTransfer:
    """Prepares a stream of tensors on all ranks; see `Checkpoint.tensors`.

    Raises:
        FastloadError: A rank cannot take them.
    """
    if session.stored.guards:
        session.reopen_exactly()  # tensors that were handed out cannot be loaded again
    mapped = _map_files(session.opened, device) if borrow else None
    room_bytes = session.opened.options.staging_bytes // 2
    return StreamTransfer(session, prepare(session.opened, StreamRequest(names, device, room_bytes, mapped)))


def _map_files(opened: Opened, device: torch.device | str | None) -> MappedFiles | None:
    """Maps the files of a checkpoint on all ranks, or on none, if that is faster than reading them.

    It is where each rank reads everything for itself, into host memory. Data to be verified are read.
    """
    access, manifest = opened.access, opened.access.stored
    indexes = {entry.file for entry in manifest.tensors if entry.nbytes}
    is_plain = access.supply is None and not manifest.guards and not any(e.pieces for e in manifest.tensors)
    if (
        opened.block_bytes
        or not is_plain
        or len(indexes) > _MAX_MAPPED_FILES
        or not opened.choose_strategy().alone
    ):
        return None
    with opened.world.step(f"mapping {manifest.url}") as step:
        mapped = _map_here(access, indexes) if target_device(device).type == "cpu" else None
        step.answer(mapped is not None)
    return mapped if all(step.answers) else None


def _map_here(access: Access, indexes: Iterable[int]) -> MappedFiles | None:
    """Maps files of a checkpoint on this rank; returns None if one cannot be mapped."""
    mapped: dict[int, Mapped] = {}
    for index in indexes:
        file = access.storage.map(access.stored.files[index].name)
        if file is None:
            return None
        mapped[index] = file
    return MappedFiles(mapped)


@dataclass(frozen=True)
class _Streamed(Job):
    """A transfer whose rounds have been run.

    Attributes:
        errors: Why they have ended early; emptied.
    """

    errors: list[BaseException]

    def run(self) -> None:
        """Raises the first error, if there is one."""
        raise_first(self.errors)


class StreamTransfer:
    """The transfer of a stream of tensors, on one rank.

    Args:
        session: The open checkpoint.
        job: The transfer, ready to run.
    """

    def __init__(self, session: Session, job: Job) -> None:
        assert isinstance(job.writer, StreamBuffer), "made for a stream"
        self._session = session
        self._world = job.matched.opened.world
        self._job = job
        self._stream_buffer = job.writer
        self._began, self._source = time.perf_counter(), job.matched.opened.access.source
        self._tensors = self._hand_out()
        self._departure = Departure(self._world, ahead=job.pipeline.plan.depth)
        self._rest: Task | None = None
        self._has_left = self._is_over = False
        self._cause: BaseException | None = None  # why this rank ends it on all ranks

    @property
    def leaves_in_order(self) -> bool:
        """Whether what is left to do for other ranks is done in the caller's thread, when it says so."""
        return bool(self._job.pipeline.transport.starts_ahead)

    def take(self) -> tuple[str, Tensor]:
        """Returns the next tensor.

        Raises:
            StopIteration: There is none, or this rank has left.
            FastloadError: A rank failed.
        """
        if self._is_over or self._has_left:
            raise StopIteration
        return next(self._tensors)

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the stream, and goes on for the other ranks, in the background unless `leaves_in_order`.

        Args:
            error: Ends the stream on all ranks; None does not.
        """
        if self._is_over:
            return
        if error is not None and self._cause is None:
            self._cause = error
            self._world.flag_failure()
        if self._has_left:
            return
        self._has_left = True
        self._stream_buffer.close()
        if self.leaves_in_order:
            self._finish()
        else:
            self._rest = Task(self._finish, "fastload-rest")
            self._rest.start()

    def wait(self) -> None:
        """Waits for the end on this rank, after it has left."""
        if self._rest is not None:
            self._rest.join()

    def _hand_out(self) -> Iterator[tuple[str, Tensor]]:
        try:
            with self._session.usable():
                errors: list[BaseException] = []
                patience = self._world.patience_s, self._world.peer_failed
                try:
                    for in_place in self._job.pipeline.steps(self._ends_before):
                        yield from self._stream_buffer.hand_out(in_place, *patience)
                    yield from self._stream_buffer.hand_out((), *patience)
                except Exception as error:
                    errors.append(error)
                if self._cause is not None:
                    errors.insert(0, self._cause)
                job = self._job
                streamed = _Streamed(job.matched, job.bytes_wanted, job.writer, job.pipeline, errors)
                with notifying_of_failure(self._world, "load", self._began, tier=self._source):
                    loaded = self._session.run(streamed)
                if loaded is not None:
                    notify(self._world, "load", self._began, report=loaded.report)
        finally:
            self._is_over = True
            self._stream_buffer.close()

    def _ends_before(self, number: int) -> bool:
        if not self._has_left:
            return False
        return self._job.matched.decision.alone or self._departure.ends_before(number)

    def _finish(self) -> None:
        """Runs the rest of the transfer for the other ranks, which learn of its errors."""
        try:
            if not self._job.matched.decision.alone:
                self._departure.leave(self._job.pipeline.num_posted)
            for _ in self._tensors:
                pass
        except Exception as error:
            _log.debug("after this rank had left: %s", error)
        finally:
            self._cause = None


class Departure:
    """Ends a transfer with the same round on all ranks, once all of them have left it.

    The last rank that leaves chooses the round. No other rank is further: it begins no round that is more
    than `ahead` rounds after those that the last rank has begun.

    Args:
        world: The ranks.
        ahead: How many rounds a rank may be ahead of another one.
    """

    def __init__(self, world: World, *, ahead: int) -> None:
        self._world = world
        self._ahead = ahead
        self._end: int | None = None

    def leave(self, num_rounds: int) -> None:
        """Tells the other ranks that this one has left after some number of rounds."""
        if self._world.tally("leaving a stream", "departures", 1) == self._world.size:
            self._end = num_rounds + self._ahead
            self._world.tally("leaving a stream", "end", self._end + 1)

    def ends_before(self, number: int) -> bool:
        """Whether the transfer ends before a round."""
        if self._end is None and (found := self._world.tally("leaving a stream", "end", 0)):
            self._end = found - 1
        return self._end is not None and number >= self._end


# Boxes that each rank chooses


@dataclass(frozen=True)
class BoxWindows:
    """The boxes of one rank, in windows that are the same on all ranks.

    Attributes:
        manifest: The checkpoint.
        boxes: By name, in the order of the checkpoint.
        windows: Ranges of `Manifest.tensors`.
        device: Device of the tensors.
    """

    manifest: Manifest
    boxes: Mapping[str, Sequence[Box]]
    windows: Sequence[range]
    device: torch.device

    def allocate(self, window: range) -> BoxesByName:
        """Allocates the tensors of a window.

        Raises:
            MemoryError: They do not fit into memory.
        """
        entries = [self.manifest.tensors[index] for index in window]
        return {
            entry.name: [(box, allocate(box.sizes, torch_spec(entry)[0], self.device)) for box in boxes]
            for entry in entries
            if (boxes := self.boxes.get(entry.name, ()))
        }


def cut_windows(lengths: Sequence[Sequence[int]], room_bytes: int) -> list[range]:
    """Cuts tensors into the longest windows that fit some memory. A single tensor always fits. Pure.

    Args:
        lengths: The bytes that a rank wants of each tensor, for all ranks that differ.
        room_bytes: The most bytes that a rank may want in a window.

    Returns:
        Ranges of tensors. The first tensor of each, but for the first one, is wanted by some rank.
    """
    windows: list[range] = []
    sums = [0] * len(lengths)
    first = 0
    for index, wanted in enumerate(zip(*lengths, strict=True)):
        if not any(wanted):
            continue
        longer = [total + nbytes for total, nbytes in zip(sums, wanted, strict=True)]
        if max(longer) > room_bytes and any(sums):
            windows.append(range(first, index))
            first, longer = index, list(wanted)
        sums = longer
    return [*windows, range(first, len(lengths[0]))] if lengths else windows


def stream_boxes(
    session: Session, names: object, boxes: BoxSelection, device: torch.device | str | None
) -> BoxStreamTransfer:
    """Prepares a stream of boxes on all ranks; see `Checkpoint.tensors`.

    Raises:
        FastloadError: A rank cannot take them.
    """
    opened, manifest = session.opened, session.stored
    with opened.world.gathering_step(f"telling what each rank wants of {manifest.url}") as step:
        if names is not None:
            raise OptionError("names= and boxes= are both given: boxes= has the names of what is wanted")
        wanted, destination = _checked(manifest, boxes), target_device(device)
        own = array(_NUM_BYTES, (_nbytes(manifest, name, wanted) for name in manifest.by_name))
        step.answer(zlib.compress(own.tobytes(), level=1))
    lengths = [_unpack(data) for data in dict.fromkeys(step.answers)]
    windows = cut_windows(lengths, opened.options.staging_bytes // 4)
    return BoxStreamTransfer(session, BoxWindows(manifest, wanted, windows, destination))


class BoxStreamTransfer:
    """The loads of a stream of boxes on one rank, one window ahead of the boxes that it takes.

    Args:
        session: The open checkpoint.
        plan: The boxes.
    """

    def __init__(self, session: Session, plan: BoxWindows) -> None:
        self._session = session
        self._world = session.opened.world
        self._plan = plan
        self._here: deque[tuple[str, Tensor]] = deque()
        self._coming: SimpleQueue[list[tuple[str, Tensor]]] = SimpleQueue()
        self._room = Semaphore(1)
        self._has_left = False
        self._errors: list[BaseException] = []
        self._cause: BaseException | None = None  # why this rank ends it on all ranks
        self.leaves_in_order = False
        self._thread = Task(self._run, "fastload-windows")
        self._thread.start()

    def take(self) -> tuple[str, Tensor]:
        """Returns the next tensor; see `StreamTransfer.take`."""
        while not self._here:
            window = [] if self._has_left else self._coming.get()
            if not window:  # the end
                self._has_left = True
                if self._errors:
                    raise self._errors.pop()
                raise StopIteration
            self._here.extend(window)
            del window
            self._room.release()
        return self._here.popleft()

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the stream; see `StreamTransfer.leave`. This rank wants nothing of later windows."""
        if self._cause is None:
            self._cause = error
        self._has_left = True
        self._here.clear()
        self._room.release()

    def wait(self) -> None:
        """Waits for the end on this rank, after it has left."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._session.usable():
                for window in self._plan.windows:
                    if not self._has_left:
                        self._room.acquire()
                    if not self._go_on():
                        break
                    self._load_window(window)
                self._world.acknowledge()
        except BaseException as error:
            self._errors += [] if self._has_left else [error]
        finally:
            self._cause = None
            self._coming.put([])

    def _go_on(self) -> bool:
        """Whether any rank wants more; raises on all ranks what one of them has left with."""
        with self._world.step("the next window") as step:
            if self._cause is not None:
                raise self._cause
            step.answer(not self._has_left)
        return any(step.answers)

    def _load_window(self, window: range) -> None:
        boxes = {} if self._has_left else self._plan.allocate(window)
        staging_bytes = max(_LEAST_STAGING_BYTES, self._session.opened.options.staging_bytes // 2)
        self._session.load(BoxRequest(boxes, in_background=True), staging_bytes=staging_bytes)
        here = [(name, tensor) for name, pairs in boxes.items() for _, tensor in pairs]
        if here and not self._has_left:
            self._coming.put(here)
        else:
            self._room.release()  # there is nothing to take


def _checked(manifest: Manifest, boxes: BoxSelection) -> dict[str, list[Box]]:
    """Returns boxes in the order of the checkpoint, of Python integers.

    Raises:
        MismatchError: Something does not fit; lists everything.
        OptionError: `boxes` is of another type.
    """
    if not isinstance(boxes, Mapping):
        raise OptionError("boxes= has to be a dict of a Box, or a list of them, by name of the tensor")
    plain: dict[str, list[Box]] = {}
    for name, given in boxes.items():
        of_name = [given] if isinstance(given, Box) else list(given)
        if not all(isinstance(box, Box) for box in of_name):
            raise OptionError(f"boxes= has something else than fastload.Box for {name}")
        plain[name] = [plain_box(name, box) for box in of_name]
    compare_boxes(manifest, {name: [(box, None) for box in of_name] for name, of_name in plain.items()})
    return {name: plain[name] for name in manifest.by_name if name in plain}


def _nbytes(manifest: Manifest, name: str, boxes: Mapping[str, Sequence[Box]]) -> int:
    if name not in boxes:
        return 0
    dtype, _ = torch_spec(manifest.by_name[name])
    return sum(box.numel for box in boxes[name]) * dtype.itemsize


def _unpack(packed: bytes) -> array[int]:
    lengths = array(_NUM_BYTES)
    lengths.frombytes(zlib.decompress(packed))
    return lengths


# The bytes that have arrived, and tensors in order

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

    def follow(self) -> Callable[[], bool]:
        """Returns a function that tells whether all bytes placed so far have left their buffers."""
        return follow([self._device] if is_accelerator(self._device) else [])

    def hand_out(
        self, in_place: Sequence[tuple[int, int]], limit_s: float, give_up: Callable[[], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that a round has completed.

        Args:
            in_place: (start, length) of byte ranges that were read or received into their tensors.
            limit_s: Longest wait for the device; see `synchronize`.
            give_up: Likewise.
        """
        for start, nbytes in in_place:
            for index, begin, end in self._cut(start, nbytes):
                self._left[index] -= end - begin
        while True:
            if self._is_next_complete and is_accelerator(self._device):
                # The caller may use it on any stream.
                synchronize(torch.accelerator.current_stream(self._device), limit_s, give_up)
            while self._is_next_complete:
                yield from self._take()
            if not self._waiting or self._is_closed:
                break
            self._place_next()
        if self._mapped is not None and not self._is_closed:
            self._mapped.close()

    @property
    def _is_next_complete(self) -> bool:
        return not self._is_closed and self._next < len(self._wanted) and not self._left[self._next]

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
