"""The chunks of one round, each read by its owner, come to every rank.

A slab has room for one round: a slot per rank. An exchange takes the chunk that this rank has read and
delivers all the others, several rounds at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from fastload.ranks.world import World
from fastload.transfer.rounds import Exchange, LocalExchange

__all__ = ["has_nccl", "open_exchange", "open_members_exchange", "ring_order"]


def open_exchange(
    world: World, *, hosts: Sequence[str], machines: Sequence[str], local: bool, device: torch.device
) -> Exchange:
    """Opens the exchange that fits the ranks and the device.

    Args:
        world: The ranks.
        hosts: Host of each rank.
        machines: What ranks have in common that can share memory.
        local: Nothing is to be exchanged: one rank, or each rank reads all for itself.
        device: Where the tensors will live on this rank.
    """
    on_cuda = device.type == "cuda"
    if local:
        return LocalExchange(pinned=on_cuda)
    if on_cuda and has_nccl(world):
        from fastload.transfer.nccl import NcclExchange

        return NcclExchange(world, device, hosts)
    order = ring_order(hosts)
    return _open_gloo(world, order, [machines[rank] for rank in order], pinned=on_cuda)


def ring_order(hosts: Sequence[str]) -> list[int]:
    """Returns all ranks, those of a host next to each other.

    Args:
        hosts: Host of each rank.
    """
    first = {host: hosts.index(host) for host in hosts}
    return sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))


def open_members_exchange(world: World, members: Sequence[int]) -> Exchange:
    """Opens an exchange through host memory between some ranks, each on a host of its own.

    Args:
        world: The ranks.
        members: Those that take part, ascending; this rank is one of them.
    """
    if len(members) == 1:
        return LocalExchange(pinned=False)
    return _open_gloo(world, members, members, pinned=False)


def _open_gloo(
    world: World, members: Sequence[int], machines: Sequence[Hashable], *, pinned: bool
) -> Exchange:
    # One rank alone, or each for itself, need not import it.
    from fastload.transfer.gloo import GlooExchange
    from fastload.transfer.tree import Trees

    return GlooExchange(world, Trees.between(members, machines), pinned=pinned)


def has_nccl(world: World) -> bool:
    """Whether the group of a world can exchange CUDA tensors through NCCL."""
    if world.group is None or not dist.is_nccl_available():
        return False
    return "nccl" in dist.get_backend_config(world.group)
