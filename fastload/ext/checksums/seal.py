"""The seal of a checkpoint that another program wrote: its checksums, in ``fastload.seal.json`` next to it.

That of a single file has the name of the file before it: ``last.pt.fastload.seal.json``.

A seal has an xxh3-64 for each *block*. The blocks of an extent (a tensor, or a piece of one) are
`block_bytes` long and begin at its first byte; the blocks of a file are in the order of their offsets. What
is read when a checkpoint is opened (headers, pickles, metadata, an index), and the place of each extent, have
one digest in the seal. Seals of version 1 do not cover an index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import xxhash

from fastload.errors import ChecksumError, ManifestError
from fastload.formats.layers import Layer
from fastload.formats.manifest import Manifest, blocks_of_files, is_single_file
from fastload.formats.names import SEAL_NAME
from fastload.formats.reading import read_limited
from fastload.formats.record import (
    CHECKSUM_BYTES,
    MAX_RECORD_BYTES,
    canonical,
    checked_text,
    parse_checked,
    parse_checksums,
)
from fastload.formats.untrusted import show
from fastload.storage import Storage

_FORMAT = "fastload-seal"
_WITHOUT_INDEX, _WITH_INDEX = 1, 2  # versions
_KEYS = {"block_bytes", "checksums", "digest", "format", "version"}


@dataclass(frozen=True)
class Seal:
    """The checksums of a checkpoint.

    Attributes:
        block_bytes: Length of a block.
        digest: xxh3-128 of everything but the data of tensors; see `_digest_of`.
        checksums: For each file of the manifest, the checksums of its blocks, 8 bytes each, joined.
        has_index: Whether the checkpoint had an index, which the digest covers.
    """

    block_bytes: int
    digest: str
    checksums: tuple[bytes, ...]
    has_index: bool = False

    @classmethod
    def of(cls, manifest: Manifest, checksums: Sequence[bytes]) -> Seal:
        """Returns the seal of a checkpoint with the checksums of its files."""
        has_index = bool(manifest.index_digest)
        digest = _digest_of(manifest, has_index=has_index)
        return cls(manifest.block_bytes, digest, tuple(checksums), has_index)

    def to_bytes(self) -> bytes:
        """Returns the text of the seal, the same for equal contents."""
        body = {
            "format": _FORMAT,
            "version": _WITH_INDEX if self.has_index else _WITHOUT_INDEX,
            "block_bytes": self.block_bytes,
            "digest": self.digest,
            "checksums": [each.hex() for each in self.checksums],
        }
        return checked_text(body)

    def fits(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is the one that was sealed, apart from the data of tensors."""
        return self.digest == _digest_of(manifest, has_index=self.has_index)

    def applied_to(self, manifest: Manifest) -> Manifest:
        """Returns the manifest with the checksums.

        Raises:
            ChecksumError: The checkpoint is not the one that was sealed.
            ManifestError: The seal contradicts itself.
        """
        if not self.fits(manifest):
            is_gone = self.has_index and not manifest.index_digest
            raise ChecksumError(
                f"{manifest.url}: its files, headers, index or metadata are not those that "
                f"{url_of_seal(manifest)} has the checksums of"
                f"{' (its index, which it had then, is missing)' if is_gone else ''}: they are damaged, or "
                "were changed after `fastload seal`. If the change was intended, seal it again, or remove "
                "that file"
            )
        wanted = blocks_of_files(manifest, self.block_bytes)
        if [len(each) for each in self.checksums] != [CHECKSUM_BYTES * count for count in wanted]:
            found = [len(each) // CHECKSUM_BYTES for each in self.checksums]
            raise ManifestError(f"{url_of_seal(manifest)}: {show(found)} checksums for {show(wanted)} blocks")
        files = zip(manifest.files, self.checksums, strict=True)
        return replace(
            manifest,
            files=tuple(replace(file, checksums=own) for file, own in files),
            block_bytes=self.block_bytes,
        )


def url_of_seal(manifest: Manifest) -> str:
    """Returns the URL of the seal of a checkpoint."""
    return f"{manifest.url}{'.' if is_single_file(manifest) else '/'}{SEAL_NAME}"


def _digest_of(manifest: Manifest, *, has_index: bool) -> str:
    """Returns an xxh3-128 of names, sizes and headers of the files, and of the places of all extents.

    Layouts that were inferred have the digest of those that were read, if they are equal.
    """
    files = [[file.name, file.nbytes, file.header_digest] for file in manifest.files]
    extents = [[extent.file, extent.offset, extent.nbytes] for extent in manifest.extents]
    body: dict[str, Any] = {"files": files, "record": manifest.record_digest, "extents": extents}
    if has_index:
        body["index"] = manifest.index_digest
    return xxhash.xxh3_128_hexdigest(canonical(body))


def require_disjoint(manifest: Manifest) -> None:
    """Requires that no byte of the files belongs to two extents.

    Raises:
        ManifestError: Some does.
    """
    filled = [extent for extent in manifest.extents if extent.nbytes]
    for extent, after in pairwise(filled):
        if extent.file == after.file and extent.offset + extent.nbytes > after.offset:
            where = manifest.files[extent.file].name or manifest.url
            raise ManifestError(
                f"{where}: tensors share bytes from {after.offset} on (views of one storage), which have no "
                "checksums of their own: `fastload convert` saves them as a checkpoint that has"
            )


def read_seal(storage: Storage) -> Seal:
    """Reads the seal of a directory, or of a `FileWithSibling`.

    Raises:
        UnsupportedVersion: This fastload does not know its version.
        ManifestError: It is malformed.
        ChecksumError: It is damaged.
    """
    where = storage.label(SEAL_NAME)
    text = read_limited(storage, SEAL_NAME, "seal", MAX_RECORD_BYTES)
    raw = parse_checked(text, where, "seal", _FORMAT, {_WITHOUT_INDEX: _KEYS, _WITH_INDEX: _KEYS})
    if type(raw["digest"]) is not str:
        raise ManifestError(f"{where}: digest is no text but {show(raw['digest'])}")
    if type(raw["checksums"]) is not list:
        raise ManifestError(f"{where}: checksums is not a list but {show(raw['checksums'])}")
    try:
        checksums = tuple(map(parse_checksums, raw["checksums"]))
    except ValueError as error:
        raise ManifestError(f"{where}: {error}") from None
    return Seal(raw["block_bytes"], raw["digest"], checksums, raw["version"] == _WITH_INDEX)


class SealLayer(Layer):
    """Gives a checkpoint the checksums of its seal."""

    def read(self, storage: Storage, stored: Manifest, read_exactly: Callable[[], Manifest]) -> Manifest:
        """Returns the manifest with the checksums; layouts that it does not fit are read again.

        Raises:
            ChecksumError: The checkpoint is not the one that was sealed, or the seal is damaged.
            ManifestError: The seal is malformed.
            StorageError: Storage failed.
        """
        seal = read_seal(storage)
        if stored.guards and not seal.fits(stored):
            stored = read_exactly()
        return seal.applied_to(stored)


layer = SealLayer()
