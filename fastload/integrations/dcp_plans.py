"""Plans of torch.distributed.checkpoint that travel packed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

__all__ = ["PackedPlan", "packed"]


class PackedPlan(LoadPlan):
    """A plan whose items stay packed until somebody looks at them.

    dcp sends the plan of each rank to the coordinator and back. Pickled item by item that is the longest step
    of a small load, and few planners look at the plans of other ranks.

    Args:
        items: As of a `LoadPlan`.
        storage_data: Likewise.
        planner_data: Likewise.

    Attributes:
        unseen: The packed items; None once somebody has looked at them, who may have changed them.
    """

    unseen: bytes | None

    def __init__(self, items: list[ReadItem], storage_data: Any = None, planner_data: Any = None) -> None:
        super().__init__(items, storage_data, planner_data)

    @property
    def items(self) -> list[ReadItem]:
        """What is to be read."""
        if self.unseen is not None:
            self.items = _unpacked(self.unseen)
        return self._items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        self._items, self.unseen = items, None

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how it is pickled: as it is."""
        rest = (self.storage_data, self.planner_data)
        return (PackedPlan, (self._items, *rest)) if self.unseen is None else (_plan, (self.unseen, *rest))


def packed(plan: LoadPlan) -> LoadPlan:
    """Returns a plan that travels packed; the plan itself, if it has items of another kind than dcp's own."""
    is_plain = all(
        type(item) is ReadItem
        and all(type(index) is MetadataIndex and type(index.fqn) is str for index in _indices(item))
        for item in plan.items
    )
    return _plan(_packed(plan.items), plan.storage_data, plan.planner_data) if is_plain else plan


def _plan(unseen: bytes, storage_data: Any, planner_data: Any) -> PackedPlan:
    plan = PackedPlan([], storage_data, planner_data)
    plan.unseen = unseen
    return plan


def _indices(item: ReadItem) -> tuple[MetadataIndex, MetadataIndex]:
    return item.dest_index, item.storage_index


def _packed(items: Sequence[ReadItem]) -> bytes:
    rows = [
        (
            item.type.value,
            [(index.fqn, index.offset, index.index) for index in _indices(item)],
            (item.dest_offsets, item.storage_offsets, item.lengths),
        )
        for item in items
    ]
    return json.dumps(rows).encode()


def _unpacked(items: bytes) -> list[ReadItem]:
    found = []
    for kind, indices, sizes in json.loads(items):
        dest, storage = (MetadataIndex(*index) for index in indices)
        dest_offsets, storage_offsets, lengths = map(torch.Size, sizes)
        found.append(ReadItem(LoadItemType(kind), dest, dest_offsets, storage, storage_offsets, lengths))
    return found
