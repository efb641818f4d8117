"""The memory of the rounds in flight, in which chunks are read, packed and received."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastload.base.devices import copy_async
from fastload.base.memory import PAGE_BYTES, host_view, round_up
from fastload.geometry.ranges import ByteRange
from fastload.transfer.messages import Message, Route, joined
from fastload.transfer.rounds import Plan, View
from fastload.transfer.transport import BufferMemory, Delivery, OwnChunk, Round, Slots

LEAST_PIECE_BYTES = 16 << 10  # on average; reading into shorter pieces takes longer than copying them
_ALIGNED_BYTES = 64
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class Writer(Protocol):
    """Writes the requested bytes to tensors or files."""

    def targets(self, start: int, nbytes: int, at_most: int) -> list[Tensor] | None:
        """Returns the host memory of a range of the requested bytes, in at most so many pieces.

        None if the range has to be placed.
        """

    def place(self, start: int, data: Tensor) -> None:
        """Copies data to a range of the requested bytes; it may use the data afterwards, see `follow`."""

    def follow(self) -> Callable[[], bool]:
        """Returns a function that tells whether no data placed so far is in use any more.

        A writer may also wait for that here.
        """


class Arrival(NamedTuple):
    """Bytes that have arrived at this rank.

    Attributes:
        reader: The rank that has read them; None if several others have.
        nbytes: Length in bytes.
        pieces: (start, data) of the ranges that have to be placed: first requested byte, flat uint8.
    """

    reader: int | None
    nbytes: int
    pieces: Sequence[tuple[int, Tensor]]


class Buffers:
    """One buffer for each round in flight, used in rotation, and memory for the chunks that this rank reads.

    A chunk that this rank requests as it is, and a message for one piece of memory, are read and received
    directly into their destination, unless another rank of the host copies them from here. All others stay in
    memory of the chunk, or in the buffer, until they are placed and forwarded. Buffers on a device hold all
    of them: chunks are read into host memory and packed on the device.

    Args:
        plan: The rounds.
        rank: This rank.
        memory: The memory of the buffers and chunks.
        route: Returns the route of a message.
        writer: Writes the bytes.

    Attributes:
        depth: Rounds that may be in flight.
        wanted_bytes: Bytes that this rank receives or reads for itself.

    Raises:
        MemoryError: The buffers do not fit into memory.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        memory: BufferMemory,
        route: Callable[[Message], Route],
        writer: Writer,
    ) -> None:
        self._plan = plan
        self._view: View = plan.view(rank)
        self._rank = rank
        self._memory = memory
        self._route = route
        self._writer = writer
        self.wanted_bytes = self._view.wanted_bytes
        # Where messages are packed once a chunk is read, by number of the round.
        self._unpacked: dict[int, tuple[_RoundBuffer, _Directory | None]] = {}
        buffer_bytes, own_bytes = plan.buffer_bytes, plan.own_bytes
        if not (plan.exchanges or self._on_device):  # a rank's own chunks are all there is
            buffer_bytes = 0
        depth = max(1, plan.depth_on_device) if self._on_device else plan.depth
        num_buffers = self.depth = min(depth, plan.num_rounds)
        if memory.is_shared:
            # One more than rounds in flight, since other ranks of the host may be a round behind. Also where
            # each round has its own, since a reader that drops out adds rounds.
            num_buffers = max(2, min(plan.depth, plan.num_rounds + 1))
            self.depth = num_buffers - 1
            buffer_bytes = _with_directory(buffer_bytes)
        self._buffers = [_RoundBuffer() for _ in range(num_buffers)]
        memory.allocate(num_buffers, buffer_bytes)
        most = max(num_buffers, plan.num_own)
        self._chunks = _ChunkMemory(memory, num_buffers, most, own_bytes + PAGE_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes used of all buffers; unused ones take no memory, unless they are pinned.

        If the ranks of a host share them, the part of one rank.
        """
        num_buffers = len(self._buffers)
        part = self._plan.shared_part(num_buffers, self._chunks.nbytes(num_buffers))
        if part is not None:
            return part
        return self._chunks.nbytes() + sum(buffer.most_bytes for buffer in self._buffers)

    @property
    def _on_device(self) -> bool:
        return self._memory.device.type != "cpu"

    def free(self) -> None:
        """Releases the buffers; a read that is still under way keeps its own alive."""
        self._unpacked.clear()
        for buffer in self._buffers:  # what was used of them is still reported
            buffer.memory = _EMPTY

    def release(self, number: int) -> None:
        """Frees the memory of the chunks of rounds up to this one, counted over all plans."""
        self._chunks.release(self._memory.freed(number))

    def drop(self, number: int) -> None:
        """Frees the memory of the chunks of rounds from this one on, which will not take place."""
        self._chunks.drop(number)

    def prepare_chunk(self, plan: Plan, index: int, number: int) -> OwnChunk | None:
        """Chooses the memory for this rank's chunk of a round.

        Args:
            plan: The rounds.
            index: Number of the round in the plan.
            number: Number of the round over all plans.

        Returns:
            The chunk, without byte ranges if it is empty; None if there is no memory for it now.
        """
        view = self._view_of(plan)
        if not (byte_ranges := view.reads(index)):
            return OwnChunk((), ())
        nbytes = sum(byte_range.nbytes for byte_range in byte_ranges)
        outgoing = [(message, self._route(message)) for message in view.outgoing(index)]
        if (direct := self._direct(outgoing, nbytes)) is not None:
            return OwnChunk(byte_ranges, direct, is_in_place=True, outgoing=outgoing)
        if (memory := self._chunks.take(number, nbytes)) is None:
            return None
        return OwnChunk(byte_ranges, [_as_in_file(memory, byte_ranges[0], nbytes)], outgoing=outgoing)

    def prepare(self, plan: Plan, index: int, number: int, chunk: OwnChunk | None) -> Round:
        """Chooses the memory for the messages of a round.

        Args:
            plan: The rounds.
            index: Number of the round in the plan.
            number: Number of the round over all plans.
            chunk: This rank's chunk; None if it is empty.
        """
        view, route = self._view_of(plan), self._route
        outgoing = chunk.outgoing if chunk is not None else ()
        incoming = [(message, route(message)) for message in view.incoming(index)]
        incoming.sort(key=lambda routed: routed[1].num_hops)
        slot = number % len(self._buffers)
        room = self._buffers[slot]
        room.begin(self._memory.buffer(slot, self._rank))
        work = Round(number, view.readers(index), chunk)
        directory = None
        if self._memory.is_shared:
            shared = [way for _, way in (*outgoing, *incoming) if way.is_shared and way.holder == self._rank]
            directory = _Directory.make(room, self._memory.of(self._rank), len(shared))
        if self._on_device and (slots := plan.slots(index)) is not None:
            work.slots = room.cut(slots)
        if work.chunk is not None and work.slots is not None:  # all messages are the chunk
            data = work.slots.by_reader[self._rank][: work.chunk.memory[0].numel()]
            work.packed = [Delivery(message, way, data) for message, way in outgoing]
        elif work.chunk is not None:
            self._unpacked[number] = room, directory
        for message, way in incoming:
            work.incoming.append(self._prepare_incoming(work, message, way, room))
            if directory is not None and way.is_shared and way.holder == self._rank:
                directory.add(work.incoming[-1])
        if directory is not None:
            directory.close()
        return work

    def pack(self, work: Round) -> None:
        """Makes the messages of this rank's chunk of a round, if it has one, once it is read."""
        unpacked = self._unpacked.pop(work.index, None)
        if unpacked is None:
            return
        room, directory = unpacked
        chunk = work.chunk
        assert chunk is not None
        memory = chunk.memory[0]
        if self._on_device:
            on_host, memory = memory, room.take(memory.nbytes)
            copy_async(on_host, memory)
        for message, way in work.outgoing:
            data = memory
            if len(chunk.memory) == 1:
                data = _packed(message, memory, room, must_fit=way.is_shared)
            delivery = Delivery(message, way, data, chunk.is_in_place)
            work.packed.append(delivery)
            if directory is not None and way.is_shared:
                directory.add(delivery)
        if directory is not None:
            directory.close()

    def arrivals(self, work: Round) -> Iterator[Arrival]:
        """Yields the bytes that have arrived in a round, with those that still have to be placed."""
        if work.slots is not None and not work.statuses:
            yield from self._arrivals_in_slots(work)
            return
        slot = work.index % len(self._buffers)
        directories: dict[int, _Directory] = {}  # of the messages that other ranks of this host hold
        for delivery in chain(work.packed, work.incoming):
            message, holder, data = delivery.message, delivery.route.holder, delivery.data
            if message.ranges and message.reader not in work.statuses:
                if holder != self._rank:
                    if holder not in directories:
                        memory = self._memory.buffer(slot, holder)
                        directories[holder] = _Directory(memory, self._memory.of(holder))
                    data = directories[holder].find(delivery)
                yield Arrival(
                    message.reader, message.nbytes, [] if delivery.is_in_place else _cut(message, data)
                )

    def _arrivals_in_slots(self, work: Round) -> Iterator[Arrival]:
        """Joins adjacent pieces, since each piece takes a copy of its own."""
        assert work.slots is not None
        memory, pieces = work.slots.memory, list[tuple[int, int, int]]()
        by_reader = {delivery.message.reader: delivery for delivery in chain(work.packed, work.incoming)}
        others_bytes = 0
        for reader in work.slots.by_reader:
            if reader not in by_reader:
                continue
            message, data = by_reader[reader].message, by_reader[reader].data
            at = int(data.storage_offset() - memory.storage_offset())
            for start, nbytes in message.ranges:
                if pieces and pieces[-1][0] + pieces[-1][2] == at and pieces[-1][1] + pieces[-1][2] == start:
                    pieces[-1] = *pieces[-1][:2], pieces[-1][2] + nbytes
                else:
                    pieces.append((at, start, nbytes))
                at += nbytes
            others_bytes += message.nbytes if reader != self._rank else 0
        if self._rank in by_reader:
            yield Arrival(self._rank, by_reader[self._rank].message.nbytes, [])
        yield Arrival(None, others_bytes, [(start, memory[at : at + nbytes]) for at, start, nbytes in pieces])

    def _view_of(self, plan: Plan) -> View:
        if plan is not self._plan:  # a reader has dropped out
            self._plan, self._view = plan, plan.view(self._rank)
        return self._view

    def _prepare_incoming(self, work: Round, message: Message, way: Route, room: _RoundBuffer) -> Delivery:
        if work.slots is not None:
            return Delivery(message, way, work.slots.by_reader[message.reader][: message.nbytes])
        if way.holder != self._rank:
            return Delivery(message, way, _EMPTY)
        target = None if way.is_shared else self._target(message)
        data = target if target is not None else room.take(message.nbytes, must_fit=way.is_shared)
        return Delivery(message, way, data, is_in_place=target is not None)

    def _direct(self, outgoing: Sequence[tuple[Message, Route]], nbytes: int) -> list[Tensor] | None:
        """Returns the destination of a chunk, if this rank requests all of it just as it is."""
        if self._on_device or any(way.is_shared for _, way in outgoing):
            return None
        ranges = _in_chunk([message for message, _ in outgoing], nbytes)
        if ranges is None:
            return None
        is_kept = all(message.ranges and not way.targets for message, way in outgoing)
        return self._targets(ranges, 1 + nbytes // LEAST_PIECE_BYTES if is_kept else 1)

    def _target(self, message: Message) -> Tensor | None:
        """Returns the destination of a message, if it is one piece."""
        if self._on_device or len(message.ranges) != 1:
            return None
        targets = self._targets(message.ranges, 1)
        return targets[0] if targets else None

    def _targets(self, ranges: Sequence[tuple[int, int]], at_most: int) -> list[Tensor] | None:
        pieces: list[Tensor] = []
        for start, nbytes in ranges:
            targets = self._writer.targets(start, nbytes, at_most - len(pieces))
            if targets is None:
                return None
            pieces += targets
        return pieces


def _as_in_file(memory: Tensor, byte_range: ByteRange, nbytes: int) -> Tensor:
    """Returns a part of memory that lies in its pages as bytes lie in a file, if it fits.

    Direct I/O reads into such memory without a copy.

    Args:
        memory: Flat uint8.
        byte_range: Begins with the bytes.
        nbytes: Their number.
    """
    start = (byte_range.offset - memory.data_ptr()) % PAGE_BYTES
    return memory[start : start + nbytes] if start + nbytes <= memory.numel() else memory[:nbytes]


def _packed(message: Message, chunk: Tensor, room: _RoundBuffer, *, must_fit: bool) -> Tensor:
    """Returns the bytes of a message: a view of the chunk, or a copy.

    Args:
        message: The message, with its pieces.
        chunk: This rank's chunk.
        room: Memory for a copy.
        must_fit: Whether a copy has to be in the buffer.
    """
    pieces = message.pieces
    if len(pieces) == 1 and not pieces[0].steps:
        return chunk[pieces[0].start : pieces[0].start + pieces[0].length]
    packed, position = room.take(message.nbytes, must_fit=must_fit), 0
    for piece in pieces:
        source = piece.of(chunk)
        packed[position : position + piece.total].view(source.shape).copy_(source)
        position += piece.total
    return packed


def _in_chunk(outgoing: Sequence[Message], nbytes: int) -> list[tuple[int, int]] | None:
    """Returns (start, length) of a chunk in the requested bytes, if all of it is requested once, as it is."""
    messages = [message for message in outgoing if message.ranges]
    if sum(message.nbytes for message in messages) != nbytes:
        return None
    if len(messages) == 1 and len(messages[0].pieces) == 1 and not messages[0].pieces[0].steps:
        return list(messages[0].ranges)
    pieces: list[tuple[int, int, int]] = []  # start in the chunk, start in the requested bytes, length
    for message in messages:
        if any(piece.steps for piece in message.pieces):
            return None
        ranges = iter(message.ranges)
        start, left = next(ranges)
        for piece in message.pieces:
            at, end = piece.start, piece.end
            while at < end:
                if not left:
                    start, left = next(ranges)
                length = min(left, end - at)
                pieces.append((at, start, length))
                at, start, left = at + length, start + length, left - length
    pieces.sort()
    if any(here[0] + here[2] != after[0] for here, after in pairwise(pieces)):
        return None
    return joined([(start, length) for _, start, length in pieces])


def _cut(message: Message, data: Tensor) -> list[tuple[int, Tensor]]:
    """Returns the pieces of a message: start in the requested bytes, and data."""
    pieces, position = [], 0
    for start, nbytes in message.ranges:
        pieces.append((start, data[position : position + nbytes]))
        position += nbytes
    return pieces


class _ChunkMemory:
    """The memory of the chunks that this rank reads: parts of one length, those used last first.

    Args:
        memory: Allocates it.
        count: Number of parts for the rounds in flight.
        most: Number of parts.
        nbytes: Length of each.
    """

    def __init__(self, memory: BufferMemory, count: int, most: int, nbytes: int) -> None:
        self._memory = memory
        memory.allocate_chunks(count, most, round_up(nbytes, PAGE_BYTES))
        self._free = list(range(most))  # the first one is free next
        self._used: deque[tuple[int, int]] = deque()  # number of the round and of the part
        self._most_bytes: dict[int, int] = {}  # of a chunk in each part

    def nbytes(self, first: int = 0) -> int:
        """Bytes used so far, from a part on; unused ones take none, unless page-locked."""
        return sum(nbytes for part, nbytes in self._most_bytes.items() if part >= first)

    def take(self, number: int, nbytes: int) -> Tensor | None:
        """Returns memory for the chunk of a round, after those of earlier rounds; None if none is free."""
        if not self._free:
            return None
        part = self._free.pop(0)
        self._used.append((number, part))
        self._most_bytes[part] = max(self._most_bytes.get(part, 0), nbytes)
        return self._memory.chunk(part)

    def release(self, number: int) -> None:
        """Frees the memory of rounds up to this one."""
        while self._used and self._used[0][0] <= number:
            insort(self._free, self._used.popleft()[1])

    def drop(self, number: int) -> None:
        """Frees the memory of rounds from this one on."""
        while self._used and self._used[-1][0] >= number:
            insort(self._free, self._used.pop()[1])


class _RoundBuffer:
    """The memory of a round in flight, taken from its beginning on.

    Attributes:
        memory: Flat uint8; empty before the first round.
        most_bytes: The most bytes taken in any round.
    """

    def __init__(self) -> None:
        self.memory = _EMPTY
        self.most_bytes = 0
        self._begin = self._taken = 0

    def begin(self, memory: Tensor) -> None:
        """Begins a round: all memory is free."""
        self.memory = memory
        self._begin = self._taken = 0

    def skip(self, nbytes: int) -> None:
        """Reserves some bytes at the beginning."""
        self._begin = self._taken = round_up(nbytes, _ALIGNED_BYTES)

    def take(self, nbytes: int, *, must_fit: bool = False) -> Tensor:
        """Returns memory, flat uint8: new memory if many small messages have filled the buffer.

        Raises:
            MemoryError: The buffer is full and `must_fit` is set.
        """
        begin, self._taken = self._taken, self._taken + round_up(nbytes, _ALIGNED_BYTES)
        self.most_bytes = max(self.most_bytes, self._taken - self._begin)
        if begin + nbytes <= self.memory.numel():
            return self.memory[begin : begin + nbytes]
        if must_fit:
            raise MemoryError(f"no room for {nbytes} bytes that other ranks of this host copy")
        return torch.empty(nbytes, dtype=torch.uint8, device=self.memory.device)

    def cut(self, sizes: Mapping[int, int]) -> Slots:
        """Cuts the beginning into adjacent slots of these sizes."""
        memory = self.take(sum(sizes.values()), must_fit=True)
        return Slots(memory, dict(zip(sizes, memory.split(list(sizes.values())), strict=True)))


class _Directory:
    """A table of the messages in a rank's buffer that other ranks of its host copy.

    It is at the beginning of the buffer, as int64: a count, and for each message the reader, the number of
    the recipients, the first byte in the memory of its rank, and the length.

    Args:
        memory: The buffer, flat uint8.
        shared: All memory that its rank shares.
    """

    _ROW = 4

    def __init__(self, memory: Tensor, shared: Tensor) -> None:
        self._shared = shared
        self._begin = shared.data_ptr()
        self._words = host_view(memory).cast("q")
        self._rows: dict[tuple[int, int], tuple[int, int]] | None = None
        self._count = 0

    @classmethod
    def make(cls, room: _RoundBuffer, shared: Tensor, num_messages: int) -> _Directory:
        """Reserves a directory for some messages at the beginning of a buffer."""
        room.skip(8 * (1 + cls._ROW * num_messages))
        return cls(room.memory, shared)

    def add(self, delivery: Delivery) -> None:
        """Adds a message in the buffer."""
        at = 1 + self._ROW * self._count
        begin = delivery.data.data_ptr() - self._begin
        row = delivery.message.reader, delivery.route.group, begin, delivery.message.nbytes
        for column, value in enumerate(row):
            self._words[at + column] = value
        self._count += 1

    def close(self) -> None:
        """Publishes the messages added so far."""
        self._words[0] = self._count

    def find(self, delivery: Delivery) -> Tensor:
        """Returns the bytes of a message that another rank holds."""
        if self._rows is None:
            ends = range(1, 1 + self._ROW * self._words[0], self._ROW)
            rows = (self._words[at : at + self._ROW] for at in ends)
            self._rows = {(reader, group): (begin, nbytes) for reader, group, begin, nbytes in rows}
        begin, nbytes = self._rows[delivery.message.reader, delivery.route.group]
        assert nbytes == delivery.message.nbytes, (nbytes, delivery.message)
        return self._shared[begin : begin + nbytes]


def _with_directory(nbytes: int) -> int:
    """Returns the length of a buffer with a directory; untouched memory takes none."""
    return round_up(nbytes + nbytes // 8 + (1 << 20), PAGE_BYTES)
