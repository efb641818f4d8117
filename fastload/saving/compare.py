"""Comparison of the states that the ranks are about to save.

The agreement before a save has digests of structure, layout, and small tensors in host memory. Only if these
differ, the ranks look for the places. Of tensors on accelerators the devices compute digests during the save.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from fastload.base.memory import allocate_staging, host_bytes, host_view
from fastload.base.registry import extension
from fastload.comm.world import World
from fastload.errors import PlanMismatch, ReplicaMismatch, some_of
from fastload.formats.dtypes import DTYPES, torch_spec
from fastload.formats.state import SavedTensor, children, leaf
from fastload.formats.values import Attribute, decode_value, show_key, show_path
from fastload.geometry.dtensors import is_sharded
from fastload.saving.layout import Layout, TensorSpec
from fastload.saving.messages import ShardRange
from fastload.saving.reader import StateReader
from fastload.saving.shard_map import MappedShard, ShardMap, described_part

_BUFFER_BYTES = 8 << 20  # copied and hashed at once
_DIGEST_BYTES = 8
_UNKNOWN = bytes(_DIGEST_BYTES)  # of a shard that was not hashed
_Replica = tuple[int, MappedShard]  # number of the tensor, and the shard
_MAX_NUM = 1024  # a few milliseconds
_MAX_BYTES = 64 << 10  # of one tensor
_MAX_BYTES_OF_ALL = 4 << 20
_SAMPLE_PART = 128  # of a large shard, for all of its holders together, one in so many bytes is compared
_LEAST_SAMPLE_BYTES, _MOST_SAMPLE_BYTES = 16, 1 << 20
_ALIGN_BYTES = 16  # of ranges on devices: between elements of any dtype
_READS_ON_DEVICE = 8  # of a large shard, for each byte of a holder's even share
_ODD_NUMBER, _64_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # the golden ratio spreads numbers evenly
_MAX_SHOWN_BYTES = 32
_NUM_SHOWN = 20
_NUM_OF_A_LIST = 3
_NUMBERS = {"BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"}
_HINT = "What each rank has of its own goes into a fastload.PerRank."
_HOW_TO_MERGE = "Parts of one state, such as the stages of a pipeline: SaveOptions(parts=True) merges them."
HOW_TO_ALIGN = (
    "Buffers of a model, such as the running statistics of BatchNorm under DDP, are made equal before a save "
    "by dist.broadcast(buffer, 0)."
)
_HOW_NOT_TO = "With check_replicas='off' tensors are not compared, and a mixture of all ranks' is saved."


def small_tensors(
    specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], starts: Sequence[int]
) -> dict[str, bytes]:
    """Returns the bytes of tiny tensors in host memory, and digests of other small ones, by name.

    It takes a few milliseconds, whatever the number of tensors: only some at the beginning and the end of
    each entry of the state are chosen, since differences within a model are rare.

    Args:
        specs: All tensors.
        tensors: The same tensors, by name.
        starts: The number of the first tensor of each entry.
    """
    values, left = {}, _MAX_BYTES_OF_ALL
    for number in _evenly_chosen(starts, len(specs)):
        spec = specs[number]
        tensor = tensors[spec.name]
        if not is_sharded(tensor) and tensor.is_cpu and spec.nbytes <= min(left, _MAX_BYTES):
            data = host_bytes(tensor)
            values[spec.name] = data if spec.nbytes <= _MAX_SHOWN_BYTES else xxhash.xxh3_64_digest(data)
            left -= spec.nbytes
    return values


def _evenly_chosen(starts: Sequence[int], num: int) -> Iterator[int]:
    """Yields numbers of tensors from the beginning and the end of each entry."""
    bounds = sorted({0, *starts, num}) if len(starts) < _MAX_NUM else [0, num]
    most = _MAX_NUM // max(1, len(bounds) - 1)
    for begin, end in pairwise(bounds):
        if end - begin <= most:
            yield from range(begin, end)
        else:
            yield from range(begin, begin + (most + 1) // 2)
            yield from range(end - most // 2, end)


@dataclass(frozen=True)
class StateContent:
    """The parts of a rank's state that the ranks compare.

    Attributes:
        structure: The state without its tensors.
        layout: Digest of the layout.
        specs: Its tensors.
        small: Bytes or digests of some small tensors, by name.
    """

    structure: Any
    layout: str
    specs: Sequence[TensorSpec]
    small: Mapping[str, bytes]

    @cached_property
    def form(self) -> str:
        """Digest of structure and layout."""
        form = json.dumps([self.structure, self.layout], separators=(",", ":")).encode()
        return xxhash.xxh3_128_hexdigest(form)

    def digests(self) -> list[str]:
        """Returns digests of structure and layout, and of the small tensors."""
        small = b"".join([*map(str.encode, self.small), *self.small.values()])
        return [self.form, xxhash.xxh3_128_hexdigest(small)]

    def to_bytes(self) -> bytes:
        """Packs it for other ranks."""
        small = {name: data.hex() for name, data in self.small.items()}
        text = json.dumps([self.structure, self.layout, self.specs, small])
        return zlib.compress(text.encode(), level=1)

    @classmethod
    def from_bytes(cls, packed: bytes) -> StateContent:
        """Unpacks the result of `to_bytes`."""
        structure, layout, specs, small = json.loads(zlib.decompress(packed))
        data = {name: bytes.fromhex(text) for name, text in small.items()}
        return cls(structure, layout, [TensorSpec(*spec) for spec in specs], data)


def require_same_content(
    world: World, what: str, content: StateContent, digests: Sequence[Sequence[str]]
) -> None:
    """Checks that all ranks are about to save the same.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        content: This rank's content.
        digests: The `StateContent.digests` of each rank.

    Raises:
        PlanMismatch: Plain values, names, dtypes or shapes differ; names the places and the values.
        ReplicaMismatch: Only values of tensors differ.
        PeerError: Some rank failed.
    """
    if all(of_rank == digests[0] for of_rank in digests):
        return
    with world.step(what) as sending:
        if world.rank == 0:
            sending.answer(attach=content.to_bytes())
    with world.step(what) as step:
        step.answer(_differing_places(StateContent.from_bytes(sending.attachment), content))
    differences = step.answers
    has_one_form = all(form == digests[0][0] for form, _ in digests)
    places: dict[str, list[str]] = {}
    for rank, (_, few) in enumerate(differences):
        for place, there, here in few:
            places.setdefault(place, [f"rank 0 {there}"]).append(f"rank {rank} {here}")
    if has_one_form and not places:
        return  # on some ranks the tensors are not in host memory
    lines = [f"  {place}: {some_of(texts)}" for place, texts in islice(places.items(), _NUM_SHOWN)]
    more = max(len(places), *(count for count, _ in differences)) - len(lines)
    lines += [f"  and at least {more} more"] if more > 0 else []
    if has_one_form:
        head = "the ranks hold different tensors, so nothing was saved:"
        raise ReplicaMismatch("\n".join([head, *lines, f"{_HINT} {HOW_TO_ALIGN} {_HOW_NOT_TO}"]))
    head = "the ranks hold different states, so nothing was saved:"
    is_partial = any(text.endswith(" nothing") for texts in places.values() for text in texts)
    hint = f"{_HINT} {_HOW_TO_MERGE}" if is_partial else _HINT
    raise PlanMismatch("\n".join([head, *lines, hint]))


def _differing_places(first: StateContent, content: StateContent) -> tuple[int, list[tuple[str, str, str]]]:
    """Returns the number of different places, and the first ones, also of each list, with their values."""
    num, num_in = 0, Counter[Any]()
    few: list[tuple[str, str, str]] = []
    for path, there, here in _Comparison(first, content).places():
        num += 1
        if path and type(path[-1]) is int:
            num_in[path[:-1]] += 1
        if num_in[path[:-1]] <= _NUM_OF_A_LIST and len(few) < _NUM_SHOWN:
            few.append((show_path(path), there, here))
    return num, few


_Place = tuple[tuple[Any, ...], str, str]


class _Comparison:
    """A walk through the states of two ranks at once."""

    def __init__(self, one: StateContent, other: StateContent) -> None:
        self._contents = contents = (one, other)
        self._specs = [{spec.name: spec for spec in content.specs} for content in contents]

    def places(self) -> Iterator[_Place]:
        """Yields each different place, and the values of both ranks."""
        one, other = self._contents
        return self._walk(one.structure, other.structure, "", ())

    def _walk(self, one: Any, other: Any, name: str, path: tuple[Any, ...]) -> Iterator[_Place]:
        below, others = children(one), children(other)
        if below is None or others is None or _kind(one) != _kind(other):
            there, here = (self._shown(side, node, name) for side, node in enumerate((one, other)))
            if there != here or json.dumps(one) != json.dumps(other):
                yield path, there, here
            return
        if below.keys() == others.keys() and list(below) != list(others):
            there, here = (f"keys {show_key(list(keys))}" for keys in (below, others))
            yield path, there, here
        prefix = f"{name}." if name else ""
        for key in {**below, **others}:
            ending, child = below.get(key, ("", None))
            if key in below and key in others:
                yield from self._walk(child, others[key][1], prefix + ending, (*path, key))
            else:
                known = 0 if key in below else 1
                ending, child = (below, others)[known][key]
                texts = ["nothing", "nothing"]
                texts[known] = self._shown(known, child, prefix + ending)
                yield (*path, key), texts[0], texts[1]
        if _kind(one) == "state_dict":
            there, here = (node["state_dict"][1] for node in (one, other))
            yield from self._walk(there, here, f"{prefix}_metadata", (*path, Attribute("_metadata")))

    def _shown(self, side: int, node: Any, name: str) -> str:
        saved = leaf(node, name)
        if saved is not None:
            return self._tensor(side, saved)
        below, kind = children(node), _kind(node)
        if below is not None:
            return f"a {kind} of {len(below)}"
        if kind == "PerRank":
            return "a fastload.PerRank"
        try:
            return show_key(decode_value(node))
        except ValueError:  # a set
            return show_key(node)

    def _tensor(self, side: int, saved: SavedTensor) -> str:
        spec, data = self._specs[side][saved.stored], self._contents[side].small.get(saved.stored)
        is_known = all(saved.stored in content.small for content in self._contents)
        kind = f"{saved.kind} of " if saved.kind else ""
        tie = f", one with {show_key(saved.stored)}" if saved.stored != saved.own_name else ""
        return f"{kind}{spec.dtype} {list(spec.shape)}{_values(spec, data) if data and is_known else ''}{tie}"


def _kind(node: Any) -> Any:
    """Returns the kind of a node."""
    if type(node) is not dict:
        return type(node).__name__
    tag, payload = next(iter(node.items()), ("tensor", []))
    return f"defaultdict({payload[0]})" if tag == "defaultdict" else tag


def _values(spec: TensorSpec, data: bytes) -> str:
    if spec.nbytes > _MAX_SHOWN_BYTES:
        return f" with digest {data.hex()}"
    if spec.dtype not in _NUMBERS:
        return f" with bytes {data.hex()}"
    dtype = DTYPES[spec.dtype][1]
    assert dtype is not None
    numbers = torch.frombuffer(bytearray(data), dtype=dtype).reshape(spec.shape)
    return f" {(numbers if not numbers.is_floating_point() else numbers.double()).tolist()}"


class ReplicaDigests(Protocol):
    """Digests of the bits of ranges of shards, 64 bits each, which are computed where the tensors are."""

    def hold_caller(self) -> None:
        """Has this thread's current streams wait until all are computed; the host does not wait."""

    def get(self, limit_s: float) -> list[int]:
        """Waits for the digests, and returns them in the order of the ranges.

        Raises:
            DeadlineExceeded: They took longer than `limit_s` seconds, or what was queued before them.
        """


def begin_digests(reader: StateReader, ranges: Sequence[ShardRange], *, num_first: int = 0) -> ReplicaDigests:
    """Begins to digest ranges of shards; equal bits have equal digests, whatever the device.

    Args:
        reader: Reads this rank's tensors.
        ranges: The ranges, at multiples of 16 bytes.
        num_first: What is queued later on the caller's streams waits for so many ranges, the first ones.

    Raises:
        MemoryError: A device has too little memory.
        OptionError: The extension is not installed.
    """
    begin = extension("digests", "devices", "comparing replicas on accelerators")
    pending: ReplicaDigests = begin(reader, ranges, num_first=num_first)
    return pending


@dataclass(frozen=True)
class ShardDigests:
    """How the ranks compare the shards that several of them hold; the same on all ranks.

    Attributes:
        how: ``full`` compares all shards completely; ``small`` small ones in host memory, as far as that
            takes a few milliseconds, of each large one there a sample, and those on accelerators by digests
            that the devices compute, see `DeviceComparison`.
        occasion: Differs from save to save, and moves the samples.
        complete: Tensors that are compared completely, whatever `how` is.
        strict: Tensors of which also a sample that differs is an error.
        is_mixed: Whether a tensor may be in host memory on some ranks and on an accelerator on others.
        on_devices: Whether this is about the digests that devices compute during the save.
    """

    how: str
    occasion: str = ""
    complete: Collection[str] = ()
    strict: Collection[str] = ()
    is_mixed: bool = False
    on_devices: bool = False

    def is_error(self, name: str, shard: MappedShard) -> bool:
        """Whether it is an error if a shard differs; otherwise it is a warning."""
        if self.how == "full" or name in self.complete or name in self.strict:
            return True
        return not self.on_devices and shard.runs.total <= _MAX_BYTES

    def of(
        self,
        layout: Layout,
        shard_map: ShardMap,
        reader: StateReader,
        rank: int,
        *,
        limit_s: float,
        skip: Collection[str] = (),
    ) -> bytes:
        """Returns a digest of each shard that a rank shares with others, in order; 0 if left out.

        Args:
            layout: The files.
            shard_map: Which ranks hold which bytes.
            reader: Reads this rank's tensors.
            rank: This rank.
            limit_s: Longest wait for a device in seconds.
            skip: Names of tensors whose small shards are left out.
        """
        shards, names = shard_map.replicated(rank), layout.space.ranges
        by_number: dict[int, bytes] = {}
        by_bits: dict[int, ShardRange] = {}
        memory = None
        for at, (number, shard) in self._complete(layout, shards, reader, skip):
            if self.is_mixed or not reader.is_in_host_memory(names[number].name):
                by_bits[at] = ShardRange(number, shard, 0, shard.runs.total)
                continue
            if memory is None:
                memory = allocate_staging(_BUFFER_BYTES, pinned=False)
            by_number[at] = _digest(reader, number, shard, memory)
        if by_bits:
            pending = begin_digests(reader, list(by_bits.values()))
            by_number |= zip(by_bits, _packed(pending.get(limit_s)), strict=True)
        if self.how == "small":
            samples = [
                (at, _sample(number, shard, nbytes, self._seed))
                for at, number, shard, nbytes in _large_shards(shard_map, rank)
                if names[number].name not in self.complete and reader.is_in_host_memory(names[number].name)
            ]
            by_number |= _digest_samples(reader, samples)
        return b"".join(by_number.get(at, _UNKNOWN) for at in range(len(shards)))

    def ranges_on_devices(
        self, layout: Layout, shard_map: ShardMap, reader: StateReader, rank: int
    ) -> dict[int, ShardRange]:
        """Returns what devices read of the shards that a rank shares with others, by their numbers.

        That is everything if up to `_READS_ON_DEVICE` ranks hold a shard, and a part that moves from save to
        save if there are more, so that the time for it stays in proportion to what each of them writes.
        """
        names = layout.space.ranges
        return {
            at: _part_on_device(number, shard, self._seed)
            for at, (number, shard) in enumerate(shard_map.replicated(rank))
            if (name := names[number].name) not in self.complete and not reader.is_in_host_memory(name)
        }

    @cached_property
    def _seed(self) -> int:
        return xxhash.xxh3_64_intdigest(self.occasion.encode(errors="surrogateescape"))

    def _complete(
        self, layout: Layout, shards: Sequence[_Replica], reader: StateReader, skip: Collection[str]
    ) -> Iterator[tuple[int, _Replica]]:
        """Yields the shards that are compared completely, each with its number."""
        nums: Counter[Sequence[int]] = Counter()
        sizes: Counter[Sequence[int]] = Counter()
        for at, (number, shard) in enumerate(shards):
            name = layout.space.ranges[number].name
            if self.how == "full" or name in self.complete:
                yield at, (number, shard)
                continue
            if name in skip or nums[shard.holders] >= _MAX_NUM or not reader.is_in_host_memory(name):
                continue
            nbytes = shard.runs.total
            if nbytes <= min(_MAX_BYTES, _MAX_BYTES_OF_ALL - sizes[shard.holders]):
                nums[shard.holders] += 1
                sizes[shard.holders] += nbytes
                yield at, (number, shard)


@lru_cache(maxsize=2)  # a training saves states of the same placements
def _large_shards(shard_map: ShardMap, rank: int) -> list[tuple[int, int, MappedShard, int]]:
    """Returns the large ones of `ShardMap.replicated`: number there, number of the tensor, shard, length."""
    large = []
    for at, (number, shard) in enumerate(shard_map.replicated(rank)):
        if (nbytes := shard.runs.total) > _MAX_BYTES:
            large.append((at, number, shard, nbytes))
    return large


def _sample(number: int, shard: MappedShard, nbytes: int, seed: int) -> ShardRange:
    """Returns the bytes of a large shard in host memory that its holders compare."""
    length = nbytes // (_SAMPLE_PART * len(shard.holders))
    length = min(max(length, _LEAST_SAMPLE_BYTES), _MOST_SAMPLE_BYTES)
    begin = _place(number, shard, nbytes - length, seed)
    return ShardRange(number, shard, begin, begin + length)


def _part_on_device(number: int, shard: MappedShard, seed: int) -> ShardRange:
    """Returns the bytes of a shard on a device that its holders compare: one of some equal parts."""
    nbytes = shard.runs.total
    num = -(-len(shard.holders) // _READS_ON_DEVICE) if nbytes > _MAX_BYTES else 1
    part = _place(number, shard, num - 1, seed)
    begin, end = (nbytes * bound // num // _ALIGN_BYTES * _ALIGN_BYTES for bound in (part, part + 1))
    return ShardRange(number, shard, begin, end if part < num - 1 else nbytes)


def _place(number: int, shard: MappedShard, last: int, seed: int) -> int:
    """Returns a number up to `last` that differs from save to save and from shard to shard."""
    mixed = (seed + number * _ODD_NUMBER ^ shard.runs.start) * _ODD_NUMBER & _64_BITS
    return (mixed >> 8) % (last + 1)  # the low bits are mixed the least


def _packed(digests: Sequence[int]) -> Iterator[bytes]:
    return (digest.to_bytes(_DIGEST_BYTES, "big") for digest in digests)


def _digest(reader: StateReader, number: int, shard: MappedShard, memory: Tensor) -> bytes:
    """Returns the xxh3-64 of a shard in host memory."""
    hasher, nbytes = xxhash.xxh3_64(), shard.runs.total
    for begin in range(0, nbytes, _BUFFER_BYTES):
        end = min(begin + _BUFFER_BYTES, nbytes)
        reader.copy([ShardRange(number, shard, begin, end)], memory[: end - begin])
        hasher.update(host_view(memory[: end - begin]))
    return hasher.digest()


def _digest_samples(
    reader: StateReader, samples: Sequence[tuple[int, ShardRange]]
) -> Iterator[tuple[int, bytes]]:
    """Yields the digests of ranges in host memory, each with its number; reads many at once."""
    lengths = (sample.end - sample.begin for _, sample in samples)
    memory = torch.empty(min(sum(lengths), _BUFFER_BYTES), dtype=torch.uint8)
    waiting: list[tuple[int, ShardRange]] = []
    end = 0

    def flush() -> Iterator[tuple[int, bytes]]:
        reader.copy([sample for _, sample in waiting], memory[:end])
        view, begin = host_view(memory), 0
        for at, sample in waiting:
            nbytes = sample.end - sample.begin
            yield at, xxhash.xxh3_64_digest(view[begin : begin + nbytes])
            begin += nbytes

    for at, sample in samples:
        nbytes = sample.end - sample.begin
        if end + nbytes > len(memory):
            yield from flush()
            waiting, end = [], 0
        waiting.append((at, sample))
        end += nbytes
    if waiting:
        yield from flush()


@dataclass(frozen=True)
class DeviceComparison:
    """The comparison of replicas on accelerators, by digests that the devices compute during a save.

    Attributes:
        how: How they are compared.
        layout: The files.
        shard_map: Which ranks hold which bytes.
        numbers: Numbers in `ShardMap.replicated` of the shards that this rank's devices read.
        pending: The digests of these; None without any.
    """

    how: ShardDigests
    layout: Layout
    shard_map: ShardMap
    numbers: Sequence[int] = ()
    pending: ReplicaDigests | None = None

    def hold_caller(self) -> None:
        """See `ReplicaDigests.hold_caller`."""
        if self.pending is not None:
            self.pending.hold_caller()

    def digests(self, rank: int, limit_s: float) -> bytes:
        """Waits for the digests; returns them as `ShardDigests.of` does.

        Raises:
            DeadlineExceeded: A device took longer than `limit_s` seconds.
        """
        digests = self.pending.get(limit_s) if self.pending is not None else []
        by_number = dict(zip(self.numbers, _packed(digests), strict=True))
        return b"".join(by_number.get(at, _UNKNOWN) for at in range(len(self.shard_map.replicated(rank))))

    def by_holders(self, rank: int, limit_s: float) -> dict[str, str]:
        """Waits for the digests; returns one for each group of holders, see `digest_by_holders`."""
        if self.pending is None:
            return {}
        return digest_by_holders(self.shard_map, rank, self.digests(rank, limit_s))


def digest_by_holders(shard_map: ShardMap, rank: int, digests: bytes) -> dict[str, str]:
    """Returns one digest for each group of holders, of all their shards.

    Args:
        shard_map: Which ranks hold which shards.
        rank: This rank.
        digests: From `ShardDigests.of`.
    """
    by_holders: dict[Sequence[int], bytearray] = defaultdict(bytearray)
    for shard, digest in _by_shard(shard_map, rank, digests):
        by_holders[shard[1].holders] += digest
    return {
        _name_of(holders): xxhash.xxh3_64_hexdigest(bytes(sums))
        for holders, sums in by_holders.items()
        if any(sums)
    }


@dataclass(frozen=True)
class ShardDifferences:
    """The shards that are not the same on all of their holders; the same on all ranks.

    Attributes:
        of_tensors: Name of the tensor, the ranks that differ and where, and whether that is an error: the
            first ones, errors before others.
        num: Number of all, at least.
    """

    of_tensors: Sequence[tuple[str, str, bool]]
    num: int

    def lines(self) -> list[str]:
        """Describes them, one in a line."""
        lines = [f"  {name}: {ranks}" for name, ranks, _ in self.of_tensors]
        return lines + ([f"  and at least {self.num - len(lines)} more"] if self.num > len(lines) else [])


def find_differences(
    world: World,
    what: str,
    layout: Layout,
    shard_map: ShardMap,
    how: ShardDigests,
    digests: bytes,
    differing: Collection[str],
) -> ShardDifferences | None:
    """Finds the shards that differ on ranks of which some digests do.

    The first holders send all their digests, and the others answer where theirs differ.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        layout: The files.
        shard_map: Which ranks hold which bytes.
        how: How they were compared.
        digests: Of this rank's shards; see `ShardDigests.of`.
        differing: The `differing_groups` of the ranks.

    Returns:
        The differences; None without any.

    Raises:
        PeerError: Some rank failed.
    """
    digest_of = dict(_by_shard(shard_map, world.rank, digests))
    with world.gathering_step(what) as sending:
        sending.answer(b"".join(digest_of[shard] for shard in _first_held(shard_map, world.rank, differing)))
    first: dict[_Replica, bytes] = {}
    for rank, sent in enumerate(sending.answers):
        first.update(zip(_first_held(shard_map, rank, differing), _cut(sent), strict=True))
    is_error = {shard: how.is_error(layout.space.ranges[shard[0]].name, shard[1]) for shard in digest_of}
    with world.step(what) as step:
        step.answer(_differing(first, digest_of, is_error))
    differing = step.answers
    odd: dict[_Replica, dict[int, str]] = defaultdict(dict)
    for rank, (_, few) in enumerate(differing):
        replicated = shard_map.replicated(rank) if few else []
        for at, digest_here in few:
            odd[replicated[at]][rank] = digest_here
    if not odd:
        return None  # the ranks hashed different shards
    of_tensors = []
    for (number, shard), ranks in sorted(odd.items(), key=lambda item: item[0][0]):
        name = layout.space.ranges[number].name
        odd_ranks = _odd_ranks(shard.holders, ranks, world.size)
        where = described_part(shard.box, torch_spec(layout.space.ranges[number])[1])
        of_tensors.append((name, f"{odd_ranks}{where and f', in {where}'}", how.is_error(name, shard)))
    of_tensors.sort(key=lambda difference: not difference[2])
    return ShardDifferences(of_tensors[:_NUM_SHOWN], max(len(odd), *(count for count, _ in differing)))


def _differing(
    first: Mapping[_Replica, bytes], digest_of: Mapping[_Replica, bytes], is_error: Mapping[_Replica, bool]
) -> tuple[int, list[tuple[int, str]]]:
    """Returns how many of this rank's digests differ from those of the first holders, and the first ones.

    Errors come before others.
    """
    differing = [
        (at, shard, digest.hex())
        for at, (shard, digest) in enumerate(digest_of.items())
        if digest != first.get(shard, digest) and _UNKNOWN not in (digest, first[shard])
    ]
    differing.sort(key=lambda place: not is_error[place[1]])
    return len(differing), [(at, digest) for at, _, digest in differing[:_NUM_SHOWN]]


def _odd_ranks(holders: Sequence[int], digests: Mapping[int, str], num_ranks: int) -> str:
    """Names the holders in the minority, given the digests that differ from that of the first holder."""
    variants: dict[str, list[int]] = defaultdict(list)
    for rank in holders:
        variants[digests.get(rank, "as the first")].append(rank)
    usual = max(variants.values(), key=len)
    odd = [rank for rank in holders if rank not in usual]
    most = (
        f"the {len(usual)} other{'s' * (len(usual) > 1)}"
        if len(holders) == num_ranks
        else f"rank {_some(usual)}"
    )
    return f"rank {_some(odd)} not as {most}"


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")


def differing_groups(digests: Sequence[Mapping[str, str]]) -> set[str]:
    """Returns the groups of holders with different digests on some ranks; see `digest_by_holders`."""
    known: dict[str, str] = {}
    return {
        group
        for of_rank in digests
        for group, digest in of_rank.items()
        if known.setdefault(group, digest) != digest
    }


def _name_of(holders: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(",".join(map(str, holders)).encode())


def _cut(digests: bytes) -> list[bytes]:
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]


def _by_shard(shard_map: ShardMap, rank: int, digests: bytes) -> Iterator[tuple[_Replica, bytes]]:
    return zip(shard_map.replicated(rank), _cut(digests), strict=True)


def _first_held(shard_map: ShardMap, rank: int, groups: Collection[str]) -> list[_Replica]:
    """Returns the shards of some groups of which a rank is the first holder."""
    is_wanted: dict[Sequence[int], bool] = {}
    held = []
    for number, shard in shard_map.replicated(rank):
        holders = shard.holders
        if holders not in is_wanted:
            is_wanted[holders] = holders[0] == rank and _name_of(holders) in groups
        if is_wanted[holders]:
            held.append((number, shard))
    return held
