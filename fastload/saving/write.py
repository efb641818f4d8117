"""Writes of parts to pending files: leaders prepare the files, all writers hash, write and flush."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import xxhash

from fastload.base.threads import Workers
from fastload.base.trace import Stopwatch
from fastload.comm.world import World
from fastload.errors import OptionError, StorageError
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import Block
from fastload.saving.call import SaveCall
from fastload.saving.exchange import PartAssembler
from fastload.saving.layout import FileRange
from fastload.saving.per_rank import show_own
from fastload.saving.plan import SavePlan
from fastload.saving.snapshot import Snapshot
from fastload.saving.split import WriterGroup, WriterShare
from fastload.storage import Target
from fastload.transfer.links import Wire, accept_offers

T = TypeVar("T")

Checksums = list[tuple[int, str]]
"""Number of a block in the layout, and the checksums of it and of the following blocks, in hexadecimal."""

_PLACE = "checksums"  # key in the store
_SHORT_BYTES = 64 << 10  # of all receipts, if they go to all ranks


@dataclass(frozen=True)
class PendingFiles:
    """The files of a save before its commit.

    Attributes:
        wire: Connections to other ranks; None if no rank needs bytes from another one.
        join: Called before this rank writes.
    """

    wire: Wire | None
    join: Callable[[], object]


def open_pending(call: SaveCall, plan: SavePlan) -> PendingFiles:
    """Prepares the files on the leaders, while the ranks exchange their addresses.

    A rank joins its leader's files when it writes. If each host has its own copy, all ranks join before any
    of them writes.

    Raises:
        OptionError: The hosts share the path, although each was to have its own copy.
        PeerError: Some rank cannot write there; has its cause.
        CheckpointExists: There is a checkpoint already.
    """
    world, group, target = call.world, plan.group, plan.target
    leads = world.rank == group.leader
    files = [(file.name, file.nbytes) for file in plan.state.layout.files]
    wire = Wire(world, range(world.size), plan.messages.partners) if plan.depths.exchanges else None

    def prepare() -> dict[str, Any]:
        return {
            "ticket": target.prepare(files, overwrite=bool(call.options.overwrite)) if leads else None,
            "exchanges": bool(plan.messages.outgoing),
            "offer": wire.offer() if wire is not None else None,
        }

    what = f"preparing to save to {target.url}"
    try:
        ranks = world.agree(what, prepare)
        wire = _accept(world, what, wire, ranks)
        tickets = [each["ticket"] for each in ranks]
        join = _nothing if leads else partial(_join, call, target, tickets[group.leader], group.leader)
        if group.num_copies > 1:
            others = [tickets[leader] for leader in group.leaders if leads and leader != group.leader]
            _join_all(call, target.url, join, others)
            join = _nothing
    except BaseException:
        if wire is not None:
            wire.close(keep=False)
        raise
    return PendingFiles(wire, join)


def connect(call: SaveCall, plan: SavePlan) -> Wire | None:
    """Prepares connections to other ranks, without files; None if no rank needs bytes from another one."""
    world, what = call.world, f"{call.what}: connecting the ranks"
    if not plan.depths.exchanges:
        return None
    wire = Wire(world, range(world.size), plan.messages.partners)
    try:
        ranks = world.agree(what, lambda: {"exchanges": bool(plan.messages.outgoing), "offer": wire.offer()})
        return _accept(world, what, wire, ranks)
    except BaseException:
        wire.close(keep=False)
        raise


def _accept(world: World, what: str, wire: Wire | None, ranks: Sequence[Mapping[str, Any]]) -> Wire | None:
    """Accepts the addresses of the others; closes the connections if no rank needs bytes from another one."""
    if any(each["exchanges"] for each in ranks):
        accept_offers(world, what, wire, [each["offer"] for each in ranks])
    elif wire is not None:
        wire.close(keep=True)
        wire = None
    return wire


def _nothing() -> None:
    pass


def _join_all(call: SaveCall, url: str, join: Callable[[], object], others: Sequence[Any]) -> None:
    """Joins the leader on all ranks before any of them writes; checks that groups do not share files."""

    def meet() -> None:
        join()
        _look_for_others(call.open_target, others)

    call.world.agree(f"joining the save to {url}", meet)


def _join(call: SaveCall, target: Target, ticket: Any, leader: int) -> None:
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
    """Checks that this rank does not see the files of other groups."""
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


@dataclass(frozen=True)
class WriteResult:
    """What one rank has written.

    Attributes:
        receipt: Its receipt.
        receipts: Receipts of all ranks, as text; None for those in the store. See `_hand_in`.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds of the flush.
        staging_bytes: Bytes of its buffers.
    """

    receipt: WriteReceipt
    receipts: tuple[str | None, ...]
    write_s: float
    flush_s: float
    staging_bytes: int


def write(call: SaveCall, plan: SavePlan, snapshot: Snapshot | None, pending: PendingFiles) -> WriteResult:
    """Writes this rank's share; returns once all ranks have written.

    Args:
        call: This rank's call.
        plan: Its plan.
        snapshot: The bytes that it contributes; None reads them from the state. Its memory is released.
        pending: The files. Their connections are closed in the end.

    Raises:
        FastloadError: Some rank failed.
    """
    world, options, layout = call.world, call.options, plan.state.layout
    writer = PartWriter(
        world,
        plan.target,
        [file.name for file in layout.files],
        num_threads=options.write_threads,
        progress=options.progress,
    )
    call.tracing.follow({"write": writer.watch})
    assembler = PartAssembler(world, plan, snapshot, pending.wire)
    found: list[WriteResult] = []

    def work() -> str | None:
        pending.join()
        if snapshot is not None:
            snapshot.await_copies()
        assembler.open()
        hasher = BlockHasher(layout.blocks_of(plan.share.ranges))
        written = writer.write(plan.share, assembler, hasher)
        receipt = WriteReceipt(written, hasher.checksums())
        assembler.finish()
        if snapshot is not None:
            snapshot.require_unchanged()
        packed = _hand_in(world, plan.group, receipt, what=call.what)
        show_own(world, call.what, plan.state.own)
        nbytes = assembler.nbytes + (snapshot.nbytes if snapshot is not None else 0)
        found.append(WriteResult(receipt, (), writer.watch.seconds, writer.flush_s, nbytes))
        return packed

    try:
        receipts = world.settle(call.what, work)
    finally:
        assembler.close()
        if writer.close() and snapshot is not None:
            snapshot.release()
    return replace(found[0], receipts=tuple(receipts))


class PartSource(Protocol):
    """The bytes of parts, requested in order.

    Attributes:
        depth: Number of parts that are valid at once: part i until part i + depth is requested.
    """

    @property
    def depth(self) -> int:
        """See above."""
        ...

    def part(self, index: int) -> memoryview:
        """Returns the bytes of a part."""
        ...


class PartWriter:
    """Writes parts of files in several threads, until another rank fails.

    Args:
        world: The ranks.
        target: Write access to the checkpoint.
        names: Names of the files.
        num_threads: Most writes at once.
        progress: Called with (bytes written, bytes to write).

    Attributes:
        watch: Time with at least one write under way.
        flush_s: Seconds of the flush.
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

    def write(self, share: WriterShare, source: PartSource, hasher: BlockHasher) -> dict[str, Any]:
        """Writes all parts, and flushes them.

        Args:
            share: The parts to write and to hash.
            source: Their bytes.
            hasher: Hashes them.

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
            part = share.parts[under_way[0][0]]
            self._await(part, under_way.popleft()[1])
            done_bytes += part.nbytes
            if self._progress is not None:
                self._progress(done_bytes, share.nbytes)

        for index, part in enumerate(share.parts):
            if under_way and under_way[0][0] + source.depth == index:
                finish()
            data = source.part(index)
            hasher.feed(part, data)
            if index not in share.tails:
                under_way.append((index, self._workers.submit(partial(self._write, part, data))))
            del data
        while under_way:
            finish()
        began = time.perf_counter()
        receipt = self._await(None, self._workers.submit(self._target.flush))
        self.flush_s = time.perf_counter() - began
        return receipt

    def close(self) -> bool:
        """Ends the threads; returns whether all writes have ended."""
        return self._workers.close(wait_s=min(1.0, self._world.grace_s))

    def _write(self, part: FileRange, data: memoryview) -> None:
        with self.watch.span(nbytes=len(data)):
            self._target.write(self._names[part.file], part.begin, data)

    def _await(self, part: FileRange | None, work: Future[T]) -> T:
        """Waits for the write of a part, or for the flush (None), unless another rank fails."""
        try:
            return self._world.await_work(work, partial(self._overdue, part))
        finally:
            del work  # else error → traceback → frame → work → error would keep all their memory alive

    def _overdue(self, part: FileRange | None) -> StorageError:
        text = f"storage did not answer within {self._world.patience_s:.1f} s"
        if part is None:
            return StorageError(f"{text} to the flush", url=self._target.url)
        url = f"{self._target.url}/{self._names[part.file]}"
        return StorageError(text, url=url, offset=part.begin, nbytes=part.nbytes)


class BlockHasher:
    """Hashes blocks whose bytes come in parts.

    Args:
        blocks: The blocks, in the order of the parts.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks: Iterator[Block] = iter(blocks)
        self._block = next(self._blocks, None)
        self._begun = xxhash.xxh3_64()
        self._num_begun_bytes = 0
        self._found: list[tuple[int, bytearray]] = []

    def feed(self, part: FileRange, data: memoryview) -> None:
        """Hashes the next part, without the blocks of other writers."""
        while (block := self._block) is not None and block.file == part.file and block.offset < part.end:
            begin = block.offset + self._num_begun_bytes - part.begin
            end = block.offset + block.nbytes - part.begin
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
        """Returns the checksums, after the last part."""
        assert self._block is None
        return [(first, sums.hex()) for first, sums in self._found]

    def _add(self, block: Block, digest: bytes) -> None:
        if self._found:
            first, sums = self._found[-1]
            if first + len(sums) // CHECKSUM_BYTES == block.number:
                sums.extend(digest)
                return
        self._found.append((block.number, bytearray(digest)))


@dataclass(frozen=True)
class WriteReceipt:
    """What a rank tells its leader.

    Attributes:
        written: The receipt of its target.
        checksums: Checksums of the blocks that it has hashed.
    """

    written: Mapping[str, Any]
    checksums: Checksums

    def to_text(self) -> str:
        """Returns JSON."""
        return json.dumps([self.written, self.checksums])

    @classmethod
    def parse(cls, packed: bytes | str) -> WriteReceipt:
        """Parses the result of `to_text`."""
        written, checksums = json.loads(packed)
        return cls(written, [(first, sums) for first, sums in checksums])


def _hand_in(world: World, group: WriterGroup, receipt: WriteReceipt, *, what: str) -> str | None:
    """Returns the receipt for all ranks if it is short; else puts it into the store for the leader."""
    if world.rank == group.leader:
        return None
    packed = receipt.to_text()
    if len(packed) * world.size <= _SHORT_BYTES:
        return packed
    world.leave_bytes(f"{what}: leaving checksums", _PLACE, packed.encode())
    return None


def collect_receipts(
    world: World, group: WriterGroup, result: WriteResult, *, what: str
) -> list[WriteReceipt]:
    """Returns the receipts of all members, on their leader.

    Args:
        world: The ranks.
        group: The leader's group.
        result: The leader's result.
        what: Name of the save, for messages.
    """
    receipts = [result.receipt]
    for rank in group.members[1:]:
        packed: str | bytes | None = result.receipts[rank]
        if packed is None:
            packed = world.take_bytes(f"{what}: collecting checksums", _PLACE, rank)
        assert packed is not None
        receipts.append(WriteReceipt.parse(packed))
    return receipts
