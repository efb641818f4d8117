"""Plans of loads in which ranks request different bytes: rounds, readers and messages. Pure.

Each reader reads its shares of the sharing groups one after the other, one chunk in each round. The bytes of
a chunk that the same ranks request are a message, packed if they are strided. In a restore from memory not
every reader has all files; `Supply` says what each can read.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import xxhash

from fastload.errors import IncompleteCheckpoint
from fastload.geometry.box import Runs
from fastload.geometry.ranges import ByteRange, HasRange, Space, join_adjacent, merged
from fastload.transfer.demand import Part, Share, SharingGroups, TensorRange, deal
from fastload.transfer.messages import Message, Ranks, joined
from fastload.transfer.plan import (
    DEVICE_DEPTH,
    Chunk,
    good_chunk_bytes,
    num_own_chunks,
)
from fastload.transfer.round_bytes import RoundBytes


class SuppliedRange(NamedTuple):
    """A byte range of a file, in complete checksum blocks, that some ranks can deliver.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes.
        ranks: The ranks, ascending; at least one.
    """

    file: int
    offset: int
    nbytes: int
    ranks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte after the last one in the file."""
        return self.offset + self.nbytes


class Pool(NamedTuple):
    """The bytes of a sharing group that the same ranks can deliver.

    Attributes:
        group: Number of the group.
        ranks: The ranks, ascending; at least one.
        ranges: (begin, end) of the bytes in the group.
    """

    group: int
    ranks: tuple[int, ...]
    ranges: list[tuple[int, int]]


@dataclass(frozen=True)
class Supply:
    """Which ranks can deliver which bytes, from storage or from memory.

    Attributes:
        ranges: In the order of the bytes, without overlaps; no rank has bytes outside of them.
    """

    ranges: tuple[SuppliedRange, ...]

    @cached_property
    def _space(self) -> Space[SuppliedRange]:
        return Space(self.ranges)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have any bytes, ascending."""
        return tuple(sorted({rank for supplied in self.ranges for rank in supplied.ranks}))

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of all ranges."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.ranges).encode())

    def within(self, file: int, begin: int, end: int) -> Iterator[SuppliedRange]:
        """Yields the parts of a range of a file that any rank has, in order."""
        for index, first, last in self._space.overlapping(file, begin, end):
            supplied = self.ranges[index]
            yield supplied._replace(offset=supplied.offset + first, nbytes=last - first)

    def lacking(self, ranges: Iterable[HasRange]) -> int:
        """Returns how many bytes of these no rank has."""
        lacking = 0
        for wanted in ranges:
            supplied = self.within(wanted.file, wanted.offset, wanted.offset + wanted.nbytes)
            lacking += wanted.nbytes - sum(byte_range.nbytes for byte_range in supplied)
        return lacking

    def pools(
        self, sharing: SharingGroups, wanted: Sequence[Sequence[tuple[int, int]]], readers: Collection[int]
    ) -> list[Pool] | None:
        """Sorts the bytes of sharing groups by the ranks that can deliver them.

        Args:
            sharing: The groups.
            wanted: For each of them, (begin, end) of the ranges to read.
            readers: The suppliers that can read.

        Returns:
            Pools in the order of the groups; None if no rank can deliver some of the bytes.
        """
        spaces = sharing.spaces(range(len(wanted)))
        pools: list[Pool] = []
        for group, ranges in enumerate(wanted):
            of_group: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            left = sum(end - begin for begin, end in ranges)
            for begin, end in ranges:
                for index, first, last in spaces[group].cut(begin, end - begin):
                    placed, start = spaces[group].ranges[index], spaces[group].starts[index]
                    for supplied in self.within(placed.file, placed.offset + first, placed.offset + last):
                        ranks = tuple(rank for rank in supplied.ranks if rank in readers)
                        if not ranks:
                            return None
                        at = start + supplied.offset - placed.offset
                        left -= supplied.nbytes
                        of_group.setdefault(ranks, []).append((at, at + supplied.nbytes))
            if left:
                return None
            pools += (Pool(group, ranks, join_adjacent(of_group[ranks])) for ranks in sorted(of_group))
        return pools


@dataclass(frozen=True)
class RoutedPlan:
    """Which rank reads which bytes in which round, and which ranks receive them.

    Attributes:
        sharing: The requested bytes.
        readers: The ranks that read, ascending.
        shares: The bytes that each of them reads, in order.
        order: All ranks, those of a host next to each other.
        chunk_bytes: Length of a chunk in every round but a reader's last, before it is cut at units.
        depth: Rounds that may be in flight at once.
        buffer_bytes: Most bytes that a rank needs for a round.
        staging_bytes: Most bytes for all buffers of one rank together.
        supply: The bytes that each reader can deliver; None if each can deliver all.
        in_lockstep, reads_in_parts, grid, ahead, num_windows: See `Plan`.
    """

    sharing: SharingGroups
    readers: Ranks
    shares: tuple[Share, ...]
    order: tuple[int, ...]
    chunk_bytes: int
    depth: int
    buffer_bytes: int
    staging_bytes: int
    supply: Supply | None = None
    in_lockstep: ClassVar[bool] = False
    reads_in_parts: ClassVar[bool] = True
    grid: ClassVar[None] = None
    ahead: ClassVar[int] = 0
    num_windows: ClassVar[int] = 1

    @cached_property
    def total_bytes(self) -> int:
        """Bytes to read, by all readers together."""
        return sum(share.end - share.begin for share in self.shares)

    @cached_property
    def most_bytes(self) -> int:
        """The most bytes that one reader reads."""
        return max((share.start + share.end - share.begin for share in self.shares), default=0)

    @property
    def own_bytes(self) -> int:
        """The most bytes that a rank reads in a round, since a chunk ends with a unit."""
        return self.chunk_bytes + self.sharing.longest_unit_bytes

    @property
    def num_own(self) -> int:
        """Chunks of a reader for which there is memory, those of rounds in flight included."""
        return num_own_chunks(self.depth, self.staging_bytes - self.depth * self.buffer_bytes, self.own_bytes)

    @property
    def depth_on_device(self) -> int:
        """Rounds in flight with buffers on a device: each also has a chunk, in host memory."""
        return min(self.depth, self.staging_bytes // (self.buffer_bytes + self.own_bytes))

    def slots(self, index: int) -> None:
        """Chunks have no slots: they are cut into messages."""

    def shared_part(self, num_buffers: int, own_bytes: int) -> None:
        """Each rank has memory of its own, for what it requests."""

    def deeper(self, at_most: int) -> RoutedPlan:
        """Returns the plan with as many rounds in flight as fit, up to a number, if nothing is exchanged."""
        fitting = self.staging_bytes // self.buffer_bytes
        return self if self.exchanges else replace(self, depth=max(self.depth, min(fitting, at_most)))

    def rounds_of(self, rank: int, begin: int, end: int) -> range:
        """Returns the rounds from `begin` up to `end` in which a rank may have a chunk."""
        return range(begin, min(end, self.num_rounds))

    @property
    def num_reads(self) -> int:
        """Chunks that a reader has to have in flight, while as many others are exchanged."""
        return max(1, self.depth // 2)

    def view(self, rank: int) -> RoutedView:
        """Returns the plan as one rank sees it."""
        return RoutedView(self, rank)

    @cached_property
    def recipient_sets(self) -> Collection[Ranks]:
        """The sets of ranks that receive the same messages."""
        return dict.fromkeys(ranks for densities in self.sharing.densities for ranks in densities)

    def pairs(self, rank: int) -> Iterator[tuple[int, Ranks]]:
        """Yields (reader, recipients) of all messages that a rank may send or receive."""
        for group, of_group in self.readers_of.items():
            for ranks in self.sharing.densities[group]:
                for reader in sorted(of_group) if rank in ranks else sorted(of_group & {rank}):
                    yield reader, ranks

    @cached_property
    def readers_of(self) -> Mapping[int, set[int]]:
        """The readers of each sharing group."""
        by_group: dict[int, set[int]] = defaultdict(set)
        for share in self.shares:
            by_group[share.group].add(share.reader)
        return by_group

    @property
    def has_mere_readers(self) -> bool:
        """Whether some rank reads bytes that it does not receive."""
        return any(
            not of_group <= set(ranks)
            for group, of_group in self.readers_of.items()
            for ranks in self.sharing.densities[group]
        )

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return -(-self.most_bytes // self.chunk_bytes)

    @cached_property
    def exchanges(self) -> bool:
        """Whether any rank receives bytes that another one reads."""
        return any(self.sharing.requesters[share.group] != [share.reader] for share in self.shares)

    @cached_property
    def shares_of(self) -> Mapping[int, Sequence[Share]]:
        """The shares of each reader, in order."""
        by_reader: dict[int, list[Share]] = {reader: [] for reader in self.readers}
        for share in self.shares:
            by_reader[share.reader].append(share)
        return by_reader

    def shares_in(self, shares: Sequence[Share], index: int) -> Iterator[Share]:
        """Yields the parts of a reader's shares, or of some of them, that it reads in a round."""
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
        """Returns the bytes that a rank reads in a round, counted over all of its shares."""
        shares = self.shares_of.get(rank, ())
        end = shares[-1].start + shares[-1].end - shares[-1].begin if shares else 0
        start = min(index * self.chunk_bytes, end)
        return Chunk(start, min(end - start, self.chunk_bytes))

    def without(
        self, broken: Collection[int], lacking: Sequence[tuple[int, int]], num_posted: int
    ) -> RoutedPlan | None:
        """Returns the plan for the remaining bytes when readers drop out; see `Plan.without`."""
        readers = tuple(rank for rank in self.readers if rank not in broken)
        if not readers:
            return None
        left: list[list[tuple[int, int]]] = [[] for _ in self.sharing.nbytes]
        later = [(index, rank) for index in range(num_posted, self.num_rounds) for rank in self.readers]
        for index, rank in (*lacking, *later):
            for share in self.shares_in(self.shares_of[rank], index):
                left[share.group].append((share.begin, share.end))
        shares = _deal(self.sharing, [sorted(ranges) for ranges in left], readers, self.supply)
        if shares is None:
            return None
        # A rank that no longer reads receives more than before.
        need = RoundBytes(self.sharing, shares)
        chunk_bytes = need.fitting(self.chunk_bytes, self.staging_bytes)
        sizes = need.sizes(chunk_bytes, self.staging_bytes)
        return RoutedPlan(self.sharing, readers, tuple(shares), self.order, *sizes, self.supply)

    def digest(self, *, alone: bool = False) -> str:
        """xxh3-128 of the inputs of the plan, for comparison between ranks; see `Plan.digest`."""
        if alone:
            return "each rank its own"
        inputs = [self.sharing.requests.digest, self.sharing.block_bytes, self.readers, self.order]
        supply = self.supply.digest if self.supply is not None else ""
        text = json.dumps([*inputs, self.total_bytes, self.chunk_bytes, self.depth, supply])
        return xxhash.xxh3_128_hexdigest(text.encode())


def plan_routes(
    sharing: SharingGroups,
    readers: Ranks,
    *,
    order: Sequence[int],
    staging_bytes: int,
    chunk_bytes: int | None,
    supply: Supply | None = None,
    to_device: bool = False,
) -> RoutedPlan:
    """Deals the requested bytes to the ranks that can deliver them.

    Args:
        sharing: The requested bytes.
        readers: The ranks that can read, ascending; at least one.
        order: All ranks, those of a host next to each other.
        staging_bytes: Most bytes for all buffers of one rank together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.
        supply: The bytes that each reader can deliver; None if each can deliver all.
        to_device: Whether chunks are copied to a device; ignored if there is an exchange.

    Raises:
        OptionError: `chunk_bytes`, or a checksum block, does not fit into `staging_bytes`.
        IncompleteCheckpoint: No rank holds some of the bytes.
    """
    shares = _deal(sharing, [[(0, nbytes)] for nbytes in sharing.nbytes], readers, supply)
    if shares is None:
        raise IncompleteCheckpoint("no rank has some of the requested bytes of the checkpoint")
    need = RoundBytes(sharing, shares)
    is_given = chunk_bytes is not None
    if chunk_bytes is None:
        share_bytes = -(-sharing.total_bytes // len(readers))
        chunk_bytes = need.fitting(good_chunk_bytes(share_bytes), staging_bytes)
    sizes = need.sizes(chunk_bytes, staging_bytes, is_given=is_given)
    plan = RoutedPlan(sharing, readers, tuple(shares), tuple(order), *sizes, supply)
    return plan.deeper(DEVICE_DEPTH) if to_device else plan


def _deal(
    sharing: SharingGroups,
    wanted: Sequence[Sequence[tuple[int, int]]],
    readers: Ranks,
    supply: Supply | None,
) -> list[Share] | None:
    """Deals ranges of each group to readers that can deliver them; None if no reader can."""
    if supply is None:
        return deal(wanted, sharing.requesters, readers)
    pools = supply.pools(sharing, wanted, readers)
    if pools is None:
        return None
    shares = deal(
        [pool.ranges for pool in pools],
        [sharing.requesters[pool.group] for pool in pools],
        readers,
        suppliers=[pool.ranks for pool in pools],
    )
    return [replace(share, group=pools[share.group].group) for share in shares]


class RoutedView:
    """A `RoutedPlan` as one rank sees it.

    Args:
        plan: The plan.
        rank: The rank.

    Attributes:
        wanted_bytes: Bytes that the rank requests.
    """

    def __init__(self, plan: RoutedPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        wanted = {group for group, ranks in enumerate(plan.sharing.requesters) if rank in ranks}
        shares_here = plan.shares_of.get(rank, ())
        self._spaces = plan.sharing.spaces(sorted({*wanted, *(share.group for share in shares_here)}))
        self._suppliers = {
            reader: requested
            for reader, shares in plan.shares_of.items()
            if reader != rank and (requested := [share for share in shares if share.group in wanted])
        }
        self._parts: dict[int, dict[int, Part]] = {}
        self._starts: dict[int, int] = {}
        self.wanted_bytes = 0
        for tensor, part in plan.sharing.requests.of(rank):
            self._starts[tensor] = self.wanted_bytes
            self.wanted_bytes += sum(runs.total for runs in part)

    def part(self, rank: int, tensor: int) -> Part:
        """Returns the bytes that a rank requests of a tensor."""
        if rank not in self._parts:
            self._parts[rank] = dict(self._plan.sharing.requests.of(rank))
        return self._parts[rank].get(tensor, ())

    def readers(self, index: int) -> Collection[int]:
        """Returns the ranks that may read in a round."""
        return self._plan.readers

    def tensor_ranges(self, index: int) -> list[TensorRange]:
        """Returns the ranges of tensors that this rank reads in a round, in order."""
        return [piece for piece, _ in self._pieces(self._rank, index)]

    def reads(self, index: int) -> list[ByteRange]:
        """Returns the byte ranges of files that this rank reads in a round, in order."""
        tensors = self._plan.sharing.tensors
        return list(
            merged(
                ByteRange(tensors[tensor].file, tensors[tensor].offset + begin, nbytes)
                for tensor, begin, nbytes in self.tensor_ranges(index)
            )
        )

    def outgoing(self, index: int) -> list[Message]:
        """Returns the messages of this rank's chunk of a round."""
        return self._messages(self._rank, index)

    def incoming(self, index: int) -> list[Message]:
        """Returns the messages to this rank of other ranks' chunks of a round."""
        return [message for reader in self._suppliers for message in self._messages(reader, index)]

    def _messages(self, reader: int, index: int) -> list[Message]:
        """Returns the messages of a chunk that this rank sends or receives, in one order on all ranks."""
        wanted: dict[Ranks, list[tuple[TensorRange, int]]] = {}
        position = 0
        for piece, recipients in self._pieces(reader, index):
            for ranks in recipients:
                if reader == self._rank or self._rank in ranks:
                    wanted.setdefault(ranks, []).append((piece, position))
            position += piece.nbytes
        messages = (self._message(reader, ranks, placed) for ranks, placed in wanted.items())
        return [message for message in messages if message.nbytes]

    def _message(self, reader: int, ranks: Ranks, placed: Sequence[tuple[TensorRange, int]]) -> Message:
        is_recipient = self._rank in ranks
        recipient = self._rank if is_recipient else ranks[0]
        nbytes = sum(
            runs.before(begin + length) - runs.before(begin)
            for (tensor, begin, length), _ in placed
            for runs in self.part(recipient, tensor)
        )
        ranges = [bounds for piece, _ in placed for bounds in self._ranges(piece)] if is_recipient else []
        pieces = self._packed(recipient, placed) if reader == self._rank else []
        return Message(reader, ranks, nbytes, joined(ranges), pieces)

    def _ranges(self, piece: TensorRange) -> Iterator[tuple[int, int]]:
        """Yields (start, length) of this rank's requested bytes that lie in a tensor range, box by box."""
        start = self._starts.get(piece.tensor, -1)
        for runs in self.part(self._rank, piece.tensor):
            first, last = runs.before(piece.begin), runs.before(piece.begin + piece.nbytes)
            if first < last:
                yield start + first, last - first
            start += runs.total

    def _packed(self, recipient: int, placed: Sequence[tuple[TensorRange, int]]) -> list[Runs]:
        """Returns the positions in a chunk of the bytes of a message, in order."""
        pieces: list[Runs] = []
        for (tensor, begin, nbytes), place in placed:
            for runs in self.part(recipient, tensor):
                for piece in runs.cut(runs.before(begin), runs.before(begin + nbytes)):
                    moved = piece._replace(start=piece.start - begin + place)
                    last = pieces[-1] if pieces else None
                    if last is not None and not last.steps and not moved.steps and last.end == moved.start:
                        pieces[-1] = last._replace(length=last.length + moved.length)
                    else:
                        pieces.append(moved)
        return pieces

    def _pieces(self, reader: int, index: int) -> Iterator[tuple[TensorRange, Collection[Ranks]]]:
        """Yields the tensor ranges of a chunk, with their recipients; only groups that concern this rank."""
        shares = self._plan.shares_of.get(reader, ()) if reader == self._rank else self._suppliers[reader]
        for share in self._plan.shares_in(shares, index):
            space = self._spaces[share.group]
            begin, end = self._floor(share.group, share.begin), self._floor(share.group, share.end)
            for at, first, last in space.cut(begin, end - begin):
                placed = space.ranges[at]
                yield TensorRange(placed.tensor, placed.begin + first, last - first), placed.recipients

    def _floor(self, group: int, position: int) -> int:
        """Returns the last position up to this one at which a group may be cut."""
        space = self._spaces[group]
        if position == space.nbytes:
            return position
        start = space.starts[space.at(position)]
        return position - (position - start) % self._plan.sharing.unit_bytes
