"""Which samples of a checkpoint are compared: few, of every large tensor, and of all if those are few."""

from __future__ import annotations

import pytest

from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.loading.access import samples_of


def manifest_of(sizes: list[int], per_file: int = 7) -> Manifest:
    tensors, offset = [], 0
    for number, nbytes in enumerate(sizes):
        offset = 100 if number % per_file == 0 else offset
        tensors.append(TensorEntry(f"t{number}", "U8", (nbytes,), number // per_file, offset, nbytes))
        offset += nbytes
    files = tuple(FileEntry(f"{number}", 0, "", "") for number in range(-(-len(sizes) // per_file)))
    return Manifest("x", files, tuple(tensors))


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [1], [3, 0, 5000], [10] * 255 + [1 << 30], [1 << 40], [123_457] * 1000, [0, 17, 99_999] * 3000],
)
def test_samples(sizes: list[int]) -> None:
    manifest = manifest_of(sizes)
    samples = samples_of(manifest)
    assert len(samples) <= 512
    assert samples == sorted(set(samples))
    tensors = [one for one in manifest.tensors if one.nbytes]
    sampled = set()
    for sample in samples:
        [within] = [
            one
            for one in tensors
            if one.file == sample.file and one.offset <= sample.offset < one.offset + one.nbytes
        ]
        assert 0 < sample.nbytes <= min(4096, within.offset + within.nbytes - sample.offset)
        sampled.add(within.name)
    assert len(sampled) >= min(len(tensors), 256)
    large = {one.name for one in tensors if one.nbytes >= manifest.nbytes / 256}
    assert large <= sampled
