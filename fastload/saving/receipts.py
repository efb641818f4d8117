"""What each rank has written, and the checksums of it: from the members of a team to their leader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastload.ranks.world import World
from fastload.saving.hashing import Checksums
from fastload.saving.team import Team

__all__ = ["Receipt", "collect", "hand_in"]

_PLACE = "checksums"  # where in the store


@dataclass(frozen=True)
class Receipt:
    """What a rank has written, for its leader.

    Attributes:
        written: The receipt of its target.
        checksums: File → [number of the first block, checksums of it and those that follow it].
    """

    written: Mapping[str, Any]
    checksums: Checksums

    def to_bytes(self) -> bytes:
        """Packs it."""
        sums = {
            file: [[first, digests.hex()] for first, digests in stretches]
            for file, stretches in self.checksums.items()
        }
        return json.dumps([self.written, sums]).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> Receipt:
        """Unpacks what `to_bytes` packed."""
        written, sums = json.loads(packed)
        return cls(
            written,
            {
                int(file): [(first, bytes.fromhex(digests)) for first, digests in stretches]
                for file, stretches in sums.items()
            },
        )


def hand_in(world: World, team: Team, receipt: Receipt, *, what: str) -> None:
    """Leaves a rank's receipt for its leader; to be called before it says that it has written.

    Args:
        world: The ranks.
        team: This rank's.
        receipt: What it has written.
        what: Name of the save, for messages.
    """
    if world.rank != team.leader:
        world.leave_bytes(f"{what}: leaving checksums", _PLACE, receipt.to_bytes())


def collect(world: World, team: Team, own: Receipt, *, what: str) -> list[Receipt]:
    """Returns the receipts of all members, on their leader.

    Args:
        world: The ranks; all members have handed in theirs.
        team: This rank's.
        own: The leader's.
        what: Name of the save, for messages.
    """
    receipts = [own]
    for rank in team.members[1:]:
        packed = world.take_bytes(f"{what}: collecting checksums", _PLACE, rank)
        assert packed is not None
        receipts.append(Receipt.from_bytes(packed))
    return receipts
