"""Whether the ranks are about to save the same, and if not, where they differ.

What is compared goes with the agreement that a save has anyway: digests of the structure, of the layout, and
of small tensors that lie in host memory. Only if they differ do the ranks look for the places.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
import xxhash
from torch import Tensor

from fastload.base.memory import allocate_staging, host_bytes, host_view
from fastload.comm.world import World
from fastload.errors import PlanMismatch, ReplicaMismatch
from fastload.formats.dtensors import is_dtensor
from fastload.formats.dtypes import DTYPES
from fastload.formats.saved import SavedTensor, children_of, leaf_of
from fastload.formats.values import Attribute, decode_value, show_key, show_path
from fastload.saving.layout import FileRange, Layout, TensorSpec
from fastload.saving.messages import Packet, Stretch
from fastload.saving.shard_map import Cell, Holdings
from fastload.saving.snapshot import Shards, Source

__all__ = [
    "PIECE_BYTES",
    "Content",
    "compare_cells",
    "compare_replicas",
    "digest_cells",
    "group_digests",
    "pieces",
    "require_alike",
    "small_tensors",
]

_MAX_NUM = 1024  # a few milliseconds
_MAX_BYTES = 64 << 10  # of one tensor
_MAX_BYTES_OF_ALL = 4 << 20
_MAX_SHOWN_BYTES = 32
_NUM_SHOWN = 20
_NUM_OF_A_LIST = 3
_NUMBERS = {"BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"}
_HINT = "What each rank has of its own goes into a fastload.PerRank."
_HOW_NOT_TO = "With check_replicas='off' tensors are not compared, and any rank's are saved."


def small_tensors(
    specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], starts: Sequence[int]
) -> dict[str, bytes]:
    """Returns the bytes of very small tensors in host memory, and digests of other small ones, by name.

    So many that it takes a few milliseconds, however many there are: from the beginning and the end of each
    entry of the state, since what differs is seldom in the midst of a model.

    Args:
        specs: All tensors.
        tensors: The same, by name.
        starts: With which of them each entry of the state begins.
    """
    found, left = {}, _MAX_BYTES_OF_ALL
    for number in _spread(starts, len(specs)):
        spec = specs[number]
        tensor = tensors[spec.name]
        if not is_dtensor(tensor) and tensor.is_cpu and spec.nbytes <= min(left, _MAX_BYTES):
            data = host_bytes(tensor)
            found[spec.name] = data if spec.nbytes <= _MAX_SHOWN_BYTES else xxhash.xxh3_64_digest(data)
            left -= spec.nbytes
    return found


def _spread(starts: Sequence[int], num: int) -> Iterator[int]:
    """Yields which tensors to look at, given with which of all of them each entry begins."""
    bounds = sorted({0, *starts, num}) if len(starts) < _MAX_NUM else [0, num]
    most = _MAX_NUM // max(1, len(bounds) - 1)
    for begin, end in pairwise(bounds):
        if end - begin <= most:
            yield from range(begin, end)
        else:
            yield from range(begin, begin + (most + 1) // 2)
            yield from range(end - most // 2, end)


@dataclass(frozen=True)
class Content:
    """What one rank is about to save, as far as the ranks compare it.

    Attributes:
        structure: The state but for its tensors.
        layout: A digest of how its tensors lie in files.
        specs: Its tensors.
        small: Of some of them, the bytes or a digest.
    """

    structure: Any
    layout: str
    specs: Sequence[TensorSpec]
    small: Mapping[str, bytes]

    def digests(self) -> list[str]:
        """Returns digests of structure and layout, and of the small tensors."""
        form = json.dumps([self.structure, self.layout], separators=(",", ":")).encode()
        small = b"".join([*map(str.encode, self.small), *self.small.values()])
        return [xxhash.xxh3_128_hexdigest(form), xxhash.xxh3_128_hexdigest(small)]

    def to_bytes(self) -> bytes:
        """Packs it for the other ranks."""
        small = {name: data.hex() for name, data in self.small.items()}
        text = json.dumps([self.structure, self.layout, self.specs, small])
        return zlib.compress(text.encode(), level=1)

    @classmethod
    def from_bytes(cls, packed: bytes) -> Content:
        """Unpacks what `to_bytes` packed."""
        structure, layout, specs, small = json.loads(zlib.decompress(packed))
        data = {name: bytes.fromhex(text) for name, text in small.items()}
        return cls(structure, layout, [TensorSpec(*spec) for spec in specs], data)


def require_alike(world: World, what: str, content: Content, digests: Sequence[Sequence[str]]) -> None:
    """Checks that all ranks are about to save the same.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        content: What this rank is about to save.
        digests: The `Content.digests` of each rank.

    Raises:
        PlanMismatch: Plain values, names, dtypes or shapes differ; names the places and the values.
        ReplicaMismatch: Only what is in tensors differs.
        PeerError: Some rank could not say.
    """
    if all(each == digests[0] for each in digests):
        return
    first = world.share(what, 0, content.to_bytes)
    found = world.agree(what, lambda: _found(Content.from_bytes(first), content))
    has_one_form = all(each[0] == digests[0][0] for each in digests)
    places: dict[str, list[str]] = {}
    for rank, (_, few) in enumerate(found):
        for place, there, here in few:
            places.setdefault(place, [f"rank 0 {there}"]).append(f"rank {rank} {here}")
    if has_one_form and not places:
        return  # the same tensors are in host memory on some ranks only
    lines = [f"  {place}: {_some(texts)}" for place, texts in islice(places.items(), _NUM_SHOWN)]
    more = max(len(places), *(count for count, _ in found)) - len(lines)
    lines += [f"  and at least {more} more"] if more > 0 else []
    if has_one_form:
        head = "the ranks hold different tensors, so nothing was saved:"
        raise ReplicaMismatch("\n".join([head, *lines, f"{_HINT} {_HOW_NOT_TO}"]))
    head = "the ranks hold different states, so nothing was saved:"
    raise PlanMismatch("\n".join([head, *lines, _HINT]))


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _found(first: Content, own: Content) -> tuple[int, list[tuple[str, str, str]]]:
    """Returns how many places differ, and the first few of them, of each list too, with what is there."""
    num, num_in = 0, Counter[Any]()
    few: list[tuple[str, str, str]] = []
    for path, there, here in _Comparison(first, own).places():
        num += 1
        if path and type(path[-1]) is int:
            num_in[path[:-1]] += 1
        if num_in[path[:-1]] <= _NUM_OF_A_LIST and len(few) < _NUM_SHOWN:
            few.append((show_path(path), there, here))
    return num, few


_Place = tuple[tuple[Any, ...], str, str]


class _Comparison:
    """One walk through the states of two ranks at once."""

    def __init__(self, one: Content, other: Content) -> None:
        self._contents = contents = (one, other)
        self._specs = [{spec.name: spec for spec in content.specs} for content in contents]

    def places(self) -> Iterator[_Place]:
        """Yields each place that differs, and what either has there."""
        one, other = self._contents
        return self._walk(one.structure, other.structure, "", ())

    def _walk(self, one: Any, other: Any, name: str, path: tuple[Any, ...]) -> Iterator[_Place]:
        below, others = children_of(one), children_of(other)
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
        leaf = leaf_of(node, name)
        if leaf is not None:
            return self._tensor(side, leaf)
        below, kind = children_of(node), _kind(node)
        if below is not None:
            return f"a {kind} of {len(below)}"
        if kind == "PerRank":
            return "a fastload.PerRank"
        try:
            return show_key(decode_value(node))
        except ValueError:  # a set
            return show_key(node)

    def _tensor(self, side: int, leaf: SavedTensor) -> str:
        spec, data = self._specs[side][leaf.stored], self._contents[side].small.get(leaf.stored)
        is_known = all(leaf.stored in content.small for content in self._contents)
        kind = f"{leaf.kind} of " if leaf.kind else ""
        tie = f", one with {show_key(leaf.stored)}" if leaf.stored != leaf.own_name else ""
        return f"{kind}{spec.dtype} {list(spec.shape)}{_values(spec, data) if data and is_known else ''}{tie}"


def _kind(node: Any) -> Any:
    """Returns what a node is, but for its members."""
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


PIECE_BYTES = 8 << 20
"""Most bytes that are copied and hashed at once."""
_DIGEST_BYTES = 8
_NUM_SHOWN_REPLICAS = 20


def _digests(layout: Layout, source: Source) -> bytes:
    """Returns one xxh3-64 for each tensor, in layout order."""
    memory = allocate_staging(PIECE_BYTES, pinned=source.on_device)
    digests = bytearray()
    for index, file in enumerate(layout.files):
        for entry in file.tensors:
            hasher = xxhash.xxh3_64()
            for begin, end in pieces(entry.nbytes):
                piece = FileRange(index, entry.offset + begin, entry.offset + end)
                slab = memory[: piece.end - piece.begin]
                source.copy(piece, slab)
                source.settle()
                hasher.update(host_view(slab))
            digests += hasher.digest()
    return bytes(digests)


def compare_replicas(world: World, layout: Layout, source: Source, *, what: str) -> None:
    """Compares the tensors of all ranks.

    Args:
        world: The ranks.
        layout: The files.
        source: This rank's tensors.
        what: Name of the step, for messages.

    Raises:
        ReplicaMismatch: They differ; names ranks and tensors. The same on all ranks.
        PeerError: Some rank could not say.
    """
    own = b""

    def digest() -> str:
        nonlocal own
        own = _digests(layout, source)
        return xxhash.xxh3_128_hexdigest(own)

    if len(set(world.agree(what, digest))) == 1:
        return
    # A mismatch is rare: only then do the ranks learn the digests of one, and tell where theirs are others.
    first = world.share(what, 0, lambda: own)
    unlike = world.agree(what, lambda: _unlike(first, own))
    raise ReplicaMismatch(
        "the ranks hold different tensors, so nothing was saved:\n" + "\n".join(_differences(layout, unlike))
    )


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of so many bytes that are copied and hashed at once."""
    for begin in range(0, nbytes, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, nbytes)


def _unlike(first: bytes, own: bytes) -> tuple[int, list[tuple[int, str]]]:
    """Returns how many of this rank's digests are not those of the first, and the first few of them."""
    size = _DIGEST_BYTES
    unlike = [at for at in range(0, len(own), size) if first[at : at + size] != own[at : at + size]]
    few = [(at // size, own[at : at + size].hex()) for at in unlike[:_NUM_SHOWN_REPLICAS]]
    return len(unlike), few


def _differences(layout: Layout, unlike: Sequence[tuple[int, Sequence[tuple[int, str]]]]) -> list[str]:
    """Says for the first tensors that differ which ranks have not what most have."""
    few = [dict(few) for _, few in unlike]
    numbers = sorted({number for digests in few for number in digests})
    names = [entry.name for file in layout.files for entry in file.tensors]
    lines = []
    for number in numbers[:_NUM_SHOWN_REPLICAS]:
        found = [digests.get(number, "as the first") for digests in few]
        usual, count = Counter(found).most_common(1)[0]
        odd = [str(rank) for rank, digest in enumerate(found) if digest != usual]
        lines.append(f"  {names[number]}: rank {', '.join(odd)} not as the {count} other{'s' * (count > 1)}")
    more = max(len(numbers), *(count for count, _ in unlike)) - _NUM_SHOWN_REPLICAS
    return lines + ([f"  and at least {more} more"] if more > 0 else [])


_CELL_DIGEST_BYTES = 8
_UNKNOWN = bytes(_CELL_DIGEST_BYTES)  # nobody looked at it
_MAX_NUM_CELLS = 1024  # of the cells that the same ranks hold: a few milliseconds
_MAX_BYTES_CELL = 64 << 10  # of one cell
_MAX_BYTES_CELLS = 4 << 20
_NUM_SHOWN_CELLS = 20


def digest_cells(
    layout: Layout,
    holdings: Holdings,
    shards: Shards,
    rank: int,
    *,
    how: str,
    skip: Callable[[str], bool] = lambda _: False,
) -> bytes:
    """Returns one xxh3-64 for each cell that this rank and others hold, in order; 0 if it was not looked at.

    Args:
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        shards: What this rank holds.
        rank: This rank.
        how: ``small``: of small cells in host memory, as many as take a few milliseconds; or ``full``.
        skip: Whether not to look at a tensor, by its name.
    """
    digests, memory = bytearray(), None
    nums: Counter[tuple[int, ...]] = Counter()
    sizes: Counter[tuple[int, ...]] = Counter()
    for number, cell in holdings.shared(rank):
        name, nbytes = layout.space.extents[number].name, cell.runs.total
        is_small = nbytes <= min(_MAX_BYTES_CELL, _MAX_BYTES_CELLS - sizes[cell.holders])
        is_cheap = is_small and nums[cell.holders] < _MAX_NUM_CELLS and shards.is_in_host_memory(name)
        if skip(name) or (how == "small" and not is_cheap):
            digests += _UNKNOWN
            continue
        nums[cell.holders] += 1
        sizes[cell.holders] += nbytes
        memory = memory if memory is not None else allocate_staging(PIECE_BYTES, pinned=shards.on_device)
        hasher = xxhash.xxh3_64()
        for begin, end in pieces(nbytes):
            slab = memory[: end - begin]
            shards.copy(Packet(rank, rank, 0, (Stretch(number, cell, begin, end),)), slab)
            shards.settle()
            hasher.update(host_view(slab))
        digests += hasher.digest()
    return bytes(digests)


def group_digests(layout: Layout, holdings: Holdings, rank: int, digests: bytes) -> dict[str, str]:
    """Returns one digest for all cells that the same ranks hold, by these ranks.

    Args:
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        rank: This rank.
        digests: From `digest_cells`.
    """
    found: dict[tuple[int, ...], bytearray] = defaultdict(bytearray)
    for at, (_, cell) in enumerate(holdings.shared(rank)):
        found[cell.holders] += digests[_CELL_DIGEST_BYTES * at : _CELL_DIGEST_BYTES * (at + 1)]
    return {
        ",".join(map(str, holders)): xxhash.xxh3_64_hexdigest(bytes(sums))
        for holders, sums in found.items()
        if any(sums)
    }


def compare_cells(
    world: World, layout: Layout, holdings: Holdings, digest: Callable[[], bytes], *, what: str
) -> None:
    """Compares what ranks hold of the same cells.

    Args:
        world: The ranks.
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        digest: Returns what `digest_cells` does.
        what: Name of the step, for messages.

    Raises:
        ReplicaMismatch: They differ; names ranks and tensors. The same on all ranks.
        PeerError: Some rank could not say.
    """
    found: dict[tuple[int, Cell], dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in enumerate(world.gather_bytes(what, digest)):
        for at, place in enumerate(holdings.shared(rank)):
            digest_of_cell = digests[_CELL_DIGEST_BYTES * at : _CELL_DIGEST_BYTES * (at + 1)]
            if digest_of_cell and digest_of_cell != _UNKNOWN:
                found[place][digest_of_cell].append(rank)
    unlike = [(place, ranks_of) for place, ranks_of in found.items() if len(ranks_of) > 1]
    if not unlike:
        return
    lines = [
        f"  {layout.space.extents[number].name}: {_odd(list(ranks_of.values()))}"
        for (number, _), ranks_of in unlike[:_NUM_SHOWN_CELLS]
    ]
    more = len(unlike) - len(lines)
    lines += [f"  and {more} more"] if more else []
    raise ReplicaMismatch("the ranks hold different tensors, so nothing was saved:\n" + "\n".join(lines))


def _odd(variants: Sequence[Sequence[int]]) -> str:
    usual = max(variants, key=len)
    odd = sorted(rank for ranks in variants if ranks is not usual for rank in ranks)
    return f"rank {_some_ranks(odd)} not as rank {_some_ranks(usual)}"


def _some_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
