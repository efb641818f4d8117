"""Which ranks pass on among each other what all of them want, where they are few groups. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from fastload.transfer.lanes import Ranks
from fastload.transfer.rounds import Leg
from fastload.transfer.route import RoutedPlan

__all__ = ["groups_of", "handed", "spread"]

_MAX_NUM_GROUPS = 4  # of one rank: each takes a communicator


def groups_of(plan: RoutedPlan) -> tuple[Ranks, ...]:
    """Returns the groups that the parcels of a plan go around in, ascending; the same on all ranks.

    These are the ranks that want the same, and all ranks if some parcel is read by a rank that does not want
    it. There are none if no two ranks want the same, if some rank were in too many groups, or if there is no
    room for chunks in host memory besides slabs on devices.

    Args:
        plan: The plan.
    """
    if plan.slab_bytes + plan.longest_chunk_bytes > plan.staging_bytes:
        return ()
    readers: dict[int, set[int]] = defaultdict(set)
    for share in plan.shares:
        readers[share.lane].add(share.reader)
    wanting = {ranks for lane in readers for ranks in plan.lanes.densities[lane]}
    groups = {ranks for ranks in wanting if len(ranks) > 1}
    counts = Counter(rank for ranks in groups for rank in ranks)
    if max(counts.values(), default=0) > _MAX_NUM_GROUPS or not groups:
        return ()
    is_handed = any(
        not of_lane <= set(ranks) for lane, of_lane in readers.items() for ranks in plan.lanes.densities[lane]
    )
    return tuple(sorted(groups | {tuple(sorted(plan.order))} if is_handed else groups))


def handed(legs: Iterable[Leg]) -> list[Leg]:
    """Returns what this rank hands to, or gets from, a rank that reads but does not want it.

    In an order that is the same on both of them.

    Args:
        legs: All that goes through this rank in a round.
    """
    return _in_order(leg for leg in legs if leg.parcel.is_handed and leg.parcel.hop <= 1)


def spread(legs: Iterable[Leg]) -> dict[Ranks, list[Leg]]:
    """Returns what goes around in each group of this rank's; groups, and legs, in one order on all ranks.

    Args:
        legs: All that goes through this rank in a round.
    """
    found: dict[Ranks, list[Leg]] = {}
    for leg in _in_order(leg for leg in legs if leg.parcel.is_own and len(leg.parcel.ranks) > 1):
        found.setdefault(leg.parcel.ranks, []).append(leg)
    return found


def _in_order(legs: Iterable[Leg]) -> list[Leg]:
    # Of one reader, each group has at most one parcel in a round.
    return sorted(legs, key=lambda leg: (leg.parcel.ranks, leg.parcel.reader))
