"""Connections over Gloo that outlive a load, and the messages that one load sends along them."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import socket
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from fastload.base.threads import Task, await_done
from fastload.comm.hosts import Peer, address_in, listener_at, require_reachable
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted, WorldError

_NEVER_SENT = 2**31 - 1  # a tag


class Links:
    """Connections of one rank to others, kept between loads; see `comm.cache.CachedResource`.

    Each connection is a Gloo group of two, since a larger one would connect every rank with every other.
    Where torch is to use several network devices, there is one for each, chosen by the tag of a message.
    Messages of one tag between two ranks arrive in the order of their receives.

    Args:
        rank: This rank; any numbering of the ranks will do.
        timeout: Longest wait for a connection.

    Attributes:
        token: Identifies the connections once all ranks know each other's addresses; empty before.
        companions: What users of the connections keep with them for the next load, by name.
    """

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self.token = ""
        self.companions: dict[str, dict[Any, Any]] = {}
        self._rank = rank
        self._timeout = timeout
        self._devices: list[Any] = []
        self._opening: dict[int, list[_Connection]] = {}
        self._groups: dict[int, list[Any]] = {}
        self._listeners: list[socket.socket] = []

    def open(self, ranks: Collection[int]) -> str:
        """Prepares connections to other ranks; returns the addresses for each of them, packed.

        Args:
            ranks: The other ranks; those that are connected already get no address.

        Raises:
            WorldError: This host has no address.
        """
        try:
            missing = sorted(set(ranks) - self._groups.keys())
            if missing and not self._devices:
                self._devices = _devices()
            self._opening = {
                rank: [_Connection(device, int(self._rank > rank), self._timeout) for device in self._devices]
                for rank in missing
            }
            return _packed(
                {
                    str(rank): [base64.b64encode(connection.address()).decode() for connection in connections]
                    for rank, connections in self._opening.items()
                }
            )
        except RuntimeError as error:
            raise WorldError(f"no rank could connect to this one: {error}") from error

    @property
    def opening(self) -> Collection[int]:
        """The ranks that `connect` will connect to."""
        return self._opening.keys()

    def listen(self) -> list[tuple[str, int]]:
        """Listens until `connect`, so that others can test the route; returns IP addresses and ports.

        Gloo's own ports cannot be tested: it keeps every connection that it accepts.
        """
        self._stop_listening()
        for connection in next(iter(self._opening.values()), ()):
            address = address_in(connection.address())
            if address is not None and (listener := listener_at(address)) is not None:
                self._listeners.append(listener)
        return [listener.getsockname()[:2] for listener in self._listeners]

    def _stop_listening(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def find(self, addresses: Mapping[int, str]) -> None:
        """Sets the addresses of the other ranks, which identify these connections.

        Args:
            addresses: Result of `open` on each rank, in the same order on all of them.
        """
        for rank, connections in self._opening.items():
            peers = _unpacked(addresses[rank])[str(self._rank)]
            for connection, peer in zip(connections, peers, strict=True):
                connection.peer = base64.b64decode(peer)
        self.token = self.token or xxhash.xxh3_64_hexdigest(repr(addresses).encode())

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Connects to the ranks that `open` was called with.

        Args:
            give_up: Polled; True ends the wait.

        Raises:
            Interrupted: Some rank did not come, or `give_up` returned True.
        """
        self._stop_listening()
        for connections in self._opening.values():
            for connection in connections:
                connection.begin()
        for rank, connections in self._opening.items():
            try:
                groups = [connection.group(give_up) for connection in connections]
            except (RuntimeError, DeadlineExceeded) as error:
                where = ", ".join(filter(None, (address_in(connection.peer) for connection in connections)))
                raise Interrupted(f"no connection to a rank at {where}: {error}") from error
            self._groups[rank] = groups
        self._opening = {}

    def send(self, data: Tensor, rank: int, tag: int) -> Any:
        """Begins to send; returns a handle to wait for."""
        return self._group(rank, tag).send([data], int(rank > self._rank), tag)

    def receive(self, into: Tensor, rank: int, tag: int) -> Any:
        """Begins to receive; returns a handle to wait for."""
        return self._group(rank, tag).recv([into], int(rank > self._rank), tag)

    def cut(self) -> None:
        """Ends all waits, here with an error and at the other ends as a lost connection.

        Gloo has no call for that, but it closes all connections of a group when one wait times out.
        """
        for rank, groups in self._groups.items():
            for tag in range(_NEVER_SENT - len(groups), _NEVER_SENT):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                with contextlib.suppress(RuntimeError):
                    self.receive(nothing, rank, tag).wait(timedelta(milliseconds=1))

    def drop(self) -> None:
        """Closes the connections, in a thread: Gloo takes tens of milliseconds to close a group."""
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
        """Leaks the groups in a forked child, which lacks the Gloo threads that closing them needs."""
        self._stop_listening()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _group(self, rank: int, tag: int) -> Any:
        groups = self._groups[rank]
        return groups[tag % len(groups)]


def _packed(addresses: Mapping[str, Sequence[str]]) -> str:
    """Packs addresses, most of whose bytes are the same: every rank of a job gets them. Empty without any."""
    if not addresses:
        return ""
    return base64.b64encode(zlib.compress(json.dumps(addresses).encode())).decode()


def _unpacked(packed: str) -> dict[str, list[str]]:
    addresses: dict[str, list[str]] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return addresses


class _Connection:
    """A connection that a thread is making: Gloo publishes its own address, then asks for the peer's.

    Args:
        device: The network device.
        end: Which of the two ends this is.
        timeout: Longest wait for the peer.

    Attributes:
        peer: The peer's address, as Gloo publishes it.
    """

    def __init__(self, device: Any, end: int, timeout: timedelta) -> None:
        self.peer = b""
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

        Task(make, "fastload-connect").start()

    def address(self) -> bytes:
        """Returns the address of this end, as Gloo publishes it."""
        return self._addresses.here.result(self._timeout_s)

    def begin(self) -> None:
        """Begins to connect to the peer; from then on only the timeout ends the thread."""
        self._addresses.there.set_result(self.peer)

    def group(self, give_up: Callable[[], bool]) -> Any:
        """Returns the group of both ends, once they are connected; errors are those of `Links.connect`."""

        def late() -> Exception:
            return DeadlineExceeded(f"connecting did not end within {self._timeout_s:.1f} s")

        await_done(self._made, give_up=give_up, limit_s=self._timeout_s, late=late)
        return self._made.result()

    def give_up(self) -> None:
        """Ends the thread."""
        self._addresses.there.cancel()


class _Addresses(dist.Store):
    """The store of one connection, through which Gloo gets the addresses that the ranks exchange otherwise.

    Args:
        end: Which end this is.
    """

    def __init__(self, end: int) -> None:
        super().__init__()
        self._end = end
        self.here: Future[bytes] = Future()
        self.there: Future[bytes] = Future()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.here.set_result(bytes(value))

    def get(self, key: str) -> bytes:
        return self._address(key).result()

    def wait(self, keys: list[str], timeout: timedelta = timedelta.max) -> None:
        for key in keys:
            self._address(key).result(timeout.total_seconds())

    def _address(self, key: str) -> Future[bytes]:
        return self.here if key.endswith(f"/{self._end}") else self.there


def _devices() -> list[Any]:
    """Returns the network devices that torch would use."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [_eager(gloo.create_device, interface=name) for name in names.split(",")]
    return [_eager(gloo.create_default_device)]


def _eager(create: Callable[..., Any], **where: str) -> Any:
    """Makes a device whose groups connect as they are made, whatever ``TORCH_GLOO_LAZY_INIT`` says."""
    try:
        return create(**where, lazy_init=False)
    except TypeError:  # an older torch, whose groups always do
        return create(**where)


T = TypeVar("T")

_REACHING_S = 5.0  # within which a route is either open or blocked


class Offering(Protocol):
    """Connections that ranks make after they have exchanged their addresses."""

    def offer(self) -> Any:
        """Returns the address of this rank, a JSON object; None if it connects to no other rank.

        Its ``token`` identifies the connections to other hosts that this rank has cached; empty without any.
        Its ``host``, if present, has the first rank of this host as ``leader``, and the ``token`` of the
        cached connections between the ranks of the host.
        """

    def renew(self) -> None:
        """Drops the cached connections, since other ranks no longer have theirs."""

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        """Takes the offers of all ranks of the world, whose tokens are equal.

        Returns:
            The addresses that this rank will connect to.
        """


def offer_of(connections: Offering | None) -> Any:
    """Returns what a rank offers in a step of all ranks, also one that makes no connections."""
    return connections.offer() if connections is not None else None


def accept_offers(world: World, what: str, connections: Offering | None, offers: Sequence[Any]) -> None:
    """Passes the offers of all ranks on; if their tokens differ, all ranks drop their caches and offer again.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        connections: Those of this rank; None if it takes no part.
        offers: By rank; see `Offering.offer`.

    Raises:
        PeerError: A rank did not respond, or cannot reach another one.
    """
    if not _have_same_tokens([offer for offer in offers if offer is not None]):
        if connections is not None:
            connections.renew()
        with world.step(what) as step:
            step.answer(offer_of(connections))
        offers = step.answers
    peers = connections.accept(offers) if connections is not None else ()
    if any(offer and offer.get("at") for offer in offers) and len(set(world.nodes.values())) > 1:
        limit_s = min(_REACHING_S, world.patience_s / 2)
        with world.step(f"{what}: connecting"):
            require_reachable(world.rank, peers, limit_s=limit_s)


def _have_same_tokens(offers: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks have the same connections cached, and those of each host the same shared memory."""
    hosts = [offer["host"] for offer in offers if offer.get("host") is not None]
    links = {(host["leader"], host["token"]) for host in hosts}
    leaders = {leader for leader, _ in links}
    return len({offer["token"] for offer in offers}) <= 1 and len(links) == len(leaders)


class Wire:
    """The connections between some ranks during one load; cached afterwards for the next load of these ranks.

    Args:
        world: The ranks.
        members: The ranks that take part, this one included.
        partners: Members that this rank sends to or receives from.
    """

    def __init__(self, world: World, members: Collection[int], partners: Collection[int]) -> None:
        self._world = world
        self._members = sorted(members)
        self._partners = partners
        self._name = f"gloo {self._members}"
        self._closed = False
        self._failure = ""
        self._num_clears = world.cache.num_clears
        self._links: Links = world.cache.take(self._name) or self._open()

    def offer(self) -> dict[str, Any]:
        """Returns the addresses of this rank; see `Offering`."""
        at = self._links.open(self._partners)
        return {"token": self._links.token, "at": at, "listens": self._links.listen()}

    def renew(self) -> None:
        """Drops the cached connections; see `Offering`."""
        self._links.drop()
        self._links = self._open()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        """Takes the addresses of the other ranks; see `Offering`."""
        self._links.find({rank: offers[rank]["at"] for rank in self._members})
        hosts = self._world.hosts
        return [
            Peer(rank, hosts[rank], *where)
            for rank in self._links.opening
            for where in offers[rank]["listens"]
        ]

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Connects to the partners; arguments and errors are those of `Links.connect`."""
        self._links.connect(give_up=give_up)

    def along(self, name: str) -> dict[Any, Any]:
        """Returns a dictionary that is cached with the connections; empty the first time."""
        return self._links.companions.setdefault(name, {})

    def send(self, data: Tensor, rank: int, tag: int) -> Any:
        """Begins to send; returns a handle to wait for.

        Raises:
            RuntimeError: The connection broke, or an earlier message was not sent.
        """
        return self._begin(self._links.send, data, rank, tag)

    def receive(self, into: Tensor, rank: int, tag: int) -> Any:
        """Begins to receive; returns a handle to wait for. Errors are those of `send`."""
        return self._begin(self._links.receive, into, rank, tag)

    def fail(self, why: str) -> None:
        """Refuses all later messages: after a missing one, the receiver would take the next one for it.

        Gloo ends the receiver's process if that message is longer than its buffer.
        """
        self._failure = self._failure or why

    def _begin(self, begin: Callable[[Tensor, int, int], Any], data: Tensor, rank: int, tag: int) -> Any:
        if self._failure:
            raise RuntimeError(self._failure)
        try:
            return begin(data, rank, tag)
        except RuntimeError as error:
            self.fail(str(error))
            raise

    def cut(self) -> None:
        """Ends all waits; see `Links.cut`."""
        self._links.cut()

    def close(self, *, keep: bool) -> None:
        """Caches the connections for the next load, or drops them.

        Args:
            keep: Whether all messages were received, at both ends.
        """
        if self._closed:
            return
        self._closed = True
        if keep and self._links.token:
            self._world.cache.put(self._name, self._links, self._num_clears)
        else:
            self._links.drop()

    def _open(self) -> Links:
        return Links(self._world.rank, timedelta(seconds=self._world.patience_s))
