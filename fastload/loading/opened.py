"""A checkpoint that all ranks have open, as one load finds it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from fastload.base.memory import PAGE_BYTES
from fastload.comm.group import members_of
from fastload.comm.traces import Tracing
from fastload.comm.world import World
from fastload.loading.access import Access
from fastload.loading.match import Match, Request
from fastload.options import LoadOptions
from fastload.transfer.buffers import Plan
from fastload.transfer.pipeline import read_threads
from fastload.transfer.plan import StrategyChoice, choose_strategy
from fastload.transfer.read import ChunkReader, Guards, Verifier


@dataclass(frozen=True)
class Opened:
    """A checkpoint that all ranks have open, as one load finds it.

    Attributes:
        world: The ranks.
        access: The checkpoint and its readers.
        options: How to load.
        verifier: Knows the checksum blocks; None if they are not verified.
        tracing: Records the loads.
        header_bytes: Bytes that this rank read to open it.
        num_retries: Retries that earlier loads have reported.
    """

    world: World
    access: Access
    options: LoadOptions
    verifier: Verifier | None
    tracing: Tracing
    header_bytes: int
    num_retries: int = 0

    @property
    def block_bytes(self) -> int:
        """Length of the parts of a tensor with one reader: checksum blocks; 0 for parts of any length."""
        if self.verifier is not None:
            return self.access.manifest.block_bytes
        return PAGE_BYTES if self.access.holders is not None else 0

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks on this rank's host."""
        return self.access.hosts.count(self.access.hosts[self.world.rank])

    @property
    def cores(self) -> int:
        """This rank's share of its host's cores, at least 1."""
        return max(1, (os.cpu_count() or 1) // self.ranks_on_host)

    def read_threads(self, plan: Plan) -> int:
        """Returns how many reads this rank has in flight."""
        in_order = self.access.storage.in_order
        return read_threads(
            self.options.read_threads, plan, ranks_on_host=self.ranks_on_host, in_order=in_order
        )

    def open_reader(self, plan: Plan, *, in_parts: bool, via_cache: bool = False) -> ChunkReader:
        """Opens the reader of this rank's chunks.

        Args:
            plan: The plan.
            in_parts: Whether data may be read without their first byte; see `Guards`.
            via_cache: Whether other ranks of this host read the same bytes.
        """
        manifest = self.access.manifest
        return ChunkReader(
            self.access.storage,
            manifest.files,
            threads=self.read_threads(plan),
            verifier=self.verifier,
            via_cache=via_cache,
            guards=Guards(manifest, in_parts=in_parts) if manifest.guards else None,
            held=self.access.held,
        )

    def match(self, request: Request) -> Match:
        """Finds the destinations of a request of this rank; errors are those of `LoadRequest.match`."""
        world = self.world
        return request.match(self.access.tensors, world.rank, world.size, members_of(world.group))

    def choose_strategy(self, *, fast_links: bool = False) -> StrategyChoice:
        """Chooses the strategy of a load.

        Args:
            fast_links: Whether a backend moves data between devices.

        Raises:
            OptionError: Every rank is to read, and some rank cannot.
        """
        access = self.access
        if access.holders is not None:
            return StrategyChoice("allgather", "readers have different parts in memory", access.readers)
        strategy, why = self.options.strategy, ""
        if self.options.atomic and strategy == "auto":
            strategy, why = "allgather", "until all is read, each rank holds what it reads"
        choice = choose_strategy(
            strategy,
            world_size=self.world.size,
            readers=access.readers,
            hosts=access.hosts,
            shared=access.shared,
            fast_links=fast_links,
        )
        return replace(choice, why=why) if why and choice.strategy == strategy else choice
