"""Chooses the strategy of a load, with the reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastload.comm.hosts import host_of
from fastload.errors import OptionError
from fastload.transfer.plan import Demand, Supply


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy and its readers.

    Attributes:
        strategy: ``allgather``, ``broadcast`` or ``direct``.
        why: The reason, in one line.
        readers: The ranks that read.
    """

    strategy: str
    why: str
    readers: tuple[int, ...]

    @property
    def alone(self) -> bool:
        """Whether every rank reads all its bytes itself."""
        return self.strategy == "direct"

    def supply(self, rank: int) -> Supply:
        """Returns the ranks that deliver to a rank."""
        return Supply((rank,) if self.alone else self.readers)

    def demand(self, rank: int, world_size: int) -> Demand:
        """Returns the ranks that receive what the suppliers of a rank deliver."""
        return Demand((rank,) if self.alone else tuple(range(world_size)))


def choose_strategy(
    strategy: str,
    *,
    world_size: int,
    readers: Sequence[int],
    hosts: Sequence[str],
    shared: bool,
    fast_links: bool,
) -> StrategyChoice:
    """Chooses a strategy.

    Args:
        strategy: The option: a strategy, or ``auto``.
        world_size: Number of ranks.
        readers: Ranks that can read, ascending.
        hosts: Host of each rank; see `comm.hosts.node`.
        shared: Whether all ranks read through one link.
        fast_links: Whether the exchange runs between devices (NCCL), far faster than any storage.

    Raises:
        OptionError: The option is ``direct`` and some rank cannot read.
    """
    readers = tuple(readers)
    if world_size == 1 and not (fast_links and strategy in ("allgather", "broadcast")):
        return StrategyChoice("direct", "one rank: nothing to exchange", readers)
    all_read = len(readers) == world_size
    if strategy == "direct" and not all_read:
        missing = next(rank for rank in range(world_size) if rank not in readers)
        host = host_of(hosts[missing])
        raise OptionError(f"strategy='direct': rank {missing} on {host} cannot read the checkpoint")
    if strategy != "auto":
        return StrategyChoice(strategy, "asked for", readers[:1] if strategy == "broadcast" else readers)
    if len(readers) == 1:
        return StrategyChoice("broadcast", f"only rank {readers[0]} can read", readers)
    if not all_read:
        return StrategyChoice(
            "allgather", f"{len(readers)} of {world_size} ranks can read and share the reading", readers
        )
    if shared:
        return StrategyChoice(
            "allgather", "all ranks read through one storage system: each byte is read once", readers
        )
    if fast_links:
        return StrategyChoice("allgather", "the links between devices are faster than any disk", readers)
    if len(set(hosts)) == 1:
        return StrategyChoice(
            "direct", "one host with a local file system: the page cache already reads once", readers
        )
    return StrategyChoice("direct", "each host has the files on a disk of its own", readers)
