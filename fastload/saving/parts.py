"""States of which each rank has a part: told to all ranks, and merged into one, by key."""

from __future__ import annotations

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastload.errors import PlanMismatch
from fastload.formats.state import leaves
from fastload.geometry.box import Box
from fastload.saving.call import Call
from fastload.saving.describe import Described, lay_out_files
from fastload.saving.differences import Content
from fastload.saving.holdings import Holdings
from fastload.saving.layout import TensorSpec
from fastload.saving.merge import merge

if TYPE_CHECKING:
    from fastload.formats.dtensors import BoxesByRank

__all__ = ["merge_parts"]

_NUM_SHOWN = 20


def merge_parts(call: Call, described: Described) -> tuple[Described, Holdings]:
    """Tells the other ranks what this one has, and merges what all have.

    Raises:
        PlanMismatch: The parts do not go together, or some tensor is not whole; the same on all ranks.
        FastloadError: Some rank could not tell.
    """
    world, what = call.world, f"{call.what}: telling what each rank has"
    content = described.content
    form = zlib.compress(json.dumps([content.structure, content.specs]).encode(), level=1)
    forms = world.gather_bytes(what, lambda: form)
    boxes = world.gather_bytes(what, lambda: _pack(_boxes_of(described)))
    whole = _Whole.of(forms)
    layout = lay_out_files(whole.specs, call.options)
    held = _join([_unpack(packed) for packed in boxes])
    holdings = Holdings(layout, held)
    if holdings.missing:
        _refuse("the ranks together do not have the whole state", holdings.missing)
    merged = Content(whole.structure, layout.digest(), whole.specs, {})
    return replace(
        described, content=merged, layout=layout, source=described.source.laid_out(layout)
    ), holdings


@dataclass(frozen=True)
class _Whole:
    """The merged state.

    Attributes:
        structure: All but its tensors.
        specs: These, in its order.
    """

    structure: Any
    specs: list[TensorSpec]

    @classmethod
    def of(cls, forms: Sequence[bytes]) -> _Whole:
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
        for leaf in leaves(structure) if not problems else ():
            stored[leaf.stored] = specs[leaf.stored]
            if leaf.stored == leaf.name and leaf.name in own_names:
                problems.append(f"{leaf.name}: two keys of different ranks spell this name")
            own_names.add(leaf.name)
        if problems:
            _refuse("the ranks hold parts of a state that do not go together", problems)
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


def _refuse(head: str, problems: Sequence[str]) -> None:
    lines = [f"  {problem}" for problem in problems[:_NUM_SHOWN]]
    more = len(problems) - len(lines)
    lines += [f"  and {more} more"] if more > 0 else []
    raise PlanMismatch("\n".join([f"{head}, so nothing was saved:", *lines]))


def _boxes_of(described: Described) -> Mapping[str, tuple[Box, ...]]:
    if described.held is not None:
        return described.held.boxes
    names = (spec.name for spec in described.content.specs)
    return {name: (Box.whole(described.source.tensor(name).shape),) for name in names}


def _pack(boxes: Mapping[str, tuple[Box, ...]]) -> bytes:
    """Packs what a rank holds: layers that are alike compress well."""
    numbers: dict[tuple[Box, ...], int] = {}
    columns = [[name, numbers.setdefault(held, len(numbers))] for name, held in boxes.items()]
    return zlib.compress(json.dumps([list(numbers), columns]).encode(), level=1)


def _unpack(packed: bytes) -> Iterator[tuple[str, tuple[Box, ...]]]:
    boxes, columns = json.loads(zlib.decompress(packed))
    kinds = [tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in held) for held in boxes]
    return ((name, kinds[number]) for name, number in columns)


def _join(boxes: Sequence[Iterator[tuple[str, tuple[Box, ...]]]]) -> dict[str, BoxesByRank]:
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
