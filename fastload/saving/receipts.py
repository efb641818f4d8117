"""What each rank has written, and the checksums of it: from the members of a team to their leader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.comm.world import World
from fastload.saving.hashing import Checksums
from fastload.saving.team import Team

__all__ = ["Receipt", "collect", "hand_in"]

_PLACE = "checksums"  # where in the store
_SHORT_BYTES = 64 << 10  # of all receipts, which go to all ranks


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
    def from_bytes(cls, packed: bytes | str) -> Receipt:
        """Unpacks what `to_bytes` packed."""
        written, sums = json.loads(packed)
        return cls(
            written,
            {
                int(file): [(first, bytes.fromhex(digests)) for first, digests in stretches]
                for file, stretches in sums.items()
            },
        )


def hand_in(world: World, team: Team, receipt: Receipt, *, what: str) -> str | None:
    """Leaves a rank's receipt for its leader; to be called before it says that it has written.

    Args:
        world: The ranks.
        team: This rank's.
        receipt: What it has written.
        what: Name of the save, for messages.

    Returns:
        What this rank is to tell the others with that: the receipt, if it is short.
    """
    if world.rank == team.leader:
        return None
    packed = receipt.to_bytes()
    if len(packed) * world.size <= _SHORT_BYTES:
        return str(packed, "ascii")
    world.leave_bytes(f"{what}: leaving checksums", _PLACE, packed)
    return None


def collect(
    world: World, team: Team, own: Receipt, handed_in: Sequence[str | None], *, what: str
) -> list[Receipt]:
    """Returns the receipts of all members, on their leader.

    Args:
        world: The ranks; all members have handed in theirs.
        team: This rank's.
        own: The leader's.
        handed_in: What `hand_in` has returned on each rank.
        what: Name of the save, for messages.
    """
    receipts = [own]
    for rank in team.members[1:]:
        packed: str | bytes | None = handed_in[rank]
        if packed is None:
            packed = world.take_bytes(f"{what}: collecting checksums", _PLACE, rank)
        assert packed is not None
        receipts.append(Receipt.from_bytes(packed))
    return receipts
