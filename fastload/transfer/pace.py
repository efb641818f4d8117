"""How many reads a rank has in flight: as many as storage rewards. Pure, but for the clock of its caller.

An object store answers each request after tens of milliseconds and gives each connection a part of what it
can deliver, so it rewards many requests. A link that is full, or a file in the page cache, rewards none: each
read then takes longer by as much as there are more of them.

So reads are counted in spans, each after the number in flight has changed. While they take about as long as
in the best span, there are twice as many in the next one. Once they wait for each other, there are as many as
would not, and for some spans no more. What the least number of reads takes is the best, since it may change:
other ranks end, or begin. A refusal (429 or 503) halves the reads, at most once in a span, and after it they
grow slowly.
"""

from __future__ import annotations

import threading

_FAR_S = 0.015  # to the first byte of the first read: storage that rewards many requests
_GROWS_BELOW = 1.4  # times the best span
_SHRINKS_ABOVE = 1.8
_SHRINKS_TO = 1.2
_FULL_PART = 2  # shorter reads say nothing of full ones
_SPANS_AFTER_REFUSAL = 4
_MOST_PAUSE = 32  # spans without another try


class Pace:
    """The number of reads in flight; may be used by several threads.

    Args:
        least: Reads in flight at first, and at least, unless storage refuses.
        most: At most.
        far: Reads in flight as soon as storage turns out to be far away.

    Attributes:
        width: Reads in flight now.
        num_reads: Reads that have ended.
        reading_s: Time of all of them together, in seconds.
        first_byte_s: Time to the first byte of all of them together; 0 where storage cannot tell.
    """

    def __init__(self, least: int, most: int, far: int = 1) -> None:
        self.width = self._least = least
        self.num_reads = 0
        self.reading_s = self.first_byte_s = 0.0
        self._most = self._ceiling = max(least, most)
        self._far = far
        self._lock = threading.Lock()
        self._longest_bytes = 0
        self._best_s = 0.0
        self._has_heard = self._has_refused = False
        self._pause = self._next_pause = 1
        self._begin_span(0.0)

    def _begin_span(self, now_s: float) -> None:
        self._span_began_s = now_s
        self._span_reads = 0
        self._span_s = 0.0
        self._is_span_full = True

    def heard(self, after_s: float) -> None:
        """Notes that the first byte of a read came so many seconds after it was asked for."""
        with self._lock:
            self.first_byte_s += after_s
            is_first, self._has_heard = not self._has_heard, True
            if is_first and after_s >= _FAR_S and not self._has_refused:
                self.width = max(self.width, min(self._far, self._ceiling))

    def ended(self, nbytes: int, began_s: float, ended_s: float, *, refused: bool, is_full: bool) -> None:
        """Notes the end of a read.

        Args:
            nbytes: Its length in bytes.
            began_s: When it began, in seconds of a monotonic clock.
            ended_s: When it ended.
            refused: Whether storage has refused a request meanwhile.
            is_full: Whether more reads are waiting to be begun.
        """
        with self._lock:
            self.num_reads += 1
            self.reading_s += ended_s - began_s
            self._longest_bytes = max(self._longest_bytes, nbytes)
            if refused and began_s >= self._span_began_s:
                self._has_refused = True
                self.width = self._ceiling = max(1, self.width // 2)
                self._begin_span(ended_s)
                return
            if began_s < self._span_began_s or nbytes * _FULL_PART < self._longest_bytes:
                return
            self._span_reads += 1
            self._span_s += ended_s - began_s
            self._is_span_full &= is_full
            needed = self.width // 2 if self._best_s else self._least
            if self._span_reads >= max(1, needed, self._has_refused * _SPANS_AFTER_REFUSAL * self.width):
                self._end_span(ended_s)

    def _end_span(self, now_s: float) -> None:
        mean_s = self._span_s / self._span_reads
        self._best_s = mean_s if self.width <= self._least else min(self._best_s, mean_s)
        times = mean_s / self._best_s if self._best_s else 1.0
        if self._has_refused:
            if self._is_span_full:
                self.width = self._ceiling = min(self._most, self._ceiling + 1)
        elif times > _SHRINKS_ABOVE:
            self.width = max(self._least, round(self.width * _SHRINKS_TO / times))
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _MOST_PAUSE)
        elif self._pause > 1:
            self._pause -= 1
        elif times < _GROWS_BELOW and self._is_span_full:
            self.width = min(2 * self.width, self._ceiling)
        self._begin_span(now_s)
