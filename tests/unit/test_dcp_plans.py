"""Plans of torch.distributed.checkpoint on their way to the coordinator and back."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from fastload.integrations.dcp.reader import PackedPlan, packed

sizes = st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size)
indices = st.builds(MetadataIndex, st.text(), st.none() | sizes, st.none() | st.integers(0, 9))
items = st.builds(ReadItem, st.sampled_from(LoadItemType), indices, sizes, indices, sizes, sizes)
plans = st.builds(LoadPlan, st.lists(items, max_size=5), st.none() | st.text(), st.none() | st.integers())


def sent(plan: Any) -> Any:
    return pickle.loads(pickle.dumps(plan))


def same(plan: LoadPlan, other: LoadPlan) -> bool:
    hints = [[(item.dest_index.index, item.storage_index.index) for item in p.items] for p in (plan, other)]
    return (
        plan.items == other.items
        and hints[0] == hints[1]
        and (plan.storage_data, plan.planner_data) == (other.storage_data, other.planner_data)
    )


@given(plans)
def test_arrive_as_they_were(plan: LoadPlan) -> None:
    at_coordinator = sent(packed(plan))
    back = sent(at_coordinator)
    assert isinstance(at_coordinator, PackedPlan)
    assert at_coordinator.packed_items is not None, "it was taken apart though nobody looked"
    assert same(back, plan)


@given(plans, items)
def test_what_a_planner_changes_at_the_coordinator_comes_back(plan: LoadPlan, item: ReadItem) -> None:
    in_place, anew = (sent(packed(plan)) for _ in range(2))
    in_place.items.append(item)
    anew = replace(anew, items=[*anew.items, item], planner_data="more")
    assert same(sent(in_place), LoadPlan([*plan.items, item], plan.storage_data, plan.planner_data))
    assert same(sent(anew), LoadPlan([*plan.items, item], plan.storage_data, "more"))


class OwnItem(ReadItem):
    """As a planner of one's own might plan."""


def test_items_of_other_kinds_travel_as_they_are() -> None:
    index, size = MetadataIndex("a"), torch.Size([1])
    plan = LoadPlan([OwnItem(LoadItemType.TENSOR, index, size, index, size, size)])
    assert packed(plan) is plan
    assert type(sent(packed(plan)).items[0]) is OwnItem
