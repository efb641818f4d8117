"""Plans as the pipeline, the buffers and the transports see them: rounds, readers, messages and memory.

`TransferPlan` is one in which all ranks request the same bytes, `RoutedPlan` one in which they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from fastload.geometry.ranges import ByteRange
from fastload.transfer.messages import Grid, Message, Ranks
from fastload.transfer.plan import Chunk


class View(Protocol):
    """A plan as one rank sees it."""

    wanted_bytes: int
    """Bytes that the rank receives or reads for itself."""

    def readers(self, index: int) -> Collection[int]:
        """Returns the ranks that may read in a round."""

    def reads(self, index: int) -> list[ByteRange]:
        """Returns the byte ranges of files that the rank reads in a round, in order."""

    def outgoing(self, index: int) -> list[Message]:
        """Returns the messages of the rank's chunk of a round."""

    def incoming(self, index: int) -> list[Message]:
        """Returns the messages to the rank of other ranks' chunks of a round."""


class Plan(Protocol):
    """Which rank reads which bytes in which round, and which ranks receive them."""

    # Who reads, and who receives

    @property
    def readers(self) -> Ranks:
        """The ranks that read, ascending."""

    @property
    def order(self) -> Sequence[int]:
        """The ranks that take part, those of a host next to each other."""

    @property
    def exchanges(self) -> bool:
        """Whether any rank receives bytes that another one reads."""

    @property
    def recipient_sets(self) -> Collection[Ranks]:
        """The sets of ranks that receive the same messages."""

    @property
    def grid(self) -> Grid | None:
        """The grid along which devices pass on each chunk as it is; None if chunks are cut into messages."""

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks learn of an unreadable chunk in the same round."""

    @property
    def reads_in_parts(self) -> bool:
        """Whether bytes of a tensor may be read without its first one."""

    def pairs(self, rank: int) -> Iterator[tuple[int, Ranks]]:
        """Yields (reader, recipients) of all messages that a rank may send or receive."""

    # Rounds

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""

    @property
    def num_windows(self) -> int:
        """Windows of readers, and rounds in a cycle."""

    @property
    def total_bytes(self) -> int:
        """Bytes to read, by all readers together."""

    @property
    def most_bytes(self) -> int:
        """The most bytes that one reader reads; of plans with many chunks an upper bound."""

    def chunk(self, round_index: int, rank: int, /) -> Chunk:
        """Returns the bytes that a rank reads in a round."""

    def rounds_of(self, rank: int, begin: int, end: int) -> range:
        """Returns the rounds from `begin` up to `end` in which a rank may have a chunk."""

    def view(self, rank: int) -> View:
        """Returns the plan as one rank sees it."""

    def without(
        self, broken: Collection[int], lacking: Sequence[tuple[int, int]], num_posted: int
    ) -> Plan | None:
        """Returns the plan for the remaining bytes when readers drop out.

        Args:
            broken: The readers that drop out.
            lacking: (round, rank) of chunks that are missing in rounds that are over.
            num_posted: Number of rounds that are over; later ones have not begun and are dealt again.

        Returns:
            A plan that needs no larger buffers than this one, or None if no reader is left.
        """

    def digest(self, *, alone: bool = False) -> str:
        """xxh3-128 of the plan, for comparison between ranks.

        Args:
            alone: Whether each rank has planned for itself.
        """

    # Memory

    @property
    def chunk_bytes(self) -> int:
        """Length of a chunk in most rounds, before its bounds are moved to those of blocks."""

    @property
    def depth(self) -> int:
        """Rounds that may be in flight at once."""

    @property
    def depth_on_device(self) -> int:
        """The same with buffers on a device and chunks in host memory; 0 if they do not fit into staging."""

    @property
    def ahead(self) -> int:
        """Rounds whose chunks may be read, counted from the first in flight; 0 without a limit."""

    @property
    def num_reads(self) -> int:
        """Chunks that a reader has to have in flight, while as many others are exchanged."""

    @property
    def num_own(self) -> int:
        """Chunks of a reader for which there is memory, those of rounds in flight included."""

    @property
    def own_bytes(self) -> int:
        """Bytes to count for host memory of what a rank reads in a round."""

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that a rank needs for a round; ranks that share memory have them once."""

    def slots(self, index: int) -> Mapping[int, int] | None:
        """Returns the bytes of a buffer that each reader's chunk takes; None if chunks have no slots."""

    def shared_part(self, num_buffers: int, own_bytes: int) -> int | None:
        """Returns the bytes of one rank's part of memory that the ranks of a host share.

        Args:
            num_buffers: Number of buffers.
            own_bytes: Bytes for what each reader reads beside the buffers.

        Returns:
            The bytes; None if each rank has memory of its own.
        """
