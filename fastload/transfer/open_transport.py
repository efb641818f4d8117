"""Chooses and opens the transport of a plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastload.base.devices import is_accelerator
from fastload.comm.world import World
from fastload.transfer.buffers import Plan
from fastload.transfer.plan import TransferPlan
from fastload.transfer.routed_plan import RoutedPlan
from fastload.transfer.transport import LocalTransport, Transport


def open_transport(
    world: World,
    plan: Plan,
    *,
    order: Sequence[int],
    machines: Sequence[Hashable],
    hosts: Sequence[str] = (),
    device: torch.device | None = None,
    backend: str = "",
) -> Transport:
    """Opens the transport that fits a plan and the device.

    Args:
        world: The ranks.
        plan: The plan.
        order: The ranks that take part, those of a host next to each other.
        machines: For each rank of the world, what it has in common with those it can share memory with.
        hosts: Host of each rank, for transports between devices.
        device: Where the tensors will live on this rank; host memory if None.
        backend: What moves data between the devices of all ranks; empty if nothing does.
    """
    pinned = device is not None and is_accelerator(device)
    if backend and device is not None and isinstance(plan, TransferPlan):
        from fastload.transfer.device_transport import DeviceTransport

        return DeviceTransport(world, device, backend, hosts)
    if not plan.exchanges:
        return LocalTransport(world.rank, pinned=pinned)
    if backend and device is not None and isinstance(plan, RoutedPlan):
        from fastload.transfer.device_transport import RoutedDeviceTransport, groups_of

        if groups := groups_of(plan):
            return RoutedDeviceTransport(world, groups, device, backend)
    # One rank alone, or each for itself, need not import it.
    from fastload.transfer.host_transport import HostTransport
    from fastload.transfer.messages import Routing, sharing_domains

    # Shared memory takes one buffer more than rounds in flight, so at least two.
    domains = sharing_domains(machines, plan.recipients if plan.depth > 1 else ())
    routing = Routing(world.rank, order, [domains[rank] for rank in order])
    return HostTransport(world, routing, plan.pairs(world.rank), pinned=pinned)


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
