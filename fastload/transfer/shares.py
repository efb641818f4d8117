"""Deals byte ranges to readers: evenly by bytes, preferring readers that request the bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_UNIT_BYTES = 4096  # shares begin at multiples of it in their group
_SLACK_BYTES = 1 << 20  # a reader may read that much more than the mean to avoid sending


@dataclass(frozen=True, slots=True)
class Share:
    """A byte range of a sharing group that one rank reads.

    Attributes:
        group: Number of the group.
        reader: The rank.
        begin: First byte in the group.
        end: The byte after the last one in the group.
        start: Bytes that the rank reads before, of this group and others.
    """

    group: int
    reader: int
    begin: int
    end: int
    start: int


def deal(
    ranges: Sequence[Sequence[tuple[int, int]]],
    requesters: Sequence[Sequence[int]],
    readers: Sequence[int],
    holders: Sequence[Sequence[int]] | None = None,
) -> list[Share]:
    """Deals the bytes of groups to readers.

    Args:
        ranges: For each group, (begin, end) of the ranges to read.
        requesters: For each group, the ranks that request it, ascending.
        readers: The ranks that can read, ascending; at least one.
        holders: For each group, the readers that can read it, ascending; None if each can read all.

    Returns:
        The shares in the order in which each reader reads, group by group.
    """
    totals = [sum(end - begin for begin, end in of_group) for of_group in ranges]
    cap = -(-sum(totals) // len(readers)) + _SLACK_BYTES
    loads = dict.fromkeys(readers, 0)
    quotas: list[dict[int, int]] = [{} for _ in totals]
    can_read = [readers] * len(totals) if holders is None else holders
    able = [
        [rank for rank in ranks if rank in loads and (holders is None or rank in can_read[group])]
        for group, ranks in enumerate(requesters)
    ]
    # Groups with the fewest candidate readers first; the rest balance the load.
    for group in sorted(range(len(totals)), key=lambda group: (len(able[group]), group)):
        _raise_level(loads, able[group], totals[group], cap, quotas[group])
    for group in sorted(range(len(totals)), key=lambda group: (len(can_read[group]), group)):
        left = totals[group] - sum(quotas[group].values())
        _raise_level(loads, can_read[group], left, sum(totals) + cap, quotas[group])
    reads = dict.fromkeys(readers, 0)
    shares = []
    for group, quota in enumerate(quotas):
        bounds = _bounds(quota, totals[group])
        for reader, begin, end in _cut(ranges[group], bounds):
            shares.append(Share(group, reader, begin, end, reads[reader]))
            reads[reader] += end - begin
    return shares


def _raise_level(
    loads: dict[int, int], ranks: Sequence[int], nbytes: int, cap: int, quota: dict[int, int]
) -> None:
    """Gives bytes to the ranks with the least, until all are dealt or each rank has `cap`."""
    if not nbytes or not ranks:
        return
    lowest = sorted(ranks, key=lambda rank: (loads[rank], rank))
    total, level, count = 0, 0, 0
    for count, rank in enumerate(lowest, 1):
        total += loads[rank]
        level = -(-(total + nbytes) // count)
        if count == len(lowest) or level <= loads[lowest[count]]:
            break
    for rank in lowest[:count]:
        given = max(0, min(min(level, cap) - loads[rank], nbytes))
        if given:
            loads[rank] += given
            quota[rank] = quota.get(rank, 0) + given
            nbytes -= given


def _bounds(quota: dict[int, int], total: int) -> list[tuple[int, int]]:
    """Returns the readers of a group, ascending, each with the end of its range."""
    bounds, end = [], 0
    for reader in sorted(quota):
        end += quota[reader]
        bounds.append((reader, end if end == total else end // _UNIT_BYTES * _UNIT_BYTES))
    return bounds


def _cut(ranges: Sequence[tuple[int, int]], bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Returns (reader, begin, end) of the ranges laid end to end and cut at bounds."""
    cut, position, rest = [], 0, iter(bounds)
    reader, until = next(rest, (-1, 0))
    for begin, end in ranges:
        while begin < end:
            while position == until:
                reader, until = next(rest)
            taken = min(end - begin, until - position)
            cut.append((reader, begin, begin + taken))
            begin += taken
            position += taken
    return cut
