"""Which ranges of the files each writer writes, where ranks hold different bytes. Pure.

A file is cut into units, as storage allows. Neighbours of which the same ranks hold something are one
stretch, and stretches with the same holders, over all files, a *lane*. Lanes are dealt to those who hold
them, byte-even over all; what nobody holds in pieces of a unit, or too many do, goes to whoever has least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fastload.base.memory import round_up
from fastload.geometry.extents import Extent, Space
from fastload.saving.assign import FileRange, partition
from fastload.saving.holdings import Cell, Holdings
from fastload.saving.layout import Layout
from fastload.transfer.shares import deal

__all__ = ["spread"]

_MAX_HOLDERS = 8  # of a unit that several hold parts of: with more of them it matters little who writes it

_MOST_UNEVEN = 1 / 32, 1 << 20  # a writer with more than the mean and the larger of these hands units on

_Holders = tuple[int, ...] | None
"""Writers that hold something of a stretch; none if there are too many, None if nobody has to."""


_NOBODYS: _Holders = None


class _Stretch(NamedTuple):
    begin: int
    end: int
    holders: _Holders


def spread(
    layout: Layout, holdings: Holdings, writers: Sequence[int], align_bytes: int | None
) -> dict[int, list[FileRange]]:
    """Deals the bytes of the files, headers included, to the writers; each byte once.

    Args:
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        writers: The ranks that share the writing.
        align_bytes: Where a file may be cut, such as the part size of an upload; None: nowhere.

    Returns:
        For each writer its ranges in file order; none if there is nothing left for it.

    Raises:
        OptionError: `align_bytes` is below 1, or there are no writers.
    """
    if align_bytes is None:
        whole = partition(layout, num_writers=len(writers), align_bytes=None)
        return {writer: list(ranges) for writer, ranges in zip(writers, whole, strict=True)}
    lanes: dict[tuple[int, ...], list[Extent]] = {}
    for file, stretches in enumerate(_stretches(layout, holdings, frozenset(writers), align_bytes)):
        for begin, end, holders in _whole_units(stretches, layout.files[file].nbytes, align_bytes):
            lanes.setdefault(holders or (), []).append(Extent(file, begin, end - begin))
    spaces = [Space(extents) for extents in lanes.values()]
    shares = deal([[(0, space.nbytes)] for space in spaces], list(lanes), sorted(writers))
    found: dict[int, list[FileRange]] = {writer: [] for writer in writers}
    for lane, writer, begin, end in ((each.lane, each.reader, each.begin, each.end) for each in shares):
        space = spaces[lane]
        first, last = (_floor(space, position, align_bytes) for position in (begin, end))
        for index, start, stop in space.cut(first, last - first):
            file, offset, _ = space.extents[index]
            found[writer].append(FileRange(file, offset + start, offset + stop))
    _even_out(found, align_bytes)
    return {writer: _joined(ranges) for writer, ranges in found.items()}


def _even_out(found: dict[int, list[FileRange]], align_bytes: int) -> None:
    """Moves units from who has most to who has least: each cut of a lane was up to a unit off."""
    loads = {writer: sum(end - begin for _, begin, end in ranges) for writer, ranges in found.items()}
    mean, (part, few_bytes) = sum(loads.values()) / len(loads), _MOST_UNEVEN
    bound = mean + max(mean * part, few_bytes)
    while True:
        most, least = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
        if loads[most] <= bound:
            return
        file, begin, end = found[most].pop()
        cut = max(begin, (end - 1) // align_bytes * align_bytes)
        if begin < cut:
            found[most].append(FileRange(file, begin, cut))
        if loads[least] + end - cut >= loads[most]:
            found[most].append(FileRange(file, cut, end))
            return
        found[least].insert(0, FileRange(file, cut, end))
        loads[most] -= end - cut
        loads[least] += end - cut


def _floor(space: Space[Extent], position: int, align_bytes: int) -> int:
    """Returns the last place before a position where a lane may be cut."""
    if position == space.nbytes:
        return position
    index = space.at(position)
    within = position - space.starts[index]
    return position - min(within, (space.extents[index].offset + within) % align_bytes)


def _joined(ranges: Sequence[FileRange]) -> list[FileRange]:
    joined: list[FileRange] = []
    for file, begin, end in sorted(ranges):
        if joined and joined[-1].file == file and joined[-1].end == begin:
            joined[-1] = FileRange(file, joined[-1].begin, end)
        else:
            joined.append(FileRange(file, begin, end))
    return joined


def _stretches(
    layout: Layout, holdings: Holdings, writers: Collection[int], align_bytes: int
) -> Iterator[Iterator[_Stretch]]:
    """Yields for each file who holds what of it, from its first byte to its last."""
    known: dict[int, list[_Stretch]] = {}
    tensors = layout.space.extents

    def of_file(file: int, first: int) -> Iterator[_Stretch]:
        yield _Stretch(0, len(layout.files[file].header), None)
        for number in range(first, len(tensors)):
            entry = tensors[number]
            if entry.file != file:
                return
            kind = holdings.kind(number)
            if kind not in known:
                known[kind] = _of_cells(holdings.cells(number), writers, align_bytes)
            for begin, end, holders in known[kind]:
                yield _Stretch(entry.offset + begin, entry.offset + end, holders)

    for file in range(len(layout.files)):
        yield of_file(file, layout.space.find(file, -1) + 1)


def _of_cells(cells: Sequence[Cell], writers: Collection[int], align_bytes: int) -> list[_Stretch]:
    """Joins the cells of a tensor that share its bytes, and short ones: only of long ranges it matters."""
    found: list[_Stretch] = []
    for cell in cells:
        able = tuple(rank for rank in cell.holders if rank in writers)
        new = _Stretch(cell.runs.start, cell.runs.end, able)
        if found:
            last = found[-1]
            is_short = min(last.end - last.begin, new.end - new.begin) < align_bytes
            if new.begin < last.end or is_short:
                found[-1] = _Stretch(last.begin, max(last.end, new.end), _either(last.holders, able))
                continue
        found.append(new)
    return found


def _whole_units(stretches: Iterator[_Stretch], nbytes: int, align_bytes: int) -> Iterator[_Stretch]:
    """Yields a file in whole units, and who holds something of each."""
    position, holders = 0, _NOBODYS
    for begin, end, here in stretches:
        first = min(round_up(begin, align_bytes), nbytes)
        last = end // align_bytes * align_bytes
        if first < last:
            if position < first:
                yield _Stretch(position, first, _either(holders, here))
            yield _Stretch(first, last, here)
            position, holders = last, _NOBODYS
        elif position < last:
            yield _Stretch(position, last, _either(holders, here))
            position, holders = last, _NOBODYS
        if end > position:
            holders = _either(holders, here)
    if position < nbytes:
        yield _Stretch(position, nbytes, holders)


def _either(one: _Holders, other: _Holders) -> _Holders:
    if one is None or other is None:
        return other if one is None else one
    if not one or not other:
        return ()
    union = tuple(sorted({*one, *other}))
    return union if len(union) <= _MAX_HOLDERS or union in (one, other) else ()
