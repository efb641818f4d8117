"""The split of the files among writers. Pure: the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fastload.base.memory import round_up
from fastload.errors import OptionError
from fastload.geometry.blocks import Blocks
from fastload.geometry.ranges import ByteRange, Space, deal_uncut, merged
from fastload.saving.layout import Layout
from fastload.saving.shard_map import Intervals, MappedShard, ShardMap, TensorShards
from fastload.transfer.demand import deal

_MAX_HOLDERS = 8  # of a unit: with more holders of parts of it, it matters little which rank writes it
_UNITS_OF_A_SHARE = 8192  # at least, of a long share; a unit of several holders' bytes is exchanged
_MOST_UNEVEN = 1 / 32, 1 << 20  # the most that a writer may have above the mean: a part of it, or bytes


@dataclass(frozen=True)
class WriterGroup:
    """The ranks that write one copy of a checkpoint together.

    Attributes:
        members: All ranks of the group, ascending. The first one, the leader, prepares and publishes.
        writers: The members that write.
    """

    members: tuple[int, ...]
    writers: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The first member, which prepares and publishes."""
        return self.members[0]


def choose_writers(hosts: Sequence[str], *, writers: int | str, shared: bool) -> list[WriterGroup]:
    """Returns the groups of writers, one for each copy.

    Args:
        hosts: Host of each rank.
        writers: ``all``, ``host`` or the number of writers of a copy.
        shared: Whether all hosts write one copy together; else each host writes its own.
    """
    members_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members_of.setdefault("" if shared else host, []).append(rank)
    groups = []
    for members in members_of.values():
        if writers == "host":
            chosen = sorted({hosts[rank]: rank for rank in reversed(members)}.values())
        else:
            count = min(len(members), writers) if isinstance(writers, int) else len(members)
            chosen = [members[index * len(members) // count] for index in range(count)]
        groups.append(WriterGroup(tuple(members), tuple(chosen)))
    return groups


@dataclass(frozen=True)
class PartRun:
    """Consecutive parts of a share, of one range that one writer writes: arithmetic in place of a list.

    Attributes:
        first: Number of its first part in the share.
        file: Index of the file.
        begin: First byte in the file.
        end: The byte after the last one.
        grid: Where the range that is written begins; its parts are counted from there.
        part_bytes: Most bytes of a part.
        writer: The rank that writes the range.
        number: Number of the range among those of that writer.
        is_tail: Whether the share's writer only hashes the parts.
    """

    first: int
    file: int
    begin: int
    end: int
    grid: int
    part_bytes: int
    writer: int
    number: int
    is_tail: bool

    @property
    def _skipped(self) -> int:
        return (self.begin - self.grid) // self.part_bytes

    @property
    def num_parts(self) -> int:
        """Number of its parts."""
        return -(-(self.end - self.grid) // self.part_bytes) - self._skipped

    def part(self, index: int) -> ByteRange:
        """Returns one of its parts."""
        at = self.grid + (self._skipped + index) * self.part_bytes
        begin = max(at, self.begin)
        return ByteRange(self.file, begin, min(at + self.part_bytes, self.end) - begin)

    def ends(self) -> list[int]:
        """Returns where each of its parts ends in the file."""
        first = self.grid + (self._skipped + 1) * self.part_bytes
        return [*range(first, self.end, self.part_bytes), self.end] if self.begin < self.end else []

    def origin(self, index: int) -> tuple[int, int]:
        """Returns the origin of one of its parts; see `WriterShare.origins`."""
        return self.writer, self.number + self._skipped + index

    def within(self, begin: int, end: int) -> range:
        """Returns the parts with bytes in a range of the file, which overlaps this one."""
        first = (max(begin, self.begin) - self.grid) // self.part_bytes
        last = (min(end, self.end) - 1 - self.grid) // self.part_bytes
        return range(first - self._skipped, last - self._skipped + 1)


@dataclass(frozen=True)
class WriterShare:
    """The bytes that one writer hashes and writes.

    Attributes:
        ranges: The ranges that it writes, in file order.
        runs: The same ranges in parts, and the tails.
    """

    ranges: Sequence[ByteRange] = ()
    runs: Sequence[PartRun] = ()

    @cached_property
    def parts(self) -> list[ByteRange]:
        """The parts. Those of all writers of a large job are millions."""
        return [run.part(index) for run in self.runs for index in range(run.num_parts)]

    @cached_property
    def tails(self) -> frozenset[int]:
        """Numbers of the parts that it only hashes: the rest of blocks that begin in a range."""
        return frozenset(
            run.first + index for run in self.runs if run.is_tail for index in range(run.num_parts)
        )

    @cached_property
    def origins(self) -> list[tuple[int, int]]:
        """For each part, the writer that writes it, and a number of it there.

        They decide which holder contributes it, so that a tail has the bytes that are written.
        """
        return [run.origin(index) for run in self.runs for index in range(run.num_parts)]

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""
        return sum(written.nbytes for written in self.ranges)


def cut_shares(
    layout: Layout,
    ranges: Mapping[int, Sequence[ByteRange]],
    part_bytes: int,
    writers: Collection[int] | None = None,
) -> dict[int, WriterShare]:
    """Cuts the ranges of writers into parts.

    Args:
        layout: The files.
        ranges: The ranges of each writer of a copy, in file order.
        part_bytes: Most bytes of a part.
        writers: The writers whose shares to return; None for all.
    """
    written = Intervals(
        ((piece.file, piece.offset), (piece.file, piece.end), (writer, number, piece))
        for writer, of_writer in ranges.items()
        for number, piece in enumerate(of_writer)
    )

    def cut(within: ByteRange, first: int, *, is_tail: bool = False) -> Iterator[PartRun]:
        """Yields the parts of a range, which writers may share."""
        file = within.file
        for writer, number, byte_range in written.overlapping((file, within.offset), (file, within.end)):
            begin, end = max(byte_range.offset, within.offset), min(byte_range.end, within.end)
            run = PartRun(first, file, begin, end, byte_range.offset, part_bytes, writer, number, is_tail)
            first += run.num_parts
            yield run

    shares = {}
    for writer in ranges if writers is None else writers:
        runs: list[PartRun] = []
        for byte_range in ranges[writer]:
            runs += cut(byte_range, _num_parts(runs))
            if tail := layout.tail_of(byte_range):
                runs += cut(tail, _num_parts(runs), is_tail=True)
        shares[writer] = WriterShare(ranges[writer], runs)
    return shares


def _num_parts(runs: Sequence[PartRun]) -> int:
    return runs[-1].first + runs[-1].num_parts if runs else 0


def hashing_writers(layout: Layout, ranges: Mapping[int, Sequence[ByteRange]], writer: int) -> set[int]:
    """Returns the writers that hash bytes which one of them writes, that one included."""
    written = Intervals(
        ((piece.file, piece.offset), (piece.file, piece.end), piece) for piece in ranges.get(writer, ())
    )
    tails = ((other, tail) for other, of_other in ranges.items() for tail in map(layout.tail_of, of_other))
    return {writer} | {
        other
        for other, tail in tails
        if tail and any(written.overlapping((tail.file, tail.offset), (tail.file, tail.end)))
    }


def round_to_units(part_bytes: int, align_bytes: int | None) -> int:
    """Rounds the length of a part down to the units into which a file may be cut; at least one."""
    unit = align_bytes or 1
    return max(1, part_bytes // unit) * unit


def split(
    layout: Layout, shard_map: ShardMap, writers: Sequence[int], align_bytes: int | None
) -> dict[int, Sequence[ByteRange]]:
    """Splits the bytes of the files, headers included, among the writers; each byte once.

    If every rank holds everything, each writer gets one contiguous range. Else files are cut into units of
    `align_bytes`, and all units with the same holders are split evenly among these. Units with no holder
    among the writers, or with too many, go to the writers with the fewest bytes.

    Args:
        layout: The files.
        shard_map: Which ranks hold which bytes.
        writers: The ranks that write.
        align_bytes: Files are cut at its multiples, such as the part size of an upload; None: nowhere.

    Returns:
        The ranges of each writer in file order, perhaps none.

    Raises:
        OptionError: `align_bytes` is below 1, or there are no writers.
    """
    if shard_map.is_replicated or align_bytes is None:
        evenly = split_evenly(layout, num_writers=len(writers), align_bytes=align_bytes)
        return dict(zip(writers, evenly, strict=True))
    align_bytes = _unit_bytes(layout.nbytes // len(writers), align_bytes)
    by_holders: dict[tuple[int, ...], list[ByteRange]] = {}
    for file, ranges in enumerate(_held_ranges(layout, shard_map, frozenset(writers), align_bytes)):
        for begin, end, holders in _ranges_in_units(ranges, layout.files[file].nbytes, align_bytes):
            by_holders.setdefault(holders or (), []).append(ByteRange(file, begin, end - begin))
    spaces = [Space(extents) for extents in by_holders.values()]
    shares = deal([[(0, space.nbytes)] for space in spaces], list(by_holders), sorted(writers))
    by_writer: dict[int, list[ByteRange]] = {writer: [] for writer in writers}
    for share in shares:
        space = spaces[share.group]
        first, last = (_floor(space, position, align_bytes) for position in (share.begin, share.end))
        for index, start, stop in space.cut(first, last - first):
            file, offset, *_ = space.ranges[index]
            by_writer[share.reader].append(ByteRange(file, offset + start, stop - start))
    _even_out(by_writer, align_bytes)
    return {writer: merged(sorted(ranges)) for writer, ranges in by_writer.items()}


def _unit_bytes(share_bytes: int, align_bytes: int) -> int:
    """Returns a multiple of an alignment with which a share has not too many units: planning takes time."""
    most = max(1, share_bytes // _UNITS_OF_A_SHARE // align_bytes)
    return align_bytes << (most.bit_length() - 1)


def split_evenly(
    layout: Layout, *, num_writers: int, align_bytes: int | None
) -> tuple[tuple[ByteRange, ...], ...]:
    """Splits the bytes of the files, headers included, evenly; each byte once.

    Each writer gets one contiguous range of the concatenated files, cut between files and at multiples of
    `align_bytes` in a file: at most `align_bytes` more than the mean. If files must not be cut, each file,
    the longest first, goes to the writer with the fewest bytes.

    Args:
        layout: The files.
        num_writers: Number of writers.
        align_bytes: Files are cut at its multiples, such as the part size of an upload; None: nowhere.

    Returns:
        The ranges of each writer in file order, perhaps none.

    Raises:
        OptionError: A number is below 1.
    """
    if num_writers < 1 or (align_bytes is not None and align_bytes < 1):
        raise OptionError(f"num_writers={num_writers}, align_bytes={align_bytes}: must be at least 1")
    sizes = [file.nbytes for file in layout.files]
    if align_bytes is None:
        dealt = deal_uncut(sizes, num_writers)
        return tuple(tuple(ByteRange(file, 0, sizes[file]) for file in share) for share in dealt)
    units = Blocks(Space([ByteRange(file, 0, size) for file, size in enumerate(sizes)]), align_bytes)
    files, total = units.space, units.space.nbytes
    cuts = [units.floor(total * number // num_writers) for number in range(num_writers)]
    return tuple(tuple(_ranges(files, begin, end)) for begin, end in pairwise([*cuts, total]))


def _ranges(files: Space[ByteRange], begin: int, end: int) -> Iterator[ByteRange]:
    """Yields a range of the concatenated files as ranges of files."""
    for file, first, stop in files.cut(begin, end - begin):
        yield ByteRange(file, first, stop - first)


_Holders = tuple[int, ...] | None
"""Writers that hold bytes of a range; empty if there are too many, None if any writer has them."""


class _RangeOfHolders(NamedTuple):
    begin: int
    end: int
    holders: _Holders


def _even_out(by_writer: dict[int, list[ByteRange]], align_bytes: int) -> None:
    """Moves units from the writer with the most bytes to the one with the fewest."""
    loads = {writer: sum(byte_range.nbytes for byte_range in ranges) for writer, ranges in by_writer.items()}
    mean, (part, few_bytes) = sum(loads.values()) / len(loads), _MOST_UNEVEN
    bound = mean + max(mean * part, few_bytes)
    while True:
        most, least = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
        if loads[most] <= bound:
            return
        last = by_writer[most].pop()
        cut = max(last.offset, (last.end - 1) // align_bytes * align_bytes)
        moved = ByteRange(last.file, cut, last.end - cut)
        if last.offset < cut:
            by_writer[most].append(ByteRange(last.file, last.offset, cut - last.offset))
        if loads[least] + moved.nbytes >= loads[most]:
            by_writer[most].append(moved)
            return
        by_writer[least].insert(0, moved)
        loads[most] -= moved.nbytes
        loads[least] += moved.nbytes


def _floor(space: Space[ByteRange], position: int, align_bytes: int) -> int:
    """Rounds a position down to one where a file may be cut."""
    if position == space.nbytes:
        return position
    index = space.at(position)
    within = position - space.starts[index]
    return position - min(within, (space.ranges[index].offset + within) % align_bytes)


def _held_ranges(
    layout: Layout, shard_map: ShardMap, writers: Collection[int], align_bytes: int
) -> Iterator[Iterator[_RangeOfHolders]]:
    """Yields the byte ranges of each file, in order, with their holders."""
    known: dict[TensorShards, list[_RangeOfHolders]] = {}
    tensors = layout.space.ranges

    def of_file(file: int, first: int) -> Iterator[_RangeOfHolders]:
        yield _RangeOfHolders(0, len(layout.files[file].header), None)
        for number in range(first, len(tensors)):
            entry = tensors[number]
            if entry.file != file:
                return
            kind = shard_map.tensors[number]
            if kind not in known:
                known[kind] = _of_shards(kind.shards, writers, align_bytes)
            for begin, end, holders in known[kind]:
                yield _RangeOfHolders(entry.offset + begin, entry.offset + end, holders)

    for file in range(len(layout.files)):
        yield of_file(file, layout.space.find(file, -1) + 1)


def _of_shards(
    shards: Sequence[MappedShard], writers: Collection[int], align_bytes: int
) -> list[_RangeOfHolders]:
    """Joins shards whose bytes alternate, and short ones, since only long ranges matter."""
    longer: list[_RangeOfHolders] = []
    for shard in shards:
        able = tuple(rank for rank in shard.holders if rank in writers)
        new = _RangeOfHolders(shard.runs.start, shard.runs.end, able)
        if longer:
            last = longer[-1]
            is_short = min(last.end - last.begin, new.end - new.begin) < align_bytes
            if new.begin < last.end or is_short:
                longer[-1] = _RangeOfHolders(last.begin, max(last.end, new.end), _either(last.holders, able))
                continue
        longer.append(new)
    return longer


def _ranges_in_units(
    ranges: Iterator[_RangeOfHolders], nbytes: int, align_bytes: int
) -> Iterator[_RangeOfHolders]:
    """Yields a file in units, joined by the holders of some of their bytes."""
    position = 0
    holders: _Holders = None
    for begin, end, here in ranges:
        first = min(round_up(begin, align_bytes), nbytes)
        last = end // align_bytes * align_bytes
        if first < last:
            if position < first:
                yield _RangeOfHolders(position, first, _either(holders, here))
            yield _RangeOfHolders(first, last, here)
            position, holders = last, None
        elif position < last:
            yield _RangeOfHolders(position, last, _either(holders, here))
            position, holders = last, None
        if end > position:
            holders = _either(holders, here)
    if position < nbytes:
        yield _RangeOfHolders(position, nbytes, holders)


def _either(one: _Holders, other: _Holders) -> _Holders:
    if one is None or other is None:
        return other if one is None else one
    if not one or not other:
        return ()
    union = tuple(sorted({*one, *other}))
    return union if len(union) <= _MAX_HOLDERS or union in (one, other) else ()
