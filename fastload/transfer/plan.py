"""Who reads what when. Pure: the same inputs give the same plan on every rank.

The wanted bytes, in file order, form one *wanted space* from 0 to `total_bytes`. It
is cut into rounds, and each round into chunks: in round k, reader i of R reads the
i-th chunk of that round. All chunks of a round have the same length (the very last ones may be
shorter), so shares differ by less than one chunk, whatever the tensors look like.

Where there is no room for a chunk of each reader, they take turns: a round has a chunk of each reader of
one window (see `windows`), and a *lap* of rounds has one of each reader. All of them read meanwhile.

Of storage that reads ahead, each reader gets one range of the wanted space instead, and reads one chunk
of it in each lap: what is read ahead is then what it asks for next, and not what others read.

Where checksum blocks are to be verified, each bound between two chunks is moved down to the nearest
bound between two blocks, so that whoever reads a block reads all of it. Chunks are then longer or
shorter by less than a block.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, log
from typing import ClassVar, NamedTuple

import xxhash

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import OptionError
from fastload.geometry.blocks import Blocks
from fastload.geometry.box import Runs
from fastload.geometry.extents import HasExtent, Space, Span, merged
from fastload.transfer.message import Message, Ranks, joined


@dataclass(frozen=True)
class Supply:
    """Who can deliver: readers of storage, or hosts that have a copy.

    Attributes:
        ranks: Those of whom each can deliver every byte, ascending; at least one.
    """

    ranks: tuple[int, ...]

    def without(self, broken: Collection[int]) -> Supply | None:
        """Returns what is left when some ranks drop out; None if that is nothing."""
        left = tuple(rank for rank in self.ranks if rank not in broken)
        return Supply(left) if left else None


@dataclass(frozen=True)
class Demand:
    """Who wants the bytes.

    Attributes:
        ranks: Those of whom each wants every byte, ascending: all ranks, one of each host, one alone; none if
            the bytes are read only to be looked at.
    """

    ranks: tuple[int, ...] = ()


_NEAR = 1.42  # powers of 2 are never further apart


class Seat(NamedTuple):
    """Where a reader is.

    Attributes:
        host: Which of the hosts of all readers.
        local: Which of the readers of that host.
    """

    host: int
    local: int


@dataclass(frozen=True)
class Windows:
    """Readers that take turns: each round has the chunks of one window of them.

    A window has readers from hosts at equal distances, as many of each `Seat.local`: so in every round all
    hosts, and the ranks of each of them, have as much to receive and to pass on. Windows that follow each
    other are of hosts far from each other.

    Attributes:
        order: All readers, window by window.
        num_turns: How many windows there are.
    """

    order: tuple[int, ...]
    num_turns: int

    @classmethod
    def of(
        cls, readers: Sequence[int], hosts: Sequence[str], num_turns: int, *, by_local: bool = False
    ) -> Windows:
        """Arranges readers in windows that differ by one reader at most.

        Args:
            readers: Ascending.
            hosts: Host of each rank; empty if each is on a host of its own.
            num_turns: How many windows, no more than readers.
            by_local: Whether the readers of a window are in the order of `Seat.local` first, and of hosts
                then, if all hosts have as many.
        """
        if num_turns == 1 and not by_local:
            return cls(tuple(readers), 1)
        seats = seats_of(readers, hosts)
        num_locals = 1 + max(seat.local for seat in seats)
        by_local = by_local and len(seats) == num_locals * (1 + max(seat.host for seat in seats))
        num_bits = (num_turns - 1).bit_length()

        def place(index: int) -> tuple[int, int, int]:
            host, local = seats[index]
            turn = (host + local * num_turns // num_locals) % num_turns
            within = (local, host) if by_local else (host, local)
            return int(f"{turn:0{num_bits}b}"[::-1], 2), *within

        return cls(tuple(readers[index] for index in sorted(range(len(readers)), key=place)), num_turns)

    @property
    def most_readers(self) -> int:
        """Readers in the largest window."""
        return -(-len(self.order) // self.num_turns)

    def first(self, turn: int) -> int:
        """Returns how many readers have their turn before this one."""
        return turn * len(self.order) // self.num_turns

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The readers of each window, in the order of their chunks."""
        turns = range(self.num_turns)
        return tuple(self.order[self.first(turn) : self.first(turn + 1)] for turn in turns)

    @cached_property
    def turn_of(self) -> dict[int, int]:
        """The window of each reader."""
        return {rank: turn for turn, readers in enumerate(self.readers) for rank in readers}

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Where each reader is in `order`."""
        return {rank: place for place, rank in enumerate(self.order)}


def seats_of(readers: Sequence[int], hosts: Sequence[str]) -> list[Seat]:
    """Returns where each reader is; arguments are those of `Windows.of`."""
    if not hosts:
        return [Seat(host, 0) for host in range(len(readers))]
    numbers: dict[str, int] = {}
    counts: Counter[str] = Counter()
    seats = []
    for rank in readers:
        host = hosts[rank]
        seats.append(Seat(numbers.setdefault(host, len(numbers)), counts[host]))
        counts[host] += 1
    return seats


def num_turns_for(num_hosts: int, good: float, at_least: int) -> int:
    """Returns how many windows to have: if possible so that their readers are on hosts at equal distances.

    Args:
        num_hosts: How many hosts there are.
        good: About so many.
        at_least: But no less than this.
    """
    near = range(max(at_least, ceil(good / _NEAR)), int(good * _NEAR) + 1)
    even = [turns for turns in near if num_hosts % turns == 0]
    return min(even, key=lambda turns: abs(log(turns / good)), default=max(at_least, ceil(good)))


_MAX_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 20  # below, the cost of a message shows
_LEAST_CHUNK_BYTES = 256 << 10  # rather readers without a chunk than less than this
_GOOD_NUM_READERS = 64  # in a round, if they take turns
_LEAST_NUM_READERS = 8
_GOOD_NUM_ROUNDS = 128  # what a pipeline of rounds cannot overlap is about one round
_GOOD_NUM_READS = 16  # with nothing to exchange: enough to keep several threads busy to the end
_MAX_DEPTH = 4
_MAX_NUM_OWN = 16  # chunks that a reader reads ahead of its turn, in 1/8 of staging at most
_OWN_PART = 8
# What all readers together read ahead of the rounds, if they take turns: as much as storage delivers while
# a request is under way (80 ms at 50 GB/s), but little of the load, which begins with it.
_MAX_AHEAD_BYTES = 4 << 30
_AHEAD_PART = 64
_LEAST_ROUND_BYTES = 16 << 20


@dataclass(frozen=True)
class Sizes:
    """The measures of a plan.

    Attributes:
        chunk_bytes: Length of a chunk.
        num_turns: Windows that the readers take turns in.
        depth: Rounds in flight.
        ahead: Rounds, from the first in flight, that readers read the chunks of; 0 if each chunk is read
            once its round is in flight.
    """

    chunk_bytes: int
    num_turns: int
    depth: int
    ahead: int


@dataclass(frozen=True)
class Room:
    """How much room a round takes.

    Attributes:
        num_slots: Chunks that it has: those of a window of readers, or one if nothing is exchanged.
        exchanges: Whether chunks go on to others.
        longest_block_bytes: Length of the longest checksum block; 0 without any.
        apart: Whether each slot has to have room for a block more, since they have to be equally long, or
            since chunks of a round do not follow each other.
        num_sharing: Ranks that have one buffer together.
    """

    num_slots: int
    exchanges: bool
    longest_block_bytes: int
    apart: bool
    num_sharing: int = 1

    def nbytes(self, chunk_bytes: int) -> int:
        """Returns the most that the slots of a round take together."""
        return self.num_slots * self.each_bytes(chunk_bytes) + self.once_bytes

    def part_bytes(self, chunk_bytes: int) -> int:
        """Returns what one rank gives of a buffer."""
        return -(-self.nbytes(chunk_bytes) // self.num_sharing)

    def own_bytes(self, chunk_bytes: int) -> int:
        """Returns the most that one chunk takes."""
        return slot_bytes(chunk_bytes + self.longest_block_bytes)

    def each_bytes(self, chunk_bytes: int) -> int:
        """Returns what to reckon for each slot."""
        if self.apart or not self.longest_block_bytes:
            return self.own_bytes(chunk_bytes)
        return slot_bytes(chunk_bytes + PAGE_BYTES)  # lengths that differ are rounded up one by one

    @property
    def once_bytes(self) -> int:
        """What moved bounds add to one chunk they take from the one before it: a block more in all."""
        return 0 if self.apart else round_up(self.longest_block_bytes, PAGE_BYTES)


def slot_bytes(chunk_bytes: int) -> int:
    """Returns how much of a buffer a chunk takes: whole pages."""
    return round_up(chunk_bytes, PAGE_BYTES)


def choose_sizes(
    total_bytes: int,
    num_readers: int,
    num_hosts: int,
    room: Room,
    staging_bytes: int,
    chunk_bytes: int | None,
) -> Sizes:
    """Chooses the measures of a plan.

    Each round has a chunk of every reader, if that leaves chunks of useful size. Else they take turns.

    Args:
        total_bytes: Bytes to be read.
        num_readers: Who reads them.
        num_hosts: On how many hosts they are.
        room: Of a round with all readers.
        staging_bytes: Most bytes for all buffers of one rank, and what it reads ahead, together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.

    Raises:
        OptionError: Not even one chunk fits.
    """
    share_bytes = -(-total_bytes // num_readers)
    # What a round may have.
    spare = staging_bytes * room.num_sharing // _MAX_DEPTH - room.once_bytes
    together = chunk_bytes or _good_chunk_bytes(share_bytes, room, spare)
    together = _round_to_blocks(max(1, min(together, share_bytes)), room)
    depth = min(_MAX_DEPTH, staging_bytes // room.part_bytes(together))
    useful = _round_to_blocks(max(1, min(share_bytes, _least_useful(spare))), room)
    if room.num_slots == 1 or (chunk_bytes and depth > 1) or (depth == _MAX_DEPTH and together >= useful):
        _require_fit(depth, together, room, staging_bytes)
        return Sizes(together, 1, depth, 0)
    return _in_turns(total_bytes, num_readers, num_hosts, room, staging_bytes, chunk_bytes)


def _in_turns(
    total_bytes: int,
    num_readers: int,
    num_hosts: int,
    room: Room,
    staging_bytes: int,
    chunk_bytes: int | None,
) -> Sizes:
    """Chooses the measures where readers take turns."""
    own_bytes = staging_bytes // _OWN_PART
    spare = (staging_bytes - own_bytes) * room.num_sharing // _MAX_DEPTH - room.once_bytes
    spare = min(spare, max(total_bytes // _AHEAD_PART, _LEAST_ROUND_BYTES))
    share_bytes = -(-total_bytes // num_readers)
    if chunk_bytes is None:
        good_bytes = _round_to_blocks(_good_turn_bytes(share_bytes, spare), room)
        num_turns = min(num_readers, num_turns_for(num_hosts, num_readers * good_bytes / spare, 2))
        chunk_bytes = _even_chunk_bytes(share_bytes, min(good_bytes, spare // -(-num_readers // num_turns)))
    chunk_bytes = _round_to_blocks(max(1, min(chunk_bytes, max(share_bytes, _LEAST_CHUNK_BYTES))), room)
    fitting = max(1, spare // room.each_bytes(chunk_bytes))
    at_least = -(-num_readers // fitting)
    num_turns = min(num_readers, num_turns_for(num_hosts, at_least, at_least))
    room = replace(room, num_slots=-(-num_readers // num_turns))
    round_bytes = chunk_bytes * room.num_slots
    most_own = min(max(1, own_bytes // room.own_bytes(chunk_bytes)), _MAX_NUM_OWN)
    ahead = min(total_bytes // _AHEAD_PART, _MAX_AHEAD_BYTES) // round_bytes
    ahead = min(max(ahead, _MAX_DEPTH), most_own * num_turns)
    own_bytes = -(-ahead // num_turns) * room.own_bytes(chunk_bytes)
    depth = min(_MAX_DEPTH, (staging_bytes - own_bytes) // room.part_bytes(chunk_bytes))
    _require_fit(depth, chunk_bytes, room, staging_bytes)
    return Sizes(chunk_bytes, num_turns, min(depth, ahead), ahead)


def _round_to_blocks(chunk_bytes: int, room: Room) -> int:
    """Makes it whole blocks, else the readers at some places would always get the larger part."""
    longest = room.longest_block_bytes
    return max(1, chunk_bytes // longest) * longest if longest else chunk_bytes


def _good_chunk_bytes(share_bytes: int, room: Room, spare: int) -> int:
    """Chooses chunks short enough for many rounds, long enough for storage, and within staging."""
    num_rounds = _GOOD_NUM_ROUNDS if room.exchanges else _GOOD_NUM_READS
    for_overlap = round_up(-(-share_bytes // num_rounds), PAGE_BYTES)
    besides = room.nbytes(PAGE_BYTES) - room.once_bytes - room.num_slots * PAGE_BYTES
    for_staging = (spare - besides) // room.num_slots // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(max(for_overlap, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES, for_staging))


def _least_useful(spare: int) -> int:
    """Returns below which length chunks are too short, given what a round may have."""
    return min(max(spare // _LEAST_NUM_READERS // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES), _MIN_CHUNK_BYTES)


def _good_turn_bytes(share_bytes: int, spare: int) -> int:
    """Chooses about how long chunks are to be, so that there are many in a round."""
    for_many = spare // _GOOD_NUM_READERS // PAGE_BYTES * PAGE_BYTES
    for_overlap = round_up(-(-share_bytes // _GOOD_NUM_ROUNDS), PAGE_BYTES)
    return max(_least_useful(spare), min(for_overlap, for_many, _MAX_CHUNK_BYTES))


def _even_chunk_bytes(share_bytes: int, at_most: int) -> int:
    """Chooses chunks up to a length of which all readers have as many, but no tiny ones."""
    at_most = max(PAGE_BYTES, at_most // PAGE_BYTES * PAGE_BYTES)
    if share_bytes <= at_most:
        return max(share_bytes, min(_LEAST_CHUNK_BYTES, at_most))
    return round_up(-(-share_bytes // -(-share_bytes // at_most)), PAGE_BYTES)


def _require_fit(depth: int, chunk_bytes: int, room: Room, staging_bytes: int) -> None:
    if depth < (
        2 if room.num_sharing > 1 else 1
    ):  # shared memory takes one buffer more than rounds in flight
        longest = room.longest_block_bytes
        why = f" (checksum blocks have {longest}: verify=False reads without)" if longest else ""
        raise OptionError(
            f"chunk_bytes={chunk_bytes}: what one round takes does not fit into "
            f"staging_bytes={staging_bytes}{why}"
        )


_FEW_READERS = 8
_MOST_AHEAD = 64


class Chunk(NamedTuple):
    """A contiguous range of what a plan reads, read by one rank in one round."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class TransferPlan:
    """Which rank reads which bytes in which round.

    Attributes:
        extents: What is to be read, as maximal spans, in order: the wanted space, or what is left of it.
        supply: The ranks that read.
        demand: The ranks that end up with the bytes.
        chunk_bytes: Length of a chunk in every lap but the last, before bounds are moved to blocks.
        depth: Rounds that may be in flight at once.
        blocks: The checksum blocks of the wanted space, which no chunk may cut; None if there are none to
            verify.
        even_slots: Whether the slots of a round have to be equally long.
        contiguous: Whether what a reader reads in all rounds is one range.
        num_turns: Rounds in a lap: windows that the readers take turns in.
        ahead: Rounds, from the first in flight, that readers read the chunks of; 0 if each chunk is read
            once its round is in flight.
        hosts: Host of each rank; empty if each is on a host of its own.
        num_sharing: Ranks that have their buffers together.
        in_lockstep: Whether all ranks learn in the same round of a chunk that could not be read.
    """

    extents: tuple[Span, ...]
    supply: Supply
    demand: Demand
    chunk_bytes: int
    depth: int
    blocks: Blocks | None = None
    even_slots: bool = False
    contiguous: bool = False
    num_turns: int = 1
    ahead: int = 0
    hosts: tuple[str, ...] = ()
    num_sharing: int = 1
    in_lockstep: ClassVar[bool] = True

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that read, ascending."""
        return self.supply.ranks

    @cached_property
    def windows(self) -> Windows:
        """The readers of each round of a lap."""
        return Windows.of(self.readers, self.hosts, self.num_turns, by_local=self.even_slots)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(sorted({*self.supply.ranks, *self.demand.ranks}))

    @property
    def exchanges(self) -> bool:
        """Whether anything has to get from the rank that reads it to another one."""
        return _exchanges(self.supply, self.demand)

    @cached_property
    def _space(self) -> Space[Span]:
        return Space(self.extents)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes to be read, by all readers together."""
        return self._space.nbytes

    @cached_property
    def num_rounds(self) -> int:
        """How many rounds it takes."""
        num_laps, left = divmod(self.total_bytes, self.chunk_bytes * len(self.readers))
        if not left:
            return num_laps * self.num_turns
        if self.contiguous:
            return (num_laps + 1) * self.num_turns
        num_chunks = -(-left // self._chunk_bytes_of_lap(num_laps))
        begun = (turn for turn in range(self.num_turns) if self.windows.first(turn) < num_chunks)
        return num_laps * self.num_turns + sum(1 for _ in begun)

    @property
    def num_reads(self) -> int:
        """How many chunks a reader has to have in flight, if there is an exchange.

        Half of the buffers: while those are read the others are exchanged. Or all that it reads ahead.
        """
        return max(1, -(-self.ahead // self.num_turns) if self.ahead else self.depth // 2)

    def readers_in(self, round_index: int) -> tuple[int, ...]:
        """Returns the ranks that have a chunk in a round."""
        return self.windows.readers[round_index % self.num_turns]

    def rounds_of(self, rank: int, begin: int, end: int) -> range:
        """Returns in which rounds, of those from `begin` up to `end`, a rank has a chunk."""
        turn = self.windows.turn_of.get(rank)
        if turn is None:
            return range(0)
        return range(begin + (turn - begin) % self.num_turns, min(end, self.num_rounds), self.num_turns)

    def chunk_bytes_of(self, round_index: int) -> int:
        """Returns the length of the longest chunk of a round, before bounds are moved to those of blocks."""
        return self._chunk_bytes_of_lap(round_index // self.num_turns)

    def _chunk_bytes_of_lap(self, lap: int) -> int:
        left = self.total_bytes - lap * self.chunk_bytes * len(self.readers)
        return min(self.chunk_bytes, max(-(-left // len(self.readers)), self._longest_block_bytes))

    def chunk(self, round_index: int, rank: int) -> Chunk:
        """Returns what a rank reads in a round; empty for a rank that has no turn then."""
        lap, turn = divmod(round_index, self.num_turns)
        if self.windows.turn_of.get(rank) != turn:
            return Chunk(self.total_bytes, 0)
        place = self.windows.place_of[rank]
        after = (lap + 1, place) if self.contiguous else (lap, place + 1)
        start, end = self._bound(lap, place), self._bound(*after)
        return Chunk(start, end - start)

    def chunks(self, round_index: int) -> dict[int, Chunk]:
        """Returns what each reader that has its turn in a round reads."""
        readers = self.readers_in(round_index)
        if self.contiguous:
            return {rank: self.chunk(round_index, rank) for rank in readers}
        lap, turn = divmod(round_index, self.num_turns)
        chunk_bytes = self._chunk_bytes_of_lap(lap)
        begin = lap * self.chunk_bytes * len(self.readers) + self.windows.first(turn) * chunk_bytes
        bounds = [self._floor(begin + place * chunk_bytes) for place in range(len(readers) + 1)]
        return {rank: Chunk(a, b - a) for rank, (a, b) in zip(readers, pairwise(bounds), strict=True)}

    @cached_property
    def _share_bytes(self) -> int:
        """What each reader reads in all, before bounds are moved to blocks; the last one may read less."""
        return -(-self.total_bytes // len(self.readers))

    def _bound(self, lap: int, place: int) -> int:
        """Returns where the chunk of the reader at a place begins among all that is to be read."""
        if self.contiguous:
            begin = place * self._share_bytes + min(lap * self.chunk_bytes, self._share_bytes)
        else:
            begin = lap * self.chunk_bytes * len(self.readers)
            begin += place * self._chunk_bytes_of_lap(lap)
        return self._floor(begin)

    def _floor(self, position: int) -> int:
        """Returns the bound between chunks next to a position, within what is to be read."""
        if position >= self.total_bytes:
            return self.total_bytes
        if self.blocks is None:
            return position
        index = self._space.at(position)
        wanted = self.extents[index].start + position - self._space.starts[index]
        return position - wanted + self.blocks.floor(wanted)  # an extent begins with a block

    def slot_sizes(self, round_index: int, chunks: Mapping[int, Chunk]) -> dict[int, int]:
        """Returns how much of a buffer the chunk of each reader takes in a round: whole pages.

        Args:
            round_index: Which round.
            chunks: Those of it.
        """
        if self.blocks is None:
            return dict.fromkeys(chunks, slot_bytes(self.chunk_bytes_of(round_index)))
        if self.even_slots:
            return dict.fromkeys(chunks, slot_bytes(max(chunk.nbytes for chunk in chunks.values())))
        return {rank: slot_bytes(chunk.nbytes) for rank, chunk in chunks.items()}

    def largest_chunk_bytes(self, rank: int) -> int:
        """Returns how much of a buffer a rank's chunk takes at most."""
        is_reader = rank in self.windows.turn_of
        return slot_bytes(self.chunk_bytes + self._longest_block_bytes) if is_reader else 0

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer that holds a whole round; the ranks that share it have it once."""
        return self._room.nbytes(self.chunk_bytes)

    @property
    def staged_bytes(self) -> int:
        """The most that one rank needs for its part of all buffers, and for what it reads ahead."""
        own = -(-self.ahead // self.num_turns) * slot_bytes(self.chunk_bytes + self._longest_block_bytes)
        return self.depth * self._room.part_bytes(self.chunk_bytes) + own

    @property
    def _room(self) -> Room:
        apart = self.even_slots or self.contiguous
        num_slots = self.windows.most_readers if self.exchanges else 1
        return Room(num_slots, self.exchanges, self._longest_block_bytes, apart, self.num_sharing)

    @cached_property
    def _longest_block_bytes(self) -> int:
        return _longest_bytes(self.blocks)

    def spans(self, chunk: Chunk) -> list[Span]:
        """Returns the spans that make up a chunk, in order."""
        spans = []
        for index, begin, end in self._space.cut(chunk.start, chunk.nbytes):
            extent = self.extents[index]
            spans.append(Span(extent.file, extent.offset + begin, end - begin, extent.start + begin))
        return spans

    def without(
        self, broken: Collection[int], lacking: Sequence[tuple[int, int]], num_posted: int
    ) -> TransferPlan | None:
        """Returns the plan of what is left to do when some readers drop out.

        Args:
            broken: The readers that drop out.
            lacking: (round, rank) of the chunks that are missing in rounds that are over.
            num_posted: Rounds that are over; those after them have not begun, and are dealt anew.

        Returns:
            A plan that needs no larger buffers than this one, or None if no reader is left.
        """
        supply = self.supply.without(broken)
        if supply is None:
            return None
        left = [self.chunk(index, rank) for index, rank in lacking]
        left += self._from_round(num_posted)
        extents = tuple(span for chunk in sorted(left) for span in self.spans(chunk))
        num_turns = -(-len(supply.ranks) // self.windows.most_readers)
        num_own = -(-self.ahead // self.num_turns)  # chunks that there is room for
        ahead = min(self.ahead, num_own * num_turns)
        return replace(self, extents=extents, supply=supply, num_turns=num_turns, ahead=ahead)

    def _from_round(self, round_index: int) -> list[Chunk]:
        """Returns all that is read from a round on."""
        lap, turn = divmod(round_index, self.num_turns)
        first = self.windows.first(turn)
        if not self.contiguous:
            begin = self._bound(lap, first)
            return [Chunk(begin, self.total_bytes - begin)]
        bounds = [
            (self._bound(lap + (place < first), place), self._bound(self.num_rounds, place))
            for place in range(len(self.readers))
        ]
        return [Chunk(begin, end - begin) for begin, end in bounds]

    def deeper(self, staging_bytes: int) -> TransferPlan:
        """Returns the same plan with as many reads ahead as fit, and are of use, if nothing is exchanged.

        Args:
            staging_bytes: Most bytes for all buffers.
        """
        fitting = staging_bytes // self._room.part_bytes(self.chunk_bytes)
        return self if self.exchanges else replace(self, depth=max(self.depth, min(fitting, _MOST_AHEAD)))

    def depth_within(self, round_bytes: int) -> int:
        """Returns how many rounds may be in flight that take so many bytes of a rank: sizes allow for it."""
        return self.depth

    def lap(self, round_index: int) -> int:
        """Returns which lap a round is in."""
        return round_index // self.num_turns

    def view(self, rank: int) -> TransferView:
        """Returns the plan as one rank sees it."""
        return TransferView(self, rank)

    @property
    def recipients(self) -> Collection[Ranks]:
        """The sets of ranks that receive the same messages."""
        return [self.demand.ranks]

    def pairs(self, rank: int) -> Iterator[tuple[int, Ranks]]:
        """Yields (reader, group) of all messages that a rank has to do with."""
        for reader in self.readers:
            if rank == reader or rank in self.demand.ranks:
                yield reader, self.demand.ranks

    def digest(self) -> str:
        """xxh3-128 of the plan, for comparison between ranks."""
        # Who is who matters to the others only if anything gets from one to another.
        ranks = [self.readers, self.demand.ranks] if self.exchanges else []
        blocks = _digest(self.blocks) if self.blocks is not None else None
        shape = self.even_slots, self.contiguous, self.num_sharing, self.ahead
        order = self.windows.order if self.windows.order != self.readers else ()
        text = json.dumps([self.extents, ranks, self.chunk_bytes, self.depth, blocks, *shape, order])
        return xxhash.xxh3_128_hexdigest(text.encode())


class TransferView:
    """A plan as one rank sees it: each chunk is one message to all that want the bytes.

    Args:
        plan: The plan.
        rank: The rank.

    Attributes:
        wanted_bytes: Bytes that the plan is about.
    """

    def __init__(self, plan: TransferPlan, rank: int) -> None:
        self.wanted_bytes = plan.total_bytes
        self._plan = plan
        self._rank = rank
        self._is_wanted = rank in plan.demand.ranks

    def readers(self, index: int) -> Collection[int]:
        """Returns who may read a chunk in a round."""
        return self._plan.readers_in(index)

    def reads(self, index: int) -> list[Span]:
        """Returns what the rank reads in a round."""
        return self._plan.spans(self._plan.chunk(index, self._rank))

    def outgoing(self, index: int) -> list[Message]:
        """Returns the message of what the rank reads in a round, if it reads anything."""
        return self._messages({self._rank: self._plan.chunk(index, self._rank)})

    def incoming(self, index: int) -> list[Message]:
        """Returns the messages for the rank of what others read in a round."""
        chunks = self._plan.chunks(index) if self._is_wanted else {}
        return self._messages({reader: chunk for reader, chunk in chunks.items() if reader != self._rank})

    def _messages(self, chunks: Mapping[int, Chunk]) -> list[Message]:
        ranks, messages = self._plan.demand.ranks, []
        for reader, chunk in chunks.items() if ranks else ():
            if chunk.nbytes:
                spans = self._plan.spans(chunk) if self._is_wanted else []
                pieces = [Runs(0, chunk.nbytes, ())] if reader == self._rank else []
                ranges = joined([(span.start, span.nbytes) for span in spans])
                messages.append(Message(reader, ranks, chunk.nbytes, ranges, pieces))
        return messages


def plan_transfer(
    wanted: Sequence[HasExtent],
    supply: Supply,
    demand: Demand,
    *,
    staging_bytes: int,
    chunk_bytes: int | None,
    block_bytes: int = 0,
    even_slots: bool = False,
    contiguous: bool = False,
    hosts: Sequence[str] = (),
    num_sharing: int = 1,
) -> TransferPlan:
    """Deals the wanted bytes to the ranks that can deliver them.

    No chunk is shorter than a checksum block, but for the last ones.

    Args:
        wanted: Tensors, or other ranges of files, in file order.
        supply: Who can read.
        demand: Who wants what is read.
        staging_bytes: Most bytes for one rank's part of all buffers, and what it reads ahead, together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.
        block_bytes: Length of the checksum blocks that are to be verified; 0 if there are none.
        even_slots: See `TransferPlan`.
        contiguous: Whether each reader is to read one range, if staging is large enough: bounds that are
            moved to blocks then lengthen all chunks of a round, not one of them.
        hosts: Host of each rank; empty if each is on a host of its own.
        num_sharing: How many ranks have their buffers together, at least; each has as large a part.

    Raises:
        OptionError: `chunk_bytes`, or a checksum block, does not fit into `staging_bytes`.
    """
    blocks = _blocks(wanted, block_bytes)
    longest = _longest_bytes(blocks)
    extents = merged(wanted)
    total_bytes = sum(extent.nbytes for extent in extents)
    num_readers, exchanges = len(supply.ranks), _exchanges(supply, demand)
    few = Room(min(num_readers, _FEW_READERS) if exchanges else 1, exchanges, longest, True, num_sharing)
    least_bytes = max(min(chunk_bytes or _LEAST_CHUNK_BYTES, -(-total_bytes // num_readers)), longest)
    contiguous = contiguous and _MAX_DEPTH * few.part_bytes(least_bytes) <= staging_bytes
    room = replace(few, num_slots=num_readers if exchanges else 1, apart=even_slots or contiguous)
    num_hosts = len({hosts[rank] for rank in supply.ranks}) if hosts else num_readers
    sizes = choose_sizes(total_bytes, num_readers, num_hosts, room, staging_bytes, chunk_bytes)
    return TransferPlan(
        extents,
        supply,
        demand,
        sizes.chunk_bytes,
        sizes.depth,
        blocks,
        even_slots,
        contiguous,
        sizes.num_turns,
        sizes.ahead,
        tuple(hosts),
        num_sharing,
    )


def _exchanges(supply: Supply, demand: Demand) -> bool:
    return (bool(demand.ranks) and supply.ranks != demand.ranks) or len(demand.ranks) > 1


def _blocks(wanted: Sequence[HasExtent], block_bytes: int) -> Blocks | None:
    filled = [extent for extent in wanted if extent.nbytes] if block_bytes else []
    return Blocks(Space(filled), block_bytes) if filled else None


def _longest_bytes(blocks: Blocks | None) -> int:
    return blocks.longest_bytes if blocks is not None else 0


def _digest(blocks: Blocks) -> str:
    """xxh3-128 of where blocks begin."""
    starts = array("Q", blocks.space.starts).tobytes()
    return f"{blocks.block_bytes}/{xxhash.xxh3_128_hexdigest(starts)}"
