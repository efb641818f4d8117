"""How many ranks write, where that is left open: as many as pay, by what the saves themselves take."""

from __future__ import annotations

import threading

__all__ = ["WriterTuner", "tuner"]

_MIN_SHARE_BYTES = 32 << 20  # below, one more writer costs more than it saves
_MIN_SHARDED_BYTES = 1 << 20  # where its bytes would have to get to another rank
_MIN_TUNED_BYTES = 1 << 30  # below, a save says little about the storage
_GAIN = 1.1  # fewer writers have to be that much faster: more of them wait less for their snapshots


class WriterTuner:
    """Finds out how many writers a place can use. May be used by several threads.

    The first save uses all ranks, the next one half of them, and so on as long as fewer are clearly
    faster: more writers than the storage can use only get in each other's way. Where each rank holds its own
    part of the bytes, that many have to write: what the others hold would have to get to another rank.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates: dict[tuple[str, int], dict[int, float]] = {}

    @staticmethod
    def most(num_ranks: int, nbytes: int, *, is_sharded: bool = False) -> int:
        """Returns how many writers so many bytes are worth; more, if each rank holds its own part of them."""
        least_bytes = _MIN_SHARDED_BYTES if is_sharded else _MIN_SHARE_BYTES
        return max(1, min(num_ranks, nbytes // least_bytes))

    def choose(self, place: str, num_ranks: int, nbytes: int, *, is_sharded: bool = False) -> int:
        """Returns how many of the ranks are to write next.

        Args:
            place: What the checkpoints have in common, such as the directory they are in.
            num_ranks: Ranks that could write.
            nbytes: Bytes to write.
            is_sharded: Whether each rank holds its own part of them.
        """
        most = self.most(num_ranks, nbytes, is_sharded=is_sharded)
        if is_sharded or nbytes < _MIN_TUNED_BYTES:
            return most
        with self._lock:
            rates = self._rates.get((place, num_ranks), {})
            count = most
            while count in rates and count > 1:
                fewer = count // 2
                if fewer in rates and rates[fewer] < _GAIN * rates[count]:
                    break
                count = fewer
            return count

    def learn(self, place: str, num_ranks: int, nbytes: int, num_writers: int, seconds: float) -> None:
        """Takes note of what a save took, from the first write until all was durable."""
        if nbytes >= _MIN_TUNED_BYTES and seconds > 0:
            with self._lock:
                self._rates.setdefault((place, num_ranks), {})[num_writers] = nbytes / seconds


tuner = WriterTuner()
"""What the saves of this process have taken."""
