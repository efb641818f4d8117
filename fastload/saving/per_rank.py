"""Values that each rank has of its own (`PerRank`): gathered by the leaders, and stored in their own files.

They are small, so they go through the rendezvous store, and are written together with the commit record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from fastload.base.memory import host_bytes
from fastload.comm.responses import join_parts, split_parts
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import safetensors_spec
from fastload.formats.encoder import strides_of
from fastload.formats.names import OWN_STEM
from fastload.formats.state import fill_places
from fastload.saving.layout import LayoutFile, TensorSpec, lay_out

_PLACE = "own"  # where in the store
_MAX_BYTES = 1 << 20  # of a rank
_MAX_BYTES_OF_ALL = 256 << 20  # for the memory of the store, and of one rank


def pack_own(values: Sequence[Any], tensors: Mapping[str, Tensor], rank: int, size: int) -> bytes:
    """Packs a rank's own values; copies them. Either all ranks have some, or none has.

    Args:
        values: A node for each `PerRank`.
        tensors: Their tensors, by name.
        rank: This rank.
        size: Number of ranks.

    Returns:
        The packed values; empty without any.

    Raises:
        OptionError: They are too large.
    """
    if not values:
        return b""
    limit = min(_MAX_BYTES, _MAX_BYTES_OF_ALL // size)
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]
    nbytes = sum(spec.nbytes for spec in specs)
    text = json.dumps([values, specs, strides_of(tensors)]).encode()
    if len(text) + nbytes > limit:
        largest = max(specs, key=attrgetter("nbytes"))
        raise OptionError(
            f"what rank {rank} has of its own (fastload.PerRank) takes {len(text) + nbytes:,} bytes, "
            f"{largest.nbytes:,} of them {largest.name!r}: at most {limit:,} a rank are kept with {size} "
            "ranks; larger state that differs between ranks is for sharded saves"
        )
    parts = [host_bytes(tensor.detach().cpu()) for tensor in tensors.values()]
    return join_parts([text, *parts])


@dataclass(frozen=True)
class PerRankFiles:
    """The files with the own values of all ranks.

    Attributes:
        files: Their layout.
        contents: The bytes of each file.
        strides: Strides of tensors; see `encoder.strides_of`.
    """

    files: tuple[LayoutFile, ...] = ()
    contents: tuple[bytes, ...] = ()
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Returns their sizes, for the report."""
        return {
            "nbytes": sum(map(len, self.contents)),
            "num_tensors": sum(len(file.tensors) for file in self.files),
            "num_files": len(self.files),
        }


def show_own(world: World, what: str, packed: bytes) -> None:
    """Puts this rank's own values, from `pack_own`, into the store for the other ranks."""
    if packed:
        world.show_bytes(f"{what}: leaving this rank's own values", _PLACE, packed)


def collect_own(
    world: World, what: str, packed: bytes, structure: Any, block_bytes: int
) -> tuple[Any, PerRankFiles]:
    """Merges the values that all ranks have shown, if any; see `gather_own`."""
    if not packed:
        return structure, PerRankFiles()
    what = f"{what}: collecting the ranks' own values"
    return gather_own(structure, world.take_shown(what, _PLACE, range(world.size)), block_bytes=block_bytes)


def gather_own(structure: Any, packed: Sequence[bytes], *, block_bytes: int) -> tuple[Any, PerRankFiles]:
    """Merges the own values of all ranks.

    Args:
        structure: Structure of the state.
        packed: The result of `pack_own` on each rank.
        block_bytes: Most bytes of a checksum block.

    Returns:
        The structure with the values of all ranks, and the files.
    """
    values, specs, strides, data = [], [], {}, {}
    for of_rank in packed:
        text, *contents = split_parts(of_rank)
        own_values, own_specs, own_strides = json.loads(text)
        strides.update(own_strides)
        values.append(own_values)
        for (name, dtype, shape, nbytes), content in zip(own_specs, contents, strict=True):
            specs.append(TensorSpec(name, dtype, tuple(shape), nbytes))
            data[name] = content
    layout = lay_out(
        specs,
        max_shard_bytes=2 * _MAX_BYTES_OF_ALL,
        block_bytes=block_bytes,
        stem=OWN_STEM,
    )
    contents = [
        b"".join([file.header, *(data[entry.name] for entry in file.tensors)]) for file in layout.files
    ]
    return fill_places(structure, values), PerRankFiles(layout.files, tuple(contents), strides)
