"""Whom a rank sends parcels to, and receives them from. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from fastload.transfer.route import RoutedPlan

__all__ = ["partners"]


def partners(plan: RoutedPlan, rank: int) -> set[int]:
    """Returns whom a rank may send something to, or receive it from; they say the same of the rank.

    A parcel goes from its reader once around those who want it, in the order of the plan: from each of them
    to the next, and from a reader that does not want it to the first that comes after it.

    Args:
        plan: The plan.
        rank: The rank.
    """
    place = {member: place for place, member in enumerate(plan.order)}
    readers: dict[int, set[int]] = defaultdict(set)
    for share in plan.shares:
        readers[share.lane].add(share.reader)
    found: set[int] = set()
    for lane, of_lane in readers.items():
        for ranks in plan.lanes.densities[lane]:
            if rank not in ranks and rank not in of_lane:
                continue
            ring = sorted(place[member] for member in ranks)
            senders = {*ring, *(place[reader] for reader in of_lane)}
            after = {at: ring[bisect_right(ring, at) % len(ring)] for at in senders}
            found.update(second for first, second in after.items() if first == place[rank])
            found.update(first for first, second in after.items() if second == place[rank])
    return {plan.order[at] for at in found} - {rank}
