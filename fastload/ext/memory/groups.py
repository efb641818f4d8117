"""Placement of the copies of shares on hosts. Pure: the same on every rank.

As in Gemini (Wang et al., SOSP 2023): the hosts form groups of as many hosts as copies, and each host of a
group has the shares of all of them. Hosts that are left over form one ring with the last group, in which each
host has the shares of the hosts before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def hosts_with_copies(num_hosts: int, num_copies: int) -> list[tuple[int, ...]]:
    """Returns for each host the hosts that have a copy of its share, itself first.

    Args:
        num_hosts: Number of hosts.
        num_copies: Copies of each share; with fewer hosts, one on each.
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
    """The copies that one rank sends and receives.

    Attributes:
        targets: Ranks on other hosts that it sends its share to.
        sources: Ranks on other hosts that it receives the shares of, ascending.
        held: Ranks whose shares its host has, ascending.
        leads: Whether it is the first rank of its host.
        num_hosts: Number of hosts.
    """

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    held: tuple[int, ...]
    leads: bool
    num_hosts: int


def plan_copies(directories: Sequence[tuple[str, str]], rank: int, num_copies: int) -> CopyPlan:
    """Returns the copies of a rank: it sends its share to one rank of each host that is to have a copy.

    A host is a directory in memory. Several hosts on one machine, such as containers with their own memory,
    are lost together. So they are not neighbours as long as there are other machines.

    Args:
        directories: Machine and directory of each rank.
        rank: The rank.
        num_copies: As for `hosts_with_copies`.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for member, directory in enumerate(directories):
        ranks_of.setdefault(directory, []).append(member)
    hosts = _alternate_machines(list(ranks_of))
    copies = hosts_with_copies(len(hosts), num_copies)
    sends: dict[int, tuple[int, ...]] = {}
    held: list[int] = []
    for number, host in enumerate(hosts):
        others = [ranks_of[hosts[other]] for other in copies[number][1:]]
        for local, member in enumerate(ranks_of[host]):
            sends[member] = tuple(ranks[local % len(ranks)] for ranks in others)
        if hosts.index(directories[rank]) in copies[number]:
            held += ranks_of[host]
    return CopyPlan(
        targets=sends[rank],
        sources=tuple(member for member, targets in sorted(sends.items()) if rank in targets),
        held=tuple(sorted(held)),
        leads=ranks_of[directories[rank]][0] == rank,
        num_hosts=len(hosts),
    )


def _alternate_machines(hosts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Orders hosts so that neighbours are on different machines, as far as possible."""
    num_on_machine: dict[str, int] = {}
    order = []
    for number, (machine, _) in enumerate(hosts):
        order.append((num_on_machine.setdefault(machine, 0), number))
        num_on_machine[machine] += 1
    return [hosts[number] for _, number in sorted(order)]
