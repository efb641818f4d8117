"""Deals lanes to readers: byte-even, and as much as may be to those who want it themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_UNIT_BYTES = 4096  # shares begin at a multiple of it in their lane
_SLACK_BYTES = 1 << 20  # a reader may have that much more than the mean, rather than send it to another


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank reads of a lane.

    Attributes:
        lane: Number of the lane.
        reader: The rank.
        begin: First byte in the lane.
        end: The byte after the last one in the lane.
        start: How many bytes the rank has read before, of this lane and others.
    """

    lane: int
    reader: int
    begin: int
    end: int
    start: int


def deal(
    ranges: Sequence[Sequence[tuple[int, int]]],
    wanters: Sequence[Sequence[int]],
    readers: Sequence[int],
    holders: Sequence[Sequence[int]] | None = None,
) -> list[Share]:
    """Deals the bytes of lanes to readers.

    Args:
        ranges: Of each lane, (begin, end) of what is to be read.
        wanters: Of each lane, the ranks that want it, ascending.
        readers: The ranks that can read, ascending; at least one.
        holders: Of each lane, those of them that can read it, ascending; None if each can read all.

    Returns:
        In the order in which each reader reads, lane by lane.
    """
    totals = [sum(end - begin for begin, end in of_lane) for of_lane in ranges]
    cap = -(-sum(totals) // len(readers)) + _SLACK_BYTES
    loads = dict.fromkeys(readers, 0)
    quotas: list[dict[int, int]] = [{} for _ in totals]
    can_read = [readers] * len(totals) if holders is None else holders
    able = [
        [rank for rank in ranks if rank in loads and (holders is None or rank in can_read[lane])]
        for lane, ranks in enumerate(wanters)
    ]
    # Those whom few want first: the others can make up for them.
    for lane in sorted(range(len(totals)), key=lambda lane: (len(able[lane]), lane)):
        _raise_level(loads, able[lane], totals[lane], cap, quotas[lane])
    for lane in sorted(range(len(totals)), key=lambda lane: (len(can_read[lane]), lane)):
        left = totals[lane] - sum(quotas[lane].values())
        _raise_level(loads, can_read[lane], left, sum(totals) + cap, quotas[lane])
    reads = dict.fromkeys(readers, 0)
    shares = []
    for lane, quota in enumerate(quotas):
        bounds = _bounds(quota, totals[lane])
        for reader, begin, end in _cut(ranges[lane], bounds):
            shares.append(Share(lane, reader, begin, end, reads[reader]))
            reads[reader] += end - begin
    return shares


def _raise_level(
    loads: dict[int, int], ranks: Sequence[int], nbytes: int, cap: int, quota: dict[int, int]
) -> None:
    """Gives bytes to those ranks who have least, until they are dealt or all of these have `cap`."""
    if not nbytes or not ranks:
        return
    lowest = sorted(ranks, key=lambda rank: (loads[rank], rank))
    held, level, count = 0, 0, 0
    for count, rank in enumerate(lowest, 1):
        held += loads[rank]
        level = -(-(held + nbytes) // count)
        if count == len(lowest) or level <= loads[lowest[count]]:
            break
    for rank in lowest[:count]:
        given = max(0, min(min(level, cap) - loads[rank], nbytes))
        if given:
            loads[rank] += given
            quota[rank] = quota.get(rank, 0) + given
            nbytes -= given


def _bounds(quota: dict[int, int], total: int) -> list[tuple[int, int]]:
    """Returns the readers of a lane, ascending, and up to where each of them reads."""
    bounds, end = [], 0
    for reader in sorted(quota):
        end += quota[reader]
        bounds.append((reader, end if end == total else end // _UNIT_BYTES * _UNIT_BYTES))
    return bounds


def _cut(ranges: Sequence[tuple[int, int]], bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Returns (reader, begin, end) of the ranges laid end to end and cut at bounds."""
    cut, position, turns = [], 0, iter(bounds)
    reader, until = next(turns, (-1, 0))
    for begin, end in ranges:
        while begin < end:
            while position == until:
                reader, until = next(turns)
            taken = min(end - begin, until - position)
            cut.append((reader, begin, begin + taken))
            begin += taken
            position += taken
    return cut
