"""Messages: the bytes of one chunk that the same ranks receive. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastload.geometry.box import Runs

Ranks = tuple[int, ...]
"""Ranks that receive the same bytes, ascending."""


class Message(NamedTuple):
    """The bytes of a chunk that the same ranks receive, packed.

    Attributes:
        reader: The rank that reads the chunk.
        ranks: The recipients.
        nbytes: Length in bytes.
        ranges: (start, length) in this rank's requested bytes, in order; empty if it is no recipient.
        pieces: The positions of the bytes in the chunk, in order, if this rank reads it.
    """

    reader: int
    ranks: Ranks
    nbytes: int
    ranges: Sequence[tuple[int, int]] = ()
    pieces: Sequence[Runs] = ()


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins adjacent ranges, each (start, length)."""
    found: list[tuple[int, int]] = []
    end = -1
    for start, nbytes in ranges:
        if start == end:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((start, nbytes))
        end = start + nbytes
    return found
