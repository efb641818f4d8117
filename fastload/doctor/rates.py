"""How fast bytes go from host to host, over the connections that a load would use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from fastload.comm.world import World
from fastload.errors import FastloadError
from fastload.transfer.links import Links

__all__ = ["HostRate", "measure_rates"]

_LIMIT_S = 15.0  # for connecting, and for a message
_AIM_S = 1.0  # what the slowest link is measured for
_MESSAGE_BYTES = 4 << 20
_FEWEST, _MOST = 4, 1024
_IN_FLIGHT = 2


@dataclass(frozen=True)
class HostRate:
    """What came to a host from the one before it, while it sent as much to the one behind it.

    Attributes:
        host: Its name.
        source: The other one's.
        bytes_per_s: How fast; 0 if nothing came.
        problem: Why nothing came; empty if it did.
    """

    host: str
    source: str
    bytes_per_s: float
    problem: str = ""


def measure_rates(world: World, hosts: Sequence[str], machines: Sequence[str]) -> list[HostRate]:
    """Sends bytes around a ring of the hosts; one connection from each to the next, all at a time.

    Args:
        world: The ranks, all of which call this.
        hosts: Name of each rank's host.
        machines: What the ranks of one host have in common, and no others.

    Returns:
        One for each host, the same on all ranks; nothing if there is only one host.

    Raises:
        FastloadError: A rank did not answer.
    """
    leaders = [machines.index(one) for one in dict.fromkeys(machines)]
    if len(leaders) == 1:
        return []
    number = leaders.index(world.rank) if world.rank in leaders else None
    ring = _Ring(number, len(leaders)) if number is not None else None
    try:
        opened = world.agree("finding the other hosts", ring.open if ring else dict)
        if ring:
            ring.connect([opened[leader] for leader in leaders])
        trials = world.agree("trying the links", lambda: ring.trial() if ring else 0.0)
        rates = [trials[leader] for leader in leaders]
        count = min(_MOST, max(_FEWEST, round(_AIM_S * min(rates) / _MESSAGE_BYTES)))
        found = world.agree(
            "measuring the links", lambda: asdict(ring.result(hosts, leaders, count)) if ring else {}
        )
    finally:
        if ring:
            ring.links.drop()
    return [HostRate(**found[leader]) for leader in leaders]


class _Ring:
    """A host's place among the others: it gets bytes from the one before and sends them to the one behind.

    Args:
        number: Of this host.
        size: How many there are, two at least.
    """

    def __init__(self, number: int, size: int) -> None:
        self.links = Links(number, timedelta(seconds=_LIMIT_S))
        self.before, self.behind = (number - 1) % size, (number + 1) % size
        self.number = number
        self.problem = ""

    def open(self) -> dict[str, list[str]]:
        try:
            return self.links.open({self.before, self.behind})
        except FastloadError as error:
            self.problem = str(error)
            return {}

    def connect(self, addresses: Sequence[dict[str, list[str]]]) -> None:
        if not all(addresses):
            self.problem = self.problem or "another host cannot be connected to"
            return
        try:
            self.links.find(dict(enumerate(addresses)))
            self.links.connect(give_up=lambda: False)
        except (FastloadError, RuntimeError) as error:
            self.problem = str(error)

    def trial(self) -> float:
        self._pass_on(1)  # the first message finds its way, and memory is touched for the first time
        return self._pass_on(_IN_FLIGHT)

    def result(self, hosts: Sequence[str], leaders: Sequence[int], count: int) -> HostRate:
        host, source = hosts[leaders[self.number]], hosts[leaders[self.before]]
        rate = self._pass_on(count)
        return HostRate(host, source, rate, self.problem)

    def _pass_on(self, count: int) -> float:
        """Sends and receives so many messages; returns their bytes per second, 0 if any did not come."""
        if self.problem:
            return 0.0
        outgoing = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        incoming = [torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(_IN_FLIGHT)]
        limit = timedelta(seconds=_LIMIT_S)
        began, works = time.perf_counter(), list[Any]()
        try:
            for index in range(count):
                works.append(self.links.receive(incoming[index % _IN_FLIGHT], self.before, 0))
                works.append(self.links.send(outgoing, self.behind, 0))
                if len(works) >= 2 * _IN_FLIGHT:
                    works.pop(0).wait(limit)
                    works.pop(0).wait(limit)
            for work in works:
                work.wait(limit)
        except RuntimeError as error:
            self.problem = f"nothing came within {_LIMIT_S:.0f} s: {str(error).partition(chr(10))[0]}"
            return 0.0
        return count * _MESSAGE_BYTES / (time.perf_counter() - began)
