"""Tensors handed out one after the other, in little memory: what a rank takes, what it owes the others."""

from __future__ import annotations

import logging
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Semaphore
from types import TracebackType

import torch
from torch import Tensor

from fastload.base.devices import record_use
from fastload.base.memory import allocate
from fastload.base.tasks import Task
from fastload.base.threads import background
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.names import OWN_STEM
from fastload.formats.state import OWN_PREFIX, own_view
from fastload.geometry.box import Box
from fastload.loading.boxes import BoxesByName, checked_boxes
from fastload.loading.load import Job, Opened, decide, target_device
from fastload.loading.match import Match
from fastload.loading.mismatch import Selection, catalogue, raise_mismatch
from fastload.loading.place import Destination
from fastload.loading.stream_buffer import MappedFiles, StreamBuffer, Wanted
from fastload.storage.local import Mapped

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamRequest:
    """What a caller asks for; see `Checkpoint.tensors`."""

    names: Sequence[str] | str | None
    device: torch.device | str | None
    mapped: MappedFiles | None = None
    dtype: None = None
    is_same: bool = True

    def match(self, opened: Opened, device: torch.device) -> Match:
        """Finds out what it is; there is no memory for it yet.

        Raises:
            MismatchError: There is no tensor of some name.
            ManifestError: torch has no such dtype.
        """
        manifest, world = opened.access.manifest, opened.world
        wanted = _wanted(manifest, self.names, world.rank, world.size)
        stream_buffer = StreamBuffer(manifest, wanted, device, opened.options.staging_bytes // 2, self.mapped)
        nothing = torch.empty(0)
        destinations = [
            Destination(one.entry, torch_spec(one.entry)[0], nothing, None, piece)
            for one in wanted
            for piece in one.entry.pieces or (None,)
        ]
        return Match(destinations, {}, _nothing, _nothing, url=manifest.url, stream_buffer=stream_buffer)


def _nothing() -> None:
    pass


def _wanted(manifest: Manifest, names: Sequence[str] | str | None, rank: int, size: int) -> list[Wanted]:
    """Returns which tensors to hand out, in the order of the checkpoint; none of the ranks' own."""
    has_own = manifest.structure is not None and any(f.name.startswith(OWN_STEM) for f in manifest.files)
    structure = manifest.structure
    if has_own:
        structure = own_view(structure, rank, size).structure
    if manifest.format != "fastload" and structure is not None:
        from fastload.formats.state import without_refused

        structure = without_refused(structure, [])
    selection = Selection(
        "*" if names is None else names, catalogue(replace(manifest, structure=structure)), has_own
    )
    if names is not None:
        raise_mismatch(manifest.url, missing=selection.absent)
    found: dict[str, list[str]] = {}
    complex128: set[str] = set()
    for name, saved in selection.chosen.items():
        if names is not None or not saved.stored.startswith(OWN_PREFIX) or not has_own:
            found.setdefault(saved.stored, []).append(name)
            complex128 |= {saved.stored} if saved.is_complex128 else set()
    return [
        Wanted(entry, tuple(found[entry.name]), entry.name in complex128)
        for entry in manifest.tensors
        if entry.name in found
    ]


class TensorStream(Iterator[tuple[str, Tensor]]):
    """Pairs of a name and a tensor; made by `Checkpoint.tensors`, for all ranks to iterate over.

    A rank may leave it when it likes, with ``break``, `close`, or by dropping it. It then does its part for
    the others in the background, until they have all they want; if all leave, the transfer ends. As a
    context manager, or inside of that of its checkpoint, an exception ends it on all ranks.
    """

    def __init__(self, flow: Flow | BoxFlow) -> None:
        self._flow = flow

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = self._flow.take()
        record_use(tensor)  # another thread, on another stream, may have allocated it
        return name, tensor

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flow.leave(error)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the interpreter ends, and lets no thread begin
            self.close()

    def close(self) -> None:
        """Leaves it; does nothing at its end. Later tensors are not handed out."""
        self._flow.leave()


class Flow:
    """The transfer behind a stream of tensors, seen from one rank.

    Args:
        world: The ranks.
        job: The transfer, ready to run.
        guard: What it all happens in.
        settle: Ends it on all ranks, given what is to be done for that.
    """

    def __init__(
        self,
        world: World,
        job: Job,
        *,
        guard: Callable[[], AbstractContextManager[None]],
        settle: Callable[[Callable[[Job], object]], object],
    ) -> None:
        assert job.wish.matched.stream_buffer is not None, "made for a stream"
        self._world = world
        self._job = job
        self._stream_buffer: StreamBuffer = job.wish.matched.stream_buffer
        self._guard = guard
        self._settle = settle
        self._tensors = self._hand_out()
        self._departure = Departure(world, ahead=job.plan.depth)
        self._rest: Task | None = None
        self._is_over = False
        self._error: BaseException | None = None
        job.pipeline.ends_before = self._ends_before

    def take(self) -> tuple[str, Tensor]:
        """Returns the next tensor.

        Raises:
            StopIteration: There is none, or this rank has left.
            FastloadError: Some rank failed.
        """
        if self._is_over or self._rest is not None:
            raise StopIteration
        return next(self._tensors)

    def leave(self, error: BaseException | None = None) -> None:
        """Takes no more: goes on in the background as long as others do.

        Args:
            error: Why, if it is to end on all ranks; None if it is not.
        """
        if self._is_over:
            return
        if error is not None and self._error is None:
            self._error = error
            self._world.flag_failure()
        if self._rest is None:
            self._stream_buffer.close()
            self._rest = background(self._finish, "fastload-rest")
            self._rest.start()

    def wait(self) -> None:
        """Returns once it has ended on this rank, after this has left."""
        if self._rest is not None:
            self._rest.join()

    def _hand_out(self) -> Iterator[tuple[str, Tensor]]:
        try:
            with self._guard():
                errors: list[Exception] = []
                try:
                    for in_place in self._job.pipeline.steps():
                        yield from self._stream_buffer.hand_out(in_place)
                    yield from self._stream_buffer.hand_out(())
                except Exception as error:
                    errors.append(error)
                self._settle(lambda job: self._raise(errors))
        finally:
            self._is_over = True
            self._stream_buffer.close()

    def _raise(self, errors: list[Exception]) -> None:
        if self._error is not None:
            raise self._error
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # else error → traceback → frame → error would keep all their memory alive

    def _ends_before(self, number: int) -> bool:
        if self._rest is None:
            return False
        return self._job.wish.decision.alone or self._departure.ends_before(number)

    def _finish(self) -> None:
        """Does what is left to do for the others; that it cannot is told to them, and here to nobody."""
        try:
            if not self._job.wish.decision.alone:
                self._departure.leave(self._job.pipeline.num_posted)
            for _ in self._tensors:
                pass
        except BaseException as error:
            _log.debug("after this rank had left: %s", error)
        finally:
            self._error = None


class Departure:
    """How ranks leave a transfer of rounds one by one: when all have, it ends with one and the same round.

    The last one that leaves says which. No rank is further: those that go on for the others begin no round
    that is more than so many ahead of what it has begun itself.

    Args:
        world: The ranks.
        ahead: How many rounds ahead.
    """

    def __init__(self, world: World, *, ahead: int) -> None:
        self._world = world
        self._ahead = ahead
        self._end: int | None = None

    def leave(self, num_begun: int) -> None:
        """Tells the others that this rank has left, with so many rounds begun."""
        if self._world.tally("leaving a stream", "departures", 1) == self._world.size:
            self._end = num_begun + self._ahead
            self._world.tally("leaving a stream", "end", self._end + 1)

    def ends_before(self, number: int) -> bool:
        """Whether a round is not to be begun any more."""
        if self._end is None and (found := self._world.tally("leaving a stream", "end", 0)):
            self._end = found - 1
        return self._end is not None and number >= self._end


WantedBoxes = Mapping[str, Box | Sequence[Box]]
_NUM_BYTES = "Q"


@dataclass(frozen=True)
class BoxWindows:
    """What one rank wants, cut as the ranks have agreed.

    Attributes:
        manifest: The checkpoint.
        boxes: By name, in the order of the checkpoint.
        windows: Ranges of `Manifest.tensors`.
        device: Where the tensors live.
    """

    manifest: Manifest
    boxes: Mapping[str, Sequence[Box]]
    windows: Sequence[range]
    device: torch.device

    @classmethod
    def agree(
        cls,
        world: World,
        manifest: Manifest,
        boxes: WantedBoxes,
        *,
        names: object,
        device: torch.device | str | None,
        room_bytes: int,
    ) -> BoxWindows:
        """Has all ranks cut the checkpoint alike, so that no rank wants more than some room of a window.

        Raises:
            MismatchError: On some rank a box does not fit.
            OptionError: `boxes` is something else.
        """
        found: list[tuple[dict[str, list[Box]], torch.device]] = []

        def request() -> bytes:
            if names is not None:
                raise OptionError("names= and boxes= are both given: boxes= has the names of what is wanted")
            wanted = checked_boxes(manifest, _lists(boxes))
            found.append((wanted, target_device(device)))
            lengths = array(_NUM_BYTES, (_nbytes(manifest, name, wanted) for name in manifest.by_name))
            return zlib.compress(lengths.tobytes(), level=1)

        packed = world.gather_bytes(f"telling what each rank wants of {manifest.url}", request)
        lengths = [_unpack(data) for data in dict.fromkeys(packed)]
        boxes_here, target = found[0]
        return cls(manifest, boxes_here, cut_windows(lengths, room_bytes), target)

    def open(self, window: range) -> BoxesByName:
        """Makes the tensors of a window.

        Raises:
            MemoryError: There is no room for them.
        """
        entries = [self.manifest.tensors[index] for index in window]
        return {
            entry.name: [(box, allocate(box.sizes, torch_spec(entry)[0], self.device)) for box in boxes]
            for entry in entries
            if (boxes := self.boxes.get(entry.name, ()))
        }


def cut_windows(lengths: Sequence[Sequence[int]], room_bytes: int) -> list[range]:
    """Cuts tensors into windows, each as long as may be; one tensor has room whatever its size. Pure.

    Args:
        lengths: What some rank wants of each tensor, in bytes, for all ranks that differ.
        room_bytes: The most that a rank may want of a window.

    Returns:
        Ranges of tensors; no tensor that no rank wants begins or ends one.
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


class BoxFlow:
    """The loads behind a stream of boxes, one ahead of what is taken, seen from one rank.

    Args:
        world: The ranks.
        plan: What to load.
        guard: What it all happens in.
        load: Loads boxes on all ranks.
    """

    def __init__(
        self,
        world: World,
        plan: BoxWindows,
        *,
        guard: Callable[[], AbstractContextManager[None]],
        load: Callable[[BoxesByName], object],
    ) -> None:
        self._world = world
        self._plan = plan
        self._guard = guard
        self._load = load
        self._here: deque[tuple[str, Tensor]] = deque()
        self._coming: SimpleQueue[list[tuple[str, Tensor]]] = SimpleQueue()
        self._room = Semaphore(1)
        self._has_left = False
        self._errors: list[BaseException] = []
        self._cause: BaseException | None = None
        self._thread = background(self._run, "fastload-windows")
        self._thread.start()

    def take(self) -> tuple[str, Tensor]:
        """Returns the next tensor; errors are those of `stream.Flow.take`."""
        while not self._here:
            window = [] if self._has_left else self._coming.get()
            if not window:  # the last one has come
                self._has_left = True
                if self._errors:
                    raise self._errors.pop()
                raise StopIteration
            self._here.extend(window)
            del window
            self._room.release()
        return self._here.popleft()

    def leave(self, error: BaseException | None = None) -> None:
        """Takes no more; see `stream.Flow.leave`. In the windows to come this rank asks for nothing."""
        if self._cause is None:
            self._cause = error
        self._has_left = True
        self._here.clear()
        self._room.release()

    def wait(self) -> None:
        """Returns once it has ended on this rank, after this has left."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._guard():
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
        """Whether any rank wants more; raises on all if what one of them does with it has failed."""

        def vote() -> bool:
            if self._cause is not None:
                raise self._cause
            return not self._has_left

        return any(self._world.agree("the next window", vote))

    def _load_window(self, window: range) -> None:
        boxes = {} if self._has_left else self._plan.open(window)
        self._load(boxes)
        here = [(name, tensor) for name, pairs in boxes.items() for _, tensor in pairs]
        if here and not self._has_left:
            self._coming.put(here)
        else:
            self._room.release()  # nothing to be taken


def _lists(boxes: WantedBoxes) -> dict[str, list[Box]]:
    if not isinstance(boxes, Mapping):
        raise OptionError("boxes= has to be a dict of a Box, or a list of them, by name of the tensor")
    return {name: [given] if isinstance(given, Box) else list(given) for name, given in boxes.items()}


def _nbytes(manifest: Manifest, name: str, boxes: Mapping[str, Sequence[Box]]) -> int:
    if name not in boxes:
        return 0
    dtype, _ = torch_spec(manifest.by_name[name])
    return sum(box.numel for box in boxes[name]) * dtype.itemsize


def _unpack(packed: bytes) -> array[int]:
    lengths = array(_NUM_BYTES)
    lengths.frombytes(zlib.decompress(packed))
    return lengths


_MAX_MAPPED_FILES = 256  # each keeps a descriptor


def map_files(opened: Opened, device: torch.device | str | None) -> MappedFiles | None:
    """Maps the files of a checkpoint, on all ranks or on none, where that is better than to read them.

    So it is where each rank takes all for itself, into host memory, from files that the page cache has. What
    is to be verified is read.

    Args:
        opened: The checkpoint.
        device: Where its tensors are wanted on this rank.
    """
    access, manifest = opened.access, opened.access.manifest
    indexes = {entry.file for entry in manifest.tensors if entry.nbytes}
    is_plain = access.holders is None and not manifest.guards and not any(e.pieces for e in manifest.tensors)
    if opened.block_bytes or not is_plain or len(indexes) > _MAX_MAPPED_FILES or not decide(opened).alone:
        return None
    mapped: dict[int, Mapped] = {}

    def work() -> bool:
        if target_device(device).type != "cpu":
            return False
        for index in indexes:
            file = access.storage.map(manifest.files[index].name)
            if file is None:
                return False
            mapped[index] = file
        return True

    return MappedFiles(mapped) if all(opened.world.agree(f"mapping {manifest.url}", work)) else None
