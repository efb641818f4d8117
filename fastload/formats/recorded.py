"""What `fastload.save` wrote, as its commit record has it: those files and no others, proven by checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import xxhash

from fastload.errors import ChecksumError, IncompleteCheckpoint, ManifestError
from fastload.formats.manifest import Manifest
from fastload.formats.names import RECORD_NAME, SAVING_NAME
from fastload.formats.reading import read_bytes, stat_all, url_of
from fastload.formats.record import (
    CHECKSUM_BYTES,
    MAX_RECORD_BYTES,
    RecordedFile,
    checksum,
    parse,
)
from fastload.formats.safetensors.header import LENGTH_BYTES, MAX_HEADER_BYTES
from fastload.formats.safetensors.reader import assemble
from fastload.formats.state import check_names
from fastload.formats.untrusted import show
from fastload.geometry.blocks import num_blocks
from fastload.storage.base import Storage

__all__ = ["is_recorded", "read_folder", "record_digest"]


def is_recorded(listing: Sequence[str]) -> bool:
    """Whether a directory holds what `fastload.save` wrote, to the end or not."""
    return RECORD_NAME in listing or SAVING_NAME in listing


def read_folder(storage: Storage, listing: Sequence[str]) -> Manifest:
    """Reads what the commit record names.

    Raises:
        IncompleteCheckpoint: The save never ended, or files that the record names are missing.
        ManifestError: The record or a header is malformed, or they contradict each other or the files.
        ChecksumError: The record, or a header, is not as it was written.
        StorageError: Storage failed.
    """
    if RECORD_NAME not in listing:
        raise IncompleteCheckpoint(
            f"{storage.url}: a save to it has not ended: {SAVING_NAME} but no {RECORD_NAME}"
        )
    text = _read_record(storage)
    record = parse(text, url_of(storage, RECORD_NAME))
    check_names(record.state, url_of(storage, RECORD_NAME), len(text))
    names = [file.name for file in record.files]
    try:
        stats = stat_all(storage, names)
    except ManifestError as missing:
        raise IncompleteCheckpoint(f"{missing}, although {RECORD_NAME} names them") from None
    for file in record.files:
        if stats[file.name].nbytes != file.nbytes:
            sizes = f"{stats[file.name].nbytes} bytes, of {file.nbytes} that {RECORD_NAME} records"
            raise ManifestError(f"{url_of(storage, file.name)}: has {sizes}", is_damage=True)
    by_name = {file.name: file for file in record.files}
    manifest = assemble(storage, stats, lambda name, stat: _read_header(storage, by_name[name]))
    wanted_blocks = [0] * len(record.files)
    for entry in manifest.tensors:
        wanted_blocks[entry.file] += num_blocks(entry.nbytes, record.block_bytes)
    for file, wanted in zip(record.files, wanted_blocks, strict=True):
        found = len(file.checksums) // CHECKSUM_BYTES
        if found != wanted:
            where = f"{url_of(storage, RECORD_NAME)}: {show(file.name)}"
            raise ManifestError(f"{where}: {found} checksums for {wanted} blocks")
    return replace(
        manifest,
        files=tuple(
            replace(entry, checksums=file.checksums)
            for entry, file in zip(manifest.files, record.files, strict=True)
        ),
        metadata=record.metadata,
        block_bytes=record.block_bytes,
        structure=record.state,
        record_digest=xxhash.xxh3_128_hexdigest(text),
        format="fastload",
    )


def record_digest(storage: Storage) -> str:
    """Returns the `Manifest.record_digest` of a checkpoint as it is here; empty if it has no record."""
    stat = storage.stat(RECORD_NAME)
    if stat is None or stat.nbytes > MAX_RECORD_BYTES:
        return ""
    return xxhash.xxh3_128_hexdigest(read_bytes(storage, RECORD_NAME, 0, stat.nbytes))


def _read_record(storage: Storage) -> bytes:
    url = url_of(storage, RECORD_NAME)
    nbytes = stat_all(storage, [RECORD_NAME])[RECORD_NAME].nbytes
    if nbytes > MAX_RECORD_BYTES:
        raise ManifestError(f"{url}: record of {nbytes} bytes is over the limit of {MAX_RECORD_BYTES}")
    return read_bytes(storage, RECORD_NAME, 0, nbytes)


def _read_header(storage: Storage, file: RecordedFile) -> bytes:
    """Reads the JSON text of a header whose length and checksum are known: in one request."""
    url = url_of(storage, file.name)
    length = file.header_bytes - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise ManifestError(f"{url}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    for _ in range(2):  # once more, since what went wrong on the way may go right the next time
        header = read_bytes(storage, file.name, 0, file.header_bytes)
        if checksum(header) == file.header_checksum:
            break
    else:
        wrong = f"checksum {file.header_checksum.hex()} expected, {checksum(header).hex()} found"
        raise ChecksumError(f"{url} [bytes 0-{file.header_bytes}]: the header is damaged: {wrong}")
    if int.from_bytes(header[:LENGTH_BYTES], "little") != length:
        raise ManifestError(f"{url}: its header is not of the {length} bytes that {RECORD_NAME} records")
    return header[LENGTH_BYTES:]
