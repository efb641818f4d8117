"""The state of one rank as tensors in a layout of files, and everything else as plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastload.base.memory import uncollected
from fastload.comm.group import members_of
from fastload.comm.world import World
from fastload.errors import OptionError, first_lines
from fastload.formats.dtypes import safetensors_spec
from fastload.formats.encoder import encode_state
from fastload.formats.names import MODEL_STEM
from fastload.geometry.box import Box
from fastload.geometry.dtensors import BoxesByRank, DTensorRanks, is_dtensor
from fastload.options import SaveOptions
from fastload.saving.call import SaveCall
from fastload.saving.compare import StateContent, digest_shards, small_tensors
from fastload.saving.layout import HEADER_METADATA, Layout, TensorSpec, lay_out
from fastload.saving.per_rank import PerRankValues
from fastload.saving.shard_map import ShardMap
from fastload.saving.snapshot import StateReader

_last_map: list[ShardMap] = []  # at most one: a training saves states of the same placements


@dataclass(frozen=True)
class RankState:
    """The state that one rank is about to save.

    Attributes:
        content: The structure of the state, and what else the ranks compare.
        layout: The files.
        reader: Reads this rank's tensors.
        own: This rank's own values.
        shard_map: Which ranks hold which bytes, by placements on meshes of all ranks, assuming that all have
            the same state; None if placements do not tell.
        small: Digests of small shards that other ranks hold, too; see `compare.digest_shards`.
    """

    content: StateContent
    layout: Layout
    reader: StateReader
    own: PerRankValues
    shard_map: ShardMap | None
    small: bytes = b""


@uncollected
@torch.no_grad()  # else each access to a DTensor switches gradients off and on
def describe(call: SaveCall, state: Any) -> RankState:
    """Separates tensors from structure, and lays the tensors out in files.

    Raises:
        OptionError: Something in the state or the metadata cannot be stored.
    """
    options, world = call.options, call.world
    if not all(isinstance(text, str) for pair in call.metadata.items() for text in pair):
        raise OptionError(f"metadata={call.metadata!r}: must be text by text")
    if state is None:  # the result of some method, by mistake
        raise OptionError("the state is None: there is nothing to save")
    description = encode_state(state, world.rank)
    tensors = description.tensors
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]
    layout = lay_out_files(specs, options, call.stem)
    reader = StateReader(layout, tensors, description.uncounted, description.shards)
    shard_map, small = _predict_shards(world, tensors, layout, reader, options)
    call.tracing.follow({"snapshot": reader.watch})
    compared = {}
    if options.check_replicas == "small":
        compared = small_tensors(specs, tensors, description.starts)
    content = StateContent(description.structure, layout.digest, specs, compared)
    return RankState(content, layout, reader, PerRankValues(world, call.what, description), shard_map, small)


def lay_out_files(specs: Sequence[TensorSpec], options: SaveOptions, stem: str = MODEL_STEM) -> Layout:
    """Lays tensors out in files by the options, or in one file of another name; raises as `lay_out`."""
    max_shard_bytes = options.max_shard_bytes if stem == MODEL_STEM else sys.maxsize
    return _lay_out_files(tuple(specs), max_shard_bytes, options.block_bytes, stem)


@lru_cache(maxsize=2)  # a training saves the same state again, or two in turn
def _lay_out_files(
    specs: tuple[TensorSpec, ...], max_shard_bytes: int, block_bytes: int | None, stem: str
) -> Layout:
    return lay_out(
        specs, max_shard_bytes=max_shard_bytes, block_bytes=block_bytes, metadata=HEADER_METADATA, stem=stem
    )


def _predict_shards(
    world: World, tensors: Mapping[str, Tensor], layout: Layout, reader: StateReader, options: SaveOptions
) -> tuple[ShardMap | None, bytes]:
    """Returns the shard map if placements tell it, and digests of small shards.

    Raises:
        OptionError: A DTensor does not match its placements.
    """
    sharded = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    if not sharded and not options.parts:
        return ShardMap(layout, world.size), b""
    group = DTensorRanks(members_of(world.group), place="the state", call="save")
    problems = [line for name, tensor in sharded.items() for line in group.misfits(name, tensor)]
    if problems:
        raise OptionError("the state cannot be saved: " + "\n  ".join(first_lines(problems)))
    if options.parts:
        return None, b""
    boxes: dict[str, BoxesByRank] = {}
    for name, tensor in tensors.items():
        if name not in sharded:
            boxes[name] = _on_all_ranks(reader.boxes(name), world.size)
        elif (of_all := group.boxes_of_all(tensor)) is not None:
            boxes[name] = of_all
        else:
            return None, b""
    shard_map, small = _shard_map(layout, world.size, boxes), b""
    if options.check_replicas == "small":
        skip = lambda name: name not in sharded  # noqa: E731  (plain tensors are compared with the content)
        small = digest_shards(layout, shard_map, reader, world.rank, how="small", skip=skip)
    return shard_map, small


def _shard_map(layout: Layout, num_ranks: int, boxes: Mapping[str, BoxesByRank]) -> ShardMap:
    """Returns the shard map of the last save if it fits, else a new one."""
    found = next((each for each in _last_map[:] if each.is_of(layout, num_ranks, boxes)), None)
    if found is None:
        found = ShardMap(layout, num_ranks, boxes)
        _last_map[:] = [found]
    return found


@lru_cache(maxsize=4096)  # equal boxes share one object, also from save to save
def _on_all_ranks(boxes: tuple[Box, ...], num_ranks: int) -> BoxesByRank:
    return ((boxes, tuple(range(num_ranks))),)
