"""The structures of states of which each rank has a part → that of the whole. Pure.

Dicts are merged by key. A key that only some ranks have comes where it is on them: before the next one that
is known. So the stages of a pipeline, in the order of their ranks, make the model in its order.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from fastload.errors import PlanMismatch
from fastload.formats.state import leaf, leaves, read_keys
from fastload.formats.values import Attribute, decode_value, show_key, show_path
from fastload.geometry.box import Box
from fastload.saving.layout import TensorSpec

if TYPE_CHECKING:
    from fastload.geometry.dtensors import BoxesByRank

_DICTS = ("dict", "OrderedDict", "Counter")
_Told = Sequence[tuple[Any, Sequence[int]]]
"""Nodes, each with the ranks that have it."""


def merge(told: _Told) -> tuple[Any, list[str]]:
    """Merges structures.

    Args:
        told: Those that differ, each with the ranks that have it, in the order of the first of these.

    Returns:
        The structure of the whole, and a line for each place where the ranks have what cannot be merged.
    """
    problems: list[str] = []
    return _merge(told, (), problems), problems


def _merge(told: _Told, path: tuple[Any, ...], problems: list[str]) -> Any:
    told = _distinct(told)
    first = told[0][0]
    if len(told) == 1:
        return first
    kinds = {_kind(node) for node, _ in told}
    if len(kinds) == 1:
        [kind] = kinds
        if kind in _DICTS:
            return {kind: _merge_items([(node[kind], ranks) for node, ranks in told], path, problems)}
        if kind == "state_dict":
            items, metadata = ([(node[kind][part], ranks) for node, ranks in told] for part in range(2))
            return {
                kind: [
                    _merge_items(items, path, problems),
                    _merge(metadata, (*path, Attribute("_metadata")), problems),
                ]
            }
        if kind == "defaultdict" and len({json.dumps(node[kind][0]) for node, _ in told}) == 1:
            items = [(node[kind][1], ranks) for node, ranks in told]
            return {kind: [first[kind][0], _merge_items(items, path, problems)]}
        if kind == "tuple" and len({len(node[kind]) for node, _ in told}) == 1:
            elements = [(node[kind], ranks) for node, ranks in told]
            return {kind: _merge_elements(elements, path, problems)}
        if kind == "list" and len({len(node) for node, _ in told}) == 1:
            return _merge_elements(told, path, problems)
    texts = (f"{_ranks(ranks)} {_shown(node)}" for node, ranks in told)
    problems.append(f"{show_path(path)}: {', '.join(texts)}")
    return first


def _merge_elements(told: _Told, path: tuple[Any, ...], problems: list[str]) -> list[Any]:
    return [
        _merge([(nodes[index], ranks) for nodes, ranks in told], (*path, index), problems)
        for index in range(len(told[0][0]))
    ]


def _merge_items(told: _Told, path: tuple[Any, ...], problems: list[str]) -> list[Any]:
    of_key: dict[str, list[tuple[Any, Sequence[int]]]] = {}
    nodes: dict[str, Any] = {}
    order: list[str] = []
    for items, ranks in told:
        keys = [json.dumps(node) for node in items[::2]]
        for key, node, child in zip(keys, items[::2], items[1::2], strict=True):
            nodes.setdefault(key, node)
            of_key.setdefault(key, []).append((child, ranks))
        order = _merge_order(order, keys)
    merged: list[Any] = []
    for key in order:
        [name] = read_keys([nodes[key]])
        merged += (nodes[key], _merge(of_key[key], (*path, name), problems))
    return merged


def _merge_order(known: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Returns all keys: the known ones in their order, and each new one before the next that is known."""
    is_known, before = set(known), dict[str | None, list[str]]()
    waiting: list[str] = []
    for key in keys:
        if key in is_known:
            before[key], waiting = waiting, []
        else:
            waiting.append(key)
    merged = [one for key in known for one in (*before.get(key, ()), key)]
    return [*merged, *waiting]


def _distinct(told: _Told) -> list[tuple[Any, Sequence[int]]]:
    found: dict[str, tuple[Any, list[int]]] = {}
    for node, ranks in told:
        found.setdefault(json.dumps(node), (node, []))[1].extend(ranks)
    return list(found.values())


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
    if kind in ("list", "tuple", "set", "frozenset", "state_dict", "defaultdict", "PerRank", *_DICTS):
        return f"a {kind}" + (f" of {len(node)}" if kind == "list" else "")
    return show_key(decode_value(node))


_NUM_SHOWN = 20


@dataclass(frozen=True)
class MergedState:
    """The merged state.

    Attributes:
        structure: All but its tensors.
        specs: These, in its order.
    """

    structure: Any
    specs: list[TensorSpec]

    @classmethod
    def of(cls, forms: Sequence[bytes]) -> MergedState:
        """Merges what the ranks have told.

        Raises:
            PlanMismatch: It does not go together.
        """
        ranks_of: dict[bytes, list[int]] = {}
        for rank, form in enumerate(forms):
            ranks_of.setdefault(form, []).append(rank)
        told = [(json.loads(zlib.decompress(form)), ranks) for form, ranks in ranks_of.items()]
        structure, problems = merge([(structure, ranks) for (structure, _), ranks in told])
        problems += _other_places([(structure, ranks) for (structure, _), ranks in told])
        specs = _same_specs([(specs, ranks) for (_, specs), ranks in told], problems)
        stored: dict[str, TensorSpec] = {}
        own_names = set()
        for saved in leaves(structure) if not problems else ():
            stored[saved.stored] = specs[saved.stored]
            if saved.stored == saved.name and saved.name in own_names:
                problems.append(f"{saved.name}: two keys of different ranks spell this name")
            own_names.add(saved.name)
        if problems:
            refuse_merge("the ranks hold parts of a state that do not go together", problems)
        return cls(structure, list(stored.values()))


def _other_places(told: Sequence[tuple[Any, Sequence[int]]]) -> list[str]:
    """Says which ranks have values of their own at fewer places than others: all have one there, or none."""
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for structure, ranks in told:
        ranks_of[_num_places(structure)] += ranks
    if len(ranks_of) == 1:
        return []
    return [
        "fastload.PerRank: " + ", ".join(f"rank {min(ranks)} has {num}" for num, ranks in ranks_of.items())
    ]


def _num_places(node: Any) -> int:
    if isinstance(node, list):
        return sum(map(_num_places, node))
    if not isinstance(node, dict):
        return 0
    return 1 if node.keys() == {"PerRank"} else sum(map(_num_places, node.values()))


def _same_specs(
    told: Sequence[tuple[Sequence[Any], Sequence[int]]], problems: list[str]
) -> dict[str, TensorSpec]:
    """Returns the tensors of all ranks, by name; notes those that are not the same on all that have them."""
    found: dict[str, dict[TensorSpec, list[int]]] = defaultdict(dict)
    for specs, ranks in told:
        for name, dtype, shape, nbytes in specs:
            spec = TensorSpec(name, dtype, tuple(shape), nbytes)
            found[name].setdefault(spec, []).extend(ranks)
    for name, variants in found.items():
        if len(variants) > 1:
            texts = (f"rank {min(ranks)} {spec.dtype} {list(spec.shape)}" for spec, ranks in variants.items())
            problems.append(f"{name}: {', '.join(texts)}")
    return {name: next(iter(variants)) for name, variants in found.items()}


def refuse_merge(head: str, problems: Sequence[str]) -> NoReturn:
    """Raises `PlanMismatch` with a line for each problem."""
    lines = [f"  {problem}" for problem in problems[:_NUM_SHOWN]]
    more = len(problems) - len(lines)
    lines += [f"  and {more} more"] if more > 0 else []
    raise PlanMismatch("\n".join([f"{head}, so nothing was saved:", *lines]))


def pack_boxes(boxes: Mapping[str, tuple[Box, ...]]) -> bytes:
    """Packs what a rank holds: layers that are alike compress well."""
    numbers: dict[tuple[Box, ...], int] = {}
    columns = [[name, numbers.setdefault(held, len(numbers))] for name, held in boxes.items()]
    return zlib.compress(json.dumps([list(numbers), columns]).encode(), level=1)


def unpack_boxes(packed: bytes) -> Iterator[tuple[str, tuple[Box, ...]]]:
    """Yields name and boxes of each tensor that another rank has packed."""
    boxes, columns = json.loads(zlib.decompress(packed))
    kinds = [tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in held) for held in boxes]
    return ((name, kinds[number]) for name, number in columns)


def boxes_by_rank(boxes: Sequence[Iterator[tuple[str, tuple[Box, ...]]]]) -> dict[str, BoxesByRank]:
    """Returns for each tensor which boxes which ranks have; the same object where that is the same."""
    numbers: dict[tuple[Box, ...], int] = {}
    columns: dict[str, array[int]] = defaultdict(partial(array, "I"))
    for rank, of_rank in enumerate(boxes):
        for name, held in of_rank:
            columns[name].extend((rank, numbers.setdefault(held, len(numbers))))
    kinds = list(numbers)
    known: dict[bytes, BoxesByRank] = {}
    for column in columns.values():
        key = column.tobytes()
        if key not in known:
            ranks_of: dict[int, list[int]] = {}
            for rank, number in zip(column[::2], column[1::2], strict=True):
                ranks_of.setdefault(number, []).append(rank)
            known[key] = tuple((kinds[number], tuple(ranks)) for number, ranks in ranks_of.items())
    return {name: known[column.tobytes()] for name, column in columns.items()}
