"""Which ranks want which bytes of which tensors, and the groups that want the same. Pure.

A rank's `Claim` lists the bytes that it wants, compactly, since all ranks tell each other. `Lanes` sorts the
bytes by who wants them: a tensor is cut into segments, within each of which the same groups of ranks want
something. A segment is contiguous in its file; what a group wants of it may be strided, and then segments end
where rows do. All segments with the same groups, in file order, are a lane; for storage that reads ahead, all
segments are one. Tensors of one length of which the same ranks want the same are cut once.
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
from itertools import accumulate, islice, pairwise
from math import ceil, lcm
from typing import NamedTuple

import xxhash

from fastload.geometry.box import Runs
from fastload.geometry.extents import HasExtent, Space
from fastload.transfer.message import Ranks

Part = tuple[Runs, ...]
"""What a rank wants of one tensor: the bytes of its boxes there, each in row-major order."""

_LENGTH_BYTES = 8
_INDEX = "I"


@dataclass(frozen=True)
class Claim:
    """What one rank wants.

    Attributes:
        tensors: Indexes of the tensors that it wants anything of, ascending.
        codes: For each of these, which of `parts` it wants of it.
        parts: What it wants of one tensor or another, without repetitions.
    """

    tensors: array[int]
    codes: array[int]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, wants: Iterable[tuple[int, Part]]) -> Claim:
        """Makes a claim.

        Args:
            wants: Indexes of tensors, ascending, each with what is wanted of it.
        """
        numbers: dict[Part, int] = {}
        tensors, codes = array(_INDEX), array(_INDEX)
        for tensor, part in wants:
            tensors.append(tensor)
            codes.append(numbers.setdefault(part, len(numbers)))
        return cls(tensors, codes, tuple(numbers))

    def __iter__(self) -> Iterator[tuple[int, Part]]:
        return ((tensor, self.parts[code]) for tensor, code in zip(self.tensors, self.codes, strict=True))

    @cached_property
    def packed(self) -> bytes:
        """The claim, to be sent to other ranks: layers that are alike compress well."""
        parts = zlib.compress(json.dumps(self.parts).encode(), level=1)
        return len(parts).to_bytes(_LENGTH_BYTES, "little") + parts + self.columns

    @cached_property
    def columns(self) -> bytes:
        """`tensors` and `codes`, packed: the same for ranks that want other parts of the same tensors."""
        return zlib.compress(self._steps().tobytes() + self.codes.tobytes(), level=1)

    @classmethod
    def unpack(cls, packed: bytes, known: dict[bytes, tuple[array[int], array[int]]] | None = None) -> Claim:
        """Reads what is in `packed`.

        Args:
            packed: The claim.
            known: What `columns` were found to be, so that claims share those that are equal.
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
        claim = cls(*known[columns], parts)
        claim.__dict__.update(packed=packed, columns=columns)
        return claim

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the claim."""
        return xxhash.xxh3_128_hexdigest(self.packed)

    def _steps(self) -> array[int]:
        """Returns how far each tensor is from the one before: mostly the same."""
        before = array(_INDEX, [0, *(tensor + 1 for tensor in self.tensors[:-1])])
        return array(_INDEX, [tensor + 1 - last for tensor, last in zip(self.tensors, before, strict=False)])


def _unpack_columns(columns: bytes) -> tuple[array[int], array[int]]:
    numbers = array(_INDEX)
    numbers.frombytes(zlib.decompress(columns))
    half = len(numbers) // 2
    return array(_INDEX, islice(accumulate(numbers[:half], initial=-1), 1, None)), numbers[half:]


@dataclass(frozen=True)
class Claims:
    """What all ranks want.

    Attributes:
        distinct: The claims that differ.
        ranks: For each of these, the ranks that make it, ascending.
    """

    distinct: tuple[Claim, ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def join(cls, claims: Sequence[Claim]) -> Claims:
        """Joins the claims of ranks 0, 1, …: those that are equal need not be the same object."""
        found: dict[str, tuple[Claim, list[int]]] = {}
        for rank, claim in enumerate(claims):
            found.setdefault(claim.digest, (claim, []))[1].append(rank)
        distinct, ranks = zip(*found.values(), strict=True)
        return cls(distinct, tuple(map(tuple, ranks)))

    @classmethod
    def unpack(cls, packed: Sequence[bytes]) -> Claims:
        """Joins the claims of ranks 0, 1, …, each as `Claim.packed`."""
        columns: dict[bytes, tuple[array[int], array[int]]] = {}
        known = {data: Claim.unpack(data, columns) for data in dict.fromkeys(packed)}
        return cls.join([known[data] for data in packed])

    def of(self, rank: int) -> Claim:
        """Returns the claim of a rank."""
        return next(claim for claim, ranks in zip(self.distinct, self.ranks, strict=True) if rank in ranks)

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of all of them."""
        text = json.dumps([[claim.digest for claim in self.distinct], self.ranks])
        return xxhash.xxh3_128_hexdigest(text.encode())


_ELEMENT_BYTES = 16  # a multiple of the length of an element of any dtype
_LONG_RUN_BYTES = 1 << 20  # strided runs of at least that are read one by one, each by who wants it


class Stretch(NamedTuple):
    """A range of one tensor.

    Attributes:
        tensor: Index of the tensor.
        begin: First byte in the tensor.
        nbytes: Length in bytes.
    """

    tensor: int
    begin: int
    nbytes: int


class Segment(NamedTuple):
    """A part of a tensor, and who wants what of it.

    Attributes:
        begin: First byte in the tensor.
        nbytes: Length in bytes.
        lane: Number of the lane it is in.
        wanted_bytes: How many bytes each group of ranks wants of it.
    """

    begin: int
    nbytes: int
    lane: int
    wanted_bytes: dict[Ranks, int]


class Density(NamedTuple):
    """How much of what is read somebody wants, at most.

    Attributes:
        part: Of each byte.
        turn_bytes: What a chunk that begins where that is may have more: one turn of a loop of runs.
    """

    part: float = 0.0
    turn_bytes: int = 0

    def most(self, nbytes: int) -> int:
        """Returns how many bytes that are of a chunk, at most."""
        return ceil(self.part * nbytes) + self.turn_bytes

    def joined(self, other: Density) -> Density:
        """Returns the most of either."""
        return Density(max(self.part, other.part), max(self.turn_bytes, other.turn_bytes))


class Lanes:
    """The wanted bytes of a checkpoint, sorted by who wants them.

    Args:
        tensors: All tensors, in the order of their bytes.
        claims: What the ranks want of them.
        block_bytes: Length of the checksum blocks of each tensor, which are not cut; 0 if there are none.
        contiguous: Whether all of it is to be one lane, so that each reader reads one range.

    Attributes:
        unit_bytes: Segments may be cut at multiples of it: between elements, and between checksum blocks.
        nbytes: Length of each lane, in bytes: what has to be read.
        wanted_bytes: Of each lane, how many bytes each group of ranks wants.
        densities: Of each lane, how much of it that is anywhere in it, at most.
        packed: Of all lanes, how much of a chunk is packed, for all groups together.
    """

    def __init__(
        self, tensors: Sequence[HasExtent], claims: Claims, block_bytes: int, *, contiguous: bool = False
    ) -> None:
        self.tensors = tensors
        self.claims = claims
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
        """Bytes of all lanes together."""
        return sum(self.nbytes)

    @cached_property
    def union_bytes(self) -> int:
        """Bytes that any rank wants, of ranks that want nothing in common but what they want alike."""
        counts = Counter(self._kind_of)
        return sum(
            counts[kind] * min(nbytes, sum(wanted_bytes.values()))
            for kind, segments in enumerate(self._kinds)
            for _, nbytes, _, wanted_bytes in segments
        )

    @cached_property
    def wanters(self) -> list[list[int]]:
        """Who wants the bytes of each lane, or some of them, ascending."""
        return [sorted({rank for ranks in groups for rank in ranks}) for groups in self.wanted_bytes]

    @cached_property
    def longest_unit_bytes(self) -> int:
        """Length of the longest range that is not cut."""
        return min(self.unit_bytes, max((entry.nbytes for entry in self.tensors), default=0))

    def spaces(self, lanes: Collection[int]) -> dict[int, Space[_Placed]]:
        """Returns what some lanes are made of, in the order of the checkpoint."""
        chosen = set(lanes)
        segments = [[segment for segment in segments if segment.lane in chosen] for segments in self._kinds]
        found: dict[int, list[_Placed]] = {lane: [] for lane in lanes}
        for tensor, kind in enumerate(self._kind_of):
            for begin, nbytes, lane, wanted_bytes in segments[kind]:
                entry = self.tensors[tensor]
                placed = _Placed(entry.file, entry.offset + begin, nbytes, tensor, begin, wanted_bytes)
                found[lane].append(placed)
        return {lane: Space(placed) for lane, placed in found.items()}

    def _sort(self) -> None:
        alike: dict[bytes, list[int]] = {}
        for number, claim in enumerate(self.claims.distinct):
            alike.setdefault(claim.columns, []).append(number)
        wanting: list[list[int]] = [[] for _ in self.tensors]
        for number, *_ in alike.values():
            claim = self.claims.distinct[number]
            for tensor, code in zip(claim.tensors, claim.codes, strict=True):
                wanting[tensor] += (number, code)
        together = {numbers[0]: numbers for numbers in alike.values()}
        kinds: dict[tuple[int, ...], int] = {}
        for entry, columns in zip(self.tensors, wanting, strict=True):
            key = (entry.nbytes, *columns)
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = len(self._kinds)
                self._kinds.append(self._cut(entry.nbytes, columns, together))
            self._kind_of.append(kind)
        for kind, num_tensors in Counter(self._kind_of).items():
            for _, nbytes, lane, wanted_bytes in self._kinds[kind]:
                self.nbytes[lane] += num_tensors * nbytes
                in_lane = self.wanted_bytes[lane]
                for ranks, wanted in wanted_bytes.items():
                    in_lane[ranks] = in_lane.get(ranks, 0) + num_tensors * wanted

    def _cut(
        self, nbytes: int, columns: Sequence[int], together: Mapping[int, Sequence[int]]
    ) -> list[Segment]:
        """Cuts a tensor.

        Args:
            nbytes: Its length.
            columns: The number of a claim, and its code there, by turns.
            together: The numbers of all claims that have the same columns, by that of the first of them.
        """
        claims = self.claims
        wanting: dict[Part, list[int]] = defaultdict(list)
        for first, code in zip(columns[::2], columns[1::2], strict=True):
            for number in together[first]:
                wanting[claims.distinct[number].parts[code]] += claims.ranks[number]
        segments = []
        for begin, end, groups in _segments(nbytes, wanting, self.block_bytes):
            lane = self._numbers.setdefault(() if self.contiguous else tuple(groups), len(self.nbytes))
            if lane == len(self.nbytes):
                self.nbytes.append(0)
                self.wanted_bytes.append({})
                self.densities.append({})
            self._thicken(lane, end - begin, groups)
            wanted_bytes = {ranks: _total(part) for ranks, part in groups.items()}
            segments.append(Segment(begin, end - begin, lane, wanted_bytes))
        return segments

    def _thicken(self, lane: int, nbytes: int, groups: Mapping[Ranks, Part]) -> None:
        """Notes how much the groups of a segment want of it."""
        packed_part, packed_turn = 0.0, 0
        for ranks, part in groups.items():
            turn = max(runs.total // (runs.steps[0][0] if runs.steps else 1) for runs in part)
            density = Density(_total(part) / nbytes, turn if len(part) > 1 or part[0].steps else 0)
            known = self.densities[lane].get(ranks, Density())
            self.densities[lane][ranks] = known.joined(density)
            if density.turn_bytes:
                packed_part += density.part
                packed_turn += density.turn_bytes
        self.packed = self.packed.joined(Density(packed_part, packed_turn))


class _Placed(NamedTuple):
    """A segment of a lane, and where it lies."""

    file: int
    offset: int
    nbytes: int
    tensor: int
    begin: int
    groups: Collection[Ranks]


def _segments(
    nbytes: int, wanting: dict[Part, list[int]], block_bytes: int
) -> Iterator[tuple[int, int, dict[Ranks, Part]]]:
    """Yields where a tensor is to be cut, and what each group wants there; not what nobody wants."""
    covers = [(part, list(_covers(part, nbytes))) for part in wanting]
    cuts = {bound for _, ranges in covers for extent in ranges for bound in extent}
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
                same[pieces] += wanting[part]
        if same:
            yield begin, end, dict(sorted((tuple(sorted(ranks)), part) for part, ranks in same.items()))


def _covers(part: Part, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of a tensor, in whole rows, that have all that is wanted of it."""
    for runs in part:
        if runs.length >= _LONG_RUN_BYTES or not runs.steps:
            yield from ((start, start + runs.length) for start in runs.starts())
        else:
            row = runs.stride
            yield runs.start // row * row, min(-(-runs.end // row) * row, nbytes)


def _total(part: Part) -> int:
    return sum(runs.total for runs in part)


def _within(part: Part, begin: int, end: int) -> Part:
    """Returns what a part has in a range."""
    return tuple(piece for runs in part for piece in runs.cut(runs.before(begin), runs.before(end)))
