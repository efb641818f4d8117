"""The state of one rank → its tensors, laid out in files, and what else there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastload.base.memory import uncollected
from fastload.comm.world import World, members_of
from fastload.errors import OptionError
from fastload.formats import state as states
from fastload.formats.dtensors import BoxesByRank, Group, is_dtensor
from fastload.formats.dtypes import safetensors_spec
from fastload.geometry.box import Box
from fastload.options import SaveOptions
from fastload.saving.call import Call
from fastload.saving.compare import Content, digest_cells, small_tensors
from fastload.saving.layout import HEADER_METADATA, Layout, TensorSpec, lay_out
from fastload.saving.per_rank import OwnValues
from fastload.saving.shard_map import Holdings
from fastload.saving.snapshot import Shards, Source

__all__ = ["Described", "Held", "describe", "lay_out_files"]

_NUM_SHOWN = 20


@dataclass(frozen=True)
class Held:
    """What of its tensors a rank holds, where ranks hold different parts.

    Attributes:
        boxes: What this rank holds of each tensor.
        foreseen: What each rank holds, if that can be told without asking: by the placements on meshes of
            all ranks, and as long as all have the same state.
        small: Of what is sharded and held by others, too, digests of small cells; see `digest_cells`.
    """

    boxes: Mapping[str, tuple[Box, ...]]
    foreseen: Holdings | None
    small: bytes


@dataclass(frozen=True)
class Described:
    """What one rank is about to save.

    Attributes:
        content: The structure of the state, and what else the ranks compare of it.
        layout: What every byte of every file is.
        source: The tensors that these bytes are taken from.
        own: What this rank has of its own.
        held: What of the tensors this rank holds; None if all of all, as all other ranks are to do.
    """

    content: Content
    layout: Layout
    source: Source
    own: OwnValues
    held: Held | None


@uncollected
@torch.no_grad()  # else each look at a DTensor turns it off and on
def describe(call: Call, state: Any) -> Described:
    """Takes the state apart, and lays its tensors out.

    Raises:
        OptionError: Something in the state, or the metadata, cannot be kept.
    """
    options = call.options
    if not all(isinstance(text, str) for pair in call.metadata.items() for text in pair):
        raise OptionError(f"metadata={call.metadata!r}: must be text by text")
    if state is None:  # seldom meant: what some method returned that changes things in place
        raise OptionError("the state is None: there is nothing to save")
    description = states.describe(state, call.world.rank)
    tensors = description.tensors
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]
    layout = lay_out_files(specs, options)
    source = Source(layout, tensors)
    held = _hold(call.world, tensors, layout, source, options)
    call.tracing.follow({"snapshot": source.watch})
    small = {}
    if options.check_replicas == "small":
        small = small_tensors(specs, tensors, description.starts)
    content = Content(description.structure, layout.digest(), specs, small)
    return Described(content, layout, source, OwnValues(call.world, call.what, description), held)


def lay_out_files(specs: Sequence[TensorSpec], options: SaveOptions) -> Layout:
    """Lays tensors out in files as options say; errors are those of `lay_out`."""
    return lay_out(
        specs,
        max_shard_bytes=options.max_shard_bytes,
        block_bytes=options.block_bytes,
        metadata=HEADER_METADATA,
    )


def _hold(
    world: World, tensors: Mapping[str, Tensor], layout: Layout, source: Source, options: SaveOptions
) -> Held | None:
    """Finds out what this rank holds, and what the others do.

    Raises:
        OptionError: A DTensor is not what its placements say, or no rank has a part of it.
    """
    sharded = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    if not sharded and not options.parts:
        return None
    group = Group(members_of(world.group), place="the state", call="save")
    problems = [line for name, tensor in sharded.items() for line in group.misfits(name, tensor)]
    if problems:
        shown, more = problems[:_NUM_SHOWN], len(problems) - _NUM_SHOWN
        lines = [*shown, *([f"and {more} more"] if more > 0 else [])]
        raise OptionError("the state cannot be saved: " + "\n  ".join(lines))
    everyone = tuple(range(world.size))
    boxes: dict[str, tuple[Box, ...]] = {}
    foreseen: dict[str, BoxesByRank | None] = {}
    for name, tensor in tensors.items():
        boxes[name] = tuple(box for box, _ in source.parts(name))
        is_sharded = name in sharded
        foreseen[name] = group.boxes_of_all(tensor) if is_sharded else ((boxes[name], everyone),)
    known = {name: of_all for name, of_all in foreseen.items() if of_all is not None}
    if options.parts or len(known) < len(foreseen):
        return Held(boxes, None, b"")
    holdings, small = Holdings(layout, known), b""
    if options.check_replicas == "small":
        shards = Shards(layout, source)
        skip = lambda name: name not in sharded  # noqa: E731  (what is plain is compared with the content)
        small = digest_cells(layout, holdings, shards, world.rank, how="small", skip=skip)
    return Held(boxes, holdings, small)
