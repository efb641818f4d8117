"""Delta checkpoints: the elements in which a checkpoint differs from another one, its base.

A delta has up to three tensors for each tensor T of its base; none if T is unchanged. T is cut into segments
of `segment_elements`::

    T.counts    I32, for each segment the number of changed elements
    T.indices   U16, for each changed element its index in its segment, ascending; none for a segment in
                which the count is that of all elements
    T.values    the new elements, in the order of T

The commit record names the base, and has the checksums of the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastload.errors import CheckpointNotFound, ChecksumError, IncompleteCheckpoint, ManifestError
from fastload.formats.dtypes import DTYPES
from fastload.formats.manifest import (
    CHECKSUM_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    blocks_of_files,
    in_order,
)
from fastload.formats.names import OWN_STEM, SUFFIX
from fastload.formats.open import read_manifest
from fastload.formats.record import checksum, record_digest, require_strides
from fastload.formats.untrusted import show
from fastload.geometry.blocks import num_blocks
from fastload.geometry.ranges import Space
from fastload.storage import CheckpointReader, FileStat, Location, locate
from fastload.storage.reader import LayeredReader

try:
    import numpy
except ImportError:  # comparisons take twice as long then
    numpy = None  # type: ignore[assignment]

Connect = Callable[[Location], CheckpointReader]
"""Opens the storage of a checkpoint."""
COUNTS, INDICES, VALUES = ".counts", ".indices", ".values"

_MAX_SEGMENT_ELEMENTS = 1 << 15  # so that a piece has complete segments
PIECE_BYTES = 4 << 20
"""Bytes to compare at once; each call takes some 0.1 ms of Python."""
_INDEX_BYTES = 2
_COUNT_BYTES = 4
_CACHE_BYTES = 8 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def element_bytes(dtype: str) -> int:
    """Returns the length of an element that a delta replaces; 1 for dtypes of less than a byte."""
    bits = DTYPES[dtype][0]
    return bits // 8 if bits % 8 == 0 else 1


def bits_of(itemsize: int) -> torch.dtype:
    """Returns the integers of the length of an element."""
    return _BITS[itemsize]


def values_dtype(dtype: str) -> str:
    """Returns the safetensors dtype of the values."""
    return dtype if DTYPES[dtype][0] % 8 == 0 else "U8"


def segment_elements(block_bytes: int, itemsize: int) -> int:
    """Returns the length of a segment: 32,768 elements, or a checksum block if that is shorter."""
    return min(_MAX_SEGMENT_ELEMENTS, block_bytes // itemsize)


def fits_deltas(block_bytes: int) -> bool:
    """Whether checksum blocks of this length consist of complete segments."""
    return block_bytes >= 8 and not block_bytes & (block_bytes - 1)


class PieceChanges(NamedTuple):
    """The changes within some segments of a tensor.

    Attributes:
        counts: As in the file; flat, int32.
        indices: As in the file; flat, int16 with the bits of U16.
        values: As in the file; flat, integers of the length of an element.
    """

    counts: Tensor
    indices: Tensor
    values: Tensor

    def of(self, name: str) -> Tensor:
        """Returns the one with the name of a stored tensor."""
        return {COUNTS: self.counts, INDICES: self.indices, VALUES: self.values}[name[name.rindex(".") :]]

    def sizes(self, num_elements: int, segment: int, per_block: int) -> list[tuple[int, int]]:
        """Returns the values and the indices of each block.

        Args:
            num_elements: Elements of all segments.
            segment: Elements of a segment.
            per_block: Segments of a block.
        """
        counts = self.counts.tolist()
        lengths = [min(segment, num_elements - start) for start in range(0, num_elements, segment)]
        sparse = [count * (count < length) for count, length in zip(counts, lengths, strict=True)]
        return [
            (sum(counts[at : at + per_block]), sum(sparse[at : at + per_block]))
            for at in range(0, len(counts), per_block)
        ]


def encode(new: Tensor, old: Tensor, itemsize: int, segment: int) -> PieceChanges | None:
    """Returns the elements that differ in some segments; None if none does.

    Args:
        new: The bytes of the segments; flat uint8.
        old: Those of the base.
        itemsize: Length of an element in bytes.
        segment: Elements of a segment.
    """
    array: Any = numpy or torch
    elements: Any
    changed: Any
    elements, before = new.view(_BITS[itemsize]), old.view(_BITS[itemsize])
    if numpy is not None:
        elements = elements.numpy()
        changed = numpy.flatnonzero(elements != before.numpy())
    else:
        changed = torch.nonzero(elements != before).flatten()
    if not len(changed):
        return None
    bounds = array.arange(num_blocks(len(elements), segment) + 1) * segment
    counts = array.diff(array.searchsorted(changed, bounds))
    lengths = (len(elements) - bounds[:-1]).clip(max=segment)
    is_dense = counts * (_INDEX_BYTES + itemsize) >= lengths * itemsize
    positions = changed
    if is_dense.any():
        of_all = elements, changed, counts, lengths, is_dense
        elements, changed, counts, lengths, is_dense = map(torch.as_tensor, of_all)
        replaced = torch.repeat_interleave(is_dense, lengths)
        changed = changed[~replaced[changed]]
        replaced[changed] = True
        positions = torch.nonzero(replaced).flatten()
        counts = torch.where(is_dense, lengths, counts)
    indices, values = changed & (segment - 1), elements.take(positions)
    return PieceChanges(
        torch.as_tensor(counts).to(torch.int32),
        torch.as_tensor(indices).to(torch.int16),
        torch.as_tensor(values),
    )


def decode(counts: Tensor, indices: Tensor, lengths: Tensor, segment: int) -> Tensor:
    """Returns the position of each value, counted from the first of some segments.

    Args:
        counts: Of these segments; any integers.
        indices: Of these segments; int16, none of them negative.
        lengths: Elements of each.
        segment: Elements of any but the last.
    """
    counts = counts.to(torch.int64)
    starts = torch.repeat_interleave(torch.arange(len(counts)) * segment, counts)
    dense = counts == lengths
    if not bool(dense.any()):
        return starts.add_(indices)
    is_dense = torch.repeat_interleave(dense, counts)
    firsts = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    within = torch.arange(len(starts)).sub_(firsts)  # right where all elements are there
    within[~is_dense] = indices.to(torch.int64)
    return starts.add_(within)


class Changes(NamedTuple):
    """The stored tensors of one changed tensor.

    Attributes:
        tensor: The tensor of the result.
        counts: Its counts.
        indices: Its indices.
        values: Its values.
    """

    tensor: TensorEntry
    counts: TensorEntry
    indices: TensorEntry
    values: TensorEntry

    @property
    def itemsize(self) -> int:
        """Length of an element in bytes."""
        return element_bytes(self.tensor.dtype)


class SegmentTable(NamedTuple):
    """Where the changes of each segment of a tensor are.

    Attributes:
        segment: Elements of a segment.
        lengths: Elements of each segment.
        counts: Values of each segment.
        value_starts: Number of the first value of each segment, and of all values.
        index_starts: Likewise of the indices.
    """

    segment: int
    lengths: Tensor
    counts: Tensor
    value_starts: Tensor
    index_starts: Tensor

    @classmethod
    def of(cls, changes: Changes, block_bytes: int, counts: Tensor, url: str) -> SegmentTable:
        """Makes the table from the counts, which are untrusted.

        Raises:
            ManifestError: They contradict the shapes of the other tensors.
        """
        segment = segment_elements(block_bytes, changes.itemsize)
        num_elements = changes.tensor.nbytes // changes.itemsize
        lengths = (num_elements - torch.arange(len(counts)) * segment).clamp(max=segment)
        counts = counts.to(torch.int64)
        num_indices = torch.where(counts == lengths, 0, counts)
        zero = torch.zeros(1, dtype=torch.int64)
        table = cls(
            segment,
            lengths,
            counts,
            torch.cat([zero, torch.cumsum(counts, 0)]),
            torch.cat([zero, torch.cumsum(num_indices, 0)]),
        )
        is_valid = bool(((counts >= 0) & (counts <= lengths)).all())
        totals = [int(table.value_starts[-1]), int(table.index_starts[-1])]
        if not is_valid or totals != [changes.values.shape[0], changes.indices.shape[0]]:
            raise ManifestError(
                f"{url}: the counts of {show(changes.tensor.name)} contradict its indices and values"
            )
        return table

    def within(self, first: int, last: int) -> range:
        """Returns the segments with elements from `first` to before `last`."""
        return range(first // self.segment, num_blocks(last, self.segment))

    def require_ascending(self, segments: range, indices: Tensor, url: str) -> None:
        """Requires that the indices of some segments are ascending, and within their segments.

        Raises:
            ManifestError: They are not.
        """
        starts = self.index_starts[segments.start : segments.stop + 1]
        starts, lengths = starts - starts[0], self.lengths[segments.start : segments.stop]
        is_sparse = starts[1:] > starts[:-1]
        firsts, ends = starts[:-1][is_sparse], starts[1:][is_sparse]
        rises = indices[1:] > indices[:-1]
        rises[firsts[1:] - 1] = True
        is_valid = rises.all() & (indices[firsts] >= 0).all() & (indices[ends - 1] < lengths[is_sparse]).all()
        if not bool(is_valid):
            raise ManifestError(f"{url}: indices of changes are not ascending, or out of bounds")

    def positions(self, segments: range, indices: Tensor) -> Tensor:
        """Returns the elements of the tensor that the values of some segments replace.

        Args:
            segments: The segments.
            indices: Their indices, which passed `require_ascending`.
        """
        within = slice(segments.start, segments.stop)
        found = decode(self.counts[within], indices, self.lengths[within], self.segment)
        return found.add_(segments.start * self.segment)


def find_changes(base: Manifest, stored: Manifest) -> dict[str, Changes]:
    """Pairs the tensors of a delta with those of its base.

    Raises:
        ManifestError: They do not fit each other.
    """
    found: dict[str, Changes] = {}
    others = {entry.name for entry in stored.tensors if not _is_own(stored, entry)}
    for entry in base.tensors:
        names = [entry.name + ending for ending in (COUNTS, INDICES, VALUES)]
        if _is_own(base, entry) or names[0] not in others:
            continue
        parts = [stored.by_name.get(name) for name in names]
        itemsize = element_bytes(entry.dtype)
        num_segments = num_blocks(entry.nbytes, segment_elements(stored.block_bytes, itemsize) * itemsize)
        specs = [(part.dtype, len(part.shape)) for part in parts if part is not None]
        if specs != [("I32", 1), ("U16", 1), (values_dtype(entry.dtype), 1)] or (
            parts[0] is not None and parts[0].shape != (num_segments,)
        ):
            raise ManifestError(f"{stored.url}: the changes of tensor {show(entry.name)} do not fit it")
        found[entry.name] = Changes(entry, *parts)  # type: ignore[arg-type]
        others.difference_update(names)
    if others:
        raise ManifestError(f"{stored.url}: no changes of a tensor of the base: {show(sorted(others))}")
    return found


def _is_own(manifest: Manifest, entry: TensorEntry) -> bool:
    """Whether a tensor is in a file of `PerRank` values, which each checkpoint has of its own."""
    return is_own_file(manifest.files[entry.file].name)


def is_own_file(name: str) -> bool:
    """Whether a file has `PerRank` values."""
    return name == f"{OWN_STEM}{SUFFIX}" or name.startswith(f"{OWN_STEM}-")


def require_base(stored: Manifest, base: Manifest) -> None:
    """Requires that a checkpoint is the base of a delta.

    Raises:
        ManifestError: It is another one.
    """
    assert stored.delta is not None
    num_deltas = base.delta.num_deltas if base.delta is not None else 0
    if base.record_digest != stored.delta.digest or num_deltas + 1 != stored.delta.num_deltas:
        raise ManifestError(
            f"{stored.url}: a delta of the checkpoint with digest {stored.delta.digest}, and {base.url} has "
            f"digest {base.record_digest or 'none'}: its base was replaced",
            is_damage=True,
        )


def result_of(base: Manifest, stored: Manifest) -> Manifest:
    """Returns the manifest of the result of a delta: the files and tensors that a complete checkpoint has.

    Args:
        base: The base; if it is a delta, its result.
        stored: The files of the delta.

    Raises:
        ManifestError: They do not fit each other.
    """
    require_base(stored, base)
    delta = stored.delta
    assert delta is not None
    if not fits_deltas(stored.block_bytes):
        raise ManifestError(f"{stored.url}: a delta with checksum blocks of {stored.block_bytes} bytes")
    made = {file.name: number for number, file in enumerate(base.files) if not is_own_file(file.name)}
    if made.keys() != delta.checksums.keys():
        raise ManifestError(
            f"{stored.url}: its result has files {show(sorted(delta.checksums))}, "
            f"those of its base are {show(sorted(made))}"
        )
    wanted = blocks_of_files(base, stored.block_bytes)
    files: list[FileEntry] = []
    numbers: dict[int, int] = {}
    for name, number in made.items():
        checksums = bytes.fromhex(delta.checksums[name])
        if len(checksums) != wanted[number] * CHECKSUM_BYTES:
            raise ManifestError(
                f"{stored.url}: the checksums of {show(name)} are not of {wanted[number]} blocks"
            )
        numbers[number] = len(files)
        files.append(replace(base.files[number], version="", checksums=checksums))
    tensors = [replace(entry, file=numbers[entry.file]) for entry in base.tensors if entry.file in numbers]
    for number, file in enumerate(stored.files):
        if is_own_file(file.name):
            own = [entry for entry in stored.tensors if entry.file == number]
            tensors += [replace(entry, file=len(files)) for entry in own]
            files.append(file)
    require_strides(tensors, stored.strides, stored.url)
    return replace(stored, files=tuple(files), tensors=tuple(in_order(tensors)))


class DeltaReader(LayeredReader):
    """The files of the result of a delta: those of the base, with the changes in place.

    The blocks of the delta are verified when they are read.

    Args:
        base: Reads the base.
        base_manifest: The base; if it is a delta, its result.
        stored: Reads the files of the delta.
        stored_manifest: The files of the delta.
        result: See `result_of`.

    Raises:
        ManifestError: The tensors of the delta do not fit those of the base.
    """

    def __init__(
        self,
        base: CheckpointReader,
        base_manifest: Manifest,
        stored: CheckpointReader,
        stored_manifest: Manifest,
        result: Manifest,
    ) -> None:
        super().__init__(stored, base)
        self._base = base
        self._versions = {file.name: file.version for file in base_manifest.files}
        self._sizes = {file.name: file.nbytes for file in result.files if not is_own_file(file.name)}
        self._numbers = {file.name: number for number, file in enumerate(result.files)}
        self._tensors = Space([entry for entry in result.tensors if entry.nbytes])
        self._changes = ChangesReader(stored, stored_manifest, find_changes(base_manifest, stored_manifest))

    def stat(self, name: str) -> FileStat | None:
        if name in self._sizes:
            return FileStat(self._sizes[name], "")
        return super().stat(name)

    def map(self, name: str) -> None:
        return None

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        if name not in self._sizes:
            super().read_into(name, offset, buffers, version)
            return
        self._base.read_into(name, offset, buffers, self._versions[name])
        for buffer in buffers:
            file, tensors = self._numbers[name], self._tensors
            for number, begin, end in tensors.overlapping(file, offset, offset + len(buffer)):
                entry = tensors.ranges[number]
                first = entry.offset + begin - offset
                self._changes.apply(entry.name, begin, end, buffer[first : first + end - begin])
            offset += len(buffer)


class ChangesReader:
    """Reads changes from the files of a delta, and verifies the blocks it reads. Thread-safe.

    Args:
        storage: Reads the files of the delta.
        manifest: The files of the delta.
        changes: The changed tensors, by name.
    """

    def __init__(self, storage: CheckpointReader, manifest: Manifest, changes: dict[str, Changes]) -> None:
        self._storage = storage
        self._manifest = manifest
        self._changes = changes
        self._tables: dict[str, SegmentTable] = {}
        self._block = lru_cache(_CACHE_BYTES // manifest.block_bytes + 1)(
            partial(_read_block, storage, manifest)
        )

    def apply(self, name: str, begin: int, end: int, data: memoryview) -> None:
        """Replaces the changed elements in a byte range of a tensor of the base.

        Raises:
            ChecksumError: A block of the delta is damaged.
            ManifestError: The changes are malformed.
            StorageError: Storage failed.
        """
        changes = self._changes.get(name)
        if changes is None:
            return
        size, table = changes.itemsize, self._table(changes)
        first, last = begin // size, num_blocks(end, size)
        segments = table.within(first, last)
        starts = [int(table.value_starts[at]) for at in (segments.start, segments.stop)]
        if starts[0] == starts[1]:
            return
        of_indices = [int(table.index_starts[at]) for at in (segments.start, segments.stop)]
        indices = self._read(changes.indices, _INDEX_BYTES, *of_indices)
        values = self._read(changes.values, size, *starts).view(_BITS[size])
        table.require_ascending(segments, indices := indices.view(torch.int16), self._manifest.url)
        positions = table.positions(segments, indices)
        here = (positions >= first) & (positions < last)
        positions, values = positions[here], values[here]
        into = torch.frombuffer(data, dtype=torch.uint8)
        if begin % size or end % size or into.data_ptr() % size:  # by bytes
            spread = (positions * size - begin).unsqueeze(1) + torch.arange(size)
            bits = values.view(torch.uint8).view(-1, size)
            inside = (spread >= 0) & (spread < len(into))
            into[spread[inside]] = bits[inside]
        else:
            into.view(_BITS[size])[positions - first] = values

    def _table(self, changes: Changes) -> SegmentTable:
        name = changes.tensor.name
        if name not in self._tables:
            counts = self._read(changes.counts, _COUNT_BYTES, 0, changes.counts.shape[0]).view(torch.int32)
            self._tables[name] = SegmentTable.of(
                changes, self._manifest.block_bytes, counts, self._manifest.url
            )
        return self._tables[name]

    def _read(self, entry: TensorEntry, size: int, first: int, last: int) -> Tensor:
        """Reads elements of a stored tensor, in complete blocks; flat uint8."""
        begin, end, length = first * size, last * size, self._manifest.block_bytes
        data = bytearray(end - begin)
        for number in range(begin // length, num_blocks(end, length)):
            start = number * length
            block = self._block(entry, start)
            lower, upper = max(begin, start), min(end, start + len(block))
            data[lower - begin : upper - begin] = block[lower - start : upper - start]
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _read_block(storage: CheckpointReader, manifest: Manifest, entry: TensorEntry, start: int) -> bytearray:
    """Reads the block at an offset of a tensor, and verifies it."""
    file = manifest.files[entry.file]
    found = manifest.blocks.at(entry.file, entry.offset + start)
    assert found is not None
    _, expected = manifest.recorded(found)
    data = bytearray(found.nbytes)
    for _ in range(2):  # again, in case it was damaged on the way
        storage.read_into(file.name, found.offset, [memoryview(data)], file.version)
        if checksum(memoryview(data)) == expected:
            return data
    text = manifest.describe_damage(found, entry.name, checksum(memoryview(data)))
    raise ChecksumError(f"damaged: {text}", (text,))


def is_next_to_base(stored: Manifest, location: Location, connect: Connect) -> bool:
    """Whether the base of a delta is in the same directory.

    Args:
        stored: The delta.
        location: Its location.
        connect: Opens a storage.
    """
    assert stored.delta is not None
    with closing(connect(location.sibling(stored.delta.base))) as storage:
        return record_digest(storage) == stored.delta.digest


def location_of_base(name: str, location: Location, bases: str | os.PathLike[str] | None) -> Location:
    """Returns where a base is: next to its delta, or in another directory that the user named.

    Args:
        name: Name of its directory.
        location: The delta.
        bases: The other directory; None for the same one.
    """
    return location.sibling(name) if bases is None else locate(bases) / name


def missing_base(stored: Manifest, location: Location, error: CheckpointNotFound) -> IncompleteCheckpoint:
    """Returns the error for a base that is missing."""
    return IncompleteCheckpoint(
        f"{stored.url}: a delta of {location}: {error}. If that is in another directory, name the directory "
        "with bases= or FASTLOAD_BASES"
    )


def read_chain(
    location: Location,
    connect: Connect,
    bases: str | os.PathLike[str] | None = None,
    *,
    head: Manifest | None = None,
) -> list[tuple[Location, Manifest]]:
    """Reads the files of a checkpoint and, if it is a delta, of its base, and so on.

    Args:
        location: The checkpoint.
        connect: Opens a storage.
        bases: Where bases are that are not next to their deltas.
        head: The files of the checkpoint, if they are known.

    Returns:
        Locations and manifests, those of the complete checkpoint last.

    Raises:
        CheckpointNotFound: The checkpoint does not exist.
        CheckpointError: A checkpoint is incomplete or malformed, or a base is missing or was replaced.
        StorageError: Storage failed.
    """
    found: list[tuple[Location, Manifest]] = []
    while True:
        try:
            manifest = head if head is not None and not found else _read_stored(location, connect)
        except CheckpointNotFound as error:
            if not found:
                raise
            raise missing_base(found[-1][1], location, error) from None
        if found:
            require_base(found[-1][1], manifest)
        found.append((location, manifest))
        if (delta := manifest.delta) is None:
            return found
        is_near = bases is None or is_next_to_base(manifest, location, connect)
        location = location_of_base(delta.base, location, None if is_near else bases)


def _read_stored(location: Location, connect: Connect) -> Manifest:
    with closing(connect(location)) as storage:
        return read_manifest(storage)


def result_of_chain(manifests: Sequence[Manifest]) -> Manifest:
    """Returns the result of what `read_chain` returned.

    Raises:
        ManifestError: The manifests do not fit each other.
    """
    result, *deltas = reversed(manifests)
    for stored in deltas:
        find_changes(result, stored)
        result = result_of(result, stored)
    return result


def layered(chain: Sequence[tuple[Manifest, CheckpointReader]]) -> tuple[Manifest, CheckpointReader]:
    """Returns the result of a chain of deltas, and the storage that its files are read from.

    Args:
        chain: The complete checkpoint, and the files of each delta after it.

    Raises:
        ManifestError: They do not fit each other.
    """
    manifest, storage = chain[0]
    for stored, of_delta in chain[1:]:
        result = result_of(manifest, stored)
        storage = DeltaReader(storage, manifest, of_delta, stored, result)
        manifest = result
    return manifest, storage
