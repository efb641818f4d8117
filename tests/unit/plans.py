"""Plans of loads in which all ranks want everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastload.geometry.extents import HasExtent
from fastload.transfer.demand import Demand, Supply
from fastload.transfer.plan import TransferPlan, plan_transfer

__all__ = ["plan_for_all"]


def plan_for_all(
    wanted: Sequence[HasExtent], *, world_size: int, readers: Sequence[int], **how: Any
) -> TransferPlan:
    return plan_transfer(wanted, Supply(tuple(readers)), Demand(tuple(range(world_size))), **how)
