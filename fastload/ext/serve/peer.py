"""One peer as a reader sees it: what it has, how fast it is, and what went wrong."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from fastload.ext.serve.connection import Connection, Endpoint
from fastload.ext.serve.coverage import Ranges, covered_to, joined
from fastload.storage.http import HttpFault

_AGAIN_S = 2.0  # between questions to a peer that does not answer
_MEASURED_S = 1.0
_REQUEST_S = 0.25
_SILENT_S = 2.0
_MEMORY_S = 2.0  # after which old speeds count half


class Offer(NamedTuple):
    """What a peer has of a checkpoint.

    Attributes:
        folder: The path of the checkpoint on the server.
        ranges: What is there; None for all.
        reachable: What is there, and what the peer reads from the origin now.
    """

    folder: str
    ranges: Ranges | None
    reachable: Ranges

    def covered_to(self, name: str, at: int, end: int) -> int:
        """Returns the end of what is there of a file from a byte on, at most `end`; `at` if nothing is."""
        return end if self.ranges is None else min(end, covered_to(self.ranges.get(name, ()), at))

    def coming_to(self, name: str, at: int, end: int) -> int:
        """Returns the end of what is there or on its way there, likewise."""
        return end if self.ranges is None else min(end, covered_to(self.reachable.get(name, ()), at))

    def begins_after(self, name: str, at: int, end: int) -> int:
        """Returns the first byte after `at` that is there or on its way there; `end` if there is none."""
        ranges = self.reachable.get(name, ())
        after = bisect_right(ranges, at, key=itemgetter(0))
        return min(end, ranges[after][0]) if after < len(ranges) else end


def parse_offer(index: Mapping[str, Any], digest: str) -> Offer | None:
    """Returns what a server has of a checkpoint, by its index; None if it has not got it.

    Raises:
        HttpFault: The index is malformed.
    """
    for folder, about in index["checkpoints"].items():
        if isinstance(about, dict) and about.get("digest") == digest:
            if about.get("ranges") is None:
                return Offer(folder, None, {})
            ranges, coming = _parse_ranges(about["ranges"]), _parse_ranges(about.get("coming", {}))
            names = ranges.keys() | coming.keys()
            both = {name: joined([*ranges.get(name, ()), *coming.get(name, ())]) for name in names}
            return Offer(folder, ranges, both)
    return None


def _parse_ranges(given: Any) -> Ranges:
    try:
        return {
            str(name): joined((int(begin), int(end)) for begin, end in ranges)
            for name, ranges in given.items()
        }
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise HttpFault("its index is malformed") from None


class Speed:
    """The bytes per second from one place, while a request is under way there. Not thread-safe.

    Attributes:
        queued_bytes: The bytes of the requests that are under way.
        num_requests: Their number.
        since_s: When the first one began or, if that is later, the last one ended, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.num_requests = 0
        self._bytes = self._seconds = 0.0
        self.since_s = 0.0

    @property
    def request_bytes(self) -> int:
        """The most bytes to ask for at once: few if it is slow, or if few have come yet."""
        return int(min(_REQUEST_S * self.bytes_s, 2 * self._bytes))

    def is_silent(self, now_s: float) -> bool:
        """Whether what is under way has brought nothing yet, or nothing for long."""
        return self.num_requests > 0 and (not self._bytes or now_s - self.since_s > _SILENT_S)

    @property
    def is_measured(self) -> bool:
        """Whether requests have taken long enough to tell."""
        return self._seconds >= _MEASURED_S

    @property
    def bytes_s(self) -> float:
        """Bytes per second; 0 before the first ones."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def begin(self, nbytes: int) -> None:
        """Notes that a request begins."""
        if not self.num_requests:
            self.since_s = time.monotonic()
        self.num_requests += 1
        self.queued_bytes += nbytes

    def end(self, nbytes: int, came_bytes: int) -> None:
        """Notes that a request for `nbytes` has ended, of which so many came."""
        now_s = time.monotonic()
        if self._seconds > _MEMORY_S:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2
        self._bytes += came_bytes
        self._seconds += now_s - self.since_s
        self.since_s = now_s
        self.num_requests -= 1
        self.queued_bytes -= nbytes

    def expected_s(self, nbytes: int) -> float:
        """Returns the seconds until so many more bytes are here; 0 if the speed is not known."""
        return (self.queued_bytes + nbytes) / self.bytes_s if self.bytes_s else 0.0


@dataclass
class KnownPeer:
    """A peer.

    Attributes:
        endpoint: Where it is.
        offer: What it has of the checkpoint; None if it is not known to have it.
        problem: Why it has delivered nothing, or not to the end; empty while it does.
        is_left: Whether it is left alone from now on.
        num_faults: Passing faults in a row.
        num_waits: How often in a row bytes did not come that were on their way there.
        rests_until_s: When it may be asked again, by `time.monotonic`.
        answered_s: When it has last said what it has, or failed to.
        has_answered: Whether it did answer then.
        is_asking: Whether it is being asked.
        speed: That of the bytes it delivers.
        idle: Open connections that nobody uses.
    """

    endpoint: Endpoint
    offer: Offer | None = None
    problem: str = ""
    is_left: bool = False
    num_faults: int = 0
    num_waits: int = 0
    rests_until_s: float = 0.0
    answered_s: float = float("-inf")
    has_answered: bool = False
    is_asking: bool = False
    speed: Speed = field(default_factory=Speed)
    idle: list[Connection] = field(default_factory=list)

    def is_usable(self, now_s: float) -> bool:
        """Whether it may be asked for bytes."""
        return self.offer is not None and not self.is_left and now_s >= self.rests_until_s

    def is_due(self, now_s: float, fresh_s: float) -> bool:
        """Whether to ask it what it has, if it said so longer ago than `fresh_s`."""
        is_complete = self.offer is not None and self.offer.ranges is None
        if self.is_left or self.is_asking or is_complete:
            return False
        return now_s - self.answered_s >= (fresh_s if self.has_answered else _AGAIN_S)


def last_within(ends: Sequence[int], covered: int) -> int:
    """Returns the last of some ends, ascending, that is covered; 0 if none is."""
    return max((end for end in ends if end <= covered), default=0)
