"""Reads files of torch.save, zip archives since torch 1.6, without running code in them.

Each storage is an uncompressed record ``data/N``, so each tensor is a byte range of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from operator import attrgetter
from typing import NamedTuple

import torch
import xxhash

from fastload.errors import ManifestError
from fastload.ext.formats.torch_save.archive import ZipDirectory, ZipRecord, read_directory
from fastload.ext.formats.torch_save.state import PickledState, StoredTensor, encode_pickle
from fastload.ext.formats.torch_save.unpickle import unpickle
from fastload.formats.dtypes import NAMES
from fastload.formats.manifest import FileEntry, Guard, Manifest, Piece, TensorEntry, in_order
from fastload.formats.reading import ReadRange, read_ends, reads_at_once
from fastload.formats.untrusted import MemoryBudget, show
from fastload.geometry.box import Box
from fastload.storage.base import FileStat, Storage

_MAX_PICKLE_BYTES = 1 << 26  # a hundred times that of a large model; its objects take far more
_END_BYTES = 128 << 10  # read at first where each request takes a round trip: as fast as a few bytes
_NEAR_BYTES = 4096  # of the small records after the pickle
_MOST_REPEATED = 4  # bytes of overlapping views over bytes stored
_REPEATED_ANYWAY_BYTES = 1 << 20


class Archive(NamedTuple):
    """The contents of a file of torch.save.

    Attributes:
        pickle: The bytes of ``data.pkl``.
        storages: The record of each storage, by its key.
        digest: xxh3-128 of directory and pickle.
    """

    pickle: bytes
    storages: Mapping[str, ZipRecord]
    digest: str


def read_file(
    storage: Storage,
    name: str,
    stat: FileStat,
    *,
    exact: bool = False,
    budget: MemoryBudget | None = None,
    state_name: str = "",
    local_shards: bool = False,
) -> Manifest:
    """Reads the manifest of a single file.

    Args:
        storage: The storage.
        name: The file.
        stat: Its size and version.
        exact: Whether to read the bytes before each storage; else guards expect them.
        budget: The budget of a checkpoint with several files.
        state_name: Name of its state in a larger one, which begins the names of its tensors.
        local_shards: Whether the local tensor stands for a DTensor.

    Raises:
        ManifestError: It is malformed.
        StorageError: Storage failed.
    """
    where = storage.label(name)
    archive = _open(storage, name, stat.nbytes, exact=exact)
    inside = f"{where}: data.pkl"
    value, nbytes = unpickle(archive.pickle, inside), len(archive.pickle)
    state = encode_pickle(value, nbytes, inside, state_name, budget=budget, local_shards=local_shards)
    return manifest_of(storage, name, stat, state, archive.storages, archive.digest)


def manifest_of(
    storage: Storage,
    name: str,
    stat: FileStat,
    state: PickledState,
    storages: Mapping[str, ZipRecord],
    digest: str,
) -> Manifest:
    """Returns the manifest of a file of torch.save.

    Args:
        storage: The storage.
        name: The file.
        stat: Its size and version.
        state: Its state.
        storages: The record of each storage, by its key.
        digest: Its `FileEntry.header_digest`.

    Raises:
        ManifestError: A storage is missing, or too short.
    """
    entries = entries_of(state.tensors, storages, storage.label(name), stat.nbytes)
    files = (FileEntry(name, stat.nbytes, stat.version, digest),)
    guarded = [record for record in storages.values() if record.head and record.nbytes]
    guarded.sort(key=attrgetter("offset"))
    guards = tuple(Guard(0, record.offset, number) for number, record in enumerate(guarded))
    heads = tuple(record.head for record in guarded)
    return Manifest(
        storage.url,
        files,
        tuple(entries),
        structure=state.structure,
        format="torch",
        guards=guards,
        heads=heads,
    )


def header_digest(storage: Storage, name: str, nbytes: int) -> str:
    """Returns the `FileEntry.header_digest` of a file on this rank.

    Raises:
        ManifestError: It is malformed.
    """
    return _open(storage, name, nbytes, exact=False).digest


def _open(storage: Storage, name: str, nbytes: int, *, exact: bool) -> Archive:
    head_bytes = 0 if storage.probes else _END_BYTES
    read = read_ends(storage, name, 0, nbytes, head_bytes, _END_BYTES)
    num_reads = 1 if storage.probes else reads_at_once(storage)
    return open_archive(read, nbytes, storage.label(name), exact=exact, num_reads=num_reads)


def open_archive(
    read: ReadRange, nbytes: int, where: str, *, exact: bool = True, num_reads: int = 1
) -> Archive:
    """Finds the pickle and the storages in an archive.

    Args:
        read: Reads from the archive.
        nbytes: Its length.
        where: The archive, for messages.
        exact: As for `read_file`.
        num_reads: Most reads at once.

    Raises:
        ManifestError: It is no file of torch.save, or big-endian.
    """
    directory = read_directory(read, nbytes, where, exact=exact, num_reads=num_reads)
    prefix = _prefix(directory, where)
    inner = {
        name[len(prefix) :]: record for name, record in directory.records.items() if name.startswith(prefix)
    }
    if "constants.pkl" in inner:
        raise ManifestError(f"{where}: a TorchScript archive, which holds a program: torch.jit.load reads it")
    if directory.compressed:
        raise ManifestError(
            f"{where}: {show(directory.compressed[0])} is compressed, as torch.save writes none"
        )
    pickle, order = _read_together(read, inner["data.pkl"], inner.get("byteorder"), where)
    if order not in (None, b"little"):
        raise ManifestError(f"{where}: byte order {show(order)}: only little-endian files are read")
    storages = {
        name.removeprefix("data/"): record for name, record in inner.items() if name.startswith("data/")
    }
    digest = xxhash.xxh3_128(directory.text)
    digest.update(pickle)
    return Archive(pickle, storages, digest.hexdigest())


def _prefix(directory: ZipDirectory, where: str) -> str:
    found = [
        name.removesuffix("data.pkl")
        for name in directory.records
        if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if len(found) != 1:
        what = f"it has {show(found)}" if found else "it has no data.pkl"
        raise ManifestError(f"{where}: a zip archive, but not as torch.save writes it: {what}")
    return found[0]


def _read_together(
    read: ReadRange, pickle: ZipRecord, order: ZipRecord | None, where: str
) -> tuple[bytes, bytes | None]:
    """Reads the pickle, and the byte order in the same request, if it is near."""
    if pickle.nbytes > _MAX_PICKLE_BYTES:
        raise ManifestError(
            f"{where}: data.pkl of {pickle.nbytes} bytes is over the limit of {_MAX_PICKLE_BYTES}"
        )
    if order is None:
        return read(pickle.offset, pickle.nbytes), None
    begin = min(pickle.offset, order.offset)
    end = max(pickle.offset + pickle.nbytes, order.offset + order.nbytes)
    if order.nbytes > _NEAR_BYTES or end - begin > pickle.nbytes + _NEAR_BYTES:
        return read(pickle.offset, pickle.nbytes), read(order.offset, min(order.nbytes, _NEAR_BYTES))
    both = read(begin, end - begin)
    return both[pickle.offset - begin :][: pickle.nbytes], both[order.offset - begin :][: order.nbytes]


def entries_of(
    tensors: Mapping[str, StoredTensor],
    storages: Mapping[str, ZipRecord],
    where: str,
    nbytes: int,
    file: int = 0,
    begin: int = 0,
) -> list[TensorEntry]:
    """Returns the entries of tensors in a file.

    Args:
        tensors: The tensors within their storages, by name.
        storages: The record of each storage, by its key.
        where: The archive, for messages.
        nbytes: Length of the archive.
        file: Index of the file.
        begin: Offset of the archive in the file.

    Raises:
        ManifestError: A storage is missing, or too short.
    """
    entries = []
    for name, tensor in tensors.items():
        record = storages.get(tensor.storage)
        if record is None:
            raise ManifestError(f"{where}: tensor {show(name)}: there is no storage {show(tensor.storage)}")
        if (tensor.offset + tensor.span) * tensor.dtype.itemsize > record.nbytes and tensor.span:
            what = f"{list(tensor.shape)} with strides {list(tensor.strides)} at {tensor.offset}"
            over = f"reaches beyond its storage of {record.nbytes} bytes"
            raise ManifestError(f"{where}: tensor {show(name)}: {what} {over}")
        entries.append(_entry(name, tensor, file, begin + record.offset))
    require_few_repeated(entries, nbytes, where)
    return in_order(entries)


def require_few_repeated(entries: Iterable[TensorEntry], nbytes: int, where: str) -> None:
    """Requires that tensors, which may share bytes, do not need far more memory than their files have bytes.

    Raises:
        ManifestError: They do.
    """
    total = sum(entry.nbytes for entry in entries)
    if total > max(_MOST_REPEATED * nbytes, _REPEATED_ANYWAY_BYTES):
        raise ManifestError(f"{where}: {total} bytes of tensors in {nbytes} bytes: they repeat each other")


def _entry(name: str, tensor: StoredTensor, file: int, storage: int) -> TensorEntry:
    shape, strides, dtype = tensor.shape, tensor.strides, NAMES.get(tensor.dtype)
    offset = storage + tensor.offset * tensor.dtype.itemsize
    nbytes = prod(shape) * tensor.dtype.itemsize
    if tensor.dtype is torch.complex128:  # stored as pairs of float64
        shape, dtype = (*shape, 2), "F64"
        strides = (*(2 * stride for stride in strides), 1)
    if dtype == "F4":
        shape = (*shape[:-1], 2 * shape[-1])
    assert dtype is not None  # which `encode_pickle` refuses
    if not nbytes:
        return TensorEntry(name, dtype, shape, file, storage, 0)
    if tensor.is_contiguous:
        return TensorEntry(name, dtype, shape, file, offset, nbytes)
    piece = Piece(Box.whole(shape), file, offset, tensor.span * tensor.dtype.itemsize, strides)
    return TensorEntry(name, dtype, shape, file, offset, nbytes, (piece,))
