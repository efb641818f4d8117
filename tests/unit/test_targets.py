"""What one rank of a mesh holds of a tensor, compared with how torch itself cuts tensors up."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fastload.geometry.box import Box
from fastload.geometry.dtensors import is_dtensor, local_of, local_parts
from fastload.geometry.shards import local_shape, shard_boxes, shard_intervals


class Layout(NamedTuple):
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Any, ...]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def torch_cuts(layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """What distribute_tensor gives a rank: each placement splits what the ones before it have left."""
    held = numbered(layout.shape)
    for num_ranks, index, placement in zip(layout.mesh, coordinate, layout.placements, strict=True):
        if not placement.is_replicate():
            held = placement._split_tensor(held, num_ranks, with_padding=False)[0][index]
    return held


def box_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


def placement_of(num_dims: int) -> st.SearchStrategy[Any]:
    if not num_dims:
        return st.just(Replicate())
    dims = st.integers(0, num_dims - 1)
    strided = st.builds(lambda dim, split: _StridedShard(dim, split_factor=split), dims, st.integers(1, 5))
    return st.one_of(st.just(Replicate()), st.builds(Shard, dims), strided)


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 17, 24])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    return Layout(shape, mesh, tuple(draw(placement_of(len(shape))) for _ in mesh))


def torch_holds(layout: Layout, coordinate: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    return shard_intervals(layout.shape, layout.mesh, coordinate, layout.placements)[0]


@given(layouts())
def test_a_rank_holds_what_torch_cuts_for_it(layout: Layout) -> None:
    whole = numbered(layout.shape)
    for coordinate in product(*map(range, layout.mesh)):
        expected = torch_cuts(layout, coordinate)
        held = torch_holds(layout, coordinate)
        assert local_shape(held) == expected.shape
        found = shard_boxes(held)
        assert bool(found) == bool(expected.numel())
        assert sum(box.numel for box, _ in found) == expected.numel()
        for box, within in found:
            assert box.numel
            assert torch.equal(box_of(whole, box), box_of(expected, within))
        assert [box for box, _ in found] == sorted(box for box, _ in found)


@given(layouts())
def test_a_rank_holds_no_two_boxes_that_are_one(layout: Layout) -> None:
    for coordinate in product(*map(range, layout.mesh)):
        for held in torch_holds(layout, coordinate):
            assert all(end < begin for (_, end), (begin, _) in pairwise(held))


@given(layouts())
def test_together_the_ranks_hold_all(layout: Layout) -> None:
    coordinates = list(product(*map(range, layout.mesh)))
    found = [shard_intervals(layout.shape, layout.mesh, one, layout.placements) for one in coordinates]
    copies = 1
    for size, placement in zip(layout.mesh, layout.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    for reading in (0, -1):
        seen = torch.zeros(layout.shape, dtype=torch.int64)
        for held in found:
            for box, _ in shard_boxes(held[reading]):
                box_of(seen, box).add_(1)
        assert torch.equal(seen, torch.full_like(seen, copies))


@given(st.integers(0, 40), st.integers(1, 4), st.integers(2, 4))
def test_fsdp_cuts_what_tensor_parallelism_has_cut(rows: int, num_dp: int, num_tp: int) -> None:
    whole = numbered((rows, 2))
    placements = (Replicate(), _StridedShard(0, split_factor=num_tp), Shard(0))
    for dp, tp in product(range(num_dp), range(num_tp)):
        column = Shard(0)._split_tensor(whole, num_tp, with_padding=False)[0][tp]
        expected = Shard(0)._split_tensor(column, num_dp, with_padding=False)[0][dp]
        held = shard_intervals((rows, 2), (2, num_dp, num_tp), (1, dp, tp), placements)[-1]
        assert local_shape(held) == expected.shape
        for box, within in shard_boxes(held):
            assert torch.equal(box_of(whole, box), box_of(expected, within))


def test_a_lone_strided_shard_has_rows_that_are_not_neighbours() -> None:
    ((rows, columns),) = shard_intervals((8, 3), (2,), (0,), (_StridedShard(0, split_factor=2),))
    assert (rows, columns) == ([(0, 2), (4, 6)], [(0, 3)])
    assert shard_boxes([rows, columns]) == [
        (Box((0, 0), (2, 3)), Box((0, 0), (2, 3))),
        (Box((4, 0), (2, 3)), Box((2, 0), (2, 3))),
    ]


def test_fsdp_with_tensor_parallelism_gives_each_rank_neighbouring_rows() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    rows = [
        shard_intervals((8,), (2, 2), coordinate, placements) for coordinate in product(range(2), range(2))
    ]
    assert rows == [[[[(0, 2)]]], [[[(4, 6)]]], [[[(2, 4)]]], [[[(6, 8)]]]]


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_of_a_plain_tensor_there_is_the_whole(shape: tuple[int, ...]) -> None:
    for tensor in (torch.zeros(shape), torch.nn.Parameter(torch.zeros(shape))):
        assert not is_dtensor(tensor)
        assert local_of(tensor) is tensor
        ((box, part),) = local_parts(tensor)
        assert box == Box.whole(shape)
        assert part is tensor
