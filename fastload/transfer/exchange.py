"""The chunks of one round, each read by its owner, come to every rank.

A slab has room for one round: a slot per rank. An exchange takes the chunk that this rank has read and
delivers all the others, several rounds at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fastload.ranks.world import World
from fastload.transfer.rounds import Exchange, LocalExchange

if TYPE_CHECKING:
    from fastload.transfer.tree import Trees

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
    return _open_gloo(world, _trees(tuple(hosts), tuple(machines)), pinned=on_cuda)


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


def has_nccl(world: World) -> bool:
    """Whether the group of a world can exchange CUDA tensors through NCCL."""
    if world.group is None or not dist.is_nccl_available():
        return False
    return "nccl" in dist.get_backend_config(world.group)
