"""Which writer writes which ranges of the files. Pure: the same inputs give the same ranges on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fastload.base.memory import round_up
from fastload.errors import OptionError
from fastload.geometry.blocks import Blocks
from fastload.geometry.extents import Extent, Space
from fastload.saving.layout import FileRange, Layout, cut, tail_of
from fastload.saving.shard_map import Cell, Holdings
from fastload.transfer.shares import deal

__all__ = ["Share", "Team", "assign", "choose_team", "partition", "spread", "whole_units"]


@dataclass(frozen=True)
class Team:
    """The ranks that write one copy of a checkpoint together.

    Attributes:
        members: All of them, ascending; the first one prepares and publishes.
        writers: Those that write.
        leaders: The first ones of all teams.
    """

    members: tuple[int, ...]
    writers: tuple[int, ...]
    leaders: tuple[int, ...]

    @property
    def num_copies(self) -> int:
        """How many teams there are."""
        return len(self.leaders)

    @property
    def leader(self) -> int:
        """The member that prepares and publishes."""
        return self.members[0]


def choose_team(rank: int, hosts: Sequence[str], *, writers: int | str, shared: bool) -> Team:
    """Chooses with whom a rank writes.

    Args:
        rank: The rank.
        hosts: Host of each rank.
        writers: ``all``, ``host`` or how many of those that write one copy.
        shared: Whether all hosts write one copy together; else each host writes its own.
    """
    everyone = range(len(hosts))
    members = tuple(r for r in everyone if shared or hosts[r] == hosts[rank])
    leaders = (0,) if shared else _first_of_each(hosts, everyone)
    if writers == "host":
        return Team(members, _first_of_each(hosts, members), leaders)
    count = len(members)
    if isinstance(writers, int):
        count = min(count, writers)
    spread = tuple(members[index * len(members) // count] for index in range(count))
    return Team(members, spread, leaders)


def _first_of_each(hosts: Sequence[str], ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({hosts[rank]: rank for rank in reversed(ranks)}.values()))


@dataclass(frozen=True)
class Share:
    """The bytes of a save that one rank contributes.

    Attributes:
        ranges: All it writes, in file order.
        pieces: What it copies, hashes and writes at once, one after the other.
        tails: The numbers of those pieces that it only hashes: the rest of blocks that it has begun.
    """

    ranges: Sequence[FileRange]
    pieces: Sequence[FileRange]
    tails: frozenset[int]

    @classmethod
    def of(cls, layout: Layout, ranges: Sequence[FileRange], piece_bytes: int) -> Share:
        """Returns the share of a writer with these ranges, given the most bytes of a piece."""
        pieces: list[FileRange] = []
        tails = set()
        for part in ranges:
            pieces += cut([part], piece_bytes)
            if tail := tail_of(layout, part):
                tails.add(len(pieces))
                pieces.append(tail)
        return cls(ranges, pieces, frozenset(tails))

    @property
    def nbytes(self) -> int:
        """Length of all it writes."""
        return sum(end - begin for _, begin, end in self.ranges)


def assign(
    layout: Layout, writers: Sequence[int], rank: int, *, align_bytes: int | None, piece_bytes: int
) -> Share:
    """Returns what a rank contributes to a save.

    Args:
        layout: The files.
        writers: The ranks that share the writing.
        rank: The rank; it need not write.
        align_bytes: Where a file may be cut; None: nowhere.
        piece_bytes: Most bytes to copy, hash and write at once, unless `align_bytes` is more.

    Raises:
        OptionError: `align_bytes` is below 1, or there are no writers.
    """
    shares = partition(layout, num_writers=len(writers), align_bytes=align_bytes)
    ranges = shares[writers.index(rank)] if rank in writers else ()
    return Share.of(layout, ranges, whole_units(piece_bytes, align_bytes))


def whole_units(piece_bytes: int, align_bytes: int | None) -> int:
    """Returns the length of a piece: the most that it may have, in units that a file may be cut into."""
    unit = align_bytes or 1
    return max(1, piece_bytes // unit) * unit


def partition(
    layout: Layout, *, num_writers: int, align_bytes: int | None
) -> tuple[tuple[FileRange, ...], ...]:
    """Deals the bytes of the files, headers included, to the writers; each byte once.

    Each writer gets one contiguous range of all files one after the other, cut only between files and
    at multiples of `align_bytes` in a file, and at most the mean and `align_bytes` more. With whole
    files a writer gets those it is dealt, longest first, each to whoever has least.

    Args:
        layout: The files.
        num_writers: How many share the writing.
        align_bytes: Where a file may be cut, such as the part size of an upload; None: nowhere.

    Returns:
        For each writer its ranges in file order; none if there is nothing left for it.

    Raises:
        OptionError: A number is below 1.
    """
    if num_writers < 1 or (align_bytes is not None and align_bytes < 1):
        raise OptionError(f"num_writers={num_writers}, align_bytes={align_bytes}: must be at least 1")
    sizes = [file.nbytes for file in layout.files]
    if align_bytes is None:
        return _deal_files(sizes, num_writers)
    # One may cut where each file, laid end to end, has whole units.
    units = Blocks(Space([Extent(file, 0, size) for file, size in enumerate(sizes)]), align_bytes)
    files, total = units.space, units.space.nbytes
    cuts = [units.floor(total * number // num_writers) for number in range(num_writers)]
    return tuple(tuple(_ranges(files, begin, end)) for begin, end in pairwise([*cuts, total]))


def _ranges(files: Space[Extent], begin: int, end: int) -> Iterator[FileRange]:
    """Yields a range of all files one after the other as ranges of the files."""
    for file, first, stop in files.cut(begin, end - begin):
        yield FileRange(file, first, stop)


def _deal_files(sizes: Sequence[int], num_writers: int) -> tuple[tuple[FileRange, ...], ...]:
    shares: list[list[FileRange]] = [[] for _ in range(num_writers)]
    loads = [0] * num_writers
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        writer = loads.index(min(loads))
        shares[writer].append(FileRange(file, 0, sizes[file]))
        loads[writer] += sizes[file]
    return tuple(tuple(sorted(share)) for share in shares)


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
