"""The manifest of a checkpoint: its files and tensors. Pure, identical on all ranks."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from fastload.base.memory import uncollected
from fastload.geometry.blocks import Block, Blocks, num_blocks
from fastload.geometry.box import Box, dense_strides
from fastload.geometry.ranges import HasRange, Space

if TYPE_CHECKING:
    from torch import Tensor

    from fastload.formats.layers import Decoding

CHECKSUM_BYTES = 8
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: Name below the checkpoint's root; empty for a checkpoint of a single file.
        nbytes: Size of the file in bytes.
        version: Version of the file in storage (see `FileStat.version`).
        header_digest: xxh3-128 of the header bytes.
        checksums: xxh3-64 of each checksum block in the order of offsets, 8 bytes each; empty if the
            checkpoint has no commit record.
    """

    name: str
    nbytes: int
    version: str
    header_digest: str
    checksums: bytes = b""


class Piece(NamedTuple):
    """The byte range of a box of a tensor.

    Attributes:
        box: The box in elements of torch; not empty.
        file: Index into `Manifest.files`.
        offset: First byte of its first element in that file.
        nbytes: Length in bytes, up to the end of its last element.
        strides: Strides of the box in the file, in elements; in any order, with gaps, 0 for expanded
            dimensions. Empty if it is row-major without gaps.
    """

    box: Box
    file: int
    offset: int
    nbytes: int
    strides: tuple[int, ...] = ()


class Guard(NamedTuple):
    """Bytes expected right before data whose layout was inferred; checked when the data are read.

    Attributes:
        file: Index into `Manifest.files`.
        offset: First byte of the data in that file.
        head: Index into `Manifest.heads`, the bytes expected right before the data.
    """

    file: int
    offset: int
    head: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors name of the dtype, such as ``BF16``.
        shape: Shape in elements of that dtype.
        file: Index into `Manifest.files`.
        offset: First byte in that file.
        nbytes: Length in bytes.
        pieces: Its pieces, in the order of the bytes, if it is not row-major in one place. `file` and
            `offset` are those of the first piece. Their boxes tile the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...] = ()

    def decoding(self, tensor: Tensor, box: Box | None) -> Decoding | None:
        """Returns what decodes the tensor from others that are stored; None if it is stored itself.

        Args:
            tensor: The tensor to fill, of the shape of the box.
            box: The box of it; None for all of it.
        """
        return None


class Delta(NamedTuple):
    """What a delta checkpoint says of its base and of the result.

    Attributes:
        base: Name of the directory of the base.
        digest: `Manifest.record_digest` of the base.
        num_deltas: Number of deltas from the first complete checkpoint to this one.
        checksums: For each file of the result, the checksums of its blocks in hexadecimal.
    """

    base: str
    digest: str
    num_deltas: int
    checksums: Mapping[str, str]


_WRITER_BYTES = 64 << 10  # files were cut between writers at some of its multiples
_OLD_SAVE = "If fastload 0.2.0 or older saved it, replicas that differed may be the reason."


@dataclass(frozen=True)
class Manifest:
    """Tensors and files of one checkpoint.

    Attributes:
        url: The URL or path of the checkpoint.
        files: In name order.
        tensors: In the order of their bytes: by file, offset, length, then name.
        metadata: Text that the writer attached: that of the commit record, or else the merged
            ``__metadata__`` of the headers.
        block_bytes: Length of a checksum block; 0 without a commit record.
        structure: The structure of the state, see `fastload.formats.state`; None without one.
        record_digest: xxh3-128 of the commit record, or of the metadata of other programs; else empty.
        index_digest: xxh3-128 of the index of several files; empty without one.
        format: ``safetensors``, ``fastload``, ``torch``, ``dcp``, ``torch_checkpointing`` or ``deepspeed``.
        guards: The guards of data whose layout was inferred, in the order of the bytes.
        heads: The distinct bytes expected before such data.
        delta: Its base, if it is a delta checkpoint; see `fastload.ext.deltas.encoding`.
        strides: By name, the strides in elements that tensors had when they were saved, without gaps; only of
            tensors for which they are not row-major.
        decoded_from: The manifest of the stored tensors, if a layer decodes `tensors` from these.
    """

    url: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = 0
    structure: Any = None
    record_digest: str = ""
    index_digest: str = ""
    format: str = "safetensors"
    guards: tuple[Guard, ...] = ()
    heads: tuple[bytes, ...] = ()
    delta: Delta | None = None
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    decoded_from: Manifest | None = None

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Tensors by name, in the order of `tensors`."""
        return {entry.name: entry for entry in self.tensors}

    @cached_property
    def extents(self) -> Sequence[TensorEntry | Piece]:
        """The byte ranges of stored tensors in their order: tensors without pieces, and pieces."""
        if self.decoded_from is not None:
            return self.decoded_from.extents
        if not any(entry.pieces for entry in self.tensors):
            return self.tensors
        extents = [extent for entry in self.tensors for extent in entry.pieces or (entry,)]
        return sorted(extents, key=attrgetter("file", "offset", "nbytes"))

    @cached_property
    def blocks(self) -> Blocks:
        """The checksum blocks of all extents, or of those of a checkpoint to seal."""
        return Blocks(Space([extent for extent in self.extents if extent.nbytes]), self.block_bytes)

    @cached_property
    def _first_blocks(self) -> list[int]:
        """For each file, the number of its first block."""
        return [self.blocks.first_of(file) for file in range(len(self.files))]

    def recorded(self, block: Block) -> tuple[int, bytes]:
        """Returns the number of one of `blocks` within its file, and its recorded checksum."""
        number = block.number - self._first_blocks[block.file]
        begin = number * CHECKSUM_BYTES
        return number, self.files[block.file].checksums[begin : begin + CHECKSUM_BYTES]

    def recorded_of(self, byte_range: HasRange, nbytes: int) -> bytes:
        """Returns so many bytes of the recorded checksums, from the first block of a byte range on."""
        file = byte_range.file
        number = self.blocks.number_at(file, byte_range.offset) - self._first_blocks[file]
        begin = number * CHECKSUM_BYTES
        return self.files[file].checksums[begin : begin + nbytes]

    def strides_of(self, entry: TensorEntry) -> tuple[int, ...]:
        """Returns the strides that a tensor had when it was saved, without gaps; empty if row-major."""
        if entry.name in self.strides:
            return self.strides[entry.name]
        if len(entry.pieces) != 1 or entry.dtype == "F4":  # which torch packs
            return ()
        [piece] = entry.pieces
        return dense_strides(entry.shape, piece.strides) if piece.strides else ()

    def describe_damage(self, block: Block, tensor: str, found: bytes) -> str:
        """Describes one of `blocks` whose checksum is not the recorded one, for users."""
        number, expected = self.recorded(block)
        name = self.files[block.file].name
        url = f"{self.url.rstrip('/')}/{name}" if name else self.url
        return (
            f"{url}: block {number} "
            f"[bytes {block.offset}-{block.end}] of tensor {tensor[:200]!r}: checksum "
            f"{expected.hex()} expected, {found.hex()} found"
        )

    def doubt_about(self, block: Block) -> str:
        """Returns how a save may have made one of `blocks` whose checksum is wrong; empty if none may have.

        Formerly a rank hashed the rest of a block, which another one wrote, from its own replica.
        """
        is_of_one_writer = block.offset // _WRITER_BYTES == (block.end - 1) // _WRITER_BYTES
        return "" if self.format != "fastload" or self.delta is not None or is_of_one_writer else _OLD_SAVE

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.tensors)

    def digest(self) -> str:
        """Returns an xxh3-128 of everything but the URL, the same on ranks that see the same files."""
        columns = json.dumps(self._columns(), separators=(",", ":"), sort_keys=True)
        digest = xxhash.xxh3_128(columns.encode())
        for file in self.files:
            digest.update(file.checksums)
        return digest.hexdigest()

    @uncollected
    def to_bytes(self) -> bytes:
        """Packs the manifest, to be sent to other ranks."""
        text = zlib.compress(json.dumps([self.url, self._columns()]).encode(), level=1)
        checksums = (file.checksums for file in self.files)  # which do not compress
        return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *checksums])

    @classmethod
    @uncollected
    def from_bytes(cls, packed: bytes) -> Manifest:
        """Unpacks what `to_bytes` packed."""
        end = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "little")
        url, columns = json.loads(zlib.decompress(packed[_LENGTH_BYTES:end]))
        files = []
        for name, nbytes, version, header_digest, length in columns["files"]:
            files.append(FileEntry(name, nbytes, version, header_digest, packed[end : end + length]))
            end += length
        return cls(
            url=url,
            files=tuple(files),
            tensors=tuple(
                TensorEntry(name, dtype, tuple(shape), file, offset, nbytes, tuple(map(_piece, pieces)))
                for name, dtype, shape, file, offset, nbytes, *pieces in columns["tensors"]
            ),
            metadata=columns["metadata"],
            block_bytes=columns["block_bytes"],
            structure=columns["structure"],
            record_digest=columns["record_digest"],
            index_digest=columns["index_digest"],
            format=columns["format"],
            guards=tuple(map(Guard._make, columns["guards"])),
            heads=tuple(map(base64.b64decode, columns["heads"])),
            delta=Delta(*columns["delta"]) if columns["delta"] else None,
            strides={name: tuple(strides) for name, strides in columns["strides"].items()},
        )

    def _columns(self) -> dict[str, object]:
        return {
            "files": [[f.name, f.nbytes, f.version, f.header_digest, len(f.checksums)] for f in self.files],
            "tensors": [
                [t.name, t.dtype, t.shape, t.file, t.offset, t.nbytes, *t.pieces] for t in self.tensors
            ],
            "metadata": dict(self.metadata),
            "block_bytes": self.block_bytes,
            "structure": self.structure,
            "record_digest": self.record_digest,
            "index_digest": self.index_digest,
            "format": self.format,
            "guards": self.guards,
            "heads": [base64.b64encode(head).decode() for head in self.heads],
            "delta": self.delta,
            "strides": dict(self.strides),
        }


def blocks_of_files(manifest: Manifest, block_bytes: int) -> list[int]:
    """Returns the number of blocks in each file."""
    counts = [0] * len(manifest.files)
    for extent in manifest.extents:
        counts[extent.file] += num_blocks(extent.nbytes, block_bytes)
    return counts


def is_single_file(manifest: Manifest) -> bool:
    """Whether a checkpoint is a file, and no directory."""
    return [file.name for file in manifest.files] == [""]


def in_order(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Returns tensors in the order of `Manifest.tensors`."""
    return sorted(tensors, key=attrgetter("file", "offset", "nbytes", "name"))


def _piece(columns: Any) -> Piece:
    (offsets, sizes), file, offset, nbytes, strides = columns
    return Piece(Box(tuple(offsets), tuple(sizes)), file, offset, nbytes, tuple(strides))
