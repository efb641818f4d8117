"""Which hosts keep which shares. Pure: the same on every rank.

As in Gemini (Wang et al., SOSP 2023): groups of as many hosts as there are to be copies, each of which keeps
what all of its group have; if the hosts do not divide into such groups, the rest are one ring, in which each
keeps what those before it have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def hosts_keeping(num_hosts: int, num_copies: int) -> list[tuple[int, ...]]:
    """Returns for each host which hosts keep its share, itself first.

    Args:
        num_hosts: How many hosts there are.
        num_copies: How many are to keep each share; all hosts, if there are fewer.
    """
    copies = min(num_copies, num_hosts)
    num_groups = num_hosts // copies
    in_groups = num_hosts if num_hosts % copies == 0 else (num_groups - 1) * copies
    found = []
    for host in range(num_hosts):
        first, size = (
            (host // copies * copies, copies) if host < in_groups else (in_groups, num_hosts - in_groups)
        )
        found.append(tuple(first + (host - first + ahead) % size for ahead in range(copies)))
    return found


@dataclass(frozen=True)
class CopyPlan:
    """The copies that one rank sends, receives and keeps.

    Attributes:
        targets: The ranks on other hosts that get its share.
        sources: The ranks on other hosts of which it gets the share, ascending.
        held: The ranks of which its host keeps the shares, ascending.
        leads: Whether it is the first rank of its host.
        num_hosts: Hosts that there are.
    """

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    held: tuple[int, ...]
    leads: bool
    num_hosts: int


def plan_copies(homes: Sequence[tuple[str, str]], rank: int, num_copies: int) -> CopyPlan:
    """Says what a rank has to do with copies: each rank gives its share to one of each host that keeps it.

    A host is whoever keeps things in one place. Those of one machine, such as containers with memory of their
    own, are lost together, so they are not next to each other as long as there are other machines.

    Args:
        homes: Of each rank, its machine, and the place there.
        rank: The rank.
        num_copies: As for `keepers`.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for member, home in enumerate(homes):
        ranks_of.setdefault(home, []).append(member)
    hosts = _apart(list(ranks_of))
    kept_by = hosts_keeping(len(hosts), num_copies)
    sends: dict[int, tuple[int, ...]] = {}
    held: list[int] = []
    for number, host in enumerate(hosts):
        others = [ranks_of[hosts[keeper]] for keeper in kept_by[number][1:]]
        for local, member in enumerate(ranks_of[host]):
            sends[member] = tuple(ranks[local % len(ranks)] for ranks in others)
        if hosts.index(homes[rank]) in kept_by[number]:
            held += ranks_of[host]
    return CopyPlan(
        targets=sends[rank],
        sources=tuple(member for member, targets in sorted(sends.items()) if rank in targets),
        held=tuple(sorted(held)),
        leads=ranks_of[homes[rank]][0] == rank,
        num_hosts=len(hosts),
    )


def _apart(hosts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Orders hosts so that those that follow each other are on different machines, as far as possible."""
    on_machine: dict[str, int] = {}
    turns = []
    for number, (machine, _) in enumerate(hosts):
        turns.append((on_machine.setdefault(machine, 0), number))
        on_machine[machine] += 1
    return [hosts[number] for _, number in sorted(turns)]
