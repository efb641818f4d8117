"""Extents laid end to end, their checksum blocks, boxes as runs: what is computed is what counting finds."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.geometry.blocks import Block, Blocks
from fastload.geometry.box import Box, Runs, runs_of
from fastload.geometry.ranges import ByteRange, Space


@st.composite
def spaces(draw: st.DrawFn) -> Space[ByteRange]:
    """Extents in the order of their bytes, with gaps, in some files."""
    extents, file, offset = [], 0, 0
    for _ in range(draw(st.integers(1, 12))):
        if next_files := draw(st.integers(0, 2)):
            file, offset = file + next_files, 0
        offset += draw(st.integers(0, 5))
        nbytes = draw(st.integers(1, 20))
        extents.append(ByteRange(file, offset, nbytes))
        offset += nbytes
    return Space(extents)


def bytes_of(space: Space[ByteRange]) -> list[tuple[int, int]]:
    """(file, offset) of every byte, in order."""
    return [(e.file, e.offset + at) for e in space.ranges for at in range(e.nbytes)]


@given(spaces(), st.data())
def test_a_range_is_cut_into_the_bytes_it_has(space: Space[ByteRange], data: st.DataObject) -> None:
    everything = bytes_of(space)
    assert space.nbytes == len(everything)
    start = data.draw(st.integers(0, space.nbytes))
    nbytes = data.draw(st.integers(0, space.nbytes - start))
    found = [
        (space.ranges[index].file, space.ranges[index].offset + at)
        for index, begin, end in space.cut(start, nbytes)
        for at in range(begin, end)
    ]
    assert found == everything[start : start + nbytes]


@given(spaces(), st.integers(-1, 7), st.integers(0, 200))
def test_an_extent_is_found_by_a_byte_of_its_file(space: Space[ByteRange], file: int, offset: int) -> None:
    before = [n for n, e in enumerate(space.ranges) if (e.file, e.offset) <= (file, offset)]
    assert space.find(file, offset) == (before[-1] if before else -1)


@given(spaces(), st.integers(1, 9), st.data())
def test_blocks_tile_each_extent(space: Space[ByteRange], block_bytes: int, data: st.DataObject) -> None:
    blocks = Blocks(space, block_bytes)
    expected = [
        (index, e.file, e.offset + at, min(block_bytes, e.nbytes - at))
        for index, e in enumerate(space.ranges)
        for at in range(0, e.nbytes, block_bytes)
    ]
    assert len(blocks) == len(expected)
    assert blocks.longest_bytes == max(nbytes for *_, nbytes in expected)
    everything = [(index, Block(number, *rest)) for number, (index, *rest) in enumerate(expected)]
    assert [(blocks.owner(number), blocks[number]) for number in range(len(blocks))] == everything
    file, begin = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 120))
    end = begin + data.draw(st.integers(0, 60))
    inside = [(n, b) for n, b in everything if b.file == file and begin <= b.offset < end]
    assert list(blocks.between(file, begin, end)) == inside
    for _, block in inside:
        assert blocks.number_at(file, block.offset) == block.number
        assert blocks.number_at(file, block.end - 1) == block.number
    position = data.draw(st.integers(0, space.nbytes - 1))
    starts = [0]
    for _, block in everything:
        starts.append(starts[-1] + block.nbytes)
    assert blocks.floor(position) == max(start for start in starts[:-1] if start <= position)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, Box, tuple[int, ...]]:
    """Two boxes, not empty, of one tensor, and its shape."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))

    def box() -> Box:
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        return Box(offsets, tuple(draw(st.integers(1, n - at)) for at, n in zip(offsets, shape, strict=True)))

    return box(), box(), shape


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Row-major positions of the elements of a box."""
    whole = torch.arange(prod(shape)).reshape(shape)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    found: list[int] = whole.flatten().tolist()
    return found


@given(boxes())
def test_boxes_are_the_runs_that_describe_them(drawn: tuple[Box, Box, tuple[int, ...]]) -> None:
    box, other, shape = drawn
    runs, expected = runs_of(box, shape), elements(box, shape)
    assert [at + n for at in runs.starts() for n in range(runs.length)] == expected
    assert (runs.num_runs * runs.length, runs.end) == (box.numel, expected[-1] + 1)
    gaps = sum(1 for before, after in pairwise(expected) if after != before + 1)
    assert runs.num_runs == gaps + 1, "as few as there are"
    assert list(runs.scaled(4).starts()) == [4 * at for at in runs.starts()]
    common, shared = box.intersect(other), sorted({*expected} & {*elements(other, shape)})
    assert (elements(common, shape) if common is not None else []) == shared


def test_runs_of_a_large_box_are_not_listed() -> None:
    shape = (1 << 20, 1 << 10, 1 << 10)
    runs = runs_of(Box((0, 5, 7), (1 << 20, 100, 10)), shape)
    assert runs == Runs(5 * 1024 + 7, 10, ((1 << 20, 1 << 20), (100, 1024)))
    assert runs_of(Box.whole(shape), shape) == Runs(0, prod(shape), ())


@given(boxes(), st.data())
def test_runs_are_counted_and_cut_as_their_bytes_lie(
    case: tuple[Box, Box, tuple[int, ...]], data: st.DataObject
) -> None:
    box, _, shape = case
    runs = runs_of(box, shape)
    places = [at for start in runs.starts() for at in range(start, start + runs.length)]
    assert runs.total == len(places)
    position = data.draw(st.integers(-1, prod(shape) + 1))
    assert runs.before(position) == sum(at < position for at in places)
    begin = data.draw(st.integers(0, runs.total))
    end = data.draw(st.integers(begin, runs.total))
    pieces = list(runs.cut(begin, end))
    assert [at for one in pieces for start in one.starts() for at in range(start, start + one.length)] == (
        places[begin:end]
    )
    assert len(pieces) <= 2 * len(runs.steps) + 1
