"""Which ranks request which bytes of which tensors, the groups that share requests, and their readers. Pure.

A `RankRequest` lists the bytes that one rank requests, compactly, since all ranks exchange theirs.
`SharingGroups` sorts the bytes by the ranks that request them. It cuts each tensor into segments, so that the
same ranks request something throughout a segment. A segment is contiguous in its file. The bytes that a rank
requests of it may be strided; such segments end where rows do.

All segments with the same recipients, in file order, are a sharing group. For storage that reads ahead, all
segments are one group. Tensors of equal length and with equal requests are cut once.
"""

from __future__ import annotations

import json
import zlib
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, islice, pairwise
from math import ceil, lcm
from typing import NamedTuple

import xxhash

from fastload.geometry.box import Runs
from fastload.geometry.ranges import HasRange, Space
from fastload.transfer.messages import Ranks

Part = tuple[Runs, ...]
"""The bytes that a rank requests of one tensor: its boxes, each in row-major order."""

_Columns = tuple["array[int]", "array[int]"]
_LENGTH_BYTES = 8
_INDEX = "I"


@dataclass(frozen=True)
class RankRequest:
    """The bytes that one rank requests.

    Attributes:
        tensors: Indexes of the requested tensors, ascending.
        codes: For each of them, the index in `parts` of its requested bytes.
        parts: The distinct requests for one tensor.
    """

    tensors: array[int]
    codes: array[int]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[int, Part]]) -> RankRequest:
        """Makes a request from indexes of tensors, ascending, each with the requested bytes."""
        numbers: dict[Part, int] = {}
        tensors, codes = array(_INDEX), array(_INDEX)
        for tensor, part in parts:
            tensors.append(tensor)
            codes.append(numbers.setdefault(part, len(numbers)))
        return cls(tensors, codes, tuple(numbers))

    def __iter__(self) -> Iterator[tuple[int, Part]]:
        return ((tensor, self.parts[code]) for tensor, code in zip(self.tensors, self.codes, strict=True))

    @cached_property
    def packed(self) -> bytes:
        """The request as bytes for the other ranks; identical layers compress well."""
        parts = zlib.compress(json.dumps(self.parts).encode(), level=1)
        return len(parts).to_bytes(_LENGTH_BYTES, "little") + parts + self.columns

    @cached_property
    def columns(self) -> bytes:
        """`tensors` and `codes`, packed; equal for ranks that request different parts of the same tensors."""
        return zlib.compress(self._steps().tobytes() + self.codes.tobytes(), level=1)

    @classmethod
    def unpack(
        cls, packed: bytes, known: dict[bytes, tuple[array[int], array[int]]] | None = None
    ) -> RankRequest:
        """Unpacks `packed`.

        Args:
            packed: The request.
            known: Unpacked `columns`, so that requests share equal ones; extended by this call.
        """
        end = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "little")
        parts = tuple(
            tuple(
                Runs(start, length, tuple((count, far) for count, far in steps))
                for start, length, steps in part
            )
            for part in json.loads(zlib.decompress(packed[_LENGTH_BYTES:end]))
        )
        columns, known = packed[end:], {} if known is None else known
        if columns not in known:
            known[columns] = _unpack_columns(columns)
        request = cls(*known[columns], parts)
        request.__dict__.update(packed=packed, columns=columns)
        return request

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the request."""
        return xxhash.xxh3_128_hexdigest(self.packed)

    def _steps(self) -> array[int]:
        """Returns the distance of each tensor from the one before, mostly the same number."""
        before = array(_INDEX, [0, *(tensor + 1 for tensor in self.tensors[:-1])])
        return array(_INDEX, [tensor + 1 - last for tensor, last in zip(self.tensors, before, strict=False)])


def _unpack_columns(columns: bytes) -> _Columns:
    numbers = array(_INDEX)
    numbers.frombytes(zlib.decompress(columns))
    half = len(numbers) // 2
    return array(_INDEX, islice(accumulate(numbers[:half], initial=-1), 1, None)), numbers[half:]


@dataclass(frozen=True)
class RankRequests:
    """The requests of all ranks.

    Attributes:
        distinct: The distinct requests.
        ranks: For each of them, the ranks that make it, ascending.
    """

    distinct: tuple[RankRequest, ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def join(cls, requests: Sequence[RankRequest]) -> RankRequests:
        """Joins the requests of all ranks, in their order."""
        by_digest: dict[str, tuple[RankRequest, list[int]]] = {}
        for rank, request in enumerate(requests):
            by_digest.setdefault(request.digest, (request, []))[1].append(rank)
        distinct, ranks = zip(*by_digest.values(), strict=True)
        return cls(distinct, tuple(map(tuple, ranks)))

    @classmethod
    def unpack(cls, packed: Sequence[bytes]) -> RankRequests:
        """Joins the requests of all ranks, in their order, each as `RankRequest.packed`."""
        columns: dict[bytes, _Columns] = {}
        known = {data: RankRequest.unpack(data, columns) for data in dict.fromkeys(packed)}
        return cls.join([known[data] for data in packed])

    def of(self, rank: int) -> RankRequest:
        """Returns the request of a rank."""
        return next(
            request for request, ranks in zip(self.distinct, self.ranks, strict=True) if rank in ranks
        )

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of all of them."""
        text = json.dumps([[request.digest for request in self.distinct], self.ranks])
        return xxhash.xxh3_128_hexdigest(text.encode())


_ELEMENT_BYTES = 16  # a multiple of the length of an element of any dtype
_LONG_RUN_BYTES = 1 << 20  # strided runs of this length and more are segments of their own


class TensorRange(NamedTuple):
    """A byte range of one tensor.

    Attributes:
        tensor: Index of the tensor.
        begin: First byte in the tensor.
        nbytes: Length in bytes.
    """

    tensor: int
    begin: int
    nbytes: int


class Segment(NamedTuple):
    """A byte range of a tensor, and the ranks that request bytes of it.

    Attributes:
        begin: First byte in the tensor.
        nbytes: Length in bytes.
        group: Number of its sharing group.
        wanted_bytes: Bytes that each set of recipients requests of it.
    """

    begin: int
    nbytes: int
    group: int
    wanted_bytes: dict[Ranks, int]


class Density(NamedTuple):
    """The largest fraction of the bytes read that one set of recipients requests.

    Attributes:
        fraction: 0 to 1, or more if boxes overlap.
        turn_bytes: The most that a chunk may contain beyond it: one turn of a loop of runs.
    """

    fraction: float = 0.0
    turn_bytes: int = 0

    def most(self, nbytes: int) -> int:
        """Returns the most bytes requested of a chunk of this length."""
        return ceil(self.fraction * nbytes) + self.turn_bytes

    def joined(self, other: Density) -> Density:
        """Returns an upper bound of both."""
        return Density(max(self.fraction, other.fraction), max(self.turn_bytes, other.turn_bytes))


class SharingGroups:
    """The requested bytes of a checkpoint, sorted by the ranks that request them.

    Args:
        tensors: All tensors, in the order of their bytes.
        requests: The requests of the ranks.
        block_bytes: Length of the checksum blocks of each tensor, which are not cut; 0 without any.
        contiguous: Whether to make one group of everything, so that each reader reads one range.

    Attributes:
        block_bytes: A multiple of the length of a checksum block; 0 without any.
        unit_bytes: Segments may be cut at multiples of it: between elements, and between checksum blocks.
        nbytes: Length of each group in bytes.
        wanted_bytes: For each group, the bytes that each set of recipients requests.
        densities: For each group, the largest fraction that each set of recipients requests of any part.
        packed: In any group, the largest fraction of a chunk that is packed, for all recipients together.
    """

    def __init__(
        self,
        tensors: Sequence[HasRange],
        requests: RankRequests,
        block_bytes: int,
        *,
        contiguous: bool = False,
    ) -> None:
        self.tensors = tensors
        self.requests = requests
        self.block_bytes = lcm(block_bytes, _ELEMENT_BYTES)
        self.unit_bytes = self.block_bytes or _ELEMENT_BYTES
        self.contiguous = contiguous
        self.nbytes: list[int] = []
        self.wanted_bytes: list[dict[Ranks, int]] = []
        self.densities: list[dict[Ranks, Density]] = []
        self.packed = Density()
        self._numbers: dict[tuple[Ranks, ...], int] = {}
        self._kinds: list[list[Segment]] = []
        self._kind_of: list[int] = []
        self._sort()

    @property
    def total_bytes(self) -> int:
        """Bytes of all groups together."""
        return sum(self.nbytes)

    @cached_property
    def union_bytes(self) -> int:
        """Distinct bytes requested, assuming requests overlap fully or not at all."""
        counts = Counter(self._kind_of)
        return sum(
            counts[kind] * min(nbytes, sum(wanted_bytes.values()))
            for kind, segments in enumerate(self._kinds)
            for _, nbytes, _, wanted_bytes in segments
        )

    @cached_property
    def requesters(self) -> list[list[int]]:
        """The ranks that request bytes of each group, ascending."""
        return [sorted({rank for ranks in wanted for rank in ranks}) for wanted in self.wanted_bytes]

    @cached_property
    def longest_unit_bytes(self) -> int:
        """Length of the longest range that is not cut."""
        return min(self.unit_bytes, max((entry.nbytes for entry in self.tensors), default=0))

    @cached_property
    def longest_units(self) -> list[int]:
        """For each group, the length of the longest range that is not cut."""
        longest = [0] * len(self.nbytes)
        for segments in self._kinds:
            for _, nbytes, group, _ in segments:
                longest[group] = max(longest[group], min(nbytes, self.unit_bytes))
        return longest

    def spaces(self, groups: Collection[int]) -> dict[int, Space[_Placed]]:
        """Returns the segments of some groups, in the order of the checkpoint."""
        chosen = set(groups)
        segments = [[segment for segment in segments if segment.group in chosen] for segments in self._kinds]
        by_group: dict[int, list[_Placed]] = {group: [] for group in groups}
        for tensor, kind in enumerate(self._kind_of):
            for begin, nbytes, group, wanted_bytes in segments[kind]:
                entry = self.tensors[tensor]
                placed = _Placed(entry.file, entry.offset + begin, nbytes, tensor, begin, wanted_bytes)
                by_group[group].append(placed)
        return {group: Space(placed) for group, placed in by_group.items()}

    def _sort(self) -> None:
        with_columns: dict[bytes, list[int]] = {}
        for number, request in enumerate(self.requests.distinct):
            with_columns.setdefault(request.columns, []).append(number)
        requests_of: list[list[int]] = [[] for _ in self.tensors]
        for number, *_ in with_columns.values():
            request = self.requests.distinct[number]
            for tensor, code in zip(request.tensors, request.codes, strict=True):
                requests_of[tensor] += (number, code)
        together = {numbers[0]: numbers for numbers in with_columns.values()}
        kinds: dict[tuple[int, ...], int] = {}
        for entry, columns in zip(self.tensors, requests_of, strict=True):
            key = (entry.nbytes, *columns)
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = len(self._kinds)
                self._kinds.append(self._cut(entry.nbytes, columns, together))
            self._kind_of.append(kind)
        for kind, num_tensors in Counter(self._kind_of).items():
            for _, nbytes, group, wanted_bytes in self._kinds[kind]:
                self.nbytes[group] += num_tensors * nbytes
                of_group = self.wanted_bytes[group]
                for ranks, wanted in wanted_bytes.items():
                    of_group[ranks] = of_group.get(ranks, 0) + num_tensors * wanted

    def _cut(
        self, nbytes: int, columns: Sequence[int], together: Mapping[int, Sequence[int]]
    ) -> list[Segment]:
        """Cuts a tensor.

        Args:
            nbytes: Its length.
            columns: Alternating numbers of requests and their codes for this tensor.
            together: The numbers of all requests with equal columns, by the first of them.
        """
        requests = self.requests
        ranks_of: dict[Part, list[int]] = defaultdict(list)
        for first, code in zip(columns[::2], columns[1::2], strict=True):
            for number in together[first]:
                ranks_of[requests.distinct[number].parts[code]] += requests.ranks[number]
        segments = []
        for begin, end, parts in _segments(nbytes, ranks_of, self.block_bytes):
            group = self._numbers.setdefault(() if self.contiguous else tuple(parts), len(self.nbytes))
            if group == len(self.nbytes):
                self.nbytes.append(0)
                self.wanted_bytes.append({})
                self.densities.append({})
            self._note_density(group, end - begin, parts)
            wanted_bytes = {ranks: _total(part) for ranks, part in parts.items()}
            segments.append(Segment(begin, end - begin, group, wanted_bytes))
        return segments

    def _note_density(self, group: int, nbytes: int, parts: Mapping[Ranks, Part]) -> None:
        """Raises the densities to those of a segment."""
        packed, packed_turn = 0.0, 0
        for ranks, part in parts.items():
            turn = max(runs.total // (runs.steps[0][0] if runs.steps else 1) for runs in part)
            density = Density(_total(part) / nbytes, turn if len(part) > 1 or part[0].steps else 0)
            known = self.densities[group].get(ranks, Density())
            self.densities[group][ranks] = known.joined(density)
            if density.turn_bytes:
                packed += density.fraction
                packed_turn += density.turn_bytes
        self.packed = self.packed.joined(Density(packed, packed_turn))


class _Placed(NamedTuple):
    """A segment of a sharing group, with its place in a file."""

    file: int
    offset: int
    nbytes: int
    tensor: int
    begin: int
    recipients: Mapping[Ranks, int]  # bytes that each set requests of the segment


def _segments(
    nbytes: int, ranks_of: dict[Part, list[int]], block_bytes: int
) -> Iterator[tuple[int, int, dict[Ranks, Part]]]:
    """Yields the segments of a tensor: begin, end, and what each set of recipients requests there."""
    covers = [(part, list(_covers(part, nbytes))) for part in ranks_of]
    cuts = {bound for _, ranges in covers for bounds in ranges for bound in bounds}
    if block_bytes:
        cuts = {bound // block_bytes * block_bytes for bound in cuts} | {
            min(-(-bound // block_bytes) * block_bytes, nbytes) for bound in cuts
        }
    bounds = sorted(cuts)
    within: list[dict[Part, None]] = [{} for _ in bounds]
    for part, ranges in covers:
        for begin, end in ranges:
            first = bisect_left(bounds, begin + 1) - 1
            for index in range(first, bisect_left(bounds, end)):
                within[index][part] = None
    for (begin, end), parts in zip(pairwise(bounds), within, strict=False):
        same: dict[Part, list[int]] = defaultdict(list)
        for part in parts:
            if pieces := _within(part, begin, end):
                same[pieces] += ranks_of[part]
        if same:
            yield begin, end, dict(sorted((tuple(sorted(ranks)), part) for part, ranks in same.items()))


def _covers(part: Part, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of a tensor, in complete rows, that contain all requested bytes."""
    for runs in part:
        if runs.length >= _LONG_RUN_BYTES or not runs.steps:
            yield from ((start, start + runs.length) for start in runs.starts())
        else:
            row = runs.stride
            yield runs.start // row * row, min(-(-runs.end // row) * row, nbytes)


def _total(part: Part) -> int:
    return sum(runs.total for runs in part)


def _within(part: Part, begin: int, end: int) -> Part:
    """Returns the bytes of a part that lie in a range."""
    return tuple(piece for runs in part for piece in runs.cut(runs.before(begin), runs.before(end)))


# Shares of readers, by bytes

_UNIT_BYTES = 4096  # shares begin at multiples of it in their group
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # of 64 bits: its multiples spread neighbours, and equal distances
_SLACK_BYTES = 1 << 20  # a reader may read that much more than the mean to avoid sending


@dataclass(frozen=True, slots=True)
class Share:
    """A byte range of a sharing group that one rank reads.

    Attributes:
        group: Number of the group.
        reader: The rank.
        begin: First byte in the group.
        end: The byte after the last one in the group.
        start: Bytes that the rank reads before, of this group and others.
    """

    group: int
    reader: int
    begin: int
    end: int
    start: int


def deal(
    ranges: Sequence[Sequence[tuple[int, int]]],
    requesters: Sequence[Sequence[int]],
    readers: Sequence[int],
    suppliers: Sequence[Sequence[int]] | None = None,
) -> list[Share]:
    """Deals the bytes of groups to readers.

    Args:
        ranges: For each group, (begin, end) of the ranges to read.
        requesters: For each group, the ranks that request it, ascending.
        readers: The ranks that can read, ascending; at least one.
        suppliers: For each group, the readers that can read it, ascending; None if each can read all.

    Returns:
        The shares in the order in which each reader reads, group by group. All readers begin with the groups
        of the fewest ranks, since a rank that gets everything from one reader and parts from the others at
        the same time gets more than its link takes. Of these each begins with another one: else all would
        send to the same ranks at the same time.
    """
    totals = [sum(end - begin for begin, end in of_group) for of_group in ranges]
    cap = -(-sum(totals) // len(readers)) + _SLACK_BYTES
    loads = dict.fromkeys(readers, 0)
    quotas: list[dict[int, int]] = [{} for _ in totals]
    can_read = [readers] * len(totals) if suppliers is None else suppliers
    able = [
        [rank for rank in ranks if rank in loads and (suppliers is None or rank in can_read[group])]
        for group, ranks in enumerate(requesters)
    ]
    # Groups with the fewest candidate readers first; the rest balance the load.
    for group in sorted(range(len(totals)), key=lambda group: (len(able[group]), group)):
        _raise_level(loads, able[group], totals[group], cap, quotas[group])
    for group in sorted(range(len(totals)), key=lambda group: (len(can_read[group]), group)):
        left = totals[group] - sum(quotas[group].values())
        _raise_level(loads, can_read[group], left, sum(totals) + cap, quotas[group])
    of_reader: dict[int, list[tuple[int, int, int]]] = {reader: [] for reader in readers}
    by_num_ranks = sorted(range(len(totals)), key=lambda group: (len(requesters[group]), group))
    for group in by_num_ranks:
        for reader, begin, end in _cut(ranges[group], _bounds(quotas[group], totals[group])):
            of_reader[reader].append((group, begin, end))
    shares = []
    turns = sorted(range(len(readers)), key=lambda index: index * _GOLDEN_RATIO % (1 << 64))
    turn_of = dict(zip(turns, range(len(readers)), strict=True))
    for index, (reader, cut) in enumerate(of_reader.items()):
        start = 0
        for _, of_size in groupby(cut, lambda share: len(requesters[share[0]])):
            for group, begin, end in _rotated(list(of_size), turn_of[index], len(readers)):
                shares.append(Share(group, reader, begin, end, start))
                start += end - begin
    return shares


def _rotated(shares: list[tuple[int, int, int]], turn: int, num_readers: int) -> list[tuple[int, int, int]]:
    """Returns (group, begin, end) of the shares of a reader, beginning with a byte in proportion to its turn.

    So of all readers that have little to read of a group, few do so at a time.
    """
    left = sum(end - begin for _, begin, end in shares) * turn // num_readers
    if len(shares) < 2:
        return shares
    for at, (group, begin, end) in enumerate(shares):
        if left < end - begin:
            middle = begin + left // _UNIT_BYTES * _UNIT_BYTES
            head = [(group, begin, middle)] if begin < middle else []
            return [(group, middle, end), *shares[at + 1 :], *shares[:at], *head]
        left -= end - begin
    return shares


def _raise_level(
    loads: dict[int, int], ranks: Sequence[int], nbytes: int, cap: int, quota: dict[int, int]
) -> None:
    """Gives bytes to the ranks with the least, until all are dealt or each rank has `cap`."""
    if not nbytes or not ranks:
        return
    lowest = sorted(ranks, key=lambda rank: (loads[rank], rank))
    total, level, count = 0, 0, 0
    for count, rank in enumerate(lowest, 1):
        total += loads[rank]
        level = -(-(total + nbytes) // count)
        if count == len(lowest) or level <= loads[lowest[count]]:
            break
    for rank in lowest[:count]:
        given = max(0, min(min(level, cap) - loads[rank], nbytes))
        if given:
            loads[rank] += given
            quota[rank] = quota.get(rank, 0) + given
            nbytes -= given


def _bounds(quota: dict[int, int], total: int) -> list[tuple[int, int]]:
    """Returns the readers of a group, ascending, each with the end of its range."""
    bounds, end = [], 0
    for reader in sorted(quota):
        end += quota[reader]
        bounds.append((reader, end if end == total else end // _UNIT_BYTES * _UNIT_BYTES))
    return bounds


def _cut(ranges: Sequence[tuple[int, int]], bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Returns (reader, begin, end) of the ranges laid end to end and cut at bounds."""
    cut, position, rest = [], 0, iter(bounds)
    reader, until = next(rest, (-1, 0))
    for begin, end in ranges:
        while begin < end:
            while position == until:
                reader, until = next(rest)
            taken = min(end - begin, until - position)
            cut.append((reader, begin, begin + taken))
            begin += taken
            position += taken
    return cut
