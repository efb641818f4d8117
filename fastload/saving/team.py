"""Which ranks write a copy of a checkpoint together. Pure: the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Team", "choose_team"]


@dataclass(frozen=True)
class Team:
    """The ranks that write one copy of a checkpoint together.

    Attributes:
        members: All of them, ascending; the first one prepares and publishes.
        writers: Those that write.
        leaders: The first ones of all teams.
    """

    members: tuple[int, ...]
    writers: tuple[int, ...]
    leaders: tuple[int, ...]

    @property
    def num_copies(self) -> int:
        """How many teams there are."""
        return len(self.leaders)

    @property
    def leader(self) -> int:
        """The member that prepares and publishes."""
        return self.members[0]


def choose_team(rank: int, hosts: Sequence[str], *, writers: int | str, shared: bool) -> Team:
    """Chooses with whom a rank writes.

    Args:
        rank: The rank.
        hosts: Host of each rank.
        writers: ``all``, ``host`` or how many of those that write one copy.
        shared: Whether all hosts write one copy together; else each host writes its own.
    """
    everyone = range(len(hosts))
    members = tuple(r for r in everyone if shared or hosts[r] == hosts[rank])
    leaders = (0,) if shared else _first_of_each(hosts, everyone)
    if writers == "host":
        return Team(members, _first_of_each(hosts, members), leaders)
    count = len(members)
    if isinstance(writers, int):
        count = min(count, writers)
    spread = tuple(members[index * len(members) // count] for index in range(count))
    return Team(members, spread, leaders)


def _first_of_each(hosts: Sequence[str], ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({hosts[rank]: rank for rank in reversed(ranks)}.values()))
