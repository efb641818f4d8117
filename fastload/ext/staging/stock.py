"""The blocks that a host has already: in a complete copy, or in one that a killed process left.

The journal of an incomplete copy lists its blocks, so the next attempt resumes from them.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastload.base.threads import Workers
from fastload.comm.world import World
from fastload.errors import StorageError
from fastload.ext.staging.inventory import Inventory
from fastload.ext.staging.local_copy import LocalCopy
from fastload.ext.staging.options import StageOptions
from fastload.formats.names import NAMES, STAGED_NAME
from fastload.formats.reading import read_bytes
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import Block
from fastload.storage.base import Storage
from fastload.storage.local import LocalStorage

_log = logging.getLogger(__name__)

_NAMES = replace(NAMES, to_replace="options=fastload.StageOptions(overwrite=True)")

_NUM_PROVERS = 4
_PROOF_BYTES = 8 << 20
_RECEIPT_BYTES = 4096  # without checksums and files
_FILE_BYTES = 2048  # of each, whatever its name
_ENTRY = struct.Struct(f">Q{CHECKSUM_BYTES}s")  # of the journal


@dataclass
class Stock:
    """The blocks on a host.

    Attributes:
        held: For each block, whether the host has it.
        checksums: For each of these, its checksum, 8 bytes each.
        kept: The bytes of earlier attempts: name of the file → disjoint (begin, end).
        damaged: Whether there is a copy of this checkpoint that is damaged.
    """

    held: bytearray
    checksums: bytearray
    kept: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    damaged: bool = False

    @classmethod
    def nothing(cls, num_blocks: int) -> Stock:
        """Returns the stock of a host without any block."""
        return cls(bytearray(num_blocks), bytearray(num_blocks * CHECKSUM_BYTES))

    def note(self, number: int, digest: bytes) -> None:
        """Adds a block with its checksum."""
        self.checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES] = digest
        self.held[number] = 1

    @property
    def kept_bytes(self) -> int:
        """Bytes of earlier attempts."""
        return sum(end - begin for ranges in self.kept.values() for begin, end in ranges)


def take_stock(
    world: World, inventory: Inventory, path: str, options: StageOptions
) -> tuple[LocalCopy | None, Stock]:
    """Finds the blocks of a copy, and makes room next to it for the others.

    Args:
        world: The ranks; the others wait while this one makes progress.
        inventory: The files to copy.
        path: The directory of the copy.
        options: Whether to verify the blocks, and to replace another checkpoint.

    Returns:
        The copy to write to, None if it is complete; and the blocks that the host has.

    Raises:
        CheckpointExists: The path has something else, and `StageOptions.overwrite` is off.
        StorageError: The disk is full, or permission is missing.
    """
    stock = Stock.nothing(len(inventory.blocks))
    if (checksums := _read_receipt(inventory, path)) is not None:
        if _is_complete(world, inventory, path, checksums, options):
            held = bytearray(b"\1" * len(inventory.blocks))
            return None, Stock(held, bytearray(checksums), inventory.ranges(held))
        stock.damaged = True
    copy = LocalCopy(path, _NAMES, io=options.io)
    files = [(file.name, file.nbytes) for file in inventory.files]
    journal = copy.resume(files, inventory.identity, overwrite=options.overwrite, damaged=stock.damaged)
    if stock.damaged:
        _log.warning("%s: this copy is damaged, and is replaced", path)
    try:
        noted = parse_journal(journal, len(inventory.blocks))
        for number in _prove(world, inventory, LocalStorage(copy.data_path, options.io), noted):
            stock.note(number, noted[number])
    except BaseException:
        copy.close()
        raise
    stock.kept = inventory.ranges(stock.held)
    return copy, stock


def receipt_of(inventory: Inventory, stock: Stock, files: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the receipt of a complete copy, by which the next call recognizes it.

    Args:
        inventory: The files of the copy.
        stock: All of its blocks.
        files: Name, size and time of each file.
    """
    receipt = {"identity": inventory.identity, "checksums": stock.checksums.hex(), "files": list(files)}
    return json.dumps(receipt, sort_keys=True).encode()


def _read_receipt(inventory: Inventory, path: str) -> bytes | None:
    """Returns the checksums in the receipt of a copy; None without one, or for another checkpoint."""
    storage = LocalStorage(path)
    try:
        stat = storage.stat(STAGED_NAME)
        most = 2 * CHECKSUM_BYTES * len(inventory.blocks) + _FILE_BYTES * len(inventory.files)
        if stat is None or stat.nbytes > _RECEIPT_BYTES + most:
            return None
        receipt = json.loads(read_bytes(storage, STAGED_NAME, 0, stat.nbytes))
        checksums = bytes.fromhex(receipt["checksums"])
        same = receipt["identity"] == inventory.identity
    except (StorageError, ValueError, TypeError, KeyError, RecursionError):
        return None
    finally:
        storage.close()
    return checksums if same and len(checksums) == CHECKSUM_BYTES * len(inventory.blocks) else None


def _is_complete(
    world: World, inventory: Inventory, path: str, checksums: bytes, options: StageOptions
) -> bool:
    storage = LocalStorage(path, options.io)
    try:
        stats = ((file, storage.stat(file.name)) for file in inventory.files)
        is_complete = all(stat is not None and stat.nbytes == file.nbytes for file, stat in stats)
    except StorageError:
        is_complete = False
    if not is_complete or not options.verify:
        storage.close()
        return is_complete
    noted = {
        number: checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
        for number in range(len(inventory.blocks))
    }
    return len(_prove(world, inventory, storage, noted)) == len(noted)


def _prove(
    world: World, inventory: Inventory, storage: LocalStorage, noted: Mapping[int, bytes]
) -> list[int]:
    """Reads blocks; returns those with the noted and recorded checksums. Closes the storage."""
    workers = Workers(min(_NUM_PROVERS, len(noted)), "fastload-prove")
    try:
        works: deque[Future[list[int]]] = deque(
            workers.submit(partial(_prove_batch, inventory, storage, batch, noted))
            for batch in _batches(inventory, noted)
        )
        late = partial(StorageError, "reading did not end in time", url=storage.url)
        proven: list[int] = []
        while works:
            # No frame refers to it: error → traceback → frame → work → error would be a cycle.
            numbers = world.await_work(works.popleft(), late)
            proven += numbers
    except BaseException:
        workers.close(wait_s=0.0)  # its reads still need the storage
        raise
    workers.close(wait_s=1.0)
    storage.close()
    return proven


def _batches(inventory: Inventory, numbers: Mapping[int, bytes]) -> Iterator[list[Block]]:
    """Yields batches of consecutive blocks of a file."""
    batch: list[Block] = []
    nbytes = 0
    for block in map(inventory.blocks.__getitem__, sorted(numbers)):
        follows = batch and (block.file, block.offset) == (batch[-1].file, batch[-1].end)
        if batch and (not follows or nbytes + block.nbytes > _PROOF_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(block)
        nbytes += block.nbytes
    if batch:
        yield batch


def _prove_batch(
    inventory: Inventory, storage: Storage, batch: Sequence[Block], noted: Mapping[int, bytes]
) -> list[int]:
    data = memoryview(bytearray(sum(block.nbytes for block in batch)))
    try:
        storage.read_into(inventory.files[batch[0].file].name, batch[0].offset, [data])
    except StorageError as error:
        _log.info("%s", error)
        return []  # blocks that cannot be read are copied again
    proven, position = [], 0
    for block in batch:
        found = checksum(data[position : position + block.nbytes])
        if found == noted[block.number] and inventory.recorded(block.number) in (b"", found):
            proven.append(block.number)
        position += block.nbytes
    return proven


def journal_entry(number: int, digest: bytes) -> bytes:
    """Returns the entry of a block: its number and its checksum."""
    return _ENTRY.pack(number, digest)


def parse_journal(journal: bytes, most: int) -> dict[int, bytes]:
    """Returns the checksums of the blocks in a journal. Ignores a torn last entry."""
    entries = _ENTRY.iter_unpack(journal[: len(journal) // _ENTRY.size * _ENTRY.size])
    return {number: digest for number, digest in entries if number < most}
