"""Packets from the ranks that hold bytes to those that write them, over connections of the save's own."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fastload.base.errands import Errand
from fastload.base.threads import background
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.rounds import TICK_S, wait_for
from fastload.transfer.wire import Wire

__all__ = ["PacketExchange"]

_TAG = 0  # packets for a rank come in the order of its pieces at both ends
_FOR_EVER = timedelta(days=1)  # a packet waits for its writer, who may write for hours before


class Sendable(Protocol):
    """What goes from one rank to another: a packet, or a copy of what is written already."""

    @property
    def supplier(self) -> int:
        """The rank that it comes from."""
        ...

    @property
    def writer(self) -> int:
        """The rank that it goes to."""
        ...


ItemT = TypeVar("ItemT", bound=Sendable)


class PacketExchange(Generic[ItemT]):
    """Sends what others need as they come to need it, and receives what this rank needs.

    Both in threads of their own: a wait of Gloo's cannot look out for alarms. Packets leave in the order of
    the pieces that they are for, and every writer has receives open for its next pieces. So the packet for
    the first piece of all that is not complete is never behind one that waits.

    Args:
        world: The ranks.
        wire: To those that this rank has packets for, or gets some from; closed in the end.
        leaving: What others get from this rank, in order.
        pack: Returns the bytes of a packet, flat uint8, given which of `num_buffers` it may use.
        num_buffers: Packets under way at once.
    """

    def __init__(
        self,
        world: World,
        wire: Wire,
        leaving: Sequence[ItemT],
        pack: Callable[[ItemT, int], Tensor],
        *,
        num_buffers: int,
    ) -> None:
        self._world = world
        self._leaving = leaving
        self._pack = pack
        self._num_buffers = num_buffers
        self._wire = wire
        self._expected: queue.SimpleQueue[tuple[list[Any], threading.Event] | None] = queue.SimpleQueue()
        self._all_sent = threading.Event()
        self._error: Exception | None = None
        self._closed = False
        self._threads: list[Errand] = []

    def open(self) -> None:
        """Meets the other ranks, and begins to send.

        Raises:
            Interrupted: Some rank did not come.
        """
        self._wire.connect(give_up=self._world.alarmed)
        self._threads = [
            background(self._send_all, "fastload-send"),
            background(self._await_all, "fastload-receive"),
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, parts: Sequence[tuple[ItemT, Tensor]]) -> threading.Event:
        """Makes ready to receive packets; returns what is set once all of them are here."""
        came = threading.Event()
        try:
            receives = [self._wire.receive(into, packet.supplier, _TAG) for packet, into in parts]
        except RuntimeError as error:
            raise Interrupted(f"the exchange broke: {error}") from error
        self._expected.put((receives, came))
        return came

    def wait(self, event: threading.Event, what: str) -> None:
        """Waits for packets.

        Args:
            event: What `expect` returned.
            what: They are, for messages.

        Raises:
            Interrupted: Another rank failed, or the connection did, or they did not come in time.
        """
        pulse = None
        while True:
            try:
                self._wait(event, what, self._world.patience_s / 2)
                break
            except DeadlineExceeded as late:
                # Whoever is to send or to take them may write what it has by itself for as long as it likes.
                before, pulse = pulse, self._world.rendezvous.pulse(limit_s=self._world.grace_s)
                if pulse == before:
                    raise Interrupted(str(late)) from None
        self._world.moved()

    def _wait(self, event: threading.Event, what: str, limit_s: float) -> None:
        try:
            wait_for(event, what, limit_s, lambda: self._error is not None or self._world.alarmed())
        finally:
            self._check()

    def finish(self) -> None:
        """Waits until all has been sent; errors are those of `wait`."""
        self.wait(self._all_sent, "sending to the ranks that write")

    def close(self) -> None:
        """Ends the exchange; what is still under way is abandoned."""
        self._closed = True
        self._expected.put(None)
        whole = not self._is_alive(TICK_S)
        if not whole:
            self._wire.cut()
        if not self._is_alive(10 * TICK_S):
            self._wire.close(keep=whole and self._error is None and self._all_sent.is_set())

    def _is_alive(self, wait_s: float) -> bool:
        for thread in self._threads:
            thread.join(wait_s)
        return any(thread.is_alive() for thread in self._threads)

    def _check(self) -> None:
        error = self._error
        try:
            if isinstance(error, _Broken):
                raise Interrupted(f"the exchange broke: {error}")
            if error is not None:
                raise error.with_traceback(None)
        finally:
            del error  # else error → traceback → frame → error would keep all their memory alive

    def _send_all(self) -> None:
        under_way: deque[Any] = deque()
        try:
            for index, packet in enumerate(self._leaving):
                if len(under_way) == self._num_buffers:
                    _wait(under_way.popleft())
                if self._closed:
                    return
                data = self._pack(packet, index % self._num_buffers)
                under_way.append(_run(lambda: self._wire.send(data, packet.writer, _TAG)))  # noqa: B023
            while under_way:
                _wait(under_way.popleft())
        except Exception as error:
            self._broke(error)
        self._all_sent.set()

    def _await_all(self) -> None:
        while (expected := self._expected.get()) is not None:
            receives, came = expected
            try:
                for receive in receives:
                    _wait(receive)
            except Exception as error:
                self._broke(error)
                return
            came.set()

    def _broke(self, error: Exception) -> None:
        if self._error is None:
            self._error = error.with_traceback(None)


class _Broken(Exception):
    """A connection did not last."""


def _run(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise _Broken(str(error)) from None


def _wait(work: Any) -> None:
    _run(lambda: work.wait(_FOR_EVER))
