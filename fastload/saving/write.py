"""Parts → pending files: hashed, written, durable, with a receipt for the leader."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import xxhash

from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers
from fastload.comm.world import World
from fastload.errors import OptionError, StorageError
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import Block
from fastload.saving.call import Call
from fastload.saving.exchange import Assembly
from fastload.saving.layout import FileRange, blocks_of
from fastload.saving.plan import Part
from fastload.saving.snapshot import ReusedSlabs, Slabs, Snapshot
from fastload.saving.split import Share, Team
from fastload.storage import Target
from fastload.transfer.wire import Wire, accept_offers

__all__ = [
    "BlockHasher",
    "Checksums",
    "Pending",
    "Receipt",
    "Writing",
    "Written",
    "collect",
    "hand_in",
    "open_pending",
    "write",
]

Checksums = dict[int, list[tuple[int, bytes]]]
"""File → (number of the first block, checksums of it and those that follow it, 8 bytes each)."""


class BlockHasher:
    """Hashes blocks whose bytes come in pieces, in order.

    Args:
        blocks: The blocks, in order.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks: Iterator[Block] = iter(blocks)
        self._block = next(self._blocks, None)
        self._begun = xxhash.xxh3_64()
        self._num_begun_bytes = 0
        self._found: dict[int, list[tuple[int, bytearray]]] = {}

    def feed(self, piece: FileRange, data: memoryview) -> None:
        """Takes the next piece; bytes of blocks that belong to other ranks are skipped."""
        while (block := self._block) is not None and block.file == piece.file and block.offset < piece.end:
            begin = block.offset + self._num_begun_bytes - piece.begin
            end = block.offset + block.nbytes - piece.begin
            if end > len(data):
                self._begun.update(data[begin:])
                self._num_begun_bytes += len(data) - begin
                return
            if self._num_begun_bytes:
                self._begun.update(data[begin:end])
                self._add(block, self._begun.digest())
                self._begun.reset()
                self._num_begun_bytes = 0
            else:
                self._add(block, checksum(data[begin:end]))
            self._block = next(self._blocks, None)

    def checksums(self) -> Checksums:
        """Returns the checksums, once everything has been fed."""
        assert self._block is None
        return {
            file: [(first, bytes(sums)) for first, sums in stretches]
            for file, stretches in self._found.items()
        }

    def _add(self, block: Block, digest: bytes) -> None:
        stretches = self._found.setdefault(block.file, [])
        if stretches and stretches[-1][0] + len(stretches[-1][1]) // CHECKSUM_BYTES == block.number:
            stretches[-1][1].extend(digest)
        else:
            stretches.append((block.number, bytearray(digest)))


_PLACE = "checksums"  # where in the store
_SHORT_BYTES = 64 << 10  # of all receipts, which go to all ranks


@dataclass(frozen=True)
class Receipt:
    """What a rank has written, for its leader.

    Attributes:
        written: The receipt of its target.
        checksums: File → [number of the first block, checksums of it and those that follow it].
    """

    written: Mapping[str, Any]
    checksums: Checksums

    def to_bytes(self) -> bytes:
        """Packs it."""
        sums = {
            file: [[first, digests.hex()] for first, digests in stretches]
            for file, stretches in self.checksums.items()
        }
        return json.dumps([self.written, sums]).encode()

    @classmethod
    def from_bytes(cls, packed: bytes | str) -> Receipt:
        """Unpacks what `to_bytes` packed."""
        written, sums = json.loads(packed)
        return cls(
            written,
            {
                int(file): [(first, bytes.fromhex(digests)) for first, digests in stretches]
                for file, stretches in sums.items()
            },
        )


def hand_in(world: World, team: Team, receipt: Receipt, *, what: str) -> str | None:
    """Leaves a rank's receipt for its leader; to be called before it says that it has written.

    Args:
        world: The ranks.
        team: This rank's.
        receipt: What it has written.
        what: Name of the save, for messages.

    Returns:
        What this rank is to tell the others with that: the receipt, if it is short.
    """
    if world.rank == team.leader:
        return None
    packed = receipt.to_bytes()
    if len(packed) * world.size <= _SHORT_BYTES:
        return str(packed, "ascii")
    world.leave_bytes(f"{what}: leaving checksums", _PLACE, packed)
    return None


def collect(
    world: World, team: Team, own: Receipt, handed_in: Sequence[str | None], *, what: str
) -> list[Receipt]:
    """Returns the receipts of all members, on their leader.

    Args:
        world: The ranks; all members have handed in theirs.
        team: This rank's.
        own: The leader's.
        handed_in: What `hand_in` has returned on each rank.
        what: Name of the save, for messages.
    """
    receipts = [own]
    for rank in team.members[1:]:
        packed: str | bytes | None = handed_in[rank]
        if packed is None:
            packed = world.take_bytes(f"{what}: collecting checksums", _PLACE, rank)
        assert packed is not None
        receipts.append(Receipt.from_bytes(packed))
    return receipts


@dataclass(frozen=True)
class Pending:
    """What is prepared.

    Attributes:
        wire: What connects this rank to others, if any rank needs something from another one.
        join: To be called before this rank writes.
    """

    wire: Wire | None
    join: Callable[[], object]


def open_pending(call: Call, part: Part) -> Pending:
    """Has the leaders prepare the place, while the ranks tell each other where they are found.

    Each joins its leader once it writes; where each host has a copy of its own, before any rank does.

    Raises:
        OptionError: The hosts see one place although each was to have its own.
        PeerError: Some rank cannot write there, with its cause.
        CheckpointExists: There is a checkpoint already.
    """
    world, team, target = call.world, part.team, part.target
    leads = world.rank == team.leader
    files = [(file.name, file.nbytes) for file in part.described.layout.files]
    packets = part.packets
    wire = Wire(world, range(world.size), packets.partners) if packets is not None else None

    def prepare() -> dict[str, Any]:
        return {
            "ticket": target.prepare(files, overwrite=bool(call.options.overwrite)) if leads else None,
            "exchanges": packets is not None and bool(packets.leaving),
            "offer": wire.offer() if wire is not None else None,
        }

    what = f"preparing to save to {target.url}"
    try:
        ranks = world.agree(what, prepare)
        if any(each["exchanges"] for each in ranks):
            accept_offers(world, what, wire, [each["offer"] for each in ranks])
        elif wire is not None:
            wire.close(keep=True)
            wire = None
        tickets = [each["ticket"] for each in ranks]
        join = _nothing if leads else partial(_join, call, target, tickets[team.leader], team.leader)
        if team.num_copies > 1:
            others = [tickets[leader] for leader in team.leaders if leads and leader != team.leader]
            _join_all(call, target.url, join, others)
            join = _nothing
    except BaseException:
        if wire is not None:
            wire.close(keep=False)
        raise
    return Pending(wire, join)


def _nothing() -> None:
    pass


def _join_all(call: Call, url: str, join: Callable[[], object], others: Sequence[Any]) -> None:
    """Has every rank join its team before any of them writes, and look for what the others have prepared."""

    def meet() -> None:
        join()
        _look_for_others(call.open_target, others)

    call.world.agree(f"joining the save to {url}", meet)


def _join(call: Call, target: Target, ticket: Any, leader: int) -> None:
    try:
        target.join(ticket)
    except StorageError as error:
        why = (
            f"both are on {call.world.host}, but have no disk in common there; save to one that they share, "
            "or give containers host names of their own"
            if call.options.shared is False
            else "the hosts do not share this path; save to one that they share, or a copy on each host with "
            "shared=False"
        )
        raise StorageError(
            f"this rank does not see what rank {leader} prepared there ({error.args[0]}): {why}",
            url=target.url,
        ) from error


def _look_for_others(another: Callable[[], Target], tickets: Sequence[Any]) -> None:
    """Looks whether what another team has prepared can be seen from here."""
    for ticket in tickets:
        target = another()
        try:
            target.join(ticket)
        except StorageError:
            continue
        finally:
            target.close()
        raise OptionError(
            f"shared=False, but the hosts share {target.url}: each would replace the other's copy"
        )


T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """What one rank has done, once all of them have written.

    Attributes:
        receipt: What its leader is to know of it.
        handed_in: What each rank has told of its own; see `receipts.hand_in`.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds until what was written was durable.
        slab_bytes: Memory that the bytes went through.
    """

    receipt: Receipt
    handed_in: tuple[str | None, ...]
    write_s: float
    flush_s: float
    slab_bytes: int


def write(call: Call, part: Part, snapshot: Snapshot | None, pending: Pending) -> Written:
    """Writes this rank's share, and settles on all ranks whether all of them have.

    Args:
        call: This rank's call.
        part: Its part.
        snapshot: What it contributes; None takes it from the state. Its memory is left to the next snapshot.
        pending: What it writes to; its wire is closed in the end.

    Raises:
        FastloadError: Some rank has not written.
    """
    world, options, described = call.world, call.options, part.described
    writing = Writing(
        world,
        part.target,
        [file.name for file in described.layout.files],
        num_threads=options.write_threads,
        progress=options.progress,
    )
    call.tracing.follow({"write": writing.watch})
    wire = pending.wire
    found: list[Written] = []

    def work() -> str | None:
        pending.join()
        slabs = _slabs(call, part, snapshot, wire)
        if isinstance(slabs, Assembly):
            assemblies.append(slabs)
            slabs.open()
        hasher = BlockHasher(blocks_of(described.layout, part.share.ranges))
        receipt = Receipt(writing.write(part.share, slabs, hasher), hasher.checksums())
        if isinstance(slabs, Assembly):
            slabs.finish()
        to_tell = hand_in(world, part.team, receipt, what=call.what)
        described.own.show()
        nbytes = slabs.nbytes + (snapshot.nbytes if snapshot is not None and snapshot is not slabs else 0)
        found.append(Written(receipt, (), writing.watch.seconds, writing.flush_s, nbytes))
        return to_tell

    assemblies: list[Assembly] = []
    try:
        handed_in = world.settle(call.what, work)
    finally:
        for assembly in assemblies:
            assembly.close()
        if wire is not None and not assemblies:
            wire.close(keep=False)
        if writing.close() and snapshot is not None:
            snapshot.keep()
    return replace(found[0], handed_in=tuple(handed_in))


def _slabs(call: Call, part: Part, snapshot: Snapshot | None, wire: Wire | None) -> Slabs:
    described, share, num_writes = part.described, part.share, call.options.write_threads
    if part.shards is not None and part.packets is not None and part.depths is not None:
        given: dict[str, Any] = {"depths": part.depths, "wire": wire}
        layout = described.layout
        return Assembly(call.world, layout, share.pieces, part.packets, part.shards, snapshot, **given)
    if snapshot is not None:
        return snapshot
    return ReusedSlabs(described.source, share.pieces, num_slabs=num_writes + 1)


class Writing:
    """One rank's writing, watched by the others.

    Args:
        world: The ranks; a failure of another one ends this.
        target: Where to.
        names: Of the files.
        num_threads: Writes at once.
        progress: Called with (bytes written, bytes to write).

    Attributes:
        watch: Time with at least one write under way.
        flush_s: Seconds until what was written was durable.
    """

    def __init__(
        self,
        world: World,
        target: Target,
        names: Sequence[str],
        *,
        num_threads: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._world = world
        self._target = target
        self._names = names
        self._workers = Workers(1 if target.ordered else num_threads, "fastload-write")
        self._progress = progress
        self.watch = Stopwatch()
        self.flush_s = 0.0

    def write(self, share: Share, slabs: Slabs, hasher: BlockHasher) -> dict[str, Any]:
        """Writes all pieces and makes them durable.

        Args:
            share: What to write, and what to hash.
            slabs: The bytes of both.
            hasher: Fed with them on the way.

        Returns:
            The receipt for `Target.publish`.

        Raises:
            StorageError: Storage failed, or did not answer in time.
            Interrupted: Another rank failed.
        """
        done_bytes = 0
        under_way: deque[tuple[int, Future[None]]] = deque()

        def finish() -> None:
            nonlocal done_bytes
            piece = share.pieces[under_way[0][0]]
            self._await(piece, under_way.popleft()[1])
            done_bytes += piece.end - piece.begin
            if self._progress is not None:
                self._progress(done_bytes, share.nbytes)

        for index, piece in enumerate(share.pieces):
            if under_way and under_way[0][0] + slabs.depth == index:
                finish()
            data = slabs.piece(index)
            hasher.feed(piece, data)
            if index not in share.tails:
                under_way.append((index, self._workers.submit(partial(self._write, piece, data))))
            del data
        while under_way:
            finish()
        began = time.perf_counter()
        receipt = self._await(None, self._workers.submit(self._target.flush))
        self.flush_s = time.perf_counter() - began
        return receipt

    def close(self) -> bool:
        """Ends the threads; returns whether no write is under way any more."""
        return self._workers.close(wait_s=min(1.0, self._world.grace_s))

    def _write(self, piece: FileRange, data: memoryview) -> None:
        with self.watch.span(nbytes=len(data)):
            self._target.write(self._names[piece.file], piece.begin, data)

    def _await(self, piece: FileRange | None, work: Future[T]) -> T:
        """Waits for a write, or for all of it to be durable, no longer than the other ranks go on."""
        try:
            return self._world.await_work(work, partial(self._overdue, piece))
        finally:
            del work  # else error → traceback → frame → work → error would keep all their memory alive

    def _overdue(self, piece: FileRange | None) -> StorageError:
        text = f"storage did not answer within {self._world.patience_s:.1f} s"
        if piece is None:
            return StorageError(f"{text} that the data is durable", url=self._target.url)
        url = f"{self._target.url}/{self._names[piece.file]}"
        return StorageError(text, url=url, offset=piece.begin, nbytes=piece.end - piece.begin)
