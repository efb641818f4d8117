"""Extents laid end to end, and their checksum blocks: bisecting finds what counting finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastload.geometry.blocks import Block, Blocks
from fastload.geometry.extents import Extent, Space


@st.composite
def spaces(draw: st.DrawFn) -> Space[Extent]:
    """Extents in the order of their bytes, with gaps, in some files."""
    extents, file, offset = [], 0, 0
    for _ in range(draw(st.integers(1, 12))):
        if next_files := draw(st.integers(0, 2)):
            file, offset = file + next_files, 0
        offset += draw(st.integers(0, 5))
        nbytes = draw(st.integers(1, 20))
        extents.append(Extent(file, offset, nbytes))
        offset += nbytes
    return Space(extents)


def bytes_of(space: Space[Extent]) -> list[tuple[int, int]]:
    """(file, offset) of every byte, in order."""
    return [(e.file, e.offset + at) for e in space.extents for at in range(e.nbytes)]


@given(spaces(), st.data())
def test_a_range_is_cut_into_the_bytes_it_has(space: Space[Extent], data: st.DataObject) -> None:
    everything = bytes_of(space)
    assert space.nbytes == len(everything)
    start = data.draw(st.integers(0, space.nbytes))
    nbytes = data.draw(st.integers(0, space.nbytes - start))
    found = [
        (space.extents[index].file, space.extents[index].offset + at)
        for index, begin, end in space.cut(start, nbytes)
        for at in range(begin, end)
    ]
    assert found == everything[start : start + nbytes]


@given(spaces(), st.integers(-1, 7), st.integers(0, 200))
def test_an_extent_is_found_by_a_byte_of_its_file(space: Space[Extent], file: int, offset: int) -> None:
    before = [n for n, e in enumerate(space.extents) if (e.file, e.offset) <= (file, offset)]
    assert space.find(file, offset) == (before[-1] if before else -1)


@given(spaces(), st.integers(1, 9), st.data())
def test_blocks_tile_each_extent(space: Space[Extent], block_bytes: int, data: st.DataObject) -> None:
    blocks = Blocks(space, block_bytes)
    expected = [
        (index, e.file, e.offset + at, min(block_bytes, e.nbytes - at))
        for index, e in enumerate(space.extents)
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
    position = data.draw(st.integers(0, space.nbytes - 1))
    starts = [0]
    for _, block in everything:
        starts.append(starts[-1] + block.nbytes)
    assert blocks.floor(position) == max(start for start in starts[:-1] if start <= position)
