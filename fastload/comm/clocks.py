"""What takes the clock of one host to that of another, for spans of several hosts in one picture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from fastload.comm.world import World

__all__ = ["compare_clocks"]

_NUM_PINGS = 8


def compare_clocks(world: World, hosts: Sequence[str], clock: Callable[[], float]) -> float | None:
    """Returns what takes this rank's clock to rank 0's, in seconds; None if that cannot be said.

    Rank 0 asks one rank of each host for its time, again and again; the shortest round trip says it best.
    What one of them does not answer is not known for its host only.

    Args:
        world: The ranks, all of which call this, once in each world.
        hosts: Host of each rank; on one host all clocks are the same.
        clock: Tells the time, in seconds.

    Raises:
        PeerError: The rendezvous store is gone.
    """
    if len(set(hosts)) == 1:
        return 0.0
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    store, rank, leader = world.store, world.rank, hosts.index(hosts[world.rank])
    assert store is not None
    wait = timedelta(seconds=world.patience_s / 2)

    def await_value(key: str) -> str:
        # A blocking wait, which locks the store for other threads: there is none yet that asks.
        store.wait([key], wait)
        return str(store.get(key), "ascii")

    def ask_all() -> float | None:
        for other in leaders:
            if other == 0:
                continue
            offset = ""
            with contextlib.suppress(RuntimeError, ValueError):
                offset = repr(min(_ping(store, other, n, await_value, clock) for n in range(_NUM_PINGS))[1])
            store.set(_offset(other), offset)
        return 0.0

    def answer() -> float | None:
        with contextlib.suppress(RuntimeError):
            for number in range(_NUM_PINGS if leader == rank else 0):
                await_value(_ping_key(leader, number))
                store.set(_pong_key(leader, number), repr(clock()))
            offset = await_value(_offset(leader)) if leader else "0.0"
            return float(offset) if offset else None
        return None

    return world.rendezvous.ask("comparing clocks", world.patience_s, ask_all if rank == 0 else answer)


def _ping(
    store: Any, other: int, number: int, await_value: Callable[[str], str], clock: Callable[[], float]
) -> tuple[float, float]:
    """Returns a round trip to another rank, and what takes its clock to this one, in seconds."""
    began = clock()
    store.set(_ping_key(other, number), "")
    there = float(await_value(_pong_key(other, number)))
    ended = clock()
    return ended - began, (began + ended) / 2 - there


def _ping_key(other: int, number: int) -> str:
    return f"clocks/ping/{other}/{number}"


def _pong_key(other: int, number: int) -> str:
    return f"clocks/pong/{other}/{number}"


def _offset(leader: int) -> str:
    return f"clocks/offset/{leader}"
