"""The words for ranks, hosts and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from fastload.doctor.examine import Site
from fastload.doctor.facts import Facts

__all__ = ["by_value", "host_names", "hosts", "limit", "rank_names", "some"]

_MOST_SHOWN = 4


def hosts(site: Site) -> list[list[Facts]]:
    """Returns the facts of the ranks of each host, by first rank."""
    by_machine: dict[str, list[Facts]] = {}
    for facts in site.facts:
        by_machine.setdefault(facts.machine, []).append(facts)
    return list(by_machine.values())


def by_value(site: Site, value: Callable[[Facts], Hashable]) -> str:
    """Writes a value that all ranks have, or each value with the ranks that have it."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, facts in enumerate(site.facts):
        ranks.setdefault(value(facts), []).append(rank)
    if len(ranks) == 1:
        return str(next(iter(ranks)))
    return "; ".join(f"{text} on {rank_names(site, those)}" for text, those in ranks.items())


def rank_names(site: Site, ranks: Sequence[int]) -> str:
    """Writes which ranks, with the host if it is one."""
    names = dict.fromkeys(site.facts[rank].host for rank in ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({next(iter(names))})"
    where = f" ({next(iter(names))})" if len(names) == 1 else ""
    return f"{len(ranks)} ranks{where}: {some([str(rank) for rank in ranks])}"


def host_names(hosts: Sequence[Sequence[Facts]]) -> str:
    """Writes which hosts, given the facts of their ranks."""
    return some([facts[0].host for facts in hosts])


def some(names: Sequence[str]) -> str:
    """Writes the first few of some names."""
    shown = ", ".join(names[:_MOST_SHOWN])
    return f"{shown} and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else shown


def limit(number: int) -> str:
    """Writes a limit of the system."""
    return "unlimited" if number < 0 else f"{number:,}"
