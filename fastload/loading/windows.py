"""Boxes of tensors handed out one after the other: each rank its own, window by window of the checkpoint."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore

import torch
from torch import Tensor

from fastload.base.memory import allocate
from fastload.base.threads import background
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.geometry.box import Box
from fastload.loading.boxes import BoxesByName, checked_boxes
from fastload.loading.job import target_device

__all__ = ["BoxFlow", "BoxWindows", "WantedBoxes", "cut_windows"]

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

        def claim() -> bytes:
            if names is not None:
                raise OptionError("names= and boxes= are both given: boxes= has the names of what is wanted")
            wanted = checked_boxes(manifest, _lists(boxes))
            found.append((wanted, target_device(device)))
            lengths = array(_NUM_BYTES, (_nbytes(manifest, name, wanted) for name in manifest.by_name))
            return zlib.compress(lengths.tobytes(), level=1)

        packed = world.gather_bytes(f"telling what each rank wants of {manifest.url}", claim)
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
