"""The state of one rank → its tensors, laid out in files, and what else there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastload.errors import OptionError
from fastload.formats import state as states
from fastload.formats.dtypes import safetensors_spec
from fastload.saving.call import Call
from fastload.saving.differences import Content, small_tensors
from fastload.saving.layout import HEADER_METADATA, Layout, TensorSpec, lay_out
from fastload.saving.per_rank import OwnValues
from fastload.saving.snapshot import Source

__all__ = ["Described", "describe"]


@dataclass(frozen=True)
class Described:
    """What one rank is about to save.

    Attributes:
        content: The structure of the state, and what else the ranks compare of it.
        layout: What every byte of every file is.
        source: The tensors that these bytes are taken from.
        own: What this rank has of its own.
    """

    content: Content
    layout: Layout
    source: Source
    own: OwnValues


def describe(call: Call, state: Any) -> Described:
    """Takes the state apart, and lays its tensors out.

    Raises:
        OptionError: Something in the state, or the metadata, cannot be kept.
    """
    options = call.options
    if not all(isinstance(text, str) for pair in call.metadata.items() for text in pair):
        raise OptionError(f"metadata={call.metadata!r}: must be text by text")
    description = states.describe(state, call.world.rank)
    tensors = description.tensors
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]
    layout = lay_out(
        specs,
        max_shard_bytes=options.max_shard_bytes,
        block_bytes=options.block_bytes,
        metadata=HEADER_METADATA,
    )
    source = Source(layout, tensors)
    call.tracing.follow({"snapshot": source.watch})
    small = {}
    if options.check_replicas == "small":
        small = small_tensors(specs, tensors, description.starts)
    content = Content(description.structure, layout.digest(), specs, small)
    return Described(content, layout, source, OwnValues(call.world, call.what, description))
