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

from fastload.base.memory import allocate_staging, byte_view, host_view
from fastload.base.stopwatch import Stopwatch
from fastload.comm.hosts import Peer
from fastload.comm.shared_memory import HostMemory
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.links import Relay, Wire
from fastload.transfer.message import Message, Ranks
from fastload.transfer.routing import Route, Routing
from fastload.transfer.transport import FAILED, TICK_S, Buffer, Delivery, FlatBuffer, Round, wait_sent


class SharedBuffer:
    """One of the buffers of a host: a part for each of its ranks.

    Attributes:
        nbytes: Length of a part.
    """

    def __init__(self, buffers: SharedBuffers, number: int, nbytes: int) -> None:
        self.nbytes = nbytes
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
    """The buffers of the ranks of one host, and how far these are with them.

    Each rank has its chunks, and the messages that it receives from other hosts, in its own part, and tells
    the others once it has all of a round. They use a buffer again once all of them are done with it, which
    they tell each other along with that; so one buffer more than rounds in flight keeps them from waiting.

    Args:
        world: The ranks.
        ranks: Those of this host, more than one.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.rank = world.rank
        self._host = HostMemory(world, ranks)
        self._num_buffers = 0
        self._buffer_bytes = 0
        self._turns = _Turns()

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Returns one more buffer, with memory once the ranks are connected.

        Each part has room for a whole round; what its rank does not hold, it does not touch.
        """
        self._buffer_bytes = max(self._buffer_bytes, nbytes)
        self._num_buffers += 1
        return SharedBuffer(self, self._num_buffers - 1, nbytes)

    def part(self, number: int, rank: int) -> Tensor:
        """Returns the part of a rank of a buffer."""
        memory = self._host.memory
        begin = (self._host.ranks.index(rank) * self._num_buffers + number) * self._buffer_bytes
        return memory[begin : begin + self._buffer_bytes]

    def offer(self) -> dict[str, str]:
        """Returns what the others have to know to connect to this rank."""
        return self._host.offer()

    def renew(self) -> None:
        """Drops what was kept."""
        self._host.renew()

    def accept(self, offers: Sequence[Mapping[str, str]]) -> None:
        """Learns what each rank of the world has offered."""
        self._host.accept(offers)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Meets the others of the host, and takes the memory.

        Args:
            give_up: Asked again and again; True ends the wait for them.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
            MemoryError: The system does not give that much memory.
        """
        nbytes = len(self._host.ranks) * self._num_buffers * self._buffer_bytes
        self._host.connect(nbytes, self._turns, give_up=give_up)

    def post(self, work: Round) -> None:
        """Takes note of a round whose parts are ready to receive."""
        self._turns.post(work)

    def arrive(self, work: Round, statuses: dict[int, int]) -> None:
        """Tells the others that this rank's part of a round is here, and what is the matter with it."""
        self._host.arrive(work.index, self._turns.placed, statuses)

    def release(self, work: Round) -> None:
        """Notes that this rank has placed a round; the others learn of it with the next one."""
        self._turns.placed = work.index

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Returns once no rank of the host needs what was in the buffer of a round before.

        Raises:
            Interrupted: A rank is gone, or `give_up` said so.
            DeadlineExceeded: It took too long.
        """
        self._turns.await_released(index - self._num_buffers, until_s=until_s, give_up=give_up)

    def close(self) -> None:
        """Ends the load; what connects the ranks is kept for the next one."""
        self._host.close()
        self._turns.end()


class _Turns:
    """How far the ranks of a host are with the rounds of a load; a `shared_memory.RoundObserver`.

    Attributes:
        placed: Up to which round this rank has placed all.
    """

    def __init__(self) -> None:
        self.placed = -1
        self._released = -1
        self._posted: dict[int, Round] = {}
        self._changed = threading.Condition()
        self._lost: int | None = None

    def post(self, work: Round) -> None:
        """Takes note of a round that is to be complete."""
        with self._changed:
            self._posted[work.index] = work
            lost = self._lost
        if lost is not None:
            _break(work, lost)

    def end(self) -> None:
        """Forgets rounds that nobody waits for any more, which keep their memory."""
        with self._changed:
            self._posted.clear()

    def await_released(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Returns once all ranks of the host have placed all up to a round; see `SharedBuffers.reserve`."""
        deadline = time.monotonic() + until_s
        with self._changed:
            while self._released < index:
                if self._lost is not None:
                    raise Interrupted(_gone(self._lost))
                if give_up():
                    raise Interrupted("another rank failed")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"not all of this host placed round {index} within {until_s:.1f} s"
                    )
                self._changed.wait(TICK_S)

    def complete(self, index: int, statuses: Mapping[int, int], released: int) -> None:
        """Hears that all of a round is here."""
        with self._changed:
            work = self._posted.pop(index, None)
            self._released = max(self._released, released)
            self._changed.notify_all()
        if work is not None:
            work.statuses = dict(statuses)
            work.done.set()

    def lost(self, rank: int) -> None:
        """Hears that a rank of the host is gone."""
        with self._changed:
            self._lost = rank
            posted, self._posted = list(self._posted.values()), {}
            self._changed.notify_all()
        for work in posted:
            _break(work, rank)


def _break(work: Round, rank: int) -> None:
    work.broke(Interrupted(_gone(rank)))
    work.done.set()


def _gone(rank: int) -> str:
    return f"rank {rank}, on the same host, is gone"


# With several network devices Gloo chooses one by the tag: those of a notice and of a message are the same
# modulo any number of devices up to 16, else the one might overtake the other.
_NOTICE_TAGS = 720_720


class HostTransport:
    """Messages over Gloo from host to host along trees, and through shared memory inside of a host.

    Each message enters each host once, and is passed on as soon as it is here, without waiting for the rest
    of its round; receives are posted ahead. Gloo's own collectives get slower with the message size and
    cannot be interrupted, hence point to point.

    A rank that cannot read sends what it has in its buffers, so that nobody waits for it, and a notice
    before, which takes the same way as its messages.

    Args:
        world: The ranks.
        routing: The ways between those that take part.
        pairs: (reader, group) of all messages that this rank has to do with.
        pinned: Page-locks buffers, for copies to an accelerator.
    """

    def __init__(
        self, world: World, routing: Routing, pairs: Iterable[tuple[int, Ranks]], *, pinned: bool
    ) -> None:
        self.device = torch.device("cpu")
        self.watch = Stopwatch()
        self.name = _name(routing)
        self._pinned = pinned
        self._rank = world.rank
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
        self._relay = Relay(self._pass_on, self._ended, self.watch, timedelta(seconds=world.patience_s))
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
            self._notices = self._wire.along("notices", _Notices)
            self._expect_notices()
            self._relay.begin()

    def allocate(self, buffer_bytes: int, own_bytes: int) -> tuple[Buffer, Tensor | None]:
        if self._shared is not None:
            return self._shared.allocate(buffer_bytes), None
        return FlatBuffer(allocate_staging(buffer_bytes, pinned=self._pinned)), None

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=self._pinned)

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        if self._shared is not None:
            self._shared.reserve(index, until_s=until_s, give_up=give_up)

    def post(self, work: Round) -> None:
        if self._shared is not None:
            self._shared.post(work)
        received = [each for each in work.incoming if each.route.source is not None]
        try:
            work.receives = [(each, self._receive(each)) for each in received]
        except RuntimeError as error:
            work.broke(error)
        if self._wire is not None:
            self._relay.post(work, sum(each.message.nbytes for each in received))

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        try:
            if work.status:
                self._tell(work, self._rank, _Notice(work.status, work.index))
            if len(work.kept) < len(work.outgoing) and self._wire is not None:
                self._wire.fail("this rank is lost to the load")  # others would take one message for another
            for each in work.kept:
                self._send(work, each)
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
            self._notices = _Notices()  # what was is not this load's alone, and keeps the connections
            self._wire.close(keep=self._relay.whole)

    def _cut(self) -> None:
        if self._wire is not None:
            self._wire.cut()

    def _expect_notices(self) -> None:
        try:
            for reader, source in self._sources:
                self._notices.expect(reader, source, partial(self._receive_notice, reader, source))
        except RuntimeError as error:
            raise Interrupted(f"the ranks could not connect: {error}") from error

    def _pass_on(self, work: Round) -> None:
        for each, receive in work.receives:
            self._forward(work, each, receive)

    def _ended(self, work: Round) -> None:
        """Has a round done: at once if this rank alone is to have it, or if its own part broke."""
        statuses = self._notices.of(work)
        if self._shared is not None and work.error is None:
            self._shared.arrive(work, statuses)
            return
        work.statuses = statuses
        work.done.set()

    def _forward(self, work: Round, each: Delivery, receive: Any) -> None:
        """Passes a message on, even one that could not be received: nobody is to wait for it."""
        reader, source = each.message.reader, each.route.source
        assert source is not None
        try:
            receive.wait(self._relay.timeout)
            if (notice := self._notices.heard(reader, source)) is not None:
                self._tell(work, reader, notice)
        except RuntimeError as error:
            work.broke(error)
            self._tell(work, reader, _Notice(FAILED, work.index))
        try:
            self._send(work, each)
        except RuntimeError as error:
            work.broke(error)

    def _tell(self, work: Round, reader: int, notice: _Notice) -> None:
        """Notes what is wrong with a reader's chunks, and passes it on."""
        self._relay.whole = False  # there is one notice of a reader in the life of the connections
        if not self._notices.note(reader, notice) or self._wire is None:
            return
        try:
            message = torch.tensor(notice, dtype=torch.int64, device="cpu")
            tag = _NOTICE_TAGS + self._wire.number(reader)
            work.sends += [self._wire.send(message, rank, tag) for rank in self._targets.get(reader, ())]
        except RuntimeError as error:
            work.broke(error)

    # The messages of one reader come in the same order at both ends: that in which they are passed on.

    def _send(self, work: Round, each: Delivery) -> None:
        if self._wire is not None:
            tag = self._wire.number(each.message.reader)
            work.sends += [self._wire.send(each.data, rank, tag) for rank in each.route.targets]

    def _receive(self, each: Delivery) -> Any:
        assert self._wire is not None, "another host"
        assert each.route.source is not None, "received"
        return self._wire.receive(each.data, each.route.source, self._wire.number(each.message.reader))

    def _receive_notice(self, reader: int, source: int, into: Tensor) -> Any:
        assert self._wire is not None, "another host"
        return self._wire.receive(into, source, _NOTICE_TAGS + self._wire.number(reader))


def _name(routing: Routing) -> str:
    """Returns what carries the bytes, in words."""
    between = "gloo" if len(routing.hosts) > 1 else ""
    inside = "shared memory" if any(len(ranks) > 1 for ranks in routing.hosts) else ""
    return " + ".join(filter(None, [between, inside]))


class _Notice(NamedTuple):
    """What is wrong with the chunks of a reader.

    Attributes:
        status: Such as `FAILED`.
        first: The first round of which it holds.
    """

    status: int
    first: int


class _Notices:
    """Which readers' chunks are no good, in this load and, as long as there is none, in later ones."""

    def __init__(self) -> None:
        self._expected: dict[tuple[int, int], tuple[memoryview, Any]] = {}
        self._noted: dict[int, _Notice] = {}

    def expect(self, reader: int, source: int, receive: Callable[[Tensor], Any]) -> None:
        """Opens the receive for the one message about a reader from a source, unless it is open."""
        if (reader, source) not in self._expected:
            into = torch.zeros(len(_Notice._fields), dtype=torch.int64, device="cpu")
            words = host_view(byte_view(into)).cast("q")
            self._expected[reader, source] = words, receive(into)

    def heard(self, reader: int, source: int) -> _Notice | None:
        """Returns what a message has said of a reader, once; None if none has come."""
        if (reader, source) not in self._expected or not self._expected[reader, source][0][0]:
            return None
        words, receive = self._expected.pop((reader, source))
        receive.wait()  # the rest of it may be on its way
        return _Notice(*words)

    def note(self, reader: int, notice: _Notice) -> bool:
        """Takes note of what is wrong with a reader; returns whether that is new."""
        return self._noted.setdefault(reader, notice) is notice

    def of(self, work: Round) -> dict[int, int]:
        """Returns what is wrong with chunks of a round, by reader."""
        # A list: the other thread may note one meanwhile.
        noted = [(reader, notice) for reader, notice in list(self._noted.items()) if reader in work.readers]
        return {reader: notice.status for reader, notice in noted if notice.first <= work.index}
