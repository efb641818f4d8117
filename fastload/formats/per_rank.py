"""What each rank has of its own in a state that is otherwise the same on all ranks.

The tensors of rank 3 are called ``@rank3.`` and their path, and lie with those of the other ranks in files of
their own. The structure has, at the place itself, one node for each rank::

    {"PerRank": [name of the place, [node of rank 0, node of rank 1, …]]}

The longer ones of a node's plain parts are tensors, too: of kind ``json``, whose bytes are the JSON text.
Each node has at least one tensor. So the structure stays short however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastload.formats.saved import leaves_of, list_of
from fastload.formats.untrusted import show

__all__ = [
    "NO_VALUE",
    "OWN_PREFIX",
    "OwnView",
    "PerRank",
    "fill_places",
    "has_gap",
    "own_prefix",
    "view",
]

OWN_PREFIX = "@rank"
NO_VALUE: dict[str, Any] = {"PerRank": []}
"""The node of a place that has no value for this rank."""

T = TypeVar("T")


@dataclass(eq=False)
class PerRank(Generic[T]):
    """A value of which each rank has its own, such as a random state or a position in the data.

    Stands anywhere in a state that is saved, except in another one::

        state = {"model": model.state_dict(), "rng": fastload.PerRank(torch.get_rng_state())}

    `fastload.save` keeps the value of each rank of the group: at most 1 MiB on a rank in all, and 256 MiB of
    all ranks. A load by as many ranks gives each of them its own back: the value itself, or, where ``into=``
    has a `PerRank`, in that one's `value`. A load by another number of ranks is an error that names the
    place; with ``strict=False`` it leaves the place out.

    Attributes:
        value: What this rank has: tensors, NumPy arrays, plain values, and containers of them. Tensors that
            the rest of the state has, too, or another `PerRank`, are stored once more, and not tied to those.
    """

    value: T


def own_prefix(rank: int) -> str:
    """Returns what the names of a rank's own tensors begin with."""
    return f"{OWN_PREFIX}{rank}."


def fill_places(structure: Any, values: Sequence[Sequence[Any]]) -> Any:
    """Returns the structure with the nodes of all ranks.

    Args:
        structure: As `describe` returns it on any rank: its places are ``{"PerRank": [name, number]}``.
        values: The nodes of each rank, in the order of the numbers.
    """
    if type(structure) is list:
        return [fill_places(child, values) for child in structure]
    if type(structure) is not dict:
        return structure
    if structure.keys() == {"PerRank"}:
        name, number = structure["PerRank"]
        return {"PerRank": [name, [nodes[number] for nodes in values]]}
    return {tag: fill_places(payload, values) for tag, payload in structure.items()}


@dataclass
class OwnView:
    """A structure as one rank is to see it.

    Attributes:
        structure: With this rank's own values; with `NO_VALUE` where there are none.
        elsewhere: The names of these places, and the number of ranks that they were saved for.
        together: Names of the tensors at the same place, those of all ranks, by the name of each of this
            rank's own.
    """

    structure: Any = None
    elsewhere: list[tuple[str, int]] = field(default_factory=list)
    together: dict[str, Sequence[str]] = field(default_factory=dict)


def view(structure: Any, rank: int, size: int) -> OwnView:
    """Returns a structure as a rank of a group of so many is to see it.

    Raises:
        ValueError: It is malformed (also `TypeError`).
    """
    seen = OwnView()
    seen.structure = _own(structure, rank, size, seen)
    return seen


def _own(node: Any, rank: int, size: int, seen: OwnView) -> Any:
    if type(node) is list:
        return [_own(child, rank, size, seen) for child in node]
    if type(node) is not dict:
        return node
    if node.keys() != {"PerRank"}:
        return {tag: _own(payload, rank, size, seen) for tag, payload in node.items()}
    name, values = list_of(node["PerRank"])
    if type(name) is not str or not list_of(values):
        raise ValueError(f"not a place of the ranks' own values: {show(node)}")
    if len(values) != size:
        seen.elsewhere.append((name, len(values)))
        return NO_VALUE
    names = [[leaf.stored for leaf in leaves_of(value, name)] for value in values]
    everyone = [stored for each in names for stored in each]
    seen.together.update((stored, everyone) for stored in names[rank])
    return values[rank]


def has_gap(node: Any) -> bool:
    """Whether there is a place in it that has no value for this rank."""
    if type(node) is list:
        return any(map(has_gap, node))
    return type(node) is dict and (node == NO_VALUE or any(map(has_gap, node.values())))
