"""What other ranks contribute to the pieces of this one, received ahead of when it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Event

from torch import Tensor

from fastload.base.memory import PAGE_BYTES, allocate_staging, round_up
from fastload.saving.exchange import PacketExchange
from fastload.saving.packets import Packet, Packets

__all__ = ["Buffers", "Incoming"]


class Incoming:
    """What others contribute to the pieces of this rank, which are put together in order.

    Args:
        packets: What the pieces consist of.
        exchange: Brings it, once it is open.
        memory: Makes the buffers for it, given the lengths of what comes for each batch; see `Buffers`.
        num_batches: How many of them there are.
    """

    def __init__(
        self,
        packets: Packets,
        exchange: PacketExchange[Packet],
        memory: Callable[[Sequence[int]], Buffers],
        *,
        num_batches: int,
    ) -> None:
        self._exchange = exchange
        self._ends = [batch.stop for batch in packets.batches]
        self._packets = [packets.travelling(number) for number in range(len(self._ends))]
        lengths = [sum(packet.nbytes for packet in of_batch) for of_batch in self._packets]
        self._memory = memory(lengths)
        self._num_batches = num_batches
        self._posted: deque[tuple[dict[int, Tensor], Event]] = deque()
        self._number = -1
        self._left: dict[int, Tensor] = {}
        self._came = Event()

    def reach(self, piece: int) -> None:
        """Makes ready to receive what is for a piece, and for later ones; what earlier ones got may go.

        Raises:
            Interrupted: A connection broke.
        """
        while self._number < 0 or self._ends[self._number] <= piece:
            self._number += 1
            last = min(self._number + self._num_batches, len(self._ends))
            for number in range(self._number + len(self._posted), last):
                self._post(number)
            self._left, self._came = self._posted.popleft()

    def take(self, packet: Packet) -> Tensor:
        """Waits for what a rank contributes to the piece that was reached; its packets are taken in order.

        Raises:
            Interrupted: Another rank failed, or a connection, or it did not come in time.
        """
        if not self._came.is_set():
            self._exchange.wait(self._came, f"piece {packet.number} of this rank")
        data = self._left[packet.supplier]
        self._left[packet.supplier] = data[packet.nbytes :]
        return data[: packet.nbytes]

    def free(self) -> None:
        """Lets go of the memory."""
        self._posted.clear()
        self._left.clear()
        self._memory = Buffers(0, (), pinned=False)

    def _post(self, number: int) -> None:
        packets, memory, position = self._packets[number], self._memory, 0
        parts: list[tuple[Packet, Tensor]] = []
        for packet in packets:
            parts.append((packet, memory.get(number)[position : position + packet.nbytes]))
            position += packet.nbytes
        came = self._exchange.expect(parts)
        self._posted.append(({packet.supplier: data for packet, data in parts}, came))


class Buffers:
    """Some buffers of the same length, used in turn; they take no memory before.

    Args:
        count: How many.
        lengths: Of what goes into them, one at a time, in bytes; the longest one fits.
        pinned: Page-locks them, for copies from an accelerator.

    Attributes:
        kind: The same for those that may take each other's place.
    """

    def __init__(self, count: int, lengths: Sequence[int], *, pinned: bool) -> None:
        largest = round_up(max(lengths, default=0), PAGE_BYTES)
        self.kind = min(count, len(lengths)), largest, pinned
        self._buffers: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Length of those that were used, in bytes."""
        return len(self._buffers) * self.kind[1]

    def get(self, index: int) -> Tensor:
        """Returns the buffer whose turn it is, which whatever used it before has to have left."""
        count, largest, pinned = self.kind
        turn = index % count
        if turn not in self._buffers:
            self._buffers[turn] = allocate_staging(largest, pinned=pinned)
        return self._buffers[turn]
