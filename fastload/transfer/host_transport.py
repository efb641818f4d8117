"""The transport through host memory: Gloo from host to host, shared memory within a host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import byte_view, host_view
from fastload.comm.hosts import Peer
from fastload.comm.shared_memory import HostMemory
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.links import Relay, Wire
from fastload.transfer.messages import Message, Ranks, Route, Routing
from fastload.transfer.transport import FAILED, TICK_S, Buffer, Delivery, Round, Transport, wait_sent


class SharedBuffer:
    """A buffer of a host, with a part for each of its ranks."""

    def __init__(self, buffers: SharedBuffers, number: int) -> None:
        self._buffers = buffers
        self._number = number

    @property
    def memory(self) -> Tensor:
        """The part of this rank."""
        return self.of(self._buffers.rank)

    def of(self, rank: int) -> Tensor:
        """Returns the part of a rank of this host."""
        return self._buffers.part(self._number, rank)


class SharedBuffers:
    """The buffers of the ranks of one host, and how far these ranks are; a `shared_memory.RoundObserver`.

    A rank holds its chunks, and the messages that it receives from other hosts, in its own part. It reports
    each round that is complete there. A buffer is used again once all ranks have placed its round, which they
    report along with the next round. With one buffer more than rounds in flight they need not wait for that.

    Args:
        world: All ranks.
        ranks: The ranks of this host, at least two.

    Attributes:
        host: The shared memory, and the connections of its ranks.
        rank: This rank.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.host = HostMemory(world, ranks)
        self.rank = world.rank
        self._num_buffers = 0
        self._buffer_bytes = 0
        self._placed = self._released = -1  # the last round that this rank, that all ranks have placed
        self._posted: dict[int, Round] = {}
        self._changed = threading.Condition()
        self._lost: int | None = None

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Returns one more buffer, which has memory once the ranks are connected.

        Each part has room for a complete round, but a rank touches only what it holds.
        """
        self._buffer_bytes = max(self._buffer_bytes, nbytes)
        self._num_buffers += 1
        return SharedBuffer(self, self._num_buffers - 1)

    def part(self, number: int, rank: int) -> Tensor:
        """Returns a rank's part of a buffer."""
        begin = (self.host.ranks.index(rank) * self._num_buffers + number) * self._buffer_bytes
        return self.host.memory[begin : begin + self._buffer_bytes]

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Connects the ranks of the host and maps the memory; errors are those of `HostMemory.connect`."""
        nbytes = len(self.host.ranks) * self._num_buffers * self._buffer_bytes
        self.host.connect(nbytes, self, give_up=give_up)

    def post(self, work: Round) -> None:
        """Expects a round, which is `done` once every rank has its part."""
        with self._changed:
            self._posted[work.index] = work
            lost = self._lost
        if lost is not None:
            _break(work, lost)

    def arrive(self, work: Round, statuses: dict[int, int]) -> None:
        """Reports that this rank's part of a round is complete, and which of its chunks could not be read."""
        self.host.arrive(work.index, self._placed, statuses)

    def release(self, work: Round) -> None:
        """Notes that this rank has placed a round; the others learn of it with the next one."""
        self._placed = work.index

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Waits until all ranks have placed the round that was in the buffer of this one before.

        Raises:
            Interrupted: A rank is gone, or `give_up` returned True.
            DeadlineExceeded: It took too long.
        """
        before = index - self._num_buffers
        deadline = time.monotonic() + until_s
        with self._changed:
            while self._released < before:
                if self._lost is not None:
                    raise Interrupted(_gone(self._lost))
                if give_up():
                    raise Interrupted("another rank failed")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"not all ranks of this host placed round {before} within {until_s:.1f} s"
                    )
                self._changed.wait(TICK_S)

    def complete(self, index: int, statuses: Mapping[int, int], released: int) -> None:
        """Ends the wait for a round; see `shared_memory.RoundObserver`."""
        with self._changed:
            work = self._posted.pop(index, None)
            self._released = max(self._released, released)
            self._changed.notify_all()
        if work is not None:
            work.statuses = dict(statuses)
            work.done.set()

    def lost(self, rank: int) -> None:
        """Breaks all rounds, since a rank of the host is gone."""
        with self._changed:
            self._lost = rank
            posted, self._posted = list(self._posted.values()), {}
            self._changed.notify_all()
        for work in posted:
            _break(work, rank)

    def close(self) -> None:
        """Ends the load; the connections are cached for the next one."""
        self.host.close()
        with self._changed:
            self._posted.clear()  # abandoned rounds, which keep their memory


def _break(work: Round, rank: int) -> None:
    work.broke(Interrupted(_gone(rank)))
    work.done.set()


def _gone(rank: int) -> str:
    return f"rank {rank}, on the same host, is gone"


# With several network devices Gloo chooses one by the tag: those of a notice and of a message are the same
# modulo any number of devices up to 16, else the one might overtake the other.
_NOTICE_TAGS = 720_720


class HostTransport(Transport):
    """Gloo from host to host along trees, and shared memory within a host.

    Each message enters each host once and is forwarded as soon as it has arrived, before the rest of its
    round; receives are posted ahead. Messages go point to point: Gloo's collectives slow down as messages
    grow, and cannot be interrupted.

    A rank that cannot read sends whatever is in its buffers, so that no rank waits for it. A notice precedes
    it on the same route.

    Args:
        world: The ranks.
        routing: The routes between the ranks that take part.
        pairs: (reader, group) of all messages that this rank sends or receives.
        pinned: Whether to page-lock buffers, for copies to an accelerator.
    """

    def __init__(
        self, world: World, routing: Routing, pairs: Iterable[tuple[int, Ranks]], *, pinned: bool
    ) -> None:
        super().__init__(_name(routing), world.rank, pinned=pinned)
        self._routing = routing
        self._sources: dict[tuple[int, int], None] = {}  # (reader, source)
        self._targets: dict[int, dict[int, None]] = {}  # of each reader
        for reader, ranks in pairs:
            route = routing.route(reader, ranks)
            if route.source is not None:
                self._sources[reader, route.source] = None
            self._targets.setdefault(reader, {}).update(dict.fromkeys(route.targets))
        self._wire: Wire | None = None
        if len(routing.hosts) > 1:
            members = [rank for ranks in routing.hosts for rank in ranks]
            targets = (rank for ranks in self._targets.values() for rank in ranks)
            self._wire = Wire(world, members, {*(source for _, source in self._sources), *targets})
        self._notices = _Notices()
        self._relay = Relay(self._forward, self._ended, self.watch, timedelta(seconds=world.patience_s))
        self._shared: SharedBuffers | None = None
        if len(routing.neighbours) > 1:
            self._shared = SharedBuffers(world, routing.neighbours)

    @property
    def shares_memory(self) -> bool:
        return self._shared is not None

    @property
    def bytes_in(self) -> int:
        return self._relay.bytes_in

    def route(self, message: Message) -> Route:
        return self._routing.route(message.reader, message.ranks)

    def offer(self) -> Any:
        wire = self._wire.offer() if self._wire is not None else {"token": ""}
        return {**wire, "host": self._shared.host.offer() if self._shared is not None else None}

    def renew(self) -> None:
        if self._shared is not None:
            self._shared.host.renew()
        if self._wire is not None:
            self._wire.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        if self._shared is not None:
            self._shared.host.accept([offer and offer["host"] for offer in offers])
        return self._wire.accept(offers) if self._wire is not None else ()

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        if self._shared is not None:
            self._shared.connect(give_up=give_up)
        if self._wire is not None:
            self._wire.connect(give_up=give_up)
            self._notices = self._wire.along("notices", _Notices)
            self._expect_notices()
            self._relay.begin()

    def allocate(self, nbytes: int) -> Buffer:
        return self._shared.allocate(nbytes) if self._shared is not None else super().allocate(nbytes)

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        if self._shared is not None:
            self._shared.reserve(index, until_s=until_s, give_up=give_up)

    def post(self, work: Round) -> None:
        if self._shared is not None:
            self._shared.post(work)
        receives: list[tuple[Delivery, Any]] = []
        try:
            receives += [
                (each, self._receive(each)) for each in work.incoming if each.route.source is not None
            ]
        except RuntimeError as error:
            work.broke(error)
        if self._wire is not None:
            self._relay.post(work, receives)

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        try:
            if work.status:
                self._notify(work, self._rank, _Notice(work.status, work.index))
            if len(work.packed) < len(work.outgoing) and self._wire is not None:
                self._wire.fail("this rank is lost to the load")
            for each in work.packed:
                self._send(work, each)
        except RuntimeError as error:
            work.broke(error)
        work.started.set()
        if self._wire is None:  # all messages go through the memory of this host
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
            self._notices = _Notices()  # the old ones hold the connections, which are in the cache
            self._wire.close(keep=self._relay.is_intact)

    def _cut(self) -> None:
        if self._wire is not None:
            self._wire.cut()

    def _expect_notices(self) -> None:
        try:
            for reader, source in self._sources:
                self._notices.expect(reader, source, partial(self._receive_notice, reader, source))
        except RuntimeError as error:
            raise Interrupted(f"the ranks could not connect: {error}") from error

    def _ended(self, work: Round) -> None:
        """Ends a round: at once if this rank shares no memory or its part broke, else with its host."""
        statuses = self._notices.of(work)
        if self._shared is not None and work.error is None:
            self._shared.arrive(work, statuses)
            return
        work.statuses = statuses
        work.done.set()

    def _forward(self, work: Round, each: Delivery, receive: Any) -> None:
        """Forwards a message, even if its receive failed, so that no rank waits for it."""
        reader, source = each.message.reader, each.route.source
        assert source is not None
        try:
            receive.wait(self._relay.timeout)
            if (notice := self._notices.take(reader, source)) is not None:
                self._notify(work, reader, notice)
        except RuntimeError as error:
            work.broke(error)
            self._notify(work, reader, _Notice(FAILED, work.index))
        try:
            self._send(work, each)
        except RuntimeError as error:
            work.broke(error)

    def _notify(self, work: Round, reader: int, notice: _Notice) -> None:
        """Records a notice, and forwards the first one about a reader."""
        self._relay.is_intact = False  # the connections have one receive for notices about each reader
        if not self._notices.add(reader, notice) or self._wire is None:
            return
        try:
            message = torch.tensor(notice, dtype=torch.int64, device="cpu")
            tag = _NOTICE_TAGS + reader
            work.sends += [self._wire.send(message, rank, tag) for rank in self._targets.get(reader, ())]
        except RuntimeError as error:
            work.broke(error)

    # Messages of one reader share a tag: they are sent and received in the same order, by round and hops.

    def _send(self, work: Round, each: Delivery) -> None:
        if self._wire is not None:
            tag = each.message.reader
            work.sends += [self._wire.send(each.data, rank, tag) for rank in each.route.targets]

    def _receive(self, each: Delivery) -> Any:
        assert self._wire is not None, "another host"
        assert each.route.source is not None, "received"
        return self._wire.receive(each.data, each.route.source, each.message.reader)

    def _receive_notice(self, reader: int, source: int, into: Tensor) -> Any:
        assert self._wire is not None, "another host"
        return self._wire.receive(into, source, _NOTICE_TAGS + reader)


def _name(routing: Routing) -> str:
    between = "gloo" if len(routing.hosts) > 1 else ""
    inside = "shared memory" if any(len(ranks) > 1 for ranks in routing.hosts) else ""
    return " + ".join(filter(None, [between, inside]))


class _Notice(NamedTuple):
    """The status of a reader's chunks from one round on.

    Attributes:
        status: `UNREADABLE` or `FAILED`.
        first: The first round that it applies to.
    """

    status: int
    first: int


class _Notices:
    """The notices about readers; receives that are still open serve the next load."""

    def __init__(self) -> None:
        self._expected: dict[tuple[int, int], tuple[memoryview, Any]] = {}
        self._first: dict[int, _Notice] = {}

    def expect(self, reader: int, source: int, receive: Callable[[Tensor], Any]) -> None:
        """Opens the receive for the one notice about a reader from a source, unless it is open."""
        if (reader, source) not in self._expected:
            into = torch.zeros(len(_Notice._fields), dtype=torch.int64, device="cpu")
            words = host_view(byte_view(into)).cast("q")
            self._expected[reader, source] = words, receive(into)

    def take(self, reader: int, source: int) -> _Notice | None:
        """Returns the notice about a reader from a source, once; None if none has arrived."""
        if (reader, source) not in self._expected or not self._expected[reader, source][0][0]:
            return None
        words, receive = self._expected.pop((reader, source))
        receive.wait()  # the rest of it may be on its way
        return _Notice(*words)

    def add(self, reader: int, notice: _Notice) -> bool:
        """Adds a notice; returns whether it is the first about this reader."""
        return self._first.setdefault(reader, notice) is notice

    def of(self, work: Round) -> dict[int, int]:
        """Returns the status of each chunk of a round that could not be read, by reader."""
        # A list: the other thread may add one meanwhile.
        found = [(reader, notice) for reader, notice in list(self._first.items()) if reader in work.readers]
        return {reader: notice.status for reader, notice in found if notice.first <= work.index}
