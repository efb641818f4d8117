"""What the ranks compare of the tensors that several of them hold, before a save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fastload.formats.dtypes import safetensors_spec
from fastload.saving.compare import ShardDigests
from fastload.saving.layout import Layout, TensorSpec, lay_out
from fastload.saving.messages import ShardRange
from fastload.saving.reader import StateReader
from fastload.saving.shard_map import ShardMap


class NotingReader(StateReader):
    """Notes the ranges that are read."""

    ranges: list[ShardRange]

    def copy(self, ranges: Iterable[ShardRange], out: Tensor) -> None:
        ranges = list(ranges)
        self.ranges.extend(ranges)
        super().copy(ranges, out)


def read_by(tensors: Mapping[str, Tensor], num_ranks: int, **how: Any) -> tuple[list[ShardRange], bytes]:
    """What one of some ranks reads to compare what all hold, and the digests."""
    layout = laid_out(tensors)
    reader = NotingReader(layout, tensors)
    reader.ranges = []
    digests = ShardDigests("small", **how).of(layout, ShardMap(layout, num_ranks), reader, 0)
    return reader.ranges, digests


def laid_out(tensors: Mapping[str, Tensor]) -> Layout:
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]
    return lay_out(specs, max_shard_bytes=1 << 40, block_bytes=None)


def large() -> dict[str, Tensor]:
    return {
        f"t{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate([1 << 17, 1 << 20, 1 << 27])
    }


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_each_large_tensor_costs_a_hundredth_of_what_a_rank_reads_at_most(num_ranks: int) -> None:
    tensors = large()
    ranges, _ = read_by(tensors, num_ranks, occasion="a")
    assert [each.tensor for each in ranges] == list(range(len(tensors)))
    for each, tensor in zip(ranges, tensors.values(), strict=True):
        share = tensor.nbytes / num_ranks
        assert 16 <= each.end - each.begin <= 0.01 * share
        assert 0 <= each.begin < each.end <= tensor.nbytes


def test_other_bytes_are_compared_on_each_occasion_and_all_in_time() -> None:
    tensors = {"w": torch.zeros(1 << 17, dtype=torch.uint8)}
    begins = [read_by(tensors, 2, occasion=f"runs/a/step_{step}")[0][0].begin for step in range(400)]
    assert len(set(begins)) > 390
    assert len({begin * 32 // tensors["w"].nbytes for begin in begins}) == 32, "from anywhere"
    assert begins[:9] == [
        read_by(tensors, 2, occasion=f"runs/a/step_{step}")[0][0].begin for step in range(9)
    ], "the same on all ranks"


def test_what_may_be_different_tensors_is_compared_completely() -> None:
    tensors = large()
    ranges, before = read_by(tensors, 4, complete={"t1"})
    read = sum(each.end - each.begin for each in ranges if each.tensor == 1)
    assert read == tensors["t1"].nbytes
    tensors["t1"][-1] = 1
    _, after = read_by(tensors, 4, complete={"t1"})
    assert [before[at : at + 8] != after[at : at + 8] for at in (0, 8, 16)] == [False, True, False]
