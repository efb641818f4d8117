"""Sends each rank's share to the hosts that keep copies of it, while training goes on."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from threading import Event
from typing import NamedTuple

from torch import Tensor

from fastload.base.memory import allocate_staging, host_view
from fastload.comm.failures import require_left
from fastload.comm.world import World
from fastload.memory_tier.groups import CopyPlan
from fastload.saving.exchange import MessageExchange
from fastload.saving.layout import FileRange
from fastload.storage.tier_target import TierTarget
from fastload.transfer.wire import Wire, accept_offers

__all__ = ["send_copies"]

_PLACE = "copied"  # where in the store
_NUM_LEAVING = 2  # pieces that are on their way at once, to all who get them
_NUM_COMING = 2  # pieces of each source for which there is memory


class _Piece(NamedTuple):
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
    target: TierTarget,
    copies: CopyPlan,
    pieces: Sequence[FileRange],
    names: Sequence[str],
) -> int:
    """Sends this rank's share to other hosts, and keeps what others send to this one.

    What it has written is read once more: it is in memory, and the training's state may have changed.

    Args:
        world: The ranks.
        what: Name of the save, for messages.
        target: Where this host's part of the generation is.
        copies: Who sends what to whom.
        pieces: What this rank has written.
        names: Of the files.

    Returns:
        How many bytes have come.

    Raises:
        FastloadError: Some rank has not sent or kept what it was to.
    """
    what = f"{what}: sending copies"
    wire = Wire(world, range(world.size), {*copies.targets, *copies.sources})
    try:

        def tell() -> object:
            if copies.targets:
                world.show_bytes(what, _PLACE, zlib.compress(json.dumps(pieces).encode(), level=1))
            return wire.offer()

        accept_offers(world, what, wire, world.agree(what, tell))
    except BaseException:
        wire.close(keep=False)
        raise
    own = [
        _Piece(world.rank, writer, names[file], begin, end)
        for file, begin, end in pieces
        for writer in copies.targets
    ]
    sending = _Sending(world, wire, target, own)
    try:
        return world.settle(what, lambda: sending.run(what, copies.sources, names))[world.rank]
    finally:
        sending.close()


class _Sending:
    """One rank's part of it.

    Args:
        world: The ranks.
        wire: To those that it has to do with; closed in the end.
        target: Where this host's part of the generation is.
        leaving: What goes to others, in order.
    """

    def __init__(self, world: World, wire: Wire, target: TierTarget, leaving: Sequence[_Piece]) -> None:
        self._world = world
        self._target = target
        largest = max((piece.nbytes for piece in leaving), default=0)
        self._buffers = [allocate_staging(largest, pinned=False) for _ in range(_NUM_LEAVING)]
        self._exchange = MessageExchange(world, wire, leaving, self._read, num_buffers=_NUM_LEAVING)

    def run(self, what: str, sources: Sequence[int], names: Sequence[str]) -> int:
        """Sends and receives all; returns how many bytes have come."""
        coming = [self._coming(what, source, names) for source in sources]
        for pieces in coming:
            self._target.reserve((piece.name, piece.begin, piece.end) for piece in pieces)
        self._exchange.open()
        memory = [
            [allocate_staging(max((p.nbytes for p in pieces), default=0), pinned=False) for pieces in coming]
            for _ in range(_NUM_COMING)
        ]
        posted: deque[tuple[Event, list[tuple[_Piece, Tensor]]]] = deque()
        # One piece of each source at a time, as each source sends one to each of its targets in turn.
        for number, turn in enumerate(zip_longest(*coming)):
            if len(posted) == _NUM_COMING:
                self._keep(*posted.popleft())
            parts = [
                (piece, buffer[: piece.nbytes])
                for piece, buffer in zip(turn, memory[number % _NUM_COMING], strict=True)
                if piece is not None
            ]
            posted.append((self._exchange.expect(parts), parts))
        while posted:
            self._keep(*posted.popleft())
        self._exchange.finish()
        return sum(piece.nbytes for pieces in coming for piece in pieces)

    def close(self) -> None:
        """Ends it."""
        self._exchange.close()

    def _coming(self, what: str, source: int, names: Sequence[str]) -> list[_Piece]:
        packed = require_left(what, self._world.take_bytes(what, _PLACE, source, keep=True), source)
        ranges = json.loads(zlib.decompress(packed))
        return [_Piece(source, self._world.rank, names[file], begin, end) for file, begin, end in ranges]

    def _keep(self, came: Event, parts: Sequence[tuple[_Piece, Tensor]]) -> None:
        self._exchange.wait(came, "copies of other hosts' shares")
        for piece, data in parts:
            self._target.write(piece.name, piece.begin, host_view(data))

    def _read(self, piece: _Piece, number: int) -> Tensor:
        data = self._buffers[number][: piece.nbytes]
        self._target.read(piece.name, piece.begin, host_view(data))
        return data
