"""The exchange over Gloo: a ring, point to point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import allocate_staging, byte_view, host_view
from fastload.base.stopwatch import Stopwatch
from fastload.errors import Interrupted
from fastload.ranks.world import World
from fastload.transfer.rounds import FAILED, Round, wait_sent
from fastload.transfer.wire import Relay, Wire

__all__ = ["RingExchange"]

# With several network devices Gloo chooses one by the tag: those of a notice and of its chunk are the same
# modulo any number of devices up to 16, else the one might overtake the other.
_NOTICE_TAGS = 720_720


class RingExchange:
    """A ring over Gloo: each rank sends its own chunk to the right and passes on what comes from the left.

    Every chunk crosses every link of the ring but one, so with the ranks of a host next to each other
    each byte enters and leaves a host once. Receives are posted ahead; a chunk is passed on as soon
    as it is here, without waiting for the rest of its round. Gloo's own all-gather gets slower with
    the message size and cannot be interrupted, hence point to point.

    Args:
        world: The ranks.
        order: Those of them that take part, in ring order; their parts are in the order of their ranks.
        pinned: Page-locks slabs, for copies to a CUDA device.
    """

    transport = "gloo ring"
    private = True

    def __init__(self, world: World, order: Sequence[int], *, pinned: bool) -> None:
        self.device = torch.device("cpu")
        self.watch = Stopwatch()
        self._pinned = pinned
        self._rank = world.rank
        place = order.index(world.rank)
        self._right = order[(place + 1) % len(order)]
        self._left = order[place - 1]
        self._incoming = [order[place - distance] for distance in range(1, len(order))]
        self._notices = _Notices(self._incoming)
        self._wire = Wire(world, order)
        self._relay = Relay(self._pass_on, self._ended, self.watch, self._wire.timeout)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        self._wire.connect(give_up=give_up)
        try:
            for owner in self._incoming:
                self._notices.expect(owner, partial(self._receive, tag=self._notice_tag(owner)))
        except RuntimeError as error:
            raise Interrupted(f"the ranks could not connect: {error}") from error
        self._relay.begin()

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[Tensor, Tensor | None]:
        return allocate_staging(slab_bytes, pinned=self._pinned), None

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=self._pinned)

    def post(self, work: Round) -> None:
        try:
            work.receives = [
                self._receive(work.parts[owner], tag=self._wire.number(owner))
                for owner in self._incoming_of(work)
            ]
        except RuntimeError as error:
            work.broke(error)
        self._relay.post(work)

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        try:
            if work.status:
                self._tell(work, self._rank, _Notice(work.status, work.index))
            if self._rank in work.parts:
                work.sends.append(self._send(work.parts[self._rank], self._wire.number(self._rank)))
        except RuntimeError as error:
            work.broke(error)
        work.started.set()

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        wait_sent(work, until_s, give_up)

    def close(self) -> None:
        if self._relay.close(partial(self._wire.cut, self._left)):
            self._wire.drop(self._notices.forget())

    def _pass_on(self, work: Round) -> None:
        for owner, receive in zip(self._incoming_of(work), work.receives, strict=False):
            self._forward(work, owner, receive)

    def _ended(self, work: Round) -> None:
        work.statuses = self._notices.of(work)

    def _forward(self, work: Round, owner: int, receive: Any) -> None:
        """Passes a chunk on, even one that could not be received: nobody is to wait for it."""
        try:
            receive.wait(self._wire.timeout)
            if (notice := self._notices.heard(owner)) is not None:
                self._tell(work, owner, notice)
        except RuntimeError as error:
            work.broke(error)
            self._tell(work, owner, _Notice(FAILED, work.index))
        if owner != self._right:
            try:
                work.sends.append(self._send(work.parts[owner], self._wire.number(owner)))
            except RuntimeError as error:
                work.broke(error)

    def _tell(self, work: Round, owner: int, notice: _Notice) -> None:
        """Notes what is the matter with a reader's chunks, and passes it on."""
        if not self._notices.note(owner, notice) or owner == self._right:
            return
        try:
            message = torch.tensor(notice, dtype=torch.int64, device="cpu")
            work.sends.append(self._send(message, self._notice_tag(owner)))
        except RuntimeError as error:
            work.broke(error)

    def _incoming_of(self, work: Round) -> list[int]:
        return [owner for owner in self._incoming if owner in work.parts]

    def _send(self, data: Tensor, tag: int) -> Any:
        return self._wire.send(data, self._right, tag)

    def _receive(self, into: Tensor, *, tag: int) -> Any:
        return self._wire.receive(into, self._left, tag)

    def _notice_tag(self, owner: int) -> int:
        return _NOTICE_TAGS + self._wire.number(owner)


class _Notice(NamedTuple):
    """What is the matter with the chunks of a reader.

    Attributes:
        status: Such as `FAILED`.
        first: The first round of which it holds.
    """

    status: int
    first: int


class _Notices:
    """Which readers' chunks are no good.

    Args:
        owners: The ranks that messages come from, one from each at most.
    """

    def __init__(self, owners: Sequence[int]) -> None:
        self._board = torch.zeros((len(owners), len(_Notice._fields)), dtype=torch.int64, device="cpu")
        self._words = host_view(byte_view(self._board)).cast("q")
        self._place = {owner: place for place, owner in enumerate(owners)}
        self._receives: dict[int, Any] = {}
        self._noted: dict[int, _Notice] = {}

    def expect(self, owner: int, receive: Callable[[Tensor], Any]) -> None:
        """Opens the receive for the one message about a reader."""
        self._receives[owner] = receive(self._board[self._place[owner]])

    def heard(self, owner: int) -> _Notice | None:
        """Returns what a message has said of a reader, once; None if none has come."""
        begin = self._place[owner] * len(_Notice._fields)
        if not self._words[begin] or owner not in self._receives:
            return None
        self._receives.pop(owner).wait()  # the rest of it may be on its way
        return _Notice(*self._words[begin : begin + len(_Notice._fields)])

    def forget(self) -> list[Any]:
        """Gives up the receives that are left, which keep the connections; the caller lets go of them."""
        receives, self._receives = list(self._receives.values()), {}
        return receives

    def note(self, owner: int, notice: _Notice) -> bool:
        """Takes note of what is the matter with a reader; returns whether that is new."""
        return self._noted.setdefault(owner, notice) is notice

    def of(self, work: Round) -> dict[int, int]:
        """Returns what is the matter with chunks of a round, by reader."""
        # A list: the other thread may note one meanwhile.
        noted = [(owner, notice) for owner, notice in list(self._noted.items()) if owner in work.parts]
        return {owner: notice.status for owner, notice in noted if notice.first <= work.index}
