"""How many reads a rank has in flight: as many as storage rewards. Pure, but for the clock of its caller.

An object store answers each request after tens of milliseconds and gives each connection a part of what it
can deliver, so it rewards many requests. A link that is full, or a file in the page cache, rewards none: each
read then takes longer by as much as there are more of them.

So reads are counted in spans, each after the number in flight has changed. While they take about as long as
with the fewest so far, there are twice as many in the next one. Once they wait for each other, there are as
many as would not, and for some spans no more. If those are not more than the fewest so far, half of these are
tried: a link may have been full from the first reads on. What the fewest take is measured again whenever
there are so few, since it may change: other ranks end, or begin. A read that had to be retried (429, 503)
halves them, at most once in a span, and after it they grow slowly.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

MOST_READS = 256
"""Most reads in flight of a rank."""
_MOST_READS_OF_ALL = 2048  # of a job
_FAR_READS_OF_ALL = 64
_FEWEST_READS = 4
_FAR_S = 0.015  # to the first byte of the first read: storage that rewards many requests
_GROWS_BELOW = 1.4  # times what the fewest take
_SHRINKS_ABOVE = 1.8
_SHRINKS_TO = 1.2
_FULL_PART = 2  # shorter reads say nothing of full ones
_SPANS_AFTER_REFUSAL = 4
_MOST_PAUSE = 32  # spans without another try


def far_reads(num_readers: int) -> tuple[int, int]:
    """Returns the reads in flight of each of some ranks if storage is far away: at first, and at most."""
    far = max(_FEWEST_READS, _FAR_READS_OF_ALL // num_readers)
    return far, min(MOST_READS, max(_FEWEST_READS, _MOST_READS_OF_ALL // num_readers))


@dataclass
class ReadTimes:
    """How long reads have taken.

    Attributes:
        num_reads: Reads that have ended.
        reading_s: Time of all of them together, in seconds.
        num_answers: Requests whose first byte has come; 0 where storage cannot tell.
        first_byte_s: Time to the first byte of all of these together.
        longest_bytes: Length of the longest one.
    """

    num_reads: int = 0
    reading_s: float = 0.0
    num_answers: int = 0
    first_byte_s: float = 0.0
    longest_bytes: int = 0


@dataclass
class _ReadSpan:
    """Reads that began since the number in flight was last decided.

    Attributes:
        began_s: When that was.
        num_reads: Those of full length that have ended.
        reading_s: Their time together, in seconds.
        is_full: Whether more reads were waiting to be begun all the time.
    """

    began_s: float
    num_reads: int = 0
    reading_s: float = 0.0
    is_full: bool = True


class Pace:
    """The number of reads in flight; may be used by several threads.

    Args:
        least: Reads in flight at first, and at least, unless storage refuses.
        most: At most.
        far: Reads in flight as soon as storage turns out to be far away.
        first_byte_s: Least time in seconds to the first byte of an earlier request; 0 if there was none. If
            there was, later ones do not tell how far away storage is: they may wait in the queue of a link
            that these reads fill.

    Attributes:
        most: As given, or `least` if that is more.
        width: Reads in flight now.
        times: How long reads have taken.
    """

    def __init__(self, least: int, most: int, far: int = 1, first_byte_s: float = 0.0) -> None:
        self._least = least
        self.times = ReadTimes()
        self.most = max(least, most)
        self._ceiling = self.most  # what storage does not refuse
        far = min(far, self.most)
        self.width = max(least, far) if first_byte_s >= _FAR_S else least
        self._far = 0 if first_byte_s else far  # 0 once it is known how far away storage is
        self._lock = threading.Lock()
        self._fewest = least
        self._fewest_s = 0.0  # what a read takes with so many
        self._pause = self._next_pause = 1
        self._span = _ReadSpan(0.0)

    @property
    def _was_refused(self) -> bool:
        """Whether storage has refused a request, and has not yet taken as many as before."""
        return self._ceiling < self.most

    def note_first_byte(self, after_s: float) -> None:
        """Notes that the first byte of a request, of which a read may need several, came after so long."""
        with self._lock:
            self.times.num_answers += 1
            self.times.first_byte_s += after_s
            if after_s >= _FAR_S:
                self.width = max(self.width, min(self._far, self._ceiling))
            self._far = 0

    def note_end(self, nbytes: int, began_s: float, ended_s: float, *, refused: bool, is_full: bool) -> None:
        """Notes the end of a read.

        Args:
            nbytes: Its length in bytes.
            began_s: When it began, in seconds of a monotonic clock.
            ended_s: When it ended.
            refused: Whether storage has refused a request meanwhile.
            is_full: Whether more reads are waiting to be begun.
        """
        with self._lock:
            times, span = self.times, self._span
            times.num_reads += 1
            times.reading_s += ended_s - began_s
            times.longest_bytes = max(times.longest_bytes, nbytes)
            if began_s < span.began_s:
                return
            if refused:
                self.width = self._ceiling = max(1, self.width // 2)
                self._span = _ReadSpan(ended_s)
                return
            if nbytes * _FULL_PART < times.longest_bytes:
                return
            span.num_reads += 1
            span.reading_s += ended_s - began_s
            span.is_full &= is_full
            needed = self.width // 2 if self._fewest_s else self._least
            if span.num_reads >= max(1, needed, self._was_refused * _SPANS_AFTER_REFUSAL * self.width):
                self._decide(span)
                self._span = _ReadSpan(ended_s)

    def _decide(self, span: _ReadSpan) -> None:
        """Chooses the number of reads in flight by what those of a span took."""
        mean_s = span.reading_s / span.num_reads
        if self.width <= self._fewest or not self._fewest_s:
            self._fewest, self._fewest_s = self.width, mean_s
        self._fewest_s = min(self._fewest_s, mean_s)
        times = mean_s / self._fewest_s if self._fewest_s else 1.0
        if self._was_refused:
            if span.is_full:
                self.width = self._ceiling = min(self.most, self._ceiling + 1)
        elif times > _SHRINKS_ABOVE:
            self.width = max(self._least, round(self.width * _SHRINKS_TO / times))
            if self._fewest > self._least and self.width < _GROWS_BELOW * self._fewest:
                self.width = max(self._least, self._fewest // 2)
                return
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _MOST_PAUSE)
        elif self._pause > 1:
            self._pause -= 1
        elif times < _GROWS_BELOW and span.is_full:
            self.width = min(2 * self.width, self._ceiling)
