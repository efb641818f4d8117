"""Reads files of torch.save from before torch 1.6, without running code in them.

A file begins with five pickles: a magic number, the version, the byte order of the machine, the state, and
the keys of the storages. The storages follow, each after its number of elements in 8 bytes.
"""

from __future__ import annotations

from typing import Any

import xxhash

from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.ext.formats.torch_save.archive import ZipRecord
from fastload.ext.formats.torch_save.state import StorageRef, encode_pickle
from fastload.ext.formats.torch_save.unpickle import PickledDict, Truncated, persistent_ids, unpickle_first
from fastload.ext.formats.torch_save.zip_file import manifest_of
from fastload.formats.manifest import Manifest
from fastload.formats.reading import read_bytes, reads_at_once
from fastload.formats.untrusted import MemoryBudget, show
from fastload.storage.base import FileStat, Storage

_VERSION = 1001
_NUM_PICKLES = 5
_LENGTH_BYTES = 8
_FIRST_BYTES, _MAX_BYTES = 1 << 20, 1 << 24


def read_file(
    storage: Storage,
    name: str,
    stat: FileStat,
    *,
    exact: bool = False,
    budget: MemoryBudget | None = None,
) -> Manifest:
    """Reads the manifest of a single file.

    Args:
        storage: The storage.
        name: The file.
        stat: Its size and version.
        exact: Whether to read the number before each storage; else guards expect it.
        budget: The budget of a checkpoint with several files.

    Raises:
        ManifestError: It is malformed, or big-endian.
        StorageError: Storage failed.
    """
    where = storage.label(name)
    (_, version, about, state, keys), head = _read_pickles(storage, name, stat.nbytes)
    if version != _VERSION or type(about) is not PickledDict:
        raise ManifestError(f"{where}: a file of torch.save, of version {show(version)}, which none has")
    if about.by_text(where).get("little_endian") is not True:
        raise ManifestError(f"{where}: a big-endian file: only little-endian ones are read")
    storages = _locate(state, keys, len(head), stat.nbytes, where)
    if exact:

        def read(record: ZipRecord) -> bytes:
            return read_bytes(storage, name, record.header, _LENGTH_BYTES)

        found = in_threads(read, [*storages.values()], reads_at_once(storage))
        for (key, record), head in zip([*storages.items()], found, strict=True):
            if head != record.head:
                raise ManifestError(f"{where}: storage {show(key)} is not as long as its state says")
            storages[key] = record._replace(head=b"")
    encoded = encode_pickle(state, len(head), where, budget=budget)
    return manifest_of(storage, name, stat, encoded, storages, xxhash.xxh3_128_hexdigest(head))


def header_digest(storage: Storage, name: str, nbytes: int) -> str:
    """Returns the `FileEntry.header_digest` of a file on this rank.

    Raises:
        ManifestError: It is malformed.
    """
    return xxhash.xxh3_128_hexdigest(_read_pickles(storage, name, nbytes)[1])


def _read_pickles(storage: Storage, name: str, nbytes: int) -> tuple[list[Any], bytes]:
    """Returns the values of the pickles before the storages, and the bytes of the pickles."""
    head = b""
    while True:
        wanted = min(nbytes, _MAX_BYTES, max(_FIRST_BYTES, 4 * len(head)))
        head += read_bytes(storage, name, len(head), wanted - len(head))
        try:
            found, end = [], 0
            for _ in range(_NUM_PICKLES):
                value, end = unpickle_first(head, storage.label(name), end)
                found.append(value)
        except Truncated:
            if len(head) == min(nbytes, _MAX_BYTES):
                raise
        else:
            return found, head[:end]


def _locate(state: Any, keys: Any, begin: int, nbytes: int, where: str) -> dict[str, ZipRecord]:
    """Returns the places of the storages, which follow each other up to the end of the file."""
    ids = [one for one in persistent_ids(state) if type(one) is tuple and one[:1] == ("storage",)]
    lengths = {ref.key: ref.dtype.itemsize for ref in (StorageRef.of(one, where) for one in ids)}
    counts = {one[2]: one[4] for one in ids}
    if type(keys) is not list or not all(type(key) is str for key in keys) or {*keys} != {*counts}:
        raise ManifestError(f"{where}: its storages are not those that its state names")
    found, at = {}, begin
    for key in keys:
        length, head = counts[key] * lengths[key], counts[key].to_bytes(_LENGTH_BYTES, "little")
        found[key] = ZipRecord(key, at, at + _LENGTH_BYTES, length, head)
        at += _LENGTH_BYTES + length
    if at != nbytes or len(found) < len(keys):
        there = nbytes - begin
        raise ManifestError(f"{where}: its storages take {at - begin} bytes, of {there} that are there")
    return found
