"""safetensors files and the Hugging Face index: what they hold, read strictly.

A checkpoint is untrusted. A file that gets past this module has a header that the reference library
accepts too, and tensors that tile its data area exactly; whatever else a file claims is refused with a
`ManifestError` that says where and why, before anything of the claimed size is allocated.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import xxhash

from fastload.base.memory import uncollected
from fastload.errors import CheckpointNotFound, ChecksumError, IncompleteCheckpoint, ManifestError
from fastload.formats.dtypes import DTYPES
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.formats.names import (
    INDEX_NAME,
    INDEX_SUFFIX,
    RECORD_NAME,
    SAVING_NAME,
    SUFFIX,
    TORCH_ENDINGS,
)
from fastload.formats.reading import in_threads, read_bytes, stat_all, url_of
from fastload.formats.record import (
    CHECKSUM_BYTES,
    MAX_RECORD_BYTES,
    RecordedFile,
    checksum,
)
from fastload.formats.record import parse as parse_record
from fastload.formats.untrusted import (
    MAX_INT,
    are_sizes,
    is_plain_path,
    is_unicode,
    parse_json,
    parse_metadata,
    show,
)
from fastload.geometry.blocks import num_blocks
from fastload.storage.base import FileStat, Storage

__all__ = [
    "MAX_HEADER_BYTES",
    "header_digest",
    "parse_header",
    "read_manifest",
    "record_digest",
]

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000  # the reference library's limit
_MAX_INDEX_BYTES = 100_000_000
_LENGTH_BYTES = 8  # the little-endian u64 before the header

_TORCH_FILES = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80\x02\x8a\nl\xfc\x9cF": "a pickle, as torch.save wrote before torch 1.6",
}
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


def read_manifest(storage: Storage) -> Manifest | None:
    """Finds and reads the checkpoint at the root of a storage.

    The root is one file, a directory with an index, or a directory of ``*.safetensors`` files. The
    index wins over other files in the directory; the files it names are taken whole, as transformers
    does: a tensor they hold that the index does not list is loaded all the same. Names that start with
    a dot are passed over. ``__metadata__`` is merged; the first file in name order wins.

    A directory with a commit record holds the files that the record names, and no others: neither the
    index nor any other file is looked at, the headers have to match their checksums, and the metadata
    is that of the record.

    Args:
        storage: Where to look; its methods are called from several threads. Of each file the 8 bytes
            of the header length and the header are read, nothing else.

    Returns:
        The manifest, or None if nothing exists at the root.

    Raises:
        CheckpointNotFound: The root is a directory without safetensors files.
        IncompleteCheckpoint: It was never saved to the end, or lacks files that its record names.
        ManifestError: A header, the index or the commit record is malformed, or they contradict each
            other or the files.
        ChecksumError: The record, or a header, is not as it was written.
        StorageError: Storage failed.
    """
    listing = storage.list()
    if listing is None:
        stat = storage.stat("")
        return None if stat is None else _assemble(storage, {"": stat})
    if RECORD_NAME in listing:
        return _assemble_recorded(storage)
    if SAVING_NAME in listing:
        raise IncompleteCheckpoint(
            f"{storage.url}: a save to it has not ended: {SAVING_NAME} but no {RECORD_NAME}"
        )
    index = _find_index(storage.url, listing)
    if index is None:
        return _assemble(storage, stat_all(storage, _find_files(storage.url, listing)))
    weight_map = _read_index(storage, index)
    manifest = _assemble(storage, stat_all(storage, sorted(set(weight_map.values()))))
    _check_index(url_of(storage, index), weight_map, manifest)
    return manifest


def header_digest(storage: Storage, name: str, file_nbytes: int) -> str:
    """Returns the `FileEntry.header_digest` of a file as it is here; empty if it has no header."""
    if file_nbytes < _LENGTH_BYTES:
        return ""
    length = int.from_bytes(read_bytes(storage, name, 0, _LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, file_nbytes - _LENGTH_BYTES):
        return ""
    return xxhash.xxh3_128_hexdigest(read_bytes(storage, name, _LENGTH_BYTES, length))


def record_digest(storage: Storage) -> str:
    """Returns the `Manifest.record_digest` of a checkpoint as it is here; empty if it has no record."""
    stat = storage.stat(RECORD_NAME)
    if stat is None or stat.nbytes > MAX_RECORD_BYTES:
        return ""
    return xxhash.xxh3_128_hexdigest(read_bytes(storage, RECORD_NAME, 0, stat.nbytes))


@uncollected
def parse_header(
    header: bytes, file_nbytes: int, url: str, file: int = 0
) -> tuple[list[TensorEntry], dict[str, str]]:
    """Parses the header of one safetensors file.

    Args:
        header: The JSON text, without the 8 bytes of its length.
        file_nbytes: Size of the whole file in bytes.
        url: The file, for messages.
        file: Index of the file in the manifest.

    Returns:
        The tensors in the order of their bytes (offset from the start of the file, length, name), and
        the ``__metadata__``, empty where there is none.

    Raises:
        ManifestError: The header is malformed or does not describe exactly the bytes of the file.
    """
    if not header.startswith(b"{"):
        raise ManifestError(f"{url}: header starts with {header[:8]!r}, not with '{{'")
    raw = parse_json(header, f"{url}: header")
    metadata = parse_metadata(raw.pop("__metadata__", {}), f"{url}: __metadata__")
    data_offset = _LENGTH_BYTES + len(header)
    tensors = []
    for name in list(raw):
        try:
            # pop, so that there are never both forms of all of a large header
            tensors.append(_parse_entry(name, raw.pop(name), file, data_offset))
        except ValueError as error:
            raise ManifestError(f"{url}: tensor {show(name)}: {error}") from None
    tensors.sort(key=attrgetter("offset", "nbytes", "name"))
    _check_tiling(tensors, data_offset, file_nbytes, url)
    return tensors, metadata


# Parsing. A ValueError from here says what is wrong; the caller adds where.


def _parse_entry(name: str, fields: Any, file: int, data_offset: int) -> TensorEntry:
    if not is_unicode(name):
        raise ValueError("its name is not valid Unicode")
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_KEYS:
        raise ValueError(f"needs exactly the keys {sorted(_ENTRY_KEYS)}, got {show(fields)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {show(dtype)}")
    if not are_sizes(shape):
        raise ValueError(f"shape is not a list of integers from 0 to 2**63-1: {show(shape)}")
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets are not two integers, begin <= end: {show(offsets)}")
    begin, end = offsets
    nbytes = _count_bytes(dtype, shape)
    if nbytes != end - begin:
        what = f"{dtype} of shape {show(shape)}"
        raise ValueError(f"{what} takes {nbytes} bytes, data_offsets {offsets} hold {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), file, data_offset + begin, nbytes)


def _count_bytes(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor; strides must fit 63 bits too, so an empty tensor may not hide huge dimensions."""
    num_bits = DTYPES[dtype][0]
    for size in shape:
        num_bits *= size or 1
        if num_bits > MAX_INT:
            raise ValueError(f"{dtype} of shape {show(shape)} overflows: more than 2**63-1 bits")
    if 0 in shape:
        return 0
    if num_bits % 8:
        raise ValueError(f"{dtype} of shape {show(shape)} takes {num_bits} bits and ends inside a byte")
    return num_bits // 8


def _check_tiling(tensors: Sequence[TensorEntry], data_offset: int, file_nbytes: int, url: str) -> None:
    """Refuses overlaps, holes, and a data area that does not end where the file ends."""
    end = data_offset
    for entry in tensors:
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise ManifestError(
                f"{url}: tensor {show(entry.name)} {what}: it begins at data offset"
                f" {entry.offset - data_offset}, not at {end - data_offset}"
            )
        end += entry.nbytes
    sizes = f"the file has {file_nbytes} bytes, its header describes {end}"
    if end > file_nbytes:
        raise ManifestError(f"{url}: truncated, {end - file_nbytes} bytes are missing: {sizes}")
    if end < file_nbytes:
        raise ManifestError(f"{url}: {file_nbytes - end} trailing bytes: {sizes}")


# Reading


def _assemble_recorded(storage: Storage) -> Manifest:
    """Reads what the commit record names."""
    text = _read_record(storage)
    record = parse_record(text, url_of(storage, RECORD_NAME))
    names = [file.name for file in record.files]
    try:
        stats = stat_all(storage, names)
    except ManifestError as missing:
        raise IncompleteCheckpoint(f"{missing}, although {RECORD_NAME} names them") from None
    for file in record.files:
        if stats[file.name].nbytes != file.nbytes:
            sizes = f"{stats[file.name].nbytes} bytes, of {file.nbytes} that {RECORD_NAME} records"
            raise ManifestError(f"{url_of(storage, file.name)}: has {sizes}")
    manifest = _assemble(storage, stats, {file.name: file for file in record.files})
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
    )


def _read_record(storage: Storage) -> bytes:
    url = url_of(storage, RECORD_NAME)
    nbytes = stat_all(storage, [RECORD_NAME])[RECORD_NAME].nbytes
    if nbytes > MAX_RECORD_BYTES:
        raise ManifestError(f"{url}: record of {nbytes} bytes is over the limit of {MAX_RECORD_BYTES}")
    return read_bytes(storage, RECORD_NAME, 0, nbytes)


def _assemble(
    storage: Storage, stats: Mapping[str, FileStat], recorded: Mapping[str, RecordedFile] | None = None
) -> Manifest:
    """Reads the headers of the files, given in name order, and merges them."""

    def read(item: tuple[int, tuple[str, FileStat]]) -> tuple[FileEntry, list[TensorEntry], dict[str, str]]:
        number, (name, stat) = item
        read_header = _read_header if recorded is None else partial(_read_recorded_header, recorded[name])
        header = read_header(storage, name, stat)
        tensors, metadata = parse_header(header, stat.nbytes, url_of(storage, name), number)
        digest = xxhash.xxh3_128_hexdigest(header)
        return FileEntry(name, stat.nbytes, stat.version, digest), tensors, metadata

    files, tensors, metadata = [], [], dict[str, str]()
    for file, entries, file_metadata in in_threads(read, list(enumerate(stats.items()))):
        files.append(file)
        tensors += entries
        metadata = file_metadata | metadata
    _check_names(storage.url, files, tensors)
    return Manifest(storage.url, tuple(files), tuple(tensors), metadata)


def _read_header(storage: Storage, name: str, stat: FileStat) -> bytes:
    """Reads the JSON text of a header."""
    url = url_of(storage, name)
    if stat.nbytes < _LENGTH_BYTES:
        raise ManifestError(f"{url}: {stat.nbytes} bytes are too few for a safetensors file")
    prefix = read_bytes(storage, name, 0, _LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, stat.nbytes - _LENGTH_BYTES)
    if length > limit:
        # Text, zip and pickle files end here: what they start with tells them apart.
        kind = next((kind for start, kind in _TORCH_FILES.items() if prefix.startswith(start)), None)
        if kind is not None:
            hint = "`fastload convert` makes a checkpoint of files of torch.save"
            raise ManifestError(f"{url}: no safetensors file but {kind}: {hint}")
        raise ManifestError(
            f"{url}: header length of {length} bytes is over the limit of {limit} (file size:"
            f" {stat.nbytes}); the file starts with {prefix!r}"
        )
    return read_bytes(storage, name, _LENGTH_BYTES, length)


def _read_recorded_header(file: RecordedFile, storage: Storage, name: str, stat: FileStat) -> bytes:
    """Reads the JSON text of a header whose length and checksum are known: in one request."""
    url = url_of(storage, name)
    length = file.header_bytes - _LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise ManifestError(f"{url}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    for _ in range(2):  # once more, since what went wrong on the way may go right the next time
        header = read_bytes(storage, name, 0, file.header_bytes)
        if checksum(header) == file.header_checksum:
            break
    else:
        wrong = f"checksum {file.header_checksum.hex()} expected, {checksum(header).hex()} found"
        raise ChecksumError(f"{url} [bytes 0-{file.header_bytes}]: the header is damaged: {wrong}")
    if int.from_bytes(header[:_LENGTH_BYTES], "little") != length:
        raise ManifestError(f"{url}: its header is not of the {length} bytes that {RECORD_NAME} records")
    return header[_LENGTH_BYTES:]


def _check_names(url: str, files: Sequence[FileEntry], tensors: Sequence[TensorEntry]) -> None:
    """Refuses a tensor that two files hold: nothing says which of the two is meant."""
    owner: dict[str, int] = {}
    for entry in tensors:
        first = owner.setdefault(entry.name, entry.file)
        if first != entry.file:
            raise ManifestError(
                f"{url}: tensor {show(entry.name)} is in two files, {files[first].name!r} and"
                f" {files[entry.file].name!r}; to load one of them, name the file"
            )


def _find_index(url: str, listing: Sequence[str]) -> str | None:
    if INDEX_NAME in listing:
        return INDEX_NAME
    indexes = _ending_in(INDEX_SUFFIX, listing)
    if len(indexes) > 1:
        raise ManifestError(f"{url}: several indexes, none named {INDEX_NAME!r}: {show(indexes)}")
    return indexes[0] if indexes else None


def _find_files(url: str, listing: Sequence[str]) -> list[str]:
    names = _ending_in(SUFFIX, listing)
    if not names:
        found = f"its {len(listing)} files are {show(sorted(listing))}" if listing else "it has no files"
        if any(name.endswith(TORCH_ENDINGS) for name in listing):
            found += " (`fastload convert` reads files of torch.save)"
        raise CheckpointNotFound(f"{url}: no *{SUFFIX} files in this directory; {found}")
    return names


def _ending_in(suffix: str, listing: Sequence[str]) -> list[str]:
    # A leading dot marks what is no part of the checkpoint: a copy in flight, a resource fork.
    return sorted(name for name in listing if name.endswith(suffix) and not name.startswith("."))


def _read_index(storage: Storage, index: str) -> dict[str, str]:
    """Returns the ``weight_map`` of an index: tensor name → file name, safe to look up below the root."""
    url = url_of(storage, index)
    stat = stat_all(storage, [index])[index]
    if stat.nbytes > _MAX_INDEX_BYTES:
        raise ManifestError(f"{url}: index of {stat.nbytes} bytes is over the limit of {_MAX_INDEX_BYTES}")
    weight_map = parse_json(read_bytes(storage, index, 0, stat.nbytes), f"{url}: index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ManifestError(f"{url}: weight_map is not an object that names files but {show(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_path(file):
            raise ManifestError(f"{url}: tensor {show(name)}: not a plain relative file name: {show(file)}")
    return weight_map


def _check_index(url: str, weight_map: Mapping[str, str], manifest: Manifest) -> None:
    for name, file in weight_map.items():
        entry = manifest.by_name.get(name)
        if entry is None or manifest.files[entry.file].name != file:
            where = "no file holds it" if entry is None else f"it is in {manifest.files[entry.file].name!r}"
            raise ManifestError(f"{url}: tensor {show(name)} is not in {show(file)}: {where}")
    if len(manifest.tensors) > len(weight_map):
        logger.info("%s: %d tensors are not in the index", url, len(manifest.tensors) - len(weight_map))
