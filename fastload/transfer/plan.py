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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

import xxhash

from fastload.geometry.blocks import Blocks
from fastload.geometry.box import Runs
from fastload.geometry.extents import HasExtent, Space, Span, merged
from fastload.transfer.demand import Demand, Supply
from fastload.transfer.message import Message, Ranks, joined
from fastload.transfer.room import Room, choose_sizes, slot_bytes
from fastload.transfer.windows import Windows

__all__ = ["Chunk", "TransferPlan", "plan_transfer"]

_LEAST_CHUNK_BYTES = 256 << 10
_MAX_DEPTH = 4
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
    def groups(self) -> Collection[Ranks]:
        """The groups of ranks that want the same bytes."""
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
