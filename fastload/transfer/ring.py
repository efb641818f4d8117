"""The exchange over Gloo: a ring, point to point."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastload.base.memory import allocate_staging, byte_view, host_view
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background, within
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.ranks.world import World
from fastload.transfer.rounds import FAILED, TICK_S, Round, wait_for

__all__ = ["RingExchange"]

_NEVER_SENT = 2**31 - 1  # a tag
# With several network devices Gloo chooses one by the tag: those of a notice and of its chunk are the same
# modulo any number of devices up to 16, else the one might overtake the other.
_NOTICE_TAGS = 720_720


class RingExchange:
    """A ring over Gloo: each rank sends its own chunk to the right and passes on what comes from the left.

    Every chunk crosses every link of the ring but one, so with the ranks of a host next to each other
    each byte enters and leaves a host once. Receives are posted ahead; a chunk is passed on as soon
    as it is here, without waiting for the rest of its round. Gloo's own all-gather gets slower with
    the message size and cannot be interrupted, hence point to point.

    The process group is private to one load: what breaks in it does not touch the caller's.

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
        self._size = len(order)
        self._number = {rank: number for number, rank in enumerate(sorted(order))}  # in the group of Gloo
        self._timeout = timedelta(seconds=world.patience_s)
        place = order.index(world.rank)
        self._right = order[(place + 1) % self._size]
        self._left = order[place - 1]
        self._incoming = [order[place - distance] for distance in range(1, self._size)]
        self._notices = _Notices(self._incoming)
        self._store = world.corner("ring", self._number[self._rank])
        self._closed = False
        self._posted: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._forwarder = background(self._forward_all, "fastload-ring")
        # A wait for a send cannot look out for alarms, so it is not for the caller's thread.
        self._forwarded: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._sender = background(self._await_sends, "fastload-sent")

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        def meet() -> Any:
            # Gloo waits for the others inside of the store's connection, which is not to be ours.
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            return dist.ProcessGroupGloo(store, self._number[self._rank], self._size, self._timeout)

        try:
            # Gloo's own deadline is for each step, and none of it holds when the store does not answer.
            self._group: Any = within(self._timeout.total_seconds(), "connecting", meet, give_up=give_up)
            for owner in self._incoming:
                self._notices.expect(owner, partial(self._receive, tag=self._notice_tag(owner)))
        except (RuntimeError, DeadlineExceeded) as error:
            raise Interrupted(f"the ranks could not connect: {error}") from error
        self._forwarder.start()
        self._sender.start()

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[Tensor, Tensor | None]:
        return allocate_staging(slab_bytes, pinned=self._pinned), None

    def post(self, work: Round) -> None:
        try:
            work.receives = [
                self._receive(work.parts[owner], tag=self._chunk_tag(owner))
                for owner in self._incoming_of(work)
            ]
        except RuntimeError as error:
            work.broke(error)
        self._posted.put(work)

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        try:
            if work.status:
                self._tell(work, self._rank, _Notice(work.status, work.index))
            if self._rank in work.parts:
                work.sends.append(self._send(work.parts[self._rank], self._chunk_tag(self._rank)))
        except RuntimeError as error:
            work.broke(error)
        work.started.set()

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        wait_for(work.sent, f"sending round {work.index} to rank {self._right}", until_s, give_up)
        if work.error is not None:
            raise Interrupted(f"round {work.index} did not reach rank {self._right}: {work.error}")

    def close(self) -> None:
        self._closed = True
        self._posted.put(None)
        if self._still_alive(TICK_S):
            self._break_connections()
            self._still_alive(10 * TICK_S)
        if not self._still_alive(0.0):
            # Gloo takes tens of milliseconds to take a group down, which nobody has to wait for.
            dying = [self._notices.forget(), self.__dict__.pop("_group", None)]
            threading.Thread(target=dying.clear, name="fastload-down").start()

    def _still_alive(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        threads = [thread for thread in (self._forwarder, self._sender) if thread.is_alive()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return any(thread.is_alive() for thread in threads)

    def _break_connections(self) -> None:
        """Wakes whoever waits for a peer that will not answer, here and, as a lost connection, there.

        Gloo has no call for it, but it closes all connections of a group when one wait times out.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):
            self._receive(nothing, tag=_NEVER_SENT).wait(timedelta(milliseconds=1))

    def _forward_all(self) -> None:
        while (work := self._posted.get()) is not None:
            for owner, receive in zip(self._incoming_of(work), work.receives, strict=False):
                self._forward(work, owner, receive)
            while work.error is None and not self._closed and not work.started.wait(TICK_S):
                pass
            if work.started.is_set():
                self.watch.stop(work.began, round=work.index)
            work.statuses = self._notices.of(work)
            work.done.set()
            self._forwarded.put(work)
        self._forwarded.put(None)

    def _await_sends(self) -> None:
        while (work := self._forwarded.get()) is not None:
            try:
                for send in work.sends:
                    send.wait(self._timeout)
            except RuntimeError as error:
                work.broke(error)
            work.sent.set()

    def _forward(self, work: Round, owner: int, receive: Any) -> None:
        """Passes a chunk on, even one that could not be received: nobody is to wait for it."""
        try:
            receive.wait(self._timeout)
            if (notice := self._notices.heard(owner)) is not None:
                self._tell(work, owner, notice)
        except RuntimeError as error:
            work.broke(error)
            self._tell(work, owner, _Notice(FAILED, work.index))
        if owner != self._right:
            try:
                work.sends.append(self._send(work.parts[owner], self._chunk_tag(owner)))
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
        return self._group.send([data], self._number[self._right], tag)

    def _receive(self, into: Tensor, *, tag: int) -> Any:
        return self._group.recv([into], self._number[self._left], tag)

    # Messages of one tag arrive in the order of their receives, so the rounds need none of their own.

    def _chunk_tag(self, owner: int) -> int:
        return self._number[owner]

    def _notice_tag(self, owner: int) -> int:
        return _NOTICE_TAGS + self._number[owner]


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
