"""Copies of each rank's share on other hosts, sent while training continues."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from fastload.base.memory import host_view
from fastload.comm.failures import require_left
from fastload.comm.world import World
from fastload.ext.memory.groups import CopyPlan
from fastload.ext.memory.target import MemoryTarget
from fastload.geometry.ranges import ByteRange
from fastload.saving.exchange import BufferRing, MessageExchange, connecting
from fastload.transfer.links import accept_offers

_PLACE = "copied"  # where in the store
_NUM_OUTGOING = 2  # messages in flight, to all targets
_NUM_AHEAD = 2  # parts received ahead from each source


class _Copy(NamedTuple):
    """A range of a file on its way to or from another rank."""

    peer: int
    name: str
    begin: int
    nbytes: int


def send_copies(
    world: World,
    what: str,
    target: MemoryTarget,
    copies: CopyPlan,
    parts: Sequence[ByteRange],
    names: Sequence[str],
) -> None:
    """Sends this rank's share to other hosts, and writes the shares that it receives.

    The share is read back from the memory tier, since the training's state may have changed.

    Args:
        world: The ranks.
        what: Name of the save, for messages.
        target: This host's part of the checkpoint.
        copies: Which ranks this one sends to and receives from.
        parts: The ranges that this rank has written.
        names: Names of the files.

    Raises:
        FastloadError: Some rank failed.
    """
    what = f"{what}: sending copies"
    with connecting(world, {*copies.targets, *copies.sources}) as wire:
        with world.step(what) as step:
            if copies.targets:
                world.show_bytes(what, _PLACE, zlib.compress(json.dumps(parts).encode(), level=1))
            step.answer(wire.offer())
        accept_offers(world, what, wire, step.answers)
    outgoing = [
        _Copy(rank, names[part.file], part.offset, part.nbytes) for part in parts for rank in copies.targets
    ]
    buffers = BufferRing(_NUM_OUTGOING, [copy.nbytes for copy in outgoing], pinned=False)

    def read(number: int) -> Tensor:
        copy = outgoing[number]
        data = buffers.get(number)[: copy.nbytes]
        target.read(copy.name, copy.begin, host_view(data))
        return data

    writers = [copy.peer for copy in outgoing]
    exchange = MessageExchange(world, wire, writers, read, num_outgoing=_NUM_OUTGOING)

    try:
        with world.step(what, is_long=True):
            incoming = [_copies_of(world, what, source, names) for source in copies.sources]
            for of_source in incoming:
                target.reserve((copy.name, copy.begin, copy.nbytes) for copy in of_source)
            exchange.open()
            _receive(exchange, incoming, target)
            exchange.finish()
    finally:
        exchange.close()


def _receive(exchange: MessageExchange, incoming: Sequence[Sequence[_Copy]], target: MemoryTarget) -> None:
    """Receives the copies of each source, and writes them."""
    # One part of each source at a time, as each source sends one to each of its targets in turn.
    batches = [[copy for copy in batch if copy is not None] for batch in zip_longest(*incoming)]
    messages = [[(copy.peer, copy.nbytes) for copy in batch] for batch in batches]
    lengths = [sum(copy.nbytes for copy in batch) for batch in batches]
    buffers = BufferRing(_NUM_AHEAD, lengths, pinned=False)
    received = exchange.receive(messages, buffers, num_ahead=_NUM_AHEAD)
    for batch, (arrived, data) in zip(batches, received, strict=True):
        exchange.wait(arrived, "copies of other hosts' shares")
        for copy, content in zip(batch, data, strict=True):
            target.write(copy.name, copy.begin, host_view(content))


def _copies_of(world: World, what: str, source: int, names: Sequence[str]) -> list[_Copy]:
    packed = require_left(what, world.take_bytes(what, _PLACE, source, keep=True), source)
    parts = (ByteRange(*part) for part in json.loads(zlib.decompress(packed)))
    return [_Copy(source, names[part.file], part.offset, part.nbytes) for part in parts]
