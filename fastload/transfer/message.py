"""Messages: the bytes of one chunk that one group of ranks wants. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastload.geometry.box import Runs

Ranks = tuple[int, ...]
"""A group of ranks that want the same bytes, ascending."""


class Message(NamedTuple):
    """The bytes of a chunk that one group wants, packed.

    Attributes:
        reader: The rank that reads the chunk.
        ranks: The group.
        nbytes: Length in bytes.
        ranges: (start, length) of where the bytes belong in what this rank wants, in order; empty if it is
            not in the group.
        pieces: Where the bytes lie in the chunk, in order, if this rank reads it.
    """

    reader: int
    ranks: Ranks
    nbytes: int
    ranges: Sequence[tuple[int, int]] = ()
    pieces: Sequence[Runs] = ()


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins ranges, each (start, length), that follow each other."""
    found: list[tuple[int, int]] = []
    end = -1
    for start, nbytes in ranges:
        if start == end:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((start, nbytes))
        end = start + nbytes
    return found
