"""The most bytes that a rank needs for a round of a `RoutedPlan`, and the sizes of its chunks and buffers.

In a large job every rank may receive from every reader. So the bytes are computed on vectors, of integers and
of fractions with 64 bits, which are equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import OptionError
from fastload.options import named_staging
from fastload.transfer.demand import Density, Share, SharingGroups
from fastload.transfer.messages import Ranks
from fastload.transfer.plan import MAX_DEPTH, named_chunk

_LEAST_CHUNK_BYTES = 64 << 10  # below, fewer rounds are in flight


class RoundBytes:
    """The most bytes that a rank needs for a round, by length of a chunk.

    Args:
        sharing: The requested bytes.
        shares: The reader of each of them.
    """

    def __init__(self, sharing: SharingGroups, shares: Sequence[Share]) -> None:
        self._sharing = sharing
        self._shares = shares
        sent = _sent_of_segments(sharing, shares) if sharing.contiguous else _sent_of_groups(sharing, shares)
        ranks_with_own = {ranks[0] for ranks in sharing.requests.ranks}  # one of each distinct request
        self._sent_to: dict[int, list[tuple[_Sent, int]]] = {rank: [] for rank in ranks_with_own}
        for each in sent:
            for ranks, wanted_bytes in each.wanted_bytes.items():
                for rank in ranks_with_own.intersection(ranks):
                    self._sent_to[rank].append((each, wanted_bytes))
        self._suppliers = [_Suppliers.of([each for each, _ in of_rank]) for of_rank in self._sent_to.values()]
        self._known: dict[int, int] = {}

    def bytes(self, chunk_bytes: int) -> int:
        """Returns the bytes that a rank reads, packs and receives in a round, if all readers send at once."""
        if chunk_bytes not in self._known:
            longest = chunk_bytes + self._sharing.longest_unit_bytes
            received = max((one.most(longest) for one in self._suppliers), default=0)
            self._known[chunk_bytes] = self._with_own(longest, received)
        return self._known[chunk_bytes]

    def bytes_in_rounds(self, chunk_bytes: int) -> int:
        """As `bytes`, but by the round in which each share is read; takes longer.

        Readers of a large job send to a rank at different times.
        """
        longest = chunk_bytes + self._sharing.longest_unit_bytes
        num_rounds = max((-(-_end_of(share) // chunk_bytes) for share in self._shares), default=0)
        by_round: dict[int, Tensor] = {}
        most = 0
        for sent in self._sent_to.values():
            received = torch.zeros(num_rounds + 1, dtype=torch.int64)
            for each, wanted_bytes in sent:
                if id(each) not in by_round:
                    by_round[id(each)] = each.by_round(chunk_bytes, longest, num_rounds)
                received += by_round[id(each)].clamp(max=wanted_bytes)  # of all rounds together
            most = max(most, int(received.max()))
        return self._with_own(longest, most)

    def _with_own(self, longest: int, received: int) -> int:
        parts = (longest, self._sharing.packed.most(longest), received)
        return sum(round_up(part, PAGE_BYTES) for part in parts)

    def fitting(self, chunk_bytes: int, staging_bytes: int) -> int:
        """Returns the longest chunk, up to a length, of which several rounds fit, or else one."""
        while chunk_bytes > _LEAST_CHUNK_BYTES and MAX_DEPTH * self.bytes(chunk_bytes) > staging_bytes:
            chunk_bytes = round_up(chunk_bytes // 2, PAGE_BYTES)
        while chunk_bytes > PAGE_BYTES and self.bytes(chunk_bytes) > staging_bytes:
            chunk_bytes = round_up(chunk_bytes // 2, PAGE_BYTES)
        return max(chunk_bytes, self._sharing.longest_unit_bytes)

    def sizes(
        self, chunk_bytes: int, staging_bytes: int, *, is_given: bool = False
    ) -> tuple[int, int, int, int]:
        """Returns chunk_bytes, depth, buffer_bytes and staging_bytes of a plan.

        Args:
            chunk_bytes: Length of a chunk.
            staging_bytes: Most bytes for all buffers of one rank together.
            is_given: Whether the user chose the length.

        Raises:
            OptionError: Not even one round fits.
        """
        buffer_bytes = self.bytes(chunk_bytes)
        if MAX_DEPTH * buffer_bytes > staging_bytes:
            buffer_bytes = self.bytes_in_rounds(chunk_bytes)
        depth = min(MAX_DEPTH, staging_bytes // buffer_bytes)
        if depth < 1:
            blocks, num_readers = self._sharing.block_bytes, max(map(len, self._suppliers), default=0)
            why = f" (checksum blocks have {blocks}: verify=False reads without)" if blocks else ""
            cause = f"what comes from {num_readers} readers at once"
            cause = named_chunk(chunk_bytes, cause, is_given=is_given)
            raise OptionError(f"{cause} does not fit into {named_staging(staging_bytes)}{why}")
        return chunk_bytes, depth, buffer_bytes, staging_bytes


class _SentRange(NamedTuple):
    """The bytes of a share that some ranks receive.

    Attributes:
        share: The share.
        begin: First of them in the group.
        end: The byte after the last one.
        density: The largest fraction of them that the ranks request.
    """

    share: Share
    begin: int
    end: int
    density: Density


@dataclass(frozen=True)
class _Sent:
    """Bytes of a sharing group that some sets of ranks receive in equal parts.

    Attributes:
        wanted_bytes: For each of the sets, the bytes that it requests of the group.
        ranges: The bytes that are read for them.
        unit_bytes: Length of the longest range of the group that is not cut.
    """

    wanted_bytes: Mapping[Ranks, int]
    ranges: Sequence[_SentRange]
    unit_bytes: int

    @cached_property
    def by_reader(self) -> tuple[Tensor, Tensor, Density]:
        """The readers, the bytes that each reads, and the largest density."""
        nbytes: dict[int, int] = {}
        for share, begin, end, _ in self.ranges:
            nbytes[share.reader] = nbytes.get(share.reader, 0) + end - begin
        density = reduce(Density.joined, (each.density for each in self.ranges))
        return torch.tensor(list(nbytes)), torch.tensor(list(nbytes.values())), density

    @property
    def last_reader(self) -> int:
        """The highest of the readers."""
        return int(self.by_reader[0].max())

    def by_round(self, chunk_bytes: int, longest: int, num_rounds: int) -> Tensor:
        """Returns the most bytes that a rank receives in each round."""
        change = [0] * (num_rounds + 1)
        for share, begin, end, density in self.ranges:
            # Reads begin and end where the group may be cut, up to a unit before.
            begin, end = begin - share.begin, min(end + self.unit_bytes, share.end) - share.begin
            for first, last, nbytes in _rounds_of(share.start + begin, share.start + end, chunk_bytes):
                received = _most(min(nbytes + self.unit_bytes, longest), density)
                change[first] += received
                change[last + 1] -= received
        return torch.tensor(change, dtype=torch.int64).cumsum(0)


def _sent_of_groups(sharing: SharingGroups, shares: Sequence[Share]) -> Iterator[_Sent]:
    """Yields what is sent of groups whose ranks request something of every segment."""
    of_group: dict[int, list[Share]] = defaultdict(list)
    for share in shares:
        of_group[share.group].append(share)
    for group, of_shares in of_group.items():
        by_density: dict[Density, dict[Ranks, int]] = defaultdict(dict)
        for ranks, density in sharing.densities[group].items():
            by_density[density][ranks] = sharing.wanted_bytes[group][ranks]
        for density, wanted_bytes in by_density.items():
            ranges = [_SentRange(share, share.begin, share.end, density) for share in of_shares]
            yield _Sent(wanted_bytes, ranges, sharing.longest_units[group])


def _sent_of_segments(sharing: SharingGroups, shares: Sequence[Share]) -> Iterator[_Sent]:
    """Yields what is sent of groups in which other ranks request each segment."""
    spaces = sharing.spaces(range(len(sharing.nbytes)))
    found: dict[tuple[int, Ranks], dict[int, _SentRange]] = defaultdict(dict)
    for number, share in enumerate(shares):
        space, densities = spaces[share.group], sharing.densities[share.group]
        for at, first, last in space.cut(share.begin, share.end - share.begin):
            placed, start = space.ranges[at], space.starts[at]
            for ranks, wanted_bytes in placed.recipients.items():
                density = Density(wanted_bytes / placed.nbytes, densities[ranks].turn_bytes)
                of_ranks = found[share.group, ranks]
                before = of_ranks.get(number)
                begin = start + first if before is None else before.begin
                density = density if before is None else density.joined(before.density)
                of_ranks[number] = _SentRange(share, begin, start + last, density)
    for (group, ranks), ranges in found.items():
        wanted = {ranks: sharing.wanted_bytes[group][ranks]}
        yield _Sent(wanted, list(ranges.values()), sharing.longest_units[group])


@dataclass(frozen=True)
class _Suppliers:
    """The readers that send to a rank.

    Attributes:
        nbytes: For each, the bytes that it reads for the rank, and for others beside it.
        fractions: For each, the largest fraction of them that the rank requests.
        turns: For each, the `Density.turn_bytes`.
    """

    nbytes: Tensor
    fractions: Tensor
    turns: Tensor

    @classmethod
    def of(cls, sent: Sequence[_Sent]) -> _Suppliers:
        """Joins what each reader sends."""
        size = 1 + max((each.last_reader for each in sent), default=-1)
        nbytes, turns = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        fractions = torch.zeros(size, dtype=torch.float64)
        for each in sent:
            readers, of_readers, density = each.by_reader
            nbytes[readers] += of_readers
            fractions[readers] = fractions[readers].clamp(min=density.fraction)
            turns[readers] = turns[readers].clamp(min=density.turn_bytes)
        supplies = nbytes > 0
        return cls(nbytes[supplies], fractions[supplies], turns[supplies])

    def __len__(self) -> int:
        return len(self.nbytes)

    def most(self, chunk_bytes: int) -> int:
        """Returns the most bytes of a chunk of each; more than a chunk if boxes overlap. See `_most`."""
        nbytes = self.nbytes.clamp(max=chunk_bytes)
        whole = (self.fractions.clamp(min=1.0) * nbytes).ceil().long()
        part = (self.fractions * nbytes).ceil().long() + self.turns
        return int(torch.minimum(whole, part).sum())


def _most(nbytes: int, density: Density) -> int:
    """Returns the most bytes that a rank receives of this many."""
    return min(ceil(max(density.fraction, 1.0) * nbytes), density.most(nbytes))


def _end_of(share: Share) -> int:
    """Returns where a share ends among all bytes of its reader."""
    return share.start + share.end - share.begin


def _rounds_of(begin: int, end: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields first round, last round, and the bytes that are read of a range in each of these.

    Args:
        begin: Bytes that the reader reads before.
        end: The same with the range.
        chunk_bytes: Length of a chunk.
    """
    first, last = begin // chunk_bytes, (end - 1) // chunk_bytes
    if first >= last:
        if begin < end:
            yield first, last, end - begin
        return
    yield first, first, (first + 1) * chunk_bytes - begin
    if first + 1 < last:
        yield first + 1, last - 1, chunk_bytes
    yield last, last, end - last * chunk_bytes
