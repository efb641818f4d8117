"""The chunks of one round, each read by its owner, come to every rank.

A slab has room for one round: a slot per rank. An exchange takes the chunk that this rank has read and
delivers all the others, several rounds at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fastload.base.devices import is_accelerator
from fastload.comm.world import World
from fastload.transfer.rounds import Exchange, LocalExchange

if TYPE_CHECKING:
    from fastload.transfer.tree import Trees

__all__ = ["backend_of", "open_exchange", "open_members_exchange", "ring_order"]


def open_exchange(
    world: World,
    *,
    hosts: Sequence[str],
    machines: Sequence[str],
    local: bool,
    device: torch.device,
    backend: str,
) -> Exchange:
    """Opens the exchange that fits the ranks and the device.

    Args:
        world: The ranks.
        hosts: Host of each rank.
        machines: What ranks have in common that can share memory.
        local: Nothing is to be exchanged: one rank, or each rank reads all for itself.
        device: Where the tensors will live on this rank.
        backend: What moves data between the devices of all ranks; empty if nothing does.
    """
    pinned = is_accelerator(device)
    if local:
        return LocalExchange(pinned=pinned)
    if backend:
        from fastload.transfer.device_exchange import DeviceExchange

        return DeviceExchange(world, device, backend, hosts)
    return _open_gloo(world, _trees(tuple(hosts), tuple(machines)), pinned=pinned)


@lru_cache(maxsize=4)  # each load of an open checkpoint, and most others of a group, have the same
def _trees(hosts: tuple[str, ...], machines: tuple[str, ...]) -> Trees:
    from fastload.transfer.tree import Trees

    order = ring_order(hosts)
    return Trees.between(order, [machines[rank] for rank in order])


def ring_order(hosts: Sequence[str]) -> list[int]:
    """Returns all ranks, those of a host next to each other.

    Args:
        hosts: Host of each rank.
    """
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(chain.from_iterable(found.values()))


def open_members_exchange(world: World, members: Sequence[int]) -> Exchange:
    """Opens an exchange through host memory between some ranks, each on a host of its own.

    Args:
        world: The ranks.
        members: Those that take part, ascending; this rank is one of them.
    """
    if len(members) == 1:
        return LocalExchange(pinned=False)
    from fastload.transfer.tree import Trees

    return _open_gloo(world, Trees.between(members, members), pinned=False)


def _open_gloo(world: World, trees: Trees, *, pinned: bool) -> Exchange:
    from fastload.transfer.gloo import GlooExchange  # one rank alone, or each for itself, need not import it

    return GlooExchange(world, trees, pinned=pinned)


def backend_of(group: Any, device_type: str) -> str:
    """Returns the backend that moves tensors between devices of a type, such as ``nccl``; empty if none does.

    Gloo and MPI take device tensors by way of host memory, where fastload has a faster way.
    """
    if group is None or not dist.is_available():
        return ""
    for entry in dist.get_backend_config(group).split(","):
        device, _, backend = entry.rpartition(":")
        if device == device_type and backend not in ("gloo", "mpi", "fake", "undefined"):
            return backend
    return ""
