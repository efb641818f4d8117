"""Writes the newest in-memory checkpoint to storage, at the end of a job or after a signal."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import Any

from fastload.base.memory import allocate_staging, host_view
from fastload.base.tasks import Task
from fastload.comm.world import World
from fastload.errors import ChecksumError, FastloadError, Interrupted, StorageError
from fastload.formats.manifest import Manifest
from fastload.formats.names import RECORD_NAME
from fastload.formats.open import read_manifest
from fastload.formats.record import CHECKSUM_BYTES
from fastload.memory_tier.manifest import ShareTable
from fastload.memory_tier.restore import InMemoryCheckpoint, connect, read_table
from fastload.options import LoadOptions, SaveOptions
from fastload.saving.layout import FileRange, Layout, LayoutFile
from fastload.saving.split import WriterShare
from fastload.saving.write import BlockHasher, PartWriter
from fastload.storage import PatientStorage, Target
from fastload.storage.memory_folder import JobFolder

_log = logging.getLogger(__name__)
AFTER_S = 5.0
"""Seconds after a signal in which a training that is well comes to save; what that writes is newer."""


class _State(Enum):
    IDLE = auto()
    WAITING = auto()
    WRITING = auto()
    OVER = auto()


class EmergencyFlush:
    """Writes what is in memory to storage some time after a signal, unless the training comes to save before.

    Each rank that has got the signal waits for itself. The ranks do it together or not at all: one that comes
    to save tells the others, and goes on once what had begun has ended.

    Args:
        world: The ranks, which met for this when the training began.
        write: Writes it, given the ranks.
    """

    def __init__(self, world: World, write: Callable[[World], object]) -> None:
        self._world = world
        self._write = write
        self._lock = threading.Lock()
        self._state = _State.IDLE
        self._comes = threading.Event()
        self._has_ended = threading.Event()

    def expect(self) -> None:
        """Notes that there was a signal; from any thread."""
        if self._becomes(_State.WAITING, _State.IDLE):
            Task(self._wait, "fastload-flush").start()

    def come_to_save(self) -> None:
        """Notes that the training has come to save by itself, or to its end; waits for what has begun."""
        self.cancel()
        if self._becomes(_State.OVER, _State.IDLE, _State.WAITING):
            self._world.leave(Interrupted("the training has come to save, or to its end"))
        elif self._state is _State.WRITING:
            self._has_ended.wait()

    def cancel(self) -> None:
        """Has nothing begin any more after some time."""
        self._comes.set()

    def write_now(self) -> None:
        """Writes it, unless that is done or left; all ranks together."""
        self.cancel()
        if self._becomes(_State.WRITING, _State.IDLE, _State.WAITING):
            self._run()
        elif self._state is _State.WRITING:
            self._has_ended.wait()

    def _becomes(self, state: _State, *before: _State) -> bool:
        with self._lock:
            is_so = self._state in before
            if is_so:
                self._state = state
            return is_so

    def _wait(self) -> None:
        if not self._comes.wait(AFTER_S) and self._becomes(_State.WRITING, _State.WAITING):
            self._run()

    def _run(self) -> None:
        try:
            with self._world.together():
                self._write(self._world)
            self._world.acknowledge()
        except FastloadError as error:
            level = logging.WARNING if self._world.rank == 0 else logging.DEBUG
            _log.log(level, "what is in memory is not written to storage: %s", error)
        finally:
            self._state = _State.OVER
            self._has_ended.set()


_PIECE_BYTES = 4 << 20


def flush(
    world: World,
    folder: JobFolder,
    found: InMemoryCheckpoint,
    open_target: Callable[[], Target],
    options: SaveOptions,
) -> None:
    """Writes an in-memory checkpoint to storage, on all ranks: each byte by one that has it.

    What is written is checked on the way, and is not published if it is not as it was.

    Args:
        world: The ranks.
        folder: What the job has on this host.
        found: The checkpoint; it is complete.
        open_target: Opens write access to where it belongs.
        options: How to write.

    Raises:
        FastloadError: It is not on storage; the same on all ranks.
    """
    what = f"writing step {found.step} from memory to storage"
    source = min(found.holders)
    target = open_target()
    try:
        plan = _plan(world, what, folder, found, source)
        ranges = _deal(plan, found, target, world.size)[world.rank]
        files = [(name, nbytes) for name, nbytes in plan.files]

        def prepare() -> Any:
            return target.prepare(files, overwrite=True) if world.rank == source else None

        ticket = world.agree(f"{what}: preparing", prepare)[source]
        world.agree(f"{what}: joining", lambda: target.join(ticket) if world.rank != source else None)
        names = [name for name, _ in plan.files]
        writer = PartWriter(world, target, names, num_threads=options.write_threads, progress=None)

        def write() -> Mapping[str, Any] | None:
            if world.rank not in found.holders:
                return None
            with closing(_storage(world, folder, found)) as storage:
                return _write(storage, names, ranges, writer)

        try:
            receipts = world.settle(what, write)
        finally:
            writer.close()

        def publish() -> None:
            if world.rank == source:
                with closing(_storage(world, folder, found)) as storage:
                    small = [(name, _read_all(storage, name)) for name in (*plan.table.whole, RECORD_NAME)]
                target.publish([each for each in receipts if each is not None], small, overwrite=True)

        world.agree(f"{what}: publishing", publish)
    except BaseException:
        target.abort()
        raise
    finally:
        target.close()


@dataclass(frozen=True)
class _Plan:
    """What there is to write.

    Attributes:
        files: Name and size of each file that is written in ranges.
        table: What each share has of them.
    """

    files: Sequence[tuple[str, int]]
    table: ShareTable


def _storage(world: World, folder: JobFolder, found: InMemoryCheckpoint) -> PatientStorage:
    return connect(folder.place(found.name), world, LoadOptions(io="buffered", timeout_s=world.timeout_s))


def _plan(world: World, what: str, folder: JobFolder, found: InMemoryCheckpoint, source: int) -> _Plan:
    """Reads on one rank, for all, what there is to write."""

    def read() -> bytes:
        with closing(_storage(world, folder, found)) as storage:
            manifest, (text, table) = read_manifest(storage), read_table(storage, found)
        files = [(file.name, file.nbytes) for file in manifest.files if file.name not in table.whole]
        return b"\n".join([json.dumps(files).encode(), text])

    files, _, text = world.share(what, source, read).partition(b"\n")
    table = ShareTable.parse(text, found.table, what)
    return _Plan([(name, nbytes) for name, nbytes in json.loads(files)], table)


def _deal(plan: _Plan, found: InMemoryCheckpoint, target: Target, num_ranks: int) -> list[list[FileRange]]:
    """Says which ranges each rank writes: each byte once, by one whose host has it.

    Raises:
        StorageError: Storage takes files only as they are not cut in memory.
    """
    unit = target.align_bytes(max((nbytes for _, nbytes in plan.files), default=1))
    dealt: list[list[FileRange]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file, (name, nbytes) in enumerate(plan.files):
        ranges = [
            (*each, share) for share, files in plan.table.shares.items() for each in files.get(name, ())
        ]
        for begin, end, shares in _parts(sorted(ranges), nbytes, unit):
            holders = [rank for rank, held in found.holders.items() if shares & set(held)]
            if not holders:
                raise StorageError(
                    "it takes files in other parts than memory has", url=f"{target.url}/{name}"
                )
            writer = min(holders, key=lambda rank: (loads[rank], rank not in shares, rank))
            loads[writer] += end - begin
            dealt[writer].append(FileRange(file, begin, end))
    return dealt


def _parts(
    ranges: Sequence[tuple[int, int, int]], nbytes: int, unit: int | None
) -> Iterable[tuple[int, int, set[int]]]:
    """Cuts a file where storage allows; yields (begin, end) and the shares that have all of it.

    Args:
        ranges: (begin, end, share), sorted; a share may have a part of what is behind its own.
        nbytes: Length of the file.
        unit: Where it may be cut; None: nowhere.
    """
    bounds = {0, nbytes}
    if unit is not None:
        bounds |= {bound // unit * unit for begin, end, _ in ranges for bound in (begin, end)}
    waiting, active = list(reversed(ranges)), list[tuple[int, int, int]]()
    for begin, end in pairwise(sorted(bounds)):
        while waiting and waiting[-1][0] <= begin:
            active.append(waiting.pop())
        active = [each for each in active if each[1] >= end]
        yield begin, end, {share for _, _, share in active}


def _write(
    storage: PatientStorage, names: Sequence[str], ranges: Sequence[FileRange], writer: PartWriter
) -> Mapping[str, Any]:
    """Writes ranges, and checks the blocks that begin in them; returns the receipt.

    Raises:
        ChecksumError: A block is not as it was written.
        FastloadError: As for `PartWriter.write`.
    """
    manifest = read_manifest(storage)
    layout = _layout(manifest, names)
    share = WriterShare.of(layout, ranges, _PIECE_BYTES)
    hasher = BlockHasher(layout.blocks_of(ranges))
    receipt = writer.write(share, _Pieces(storage, manifest, names, share.parts), hasher)
    recorded = {file.name: file.checksums for file in manifest.files}
    for file, first, text in hasher.checksums():
        digests, begin = bytes.fromhex(text), first * CHECKSUM_BYTES
        if recorded[names[file]][begin : begin + len(digests)] != digests:
            raise ChecksumError(f"{storage.url}/{names[file]}: damaged in memory")
    return receipt


def _layout(manifest: Manifest, names: Sequence[str]) -> Layout:
    """Returns the files that are written in ranges as a save lays them out."""
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    files = []
    for at, name in enumerate(names):
        number = numbers[name]
        entries = [entry for entry in manifest.tensors if entry.file == number]
        ordered = sorted(entries, key=lambda entry: entry.offset)
        tensors = tuple(replace(entry, file=at) for entry in ordered)
        files.append(LayoutFile(name, b"", tensors, manifest.files[number].nbytes))
    return Layout(tuple(files), manifest.block_bytes, None)


class _Pieces:
    """Pieces out of the memory of this host; see `saving.write.PartSource`."""

    depth = 4

    def __init__(
        self, storage: PatientStorage, manifest: Manifest, names: Sequence[str], pieces: Sequence[FileRange]
    ) -> None:
        self._storage = storage
        self._versions = {file.name: file.version for file in manifest.files}
        self._names = names
        self._pieces = pieces
        longest = max((piece.nbytes for piece in pieces), default=0)
        self._buffers = [allocate_staging(longest, pinned=False) for _ in range(self.depth)]

    def part(self, index: int) -> memoryview:
        file, begin, end = self._pieces[index]
        data = host_view(self._buffers[index % self.depth][: end - begin])
        name = self._names[file]
        self._storage.read_into(name, begin, [data], self._versions[name])
        return data


def _read_all(storage: PatientStorage, name: str) -> bytes:
    stat = storage.stat(name)
    if stat is None:
        raise StorageError("it is gone", url=f"{storage.url}/{name}")
    return storage.read_all(name, stat)
