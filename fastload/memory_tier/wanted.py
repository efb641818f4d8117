"""What a user asks of the memory tier."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.options import SaveOptions
from fastload.storage import Location
from fastload.storage.tier import Home

if TYPE_CHECKING:  # for those who ask for it
    from fastload.memory_tier.keeper import Keeper, Places

__all__ = ["Wanted", "open_keeper"]


@dataclass(frozen=True)
class Wanted:
    """Where recent checkpoints are kept, and how often.

    Attributes:
        memory: A directory on each host, or ``auto``.
        num_copies: How many hosts are to keep each share.

    Raises:
        OptionError: It cannot be used.
    """

    memory: str
    num_copies: int

    @classmethod
    def of(cls, memory: str | os.PathLike[str] | None, num_copies: int) -> Wanted | None:
        """Returns what was asked for; None if nothing was.

        Raises:
            OptionError: It cannot be used.
        """
        if memory is None:
            return None
        path = os.fspath(memory)
        if not isinstance(path, str) or not path:
            raise OptionError(f"memory={memory!r}: must be 'auto' or a directory on each host")
        return cls(path if path == "auto" else os.path.abspath(path), num_copies)

    def __post_init__(self) -> None:
        if type(self.num_copies) is not int or self.num_copies < 1:
            raise OptionError(f"memory_copies={self.num_copies!r}: must be a number of at least 1")


def open_keeper(
    world: World,
    group: Any,
    root: Location,
    wanted: Wanted | None,
    options: SaveOptions,
    life: str,
    run: str,
    places: Places,
) -> Keeper | None:
    """Opens the memory tier of a job on all ranks, if there is to be one; arguments are those of `Terms`.

    Raises:
        FastloadError: There is no place for it on some host, or an option cannot be used with it.
    """
    if wanted is None:
        return None
    from fastload.memory_tier.keeper import Keeper, Terms

    keepers: list[Keeper] = []

    def open_it() -> Home:
        keepers.append(keeper := Keeper(Terms(world, group, root, wanted, options, life, run, places)))
        return keeper.home

    try:
        homes = world.agree(f"making room in memory for {root}", open_it)
    except BaseException:
        for keeper in keepers:
            keeper.close(remove=False)
        raise
    world.heard()
    keepers[0].meet([Home(*home) for home in homes])
    return keepers[0]
