"""Merge of partial states, one of each rank. Pure.

Dicts are merged by key. A key that only some ranks have keeps its position: before the next known key. So the
stages of a pipeline, in the order of their ranks, form the model in its order.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from fastload.base.memory import uncollected
from fastload.errors import PlanMismatch, first_lines
from fastload.formats.state import children, has_only_scalars, leaf, leaves, read_keys
from fastload.formats.values import Attribute, decode_value, show_key, show_path
from fastload.geometry.box import Box, overlap_of
from fastload.geometry.shards import BY_HAND
from fastload.options import SaveOptions
from fastload.saving.layout import Layout, TensorSpec, lay_out_files
from fastload.saving.shard_map import ShardMap

if TYPE_CHECKING:
    from fastload.geometry.dtensors import BoxesByRank

NOTHING_SAVED = "nothing was saved"
_OVERLAPPING = "overlapping"  # stands for another mesh

_DICTS = ("dict", "OrderedDict", "Counter")
_Variants = Sequence[tuple[Any, Sequence[int]]]
"""Different nodes at one place, each with its ranks."""


def merge(variants: _Variants) -> tuple[Any, list[str]]:
    """Merges structures.

    Args:
        variants: The different ones, each with its ranks, in the order of their first ranks.

    Returns:
        The merged structure, and a line for each place that cannot be merged.
    """
    problems: list[str] = []
    return _merge(variants, (), problems), problems


def _merge(variants: _Variants, path: tuple[Any, ...], problems: list[str]) -> Any:
    kinds = {_kind(node) for node, _ in variants}
    if len(variants) > 1 and (path or not kinds.issubset(_DICTS)):  # whole states are long, and mostly differ
        variants = _distinct(variants)
    first = variants[0][0]
    if len(variants) == 1:
        return first
    if len(kinds) == 1:
        [kind] = kinds
        if kind in _DICTS:
            return {kind: _merge_items([(node[kind], ranks) for node, ranks in variants], path, problems)}
        if kind == "state_dict":
            items, metadata = ([(node[kind][part], ranks) for node, ranks in variants] for part in range(2))
            return {
                kind: [
                    _merge_items(items, path, problems),
                    _merge(metadata, (*path, Attribute("_metadata")), problems),
                ]
            }
        if kind == "defaultdict" and len({json.dumps(node[kind][0]) for node, _ in variants}) == 1:
            items = [(node[kind][1], ranks) for node, ranks in variants]
            return {kind: [first[kind][0], _merge_items(items, path, problems)]}
        if kind == "tuple" and len({len(node[kind]) for node, _ in variants}) == 1:
            elements = [(node[kind], ranks) for node, ranks in variants]
            return {kind: _merge_elements(elements, path, problems)}
        if kind == "list" and len({len(node) for node, _ in variants}) == 1:
            return _merge_elements(variants, path, problems)
    texts = (f"{_ranks(ranks)} {_shown(node)}" for node, ranks in variants)
    problems.append(f"{show_path(path)}: {', '.join(texts)}")
    return first


def _merge_elements(variants: _Variants, path: tuple[Any, ...], problems: list[str]) -> list[Any]:
    return [
        _merge([(nodes[index], ranks) for nodes, ranks in variants], (*path, index), problems)
        for index in range(len(variants[0][0]))
    ]


def _merge_items(variants: _Variants, path: tuple[Any, ...], problems: list[str]) -> list[Any]:
    of_key: dict[str, list[tuple[Any, Sequence[int]]]] = {}
    nodes: dict[str, Any] = {}
    order = _KeyOrder()
    for items, ranks in variants:
        keys = [json.dumps(node) for node in items[::2]]
        for key, node, child in zip(keys, items[::2], items[1::2], strict=True):
            nodes.setdefault(key, node)
            of_key.setdefault(key, []).append((child, ranks))
        order.add(keys)
    merged: list[Any] = []
    for key in order:
        [name] = read_keys([nodes[key]])
        merged += (nodes[key], _merge(of_key[key], (*path, name), problems))
    return merged


class _KeyOrder:
    """The keys of several dicts in their order: each new one is before the next known one.

    A linked list, since a state may have hundreds of variants with keys of their own.
    """

    def __init__(self) -> None:
        self._next: dict[str | None, str | None] = {None: None}  # None is before the first, after the last
        self._previous: dict[str | None, str | None] = {None: None}

    def add(self, keys: Sequence[str]) -> None:
        """Adds the keys of a dict."""
        new: list[str] = []
        for key in (*keys, None):
            if key is not None and key not in self._next:
                new.append(key)
                continue
            for each in new:
                self._insert(each, key)
            new = []

    def _insert(self, key: str, before: str | None) -> None:
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = key
        self._next[key], self._previous[key] = before, previous

    def __iter__(self) -> Iterator[str]:
        key = self._next[None]
        while key is not None:
            yield key
            key = self._next[key]


def _distinct(variants: _Variants) -> list[tuple[Any, Sequence[int]]]:
    """Joins equal variants."""
    keys = [_keys(node) for node, _ in variants]
    count = Counter(keys)
    found: dict[str, tuple[Any, list[int]]] = {}
    for (node, ranks), of_node in zip(variants, keys, strict=True):
        text = json.dumps(node) if count[of_node] > 1 else of_node  # others with its keys may be equal
        found.setdefault(text, (node, []))[1].extend(ranks)
    return list(found.values())


def _keys(node: Any) -> str:
    """Returns the keys of a dict as text; empty for anything else."""
    kind = _kind(node)
    return json.dumps([kind, node[kind][::2]]) if kind in _DICTS else ""


def _kind(node: Any) -> str:
    if type(node) is list:
        return "list"
    return next(iter(node), "tensor") if isinstance(node, Mapping) else type(node).__name__


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:4]))
    return f"rank {shown}" + (", …" if len(ranks) > 4 else "")


def _shown(node: Any) -> str:
    saved = leaf(node, "")
    if saved is not None:
        return f"a tensor{f' ({saved.kind})' if saved.kind else ''}"
    kind = _kind(node)
    if kind in ("set", "frozenset", "PerRank") or children(node) is not None:
        return f"a {kind}" + (f" of {len(node)}" if kind == "list" else "")
    return show_key(decode_value(node))


@dataclass(frozen=True)
class MergedState:
    """The state that the ranks have together.

    Attributes:
        structure: The state without its tensors.
        specs: Its tensors, in its order.
        layout: Its files.
        shard_map: Which ranks hold which bytes.
        meshes: Name of a tensor → the meshes on which ranks hold parts of it; see `mesh_of`. One more if
            different boxes of ranks overlap.
        strides: Strides of tensors; see `encoder.strides_of`.
    """

    structure: Any
    specs: list[TensorSpec]
    layout: Layout
    shard_map: ShardMap
    meshes: Mapping[str, frozenset[str]]
    strides: Mapping[str, tuple[int, ...]]


@uncollected
def merge_states(
    forms: Sequence[bytes],
    boxes: Sequence[bytes],
    *,
    options: SaveOptions,
    stem: str,
    outcome: str,
) -> MergedState | None:
    """Merges the states of all ranks.

    Args:
        forms: The `pack_state` of each rank.
        boxes: The `pack_boxes` of each rank.
        options: How to lay the tensors out in files.
        stem: First part of the names of the files.
        outcome: What a problem has led to, for its message.

    Returns:
        The merged state; None if no rank has a part.

    Raises:
        PlanMismatch: The states do not fit together, or a tensor is incomplete.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, form in enumerate(forms):
        ranks_of.setdefault(form, []).append(rank)
    variants = [(json.loads(zlib.decompress(form)), ranks) for form, ranks in ranks_of.items() if form]
    if not variants:
        return None
    structure, specs = _merge_forms(variants, outcome)
    layout = lay_out_files(specs, options, stem)
    by_rank, meshes = _boxes_by_rank(boxes)
    shard_map = ShardMap.of(layout, len(forms), by_rank)
    if missing := shard_map.missing():
        _refuse("the ranks together do not have the whole state", missing, outcome)
    return MergedState(structure, specs, layout, shard_map, meshes, _first_strides(variants))


def _first_strides(
    variants: Sequence[tuple[tuple[Any, Any, Any], Sequence[int]]],
) -> dict[str, tuple[int, ...]]:
    """Returns the strides of tensors on the first rank that has them, unless they are row-major there."""
    found: dict[str, tuple[int, ...]] = {}
    for (_, specs, strides), _ in reversed(variants):
        for name, *_ in specs if found else ():
            found.pop(name, None)
        found |= {name: tuple(given) for name, given in strides.items()}
    return found


def _merge_forms(
    variants: Sequence[tuple[tuple[Any, Any, Any], Sequence[int]]], outcome: str
) -> tuple[Any, list[TensorSpec]]:
    """Merges structures and tensors.

    Raises:
        PlanMismatch: They do not fit together.
    """
    structures = [(structure, ranks) for (structure, *_), ranks in variants]
    structure, problems = merge(structures)
    problems += _unequal_own_values(structures)
    specs = _same_specs([(specs, ranks) for (_, specs, _), ranks in variants], problems)
    stored: dict[str, TensorSpec] = {}
    own_names = set()
    for saved in leaves(structure) if not problems else ():
        stored[saved.stored] = specs[saved.stored]
        if saved.stored == saved.name and saved.name in own_names:
            problems.append(f"{saved.name}: two keys of different ranks spell this name")
        own_names.add(saved.name)
    if problems:
        _refuse("the ranks hold parts of a state that do not go together", problems, outcome)
    return structure, list(stored.values())


def _unequal_own_values(variants: Sequence[tuple[Any, Sequence[int]]]) -> list[str]:
    """Describes ranks with fewer `PerRank` values than others."""
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for structure, ranks in variants:
        ranks_of[_num_places(structure)] += ranks
    if len(ranks_of) == 1:
        return []
    return [
        "fastload.PerRank: " + ", ".join(f"rank {min(ranks)} has {num}" for num, ranks in ranks_of.items())
    ]


def _num_places(node: Any) -> int:
    if has_only_scalars(node):
        return 0
    if isinstance(node, list):
        return sum(map(_num_places, node))
    if not isinstance(node, dict):
        return 0
    return 1 if node.keys() == {"PerRank"} else sum(map(_num_places, node.values()))


def _same_specs(
    variants: Sequence[tuple[Sequence[Any], Sequence[int]]], problems: list[str]
) -> dict[str, TensorSpec]:
    """Returns the tensors of all ranks by name; adds a problem for each that differs between ranks."""
    found: dict[str, dict[TensorSpec, list[int]]] = defaultdict(dict)
    for specs, ranks in variants:
        for name, dtype, shape, nbytes in specs:
            spec = TensorSpec(name, dtype, tuple(shape), nbytes)
            found[name].setdefault(spec, []).extend(ranks)
    for name, ranks_of in found.items():
        if len(ranks_of) > 1:
            texts = (f"rank {min(ranks)} {spec.dtype} {list(spec.shape)}" for spec, ranks in ranks_of.items())
            problems.append(f"{name}: {', '.join(texts)}")
    return {name: next(iter(ranks_of)) for name, ranks_of in found.items()}


def _refuse(head: str, problems: Sequence[str], outcome: str) -> NoReturn:
    """Raises `PlanMismatch` with a line for each problem."""
    raise PlanMismatch("\n  ".join([f"{head}, so {outcome}:", *first_lines(problems)]))


def pack_state(
    structure: Any, specs: Sequence[TensorSpec], strides: Mapping[str, tuple[int, ...]] | None = None
) -> bytes:
    """Packs the structure and the tensors of a rank's state, and the strides of some of these."""
    return zlib.compress(json.dumps([structure, specs, strides or {}]).encode(), level=1)


BoxesAndMesh = tuple[tuple[Box, ...], str]
"""The boxes of a tensor that a rank holds, and its mesh; see `mesh_of`."""


def pack_boxes(boxes: Mapping[str, BoxesAndMesh]) -> bytes:
    """Packs the boxes that a rank holds of each tensor; equal ones are stored once."""
    numbers: dict[BoxesAndMesh, int] = {}
    columns = [[name, numbers.setdefault(each, len(numbers))] for name, each in boxes.items()]
    return zlib.compress(json.dumps([list(numbers), columns]).encode(), level=1)


def _unpack_boxes(packed: bytes) -> Iterator[tuple[str, BoxesAndMesh]]:
    kinds_of, columns = json.loads(zlib.decompress(packed))
    kinds = [
        (tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes), mesh)
        for boxes, mesh in kinds_of
    ]
    return ((name, kinds[number]) for name, number in columns)


def _boxes_by_rank(packed: Sequence[bytes]) -> _BoxesOfAll:
    """Returns for each tensor the boxes of each rank, and the meshes, by the `pack_boxes` of the ranks.

    Equal ones share one object, also from save to save.
    """
    for last, found in _last_boxes[:]:
        if last == packed:
            return found
    found = _unpacked_by_rank(packed)
    _last_boxes[:] = [(packed, found)]
    return found


_BoxesOfAll = tuple[dict[str, "BoxesByRank"], dict[str, frozenset[str]]]
_last_boxes: list[tuple[Sequence[bytes], _BoxesOfAll]] = []  # at most one; see `ShardMap.of`


def _unpacked_by_rank(packed: Sequence[bytes]) -> _BoxesOfAll:
    numbers: dict[BoxesAndMesh, int] = {}
    columns: dict[str, array[int]] = defaultdict(partial(array, "I"))
    known_packed: dict[bytes, list[tuple[str, int]]] = {}  # replicas hold the same
    for rank, of_rank in enumerate(packed):
        if of_rank not in known_packed:
            known_packed[of_rank] = [
                (name, numbers.setdefault(boxes, len(numbers))) for name, boxes in _unpack_boxes(of_rank)
            ]
        for name, number in known_packed[of_rank]:
            columns[name].extend((rank, number))
    kinds = list(numbers)
    known: dict[bytes, tuple[BoxesByRank, frozenset[str]]] = {}
    for column in columns.values():
        key = column.tobytes()
        if key not in known:
            ranks_of: dict[tuple[Box, ...], list[int]] = {}
            for rank, number in zip(column[::2], column[1::2], strict=True):
                ranks_of.setdefault(kinds[number][0], []).append(rank)
            meshes = frozenset(mesh for boxes, mesh in map(kinds.__getitem__, column[1::2]) if boxes)
            if BY_HAND in meshes:
                distinct = list({box for boxes in ranks_of for box in boxes})
                meshes |= {_OVERLAPPING} if overlap_of(distinct, len(distinct[0].sizes)) else set()
            by_rank = tuple((boxes, tuple(ranks)) for boxes, ranks in ranks_of.items())
            known[key] = by_rank, meshes
    found = {name: known[column.tobytes()] for name, column in columns.items()}
    return (
        {name: by_rank for name, (by_rank, _) in found.items()},
        {name: meshes for name, (_, meshes) in found.items()},
    )
