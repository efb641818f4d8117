"""Reads safetensors files: one, or several with or without the Hugging Face index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import xxhash

from fastload.base.registry import extension_module
from fastload.base.threads import in_threads
from fastload.errors import FastloadError, IncompleteCheckpoint, ManifestError
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.formats.names import BIN_NAME, INDEX_NAME, INDEX_SUFFIX, SUFFIX, missing_files
from fastload.formats.reading import (
    do_at_once,
    read_bytes,
    read_limited,
    reads_at_once,
    stat_all,
    what_instead,
)
from fastload.formats.safetensors.header import LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from fastload.formats.untrusted import is_plain_path, parse_json, show
from fastload.storage.base import FileStat, Storage

logger = logging.getLogger(__name__)

_SHARDING_KEY = "DCP_SHARDING_INFO"  # of files that hold shards of tensors, which only an extension joins

_MAX_INDEX_BYTES = 100_000_000
NEAR_BYTES = 64 << 10
"""Bytes that are read at first where each request takes a round trip: more than most headers have."""


def has_files(listing: Sequence[str]) -> bool:
    """Whether a directory holds safetensors files, or their index."""
    return bool(_ending_in((SUFFIX, INDEX_SUFFIX), listing))


def read_file(storage: Storage, name: str, stat: FileStat, *, exact: bool = True) -> Manifest:
    """Reads a checkpoint of a single file; always exactly.

    Raises:
        ManifestError: It is malformed.
        StorageError: Storage failed.
    """
    return assemble(storage, {name: stat}, partial(_read_header, storage))


def read_folder(storage: Storage, listing: Sequence[str], *, exact: bool = True) -> Manifest:
    """Reads a directory with an index, or of ``*.safetensors`` files; always exactly.

    With an index, only its files are read, in full: as in transformers, tensors that the index does not list
    are loaded, too. If two files hold a tensor, the index chooses one. Names that start with a dot are
    ignored. ``__metadata__`` of several files are merged; the first file in name order wins. A single file
    next to an index that does not name it is read instead; see `choose_single`.

    Raises:
        IncompleteCheckpoint: A file is missing that the index, or the numbers in names, require.
        ManifestError: A header or the index is malformed, or they contradict each other.
        StorageError: Storage failed.
    """
    index, names = _find_index(storage, listing), _ending_in((SUFFIX,), listing)
    if index is None:
        require_numbered(storage.url, names)
        return assemble(storage, stat_all(storage, names), partial(_read_header, storage))
    # Headers need not wait for the index where a listing has the names of the files.
    early = [] if storage.probes else [*filter(is_plain_path, names)][: reads_at_once(storage)]
    tasks = [partial(_try_header, storage, name) for name in early]
    (weight_map, digest), *found = do_at_once(storage, [partial(read_index, storage, index), *tasks])
    headers = dict(zip(early, found, strict=True))

    def read_header(name: str, nbytes: int) -> bytes:
        return headers.get(name) or _read_header(storage, name, nbytes)

    single = find_single(storage, listing, index, weight_map, f"model{SUFFIX}")
    if single is not None:
        manifest = assemble(storage, stat_all(storage, [single]), read_header)
        choose_single(storage, index, weight_map, single, manifest.by_name)
        return manifest
    stats = stat_all(storage, sorted(set(weight_map.values())))
    manifest = assemble(storage, stats, read_header, weight_map)
    _check_index(storage.label(index), weight_map, manifest)
    return replace(manifest, index_digest=digest)


def require_numbered(url: str, names: Sequence[str], also: str = "") -> None:
    """Requires that no file is missing according to the numbers in names.

    Args:
        url: The directory, for messages.
        names: The names of its files.
        also: Another file that is missing.

    Raises:
        IncompleteCheckpoint: Some file is missing.
    """
    missing = [*([also] if also else []), *missing_files(names)]
    if missing:
        raise IncompleteCheckpoint(
            f"{url}: files are missing, by the names of the others: {show(missing)}; to load one of the "
            "others, name it"
        )


def find_single(
    storage: Storage, listing: Sequence[str], index: str, weight_map: Mapping[str, str], preferred: str
) -> str | None:
    """Returns the name of a single file next to an index that does not name it; None if there is none.

    Args:
        storage: The storage.
        listing: The names of the files.
        index: The name of the index.
        weight_map: What it says.
        preferred: The file that transformers loads.
    """
    names = list(dict.fromkeys([preferred, index.removesuffix(".index.json")]))
    if not set(weight_map.values()).isdisjoint(names):
        return None
    single = [name for name in names if name in listing]
    if not single and list(listing) == [index] and storage.stat(preferred) is not None:  # not all is listed
        single = [preferred]
    return single[0] if single else None


def choose_single(
    storage: Storage, index: str, weight_map: Mapping[str, str], single: str, names: Collection[str]
) -> None:
    """Decides that a single file is meant, and not the index next to it.

    transformers prefers the file. Its `save_pretrained` removes the files of a model that was there before,
    and leaves their index.

    Args:
        storage: The storage.
        index: The name of the index.
        weight_map: What it says.
        single: The name of the file.
        names: The names of what it holds.

    Raises:
        ManifestError: Both could be meant.
    """
    files = sorted(set(weight_map.values()))
    is_preferred = single in (f"model{SUFFIX}", BIN_NAME)
    if not (is_preferred and set(names) == set(weight_map)) and all(
        in_threads(storage.stat, files, reads_at_once(storage))
    ):
        raise ManifestError(
            f"{storage.url}: two models: one in {single!r}, and the one of {index!r}: remove one of them, or "
            "name the file"
        )
    logger.warning("%s: %s is loaded, not the files that %s names", storage.url, single, index)


def header_digest(storage: Storage, name: str, nbytes: int) -> str:
    """Returns the `FileEntry.header_digest` of a file on this rank.

    Raises:
        ManifestError: It has no header.
    """
    return xxhash.xxh3_128_hexdigest(_read_header(storage, name, nbytes))


def assemble(
    storage: Storage,
    stats: Mapping[str, FileStat],
    read_header: Callable[[str, int], bytes],
    weight_map: Mapping[str, str] | None = None,
) -> Manifest:
    """Reads the headers of some files and merges them.

    Args:
        storage: The storage.
        stats: Sizes and versions of the files, in name order.
        read_header: Returns the JSON text of a header, given the name and size of its file.
        weight_map: The file to use for a tensor that several files hold.

    Raises:
        ManifestError: A header is malformed, or several files hold a tensor that `weight_map` lacks.
    """

    def read(item: tuple[int, tuple[str, FileStat]]) -> tuple[FileEntry, list[TensorEntry], dict[str, str]]:
        number, (name, stat) = item
        header = read_header(name, stat.nbytes)
        tensors, metadata = parse_header(header, stat.nbytes, storage.label(name), number)
        digest = xxhash.xxh3_128_hexdigest(header)
        return FileEntry(name, stat.nbytes, stat.version, digest), tensors, metadata

    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    metadata: dict[str, str] = {}
    shards: dict[int, str] = {}
    for file, entries, file_metadata in in_threads(
        read, list(enumerate(stats.items())), reads_at_once(storage)
    ):
        if _SHARDING_KEY in file_metadata:
            shards[len(files)] = file_metadata.pop(_SHARDING_KEY)
        files.append(file)
        tensors += entries
        metadata = file_metadata | metadata
    if shards:
        tensors = extension_module("formats.joined").join_shards(tensors, shards, storage.url)
    else:
        tensors = _select(storage.url, files, tensors, weight_map or {})
    return Manifest(storage.url, tuple(files), tuple(tensors), metadata)


def _read_header(storage: Storage, name: str, nbytes: int) -> bytes:
    """Reads the JSON text of a header."""
    url = storage.label(name)
    if not nbytes:
        raise ManifestError(f"{url}: the file is empty")
    if nbytes < LENGTH_BYTES:
        raise ManifestError(f"{url}: {nbytes} bytes are too few for a safetensors file")
    near = read_bytes(storage, name, 0, LENGTH_BYTES if storage.probes else min(nbytes, NEAR_BYTES))
    prefix = near[:LENGTH_BYTES]
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, nbytes - LENGTH_BYTES)
    if length > limit:
        # Files of other kinds end here.
        if _is_text(prefix) and (instead := what_instead(storage, name, nbytes)):
            raise ManifestError(f"{url}: {instead}")
        raise ManifestError(
            f"{url}: header length of {length} bytes is over the limit of {limit} (file size:"
            f" {nbytes}); the file starts with {prefix!r}"
        )
    header = near[LENGTH_BYTES:][:length]
    return header + read_bytes(storage, name, LENGTH_BYTES + len(header), length - len(header))


def _try_header(storage: Storage, name: str) -> bytes:
    """Reads a header; empty if that fails, since the file need not be part of the checkpoint."""
    try:
        stat = storage.stat(name)
        return b"" if stat is None else _read_header(storage, name, stat.nbytes)
    except FastloadError:
        return b""


def _is_text(prefix: bytes) -> bool:
    text = prefix.rstrip(b"\0").lstrip(b"\xef\xbb\xbf \t\r\n")
    return text.isascii() and text.decode().isprintable()


def _select(
    url: str, files: Sequence[FileEntry], tensors: list[TensorEntry], weight_map: Mapping[str, str]
) -> list[TensorEntry]:
    """Keeps, of tensors with the same name, the one in the file of the index."""
    owner: dict[str, int] = {}
    holders: dict[str, list[int]] = {}
    for entry in tensors:
        first = owner.setdefault(entry.name, entry.file)
        if first != entry.file:
            holders.setdefault(entry.name, [first]).append(entry.file)
    if not holders:
        return tensors
    for name, numbers in holders.items():
        names = [files[number].name for number in numbers]
        if weight_map.get(name) not in names:
            raise ManifestError(
                f"{url}: tensor {show(name)} is in two files, {names[0]!r} and {names[1]!r}; to load one of "
                "them, name the file"
            )
    return [
        entry
        for entry in tensors
        if entry.name not in holders or files[entry.file].name == weight_map[entry.name]
    ]


def _find_index(storage: Storage, listing: Sequence[str]) -> str | None:
    if INDEX_NAME in listing:
        return INDEX_NAME
    if storage.probes and INDEX_NAME in storage.folders(INDEX_NAME):
        raise ManifestError(f"{storage.label(INDEX_NAME)}: the index is no file")
    indexes = _ending_in((INDEX_SUFFIX,), listing)
    if len(indexes) > 1:
        raise ManifestError(f"{storage.url}: several indexes, none named {INDEX_NAME!r}: {show(indexes)}")
    return indexes[0] if indexes else None


def _ending_in(endings: tuple[str, ...], listing: Sequence[str]) -> list[str]:
    # A leading dot marks files that are no part of the checkpoint: unfinished copies, resource forks.
    return sorted(name for name in listing if name.endswith(endings) and not name.startswith("."))


def _check_index(url: str, weight_map: Mapping[str, str], manifest: Manifest) -> None:
    for name, file in weight_map.items():
        entry = manifest.by_name.get(name)
        if entry is None or manifest.files[entry.file].name != file:
            where = "no file holds it" if entry is None else f"it is in {manifest.files[entry.file].name!r}"
            raise ManifestError(f"{url}: tensor {show(name)} is not in {show(file)}: {where}")
    if len(manifest.tensors) > len(weight_map):
        logger.info("%s: %d tensors are not in the index", url, len(manifest.tensors) - len(weight_map))


def read_index(storage: Storage, index: str) -> tuple[dict[str, str], str]:
    """Reads an index.

    Returns:
        Its ``weight_map``: tensor name → file name, safe to look up below the root; and its
        `Manifest.index_digest`.

    Raises:
        ManifestError: It is malformed, or there is none.
    """
    url = storage.label(index)
    text = read_limited(storage, index, "index", _MAX_INDEX_BYTES)
    weight_map = parse_json(text, f"{url}: index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ManifestError(f"{url}: weight_map is not an object that names files but {show(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_path(file):
            raise ManifestError(f"{url}: tensor {show(name)}: not a plain relative file name: {show(file)}")
    return weight_map, xxhash.xxh3_128_hexdigest(text)
