"""Byte ranges of files, and the one place that finds which of them holds a position."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar


class HasExtent(Protocol):
    """Whatever has bytes in a file: an `Extent`, a `Span`, a tensor of a manifest."""

    @property
    def file(self) -> int:
        """Index of the file."""
        ...

    @property
    def offset(self) -> int:
        """First byte in the file."""
        ...

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...


class Extent(NamedTuple):
    """A byte range of one file.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    file: int
    offset: int
    nbytes: int


class Span(NamedTuple):
    """A byte range of one file that is contiguous in a space too.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes.
        start: First byte in the space.
    """

    file: int
    offset: int
    nbytes: int
    start: int


Ranged = TypeVar("Ranged", bound=HasExtent)


class Space(Generic[Ranged]):
    """Extents laid end to end: the bytes from 0 to `nbytes`.

    Args:
        extents: In the order of the space. None of them is to be empty where positions are looked up.
    """

    def __init__(self, extents: Sequence[Ranged]) -> None:
        self.extents = extents

    @cached_property
    def starts(self) -> list[int]:
        """Where each extent begins, and where the last one ends."""
        return list(accumulate((extent.nbytes for extent in self.extents), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of all extents together."""
        return self.starts[-1]

    def at(self, position: int) -> int:
        """Returns which extent holds a position."""
        return bisect_right(self.starts, position) - 1

    def within(self, start: int, nbytes: int) -> range:
        """Returns which extents a range of the space, not empty, has bytes of."""
        return range(self.at(start), bisect_left(self.starts, start + nbytes))

    def cut(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Cuts a range of the space into (extent, begin, end) in bytes of that extent."""
        if not nbytes:
            return
        starts, stop = self.starts, start + nbytes
        for index in self.within(start, nbytes):
            first = starts[index]
            yield index, max(start - first, 0), min(stop, starts[index + 1]) - first

    def find(self, file: int, offset: int) -> int:
        """Returns the last extent that begins at or before a byte of a file; -1 if there is none.

        Of a space whose extents are in the order of their bytes.
        """
        return bisect_right(self.extents, (file, offset), key=_place) - 1


def _place(extent: HasExtent) -> tuple[int, int]:
    return extent.file, extent.offset


def merged(wanted: Iterable[HasExtent]) -> tuple[Span, ...]:
    """Joins what follows each other without a gap in the same file; the spans are laid end to end."""
    extents: list[Span] = []
    file, begin, end, start = -1, 0, 0, 0
    for extent in wanted:
        if extent.nbytes == 0:
            continue
        if extent.file != file or extent.offset != end:
            if end > begin:
                extents.append(Span(file, begin, end - begin, start))
                start += end - begin
            file, begin = extent.file, extent.offset
        end = extent.offset + extent.nbytes
    if end > begin:
        extents.append(Span(file, begin, end - begin, start))
    return tuple(extents)
