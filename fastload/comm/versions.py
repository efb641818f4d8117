"""One version of fastload on all ranks: the first thing that the ranks of a group tell each other.

The rank that comes first into a corner of the store leaves its version there, with the corner's name. Whoever
has another one says so in a list, where all ranks look that wait for others while they meet for the first
time. These two keys stay as they are in every version; all that comes after them may change.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from typing import Any

from fastload.base.version import PROTOCOL, __version__
from fastload.comm.failures import some_of
from fastload.errors import WorldError

__all__ = ["Versions"]

_NAME, _VERSIONS = "name", "versions"
_SAYING_S, _POLL_S = 2.0, 0.02


def _own_version() -> str:
    """Returns what has to be the same on all ranks."""
    return f"{__version__} (protocol {PROTOCOL})"


class Versions:
    """Where the ranks of a group compare their versions.

    Args:
        corner: Of a ``torch.distributed.Store``, which the group has to itself.
        rank: This one.
        size: Number of ranks.

    Attributes:
        are_open: Whether the ranks meet, and may find that they differ.
    """

    def __init__(self, corner: Any, rank: int, size: int) -> None:
        self._corner = corner
        self._rank = rank
        self._size = size
        self.are_open = False

    def greet(self) -> str:
        """Returns the name of the corner, which no other has.

        Raises:
            WorldError: The rank that came first has another version of fastload.
        """
        own = _own_version()
        text = str(self._corner.compare_set(_NAME, "", f"{secrets.token_hex(8)} {self._rank} {own}"), "ascii")
        name, _, first = text.partition(" ")
        if first.partition(" ")[2] != own:
            raise self._differ()
        return name

    def look(self) -> None:
        """Looks, while the ranks meet, whether one of them has said that it has another version.

        Raises:
            WorldError: It has.
        """
        if self.are_open and self._corner.check([_VERSIONS]):
            raise self._differ()

    def _differ(self) -> WorldError:
        """Returns the error that names the versions of all ranks, as far as they say them in a moment."""
        corner = self._corner
        corner.append(_VERSIONS, f"{self._rank} {_own_version()}\n")
        until = time.monotonic() + _SAYING_S
        while True:
            first = str(corner.get(_NAME), "ascii").partition(" ")[2]
            said = [*str(corner.get(_VERSIONS), "ascii").splitlines(), first]
            found = {each: version for each, _, version in (line.partition(" ") for line in said) if each}
            if len(found) == self._size or time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        ranks: dict[str, list[str]] = defaultdict(list)
        for each in sorted(found, key=int):
            ranks[found[each]].append(each)
        parts = [f"{version} on rank{'s' * (len(at) > 1)} {some_of(at)}" for version, at in ranks.items()]
        if not first:
            parts.append("one from before 0.2.0 on another rank")
        return WorldError(
            f"the ranks run different versions of fastload: {'; '.join(parts)}: install the same on all hosts"
        )
