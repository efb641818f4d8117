"""safetensors files and the Hugging Face index: what they hold, read strictly.

A checkpoint is untrusted. A file that gets past this module has a header that the reference library
accepts too, and tensors that tile its data area exactly; whatever else a file claims is refused with a
`ManifestError` that says where and why, before anything of the claimed size is allocated.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import xxhash

from fastload.errors import CheckpointNotFound, ManifestError
from fastload.formats.dtypes import DTYPES
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.storage.base import FileStat, Storage

__all__ = ["MAX_HEADER_BYTES", "header_digest", "parse_header", "read_manifest"]

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000  # the reference library's limit
_MAX_INDEX_BYTES = 100_000_000
_MAX_INT = 2**63 - 1
_LENGTH_BYTES = 8  # the little-endian u64 before the header
_NUM_READERS = 8  # headers read at once; network storage answers each after a round trip

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_MODEL_INDEX = "model.safetensors.index.json"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlist, _repr.maxlevel = 200, 200, 16, 3

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def read_manifest(storage: Storage) -> Manifest | None:
    """Finds and reads the checkpoint at the root of a storage.

    The root is one file, a directory with an index, or a directory of ``*.safetensors`` files. The
    index wins over other files in the directory; the files it names are taken whole, as transformers
    does: a tensor they hold that the index does not list is loaded all the same. Names that start with
    a dot are passed over. ``__metadata__`` is merged; the first file in name order wins.

    Args:
        storage: Where to look; its methods are called from several threads. Of each file the 8 bytes
            of the header length and the header are read, nothing else.

    Returns:
        The manifest, or None if nothing exists at the root.

    Raises:
        CheckpointNotFound: The root is a directory without safetensors files.
        ManifestError: A header or the index is malformed, or they contradict each other or the files.
        StorageError: Storage failed.
    """
    listing = storage.list()
    if listing is None:
        stat = storage.stat("")
        return None if stat is None else _assemble(storage, {"": stat})
    index = _find_index(storage.url, listing)
    if index is None:
        return _assemble(storage, _stat_all(storage, _find_files(storage.url, listing)))
    weight_map = _read_index(storage, index)
    manifest = _assemble(storage, _stat_all(storage, sorted(set(weight_map.values()))))
    _check_index(_url(storage, index), weight_map, manifest)
    return manifest


def header_digest(storage: Storage, name: str, file_nbytes: int) -> str:
    """Returns the `FileEntry.header_digest` of a file as it is here; empty if it has no header."""
    if file_nbytes < _LENGTH_BYTES:
        return ""
    length = int.from_bytes(_read(storage, name, 0, _LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, file_nbytes - _LENGTH_BYTES):
        return ""
    return xxhash.xxh3_128_hexdigest(_read(storage, name, _LENGTH_BYTES, length))


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
    raw = _parse_json(header, f"{url}: header")
    metadata = _parse_metadata(raw.pop("__metadata__", {}), url)
    data_offset = _LENGTH_BYTES + len(header)
    tensors = []
    for name in list(raw):
        try:
            # pop, so that the garbage collector never sees both forms of a large header
            tensors.append(_parse_entry(name, raw.pop(name), file, data_offset))
        except ValueError as error:
            raise ManifestError(f"{url}: tensor {_show(name)}: {error}") from None
    tensors.sort(key=attrgetter("offset", "nbytes", "name"))
    _check_tiling(tensors, data_offset, file_nbytes, url)
    return tensors, metadata


def _show(value: Any) -> str:
    """A value of the file for a message, cut short however long a hostile file made it."""
    text = _repr.repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


# Parsing. A ValueError from here says what is wrong; the caller adds where.


def _parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object, no more liberal than the reference's parser."""
    try:
        value = _DECODER.decode(text.decode())
    except RecursionError:
        raise ManifestError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ManifestError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{where} is not a JSON object but {_show(value)}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses what json.loads would take: an object that says two things of one key."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {_show(twice)} appears twice in {_show(pairs)}")
    return fields


def _parse_int(text: str) -> int | float:
    """Reads an integer; ``-0`` and what cannot fit 64 bits become floats, as the reference reads them.

    So they are refused wherever an integer is due, and no number costs more than its digits.
    """
    return int(text) if len(text) < 20 and text != "-0" else float(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_int=_parse_int, parse_constant=_refuse_constant
)


def _parse_metadata(raw: Any, url: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise ManifestError(f"{url}: __metadata__ is not an object of texts but {_show(raw)}")
    for key, value in raw.items():
        if not (isinstance(value, str) and _is_unicode(key) and _is_unicode(value)):
            raise ManifestError(f"{url}: __metadata__ {_show(key)} is not a valid text: {_show(value)}")
    return raw


def _parse_entry(name: str, fields: Any, file: int, data_offset: int) -> TensorEntry:
    if not _is_unicode(name):
        raise ValueError("its name is not valid Unicode")
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_KEYS:
        raise ValueError(f"needs exactly the keys {sorted(_ENTRY_KEYS)}, got {_show(fields)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {_show(dtype)}")
    if not _are_sizes(shape):
        raise ValueError(f"shape is not a list of integers from 0 to 2**63-1: {_show(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets are not two integers, begin <= end: {_show(offsets)}")
    begin, end = offsets
    nbytes = _count_bytes(dtype, shape)
    if nbytes != end - begin:
        what = f"{dtype} of shape {_show(shape)}"
        raise ValueError(f"{what} takes {nbytes} bytes, data_offsets {offsets} hold {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), file, data_offset + begin, nbytes)


def _is_unicode(text: str) -> bool:
    """Whether a text is free of lone surrogates, which JSON escapes can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_sizes(value: Any) -> bool:
    # type() and not isinstance(): a bool is an int to Python, but not to JSON.
    return type(value) is list and all(type(size) is int and 0 <= size <= _MAX_INT for size in value)


def _count_bytes(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor; strides must fit 63 bits too, so an empty tensor may not hide huge dimensions."""
    num_bits = DTYPES[dtype][0]
    for size in shape:
        num_bits *= size or 1
        if num_bits > _MAX_INT:
            raise ValueError(f"{dtype} of shape {_show(shape)} overflows: more than 2**63-1 bits")
    if 0 in shape:
        return 0
    if num_bits % 8:
        raise ValueError(f"{dtype} of shape {_show(shape)} takes {num_bits} bits and ends inside a byte")
    return num_bits // 8


def _check_tiling(tensors: Sequence[TensorEntry], data_offset: int, file_nbytes: int, url: str) -> None:
    """Refuses overlaps, holes, and a data area that does not end where the file ends."""
    end = data_offset
    for entry in tensors:
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise ManifestError(
                f"{url}: tensor {_show(entry.name)} {what}: it begins at data offset"
                f" {entry.offset - data_offset}, not at {end - data_offset}"
            )
        end += entry.nbytes
    sizes = f"the file has {file_nbytes} bytes, its header describes {end}"
    if end > file_nbytes:
        raise ManifestError(f"{url}: truncated, {end - file_nbytes} bytes are missing: {sizes}")
    if end < file_nbytes:
        raise ManifestError(f"{url}: {file_nbytes - end} trailing bytes: {sizes}")


# Reading


def _assemble(storage: Storage, stats: Mapping[str, FileStat]) -> Manifest:
    """Reads the headers of the files, given in name order, and merges them."""

    def read(item: tuple[int, tuple[str, FileStat]]) -> tuple[FileEntry, list[TensorEntry], dict[str, str]]:
        number, (name, stat) = item
        return _read_header(storage, name, stat, number)

    files, tensors, metadata = [], [], dict[str, str]()
    for file, entries, file_metadata in _in_threads(read, list(enumerate(stats.items()))):
        files.append(file)
        tensors += entries
        metadata = file_metadata | metadata
    _check_names(storage.url, files, tensors)
    return Manifest(storage.url, tuple(files), tuple(tensors), metadata)


def _read_header(
    storage: Storage, name: str, stat: FileStat, file: int
) -> tuple[FileEntry, list[TensorEntry], dict[str, str]]:
    url = _url(storage, name)
    if stat.nbytes < _LENGTH_BYTES:
        raise ManifestError(f"{url}: {stat.nbytes} bytes are too few for a safetensors file")
    prefix = _read(storage, name, 0, _LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, stat.nbytes - _LENGTH_BYTES)
    if length > limit:
        # Text, zip and pickle files end here: what they start with tells them apart.
        raise ManifestError(
            f"{url}: header length of {length} bytes is over the limit of {limit} (file size:"
            f" {stat.nbytes}); the file starts with {prefix!r}"
        )
    header = _read(storage, name, _LENGTH_BYTES, length)
    tensors, metadata = parse_header(header, stat.nbytes, url, file)
    digest = xxhash.xxh3_128_hexdigest(header)
    return FileEntry(name, stat.nbytes, stat.version, digest), tensors, metadata


def _check_names(url: str, files: Sequence[FileEntry], tensors: Sequence[TensorEntry]) -> None:
    """Refuses a tensor that two files hold: nothing says which of the two is meant."""
    owner: dict[str, int] = {}
    for entry in tensors:
        first = owner.setdefault(entry.name, entry.file)
        if first != entry.file:
            raise ManifestError(
                f"{url}: tensor {_show(entry.name)} is in two files, {files[first].name!r} and"
                f" {files[entry.file].name!r}; to load one of them, name the file"
            )


def _find_index(url: str, listing: Sequence[str]) -> str | None:
    if _MODEL_INDEX in listing:
        return _MODEL_INDEX
    indexes = _ending_in(_INDEX_SUFFIX, listing)
    if len(indexes) > 1:
        raise ManifestError(f"{url}: several indexes, none named {_MODEL_INDEX!r}: {_show(indexes)}")
    return indexes[0] if indexes else None


def _find_files(url: str, listing: Sequence[str]) -> list[str]:
    names = _ending_in(_SUFFIX, listing)
    if not names:
        found = f"its {len(listing)} files are {_show(sorted(listing))}" if listing else "it has no files"
        raise CheckpointNotFound(f"{url}: no *{_SUFFIX} files in this directory; {found}")
    return names


def _ending_in(suffix: str, listing: Sequence[str]) -> list[str]:
    # A leading dot marks what is no part of the checkpoint: a copy in flight, a resource fork.
    return sorted(name for name in listing if name.endswith(suffix) and not name.startswith("."))


def _stat_all(storage: Storage, names: Sequence[str]) -> dict[str, FileStat]:
    stats = dict(zip(names, _in_threads(storage.stat, names), strict=True))
    missing = [name for name, stat in stats.items() if stat is None]
    if missing:
        raise ManifestError(f"{storage.url}: {len(missing)} of {len(names)} files missing: {_show(missing)}")
    return {name: stat for name, stat in stats.items() if stat is not None}


def _read_index(storage: Storage, index: str) -> dict[str, str]:
    """Returns the ``weight_map`` of an index: tensor name → file name, safe to look up below the root."""
    url = _url(storage, index)
    stat = _stat_all(storage, [index])[index]
    if stat.nbytes > _MAX_INDEX_BYTES:
        raise ManifestError(f"{url}: index of {stat.nbytes} bytes is over the limit of {_MAX_INDEX_BYTES}")
    weight_map = _parse_json(_read(storage, index, 0, stat.nbytes), f"{url}: index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ManifestError(f"{url}: weight_map is not an object that names files but {_show(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_path(file):
            raise ManifestError(f"{url}: tensor {_show(name)}: not a plain relative file name: {_show(file)}")
    return weight_map


def _is_plain_path(name: str) -> bool:
    """Whether a name stays below the root on every system and spells its file in one way only."""
    if "\\" in name or "\0" in name or re.match("[A-Za-z]:", name) or not _is_unicode(name):
        return False
    return not any(part in ("", ".", "..") for part in name.split("/"))


def _check_index(url: str, weight_map: Mapping[str, str], manifest: Manifest) -> None:
    for name, file in weight_map.items():
        entry = manifest.by_name.get(name)
        if entry is None or manifest.files[entry.file].name != file:
            where = "no file holds it" if entry is None else f"it is in {manifest.files[entry.file].name!r}"
            raise ManifestError(f"{url}: tensor {_show(name)} is not in {_show(file)}: {where}")
    if len(manifest.tensors) > len(weight_map):
        logger.info("%s: %d tensors are not in the index", url, len(manifest.tensors) - len(weight_map))


def _read(storage: Storage, name: str, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    storage.read_into(name, offset, [memoryview(buffer)])
    return bytes(buffer)


def _url(storage: Storage, name: str) -> str:
    return f"{storage.url.rstrip('/')}/{name}" if name else storage.url


def _in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Maps in order; of several failures the first in order is raised, so errors are deterministic."""
    with ThreadPoolExecutor(min(_NUM_READERS, len(items)), thread_name_prefix="fastload-header") as pool:
        return list(pool.map(function, items))
