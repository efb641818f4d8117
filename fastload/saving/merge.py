"""The structures of states of which each rank has a part → that of the whole. Pure.

Dicts are merged by key. A key that only some ranks have comes where it is on them: before the next one that
is known. So the stages of a pipeline, in the order of their ranks, make the model in its order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastload.formats.saved import leaf_of, read_keys
from fastload.formats.values import Attribute, decode_value, show_key, show_path

__all__ = ["merge"]

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
    leaf = leaf_of(node, "")
    if leaf is not None:
        return f"a tensor{f' ({leaf.kind})' if leaf.kind else ''}"
    kind = _kind(node)
    if kind in ("list", "tuple", "set", "frozenset", "state_dict", "defaultdict", "PerRank", *_DICTS):
        return f"a {kind}" + (f" of {len(node)}" if kind == "list" else "")
    return show_key(decode_value(node))
