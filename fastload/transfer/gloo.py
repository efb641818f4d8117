"""The exchange over Gloo: point to point between hosts, through shared memory inside of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import allocate_staging, byte_view, host_view
from fastload.base.stopwatch import Stopwatch
from fastload.comm.hosts import Peer
from fastload.comm.world import World
from fastload.errors import Interrupted
from fastload.transfer.rounds import FAILED, FlatSlab, Round, Slab, wait_sent
from fastload.transfer.shared import SharedSlabs
from fastload.transfer.tree import Trees
from fastload.transfer.wire import Relay, Wire

__all__ = ["GlooExchange"]

# With several network devices Gloo chooses one by the tag: those of a notice and of its chunk are the same
# modulo any number of devices up to 16, else the one might overtake the other.
_NOTICE_TAGS = 720_720


class GlooExchange:
    """Chunks over Gloo from host to host along trees, and through shared memory inside of a host.

    Each chunk enters each host once, and is passed on as soon as it is here, without waiting for the rest of
    its round; receives are posted ahead. Gloo's own all-gather gets slower with the message size and cannot
    be interrupted, hence point to point.

    Args:
        world: The ranks.
        trees: Those of them that take part, and the ways between them.
        pinned: Page-locks slabs, for copies to an accelerator.
    """

    private = True

    def __init__(self, world: World, trees: Trees, *, pinned: bool) -> None:
        self.device = torch.device("cpu")
        self.watch = Stopwatch()
        self.transport = _transport(trees)
        self._pinned = pinned
        self._rank = rank = world.rank
        ranks = trees.neighbours(rank)
        elsewhere = itertools.chain.from_iterable(other for other in trees.hosts if other is not ranks)
        sources = {owner: trees.source(owner, rank) for owner in elsewhere}
        self._sources = {
            owner: source
            for owner, source in sorted(sources.items(), key=lambda item: trees.hops(item[0], rank))
            if source is not None
        }
        self._targets = {owner: trees.targets(owner, rank) for owner in (*self._sources, rank)}
        self._wire: Wire | None = None
        if len(trees.hosts) > 1:
            partners = {*self._sources.values(), *itertools.chain(*self._targets.values())}
            members = list(itertools.chain.from_iterable(trees.hosts))
            self._wire = Wire(world, members, partners)
        self._notices = _Notices(())
        self._relay = Relay(self._pass_on, self._ended, self.watch, timedelta(seconds=world.patience_s))
        self.num_sharing = min(map(len, trees.hosts))
        self._shared: SharedSlabs | None = None
        if len(ranks) > 1:
            self._shared = SharedSlabs(world, ranks, partial(trees.taker, rank=rank))

    @property
    def shares_memory(self) -> bool:
        return self._shared is not None

    @property
    def bytes_in(self) -> int:
        return self._relay.bytes_in

    def offer(self) -> Any:
        wire = self._wire.offer() if self._wire is not None else {"token": ""}
        return {**wire, "host": self._shared.offer() if self._shared is not None else None}

    def renew(self) -> None:
        if self._shared is not None:
            self._shared.renew()
        if self._wire is not None:
            self._wire.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        if self._shared is not None:
            self._shared.accept([offer and offer["host"] for offer in offers])
        return self._wire.accept(offers) if self._wire is not None else ()

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        if self._shared is not None:
            self._shared.connect(give_up=give_up)
        if self._wire is not None:
            self._wire.connect(give_up=give_up)
            self._notices = self._wire.along("notices", self._expect_notices)
            self._relay.begin()

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[Slab, Tensor | None]:
        if self._shared is not None:
            return self._shared.allocate(slab_bytes), None
        return FlatSlab(allocate_staging(slab_bytes, pinned=self._pinned)), None

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=self._pinned)

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        if self._shared is not None:
            self._shared.reserve(index, until_s=until_s, give_up=give_up)

    def post(self, work: Round) -> None:
        if self._shared is not None:
            self._shared.post(work)
        try:
            work.receives = [
                self._receive(owner, work.parts[owner], tag=self._tag(owner))
                for owner in self._incoming_of(work)
            ]
        except RuntimeError as error:
            work.broke(error)
        if self._wire is not None:
            self._relay.post(work, sum(work.parts[owner].nbytes for owner in self._incoming_of(work)))

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        try:
            if work.status:
                self._tell(work, self._rank, _Notice(work.status, work.index))
            if self._rank in work.parts:
                if work.own is not None:
                    work.parts[self._rank].copy_(work.own)
                self._send(work, self._rank, work.parts[self._rank], self._tag(self._rank))
        except RuntimeError as error:
            work.broke(error)
        work.started.set()
        if self._wire is None:  # nothing comes or goes but through the memory of this host
            self.watch.stop(work.began, round=work.index)
            work.sent.set()
            self._ended(work)

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        wait_sent(work, until_s, give_up)
        if self._shared is not None:
            self._shared.release(work)

    def close(self) -> None:
        ended = self._relay.close(self._cut)
        if self._shared is not None:
            self._shared.close()
        if ended and self._wire is not None:
            self._notices = _Notices(())  # what was is not this load's alone, and keeps the connections
            self._wire.close(keep=self._relay.whole)

    def _cut(self) -> None:
        if self._wire is not None:
            self._wire.cut()

    def _expect_notices(self) -> _Notices:
        notices = _Notices(list(self._sources))
        try:
            for owner in self._sources:
                notices.expect(owner, partial(self._receive, owner, tag=self._notice_tag(owner)))
        except RuntimeError as error:
            raise Interrupted(f"the ranks could not connect: {error}") from error
        return notices

    def _pass_on(self, work: Round) -> None:
        for owner, receive in zip(self._incoming_of(work), work.receives, strict=False):
            self._forward(work, owner, receive)

    def _ended(self, work: Round) -> None:
        """Has a round done: at once if this rank alone is to have it, or if its own part broke."""
        statuses = self._notices.of(work)
        if self._shared is not None and work.error is None:
            self._shared.arrive(work, statuses)
            return
        work.statuses = statuses
        work.done.set()

    def _forward(self, work: Round, owner: int, receive: Any) -> None:
        """Passes a chunk on, even one that could not be received: nobody is to wait for it."""
        try:
            receive.wait(self._relay.timeout)
            if (notice := self._notices.heard(owner)) is not None:
                self._tell(work, owner, notice)
        except RuntimeError as error:
            work.broke(error)
            self._tell(work, owner, _Notice(FAILED, work.index))
        try:
            self._send(work, owner, work.parts[owner], self._tag(owner))
        except RuntimeError as error:
            work.broke(error)

    def _tell(self, work: Round, owner: int, notice: _Notice) -> None:
        """Notes what is the matter with a reader's chunks, and passes it on."""
        self._relay.whole = False  # there is one notice of a reader in the life of the connections
        if not self._notices.note(owner, notice):
            return
        try:
            message = torch.tensor(notice, dtype=torch.int64, device="cpu")
            self._send(work, owner, message, self._notice_tag(owner))
        except RuntimeError as error:
            work.broke(error)

    def _incoming_of(self, work: Round) -> list[int]:
        return [owner for owner in self._sources if owner in work.parts]

    def _send(self, work: Round, owner: int, data: Tensor, tag: int) -> None:
        """Sends something of a reader's to all that this rank passes it on to."""
        if self._wire is not None:
            work.sends += [self._wire.send(data, rank, tag) for rank in self._targets[owner]]

    def _receive(self, owner: int, into: Tensor, *, tag: int) -> Any:
        assert self._wire is not None, "another host"
        return self._wire.receive(into, self._sources[owner], tag)

    def _tag(self, owner: int) -> int:
        return self._wire.number(owner) if self._wire is not None else 0

    def _notice_tag(self, owner: int) -> int:
        return _NOTICE_TAGS + self._tag(owner)


def _transport(trees: Trees) -> str:
    """Returns what carries the bytes, in words."""
    between = "" if len(trees.hosts) == 1 else "gloo ring" if trees.base >= len(trees.hosts) else "gloo trees"
    inside = "shared memory" if any(len(ranks) > 1 for ranks in trees.hosts) else ""
    return " + ".join(filter(None, [between, inside]))


class _Notice(NamedTuple):
    """What is the matter with the chunks of a reader.

    Attributes:
        status: Such as `FAILED`.
        first: The first round of which it holds.
    """

    status: int
    first: int


class _Notices:
    """Which readers' chunks are no good, in this load and, as long as there is none, in later ones.

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

    def note(self, owner: int, notice: _Notice) -> bool:
        """Takes note of what is the matter with a reader; returns whether that is new."""
        return self._noted.setdefault(owner, notice) is notice

    def of(self, work: Round) -> dict[int, int]:
        """Returns what is the matter with chunks of a round, by reader."""
        # A list: the other thread may note one meanwhile.
        noted = [(owner, notice) for owner, notice in list(self._noted.items()) if owner in work.parts]
        return {owner: notice.status for owner, notice in noted if notice.first <= work.index}
