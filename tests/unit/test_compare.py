"""What the ranks compare of the tensors that several of them hold, before a save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
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
    digests = ShardDigests("small", **how).of(layout, ShardMap(layout, num_ranks), reader, 0, limit_s=60)
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


class DeviceReader(StateReader):
    """Reads tensors as if they were on a device."""

    def is_in_host_memory(self, name: str) -> bool:
        return False


@cache
def on_device() -> DeviceReader:
    tensors = {**large(), "odd": torch.zeros(99_999, 3, dtype=torch.uint8), "small": torch.zeros(1 << 14)}
    return DeviceReader(laid_out(tensors), tensors)


def read_on_device(num_ranks: int, occasion: str = "a", rank: int = 0, **how: Any) -> list[ShardRange]:
    reader, compared = on_device(), ShardDigests("small", occasion, **how)
    shard_map = ShardMap(reader._layout, num_ranks)
    return list(compared.ranges_on_devices(reader._layout, shard_map, reader, rank).values())


@pytest.mark.parametrize("num_ranks", [2, 8, 64, 4096])
def test_devices_read_eight_times_what_a_rank_writes_at_most(num_ranks: int) -> None:
    """All of a small tensor; of a large one everything, as long as few ranks hold it."""
    ranges = read_on_device(num_ranks)
    assert [each.tensor for each in ranges] == list(range(5))
    for each in ranges:
        nbytes, length = each.shard.runs.total, each.end - each.begin
        if nbytes <= 1 << 16 or num_ranks <= 8:
            assert (each.begin, length) == (0, nbytes)
        else:
            assert abs(length - 8 * nbytes / num_ranks) <= 16
        assert each.begin % 16 == 0
        assert each.end % 16 == 0 or each.end == nbytes
    assert read_on_device(num_ranks, rank=1) == ranges, "the same on all ranks"


def test_devices_read_other_parts_on_each_occasion() -> None:
    seen = [read_on_device(64, f"step_{step}")[2] for step in range(60)]
    assert sorted({(each.begin, each.end) for each in seen}) == [
        (part << 24, (part + 1) << 24) for part in range(8)
    ], "all in time"
    several = read_on_device(64)
    assert len({each.begin * 8 // each.shard.runs.total for each in several[:4]}) > 1, (
        "not all tensors the same"
    )


def test_devices_do_not_read_again_what_was_compared_completely() -> None:
    assert [each.tensor for each in read_on_device(4, complete={"t1"})] == [0, 2, 3, 4]
