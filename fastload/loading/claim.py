"""What this rank wants, as the transfer is told; and what no rank wants."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import and_

from fastload.comm.world import World
from fastload.formats.manifest import Manifest
from fastload.geometry.box import Runs
from fastload.loading.place import Destination
from fastload.transfer.claims import Claim, Part

__all__ = ["claim_of", "exchange_claims", "unwanted_by_all"]


def claim_of(manifest: Manifest, destinations: Sequence[Destination]) -> Claim:
    """Returns what is to come to this rank.

    Args:
        manifest: The checkpoint.
        destinations: In the order of `Manifest.extents`.
    """

    def wants() -> Iterator[tuple[int, Part]]:
        of_extent = groupby(destinations, lambda destination: id(destination.extent))
        extent, parts = next(of_extent, (None, ()))
        for index, candidate in enumerate(manifest.extents):
            if id(candidate) == extent:
                if candidate.nbytes:
                    yield index, tuple(map(_runs, parts))
                extent, parts = next(of_extent, (None, ()))

    return Claim.of(wants())


def _runs(destination: Destination) -> Runs:
    return destination.runs or Runs(0, destination.extent.nbytes, ())


def exchange_claims(world: World, url: str, make: Callable[[], Claim]) -> list[bytes]:
    """Tells all ranks what each of them wants; returns it packed, by rank.

    Raises:
        FastloadError: A rank could not make its claim, or did not answer.
    """
    return world.gather_bytes(f"telling what each rank wants of {url}", lambda: make().packed)


def unwanted_by_all(world: World, manifest: Manifest, surplus: Sequence[str]) -> set[str]:
    """Returns which names no rank wants.

    Args:
        world: The ranks.
        manifest: The checkpoint.
        surplus: What this rank does not want of it.

    Raises:
        FastloadError: A rank did not answer.
    """
    names = [entry.name for entry in manifest.tensors]
    what = f"comparing what the ranks do not want of {manifest.url}"
    packed = world.gather_bytes(what, lambda: _Names.of(surplus, names).packed())
    everyone = [_Names.unpack(data) for data in set(packed)]
    mask = reduce(and_, (one.tensors for one in everyone))
    others = reduce(and_, (one.others for one in everyone))
    return {name for index, name in enumerate(names) if mask >> index & 1} | others


@dataclass(frozen=True)
class _Names:
    """Some of the names in a checkpoint.

    Attributes:
        tensors: A bit for each stored tensor.
        others: Names of other things.
    """

    tensors: int
    others: frozenset[str]

    @classmethod
    def of(cls, chosen: Sequence[str], names: Sequence[str]) -> _Names:
        wanted = set(chosen)
        bits = "".join("1" if name in wanted else "0" for name in reversed(names))
        return cls(int(bits or "0", 2), frozenset(wanted - set(names)))

    def packed(self) -> bytes:
        """Packs them to be sent to the other ranks."""
        return zlib.compress(json.dumps([f"{self.tensors:x}", sorted(self.others)]).encode(), level=1)

    @classmethod
    def unpack(cls, packed: bytes) -> _Names:
        """Reads what `packed` returned."""
        tensors, others = json.loads(zlib.decompress(packed))
        return cls(int(tensors, 16), frozenset(others))
