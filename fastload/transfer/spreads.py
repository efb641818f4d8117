"""Parcels of a round among the groups that want them: collectives of a process group for each of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from fastload.transfer.groups import handed, spread
from fastload.transfer.lanes import Ranks
from fastload.transfer.rounds import Leg

__all__ = ["Spreads"]


class Spreads:
    """The groups of one rank, each with a process group.

    All ranks call what they have part in in one order: by round, what is handed before what is spread, by
    group. So they cannot wait for each other in a circle, though some are ahead of others.

    Args:
        rank: This one.
        groups: The backend of a process group for each of this rank's groups; see `groups_of`.
    """

    def __init__(self, rank: int, groups: Mapping[Ranks, Any]) -> None:
        self._rank = rank
        self._groups = groups
        self._everyone = groups[max(groups, key=len)] if groups else None

    def bring(self, legs: Collection[Leg]) -> None:
        """Brings the parcels of a round to those who want them.

        Args:
            legs: All that goes through this rank.
        """
        if found := handed(legs):
            _at_once(self._everyone, [partial(self._hand, leg) for leg in found])
        for ranks, found in spread(legs).items():
            group = self._groups[ranks]
            _at_once(group, [partial(_broadcast, group, leg) for leg in found])

    def _hand(self, leg: Leg) -> Any:
        """The group of all has the ranks' own numbers."""
        assert self._everyone is not None
        if leg.parcel.hop == 0:
            return self._everyone.send([leg.data], leg.parcel.first, 0)
        return self._everyone.recv([leg.data], leg.parcel.reader, 0)


def _broadcast(group: Any, leg: Leg) -> Any:
    how = dist.BroadcastOptions()
    how.rootRank = leg.parcel.ranks.index(leg.parcel.first)
    return group.broadcast([leg.data], how)


def _at_once(group: Any, calls: Sequence[Callable[[], Any]]) -> None:
    """Calls what a group is to do, at once where its backend can."""
    coalesced = group.supports_coalescing
    if coalesced:
        group._start_coalescing()
    works = [call() for call in calls]
    if coalesced:
        works = [group._end_coalescing()]
    for work in works:
        work.wait()
