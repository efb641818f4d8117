"""Writes of the newest in-memory checkpoint to storage: after a signal, when a job ends, or after a crash."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from enum import Enum, auto
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from fastload.base.memory import host_view
from fastload.base.threads import Task
from fastload.comm.responses import join_parts, split_parts
from fastload.comm.world import World
from fastload.errors import ChecksumError, FastloadError, IncompleteCheckpoint, Interrupted, StorageError
from fastload.ext.memory.folder import JobFolder
from fastload.ext.memory.manifest import ShareTable
from fastload.ext.memory.restore import HostDamage, InMemoryCheckpoint, connect, read_file, read_table
from fastload.formats.manifest import Manifest
from fastload.formats.names import RECORD_NAME
from fastload.formats.open import read_manifest
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.ranges import ByteRange
from fastload.options import LoadOptions, SaveOptions
from fastload.saving.exchange import BufferRing
from fastload.saving.layout import Layout, LayoutFile
from fastload.saving.split import cut_shares
from fastload.saving.write import BlockHasher, PartWriter
from fastload.storage import PatientStorage, Target
from fastload.training.retention import StoredCheckpoint

_log = logging.getLogger(__name__)
AFTER_S = 5.0
"""Seconds that a training has after a signal to save by itself; what it saves is newer."""


class _State(Enum):
    IDLE = auto()
    WAITING = auto()
    WRITING = auto()
    OVER = auto()


class EmergencyFlush:
    """Writes the memory tier to storage a while after a signal, unless the training saves before.

    Each rank that gets the signal has its own timer. All ranks write together, or none does: a rank whose
    training saves tells the others. If they have begun to write, it waits for the end.

    Args:
        world: The ranks, which met for this when the training began.
        write: Writes the newest in-memory checkpoint.
    """

    def __init__(self, world: World, write: Callable[[World], object]) -> None:
        self._world = world
        self._write = write
        self._lock = threading.Lock()
        self._state = _State.IDLE
        self._disarmed = threading.Event()
        self._has_ended = threading.Event()

    def arm(self) -> None:
        """Starts the timer, after a signal; from any thread."""
        if self._becomes(_State.WAITING, _State.IDLE):
            Task(self._wait, "fastload-flush").start()

    def yield_to_training(self) -> None:
        """Gives up the flush, since the training saves or ends; if it has begun, waits for its end."""
        self.disarm()
        if self._becomes(_State.OVER, _State.IDLE, _State.WAITING):
            self._world.leave(Interrupted("the training saves, or has ended"))
        elif self._state is _State.WRITING:
            self._has_ended.wait()

    def disarm(self) -> None:
        """Stops the timer."""
        self._disarmed.set()

    def write_now(self) -> None:
        """Writes now, unless it is done or given up; on all ranks."""
        self.disarm()
        if self._becomes(_State.WRITING, _State.IDLE, _State.WAITING):
            self._run()
        elif self._state is _State.WRITING:
            self._has_ended.wait()

    def _becomes(self, state: _State, *before: _State) -> bool:
        with self._lock:
            may_change = self._state in before
            if may_change:
                self._state = state
            return may_change

    def _wait(self) -> None:
        if not self._disarmed.wait(AFTER_S) and self._becomes(_State.WRITING, _State.WAITING):
            self._run()

    def _run(self) -> None:
        try:
            with self._world.together():
                self._write(self._world)
            self._world.acknowledge()
        except FastloadError as error:
            level = logging.WARNING if self._world.rank == 0 else logging.DEBUG
            _log.log(level, "the memory tier is not flushed to storage: %s", error)
        finally:
            self._state = _State.OVER
            self._has_ended.set()


_PART_BYTES = 4 << 20


def newer_than(
    stored: Sequence[StoredCheckpoint], checkpoints: Iterable[InMemoryCheckpoint]
) -> list[InMemoryCheckpoint]:
    """Returns the in-memory checkpoints that are newer than all on storage, complete or not, oldest first.

    Args:
        stored: The usable checkpoints on storage.
        checkpoints: Those in memory, oldest first.
    """
    newest = max((checkpoint.point for checkpoint in stored), default=None)
    return [
        checkpoint
        for checkpoint in checkpoints
        if (newest is None or checkpoint.manifest.point > newest)
        and not checkpoint.manifest.lineage.overtaken_by(stored)
    ]


def flush(
    world: World,
    folder: JobFolder,
    checkpoint: InMemoryCheckpoint,
    open_target: Callable[[], Target],
    options: SaveOptions,
    damage: HostDamage = MappingProxyType({}),
) -> None:
    """Writes an in-memory checkpoint to storage, on all ranks; a rank that holds a byte writes it.

    Checksums are verified on the way; a damaged checkpoint is not published.

    Args:
        world: The ranks.
        folder: The job's folder on this host.
        checkpoint: A complete one.
        open_target: Opens write access to the checkpoint on storage.
        options: How to write.
        damage: Its known damage, which is read from other hosts.

    Raises:
        FastloadError: It failed; the same error on all ranks.
    """
    what = f"writing step {checkpoint.step} from memory to storage"
    intact = {rank: held for rank, held in checkpoint.holders.items() if damage.get(rank, ()) is not None}
    checkpoint = replace(checkpoint, holders=intact)
    source = min(intact, key=lambda rank: (bool(damage.get(rank)), rank))
    target = open_target()
    try:
        if options.shared is False:
            raise StorageError("with shared=False each host has its own copy there", url=target.url)
        files, table = _share_tables(world, what, folder, checkpoint, source)
        dealt = _deal(files, table, checkpoint, target, world.size, damage)
        names = [name for name, _ in files]
        with world.step(f"{what}: preparing") as preparing:
            ticket = target.prepare(files, overwrite=True) if world.rank == source else None
            preparing.answer(ticket)
        with world.step(f"{what}: joining"):
            if world.rank != source:
                target.join(preparing.answers[source])
        num_writes = options.write_threads or target.writes_at_once
        writer = PartWriter(world, target, names, num_threads=num_writes, progress=None)
        try:
            with world.step(what, is_long=True) as writing:
                receipt = None
                if world.rank in checkpoint.holders:
                    with closing(_storage(world, folder, checkpoint)) as storage:
                        receipt = _write(storage, names, dict(enumerate(dealt)), world.rank, writer)
                writing.answer(receipt)
        finally:
            writer.close()
        receipts = [receipt for receipt in writing.answers if receipt is not None]
        with world.step(f"{what}: publishing"):
            if world.rank == source:
                with closing(_storage(world, folder, checkpoint)) as storage:
                    small_files = _read_small_files(storage, table.whole)
                target.publish(receipts, small_files)
    except BaseException:
        target.abort()
        raise
    finally:
        target.close()


def _storage(world: World, folder: JobFolder, checkpoint: InMemoryCheckpoint) -> PatientStorage:
    options = LoadOptions(io="buffered", timeout_s=world.timeout_s)
    return connect(folder.place(checkpoint.name), world, options)


def _share_tables(
    world: World, what: str, folder: JobFolder, checkpoint: InMemoryCheckpoint, source: int
) -> tuple[list[tuple[str, int]], ShareTable]:
    """Reads on one rank, for all, names and sizes of the files in shares, and the table of shares."""
    with world.step(what) as step:
        if world.rank == source:
            step.answer(attach=_read_tables(world, folder, checkpoint))
    packed, text = split_parts(step.attachment)
    files = [(name, nbytes) for name, nbytes in json.loads(packed)]
    return files, ShareTable.parse(text, checkpoint.manifest.table, what)


def _read_tables(world: World, folder: JobFolder, checkpoint: InMemoryCheckpoint) -> bytes:
    with closing(_storage(world, folder, checkpoint)) as storage:
        manifest, (text, table) = read_manifest(storage), read_table(storage, checkpoint)
    files = [(file.name, file.nbytes) for file in manifest.files if file.name not in table.whole]
    return join_parts([json.dumps(files).encode(), text])


def _read_small_files(storage: PatientStorage, names: Iterable[str]) -> list[tuple[str, bytes]]:
    """Reads and verifies the files that every host has; the commit record is last.

    Raises:
        ChecksumError: One is damaged.
    """
    manifest = read_manifest(storage)
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    found = [(name, read_file(storage, name)) for name in (*names, RECORD_NAME)]
    for name, content in found:
        for _, block in manifest.blocks.between(numbers.get(name, -1), 0, len(content)):
            if checksum(content[block.offset : block.end]) != manifest.recorded(block)[1]:
                raise ChecksumError(f"{storage.url}/{name}: damaged in memory")
    return found


def _deal(
    files: Sequence[tuple[str, int]],
    table: ShareTable,
    checkpoint: InMemoryCheckpoint,
    target: Target,
    num_ranks: int,
    damage: HostDamage,
) -> list[list[ByteRange]]:
    """Returns the ranges that each rank writes: each byte once, by a rank whose host has it undamaged.

    Raises:
        IncompleteCheckpoint: All copies of a part are damaged.
        StorageError: Storage takes files only in parts that no host has completely.
    """
    unit = target.align_bytes(max((nbytes for _, nbytes in files), default=1))
    dealt: list[list[ByteRange]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file, (name, nbytes) in enumerate(files):
        ranges = [
            (*each, share) for share, of_share in table.shares.items() for each in of_share.get(name, ())
        ]
        bad = [
            (first, last, rank)
            for rank, damaged in damage.items()
            for other, first, last in damaged or ()
            if other == name
        ]
        for begin, end, shares in _parts(sorted(ranges), nbytes, unit, bad):
            holders = [rank for rank, held in checkpoint.holders.items() if shares & set(held)]
            if not holders:
                raise StorageError(
                    "it cuts files differently from the shares in memory", url=f"{target.url}/{name}"
                )
            unfit = {rank for first, last, rank in bad if first < end and last > begin}
            intact = [rank for rank in holders if rank not in unfit]
            if not intact:
                where = f"step {checkpoint.step} in memory: {name} [bytes {begin}-{end}]"
                raise IncompleteCheckpoint(f"{where} is damaged on all hosts that have it")
            writer = min(intact, key=lambda rank: (loads[rank], rank not in shares, rank))
            loads[writer] += end - begin
            dealt[writer].append(ByteRange(file, begin, end - begin))
    return dealt


def _parts(
    ranges: Sequence[tuple[int, int, int]],
    nbytes: int,
    unit: int | None,
    damaged: Sequence[tuple[int, int, int]],
) -> Iterable[tuple[int, int, set[int]]]:
    """Cuts a file where storage allows; yields (begin, end) and the shares that have all of that.

    Args:
        ranges: (begin, end, share), sorted; they may overlap, by the rest of a block.
        nbytes: Length of the file.
        unit: The file may be cut at its multiples; None: nowhere.
        damaged: (begin, end, rank) of damage, which parts of their own contain.
    """
    bounds = {0, nbytes}
    if unit is not None:
        bounds |= {bound // unit * unit for begin, end, _ in ranges for bound in (begin, end)}
        for begin, end, _ in damaged:
            bounds |= {begin // unit * unit, min(nbytes, -(-end // unit) * unit)}
    waiting, active = list(reversed(ranges)), list[tuple[int, int, int]]()
    for begin, end in pairwise(sorted(bounds)):
        while waiting and waiting[-1][0] <= begin:
            active.append(waiting.pop())
        active = [each for each in active if each[1] >= end]
        yield begin, end, {share for _, _, share in active}


def _write(
    storage: PatientStorage,
    names: Sequence[str],
    ranges: Mapping[int, Sequence[ByteRange]],
    rank: int,
    writer: PartWriter,
) -> Mapping[str, Any]:
    """Writes the ranges of a rank, and verifies the blocks that begin in them; returns the receipt.

    Raises:
        ChecksumError: A block is damaged.
        FastloadError: As for `PartWriter.write`.
    """
    manifest = read_manifest(storage)
    layout = _layout(manifest, names)
    share = cut_shares(layout, ranges, _PART_BYTES, [rank])[rank]
    hasher = BlockHasher(layout.blocks_of(share.ranges))
    receipt = writer.write(share, _HostParts(storage, manifest, names, share.parts), hasher)
    of_file = {file.name: file.checksums for file in manifest.files}
    recorded = b"".join(of_file[name] for name in names)
    for first, digests in hasher.checksums():
        for number in range(first, first + len(digests) // CHECKSUM_BYTES):
            begin = (number - first) * CHECKSUM_BYTES
            at = number * CHECKSUM_BYTES
            if recorded[at : at + CHECKSUM_BYTES] != digests[begin : begin + CHECKSUM_BYTES]:
                damaged = names[layout.blocks[number].file]
                raise ChecksumError(f"{storage.url}/{damaged}: damaged in memory")
    return receipt


def _layout(manifest: Manifest, names: Sequence[str]) -> Layout:
    """Returns the layout of the files that are written in ranges."""
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    files = []
    for index, name in enumerate(names):
        entries = [entry for entry in manifest.tensors if entry.file == numbers[name]]
        ordered = sorted(entries, key=lambda entry: entry.offset)
        tensors = tuple(replace(entry, file=index) for entry in ordered)
        files.append(LayoutFile(name, b"", tensors, manifest.files[numbers[name]].nbytes))
    return Layout(tuple(files), manifest.block_bytes, None)


class _HostParts:
    """Parts of files, read from this host; see `saving.write.PartSource`."""

    depth = 4

    def __init__(
        self, storage: PatientStorage, manifest: Manifest, names: Sequence[str], parts: Sequence[ByteRange]
    ) -> None:
        self._storage = storage
        self._versions = {file.name: file.version for file in manifest.files}
        self._names = names
        self._parts = parts
        self._buffers = BufferRing(self.depth, [part.nbytes for part in parts], pinned=False)

    def part(self, index: int) -> memoryview:
        part = self._parts[index]
        data = host_view(self._buffers.get(index)[: part.nbytes])
        name = self._names[part.file]
        self._storage.read_into(name, part.offset, [data], self._versions[name])
        return data
