"""Connections over Gloo that outlive a load: each rank's to those that it talks to, and to nobody else."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from fastload.base.threads import await_done, background
from fastload.comm.hosts import address_in, listener_at
from fastload.errors import DeadlineExceeded, Interrupted, WorldError

__all__ = ["Links"]

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
