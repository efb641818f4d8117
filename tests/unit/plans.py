"""Plans of loads in which all ranks want everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from fastload.geometry.ranges import HasRange
from fastload.transfer.plan import TransferPlan, plan_transfer

__all__ = ["drop_out", "plan_for_all"]


def plan_for_all(
    wanted: Sequence[HasRange], *, world_size: int, readers: Sequence[int], **how: Any
) -> TransferPlan:
    return plan_transfer(wanted, tuple(readers), tuple(range(world_size)), **how)


def staged_bytes(plan: TransferPlan) -> int:
    """Returns the most bytes of one rank's part of all buffers, those for reading ahead included."""
    num_own = plan.num_own if plan.ahead else plan.num_own - plan.depth  # whose rounds have memory
    if plan.even_slots:  # in host memory
        num_own = -(-plan.ahead // plan.num_windows)
    return plan.depth * -(-plan.buffer_bytes // plan.num_sharing) + plan.part_of(num_own * plan.own_bytes)


def drop_out(data: st.DataObject, plan: TransferPlan) -> tuple[TransferPlan, list[tuple[int, int]]]:
    """Has some readers drop out: the plan of what is left, and (round, rank) of what was read."""
    broken = data.draw(st.sets(st.sampled_from(plan.readers), max_size=len(plan.readers) - 1))
    num_done = data.draw(st.integers(0, plan.num_rounds))
    num_posted = data.draw(st.integers(num_done, plan.num_rounds))
    lacking = [(index, rank) for index in range(num_done, num_posted) for rank in sorted(broken)]
    left = plan.without(broken, lacking, num_posted)
    assert left is not None
    assert left.buffer_bytes <= plan.buffer_bytes
    chunks = [(index, rank) for index in range(num_posted) for rank in plan.readers]
    return left, [chunk for chunk in chunks if chunk not in lacking]
