"""Host memory of snapshots, from one save to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from fastload.base.devices import can_pin
from fastload.base.memory import allocate_staging
from fastload.base.threads import ProcessLock

__all__ = ["Spares", "spares"]

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
