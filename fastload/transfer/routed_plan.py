"""Plans of loads in which ranks want different bytes: rounds, readers and messages. Pure.

Each reader has its shares of the lanes one after the other, and reads a chunk of that in each round. What
one group of ranks wants of a chunk is a message, packed if it is strided. Where not every reader has all
files, as in a restore from memory, `Holders` says who can read what.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import ClassVar, NamedTuple

import xxhash

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import IncompleteCheckpoint, OptionError
from fastload.geometry.box import Runs
from fastload.geometry.extents import HasExtent, Span
from fastload.transfer.demand import Density, Lanes, Part, Stretch
from fastload.transfer.message import Message, Ranks, joined
from fastload.transfer.plan import Chunk, Supply
from fastload.transfer.shares import Share, deal


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


_MAX_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 20
_LEAST_CHUNK_BYTES = 64 << 10
_GOOD_NUM_ROUNDS = 128
_MAX_DEPTH = 4


@dataclass(frozen=True)
class RoutedPlan:
    """Which rank reads which bytes in which round, and who gets them from whom.

    Attributes:
        lanes: The wanted bytes.
        supply: The ranks that read.
        shares: What each of them reads, in the order in which it does.
        order: All ranks, those of a host next to each other.
        chunk_bytes: Length of a chunk in every round but a reader's last, before it is cut at units.
        depth: Rounds that may be in flight at once.
        buffer_bytes: Most bytes that a rank needs for a round.
        staging_bytes: Most bytes for all buffers of one rank together.
        holders: Who of those that read can deliver what; None if each can deliver all.
        in_lockstep, ahead: See `TransferPlan`.
    """

    lanes: Lanes
    supply: Supply
    shares: tuple[Share, ...]
    order: tuple[int, ...]
    chunk_bytes: int
    depth: int
    buffer_bytes: int
    staging_bytes: int
    holders: Holders | None = None
    in_lockstep: ClassVar[bool] = False
    ahead: ClassVar[int] = 0

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that read, ascending."""
        return self.supply.ranks

    @cached_property
    def total_bytes(self) -> int:
        """Bytes to be read, by all readers together."""
        return sum(share.end - share.begin for share in self.shares)

    @cached_property
    def most_bytes(self) -> int:
        """The most bytes that one reader reads."""
        return max((share.start + share.end - share.begin for share in self.shares), default=0)

    @property
    def longest_chunk_bytes(self) -> int:
        """The most that a rank reads in a round: a chunk ends where its last unit does."""
        return self.chunk_bytes + self.lanes.longest_unit_bytes

    def largest_chunk_bytes(self, rank: int) -> int:
        """Returns the most that a rank reads in a round."""
        return self.longest_chunk_bytes

    @property
    def num_reads(self) -> int:
        """How many chunks a reader has to have in flight: while those are read others are exchanged."""
        return max(1, self.depth // 2)

    def depth_within(self, round_bytes: int) -> int:
        """Returns how many rounds may be in flight that take so many bytes of a rank."""
        return max(1, self.staging_bytes // round_bytes)

    def view(self, rank: int) -> Routes:
        """Returns the plan as one rank sees it."""
        return Routes(self, rank)

    @cached_property
    def groups(self) -> Collection[Ranks]:
        """The groups of ranks that want the same bytes."""
        return dict.fromkeys(ranks for of_lane in self.lanes.densities for ranks in of_lane)

    def pairs(self, rank: int) -> Iterator[tuple[int, Ranks]]:
        """Yields (reader, group) of all messages that a rank may have to do with."""
        readers: dict[int, set[int]] = defaultdict(set)
        for share in self.shares:
            readers[share.lane].add(share.reader)
        for lane, of_lane in readers.items():
            for ranks in self.lanes.densities[lane]:
                for reader in sorted(of_lane) if rank in ranks else sorted(of_lane & {rank}):
                    yield reader, ranks

    @property
    def num_rounds(self) -> int:
        """How many rounds it takes."""
        return -(-self.most_bytes // self.chunk_bytes)

    @cached_property
    def exchanges(self) -> bool:
        """Whether anything has to get from the rank that reads it to another one."""
        return any(self.lanes.wanters[share.lane] != [share.reader] for share in self.shares)

    @cached_property
    def shares_of(self) -> Mapping[int, Sequence[Share]]:
        """What each reader reads, in order."""
        found: dict[int, list[Share]] = {reader: [] for reader in self.readers}
        for share in self.shares:
            found[share.reader].append(share)
        return found

    def window(self, shares: Sequence[Share], index: int) -> Iterator[Share]:
        """Yields what is read of a reader's shares, or some of them, in a round."""
        begin, end = index * self.chunk_bytes, (index + 1) * self.chunk_bytes
        at = max(0, bisect_right(shares, begin, key=lambda share: share.start) - 1)
        for share in shares[at:]:
            if share.start >= end:
                return
            first = max(share.begin, share.begin + begin - share.start)
            last = min(share.end, share.begin + end - share.start)
            if first < last:
                yield replace(share, begin=first, end=last)

    def chunk(self, index: int, rank: int) -> Chunk:
        """Returns which of its bytes a rank reads in a round, counted over all of its shares."""
        shares = self.shares_of.get(rank, ())
        end = shares[-1].start + shares[-1].end - shares[-1].begin if shares else 0
        start = min(index * self.chunk_bytes, end)
        return Chunk(start, min(end - start, self.chunk_bytes))

    def without(
        self, broken: Collection[int], lacking: Sequence[tuple[int, int]], num_posted: int
    ) -> RoutedPlan | None:
        """Returns the plan of what is left to do when some readers drop out; see `TransferPlan.without`."""
        supply = self.supply.without(broken)
        if supply is None:
            return None
        left: list[list[tuple[int, int]]] = [[] for _ in self.lanes.nbytes]
        later = [(index, rank) for index in range(num_posted, self.num_rounds) for rank in self.readers]
        for index, rank in (*lacking, *later):
            for share in self.window(self.shares_of[rank], index):
                left[share.lane].append((share.begin, share.end))
        shares = _deal(self.lanes, [sorted(ranges) for ranges in left], supply, self.holders)
        if shares is None:
            return None
        # Who reads no more gets from the others what it has read itself.
        room = _Need(self.lanes, shares)
        chunk_bytes = room.fitting(self.chunk_bytes, self.staging_bytes)
        sizes = room.sizes(chunk_bytes, self.staging_bytes)
        return RoutedPlan(self.lanes, supply, tuple(shares), self.order, *sizes, self.holders)

    def digest(self) -> str:
        """xxh3-128 of all that the plan follows from, for comparison between ranks."""
        inputs = [self.lanes.claims.digest, self.lanes.block_bytes, self.readers, self.order]
        holders = self.holders.digest if self.holders is not None else ""
        text = json.dumps([*inputs, self.total_bytes, self.chunk_bytes, self.depth, holders])
        return xxhash.xxh3_128_hexdigest(text.encode())


def plan_routes(
    lanes: Lanes,
    supply: Supply,
    *,
    order: Sequence[int],
    staging_bytes: int,
    chunk_bytes: int | None,
    holders: Holders | None = None,
) -> RoutedPlan:
    """Deals the wanted bytes to the ranks that can deliver them.

    Args:
        lanes: The wanted bytes.
        supply: Who can read.
        order: All ranks, those of a host next to each other.
        staging_bytes: Most bytes for all buffers of one rank together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.
        holders: Who of those that can deliver has what; None if each has all.

    Raises:
        OptionError: `chunk_bytes`, or a checksum block, does not fit into `staging_bytes`.
        IncompleteCheckpoint: Some of it nobody has.
    """
    shares = _deal(lanes, [[(0, nbytes)] for nbytes in lanes.nbytes], supply, holders)
    if shares is None:
        raise IncompleteCheckpoint("none of the ranks has all that is wanted of the checkpoint")
    need = _Need(lanes, shares)
    if chunk_bytes is None:
        for_overlap = round_up(lanes.total_bytes // len(supply.ranks) // _GOOD_NUM_ROUNDS, PAGE_BYTES)
        good = min(max(for_overlap, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
        chunk_bytes = need.fitting(good, staging_bytes)
    sizes = need.sizes(chunk_bytes, staging_bytes)
    return RoutedPlan(lanes, supply, tuple(shares), tuple(order), *sizes, holders)


def _deal(
    lanes: Lanes, wanted: Sequence[Sequence[tuple[int, int]]], supply: Supply, holders: Holders | None
) -> list[Share] | None:
    """Deals what is wanted of each lane to those who can deliver it; None if nobody can."""
    if holders is None:
        return deal(wanted, lanes.wanters, supply.ranks)
    pools = holders.pools(lanes, wanted, supply.ranks)
    if pools is None:
        return None
    wanters = [lanes.wanters[pool.lane] for pool in pools]
    shares = deal(
        [pool.ranges for pool in pools], wanters, supply.ranks, holders=[pool.ranks for pool in pools]
    )
    return [replace(share, lane=pools[share.lane].lane) for share in shares]


class _Need:
    """How much room a rank needs for a round, at most.

    Args:
        lanes: The wanted bytes.
        shares: Who reads what of them.
    """

    def __init__(self, lanes: Lanes, shares: Sequence[Share]) -> None:
        self._lanes = lanes
        self._suppliers = _suppliers(lanes, shares)
        self._known: dict[int, int] = {}

    def bytes(self, chunk_bytes: int) -> int:
        """Returns the room for what is read, packed and received in a round."""
        if chunk_bytes not in self._known:
            longest = chunk_bytes + self._lanes.longest_unit_bytes
            coming = (sum(one.most(longest) for one in of_rank) for of_rank in self._suppliers)
            parts = (longest, self._lanes.packed.most(longest), max(coming, default=0))
            self._known[chunk_bytes] = sum(round_up(part, PAGE_BYTES) for part in parts)
        return self._known[chunk_bytes]

    def fitting(self, chunk_bytes: int, staging_bytes: int) -> int:
        """Returns the longest chunk up to a length with which several rounds fit, or else one."""
        while chunk_bytes > _LEAST_CHUNK_BYTES and _MAX_DEPTH * self.bytes(chunk_bytes) > staging_bytes:
            chunk_bytes = round_up(chunk_bytes // 2, PAGE_BYTES)
        while chunk_bytes > PAGE_BYTES and self.bytes(chunk_bytes) > staging_bytes:
            chunk_bytes = round_up(chunk_bytes // 2, PAGE_BYTES)
        return max(chunk_bytes, self._lanes.longest_unit_bytes)

    def sizes(self, chunk_bytes: int, staging_bytes: int) -> tuple[int, int, int, int]:
        """Returns length of a chunk, rounds in flight, length of a buffer, and bytes for all of them.

        Raises:
            OptionError: Not even one round fits.
        """
        buffer_bytes = self.bytes(chunk_bytes)
        depth = min(_MAX_DEPTH, staging_bytes // buffer_bytes)
        if depth < 1:
            blocks, num_readers = self._lanes.block_bytes, max(map(len, self._suppliers), default=0)
            why = f" (checksum blocks have {blocks}: verify=False reads without)" if blocks else ""
            raise OptionError(
                f"chunk_bytes={chunk_bytes}: what comes from {num_readers} readers at once does not fit into "
                f"staging_bytes={staging_bytes}{why}"
            )
        return chunk_bytes, depth, buffer_bytes, staging_bytes


class _Supplier(NamedTuple):
    """A reader that a rank gets something from.

    Attributes:
        nbytes: How much that reads of lanes that the rank wants.
        density: How much of that the rank wants, at most.
    """

    nbytes: int
    density: Density

    def most(self, chunk_bytes: int) -> int:
        """Returns how much of one chunk the rank gets, at most; more than that if its boxes overlap."""
        nbytes = min(self.nbytes, chunk_bytes)
        return min(ceil(max(self.density.part, 1.0) * nbytes), self.density.most(nbytes))


def _suppliers(lanes: Lanes, shares: Sequence[Share]) -> list[list[_Supplier]]:
    """Returns from whom a rank gets what, for one rank of each claim: the others get as much."""
    lengths: dict[int, dict[int, int]] = defaultdict(dict)
    for share in shares:
        of_lane = lengths[share.lane]
        of_lane[share.reader] = of_lane.get(share.reader, 0) + share.end - share.begin
    found: dict[int, dict[int, _Supplier]] = {ranks[0]: {} for ranks in lanes.claims.ranks}
    for lane, of_lane in lengths.items():
        for ranks, density in lanes.densities[lane].items():
            for rank in found.keys() & set(ranks):
                suppliers = found[rank]
                for reader, nbytes in of_lane.items():
                    known = suppliers.get(reader)
                    suppliers[reader] = (
                        _Supplier(nbytes, density)
                        if known is None
                        else _Supplier(known.nbytes + nbytes, known.density.joined(density))
                    )
    return [list(suppliers.values()) for suppliers in found.values()]


class Routes:
    """A plan as one rank sees it.

    Args:
        plan: The plan.
        rank: The rank.

    Attributes:
        wanted_bytes: Bytes that the rank wants.
    """

    def __init__(self, plan: RoutedPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        wanted = {lane for lane, ranks in enumerate(plan.lanes.wanters) if rank in ranks}
        own = plan.shares_of.get(rank, ())
        self._spaces = plan.lanes.spaces(sorted({*wanted, *(share.lane for share in own)}))
        self._suppliers = {
            reader: coming
            for reader, shares in plan.shares_of.items()
            if reader != rank and (coming := [share for share in shares if share.lane in wanted])
        }
        self._parts: dict[int, dict[int, Part]] = {}
        self._starts: dict[int, int] = {}
        self.wanted_bytes = 0
        for tensor, part in plan.lanes.claims.of(rank):
            self._starts[tensor] = self.wanted_bytes
            self.wanted_bytes += sum(runs.total for runs in part)

    def part(self, rank: int, tensor: int) -> Part:
        """Returns what a rank wants of a tensor."""
        if rank not in self._parts:
            self._parts[rank] = dict(self._plan.lanes.claims.of(rank))
        return self._parts[rank].get(tensor, ())

    def readers(self, index: int) -> Collection[int]:
        """Returns who may read something for this rank in a round."""
        return self._plan.readers

    def stretches(self, index: int) -> list[Stretch]:
        """Returns the ranges of tensors that this rank reads in a round, in order."""
        return [stretch for stretch, _ in self._pieces(self._rank, index)]

    def reads(self, index: int) -> list[Span]:
        """Returns the byte ranges of files that this rank reads in a round, in order."""
        spans: list[Span] = []
        start = 0
        for tensor, begin, nbytes in self.stretches(index):
            entry = self._plan.lanes.tensors[tensor]
            span = Span(entry.file, entry.offset + begin, nbytes, start)
            start += nbytes
            last = spans[-1] if spans else None
            if last is not None and (last.file, last.offset + last.nbytes) == (span.file, span.offset):
                spans[-1] = last._replace(nbytes=last.nbytes + nbytes)
            else:
                spans.append(span)
        return spans

    def outgoing(self, index: int) -> list[Message]:
        """Returns the messages of what this rank reads in a round."""
        return self._messages(self._rank, index)

    def incoming(self, index: int) -> list[Message]:
        """Returns the messages for this rank of what others read in a round."""
        return [message for reader in self._suppliers for message in self._messages(reader, index)]

    def _messages(self, reader: int, index: int) -> list[Message]:
        """Returns what each group, or each that this rank is in, wants of a chunk, unless that is nothing.

        In the same order on all ranks.
        """
        wanted: dict[Ranks, list[tuple[Stretch, int]]] = {}
        position = 0
        for stretch, groups in self._pieces(reader, index):
            for ranks in groups:
                if reader == self._rank or self._rank in ranks:
                    wanted.setdefault(ranks, []).append((stretch, position))
            position += stretch.nbytes
        messages = (self._message(reader, ranks, placed) for ranks, placed in wanted.items())
        return [message for message in messages if message.nbytes]

    def _message(self, reader: int, ranks: Ranks, placed: Sequence[tuple[Stretch, int]]) -> Message:
        is_wanted = self._rank in ranks
        wanter = self._rank if is_wanted else ranks[0]
        nbytes = sum(
            runs.before(begin + length) - runs.before(begin)
            for (tensor, begin, length), _ in placed
            for runs in self.part(wanter, tensor)
        )
        ranges = [found for stretch, _ in placed for found in self._ranges(stretch)] if is_wanted else []
        pieces = self._packed(wanter, placed) if reader == self._rank else []
        return Message(reader, ranks, nbytes, joined(ranges), pieces)

    def _ranges(self, stretch: Stretch) -> Iterator[tuple[int, int]]:
        """Yields which ranges of what this rank wants are in a stretch, box by box."""
        start = self._starts.get(stretch.tensor, -1)
        for runs in self.part(self._rank, stretch.tensor):
            first, last = runs.before(stretch.begin), runs.before(stretch.begin + stretch.nbytes)
            if first < last:
                yield start + first, last - first
            start += runs.total

    def _packed(self, wanter: int, placed: Sequence[tuple[Stretch, int]]) -> list[Runs]:
        """Returns where in a chunk the bytes of a message are, in order."""
        pieces: list[Runs] = []
        for (tensor, begin, nbytes), place in placed:
            for runs in self.part(wanter, tensor):
                for piece in runs.cut(runs.before(begin), runs.before(begin + nbytes)):
                    moved = piece._replace(start=piece.start - begin + place)
                    last = pieces[-1] if pieces else None
                    if last is not None and not last.steps and not moved.steps and last.end == moved.start:
                        pieces[-1] = last._replace(length=last.length + moved.length)
                    else:
                        pieces.append(moved)
        return pieces

    def _pieces(self, reader: int, index: int) -> Iterator[tuple[Stretch, Collection[Ranks]]]:
        """Yields what a reader reads in a round, of lanes that this rank has to do with, and who wants it."""
        shares = self._plan.shares_of.get(reader, ()) if reader == self._rank else self._suppliers[reader]
        for share in self._plan.window(shares, index):
            space = self._spaces[share.lane]
            begin, end = self._floor(share.lane, share.begin), self._floor(share.lane, share.end)
            for at, first, last in space.cut(begin, end - begin):
                placed = space.extents[at]
                yield Stretch(placed.tensor, placed.begin + first, last - first), placed.groups

    def _floor(self, lane: int, position: int) -> int:
        """Returns the last place before a position where a lane may be cut."""
        space = self._spaces[lane]
        if position == space.nbytes:
            return position
        start = space.starts[space.at(position)]
        return position - (position - start) % self._plan.lanes.unit_bytes
