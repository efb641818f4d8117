"""A load made ready: what this rank wants, the plan that follows from what all want, and what moves it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fastload.base.devices import is_accelerator, parse_device, with_index
from fastload.comm.group import members_of
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.manifest import Manifest
from fastload.loading.access import Access
from fastload.loading.match import Match, match
from fastload.loading.place import Placer
from fastload.options import LoadOptions
from fastload.transfer.buffers import Buffers, Plan
from fastload.transfer.guards import Guards
from fastload.transfer.open_transport import backend_of, open_transport
from fastload.transfer.pipeline import Pipeline, read_threads
from fastload.transfer.plan import TransferPlan, plan_transfer
from fastload.transfer.read import ChunkReader
from fastload.transfer.routing import ring_order
from fastload.transfer.strategy import Decision, choose_strategy
from fastload.transfer.transport import Transport
from fastload.transfer.verify import Verifier, refuse

__all__ = [
    "Job",
    "LoadRequest",
    "Opened",
    "Request",
    "Wish",
    "closing_unused",
    "decide",
    "open_job",
    "open_whole",
    "target_device",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that all ranks have open.

    Attributes:
        world: The ranks.
        access: What is where, and who can read it.
        options: How to load.
        verifier: Knows its checksum blocks; None if none are to be verified.
        header_bytes: Bytes that this rank has read to open it.
    """

    world: World
    access: Access
    options: LoadOptions
    verifier: Verifier | None
    header_bytes: int

    @property
    def block_bytes(self) -> int:
        """Length of the checksum blocks that are to be verified; 0 if none are."""
        return self.access.manifest.block_bytes if self.verifier is not None else 0

    @property
    def ranks_on_host(self) -> int:
        """How many ranks this rank's host has."""
        return self.access.hosts.count(self.access.hosts[self.world.rank])


class Request(Protocol):
    """What a rank asks for, in one way or another.

    Attributes:
        device: Where new tensors live.
        dtype: Cast of floating point tensors, or None for none.
    """

    @property
    def device(self) -> torch.device | str | None: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype | str | None: ...  # noqa: D102
    @property
    def is_same(self) -> bool:
        """Whether all ranks have to ask for the same."""
        ...

    def match(self, opened: Opened, device: torch.device) -> Match:
        """Finds the memory for it."""
        ...


@dataclass(frozen=True)
class LoadRequest:
    """What a caller asks for; see `fastload.load`."""

    into: Any
    device: torch.device | str | None
    dtype: torch.dtype | str | None
    names: Sequence[str] | str | None
    strict: bool

    @property
    def is_same(self) -> bool:
        """Whether all ranks have to ask for the same."""
        return self.into is None

    def match(self, opened: Opened, device: torch.device) -> Match:
        """Finds the memory for it."""
        return match(
            opened.access.manifest,
            names=self.names,
            into=self.into,
            device=device,
            dtype=_dtype(self.dtype),
            strict=self.strict,
            rank=opened.world.rank,
            size=opened.world.size,
            group=members_of(opened.world.group),
        )


@dataclass(frozen=True)
class Wish:
    """What this rank wants, whatever the others want.

    Attributes:
        opened: Of what.
        matched: Which tensors go where.
        device: Where they are: the first of them that are not in host memory.
        dtype: Cast of floating point tensors, or None for none.
        decision: The strategy.
        backend: What moves data between the devices of all ranks, such as ``nccl``; empty if nothing does.
        detour: Why bytes go through host memory; empty if `backend` is not.
    """

    opened: Opened
    matched: Match
    device: torch.device
    dtype: torch.dtype | None
    decision: Decision
    backend: str
    detour: str

    @classmethod
    def of(cls, opened: Opened, request: Request) -> Wish:
        """Finds out what a request means for this rank.

        Raises:
            FastloadError: This rank cannot load it.
        """
        world = opened.world
        device = target_device(request.device)
        matched = request.match(opened, device)
        device = matched.device or device
        backend, detour = "", "the tensors are in host memory"
        if is_accelerator(device):
            backend = backend_of(world.group, device.type)
            detour = "" if backend else f"the process group has no backend between {device.type} devices"
        decision = decide(opened, fast_links=bool(backend))
        if matched.outbox is not None and matched.outbox.is_mapped:
            decision = replace(decision, why=f"{decision.why}; mapped, not read")
        return cls(opened, matched, device, _dtype(request.dtype), decision, backend, detour)

    def through_hosts(self) -> Wish:
        """Returns the same, decided as if no backend connected devices: what all ranks can tell alike."""
        decision = decide(self.opened)
        detour = "not all ranks load to devices that one backend connects"
        return replace(self, decision=decision, backend="", detour=detour)

    def why_transport(self, transport: Transport) -> str:
        """Returns why a transport carries the bytes, for the report."""
        if transport.name == "none":
            return "no rank needs bytes from another one"
        if not self.backend:
            return self.detour
        if transport.name.startswith(self.backend):
            return f"the process group's backend between {self.device.type} devices"
        return "no two ranks want the same bytes, or they form too many groups for communicators of devices"

    @property
    def is_whole(self) -> bool:
        """Whether no tensor, and no piece of one, is wanted in parts."""
        return all(destination.runs is None for destination in self.matched.destinations)


def decide(opened: Opened, *, fast_links: bool = False) -> Decision:
    """Chooses the strategy of a load.

    Args:
        opened: The checkpoint.
        fast_links: Whether the exchange runs between devices.
    """
    access = opened.access
    if access.holders is not None:
        return Decision("allgather", "each host has a part, which no other rank reads", access.readers)
    return choose_strategy(
        opened.options.strategy,
        world_size=opened.world.size,
        readers=access.readers,
        hosts=access.hosts,
        shared=access.shared,
        fast_links=fast_links,
    )


@dataclass(frozen=True)
class Job:
    """One load, ready to run.

    Attributes:
        wish: What this rank wants.
        plan: Who reads what when.
        bytes_wanted: Bytes that any rank wants.
        reader: Reads this rank's chunks.
        transport: Takes messages to the other ranks.
        pipeline: Moves them.
    """

    wish: Wish
    plan: Plan
    bytes_wanted: int
    reader: ChunkReader
    transport: Transport
    pipeline: Pipeline

    def close(self) -> None:
        """Ends its threads; reads that storage does not answer end when it does."""
        opened = self.wish.opened
        self.pipeline.close()
        if not self.reader.close(wait_s=min(1.0, opened.world.grace_s)):
            _log.warning("%s: a read is still under way and may yet write", opened.access.manifest.url)


def open_whole(wish: Wish) -> Job:
    """Makes a load ready in which all ranks want what this one wants, and no tensor in parts.

    Raises:
        FastloadError: Options do not fit.
        MemoryError: Staging does not fit into memory.
    """
    opened, decision = wish.opened, wish.decision
    world, options, access = opened.world, opened.options, opened.access
    outbox = wish.matched.outbox
    is_stream = outbox is not None
    extents = [destination.extent for destination in wish.matched.destinations]
    staging_bytes = options.staging_bytes // (2 if is_stream else 1)  # the rest is the room of the outbox
    between_devices = bool(wish.backend) and not decision.alone
    shares_memory = not between_devices and not decision.alone
    plan = plan_transfer(
        [] if outbox is not None and outbox.is_mapped else extents,
        decision.supply(world.rank),
        decision.demand(world.rank, world.size),
        staging_bytes=staging_bytes,
        chunk_bytes=options.chunk_bytes,
        block_bytes=opened.block_bytes,
        even_slots=between_devices,
        contiguous=access.is_mounted and not is_stream,
        hosts=access.hosts,
        num_sharing=min(Counter(access.machines).values()) if shares_memory else 1,
    )
    if is_stream:
        plan = plan.deeper(staging_bytes)
    return open_job(wish, plan, sum(extent.nbytes for extent in extents))


def open_job(wish: Wish, plan: Plan, bytes_wanted: int) -> Job:
    """Makes a load ready, from its plan.

    Args:
        wish: What this rank wants.
        plan: Who reads what when.
        bytes_wanted: Bytes that any rank wants.

    Raises:
        MemoryError: Staging does not fit into memory.
    """
    opened, options, access = wish.opened, wish.opened.options, wish.opened.access
    reader = ChunkReader(
        access.storage,
        access.manifest.files,
        threads=read_threads(
            options.read_threads,
            plan,
            ranks_on_host=opened.ranks_on_host,
            in_order=access.storage.in_order,
        ),
        verifier=opened.verifier,
        on_damage=refuse,
        via_cache=wish.decision.alone and opened.ranks_on_host > 1,
        guards=_guards(access.manifest, in_parts=not isinstance(plan, TransferPlan)),
    )
    placer = wish.matched.outbox or Placer(wish.matched.destinations)
    transport = open_transport(
        opened.world,
        plan,
        order=ring_order(access.hosts),
        machines=access.machines,
        hosts=access.hosts,
        device=wish.device,
        backend="" if wish.decision.alone else wish.backend,
    )
    buffers = Buffers(plan, opened.world.rank, transport, placer)
    pipeline = Pipeline(opened.world, plan, reader, transport, placer, buffers, options.progress)
    return Job(wish, plan, bytes_wanted, reader, transport, pipeline)


def _guards(manifest: Manifest, *, in_parts: bool) -> Guards | None:
    return Guards(manifest, in_parts=in_parts) if manifest.guards else None


@contextmanager
def closing_unused(jobs: list[Job]) -> Iterator[None]:
    """Closes the jobs that are left in a list in the end; nothing of them has begun."""
    try:
        yield
    finally:
        while jobs:
            jobs.pop().close()


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: must be a torch.dtype or the name of one, such as bfloat16")
    return found


def target_device(device: torch.device | str | None) -> torch.device:
    """Returns where new tensors are to live.

    Raises:
        OptionError: That is no device, has no memory, or is not served by torch in this process.
    """
    target = parse_device(device if device is not None else "cpu")
    if target.type == "meta":
        raise OptionError(f"device={device!r}: the meta device has no memory to load into; name a real one")
    return with_index(target)
