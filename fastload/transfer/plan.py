"""Which rank reads which bytes in which round. Pure: the same inputs give the same plan on every rank.

The requested bytes, in file order, form one space from 0 to `total_bytes`. It is cut into rounds, and each
round into chunks: in round k, reader i reads the i-th chunk of that round. All chunks of a round have one
length (the very last ones may be shorter). So shares differ by less than one chunk, whatever the tensors
look like.

If a chunk of each reader does not fit into a round, the readers are split into windows. A round has the
chunks of one window, and a cycle of rounds has one chunk of every reader. All readers read ahead meanwhile.

For storage that reads ahead, each reader gets one range of the space instead, and reads one chunk of it in
each cycle. The storage then reads ahead what the same reader asks for next.

If checksum blocks are verified, each bound between two chunks is moved down to the nearest bound between two
blocks, so that each block has one reader. Chunks are then longer or shorter by less than a block.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, log
from typing import ClassVar, NamedTuple

import xxhash

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.comm.hosts import host_of
from fastload.errors import OptionError
from fastload.geometry.blocks import Blocks
from fastload.geometry.box import Runs
from fastload.geometry.ranges import ByteRange, HasRange, Space, merged
from fastload.options import named_staging
from fastload.transfer.messages import Grid, Message, Ranks, joined, ring_order

_MOST_COUNTED = 100_000  # chunks whose lengths are summed one by one
_NEAR = 1.42  # so that a power of 2 is always near


class ReaderIndex(NamedTuple):
    """The number of a reader among those of its host.

    Attributes:
        host: Number of its host among the hosts of all readers.
        local: Number among the readers of that host.
    """

    host: int
    local: int


@dataclass(frozen=True)
class ReaderWindows:
    """Readers split into windows: each round has the chunks of one window.

    A window has readers from hosts at equal distances, equally many of each `ReaderIndex.local`. So in every
    round all hosts, and the ranks of each host, receive and forward equally much. Consecutive windows have
    hosts far from each other.

    Attributes:
        order: All readers, window by window.
        num_windows: Number of windows.
    """

    order: tuple[int, ...]
    num_windows: int

    @classmethod
    def of(
        cls, readers: Sequence[int], hosts: Sequence[str], num_windows: int, *, by_local: bool = False
    ) -> ReaderWindows:
        """Splits readers into windows that differ by one reader at most.

        Args:
            readers: The readers, ascending.
            hosts: Host of each rank; empty if each is on a host of its own.
            num_windows: Number of windows, no more than readers.
            by_local: Whether to sort the readers of a window by `ReaderIndex.local` before the host, if all
                hosts have equally many.
        """
        if num_windows == 1 and not by_local:
            return cls(tuple(readers), 1)
        indexes = reader_indexes(readers, hosts)
        num_locals = 1 + max(index.local for index in indexes)
        by_local = by_local and len(indexes) == num_locals * (1 + max(index.host for index in indexes))
        num_bits = (num_windows - 1).bit_length()

        def key(number: int) -> tuple[int, int, int]:
            host, local = indexes[number]
            window = (host + local * num_windows // num_locals) % num_windows
            within = (local, host) if by_local else (host, local)
            return int(f"{window:0{num_bits}b}"[::-1], 2), *within

        return cls(tuple(readers[number] for number in sorted(range(len(readers)), key=key)), num_windows)

    @property
    def most_readers(self) -> int:
        """Readers in the largest window."""
        return -(-len(self.order) // self.num_windows)

    def first(self, window: int) -> int:
        """Returns the number of readers in earlier windows."""
        return window * len(self.order) // self.num_windows

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The readers of each window, in the order of their chunks."""
        windows = range(self.num_windows)
        return tuple(self.order[self.first(window) : self.first(window + 1)] for window in windows)

    @cached_property
    def window_of(self) -> dict[int, int]:
        """The window of each reader."""
        return {rank: window for window, readers in enumerate(self.readers) for rank in readers}

    @cached_property
    def position_of(self) -> dict[int, int]:
        """The position of each reader in `order`."""
        return {rank: position for position, rank in enumerate(self.order)}


def reader_indexes(readers: Sequence[int], hosts: Sequence[str]) -> list[ReaderIndex]:
    """Returns the index of each reader; arguments are those of `ReaderWindows.of`."""
    if not hosts:
        return [ReaderIndex(host, 0) for host in range(len(readers))]
    numbers: dict[str, int] = {}
    counts: Counter[str] = Counter()
    indexes = []
    for rank in readers:
        host = hosts[rank]
        indexes.append(ReaderIndex(numbers.setdefault(host, len(numbers)), counts[host]))
        counts[host] += 1
    return indexes


def choose_num_windows(num_hosts: int, good: float, at_least: int) -> int:
    """Returns a number of windows that divides the number of hosts, if one is near.

    Args:
        num_hosts: Number of hosts.
        good: The preferred number of windows.
        at_least: The least number of windows.
    """
    near = range(max(at_least, ceil(good / _NEAR)), int(good * _NEAR) + 1)
    even = [num_windows for num_windows in near if num_hosts % num_windows == 0]
    return min(even, key=lambda number: abs(log(number / good)), default=max(at_least, ceil(good)))


_MAX_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 20  # below, the cost of a message shows
_LEAST_CHUNK_BYTES = 256 << 10  # below, fewer readers read
_GOOD_NUM_READERS = 64  # in a window
_LEAST_NUM_READERS = 8
_GOOD_NUM_ROUNDS = 128  # a pipeline of rounds cannot overlap about one of them
_GOOD_NUM_READS = 16  # without an exchange: enough to keep several threads busy to the end
MAX_DEPTH = 4  # rounds in flight
_MOST_OWN = 128
# Without an exchange, of chunks that are copied to a device: half of them are read while others are copied.
# Python takes the GIL for some 0.2 ms for each, so at 30 GB/s there must not be many.
DEVICE_DEPTH = 16
_MAX_DEVICE_BUFFER_BYTES = 16 << 20
_MAX_NUM_OWN = 16  # chunks that a reader reads ahead of its window, in 1/8 of staging at most
_OWN_PART = 8
# The bytes that all readers together read ahead of the rounds, with several windows: as much as storage
# delivers during one request (80 ms at 50 GB/s), but a small part of the load, which starts with it.
_MAX_AHEAD_BYTES = 4 << 30
_AHEAD_PART = 64
_LEAST_ROUND_BYTES = 16 << 20


class Sizes(NamedTuple):
    """The sizes of a plan; see `TransferPlan`."""

    chunk_bytes: int
    num_windows: int
    depth: int
    ahead: int
    num_own: int


@dataclass(frozen=True)
class RoundSize:
    """The memory that a round takes.

    Attributes:
        num_slots: Chunks in it: those of a window of readers, or one without an exchange.
        exchanges: Whether chunks are sent to other ranks.
        longest_block_bytes: Length of the longest checksum block; 0 without any.
        padded: Whether each slot has room for one block more than a chunk, since slots have equal lengths, or
            since the chunks of a round are not adjacent.
        num_sharing: Ranks that share one buffer.
    """

    num_slots: int
    exchanges: bool
    longest_block_bytes: int
    padded: bool
    num_sharing: int = 1

    def nbytes(self, chunk_bytes: int) -> int:
        """Returns the most bytes of all slots together."""
        return self.num_slots * self.each_bytes(chunk_bytes) + self.once_bytes

    def part_bytes(self, chunk_bytes: int) -> int:
        """Returns the bytes of one rank's part of a buffer."""
        return -(-self.nbytes(chunk_bytes) // self.num_sharing)

    def part_of(self, own_bytes: int) -> int:
        """Returns the bytes of one rank's part of what each reader reads, which only some ranks are."""
        return -(-own_bytes * min(self.num_slots, self.num_sharing) // self.num_sharing)

    def own_bytes(self, chunk_bytes: int) -> int:
        """Returns the most bytes that one chunk takes."""
        if not self.exchanges:
            return self.each_bytes(chunk_bytes)
        return slot_bytes(chunk_bytes + self.longest_block_bytes)

    def each_bytes(self, chunk_bytes: int) -> int:
        """Returns the bytes to count for each slot."""
        return slot_bytes(chunk_bytes + self.extra_bytes)

    @property
    def extra_bytes(self) -> int:
        """Bytes to count for each slot beyond a chunk, since its bounds are moved to those of blocks.

        One that is not exchanged may begin anywhere in a page.
        """
        if not self.exchanges:
            return self.longest_block_bytes + PAGE_BYTES
        if self.padded or not self.longest_block_bytes:
            return self.longest_block_bytes
        return PAGE_BYTES  # lengths that differ are rounded up one by one

    @property
    def once_bytes(self) -> int:
        """One block more for the round: what moved bounds add to one chunk, another one loses."""
        is_counted = self.padded or not self.exchanges
        return 0 if is_counted else round_up(self.longest_block_bytes, PAGE_BYTES)


def slot_bytes(chunk_bytes: int) -> int:
    """Returns the bytes of a buffer that a chunk takes: complete pages."""
    return round_up(chunk_bytes, PAGE_BYTES)


def choose_sizes(
    total_bytes: int,
    num_readers: int,
    num_hosts: int,
    size: RoundSize,
    staging_bytes: int,
    chunk_bytes: int | None,
    *,
    to_device: bool = False,
) -> Sizes:
    """Chooses the sizes of a plan.

    Each round has a chunk of every reader if such chunks are long enough; else there are several windows.

    Args:
        total_bytes: Bytes to read.
        num_readers: Number of readers.
        num_hosts: Number of their hosts.
        size: The memory of a round with all readers.
        staging_bytes: Most bytes for all buffers of one rank, those for reading ahead included.
        chunk_bytes: Unit of reading and of exchange; None chooses it.
        to_device: Whether chunks are copied from host memory to a device, without an exchange.

    Raises:
        OptionError: One round does not fit.
    """
    share_bytes = -(-total_bytes // num_readers)
    spare = staging_bytes * size.num_sharing // MAX_DEPTH - size.once_bytes
    if to_device:
        spare = min(staging_bytes // DEVICE_DEPTH, _MAX_DEVICE_BUFFER_BYTES)
    most_bytes = _MAX_DEVICE_BUFFER_BYTES if to_device else _MAX_CHUNK_BYTES
    together = chunk_bytes or _fitting_chunk_bytes(share_bytes, size, spare, most_bytes)
    together = _round_to_blocks(max(1, min(together, share_bytes)), size)
    depth = min(MAX_DEPTH, staging_bytes // size.part_bytes(together))
    useful = _round_to_blocks(max(1, min(share_bytes, _least_useful(spare))), size)
    if size.num_slots == 1 or (chunk_bytes and depth > 1) or (depth == MAX_DEPTH and together >= useful):
        _require_fit(depth, together, size, staging_bytes, is_given=chunk_bytes is not None)
        left = staging_bytes - depth * size.part_bytes(together)
        own_bytes = size.part_of(size.own_bytes(together))
        return Sizes(together, 1, depth, 0, num_own_chunks(depth, left, own_bytes))
    return _choose_windowed(total_bytes, num_readers, num_hosts, size, staging_bytes, chunk_bytes)


def _choose_windowed(
    total_bytes: int,
    num_readers: int,
    num_hosts: int,
    size: RoundSize,
    staging_bytes: int,
    chunk_bytes: int | None,
) -> Sizes:
    """Chooses the sizes of a plan with several windows."""
    own_bytes = staging_bytes // _OWN_PART
    spare = (staging_bytes - own_bytes) * size.num_sharing // MAX_DEPTH - size.once_bytes
    spare = min(spare, max(total_bytes // _AHEAD_PART, _LEAST_ROUND_BYTES))
    share_bytes = -(-total_bytes // num_readers)
    is_given = chunk_bytes is not None
    if chunk_bytes is None:
        good_bytes = _round_to_blocks(_good_windowed_bytes(share_bytes, spare), size)
        num_windows = min(num_readers, choose_num_windows(num_hosts, num_readers * good_bytes / spare, 2))
        chunk_bytes = _even_chunk_bytes(share_bytes, min(good_bytes, spare // -(-num_readers // num_windows)))
    chunk_bytes = _round_to_blocks(max(1, min(chunk_bytes, max(share_bytes, _LEAST_CHUNK_BYTES))), size)
    fitting = max(1, spare // size.each_bytes(chunk_bytes))
    at_least = -(-num_readers // fitting)
    num_windows = min(num_readers, choose_num_windows(num_hosts, at_least, at_least))
    size = replace(size, num_slots=-(-num_readers // num_windows))
    round_bytes = chunk_bytes * size.num_slots
    most_own = min(max(1, own_bytes // size.own_bytes(chunk_bytes)), _MAX_NUM_OWN)
    ahead = min(total_bytes // _AHEAD_PART, _MAX_AHEAD_BYTES) // round_bytes
    ahead = min(max(ahead, MAX_DEPTH), most_own * num_windows)
    own_bytes = -(-ahead // num_windows) * size.own_bytes(chunk_bytes)
    depth = min(MAX_DEPTH, (staging_bytes - own_bytes) // size.part_bytes(chunk_bytes))
    _require_fit(depth, chunk_bytes, size, staging_bytes, is_given=is_given)
    return Sizes(chunk_bytes, num_windows, min(depth, ahead), ahead, -(-ahead // num_windows))


def num_own_chunks(depth: int, left_bytes: int, own_bytes: int) -> int:
    """Returns for how many chunks that a rank reads there is memory, those of rounds in flight included.

    Args:
        depth: Rounds in flight.
        left_bytes: Memory beside theirs.
        own_bytes: Length of a chunk.
    """
    return min(max(depth, _MOST_OWN), depth + left_bytes // own_bytes)


def _round_to_blocks(chunk_bytes: int, size: RoundSize) -> int:
    """Rounds down to complete blocks; else some readers would always read more than others."""
    longest = size.longest_block_bytes
    return max(1, chunk_bytes // longest) * longest if longest else chunk_bytes


def good_chunk_bytes(
    share_bytes: int, num_rounds: int = _GOOD_NUM_ROUNDS, most_bytes: int = _MAX_CHUNK_BYTES
) -> int:
    """Returns a length short enough for many rounds, and long enough for storage."""
    for_overlap = round_up(-(-share_bytes // num_rounds), PAGE_BYTES)
    return min(max(for_overlap, _MIN_CHUNK_BYTES), most_bytes)


def _fitting_chunk_bytes(share_bytes: int, size: RoundSize, spare: int, most_bytes: int) -> int:
    """Returns a good length within staging."""
    for_staging = _pages(spare // size.num_slots - round_up(size.extra_bytes, PAGE_BYTES))
    num_rounds = _GOOD_NUM_ROUNDS if size.exchanges else _GOOD_NUM_READS
    good = good_chunk_bytes(share_bytes, num_rounds, most_bytes)
    return max(PAGE_BYTES, min(good, for_staging))


def _least_useful(spare: int) -> int:
    """Returns the least useful length of a chunk, given the bytes of a round."""
    return min(max(_pages(spare // _LEAST_NUM_READERS), PAGE_BYTES), _MIN_CHUNK_BYTES)


def _good_windowed_bytes(share_bytes: int, spare: int) -> int:
    """Returns about the length of chunks of which a round has many."""
    for_overlap = round_up(-(-share_bytes // _GOOD_NUM_ROUNDS), PAGE_BYTES)
    for_many = _pages(spare // _GOOD_NUM_READERS)
    return max(_least_useful(spare), min(for_overlap, for_many, _MAX_CHUNK_BYTES))


def _even_chunk_bytes(share_bytes: int, at_most: int) -> int:
    """Returns the longest chunk, up to a length, of which all readers have equally many, but no tiny one."""
    at_most = max(PAGE_BYTES, _pages(at_most))
    if share_bytes <= at_most:
        return max(share_bytes, min(_LEAST_CHUNK_BYTES, at_most))
    return round_up(-(-share_bytes // -(-share_bytes // at_most)), PAGE_BYTES)


def _pages(nbytes: int) -> int:
    """Rounds down to complete pages."""
    return nbytes // PAGE_BYTES * PAGE_BYTES


def _require_fit(
    depth: int, chunk_bytes: int, size: RoundSize, staging_bytes: int, *, is_given: bool
) -> None:
    # Shared memory takes one buffer more than rounds in flight.
    if depth < (2 if size.num_sharing > 1 else 1):
        longest = size.longest_block_bytes
        why = f" (checksum blocks have {longest}: verify=False reads without)" if longest else ""
        chunk = named_chunk(chunk_bytes, "one round", is_given=is_given)
        raise OptionError(f"{chunk} does not fit into {named_staging(staging_bytes)}{why}")


def named_chunk(chunk_bytes: int, cause: str, *, is_given: bool) -> str:
    """Returns what a chunk is too long for, as an error names it: its length as an option only if given."""
    if is_given:
        return f"chunk_bytes={chunk_bytes}: {cause}"
    return f"{cause} in chunks of {chunk_bytes} bytes, the least possible,"


_FEW_READERS = 8
_MOST_AHEAD = 64


class Chunk(NamedTuple):
    """A contiguous range of the space of a plan, read by one rank in one round."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class TransferPlan:
    """Which rank reads which bytes in which round.

    Attributes:
        ranges: The byte ranges to read, merged, in order: the space, or the rest of it.
        readers: The ranks that read, ascending: readers of storage, or hosts that have a copy.
        recipients: The ranks that receive the bytes, ascending: all, one of each host, or a single one.
            None of them to verify only.
        chunk_bytes: Length of a chunk in every cycle but the last, before bounds are moved to blocks.
        depth: Rounds that may be in flight at once.
        blocks: The checksum blocks of the space, which no chunk may cut; None if none are verified.
        even_slots: Whether the slots of a round must have equal lengths.
        contiguous: Whether each reader reads one range over all rounds.
        num_windows: Windows of readers, and rounds in a cycle.
        ahead: Rounds whose chunks may be read, counted from the first in flight; 0 without a limit.
        hosts: Host of each rank; empty if each is on a host of its own.
        num_sharing: Ranks that share their buffers.
        num_own: Chunks of a reader for which there is memory, those of rounds in flight included.
        in_lockstep, reads_in_parts: See `Plan`.
    """

    ranges: tuple[ByteRange, ...]
    readers: Ranks
    recipients: Ranks
    chunk_bytes: int
    depth: int
    blocks: Blocks | None = None
    even_slots: bool = False
    contiguous: bool = False
    num_windows: int = 1
    ahead: int = 0
    hosts: tuple[str, ...] = ()
    num_sharing: int = 1
    num_own: int = 1
    in_lockstep: ClassVar[bool] = True
    reads_in_parts: ClassVar[bool] = False

    @cached_property
    def windows(self) -> ReaderWindows:
        """The readers of each round of a cycle."""
        return ReaderWindows.of(self.readers, self.hosts, self.num_windows, by_local=self.even_slots)

    @property
    def exchanges(self) -> bool:
        """Whether any rank receives bytes that another one reads."""
        return _exchanges(self.readers, self.recipients)

    @property
    def grid(self) -> Grid:
        """The grid along which devices pass on each chunk."""
        return Grid.of(self.hosts)

    @property
    def order(self) -> Sequence[int]:
        """The ranks that take part, those of a host next to each other."""
        return ring_order(self.hosts) if self.hosts else sorted({*self.readers, *self.recipients})

    @cached_property
    def _space(self) -> Space[ByteRange]:
        return Space(self.ranges)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes to read, by all readers together."""
        return self._space.nbytes

    @cached_property
    def num_rounds(self) -> int:
        """Number of rounds."""
        num_cycles, left = divmod(self.total_bytes, self.chunk_bytes * len(self.readers))
        if not left:
            return num_cycles * self.num_windows
        if self.contiguous:
            return (num_cycles + 1) * self.num_windows
        num_chunks = -(-left // self._chunk_bytes_of_cycle(num_cycles))
        begun = (window for window in range(self.num_windows) if self.windows.first(window) < num_chunks)
        return num_cycles * self.num_windows + sum(1 for _ in begun)

    @property
    def most_bytes(self) -> int:
        """The most bytes that one reader reads; of plans with many chunks an upper bound."""
        if self.num_rounds * len(self.readers) > _MOST_COUNTED:
            return self._share_bytes + self.chunk_bytes_of(self.num_rounds - 1)
        rounds = range(self.num_rounds)
        return max(sum(self.chunk(index, rank).nbytes for index in rounds) for rank in self.readers)

    @property
    def depth_on_device(self) -> int:
        """Rounds in flight with buffers on a device: `num_own` counts the chunks in host memory."""
        return self.depth

    @property
    def num_reads(self) -> int:
        """Chunks that a reader has to have in flight, with an exchange.

        Half of the buffers, while the others are exchanged; or all that it reads ahead.
        """
        return max(1, -(-self.ahead // self.num_windows) if self.ahead else self.depth // 2)

    def readers_in(self, round_index: int) -> tuple[int, ...]:
        """Returns the ranks that have a chunk in a round."""
        return self.windows.readers[round_index % self.num_windows]

    def rounds_of(self, rank: int, begin: int, end: int) -> range:
        """Returns the rounds from `begin` up to `end` in which a rank has a chunk."""
        window = self.windows.window_of.get(rank)
        if window is None:
            return range(0)
        return range(begin + (window - begin) % self.num_windows, min(end, self.num_rounds), self.num_windows)

    def chunk_bytes_of(self, round_index: int) -> int:
        """Returns the length of the longest chunk of a round, before bounds are moved to those of blocks."""
        return self._chunk_bytes_of_cycle(round_index // self.num_windows)

    def _chunk_bytes_of_cycle(self, cycle: int) -> int:
        left = self.total_bytes - cycle * self.chunk_bytes * len(self.readers)
        return min(self.chunk_bytes, max(-(-left // len(self.readers)), self._longest_block_bytes))

    def chunk(self, round_index: int, rank: int) -> Chunk:
        """Returns the chunk of a rank in a round; empty if the rank is not in the window of the round."""
        cycle, window = divmod(round_index, self.num_windows)
        if self.windows.window_of.get(rank) != window:
            return Chunk(self.total_bytes, 0)
        position = self.windows.position_of[rank]
        after = (cycle + 1, position) if self.contiguous else (cycle, position + 1)
        start, end = self._bound(cycle, position), self._bound(*after)
        return Chunk(start, end - start)

    def chunks(self, round_index: int) -> dict[int, Chunk]:
        """Returns the chunk of each reader in a round."""
        readers = self.readers_in(round_index)
        if self.contiguous:
            return {rank: self.chunk(round_index, rank) for rank in readers}
        cycle, window = divmod(round_index, self.num_windows)
        chunk_bytes = self._chunk_bytes_of_cycle(cycle)
        begin = cycle * self.chunk_bytes * len(self.readers) + self.windows.first(window) * chunk_bytes
        bounds = [self._floor(begin + number * chunk_bytes) for number in range(len(readers) + 1)]
        return {rank: Chunk(a, b - a) for rank, (a, b) in zip(readers, pairwise(bounds), strict=True)}

    @cached_property
    def _share_bytes(self) -> int:
        """Bytes that each reader reads, before bounds are moved to blocks; the last one may read less."""
        return -(-self.total_bytes // len(self.readers))

    def _bound(self, cycle: int, position: int) -> int:
        """Returns the first byte, in the space, of a chunk of the reader at a position."""
        if self.contiguous:
            begin = position * self._share_bytes + min(cycle * self.chunk_bytes, self._share_bytes)
        else:
            begin = cycle * self.chunk_bytes * len(self.readers)
            begin += position * self._chunk_bytes_of_cycle(cycle)
        return self._floor(begin)

    def _floor(self, position: int) -> int:
        """Returns the last byte up to this one at which a chunk may begin."""
        if position >= self.total_bytes:
            return self.total_bytes
        if self.blocks is None:
            return position
        index = self._space.at(position)
        wanted = self.ranges[index].start + position - self._space.starts[index]
        return position - wanted + self.blocks.floor(wanted)  # an each begins with a block

    def slots(self, index: int) -> dict[int, int]:
        """Returns the bytes of a buffer that each reader's chunk of a round takes: complete pages."""
        chunks = self.chunks(index)
        if self.blocks is None:
            return dict.fromkeys(chunks, slot_bytes(self.chunk_bytes_of(index)))
        if self.even_slots:
            return dict.fromkeys(chunks, slot_bytes(max(chunk.nbytes for chunk in chunks.values())))
        return {rank: slot_bytes(chunk.nbytes) for rank, chunk in chunks.items()}

    @property
    def own_bytes(self) -> int:
        """Bytes to count for host memory of what a rank reads in a round."""
        return self._round_size.own_bytes(self.chunk_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer that holds a round; ranks that share memory have it once."""
        return self._round_size.nbytes(self.chunk_bytes)

    def shared_part(self, num_buffers: int, own_bytes: int) -> int | None:
        """Returns the bytes of one rank's part of memory that ranks share; see `Plan.shared_part`."""
        if self.num_sharing == 1:
            return None
        return num_buffers * self._round_size.part_bytes(self.chunk_bytes) + self.part_of(own_bytes)

    def part_of(self, own_bytes: int) -> int:
        """Returns the bytes of one rank's part of what each reader reads beside the buffers."""
        return self._round_size.part_of(own_bytes)

    @property
    def _round_size(self) -> RoundSize:
        padded = self.even_slots or self.contiguous
        num_slots = self.windows.most_readers if self.exchanges else 1
        return RoundSize(num_slots, self.exchanges, self._longest_block_bytes, padded, self.num_sharing)

    @cached_property
    def _longest_block_bytes(self) -> int:
        return _longest_bytes(self.blocks)

    def byte_ranges(self, chunk: Chunk) -> list[ByteRange]:
        """Returns the byte ranges of a chunk, in order."""
        byte_ranges = []
        for index, begin, end in self._space.cut(chunk.start, chunk.nbytes):
            whole = self.ranges[index]
            byte_ranges.append(ByteRange(whole.file, whole.offset + begin, end - begin, whole.start + begin))
        return byte_ranges

    def without(
        self, broken: Collection[int], lacking: Sequence[tuple[int, int]], num_posted: int
    ) -> TransferPlan | None:
        """Returns the plan for the remaining bytes when readers drop out; see `Plan.without`."""
        readers = tuple(rank for rank in self.readers if rank not in broken)
        if not readers:
            return None
        left = [self.chunk(index, rank) for index, rank in lacking]
        left += self._from_round(num_posted)
        ranges = tuple(byte_range for chunk in sorted(left) for byte_range in self.byte_ranges(chunk))
        num_windows = -(-len(readers) // self.windows.most_readers)
        num_own = -(-self.ahead // self.num_windows)  # chunks that fit
        ahead = min(self.ahead, num_own * num_windows)
        return replace(self, ranges=ranges, readers=readers, num_windows=num_windows, ahead=ahead)

    def _from_round(self, round_index: int) -> list[Chunk]:
        """Returns the ranges that are read from a round on."""
        cycle, window = divmod(round_index, self.num_windows)
        first = self.windows.first(window)
        if not self.contiguous:
            begin = self._bound(cycle, first)
            return [Chunk(begin, self.total_bytes - begin)]
        bounds = [
            (self._bound(cycle + (position < first), position), self._bound(self.num_rounds, position))
            for position in range(len(self.readers))
        ]
        return [Chunk(begin, end - begin) for begin, end in bounds]

    def deeper(self, staging_bytes: int, at_most: int = _MOST_AHEAD) -> TransferPlan:
        """Returns the plan with as many rounds in flight as fit, if nothing is exchanged.

        Args:
            staging_bytes: Most bytes for all buffers.
            at_most: Most rounds; by default as many as ever help.
        """
        if self.exchanges:
            return self
        fitting = staging_bytes // self._round_size.part_bytes(self.chunk_bytes)
        depth = max(self.depth, min(fitting, at_most))
        return replace(self, depth=depth, num_own=max(depth, self.num_own))

    def cycle(self, round_index: int) -> int:
        """Returns the number of the cycle that a round is in."""
        return round_index // self.num_windows

    def view(self, rank: int) -> TransferView:
        """Returns the plan as one rank sees it."""
        return TransferView(self, rank)

    @property
    def recipient_sets(self) -> Collection[Ranks]:
        """The sets of ranks that receive the same messages."""
        return [self.recipients]

    def pairs(self, rank: int) -> Iterator[tuple[int, Ranks]]:
        """Yields (reader, recipients) of all messages that a rank sends or receives."""
        for reader in self.readers:
            if rank == reader or rank in self.recipients:
                yield reader, self.recipients

    def digest(self, *, alone: bool = False) -> str:
        """xxh3-128 of the plan, for comparison between ranks; of its bytes if nothing is exchanged."""
        if not self.exchanges:  # each rank goes its own way
            return xxhash.xxh3_128_hexdigest(json.dumps(self.ranges).encode())
        ranks = [self.readers, self.recipients]
        blocks = _digest(self.blocks) if self.blocks is not None else None
        shape = self.even_slots, self.contiguous, self.num_sharing, self.ahead, self.num_own
        order = self.windows.order if self.windows.order != self.readers else ()
        text = json.dumps([self.ranges, ranks, self.chunk_bytes, self.depth, blocks, *shape, order])
        return xxhash.xxh3_128_hexdigest(text.encode())


class TransferView:
    """A `TransferPlan` as one rank sees it: each chunk is one message to all recipients.

    Args:
        plan: The plan.
        rank: The rank.

    Attributes:
        wanted_bytes: Bytes that the rank receives or reads for itself.
    """

    def __init__(self, plan: TransferPlan, rank: int) -> None:
        self.wanted_bytes = plan.total_bytes
        self._plan = plan
        self._rank = rank
        self._is_wanted = rank in plan.recipients
        self._others_read = tuple(plan.readers) != (rank,)
        self._last: tuple[int, Chunk, list[ByteRange]] = (-1, Chunk(0, 0), [])

    def readers(self, index: int) -> Collection[int]:
        """Returns the ranks that may read in a round."""
        return self._plan.readers_in(index)

    def reads(self, index: int) -> list[ByteRange]:
        """Returns the byte ranges that the rank reads in a round."""
        return self._own(index)[1]

    def outgoing(self, index: int) -> list[Message]:
        """Returns the message of the rank's chunk of a round, if any."""
        chunk, byte_ranges = self._own(index)
        if not (chunk.nbytes and self._plan.recipients):
            return []
        return [self._message(self._rank, chunk, byte_ranges, [Runs(0, chunk.nbytes, ())])]

    def incoming(self, index: int) -> list[Message]:
        """Returns the messages to the rank of other ranks' chunks of a round."""
        chunks = self._plan.chunks(index) if self._is_wanted and self._others_read else {}
        return [
            self._message(reader, chunk, self._plan.byte_ranges(chunk), [])
            for reader, chunk in chunks.items()
            if reader != self._rank and chunk.nbytes
        ]

    def _own(self, index: int) -> tuple[Chunk, list[ByteRange]]:
        """Returns the rank's chunk of a round, and its byte ranges; computed once for a round in a row."""
        if self._last[0] != index:
            chunk = self._plan.chunk(index, self._rank)
            self._last = index, chunk, self._plan.byte_ranges(chunk)
        return self._last[1:]

    def _message(
        self, reader: int, chunk: Chunk, byte_ranges: Sequence[ByteRange], pieces: list[Runs]
    ) -> Message:
        ranges = (
            [(byte_range.start, byte_range.nbytes) for byte_range in byte_ranges] if self._is_wanted else []
        )
        return Message(reader, self._plan.recipients, chunk.nbytes, joined(ranges), pieces)


def plan_transfer(
    wanted: Sequence[HasRange],
    readers: Ranks,
    recipients: Ranks,
    *,
    staging_bytes: int,
    chunk_bytes: int | None,
    block_bytes: int = 0,
    even_slots: bool = False,
    contiguous: bool = False,
    hosts: Sequence[str] = (),
    num_sharing: int = 1,
    to_device: bool = False,
) -> TransferPlan:
    """Deals the requested bytes to the ranks that can deliver them.

    Only the last chunks may be shorter than a checksum block.

    Args:
        wanted: Tensors, or other byte ranges of files, in file order.
        readers: The ranks that can read, ascending; at least one.
        recipients: The ranks that receive the bytes, ascending.
        staging_bytes: Most bytes for one rank's part of all buffers, those for reading ahead included.
        chunk_bytes: Unit of reading and of exchange; None chooses it.
        block_bytes: Length of the checksum blocks to verify; 0 without any.
        even_slots: See `TransferPlan`.
        contiguous: Whether each reader reads one range, if staging is large enough: bounds that are moved to
            blocks then lengthen all chunks of a round, not one of them.
        hosts: Host of each rank; empty if each is on a host of its own.
        num_sharing: The least number of ranks that share their buffers, each with an equal part.
        to_device: See `choose_sizes`; ignored if there is an exchange.

    Raises:
        OptionError: `chunk_bytes`, or a checksum block, does not fit into `staging_bytes`.
    """
    blocks = _blocks(wanted, block_bytes)
    longest = _longest_bytes(blocks)
    ranges = merged(wanted)
    total_bytes = sum(byte_range.nbytes for byte_range in ranges)
    num_readers, exchanges = len(readers), _exchanges(readers, recipients)
    few = RoundSize(min(num_readers, _FEW_READERS) if exchanges else 1, exchanges, longest, True, num_sharing)
    least_bytes = max(min(chunk_bytes or _LEAST_CHUNK_BYTES, -(-total_bytes // num_readers)), longest)
    contiguous = contiguous and MAX_DEPTH * few.part_bytes(least_bytes) <= staging_bytes
    size = replace(few, num_slots=num_readers if exchanges else 1, padded=even_slots or contiguous)
    num_hosts = len({hosts[rank] for rank in readers}) if hosts else num_readers
    to_device = to_device and not exchanges
    sizes = choose_sizes(
        total_bytes, num_readers, num_hosts, size, staging_bytes, chunk_bytes, to_device=to_device
    )
    num_own = sizes.num_own
    if even_slots:  # buffers are on devices, and chunks in host memory
        num_own = max(num_own, num_own_chunks(0, staging_bytes, size.own_bytes(sizes.chunk_bytes)))
    plan = TransferPlan(
        ranges,
        readers,
        recipients,
        sizes.chunk_bytes,
        sizes.depth,
        blocks,
        even_slots,
        contiguous,
        sizes.num_windows,
        sizes.ahead,
        tuple(hosts),
        num_sharing,
        num_own,
    )
    return plan.deeper(staging_bytes, DEVICE_DEPTH) if to_device else plan


def _exchanges(readers: Ranks, recipients: Ranks) -> bool:
    return (bool(recipients) and readers != recipients) or len(recipients) > 1


def _blocks(wanted: Sequence[HasRange], block_bytes: int) -> Blocks | None:
    filled = [byte_range for byte_range in wanted if byte_range.nbytes] if block_bytes else []
    return Blocks(Space(filled), block_bytes) if filled else None


def _longest_bytes(blocks: Blocks | None) -> int:
    return blocks.longest_bytes if blocks is not None else 0


def _digest(blocks: Blocks) -> str:
    """xxh3-128 of the first bytes of the blocks."""
    starts = array("Q", blocks.space.starts).tobytes()
    return f"{blocks.block_bytes}/{xxhash.xxh3_128_hexdigest(starts)}"


# The strategy of a load


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy and its readers.

    Attributes:
        strategy: ``allgather``, ``broadcast`` or ``direct``.
        why: The reason, in one line.
        readers: The ranks that read.
    """

    strategy: str
    why: str
    readers: tuple[int, ...]

    @property
    def alone(self) -> bool:
        """Whether every rank reads all its bytes itself."""
        return self.strategy == "direct"

    def readers_for(self, rank: int) -> Ranks:
        """Returns the ranks that read what a rank receives."""
        return (rank,) if self.alone else self.readers

    def recipients_with(self, rank: int, world_size: int) -> Ranks:
        """Returns the ranks that receive what a rank receives."""
        return (rank,) if self.alone else tuple(range(world_size))


def choose_strategy(
    strategy: str,
    *,
    world_size: int,
    readers: Sequence[int],
    hosts: Sequence[str],
    shared: bool,
    fast_links: bool,
) -> StrategyChoice:
    """Chooses a strategy.

    Args:
        strategy: The option: a strategy, or ``auto``.
        world_size: Number of ranks.
        readers: Ranks that can read, ascending.
        hosts: Host of each rank; see `comm.hosts.node`.
        shared: Whether all ranks read through one link.
        fast_links: Whether the exchange runs between devices (NCCL), far faster than any storage.

    Raises:
        OptionError: The option is ``direct`` and some rank cannot read.
    """
    readers = tuple(readers)
    if world_size == 1 and not (fast_links and strategy in ("allgather", "broadcast")):
        return StrategyChoice("direct", "one rank: nothing to exchange", readers)
    all_read = len(readers) == world_size
    if strategy == "direct" and not all_read:
        missing = next(rank for rank in range(world_size) if rank not in readers)
        host = host_of(hosts[missing])
        raise OptionError(f"strategy='direct': rank {missing} on {host} cannot read the checkpoint")
    if strategy != "auto":
        return StrategyChoice(strategy, "asked for", readers[:1] if strategy == "broadcast" else readers)
    if len(readers) == 1:
        return StrategyChoice("broadcast", f"only rank {readers[0]} can read", readers)
    if not all_read:
        return StrategyChoice(
            "allgather", f"{len(readers)} of {world_size} ranks can read and share the reading", readers
        )
    if shared:
        return StrategyChoice(
            "allgather", "all ranks read through one storage system: each byte is read once", readers
        )
    if fast_links:
        return StrategyChoice("allgather", "the links between devices are faster than any disk", readers)
    if len(set(hosts)) == 1:
        return StrategyChoice(
            "direct", "one host with a local file system: the page cache already reads once", readers
        )
    return StrategyChoice("direct", "each host has the files on a disk of its own", readers)
