"""Connections over Gloo that outlive a load, and the messages that one load sends along them."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import await_done, background
from fastload.comm.hosts import Peer, address_in, listener_at, require_reachable
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted, WorldError
from fastload.transfer.transport import TICK_S, Round

_NEVER_SENT = 2**31 - 1  # a tag


class Links:
    """Connections between some ranks, the members, seen from one of them; see `comm.cache.CachedResource`.

    Each is a group of Gloo of its own, of two: a group of all would connect everybody with everybody. Where
    torch is to use several network devices it is one for each, and a message goes by its tag: those of one
    tag, from one member to another, arrive in the order of their receives.

    Args:
        number: Which of the members this is.
        timeout: Longest wait for a connection.

    Attributes:
        token: Names them once all members know where the others are; empty before.
        companions: What its users leave with them for the next load.
    """

    def __init__(self, number: int, timeout: timedelta) -> None:
        self.token = ""
        self.companions: dict[str, Any] = {}
        self._number = number
        self._timeout = timeout
        self._devices: list[Any] = []
        self._opening: dict[int, list[_Connection]] = {}
        self._groups: dict[int, list[Any]] = {}
        self._listeners: list[socket.socket] = []

    def open(self, numbers: Collection[int]) -> dict[str, list[str]]:
        """Makes ready to be connected to other members; returns where each of them finds this one.

        Args:
            numbers: Of the others; those that are connected already have nothing to find.

        Raises:
            WorldError: This host has no address to be found at.
        """
        try:
            missing = sorted(set(numbers) - self._groups.keys())
            if missing and not self._devices:
                self._devices = _devices()
            self._opening = {
                number: [
                    _Connection(device, int(self._number > number), self._timeout) for device in self._devices
                ]
                for number in missing
            }
            return {
                str(number): [base64.b85encode(connection.own()).decode() for connection in connections]
                for number, connections in self._opening.items()
            }
        except RuntimeError as error:
            raise WorldError(f"no rank could connect to this one: {error}") from error

    @property
    def opening(self) -> Collection[int]:
        """The members that this one is about to connect to."""
        return self._opening.keys()

    def listen(self) -> list[tuple[str, int]]:
        """Listens where the others are to connect to, until they do; returns IP addresses and ports.

        To Gloo itself nobody may connect just to see whether that works: it keeps what has come.
        """
        self._stop_listening()
        for connection in next(iter(self._opening.values()), ()):
            address = address_in(connection.own())
            if address is not None and (listener := listener_at(address)) is not None:
                self._listeners.append(listener)
        return [listener.getsockname()[:2] for listener in self._listeners]

    def _stop_listening(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def find(self, found: Sequence[Mapping[str, Sequence[str]]]) -> None:
        """Learns where the other members are, and with that which links these are.

        Args:
            found: What `open` has returned, by number.
        """
        for number, connections in self._opening.items():
            for connection, told in zip(connections, found[number][str(self._number)], strict=True):
                connection.told = base64.b85decode(told)
        self.token = self.token or xxhash.xxh3_64_hexdigest(repr(found).encode())

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Returns once this member is connected to those that it was made ready for.

        Args:
            give_up: Asked again and again; True ends the wait.

        Raises:
            Interrupted: Some of them did not come, or `give_up` said so.
        """
        self._stop_listening()
        for connections in self._opening.values():
            for connection in connections:
                connection.begin()
        for number, connections in self._opening.items():
            try:
                groups = [connection.group(give_up) for connection in connections]
            except (RuntimeError, DeadlineExceeded) as error:
                where = ", ".join(filter(None, (address_in(connection.told) for connection in connections)))
                raise Interrupted(f"no connection to a rank at {where}: {error}") from error
            self._groups[number] = groups
        self._opening = {}

    def send(self, data: Tensor, number: int, tag: int) -> Any:
        """Begins to send, and returns what can be waited for."""
        return self._group(number, tag).send([data], int(number > self._number), tag)

    def receive(self, into: Tensor, number: int, tag: int) -> Any:
        """Begins to receive, and returns what can be waited for."""
        return self._group(number, tag).recv([into], int(number > self._number), tag)

    def cut(self) -> None:
        """Wakes whoever waits for a member that will not answer, here and, as a lost connection, there.

        Gloo has no call for it, but it closes all connections of a group when one wait times out.
        """
        for number, groups in self._groups.items():
            for tag in range(_NEVER_SENT - len(groups), _NEVER_SENT):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                with contextlib.suppress(RuntimeError):
                    self.receive(nothing, number, tag).wait(timedelta(milliseconds=1))

    def drop(self) -> None:
        """Lets go of the connections.

        Gloo takes tens of milliseconds to take a group down, which nobody has to wait for.
        """
        self._stop_listening()
        for connections in self._opening.values():
            for connection in connections:
                connection.give_up()
        dying = [self._groups, self._opening, self._devices, self.companions]
        self._groups, self._opening, self._devices, self.companions = {}, {}, [], {}
        if threading.main_thread().is_alive():
            threading.Thread(target=dying.clear, name="fastload-down").start()
        else:  # the process ends, and would not wait for a thread
            dying.clear()

    def disown(self) -> None:
        """Keeps a forked child from taking the groups down, for which it lacks Gloo's threads."""
        self._stop_listening()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _group(self, number: int, tag: int) -> Any:
        groups = self._groups[number]
        return groups[tag % len(groups)]


class _Connection:
    """A connection that is being made, in a thread: Gloo says where it is found, then asks for the other end.

    Args:
        device: The network device.
        end: Which of the two ends this is.
        timeout: Longest wait for the other one.

    Attributes:
        told: What Gloo says of where the other end is found.
    """

    def __init__(self, device: Any, end: int, timeout: timedelta) -> None:
        self.told = b""
        self._addresses = _Addresses(end)
        self._timeout_s = timeout.total_seconds()
        self._made: Future[Any] = Future()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        options._threads = 0  # which collectives would need

        def make() -> None:
            try:
                self._made.set_result(gloo(self._addresses, end, 2, options))
            except BaseException as error:
                # Without its frames, which hold the future: a cycle that would keep the device open.
                self._made.set_exception(error.with_traceback(None))

        background(make, "fastload-connect").start()

    def own(self) -> bytes:
        """Returns what Gloo says of where this end is found."""
        return self._addresses.own.result(self._timeout_s)

    def begin(self) -> None:
        """Begins to connect to the other end; from then on only its time limit ends the thread."""
        self._addresses.other.set_result(self.told)

    def group(self, give_up: Callable[[], bool]) -> Any:
        """Returns the group of both ends, once they are connected; errors are those of `Links.connect`."""

        def late() -> Exception:
            return DeadlineExceeded(f"connecting did not end within {self._timeout_s:.1f} s")

        await_done(self._made, give_up=give_up, limit_s=self._timeout_s, late=late)
        return self._made.result()

    def give_up(self) -> None:
        """Lets the thread end."""
        self._addresses.other.cancel()


class _Addresses(dist.Store):
    """The store of one connection: what it is told goes to the other end by other ways.

    Args:
        end: Which end this is.
    """

    def __init__(self, end: int) -> None:
        super().__init__()
        self._end = end
        self.own: Future[bytes] = Future()
        self.other: Future[bytes] = Future()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.own.set_result(bytes(value))

    def get(self, key: str) -> bytes:
        return self._address(key).result()

    def wait(self, keys: list[str], timeout: timedelta = timedelta.max) -> None:
        for key in keys:
            self._address(key).result(timeout.total_seconds())

    def _address(self, key: str) -> Future[bytes]:
        return self.own if key.endswith(f"/{self._end}") else self.other


def _devices() -> list[Any]:
    """Returns the network devices that torch would use."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [_at_once(gloo.create_device, interface=name) for name in names.split(",")]
    return [_at_once(gloo.create_default_device)]


def _at_once(create: Callable[..., Any], **where: str) -> Any:
    """Makes a device whose groups connect as they are made, whatever ``TORCH_GLOO_LAZY_INIT`` says."""
    try:
        return create(**where, lazy_init=False)
    except TypeError:  # a torch whose groups always do
        return create(**where)


T = TypeVar("T")

_REACHING_S = 5.0  # in which a way is open, or is not


class Offering(Protocol):
    """What connects ranks that have told each other how."""

    def offer(self) -> Any:
        """Returns what the others have to know to connect to this rank, a JSON object; None for nothing.

        Its ``token`` is that of the connections to other hosts which this rank has kept from an earlier
        load; empty if it has none. Its ``host``, if there is one, names the first rank of this host and the
        ``token`` of what this rank has kept that connects it with the others of the host.
        """
        ...

    def renew(self) -> None:
        """Drops the connections that were kept: other ranks have not got them any more."""
        ...

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        """Learns what each rank of the world has offered, with one and the same token.

        Returns:
            Where this rank is about to connect to.
        """
        ...


def accept_offers(world: World, what: str, exchange: Offering | None, offers: Sequence[Any]) -> None:
    """Tells an exchange what all ranks have offered; if that does not go together, all offer once more.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        exchange: This rank's, or a `Wire`; None if it does not take part.
        offers: By rank; see `Offering.offer`.

    Raises:
        PeerError: A rank did not answer, or could not reach another one.
    """
    if not _go_together([offer for offer in offers if offer is not None]):
        if exchange is not None:
            exchange.renew()
        offers = world.agree(what, lambda: exchange.offer() if exchange is not None else None)
    peers = exchange.accept(offers) if exchange is not None else ()
    if any(offer and offer.get("at") for offer in offers) and len(set(world.nodes.values())) > 1:
        limit_s = min(_REACHING_S, world.patience_s / 2)
        world.agree(f"{what}: connecting", partial(require_reachable, world.rank, peers, limit_s=limit_s))


def _go_together(offers: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks name the same connections, and those of each host the same link."""
    hosts = [offer["host"] for offer in offers if offer.get("host") is not None]
    links = {(host["leader"], host["token"]) for host in hosts}
    return len({offer["token"] for offer in offers}) <= 1 and len(links) == len(
        {leader for leader, _ in links}
    )


class Wire:
    """Connections between some ranks, as one load uses them: what breaks in it is not the caller's group.

    They are kept for the next load of the same ranks. Messages of one tag, from one rank to another, arrive
    in the order of their receives.

    Args:
        world: The ranks.
        members: Those of them that take part.
        partners: Those of the members that this one sends to or receives from.
    """

    def __init__(self, world: World, members: Collection[int], partners: Collection[int]) -> None:
        self.timeout = timedelta(seconds=world.patience_s)
        self._world = world
        self._number = {rank: number for number, rank in enumerate(sorted(members))}  # in the links
        self._partners = [self._number[rank] for rank in partners]
        self._name = f"gloo {sorted(members)}"
        self._closed = False
        self._failure = ""
        self._num_clears = world.cache.num_clears
        self._links: Links = world.cache.take(self._name) or self._open()

    def offer(self) -> dict[str, Any]:
        """Says which connections this rank has, or where it is found; see `Offering`."""
        at = self._links.open(self._partners)
        return {"token": self._links.token, "at": at, "listens": self._links.listen()}

    def renew(self) -> None:
        """Makes new connections; see `Offering`."""
        self._links.drop()
        self._links = self._open()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        """Learns what the other ranks have said; see `Offering`."""
        self._links.find([offers[rank]["at"] for rank in self._number])
        hosts, opening = self._world.hosts, self._links.opening
        partners = [rank for rank, number in self._number.items() if number in opening]
        return [Peer(rank, hosts[rank], *where) for rank in partners for where in offers[rank]["listens"]]

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Meets the neighbours; arguments and errors are those of `Transport.connect`."""
        self._links.connect(give_up=give_up)

    def along(self, name: str, make: Callable[[], T]) -> T:
        """Returns what goes along with the connections, from load to load; makes it the first time."""
        companions = self._links.companions
        if name not in companions:
            companions[name] = make()
        found: T = companions[name]
        return found

    def send(self, data: Tensor, rank: int, tag: int) -> Any:
        """Begins to send, and returns what can be waited for."""
        return self._begin(lambda: self._links.send(data, self._number[rank], tag))

    def receive(self, into: Tensor, rank: int, tag: int) -> Any:
        """Begins to receive, and returns what can be waited for."""
        return self._begin(lambda: self._links.receive(into, self._number[rank], tag))

    def fail(self, why: str) -> None:
        """Has nothing begin any more: where one message is left out, the next would be taken for it.

        Gloo ends the process of whoever then gets one that is longer than what it is to get.
        """
        self._failure = self._failure or why

    def _begin(self, begin: Callable[[], T]) -> T:
        if self._failure:
            raise RuntimeError(self._failure)
        try:
            return begin()
        except RuntimeError as error:
            self.fail(str(error))
            raise

    def number(self, rank: int) -> int:
        """Returns which of the members a rank is: a tag of its own."""
        return self._number[rank]

    def cut(self) -> None:
        """Wakes whoever waits for a peer that will not answer, here and, as a lost connection, there."""
        self._links.cut()

    def close(self, *, keep: bool) -> None:
        """Leaves the connections to the next load, or lets go of them.

        Args:
            keep: Whether all that was sent has been received, at both ends.
        """
        if self._closed:
            return
        self._closed = True
        if keep and self._links.token:
            self._world.cache.put(self._name, self._links, self._num_clears)
        else:
            self._links.drop()

    def _open(self) -> Links:
        return Links(self._number[self._world.rank], self.timeout)


class Relay:
    """Passes on what comes, round by round, in a thread; another one waits for what was sent.

    Args:
        pass_on: Waits for what a round receives, and passes it on.
        ended: Called when all of a round has come and this rank's chunk is handed over; has it `done`.
        watch: Stopped then.
        timeout: Longest wait for a message, a `timedelta`.

    Attributes:
        whole: Whether every round so far has come and gone as it should.
        bytes_in: Bytes of chunks that have come in, or are about to.
    """

    def __init__(
        self,
        pass_on: Callable[[Round], None],
        ended: Callable[[Round], None],
        watch: Stopwatch,
        timeout: timedelta,
    ) -> None:
        self._pass_on = pass_on
        self._ended = ended
        self._watch = watch
        self.timeout = timeout
        self._closed = False
        self._num_posted = self._num_ended = 0
        self.whole = True
        self.bytes_in = 0
        self._posted: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._passed_on: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        # A wait for a send cannot watch the failure flag, so it is not for the caller's thread.
        self._threads = (
            background(self._pass_on_all, "fastload-relay"),
            background(self._await_sends, "fastload-sent"),
        )

    def begin(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def post(self, work: Round, nbytes: int) -> None:
        """Takes the next round, whose receives are posted, and so many bytes long."""
        self.bytes_in += nbytes
        self._num_posted += 1
        self._posted.put(work)

    def close(self, cut: Callable[[], object]) -> bool:
        """Ends the threads; returns whether they use the connections no more.

        Args:
            cut: Wakes whoever waits for a peer that will not answer.
        """
        self._closed = True
        self._posted.put(None)
        if self._num_ended == self._num_posted:
            return True
        if self._still_alive(TICK_S):
            cut()
            self._still_alive(10 * TICK_S)
        return not self._still_alive(0.0)

    def _still_alive(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        alive = [thread for thread in self._threads if thread.is_alive()]
        for thread in alive:
            thread.join(max(0.0, deadline - time.monotonic()))
        return any(thread.is_alive() for thread in alive)

    def _pass_on_all(self) -> None:
        while (work := self._posted.get()) is not None:
            self._pass_on(work)
            while work.error is None and not self._closed and not work.started.wait(TICK_S):
                pass
            if work.started.is_set():
                self._watch.stop(work.began, round=work.index)
            self.whole &= work.started.is_set() and work.error is None
            self._ended(work)
            self._passed_on.put(work)
        self._passed_on.put(None)

    def _await_sends(self) -> None:
        while (work := self._passed_on.get()) is not None:
            try:
                for send in work.sends:
                    send.wait(self.timeout)
            except RuntimeError as error:
                work.broke(error)
                self.whole = False
            self._num_ended += 1
            work.sent.set()
