"""Layout of a checkpoint: headers of the files, and positions of tensors. Pure: the same on every rank.

The files are plain safetensors (https://github.com/huggingface/safetensors#format): the length of the
header as a little-endian u64, the header as JSON, blanks up to a multiple of 8, then the tensors
without gaps. Several files have an index in Hugging Face's format.

Tensors keep the order of the state, from file to file. So the tensors of a layer are contiguous, and a part
of a model is one contiguous read. Only tensors whose length is not a multiple of 8 bytes (step counters, odd
biases) are at the end of their file: first multiples of 4 bytes, then of 2. Since the length of a tensor is a
multiple of its element size, every tensor is then aligned to its element size, as programs that map the file
expect. The reference writer instead sorts all tensors by dtype, which scatters the layers of models of mixed
dtypes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.formats.names import MODEL_STEM, file_name
from fastload.formats.safetensors.header import (
    ALIGN_BYTES,
    MAX_HEADER_BYTES,
    build_header,
    build_index,
    entry_text,
    offsets_text,
)
from fastload.geometry.blocks import Block, Blocks, good_block_bytes
from fastload.geometry.ranges import ByteRange, Space

if TYPE_CHECKING:
    from fastload.options import SaveOptions

_METADATA = {"format": "pt"}  # of each file; transformers requires it


class TensorSpec(NamedTuple):
    """A tensor to save.

    Attributes:
        name: Its name; unique, valid Unicode.
        dtype: Its dtype in safetensors, such as ``BF16``.
        shape: Shape in elements of that dtype.
        nbytes: Length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class LayoutFile:
    """A file of a checkpoint.

    Attributes:
        name: Name below the root of the checkpoint.
        header: The bytes before the first tensor.
        tensors: Its tensors in the order of their bytes, without gaps, up to the end of the file.
        nbytes: Size of the file in bytes.
    """

    name: str
    header: bytes
    tensors: tuple[TensorEntry, ...]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint.

    Attributes:
        files: In the order of their names; at least one.
        block_bytes: Most bytes of a checksum block.
        index: ``model.safetensors.index.json``, or None for a single file.
    """

    files: tuple[LayoutFile, ...]
    block_bytes: int
    index: bytes | None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all files, headers included, without the index."""
        return sum(file.nbytes for file in self.files)

    @cached_property
    def space(self) -> Space[TensorEntry]:
        """The tensors that are not empty, in the order of their bytes."""
        return Space([entry for file in self.files for entry in file.tensors if entry.nbytes])

    @cached_property
    def blocks(self) -> Blocks:
        """The checksum blocks of all files."""
        return Blocks(self.space, self.block_bytes)

    def blocks_of(self, ranges: Sequence[ByteRange]) -> Iterator[Block]:
        """Yields the checksum blocks that begin in some ranges, which their writer hashes.

        So each block has one writer that hashes it. The last block may end beyond the ranges.
        """
        for byte_range in ranges:
            for _, block in self.blocks.between(byte_range.file, byte_range.offset, byte_range.end):
                yield block

    def tail_of(self, written: ByteRange) -> ByteRange | None:
        """Returns the bytes after a range that belong to a block which begins in it; None without any."""
        block = self.blocks.at(written.file, written.end - 1)
        if block is None or block.offset < written.offset or block.end == written.end:
            return None
        return ByteRange(written.file, written.end, block.end - written.end)

    @cached_property
    def digest(self) -> str:
        """The xxh3-128 of the layout, for comparison between ranks."""
        sizes = json.dumps([self.block_bytes, [[file.name, file.nbytes] for file in self.files]])
        hasher = xxhash.xxh3_128(sizes.encode())
        for file in self.files:
            hasher.update(file.header)
        return hasher.hexdigest()


def lay_out(
    specs: Sequence[TensorSpec],
    *,
    max_shard_bytes: int,
    block_bytes: int | None,
    stem: str = MODEL_STEM,
) -> Layout:
    """Lays tensors out in files.

    Args:
        specs: The tensors in the order of the state.
        max_shard_bytes: Most bytes of a file, header included, unless a single tensor is larger.
        block_bytes: Most bytes of a checksum block; None chooses.
        stem: Prefix of the file names.

    Raises:
        OptionError: A name does not fit into a header.
    """
    empty_header = build_header([], _METADATA)
    shards = list(_split(specs, max_shard_bytes, len(empty_header)))
    names = [file_name(number, len(shards), stem) for number in range(len(shards))]
    files = tuple(_lay_out_file(names[number], number, rows) for number, rows in enumerate(shards))
    if block_bytes is None:
        block_bytes = good_block_bytes(sum(spec.nbytes for spec in specs))
    index = build_index({file.name: file.tensors for file in files}) if len(files) > 1 else None
    return Layout(files, block_bytes, index)


def lay_out_files(specs: Sequence[TensorSpec], options: SaveOptions, stem: str = MODEL_STEM) -> Layout:
    """Lays tensors out in files by the options, or in one file of another name; raises as `lay_out`."""
    max_shard_bytes = options.max_shard_bytes if stem == MODEL_STEM else sys.maxsize
    return _lay_out_files(tuple(specs), max_shard_bytes, options.block_bytes, stem)


@lru_cache(maxsize=2)  # a training saves the same state again, or two in turn
def _lay_out_files(
    specs: tuple[TensorSpec, ...], max_shard_bytes: int, block_bytes: int | None, stem: str
) -> Layout:
    return lay_out(specs, max_shard_bytes=max_shard_bytes, block_bytes=block_bytes, stem=stem)


class _Row(NamedTuple):
    """A tensor, and its header entry up to the offsets."""

    spec: TensorSpec
    text: str


def _split(
    specs: Sequence[TensorSpec], max_shard_bytes: int, empty_header_bytes: int
) -> Iterator[list[_Row]]:
    """Distributes tensors over files; yields at least one file, perhaps without tensors.

    The length of a header depends on its offsets. Each is assumed to have as many digits as the largest, so a
    file may be a few bytes per tensor below its limit.
    """
    num_digits = len(offsets_text(max_shard_bytes, max_shard_bytes)) + 1  # and a comma
    shard: list[_Row] = []
    first_bytes = empty_header_bytes + ALIGN_BYTES  # the blanks at the end
    header_bytes, data_bytes = first_bytes, 0
    for spec in specs:
        text = entry_text(spec.name, spec.dtype, spec.shape)
        entry_bytes = (len(text) if text.isascii() else len(text.encode())) + num_digits
        if first_bytes + entry_bytes > MAX_HEADER_BYTES:
            raise OptionError(f"tensor {spec.name[:200]!r}...: its name is too long for a safetensors header")
        header_bytes += entry_bytes
        data_bytes += spec.nbytes
        if shard and (header_bytes > MAX_HEADER_BYTES or header_bytes + data_bytes > max_shard_bytes):
            yield shard
            shard, header_bytes, data_bytes = [], first_bytes + entry_bytes, spec.nbytes
        shard.append(_Row(spec, text))
    yield shard


def _lay_out_file(name: str, number: int, rows: list[_Row]) -> LayoutFile:
    rows.sort(key=_by_alignment)  # stable: multiples of 8 bytes keep their order
    ends = list(accumulate((row.spec.nbytes for row in rows), initial=0))
    texts = [row.text + offsets_text(*span) for row, span in zip(rows, pairwise(ends), strict=True)]
    header = build_header(texts, _METADATA)
    tensors = tuple(
        TensorEntry(spec.name, spec.dtype, spec.shape, number, len(header) + begin, spec.nbytes)
        for (spec, _), begin in zip(rows, ends, strict=False)
    )
    return LayoutFile(name, header, tensors, len(header) + ends[-1])


def _by_alignment(row: _Row) -> int:
    """Sort key: the largest power of two, up to 8, that divides the length; largest first."""
    nbytes = row.spec.nbytes | ALIGN_BYTES
    return -(nbytes & -nbytes)
