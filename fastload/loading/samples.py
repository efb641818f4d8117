"""Samples of the data of a checkpoint: how copies on different hosts are compared, whatever their size."""

from __future__ import annotations

from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.formats.reading import in_threads, read_bytes
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.extents import Extent, Space
from fastload.storage import PatientStorage

__all__ = ["difference", "read_samples", "samples_of"]

_NUM_EACH = 256
_SAMPLE_BYTES = 4096
_NUM_READERS = 8


def samples_of(manifest: Manifest) -> list[Extent]:
    """Returns which ranges are compared: in the order of the bytes, the same on all ranks.

    One of each tensor, or of 256 tensors if there are more, and as many at equal distances: so whatever
    takes a 256th of the bytes is compared, too. 2 MiB in all.
    """
    space = Space([extent for extent in manifest.extents if extent.nbytes])
    if not (num_extents := len(space.extents)):
        return []
    num_tensors = min(_NUM_EACH, num_extents)
    chosen = [number * num_extents // num_tensors for number in range(num_tensors)]
    middles = [space.starts[index] + space.extents[index].nbytes // 2 for index in chosen]
    evenly = [
        (2 * number + 1) * space.nbytes // (2 * _NUM_EACH) for number in range(_NUM_EACH * bool(chosen))
    ]
    return sorted({_around(space, position) for position in middles + evenly})


def _around(space: Space[TensorEntry | Piece], position: int) -> Extent:
    """Returns the page of a file around a position, as far as it is of the same extent."""
    index = space.at(position)
    extent = space.extents[index]
    at = extent.offset + position - space.starts[index]
    begin = max(extent.offset, at - at % _SAMPLE_BYTES)
    end = min(extent.offset + extent.nbytes, at - at % _SAMPLE_BYTES + _SAMPLE_BYTES)
    return Extent(extent.file, begin, end - begin)


def read_samples(storage: PatientStorage, manifest: Manifest) -> bytes:
    """Reads the samples; returns the checksum of each, one after the other.

    Raises:
        StorageError: Storage failed.
    """

    def read(sample: Extent) -> bytes:
        name = manifest.files[sample.file].name
        return checksum(read_bytes(storage, name, sample.offset, sample.nbytes))

    return b"".join(in_threads(read, samples_of(manifest), 1 if storage.in_order else _NUM_READERS))


def difference(storage: PatientStorage, manifest: Manifest, wanted: bytes) -> Extent | None:
    """Returns the first sample that has other bytes here than where `read_samples` read these.

    Raises:
        StorageError: Storage failed.
    """
    found = read_samples(storage, manifest)
    for number, sample in enumerate(samples_of(manifest)):
        at = slice(number * CHECKSUM_BYTES, (number + 1) * CHECKSUM_BYTES)
        if found[at] != wanted[at]:
            return sample
    return None
