"""Where a save goes and who writes it: settled by all ranks together before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.errors import OptionError, StorageError
from fastload.ranks.world import World
from fastload.saving.layout import Layout
from fastload.storage import Target

__all__ = ["Team", "choose_team", "open_stage"]


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


def open_stage(
    world: World,
    team: Team,
    target: Target,
    another: Callable[[], Target],
    layout: Layout,
    *,
    overwrite: bool,
) -> None:
    """Has the leaders prepare the place, and the others join them.

    Args:
        world: The ranks.
        team: This rank's.
        target: Where this rank writes; nothing has been asked of it yet.
        another: Opens one more target at the same place, to look whether another team's can be seen.
        layout: The files.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        OptionError: The hosts see one place although each was to have its own.
        PeerError: Some rank cannot write there, with its cause.
        CheckpointExists: There is a checkpoint already.
    """
    files = [(file.name, file.nbytes) for file in layout.files]

    def prepare() -> dict[str, Any] | None:
        return target.prepare(files, overwrite=overwrite) if world.rank == team.leader else None

    tickets = world.agree(f"preparing to save to {target.url}", prepare)

    def join() -> None:
        if world.rank != team.leader:
            _join(target, tickets[team.leader], team.leader)
        elif team.num_copies > 1:
            _look_for_others(
                another, [t for r, t in enumerate(tickets) if t is not None and r != team.leader]
            )

    world.agree(f"joining the save to {target.url}", join)


def _join(target: Target, ticket: Any, leader: int) -> None:
    try:
        target.join(ticket)
    except StorageError as error:
        raise StorageError(
            f"this rank does not see what rank {leader} prepared there ({error.args[0]}): the hosts do not "
            "share this path; save to one that they share, or a copy on each host with shared=False",
            url=target.url,
        ) from error


def _look_for_others(another: Callable[[], Target], tickets: Sequence[Any]) -> None:
    for ticket in tickets:
        target = another()
        try:
            target.join(ticket)
        except StorageError:
            continue
        finally:
            target.close()
        raise OptionError(
            f"shared=False, but the hosts share {target.url}: each would replace the other's copy"
        )
