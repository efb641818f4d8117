"""Writes and commit: leaders prepare the files, all writers hash, write and flush, and leaders publish.

The commit is one step that makes a checkpoint exist, once all its bytes are durable.
"""

from __future__ import annotations

import base64
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import xxhash

from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import Workers
from fastload.comm.responses import join_parts, split_parts
from fastload.comm.world import World
from fastload.errors import OptionError, StorageError
from fastload.formats.manifest import Delta
from fastload.formats.names import INDEX_NAME, RECORD_NAME
from fastload.formats.record import CHECKSUM_BYTES, Record, RecordedFile, checksum
from fastload.geometry.blocks import Block
from fastload.geometry.ranges import ByteRange
from fastload.saving.agree import SaveAgreement, finish_comparison
from fastload.saving.call import SaveCall
from fastload.saving.exchange import PartAssembler, connect, connecting
from fastload.saving.layout import Layout, LayoutFile
from fastload.saving.per_rank import PerRankFiles, collect_own, show_own
from fastload.saving.plan import SavePlan
from fastload.saving.snapshot import Snapshot
from fastload.saving.split import WriterGroup, WriterShare
from fastload.storage import Target
from fastload.transfer.links import Wire

Checksums = Sequence[tuple[int, bytes]]
"""Number of a block in the layout, and the checksums of it and of the following blocks, joined."""

_PLACE = "checksums"  # key in the store
_SHORT_BYTES = 64 << 10  # of all receipts, if they go to all ranks


def _prepare(call: SaveCall, plan: SavePlan) -> tuple[Wire | None, Sequence[Any]]:
    """Prepares the files on the leaders, while the ranks exchange their addresses.

    Returns:
        Connections to other ranks, None if no rank needs bytes from another one; and the tickets of all ranks
        to join the files, of ranks that are no leaders None.

    Raises:
        PeerError: Some leader cannot write there; has its cause.
        CheckpointExists: There is a checkpoint already.
    """
    world, what = call.world, f"preparing to save to {plan.target.url}"
    if not plan.depths.exchanges:
        with world.step(what) as step:
            step.answer(_prepare_files(call, plan))
        return None, step.answers
    with connecting(world, plan.messages.partners) as wire:
        with world.step(what) as step:
            ticket, sends = _prepare_files(call, plan), bool(plan.messages.outgoing)
            step.answer({"ticket": ticket, "sends": sends, "offer": wire.offer()})
        return connect(world, what, wire, step.answers), [answer["ticket"] for answer in step.answers]


def _prepare_files(call: SaveCall, plan: SavePlan) -> Any:
    """Prepares the files if this rank is a leader; returns the ticket to join them."""
    if call.world.rank != plan.group.leader:
        return None
    files = [(file.name, file.nbytes) for file in plan.state.layout.files]
    return plan.target.prepare(files, overwrite=bool(call.options.overwrite))


def _join(call: SaveCall, plan: SavePlan, tickets: Sequence[Any]) -> None:
    """Joins the leader's files; the leader checks that it does not see those of other groups.

    Raises:
        StorageError: This rank does not see the leader's files.
        OptionError: The hosts share the path, although each was to have its own copy.
    """
    target, leader = plan.target, plan.group.leader
    if call.world.rank == leader:
        _require_own_path(call, tickets, set(plan.leaders) - {leader})
        return
    try:
        target.join(tickets[leader])
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


def _require_own_path(call: SaveCall, tickets: Sequence[Any], others: Collection[int]) -> None:
    for leader in others:
        target = call.open_target()
        try:
            target.join(tickets[leader])
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
        receipts: Receipts of all ranks, packed; None for those in the store. See `_hand_in`.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds of the flush.
        staging_bytes: Bytes of its buffers.
    """

    receipt: WriteReceipt
    receipts: tuple[str | None, ...]
    write_s: float
    flush_s: float
    staging_bytes: int


def write(call: SaveCall, plan: SavePlan, snapshot: Snapshot | None) -> WriteResult:
    """Writes this rank's share; returns once all ranks have written, and devices have compared replicas.

    A rank joins its leader's files when it writes. If each host has its own copy, all ranks join before any
    of them writes.

    Args:
        call: This rank's call.
        plan: Its plan.
        snapshot: The bytes that it contributes; None reads them from the state. Its memory is released.

    Raises:
        OptionError: The hosts share the path, although each was to have its own copy.
        CheckpointExists: There is a checkpoint already.
        ReplicaMismatch: Tensors on accelerators differ that may be no replicas.
        FastloadError: Some rank failed.
    """
    world, options, layout = call.world, call.options, plan.state.layout
    wire, tickets = _prepare(call, plan)
    writer = PartWriter(
        world,
        plan.target,
        [file.name for file in layout.files],
        num_threads=plan.num_writes,
        progress=options.progress,
    )
    call.observers.follow({"write": writer.watch})
    assembler = PartAssembler(world, plan, snapshot, wire)
    comparison, has_copies = plan.state.on_devices, len(plan.leaders) > 1
    try:
        if has_copies:
            with world.step(f"joining the save to {plan.target.url}"):
                _join(call, plan, tickets)
        with world.step(call.what, is_long=True) as step:
            if not has_copies:
                _join(call, plan, tickets)
            receipt = _write_share(plan, writer, assembler)
            handed_in = _hand_in(world, plan.group, receipt, what=call.what)
            show_own(world, call.what, plan.state.own)
            staging_bytes = assembler.nbytes + (snapshot.nbytes if snapshot is not None else 0)
            digests = comparison.by_holders(world.rank, world.patience_s) if comparison is not None else {}
            step.answer([handed_in, digests])
    finally:
        assembler.close()
        if writer.close() and snapshot is not None:
            snapshot.release()
    receipts, by_holders = zip(*step.answers, strict=True)
    if comparison is not None:
        finish_comparison(call, comparison, by_holders)
    return WriteResult(receipt, receipts, writer.watch.seconds, writer.flush_s, staging_bytes)


def _write_share(plan: SavePlan, writer: PartWriter, assembler: PartAssembler) -> WriteReceipt:
    """Writes this rank's share, and sends its bytes to other writers."""
    assembler.open()
    hasher = BlockHasher(plan.state.layout.blocks_of(plan.share.ranges))
    written = writer.write(plan.share, assembler, hasher)
    assembler.finish()
    return WriteReceipt(written, hasher.checksums())


class PartSource(Protocol):
    """The bytes of parts, requested in order.

    Attributes:
        depth: Number of parts that are valid at once: part i until part i + depth is requested.
    """

    @property
    def depth(self) -> int:
        """See above."""

    def part(self, index: int) -> memoryview:
        """Returns the bytes of a part."""


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

        def begin(index: int) -> Callable[[], object] | None:
            part, data = share.parts[index], source.part(index)
            hash_complete_blocks = hasher.feed(part, data)
            if index in share.tails:
                hash_complete_blocks()
                return None
            return partial(self._write, part, data, hash_complete_blocks)

        def ended(part: ByteRange) -> None:
            nonlocal done_bytes
            done_bytes += part.nbytes
            if self._progress is not None:
                self._progress(done_bytes, share.nbytes)

        work_on_parts(self._world, self._workers, share.parts, source.depth, begin, self._late, ended)
        began = time.perf_counter()
        receipt = self._world.await_work(self._workers.submit(self._target.flush), self._late)
        self.flush_s = time.perf_counter() - began
        return receipt

    def close(self) -> bool:
        """Ends the threads; returns whether all writes have ended."""
        return self._workers.close(wait_s=min(1.0, self._world.grace_s))

    def _write(self, part: ByteRange, data: memoryview, hash_complete_blocks: Callable[[], None]) -> None:
        hash_complete_blocks()
        with self.watch.span(nbytes=len(data)):
            self._target.write(self._names[part.file], part.offset, data)

    def _late(self, part: ByteRange | None = None) -> StorageError:
        """Returns the error for the write of a part, or for the flush, that did not end in time."""
        text = f"storage did not answer within {self._world.patience_s:.1f} s"
        if part is None:
            return StorageError(f"{text} to the flush", url=self._target.url)
        url = f"{self._target.url}/{self._names[part.file]}"
        return StorageError(text, url=url, offset=part.offset, nbytes=part.nbytes)


def work_on_parts(
    world: World,
    workers: Workers,
    parts: Sequence[ByteRange],
    depth: int,
    begin: Callable[[int], Callable[[], object] | None],
    late: Callable[[ByteRange], StorageError],
    ended: Callable[[ByteRange], object] = lambda _: None,
) -> None:
    """Works on the parts of a share in threads, until another rank fails.

    Args:
        world: The ranks.
        workers: The threads.
        parts: The parts.
        depth: Number of parts that are valid at once: part i until part i + depth begins.
        begin: Begins with a part, by its number; returns the rest of the work, for a thread, or None.
        late: Returns the error for a part that takes too long.
        ended: Called with each part once its thread has ended.

    Raises:
        StorageError: From the work, or from `late`.
        Interrupted: Another rank failed.
    """
    under_way: deque[tuple[int, Future[object]]] = deque()

    def finish() -> None:
        part = parts[under_way[0][0]]
        # No frame refers to it: else error → traceback → frame → work → error would keep buffers alive.
        world.await_work(under_way.popleft()[1], partial(late, part))
        ended(part)

    for index in range(len(parts)):
        while under_way and under_way[0][0] + depth <= index:
            finish()
        if (work := begin(index)) is not None:
            under_way.append((index, workers.submit(work)))
        del work
    while under_way:
        finish()


class BlockPieces:
    """Finds blocks in the parts of a share. The bytes of a block may come in several parts.

    Args:
        blocks: The blocks, in the order of the parts.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = iter(blocks)
        self._block = next(self._blocks, None)
        self._num_found_bytes = 0  # of this block

    @property
    def is_over(self) -> bool:
        """Whether all blocks have ended."""
        return self._block is None

    def feed(self, part: ByteRange, data: memoryview) -> Iterator[tuple[Block, memoryview, bool]]:
        """Yields the blocks in the next part, their bytes in it, and whether they end with these."""
        ends = True
        while ends and (block := self._block) is not None:
            if block.file != part.file or block.offset >= part.end:
                return
            begin = block.offset + self._num_found_bytes - part.offset
            end = block.end - part.offset
            piece, ends = data[begin:end], end <= len(data)
            self._num_found_bytes = 0 if ends else self._num_found_bytes + len(piece)
            self._block = next(self._blocks, None) if ends else block
            yield block, piece, ends


class BlockHasher:
    """Hashes blocks whose bytes come in parts.

    Args:
        blocks: The blocks, in the order of the parts.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._pieces = BlockPieces(blocks)
        self._begun = xxhash.xxh3_64()
        self._hashed: list[tuple[int, bytes]] = []  # numbers of first blocks, and the checksums from there on

    def feed(self, part: ByteRange, data: memoryview) -> Callable[[], None]:
        """Takes the next part, without the blocks of other writers.

        Returns:
            What hashes the blocks that are complete in the part, which are adjacent; any thread may call it.
            Blocks that cross parts are hashed at once.
        """
        complete: list[tuple[int, memoryview]] = []
        for block, piece, ends in self._pieces.feed(part, data):
            if len(piece) == block.nbytes:
                complete.append((block.number, piece))
                continue
            self._begun.update(piece)
            if ends:
                self._hashed.append((block.number, self._begun.digest()))
                self._begun.reset()

        def hash_complete_blocks() -> None:
            if complete:
                sums = b"".join(checksum(piece) for _, piece in complete)
                self._hashed.append((complete[0][0], sums))

        return hash_complete_blocks

    def checksums(self) -> Checksums:
        """Returns the checksums, once all parts are hashed."""
        assert self._pieces.is_over
        joined: list[tuple[int, bytearray]] = []
        for number, sums in sorted(self._hashed):
            if joined and number == joined[-1][0] + len(joined[-1][1]) // CHECKSUM_BYTES:
                joined[-1][1].extend(sums)
            else:
                joined.append((number, bytearray(sums)))
        return [(first, bytes(sums)) for first, sums in joined]


@dataclass(frozen=True)
class WriteReceipt:
    """What a rank tells its leader.

    Attributes:
        written: The receipt of its target.
        checksums: Checksums of the blocks that it has hashed.
    """

    written: Mapping[str, Any]
    checksums: Checksums

    def pack(self) -> bytes:
        """Packs the receipt for the leader."""
        head = json.dumps([self.written, [first for first, _ in self.checksums]]).encode()
        return join_parts([head, *(sums for _, sums in self.checksums)])

    @classmethod
    def unpack(cls, packed: bytes) -> WriteReceipt:
        """Unpacks the result of `pack`."""
        head, *sums = split_parts(packed)
        written, firsts = json.loads(head)
        return cls(written, list(zip(firsts, sums, strict=True)))


def _hand_in(world: World, group: WriterGroup, receipt: WriteReceipt, *, what: str) -> str | None:
    """Returns the receipt for all ranks if it is short; else puts it into the store for the leader."""
    if world.rank == group.leader:
        return None
    packed = receipt.pack()
    if len(packed) * world.size <= _SHORT_BYTES:
        return base64.b64encode(packed).decode()
    world.show_bytes(f"{what}: leaving checksums", _PLACE, packed)
    return None


def _collect_receipts(
    world: World, group: WriterGroup, result: WriteResult, *, what: str
) -> list[WriteReceipt]:
    """Returns the receipts of all members, on their leader.

    Args:
        world: The ranks.
        group: The leader's group.
        result: The leader's result.
        what: Name of the save, for messages.
    """
    members = group.members[1:]
    shown = [rank for rank in members if result.receipts[rank] is None]
    packed = dict(zip(shown, world.take_shown(f"{what}: collecting checksums", _PLACE, shown), strict=True))
    for rank in members:
        if (short := result.receipts[rank]) is not None:
            packed[rank] = base64.b64decode(short)
    return [result.receipt, *(WriteReceipt.unpack(packed[rank]) for rank in members)]


def commit(
    call: SaveCall,
    plan: SavePlan,
    result: WriteResult,
    agreed: SaveAgreement,
    delta: Delta | None = None,
) -> PerRankFiles:
    """Writes the index, the ranks' own values and the commit record, and publishes the checkpoint.

    Args:
        call: The leader's call.
        plan: Its plan.
        result: What the ranks have written.
        agreed: The agreement of the ranks.
        delta: The base, if the files are those of a delta.

    Returns:
        The files with the ranks' own values.

    Raises:
        StorageError: Bytes or checksums are missing, or storage failed.
        CheckpointExists: Another save has made this checkpoint.
    """
    state, layout, target = plan.state, plan.state.layout, plan.target
    structure, own = collect_own(
        call.world, call.what, state.own, state.content.structure, layout.block_bytes
    )
    receipts = _collect_receipts(call.world, plan.group, result, what=call.what)
    record = Record(
        block_bytes=layout.block_bytes,
        files=(
            *_recorded(layout, receipts, target.url),
            *map(partial(_record_own, layout.block_bytes), own.files, own.contents),
        ),
        state=structure,
        metadata=agreed.metadata,
        delta=delta,
        strides={**agreed.strides, **own.strides},
    )
    small_files = [*call.small_files]
    small_files += [(INDEX_NAME, layout.index)] if layout.index is not None else []
    small_files += zip((file.name for file in own.files), own.contents, strict=True)
    small_files.append((RECORD_NAME, record.to_bytes()))
    target.publish([each.written for each in receipts], small_files)
    return own


def _record_own(block_bytes: int, file: LayoutFile, content: bytes) -> RecordedFile:
    sums = bytearray()
    for entry in file.tensors:
        end = entry.offset + entry.nbytes
        for begin in range(entry.offset, end, block_bytes):
            sums += checksum(content[begin : min(begin + block_bytes, end)])
    return RecordedFile(file.name, file.nbytes, len(file.header), checksum(file.header), bytes(sums))


def _recorded(layout: Layout, receipts: Sequence[WriteReceipt], url: str) -> tuple[RecordedFile, ...]:
    rows, num_bytes = list[bytes](), 0
    for first, digests in sorted(row for receipt in receipts for row in receipt.checksums):
        if first * CHECKSUM_BYTES == num_bytes:
            rows.append(digests)
            num_bytes += len(digests)
    found = memoryview(b"".join(rows))
    files = []
    for index, file in enumerate(layout.files):
        first, end = layout.blocks.first_of(index), layout.blocks.first_of(index + 1)
        sums = bytes(found[first * CHECKSUM_BYTES : end * CHECKSUM_BYTES])
        if len(sums) != (end - first) * CHECKSUM_BYTES:
            missing = len(sums) // CHECKSUM_BYTES
            raise StorageError(f"no rank hashed block {missing} of {end - first}", url=f"{url}/{file.name}")
        files.append(RecordedFile(file.name, file.nbytes, len(file.header), checksum(file.header), sums))
    return tuple(files)
