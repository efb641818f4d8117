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
from fastload.memory_tier.groups import CopyPlan
from fastload.saving.exchange import BufferRing, MessageExchange
from fastload.saving.layout import FileRange
from fastload.storage.memory_target import MemoryTarget
from fastload.transfer.links import Wire, accept_offers

_PLACE = "copied"  # where in the store
_NUM_OUTGOING = 2  # messages in flight, to all targets
_NUM_AHEAD = 2  # parts received ahead from each source


class _Copy(NamedTuple):
    """A range of a file on its way from one host to another."""

    sender: int
    writer: int
    name: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def send_copies(
    world: World,
    what: str,
    target: MemoryTarget,
    copies: CopyPlan,
    parts: Sequence[FileRange],
    names: Sequence[str],
) -> int:
    """Sends this rank's share to other hosts, and writes the shares that it receives.

    The share is read back from the memory tier, since the training's state may have changed.

    Args:
        world: The ranks.
        what: Name of the save, for messages.
        target: This host's part of the checkpoint.
        copies: Which ranks this one sends to and receives from.
        parts: The ranges that this rank has written.
        names: Names of the files.

    Returns:
        Number of bytes received.

    Raises:
        FastloadError: Some rank failed.
    """
    what = f"{what}: sending copies"
    wire = Wire(world, range(world.size), {*copies.targets, *copies.sources})
    try:

        def offer() -> object:
            if copies.targets:
                world.show_bytes(what, _PLACE, zlib.compress(json.dumps(parts).encode(), level=1))
            return wire.offer()

        accept_offers(world, what, wire, world.agree(what, offer))
    except BaseException:
        wire.close(keep=False)
        raise
    own = [
        _Copy(world.rank, writer, names[file], begin, end)
        for file, begin, end in parts
        for writer in copies.targets
    ]
    exchange = _CopyExchange(world, wire, target, own)
    try:
        return world.settle(what, lambda: exchange.run(what, copies.sources, names))[world.rank]
    finally:
        exchange.close()


class _CopyExchange:
    """One rank's copies, outgoing and incoming.

    Args:
        world: The ranks.
        wire: Connections to the other ranks; closed in the end.
        target: This host's part of the checkpoint.
        outgoing: Copies for other ranks, in order.
    """

    def __init__(self, world: World, wire: Wire, target: MemoryTarget, outgoing: Sequence[_Copy]) -> None:
        self._world = world
        self._target = target
        self._buffers = BufferRing(_NUM_OUTGOING, [copy.nbytes for copy in outgoing], pinned=False)
        self._exchange = MessageExchange(world, wire, outgoing, self._read, num_buffers=_NUM_OUTGOING)

    def run(self, what: str, sources: Sequence[int], names: Sequence[str]) -> int:
        """Sends and receives all; returns the number of bytes received."""
        incoming = [self._copies_of(what, source, names) for source in sources]
        for copies in incoming:
            self._target.reserve((copy.name, copy.begin, copy.end) for copy in copies)
        self._exchange.open()
        # One part of each source at a time, as each source sends one to each of its targets in turn.
        batches = [[copy for copy in batch if copy is not None] for batch in zip_longest(*incoming)]
        lengths = [sum(copy.nbytes for copy in batch) for batch in batches]
        buffers = BufferRing(_NUM_AHEAD, lengths, pinned=False)
        received = self._exchange.receive(batches, buffers, num_ahead=_NUM_AHEAD)
        for batch, (arrived, data) in zip(batches, received, strict=True):
            self._exchange.wait(arrived, "copies of other hosts' shares")
            for copy, content in zip(batch, data, strict=True):
                self._target.write(copy.name, copy.begin, host_view(content))
        self._exchange.finish()
        return sum(lengths)

    def close(self) -> None:
        """Closes the connections."""
        self._exchange.close()

    def _copies_of(self, what: str, source: int, names: Sequence[str]) -> list[_Copy]:
        packed = require_left(what, self._world.take_bytes(what, _PLACE, source, keep=True), source)
        ranges = json.loads(zlib.decompress(packed))
        return [_Copy(source, self._world.rank, names[file], begin, end) for file, begin, end in ranges]

    def _read(self, copy: _Copy, number: int) -> Tensor:
        data = self._buffers.get(number)[: copy.nbytes]
        self._target.read(copy.name, copy.begin, host_view(data))
        return data
