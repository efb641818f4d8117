"""The messages of a save: which bytes each rank contributes to which part of which writer. Pure.

A writer copies the shards that it holds. The holders of other shards send them in turn. With sharded rows
most messages would be short, since they are blocks across the boundary of two ranks' rows. So one message has
all bytes that a writer needs from a rank for several parts, a *batch*. Both ends build a message from the
same ranges in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from fastload.formats.manifest import TensorEntry
from fastload.geometry.box import Runs
from fastload.geometry.ranges import ByteRange
from fastload.saving.layout import Layout
from fastload.saving.shard_map import Intervals, MappedShard, ShardMap, TensorShards
from fastload.saving.split import WriterShare


class ShardRange(NamedTuple):
    """A byte range of a shard.

    Attributes:
        tensor: Number of the tensor in `Layout.space`.
        shard: The shard.
        begin: First byte in the shard.
        end: The byte after the last one.
    """

    tensor: int
    shard: MappedShard
    begin: int
    end: int


@dataclass(frozen=True)
class ShardMessage:
    """The bytes that one rank contributes to a writer's part, or to a batch of parts.

    Attributes:
        sender: The rank that holds them.
        writer: The rank that writes them.
        number: Number of the writer's part, or batch.
        ranges: The bytes, in order.
    """

    sender: int
    writer: int
    number: int
    ranges: tuple[ShardRange, ...]

    @cached_property
    def nbytes(self) -> int:
        """Length in bytes."""
        return sum(end - begin for _, _, begin, end in self.ranges)

    @property
    def is_local(self) -> bool:
        """Whether the writer holds the bytes itself."""
        return self.sender == self.writer


@dataclass(frozen=True)
class MessagePlan:
    """The messages of one rank.

    Attributes:
        parts: The messages that fill each of its parts but for headers; its own one, if any, first.
        batches: Its parts in batches.
        outgoing: Messages to other writers, one for each of their batches, in the order of sending.
    """

    parts: Sequence[Sequence[ShardMessage]]
    batches: Sequence[range]
    outgoing: Sequence[ShardMessage]

    def incoming(self, batch: int) -> list[ShardMessage]:
        """Returns the messages of other ranks for a batch, equal to those in their `outgoing`."""
        by_sender: dict[int, list[ShardMessage]] = {}
        for part in self.batches[batch]:
            for message in self.parts[part]:
                if not message.is_local:
                    by_sender.setdefault(message.sender, []).append(message)
        return [_joined(messages, batch) for messages in by_sender.values()]

    @property
    def partners(self) -> set[int]:
        """The ranks that it receives from or sends to."""
        senders = {message.sender for of_part in self.parts for message in of_part if not message.is_local}
        return senders | {message.writer for message in self.outgoing}

    @property
    def contributed(self) -> list[ShardMessage]:
        """All messages that the rank contributes, to its own parts and to other writers."""
        return [*self.local, *self.outgoing]

    @property
    def local(self) -> list[ShardMessage]:
        """The messages that the rank contributes to its own parts."""
        return [message for of_part in self.parts for message in of_part if message.is_local]


def plan_messages(
    layout: Layout,
    shard_map: ShardMap,
    shares: Sequence[Mapping[int, WriterShare]],
    rank: int,
    groups: Sequence[Sequence[int]],
    batch_bytes: int,
) -> MessagePlan:
    """Returns the messages of a rank.

    Args:
        layout: The files.
        shard_map: Which ranks hold which of their bytes.
        shares: For each group, the shares of its writers. Writers that need nothing from this rank may be
            left out.
        rank: The rank.
        groups: The ranks of each group. A shard comes from a rank of the same group, if one holds it.
        batch_bytes: Most bytes of a batch of several parts.
    """
    own_parts: list[list[ShardMessage]] = []
    batches: list[range] = []
    outgoing: list[ShardMessage] = []
    for of_group, members in zip(shares, map(frozenset, groups), strict=True):
        if rank in of_group:
            share = of_group[rank]
            own_parts = [
                _messages_for(layout, shard_map, share, rank, index, members)
                for index in range(len(share.parts))
            ]
            batches = _batches(share, batch_bytes)
        others = {writer: of_writer for writer, of_writer in of_group.items() if writer != rank}
        if others:
            outgoing += _outgoing(layout, shard_map, others, rank, members, batch_bytes)
    num_ranks = 1 + max(rank, *(message.writer for message in outgoing)) if outgoing else 1
    # Ranks begin with different writers.
    outgoing.sort(key=lambda message: (message.number, (message.writer - rank) % num_ranks))
    return MessagePlan(own_parts, batches, outgoing)


def receiving_writers(
    layout: Layout, shard_map: ShardMap, ranges: Mapping[int, Sequence[ByteRange]], rank: int
) -> set[int]:
    """Returns the writers of a copy to which a rank may send bytes, and the rank itself if it writes.

    They write bytes of its shards, or hash the block in which one of these begins. In a large job these are
    few of all.

    Args:
        layout: The files.
        shard_map: Which ranks hold which of their bytes.
        ranges: The ranges of each writer.
        rank: The rank.
    """
    written = Intervals(
        ((byte_range.file, byte_range.offset), (byte_range.file, byte_range.end), writer)
        for writer, of_writer in ranges.items()
        for byte_range in of_writer
    )
    receiving = {rank} & ranges.keys()
    for _, entry, shard in _own_shards(layout, shard_map, rank):
        begin, end = entry.offset + shard.runs.start, entry.offset + shard.runs.end
        receiving.update(written.overlapping((entry.file, begin), (entry.file, end)))
        if (block := layout.blocks.at(entry.file, begin)) is not None:
            receiving.update(written.overlapping((entry.file, block.offset), (entry.file, block.offset + 1)))
    return receiving


def _own_shards(
    layout: Layout, shard_map: ShardMap, rank: int
) -> Iterator[tuple[int, TensorEntry, MappedShard]]:
    """Yields the shards that a rank holds, each with its tensor and the number of that."""
    held: dict[TensorShards, list[MappedShard]] = {}
    for number, (entry, kind) in enumerate(zip(layout.space.ranges, shard_map.tensors, strict=True)):
        if kind not in held:
            held[kind] = [shard for shard in kind.shards if rank in shard.holders]
        for shard in held[kind]:
            yield number, entry, shard


def positions_in(layout: Layout, part: ByteRange, message: ShardMessage) -> list[Runs]:
    """Returns the positions in a part of the bytes of a message, in the order of the message."""
    positions: list[Runs] = []
    first, last = 0, 0  # of a contiguous run, as most are
    for number, shard, begin, end in message.ranges:
        offset = layout.space.ranges[number].offset - part.offset
        for start, length, steps in shard.runs.cut(begin, end):
            if not steps and start + offset == last:
                last += length
                continue
            if first < last:
                positions.append(Runs(first, last - first, ()))
            first = last = start + offset
            if steps:
                positions.append(Runs(first, length, steps))
            else:
                last += length
    return [*positions, Runs(first, last - first, ())] if first < last else positions


def _messages_for(
    layout: Layout,
    shard_map: ShardMap,
    share: WriterShare,
    writer: int,
    index: int,
    members: Collection[int],
) -> list[ShardMessage]:
    """Returns the messages that fill a part."""
    part, origin = share.parts[index], share.origins[index]
    by_sender: dict[int, list[ShardRange]] = {writer: []}
    for number, first, last in layout.space.overlapping(part.file, part.offset, part.end):
        for shard, begin, end in shard_map.tensor(number).within(first, last):
            sender = _sender(shard.holders, origin, members)
            by_sender.setdefault(sender, []).append(ShardRange(number, shard, begin, end))
    return [ShardMessage(sender, writer, index, tuple(of)) for sender, of in by_sender.items() if of]


def _outgoing(
    layout: Layout,
    shard_map: ShardMap,
    shares: Mapping[int, WriterShare],
    rank: int,
    members: Collection[int],
    batch_bytes: int,
) -> list[ShardMessage]:
    """Returns the messages from a rank to other writers of a group."""
    find = _found_tails if shard_map.is_replicated else _found_parts
    of_writer: dict[int, list[ShardMessage]] = {}
    for (writer, index), of in sorted(find(layout, shard_map, shares, rank, members).items()):
        of_writer.setdefault(writer, []).append(ShardMessage(rank, writer, index, tuple(of)))
    return [
        message
        for writer, messages in of_writer.items()
        for message in _batched(messages, _batches(shares[writer], batch_bytes))
    ]


_FoundRanges = dict[tuple[int, int], list[ShardRange]]
"""Writer and number of its part → the bytes for it from one rank."""


def _found_tails(
    layout: Layout,
    shard_map: ShardMap,
    shares: Mapping[int, WriterShare],
    rank: int,
    members: Collection[int],
) -> _FoundRanges:
    """Finds the bytes that writers need from a rank although they hold all: those that they only hash."""
    return {
        (writer, index): list(message.ranges)
        for writer, share in shares.items()
        for index in sorted(share.tails)
        for message in _messages_for(layout, shard_map, share, writer, index, members)
        if message.sender == rank
    }


def _found_parts(
    layout: Layout,
    shard_map: ShardMap,
    shares: Mapping[int, WriterShare],
    rank: int,
    members: Collection[int],
) -> _FoundRanges:
    """Finds the bytes that writers need from a rank."""
    known = Intervals(
        ((run.file, run.begin), (run.file, run.end), (writer, run))
        for writer, share in shares.items()
        for run in share.runs
    )
    by_place: dict[tuple[int, int], list[ShardRange]] = {}
    for number, entry, shard in _own_shards(layout, shard_map, rank):
        first = entry.file, entry.offset + shard.runs.start
        last = entry.file, entry.offset + shard.runs.end
        for writer, run in known.overlapping(first, last):
            if run.writer != rank and run.writer in shard.holders:
                continue  # it contributes the bytes itself
            for index in run.within(first[1], last[1]):
                if _sender(shard.holders, run.origin(index), members) != rank:
                    continue
                part = run.part(index)
                begin = shard.runs.before(part.offset - entry.offset)
                end = shard.runs.before(part.end - entry.offset)
                if begin < end:
                    place = writer, run.first + index
                    by_place.setdefault(place, []).append(ShardRange(number, shard, begin, end))
    return by_place


def _batches(share: WriterShare, batch_bytes: int) -> list[range]:
    """Returns the parts of a writer in batches."""
    firsts, nbytes, index = [0], 0, 0
    for run in share.runs:
        begin = run.begin
        for end in run.ends():
            if nbytes and nbytes + end - begin > batch_bytes:
                firsts.append(index)
                nbytes = 0
            nbytes += end - begin
            begin = end
            index += 1
    return [range(first, end) for first, end in pairwise([*firsts, index])]


def _batched(messages: Sequence[ShardMessage], batches: Sequence[range]) -> Iterator[ShardMessage]:
    """Yields messages for parts of one writer, joined into messages for its batches."""
    ends = [batch.stop for batch in batches]
    for number, of_batch in groupby(messages, lambda message: bisect_right(ends, message.number)):
        yield _joined(list(of_batch), number)


def _joined(messages: Sequence[ShardMessage], batch: int) -> ShardMessage:
    """Joins messages between the same two ranks; adjacent ranges become one."""
    ranges: list[ShardRange] = []
    for shard_range in chain.from_iterable(message.ranges for message in messages):
        last = ranges[-1] if ranges else None
        if last is not None and last[:2] == shard_range[:2] and last.end == shard_range.begin:
            ranges[-1] = last._replace(end=shard_range.end)
        else:
            ranges.append(shard_range)
    return ShardMessage(messages[0].sender, messages[0].writer, batch, tuple(ranges))


def _sender(holders: Sequence[int], origin: tuple[int, int], members: Collection[int]) -> int:
    """Returns the holder that contributes a shard to a part of a writer; see `WriterShare.origins`."""
    writer, part = origin
    if writer in holders:
        return writer
    near = [rank for rank in holders if rank in members] or holders
    return near[(writer + part) % len(near)]
