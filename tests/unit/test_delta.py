"""The changes within a piece: encoded and decoded bit for bit, with NumPy and without it."""

from __future__ import annotations

import random

import pytest
import torch

from fastload.ext.deltas import encoding as delta

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("has_numpy", [True, False])
def test_changes_are_those_of_the_elements(monkeypatch: pytest.MonkeyPatch, has_numpy: bool) -> None:
    if not has_numpy:
        monkeypatch.setattr(delta, "numpy", None)
    elif delta.numpy is None:
        pytest.skip("NumPy is not installed")
    for seed in range(60):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        itemsize = rng.choice([1, 2, 4, 8])
        segment = delta.segment_elements(rng.choice([4096, 1 << 18]), itemsize)
        count = rng.choice([1, 3, segment, segment + 1, rng.randint(1, delta.PIECE_BYTES // itemsize)])
        count = min(count, delta.PIECE_BYTES // itemsize)
        old = torch.randint(-99, 99, (count,), generator=generator).to(WORDS[itemsize])
        differs = torch.rand(count, generator=generator) < rng.choice([0, 0.001, 0.02, 0.4, 1])
        if rng.random() < 0.3:
            differs[:segment] = True
        new = torch.where(differs, old + 1, old)
        changes = delta.encode(new.view(torch.uint8), old.clone().view(torch.uint8), itemsize, segment)
        if changes is None:
            assert not differs.any()
            continue
        lengths = (count - torch.arange(len(changes.counts)) * segment).clamp(max=segment)
        positions = delta.decode(changes.counts, changes.indices, lengths, segment)
        assert len(positions) == len(changes.values) <= count
        assert changes.indices.nbytes + changes.values.nbytes <= new.nbytes
        patched = old.clone()
        patched[positions] = changes.values
        assert torch.equal(patched, new)
