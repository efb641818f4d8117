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
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers
from fastload.comm.hosts import Peer
from fastload.comm.shared_memory import HostMemory
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.links import Wire
from fastload.transfer.messages import Message, Ranks, Route, Routing
from fastload.transfer.transport import FAILED, TICK_S, BufferMemory, Delivery, Round, Transport, wait_sent


class SharedMemory(BufferMemory):
    """The buffers of the ranks of one host, and how far these ranks are; a `shared_memory.RoundObserver`.

    A rank holds its chunks, and the messages that it receives from other hosts, in its own part. It reports
    each round that is complete there. A buffer is used again once all ranks have placed its round, which they
    report along with the next round. With one buffer more than rounds in flight they need not wait for that.

    Args:
        world: All ranks.
        ranks: The ranks of this host, at least two.

    Attributes:
        host: The shared memory, and the connections of its ranks.
    """

    is_shared = True

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        super().__init__(pinned=False)
        self.host = HostMemory(world, ranks)
        self._rank = world.rank
        self._num_buffers = self._buffer_bytes = 0
        self._placed = self._released = -1  # the last round that this rank, that all ranks have placed
        self._posted: dict[int, Round] = {}
        self._changed = threading.Condition()
        self._lost: int | None = None

    def allocate(self, count: int, nbytes: int) -> None:
        """Adds buffers, which have memory once the ranks are connected.

        Each part has room for a complete round, but a rank touches only what it holds.
        """
        self._num_buffers, self._buffer_bytes = count, nbytes

    def allocate_chunks(self, count: int, most: int, nbytes: int) -> None:
        """Adds memory for the chunks that each rank reads; it is touched as these are read."""
        self._most_chunks, self._chunk_bytes = most, nbytes

    def of(self, rank: int) -> Tensor:
        """Returns the memory of a rank: its parts of all buffers, then the chunks that it reads."""
        begin = self.host.ranks.index(rank) * self._rank_bytes
        return self.host.memory[begin : begin + self._rank_bytes]

    def buffer(self, number: int, rank: int) -> Tensor:
        """Returns a rank's part of a buffer."""
        return self.of(rank)[number * self._buffer_bytes :][: self._buffer_bytes]

    def chunk(self, number: int) -> Tensor:
        begin = self._num_buffers * self._buffer_bytes + number * self._chunk_bytes
        return self.of(self._rank)[begin : begin + self._chunk_bytes]

    @property
    def _rank_bytes(self) -> int:
        return self._num_buffers * self._buffer_bytes + self._most_chunks * self._chunk_bytes

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Connects the ranks of the host and maps the memory; errors are those of `HostMemory.connect`."""
        self.host.connect(len(self.host.ranks) * self._rank_bytes, self, give_up=give_up)

    def post(self, work: Round) -> None:
        """Expects a round, which is `done` once every rank has its part."""
        with self._changed:
            self._posted[work.index] = work
            lost = self._lost
        if lost is not None:
            _break(work, lost)

    def freed(self, number: int) -> int:
        return min(number, self._released)

    def arrive(self, work: Round, statuses: dict[int, int]) -> None:
        """Reports that this rank's part of a round is complete, and which of its chunks could not be read."""
        self.host.arrive(work.index, self._placed, statuses)

    def release(self, work: Round) -> None:
        """Notes that this rank has placed a round; the others learn of it with the next one."""
        self._placed = work.index

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        before = index - self._num_buffers  # the round that was in the buffer
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
        self._shared = SharedMemory(world, routing.neighbours) if len(routing.neighbours) > 1 else None
        super().__init__(_name(routing), world.rank, self._shared or BufferMemory(pinned=pinned))
        self._routing = routing
        self._notices = _Notices()
        self._relay: Relay | None = None
        if len(routing.hosts) > 1:
            self._relay = Relay(world, routing, pairs, self._notices, self._shared, self.watch)
        wire = self._relay.wire if self._relay is not None else None
        self.connections = _Connections(self._shared.host if self._shared is not None else None, wire)

    @property
    def bytes_in(self) -> int:
        return self._relay.bytes_in if self._relay is not None else 0

    def route(self, message: Message) -> Route:
        return self._routing.route(message.reader, message.ranks)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        if self._shared is not None:
            self._shared.connect(give_up=give_up)
        if self._relay is not None:
            self._relay.connect(give_up=give_up)

    def post(self, work: Round) -> None:
        if self._shared is not None:
            self._shared.post(work)
        if self._relay is not None:
            self._relay.post(work)

    def start(self, work: Round, status: int) -> None:
        work.began = self.watch.start()
        notice = _Notice(status, work.index) if status else None
        if self._relay is not None:
            self._relay.send(work, self._rank, notice)
            work.started.set()
            return
        if notice is not None:
            self._notices.add(self._rank, notice)
        work.started.set()
        self.watch.stop(work.began, round=work.index)
        work.sent.set()
        _end(work, self._notices, self._shared)

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        wait_sent(work, until_s, give_up)
        if self._shared is not None:
            self._shared.release(work)

    def close(self) -> None:
        has_ended = self._relay is None or self._relay.end()
        super().close()
        if self._relay is not None and has_ended:
            self._relay.close()


class _Connections:
    """The connections of a rank to other hosts and to the ranks of its own; see `links.Offering`.

    Args:
        host: Those to the ranks of this host, if any.
        wire: Those to other hosts, if any.
    """

    def __init__(self, host: HostMemory | None, wire: Wire | None) -> None:
        self._host = host
        self._wire = wire

    def offer(self) -> Any:
        offer = self._wire.offer() if self._wire is not None else {"token": ""}
        return {**offer, "host": self._host.offer() if self._host is not None else None}

    def renew(self) -> None:
        for connections in (self._host, self._wire):
            if connections is not None:
                connections.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        if self._host is not None:
            self._host.accept([offer and offer["host"] for offer in offers])
        return self._wire.accept(offers) if self._wire is not None else ()


def _end(work: Round, notices: _Notices, shared: SharedMemory | None) -> None:
    """Ends a round: at once if this rank shares no memory or its part broke, else with its host."""
    statuses = notices.of(work)
    if shared is not None and work.error is None:
        shared.arrive(work, statuses)
    else:
        work.statuses = statuses
        work.done.set()


class Relay:
    """Receives the messages of other hosts, and sends and forwards messages to them.

    Each message enters each host once and is forwarded as soon as it has arrived, before the rest of its
    round; receives are posted ahead. One thread forwards what arrives, round by round, and a second one waits
    for the sends. Messages go point to point: Gloo's collectives slow down as messages grow, and cannot be
    interrupted.

    Args:
        world: The ranks.
        routing: The routes between the ranks that take part.
        pairs: (reader, group) of all messages that this rank sends or receives.
        notices: The notices of this load.
        shared: The buffers of this host; None if its ranks share no memory.
        watch: Stopped when the messages of a round have arrived and this rank's chunk was sent.

    Attributes:
        wire: The connections.
        bytes_in: Bytes of messages received or expected.
    """

    def __init__(
        self,
        world: World,
        routing: Routing,
        pairs: Iterable[tuple[int, Ranks]],
        notices: _Notices,
        shared: SharedMemory | None,
        watch: Stopwatch,
    ) -> None:
        self._targets: dict[int, dict[int, None]] = {}  # of each reader
        for reader, ranks in pairs:
            route = routing.route(reader, ranks)
            if route.source is not None:
                notices.sources[reader, route.source] = None
            self._targets.setdefault(reader, {}).update(dict.fromkeys(route.targets))
        members = [rank for ranks in routing.hosts for rank in ranks]
        targets = (rank for ranks in self._targets.values() for rank in ranks)
        self.wire = Wire(world, members, {*(source for _, source in notices.sources), *targets})
        self.bytes_in = 0
        self._notices = notices
        self._shared = shared
        self._watch = watch
        self._timeout = timedelta(seconds=world.patience_s)
        self._has_ended = False
        self._is_intact = True  # whether every round so far was received and sent completely
        # A wait for a send cannot watch the failure flag, so it is not for the caller's thread.
        self._forwarding, self._sending = Workers(1, "fastload-relay"), Workers(1, "fastload-sent")

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Connects to the other hosts; see `Transport.connect`."""
        self.wire.connect(give_up=give_up)
        try:
            self._notices.expect(self.wire)
        except RuntimeError as error:
            raise Interrupted(f"the ranks could not connect: {error}") from error

    def post(self, work: Round) -> None:
        """Receives and forwards the messages of a round."""
        receives: list[tuple[Delivery, Any]] = []
        try:
            receives += [
                (delivery, self.wire.receive(delivery.data, delivery.route.source, delivery.message.reader))
                for delivery in work.incoming
                if delivery.route.source is not None
            ]
        except RuntimeError as error:
            work.broke(error)
        self.bytes_in += sum(delivery.message.nbytes for delivery, _ in receives)
        self._forwarding.submit(partial(self._forward_all, work, receives))

    def send(self, work: Round, rank: int, notice: _Notice | None) -> None:
        """Sends the messages of this rank's chunk, after a notice if it could not be read."""
        if notice is not None:
            self._notify(work, rank, notice)
        if len(work.packed) < len(work.outgoing):
            self.wire.fail("this rank is lost to the load")
        for delivery in work.packed:
            self._send(work, delivery)

    def end(self) -> bool:
        """Ends the threads; returns whether they no longer use the connections.

        If not, they end by their timeout: Gloo does not tell who waits for a message that is queued in a
        connection which breaks.
        """
        self._has_ended = True
        if self._forwarding.is_idle and self._sending.is_idle:
            self._forwarding.close(wait_s=0.0)
            self._sending.close(wait_s=0.0)
            return True
        self._forwarding.submit(partial(self._sending.close, wait_s=0.0))  # the last round may yet be sent
        if self._end_threads(TICK_S):
            return True
        self.wire.cut()
        return self._end_threads(10 * TICK_S)

    def close(self) -> None:
        """Caches the connections for the next load, or drops them."""
        self._notices.drop()
        self.wire.close(keep=self._is_intact)

    def _end_threads(self, wait_s: float) -> bool:
        return self._forwarding.close(wait_s=wait_s) and self._sending.close(wait_s=wait_s)

    def _forward_all(self, work: Round, receives: Sequence[tuple[Delivery, Any]]) -> None:
        for delivery, receive in receives:
            self._forward(work, delivery, receive)
        while work.error is None and not self._has_ended and not work.started.wait(TICK_S):
            pass
        if work.started.is_set():
            self._watch.stop(work.began, round=work.index)
        self._is_intact &= work.started.is_set() and work.error is None and not self._has_ended
        _end(work, self._notices, self._shared)
        try:
            self._sending.submit(partial(self._await_sends, work))
        except RuntimeError:  # the system cannot start a thread
            self._await_sends(work)

    def _forward(self, work: Round, delivery: Delivery, receive: Any) -> None:
        """Forwards a message, even if its receive failed, so that no rank waits for it."""
        reader, source = delivery.message.reader, delivery.route.source
        assert source is not None
        try:
            receive.wait(self._timeout)
            if (notice := self._notices.take(reader, source)) is not None:
                self._notify(work, reader, notice)
        except RuntimeError as error:
            work.broke(error)
            self._notify(work, reader, _Notice(FAILED, work.index))
        self._send(work, delivery)

    def _notify(self, work: Round, reader: int, notice: _Notice) -> None:
        """Records a notice, and forwards the first one about a reader."""
        self._is_intact = False  # the connections have one receive for notices about each reader
        if not self._notices.add(reader, notice):
            return
        try:
            message = torch.tensor(notice, dtype=torch.int64, device="cpu")
            tag = _NOTICE_TAGS + reader
            work.sends += [self.wire.send(message, rank, tag) for rank in self._targets.get(reader, ())]
        except RuntimeError as error:
            work.broke(error)

    def _send(self, work: Round, delivery: Delivery) -> None:
        # Messages of one reader share a tag: they are sent and received in the same order, by round and hops.
        try:
            tag = delivery.message.reader
            work.sends += [self.wire.send(delivery.data, rank, tag) for rank in delivery.route.targets]
        except RuntimeError as error:
            work.broke(error)

    def _await_sends(self, work: Round) -> None:
        try:
            for send in work.sends:
                send.wait(self._timeout)
        except RuntimeError as error:
            work.broke(error)
            self._is_intact = False
        work.sent.set()


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
    """The notices about readers.

    Attributes:
        sources: (reader, source) of the messages that this rank receives from other hosts.
    """

    def __init__(self) -> None:
        self.sources: dict[tuple[int, int], None] = {}
        self._expected: dict[tuple[int, int], tuple[memoryview, Any]] = {}
        self._first: dict[int, _Notice] = {}

    def expect(self, wire: Wire) -> None:
        """Opens a receive for the one notice about each reader; those still open serve the next load."""
        self._expected = wire.along("notices")
        for reader, source in self.sources.keys() - self._expected.keys():
            into = torch.zeros(len(_Notice._fields), dtype=torch.int64, device="cpu")
            words = host_view(byte_view(into)).cast("q")
            self._expected[reader, source] = words, wire.receive(into, source, _NOTICE_TAGS + reader)

    def drop(self) -> None:
        """Drops the receives, which are kept along with the connections."""
        self._expected = {}

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
        notices = [(reader, notice) for reader, notice in list(self._first.items()) if reader in work.readers]
        return {reader: notice.status for reader, notice in notices if notice.first <= work.index}
