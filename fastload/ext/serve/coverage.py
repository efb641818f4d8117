"""Byte ranges of files as (begin, end). Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""By name of the file: disjoint ranges, ascending."""


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the union of ranges (begin, end) as disjoint ranges, ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def covered_to(ranges: Sequence[tuple[int, int]], begin: int) -> int:
    """Returns the end of the range that has a byte; the byte itself if none has.

    Args:
        ranges: Disjoint (begin, end), ascending.
        begin: The byte.
    """
    at = bisect_right(ranges, begin, key=itemgetter(0)) - 1
    return max(begin, ranges[at][1]) if at >= 0 else begin
