"""Host memory of snapshots, from one save to the next."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastload.base.memory import allocate_staging
from fastload.base.threads import ProcessLock

__all__ = ["Spares", "spares"]

_lock = ProcessLock()


class Spares:
    """Memory of snapshots, kept for the next ones: its first touch costs several times as much as the copy.

    May be used by several threads.

    Args:
        num_snapshots: How many snapshots there may be at once. The first one takes the memory of all.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._num_snapshots = num_snapshots
        self._kind: tuple[tuple[int, ...], bool] | None = None
        self._free: list[list[Tensor]] = []

    def take(self, lengths: Sequence[int], *, pinned: bool) -> list[Tensor]:
        """Returns slabs of these lengths, in bytes.

        Raises:
            MemoryError: The system refuses that much.
        """
        kind = (tuple(lengths), pinned)
        with _lock:
            is_first, self._kind = kind != self._kind, kind
            if is_first:
                self._free.clear()
            slabs = self._free.pop() if self._free else None
        if slabs is None:
            slabs = [allocate_staging(nbytes, pinned=pinned) for nbytes in lengths]
        for _ in range(self._num_snapshots - 1 if is_first else 0):
            # Touched, so that what is not there is missed now and not in the middle of a training.
            self.keep([allocate_staging(nbytes, pinned=pinned).zero_() for nbytes in lengths])
        return slabs

    def keep(self, slabs: list[Tensor]) -> None:
        """Takes slabs back, if they are such as were taken last."""
        kind = (tuple(slab.numel() for slab in slabs), slabs[0].is_pinned())
        with _lock:
            if kind == self._kind and len(self._free) < self._num_snapshots:
                self._free.append(slabs)

    def clear(self) -> None:
        """Lets go of what is kept."""
        with _lock:
            self._kind = None
            self._free.clear()


spares = Spares(1)
"""Those of a process, for saves that are not of one training."""
