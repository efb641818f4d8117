"""Checkpoints that fastload saved: the commit record ``fastload.json``, and the reader of its files.

A checkpoint of fastload exists once its record does. The record names the files with their sizes, and has an
xxh3-64 checksum for each *block*. The blocks of a tensor are `block_bytes` long and begin at its first byte;
the last one may be shorter, and an empty tensor has none. The blocks of a file are in the order of their
offsets. No block spans two tensors, so that any tensors can be verified without reading more bytes.
"""

from __future__ import annotations

import json
import re
from binascii import hexlify
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from fastload.base.memory import uncollected
from fastload.errors import ChecksumError, IncompleteCheckpoint, ManifestError, UnsupportedVersion
from fastload.formats.manifest import CHECKSUM_BYTES as CHECKSUM_BYTES
from fastload.formats.manifest import Delta, Manifest, TensorEntry, blocks_of_files
from fastload.formats.names import RECORD_NAME, SAVING_NAME
from fastload.formats.reading import digest_of_file, read_bytes, read_limited, stat_all
from fastload.formats.safetensors.header import LENGTH_BYTES, MAX_HEADER_BYTES
from fastload.formats.safetensors.reader import assemble
from fastload.formats.state import check_names
from fastload.formats.untrusted import are_sizes, is_plain_path, is_size, parse_json, parse_metadata, show
from fastload.geometry.box import is_dense
from fastload.storage.base import Storage

MAX_RECORD_BYTES = 1 << 30

_FORMAT = "fastload"
_VERSION, _DELTA_VERSION = 1, 2  # of a complete checkpoint, and of a delta
_STRIDES_VERSION, _CODED_VERSION = 3, 4  # of either, with strides, and with values of extensions
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_DELTAS = 1000
_KEYS = {"block_bytes", "files", "format", "metadata", "state", "version"}
_DELTA_KEYS = _KEYS | {"delta"}
_STRIDES_KEYS = _DELTA_KEYS | {"strides"}
_FILE_KEYS = {"checksums", "header_bytes", "header_checksum", "name", "nbytes"}
# Before xxhash 4, the functions for one call hold the GIL, so that one core would hash for all threads.
_RELEASES_GIL = int(xxhash.VERSION.partition(".")[0]) >= 4
_SHORT_BYTES = 64 << 10  # hashed faster than other threads would wake up
_MIN_HEADER_BYTES = 8 + 2  # the length, and "{}"


def checksum(data: bytes | memoryview) -> bytes:
    """Returns the xxh3-64 of a block, most significant byte first; other threads run meanwhile."""
    if _RELEASES_GIL or len(data) <= _SHORT_BYTES:
        return xxhash.xxh3_64_digest(data)
    digest = xxhash.xxh3_64()
    digest.update(data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """One file in a commit record.

    Attributes:
        name: Name below the checkpoint's root.
        nbytes: Size of the file in bytes.
        header_bytes: Length of its header: 8 bytes, and the JSON text with its padding.
        header_checksum: Checksum of the header.
        checksums: The checksums of its blocks, 8 bytes each, joined.
    """

    name: str
    nbytes: int
    header_bytes: int
    header_checksum: bytes
    checksums: bytes


@dataclass(frozen=True)
class Record:
    """The commit record of a checkpoint.

    Attributes:
        block_bytes: Length of a block.
        files: All files, in name order.
        state: The structure of the state, in JSON types.
        metadata: Text that the user attached.
        delta: The base, if the files are those of a delta.
        strides: See `Manifest.strides`.
    """

    block_bytes: int
    files: tuple[RecordedFile, ...]
    state: Any = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    delta: Delta | None = None
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Returns the text of the record, the same for equal contents.

        Raises:
            ValueError: `state` has a value that JSON lacks, such as an infinity.
        """
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION if self.delta is None else _DELTA_VERSION,
            "block_bytes": self.block_bytes,
            "metadata": dict(self.metadata),
        }
        texts = {"files": _text_of_files(self.files), "state": canonical(self.state)}
        if self.delta is not None:
            body["delta"] = {**self.delta._asdict(), "checksums": dict(self.delta.checksums)}
        is_coded = b'{"coded":' in texts["state"]  # in a text, the quotes would be escaped
        if self.strides or is_coded:
            version = _CODED_VERSION if is_coded else _STRIDES_VERSION
            body = {"delta": None, **body, "version": version, "strides": dict(self.strides)}
        return checked_text(body, texts)


def _text_of_files(files: Sequence[RecordedFile]) -> bytes:
    """Returns the canonical text of the entries, with few copies: checksums may be tens of MB."""
    pieces: list[bytes] = []
    for file in files:
        rest = canonical(
            {
                "header_bytes": file.header_bytes,
                "header_checksum": file.header_checksum.hex(),
                "name": file.name,
                "nbytes": file.nbytes,
            }
        )
        pieces += [b"," if pieces else b"[", b'{"checksums":"', hexlify(file.checksums), b'",', rest[1:]]
    return b"".join([*pieces, b"]"]) if pieces else b"[]"


@uncollected
def parse(data: bytes, url: str = RECORD_NAME) -> Record:
    """Parses the text of a record; untrusted.

    Args:
        data: The text.
        url: The record, for messages.

    Raises:
        UnsupportedVersion: This fastload does not know its version.
        ManifestError: It is malformed.
        ChecksumError: It is damaged.
    """
    keys = {_VERSION: _KEYS, _DELTA_VERSION: _DELTA_KEYS}
    keys |= dict.fromkeys((_STRIDES_VERSION, _CODED_VERSION), _STRIDES_KEYS)
    raw = parse_checked(data, url, "commit record", _FORMAT, keys)
    if type(raw["files"]) is not list:
        raise ManifestError(f"{url}: files is not a list but {show(raw['files'])}")
    files = []
    for number, fields in enumerate(raw["files"]):
        try:
            files.append(_parse_file(fields))
        except ValueError as error:
            raise ManifestError(f"{url}: file {number}: {error}") from None
    names = [file.name for file in files]
    if names != sorted(set(names)):
        raise ManifestError(f"{url}: files are not in name order, each once: {show(names)}")
    metadata = parse_metadata(raw["metadata"], f"{url}: metadata")
    is_delta = raw["version"] == _DELTA_VERSION or raw.get("delta") is not None
    delta = _parse_delta(raw["delta"], url) if is_delta else None
    strides = _parse_strides(raw.get("strides", {}), url)
    return Record(raw["block_bytes"], tuple(files), raw["state"], metadata, delta, strides)


def _parse_strides(fields: Any, url: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(fields, dict) or not all(map(are_sizes, fields.values())):
        raise ManifestError(f"{url}: strides are no object of lists of sizes: {show(fields)}")
    return {name: tuple(strides) for name, strides in fields.items()}


def _parse_delta(fields: Any, url: str) -> Delta:
    if not isinstance(fields, dict) or fields.keys() != {*Delta._fields}:
        raise ManifestError(
            f"{url}: delta needs exactly the keys {sorted(Delta._fields)}, got {show(fields)}"
        )
    delta = Delta(**fields)
    if not isinstance(delta.base, str) or "/" in delta.base or not is_plain_path(delta.base):
        raise ManifestError(f"{url}: the base is no name of a directory: {show(delta.base)}")
    if not isinstance(delta.digest, str) or not _DIGEST.fullmatch(delta.digest):
        raise ManifestError(f"{url}: the digest of the base is not of 32 hex digits: {show(delta.digest)}")
    if not is_size(delta.num_deltas) or not 0 < delta.num_deltas <= _MAX_DELTAS:
        raise ManifestError(f"{url}: num_deltas is not from 1 to {_MAX_DELTAS}: {show(delta.num_deltas)}")
    if not isinstance(delta.checksums, dict):
        raise ManifestError(f"{url}: checksums of the result are no object: {show(delta.checksums)}")
    for name, text in delta.checksums.items():
        try:
            parse_checksums(text)
        except ValueError as error:
            raise ManifestError(f"{url}: result {show(name)}: {error}") from None
    return delta


def checked_text(body: Mapping[str, Any], texts: Mapping[str, bytes] | None = None) -> bytes:
    """Returns the text of a JSON object with its own checksum in it, the same for equal contents.

    Args:
        body: The object.
        texts: More of its values, by name, as canonical texts.

    Raises:
        ValueError: It has a value that JSON lacks.
    """
    every = {name: canonical(value) for name, value in body.items()} | dict(texts or {})
    every["checksum"] = canonical(checksum(_joined(every)).hex())
    return _joined(every)


def _joined(texts: Mapping[str, bytes]) -> bytes:
    """Returns the canonical text of an object, given those of its values by name."""
    pieces: list[bytes] = []
    for name in sorted(texts):
        pieces += [b"," if pieces else b"{", canonical(name), b":", texts[name]]
    return b"".join([*pieces, b"}"])


def parse_checked(
    data: bytes, url: str, kind: str, name: str, keys: Mapping[int, Collection[str]]
) -> dict[str, Any]:
    """Parses what `checked_text` returned; untrusted.

    Args:
        data: The text.
        url: The file, for messages.
        kind: Its kind, for messages.
        name: Its ``format``.
        keys: The keys of each known ``version``, besides the checksum.

    Returns:
        The object, without the checksum. Its ``block_bytes`` is a size above 0.

    Raises:
        UnsupportedVersion: This fastload does not know its version.
        ManifestError: It is malformed.
        ChecksumError: It is damaged.
    """
    try:
        raw = parse_json(data, f"{url}: {kind}", any_int=True)
    except ManifestError as error:  # every version writes a JSON object with a checksum
        error.is_damage = True
        raise
    if "checksum" not in raw:
        raise ManifestError(f"{url}: it has no checksum of its own, but {show(sorted(raw))}", is_damage=True)
    claimed = raw.pop("checksum")
    try:
        computed = checksum(canonical(raw)).hex()
    except (ValueError, RecursionError) as error:  # 1e999 is an infinity once it is parsed
        raise ManifestError(f"{url}: {kind} cannot be checked: {error}", is_damage=True) from None
    if claimed != computed:
        raise ChecksumError(
            f"{url}: the {kind} is damaged: checksum {show(claimed)} expected, {computed!r} found"
        )
    version = raw.get("version")
    if raw.get("format") != name or type(version) is not int or version not in keys:
        versions = f"version{'s' * (len(keys) > 1)} {' and '.join(map(str, keys))}"
        declared = f"format {show(raw.get('format'))}, version {show(version)}"
        raise UnsupportedVersion(
            f"{url}: {declared}: this fastload reads {name!r}, {versions}: update fastload"
        )
    if raw.keys() != keys[version]:
        raise ManifestError(f"{url}: needs exactly the keys {sorted(keys[version])}, got {show(sorted(raw))}")
    if not is_size(raw["block_bytes"]) or raw["block_bytes"] == 0:
        raise ManifestError(f"{url}: block_bytes is not a size above 0: {show(raw['block_bytes'])}")
    return raw


def _parse_file(fields: Any) -> RecordedFile:
    if not isinstance(fields, dict) or fields.keys() != _FILE_KEYS:
        raise ValueError(f"needs exactly the keys {sorted(_FILE_KEYS)}, got {show(fields)}")
    name, nbytes, header_bytes = fields["name"], fields["nbytes"], fields["header_bytes"]
    if not isinstance(name, str) or not is_plain_path(name):
        raise ValueError(f"not a plain relative file name: {show(name)}")
    if not is_size(nbytes) or not is_size(header_bytes) or not _MIN_HEADER_BYTES <= header_bytes <= nbytes:
        raise ValueError(f"{show(name)}: a header of {show(header_bytes)} bytes in a file of {show(nbytes)}")
    header_checksum = _unhex(fields["header_checksum"], "header_checksum")
    if len(header_checksum) != CHECKSUM_BYTES:
        raise ValueError(f"{show(name)}: header_checksum is not of {2 * CHECKSUM_BYTES} hex digits")
    checksums = parse_checksums(fields["checksums"], f"{show(name)}: checksums")
    return RecordedFile(name, nbytes, header_bytes, header_checksum, checksums)


def parse_checksums(text: Any, key: str = "checksums") -> bytes:
    """Returns the checksums of blocks from their hex digits.

    Raises:
        ValueError: They are something else.
    """
    checksums = _unhex(text, key)
    if len(checksums) % CHECKSUM_BYTES:
        raise ValueError(f"{key} are not of {2 * CHECKSUM_BYTES} hex digits each")
    return checksums


def _unhex(text: Any, key: str) -> bytes:
    """Returns the bytes that lower-case hex digits stand for."""
    try:
        value = bytes.fromhex(text)
    except (TypeError, ValueError):
        value = None
    if value is None or value.hex() != text:  # fromhex takes blanks and capitals too
        raise ValueError(f"{key} is not hex digits: {show(text)}")
    return value


def canonical(body: Any) -> bytes:
    """Returns the one text of a JSON value: sorted keys, no blanks.

    Raises:
        ValueError: It has a value that JSON lacks.
    """
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


# Reading a checkpoint


def is_recorded(listing: Sequence[str]) -> bool:
    """Whether a directory holds what `fastload.save` wrote, to the end or not."""
    return RECORD_NAME in listing or SAVING_NAME in listing


def read_folder(storage: Storage, listing: Sequence[str], *, exact: bool = True) -> Manifest:
    """Reads what the commit record names; always exactly.

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
    text = read_limited(storage, RECORD_NAME, "record", MAX_RECORD_BYTES)
    record = parse(text, storage.label(RECORD_NAME))
    check_names(record.state, storage.label(RECORD_NAME), len(text))
    names = [file.name for file in record.files]
    try:
        stats = stat_all(storage, names)
    except IncompleteCheckpoint as missing:
        raise IncompleteCheckpoint(f"{missing}, although {RECORD_NAME} names them") from None
    for file in record.files:
        if stats[file.name].nbytes != file.nbytes:
            sizes = f"{stats[file.name].nbytes} bytes, of {file.nbytes} that {RECORD_NAME} records"
            raise ManifestError(f"{storage.label(file.name)}: has {sizes}", is_damage=True)
    by_name = {file.name: file for file in record.files}
    manifest = assemble(storage, stats, lambda name, _: _read_header(storage, by_name[name]))
    for file, wanted in zip(record.files, blocks_of_files(manifest, record.block_bytes), strict=True):
        num_checksums = len(file.checksums) // CHECKSUM_BYTES
        if num_checksums != wanted:
            where = f"{storage.label(RECORD_NAME)}: {show(file.name)}"
            raise ManifestError(f"{where}: {num_checksums} checksums for {wanted} blocks")
    if record.delta is None:
        require_strides(manifest.tensors, record.strides, storage.label(RECORD_NAME))
    return replace(
        manifest,
        files=tuple(
            replace(entry, checksums=file.checksums)
            for entry, file in zip(manifest.files, record.files, strict=True)
        ),
        metadata=record.metadata,
        block_bytes=record.block_bytes,
        structure=record.state,
        record_digest=digest_of(text),
        format="fastload",
        delta=record.delta,
        strides=record.strides,
    )


def require_strides(
    tensors: Iterable[TensorEntry], strides: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Requires that strides are those of tensors without gaps, which take no more memory than their bytes.

    Args:
        tensors: All tensors.
        strides: Strides of some of them, by name.
        where: The record, for messages.

    Raises:
        ManifestError: They are not.
    """
    shapes = {entry.name: entry.shape for entry in tensors} if strides else {}
    for name, given in strides.items():
        shape = shapes.get(name)
        if shape is None or len(shape) != len(given) or not is_dense(shape, given):
            problem = "there is no such tensor" if shape is None else f"the tensor has shape {list(shape)}"
            raise ManifestError(f"{where}: strides {show(list(given))} of {show(name)}: {problem}")


def record_digest(storage: Storage) -> str:
    """Returns the `Manifest.record_digest` of a checkpoint on this rank; empty without a record."""
    return digest_of_file(storage, RECORD_NAME, MAX_RECORD_BYTES)


def digest_of(text: bytes) -> str:
    """Returns the `Manifest.record_digest` of the text of a record."""
    return xxhash.xxh3_128_hexdigest(text)


def _read_header(storage: Storage, file: RecordedFile) -> bytes:
    """Reads the JSON text of a header of known length and checksum, in one request."""
    url = storage.label(file.name)
    length = file.header_bytes - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise ManifestError(f"{url}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    for _ in range(2):  # again, in case it was damaged on the way
        header = read_bytes(storage, file.name, 0, file.header_bytes)
        if checksum(header) == file.header_checksum:
            break
    else:
        wrong = f"checksum {file.header_checksum.hex()} expected, {checksum(header).hex()} found"
        raise ChecksumError(f"{url} [bytes 0-{file.header_bytes}]: the header is damaged: {wrong}")
    if int.from_bytes(header[:LENGTH_BYTES], "little") != length:
        raise ManifestError(f"{url}: its header is not of the {length} bytes that {RECORD_NAME} records")
    return header[LENGTH_BYTES:]
