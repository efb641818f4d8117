"""Which ranks can deliver which bytes of the files, where not every reader has all of them. Pure."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import xxhash

from fastload.geometry.extents import HasExtent
from fastload.transfer.lanes import Lanes

__all__ = ["Held", "Holders", "Pool"]


class Held(NamedTuple):
    """Bytes of one file that some ranks can deliver: whole checksum blocks.

    Attributes:
        file: Index of the file.
        begin: First byte in the file.
        end: The byte after the last one.
        ranks: Those ranks, ascending; at least one.
    """

    file: int
    begin: int
    end: int
    ranks: tuple[int, ...]


class Pool(NamedTuple):
    """What the same ranks can deliver of a lane.

    Attributes:
        lane: Number of the lane.
        ranks: Those ranks, ascending; at least one.
        ranges: (begin, end) of what that is, in bytes of the lane.
    """

    lane: int
    ranks: tuple[int, ...]
    ranges: list[tuple[int, int]]


@dataclass(frozen=True)
class Holders:
    """Which ranks hold which bytes.

    Attributes:
        stretches: In the order of the bytes; none overlap, and what is in none nobody holds.
    """

    stretches: tuple[Held, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All that hold anything, ascending."""
        return tuple(sorted({rank for held in self.stretches for rank in held.ranks}))

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of all of it."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.stretches).encode())

    def within(self, file: int, begin: int, end: int) -> Iterator[Held]:
        """Yields what is held of a range of a file, in order; nothing of what nobody holds."""
        first = bisect_right(self.stretches, (file, begin), key=lambda held: (held.file, held.begin)) - 1
        for at in range(max(0, first), len(self.stretches)):
            held = self.stretches[at]
            if (held.file, held.begin) >= (file, end):
                return
            if held.file == file and held.end > begin:
                yield held._replace(begin=max(begin, held.begin), end=min(end, held.end))

    def lacking(self, extents: Iterable[HasExtent]) -> int:
        """Returns how many bytes of these nobody holds."""
        return sum(
            extent.nbytes
            - sum(
                held.end - held.begin
                for held in self.within(extent.file, extent.offset, extent.offset + extent.nbytes)
            )
            for extent in extents
        )

    def pools(
        self, lanes: Lanes, wanted: Sequence[Sequence[tuple[int, int]]], readers: Collection[int]
    ) -> list[Pool] | None:
        """Sorts lanes by who can deliver what of them.

        Args:
            lanes: The lanes.
            wanted: Of each of them, (begin, end) of what is to be read.
            readers: Who of the holders can read.

        Returns:
            In the order of the lanes; None if nobody can deliver some of it.
        """
        spaces = lanes.spaces(range(len(wanted)))
        pools: list[Pool] = []
        for lane, ranges in enumerate(wanted):
            of_lane: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            left = sum(end - begin for begin, end in ranges)
            for begin, end in ranges:
                for index, first, last in spaces[lane].cut(begin, end - begin):
                    placed, start = spaces[lane].extents[index], spaces[lane].starts[index]
                    for held in self.within(placed.file, placed.offset + first, placed.offset + last):
                        ranks = tuple(rank for rank in held.ranks if rank in readers)
                        if not ranks:
                            return None
                        at = start + held.begin - placed.offset
                        left -= held.end - held.begin
                        _append(of_lane.setdefault(ranks, []), at, at + held.end - held.begin)
            if left:
                return None
            pools += (Pool(lane, ranks, found) for ranks, found in sorted(of_lane.items()))
        return pools


def _append(ranges: list[tuple[int, int]], begin: int, end: int) -> None:
    """Adds a range behind the others, joined to the last one if it follows that."""
    if ranges and ranges[-1][1] == begin:
        ranges[-1] = ranges[-1][0], end
    else:
        ranges.append((begin, end))
