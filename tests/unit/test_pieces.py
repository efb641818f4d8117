"""Tensors in pieces: any boxes, each laid out anyhow in its file, into any boxes of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastload.base.memory import byte_view
from fastload.formats.manifest import FileEntry, Manifest, Piece, TensorEntry
from fastload.geometry.box import Box, strided_runs
from fastload.loading.match import BoxRequest, LoadRequest, Match
from fastload.loading.prepare import request_of
from fastload.loading.targets import TensorWriter
from tests.drawn import draws

SIZES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def tilings(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """A box, cut in two along some dimension again and again."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not dims or not depth or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.sizes[dim] - 1))

    def part(offset: int, size: int) -> Box:
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + offset, size
        return Box(tuple(offsets), tuple(sizes))

    return [
        one for half in (part(0, at), part(at, box.sizes[dim] - at)) for one in draw(tilings(half, depth - 1))
    ]


@st.composite
def strides_of(draw: st.DrawFn, sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides with the dimensions in any order, and gaps between and within them."""
    order = draw(st.permutations(range(len(sizes))))
    gaps = [draw(st.integers(1, 2)) for _ in order]
    lengths = accumulate((sizes[dim] * gap for dim, gap in zip(order, gaps, strict=True)), mul, initial=1)
    strides = dict(zip(order, (at * gap for at, gap in zip(lengths, gaps, strict=False)), strict=True))
    return tuple(strides[dim] for dim in range(len(sizes)))


def lay(data: bytearray, values: Tensor, strides: Sequence[int]) -> tuple[int, int]:
    """Appends values to a file, laid out like that; returns offset and length."""
    data += b"\xee" * 3  # nothing is aligned
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    laid = torch.full((span,), -1, dtype=values.dtype)
    laid.as_strided(values.shape, strides).copy_(values)
    data += bytes(byte_view(laid))
    return len(data) - laid.nbytes, laid.nbytes


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Manifest, list[bytearray], dict[str, Tensor]]:
    files = [bytearray() for _ in range(draw(st.integers(1, 3)))]
    entries, values = [], {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = draw(SIZES)
        tensor = values[name] = torch.randn(shape)
        pieces = []
        for box in draw(tilings(Box.whole(shape))):
            strides = draw(st.one_of(st.just(()), strides_of(box.sizes)))
            file = draw(st.integers(0, len(files) - 1))
            part = tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
            offset, nbytes = lay(files[file], part, strides or part.contiguous().stride())
            pieces.append(Piece(box, file, offset, nbytes, strides))
        pieces.sort(key=lambda piece: piece[1:3])
        _, file, offset, *_ = pieces[0]
        entries.append(TensorEntry(name, "F32", shape, file, offset, tensor.nbytes, tuple(pieces)))
    entries.sort(key=lambda entry: (entry.file, entry.offset))
    names = [FileEntry(f"{number}", len(data), "", "") for number, data in enumerate(files)]
    return Manifest("/ckpt", tuple(names), tuple(entries)), files, values


def deliver(found: Match, manifest: Manifest, files: Sequence[bytearray]) -> Any:
    """Places what a rank wants of each extent, as its request says, in the order of the extents.

    Returns the result of the load.
    """
    writer = TensorWriter(found.destinations)
    position = 0
    for index, part in request_of(manifest, found.destinations):
        extent = manifest.extents[index]
        data = files[extent.file][extent.offset : extent.offset + extent.nbytes]
        for runs in part:
            for start in runs.starts():
                piece = torch.frombuffer(bytearray(data[start : start + runs.length]), dtype=torch.uint8)
                writer.place(position, piece)
                position += runs.length
    assert position == sum(destination.nbytes for destination in found.destinations)
    return found.finish()


@draws(150)
@given(checkpoints())
def test_all_of_it_arrives(checkpoint: tuple[Manifest, list[bytearray], dict[str, Tensor]]) -> None:
    manifest, files, values = checkpoint
    manifest = Manifest.from_bytes(manifest.to_bytes())
    found = LoadRequest().match(manifest)
    loaded = deliver(found, manifest, files)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in values.items())
    dense = [bool(d.piece) and not (d.piece or manifest.tensors[0]).strides for d in found.destinations]  # type: ignore[union-attr]
    assert all(d.runs is None for d, is_dense in zip(found.destinations, dense, strict=True) if is_dense)


@draws(150)
@given(checkpoints(), st.data())
def test_any_boxes_of_it_arrive(
    checkpoint: tuple[Manifest, list[bytearray], dict[str, Tensor]], data: st.DataObject
) -> None:
    manifest, files, values = checkpoint
    wanted = {}
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    for name, tensor in values.items():
        wanted[name] = [
            (box, torch.empty(box.sizes[::-1], dtype=dtype).permute(list(reversed(range(len(box.sizes))))))
            for box in data.draw(tilings(Box.whole(tensor.shape)))
            if data.draw(st.booleans())
        ]
    deliver(BoxRequest(wanted, cast=dtype != torch.float32).match(manifest), manifest, files)
    for name, boxes in wanted.items():
        for (offsets, sizes), tensor in boxes:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            assert torch.equal(tensor, values[name][box].to(dtype))


def test_what_is_expanded_is_read_once() -> None:
    data = bytearray(byte_view(torch.arange(3.0)))
    piece = Piece(Box((0, 0, 0), (2, 3, 4)), 0, 0, 12, (0, 1, 0))
    entry = TensorEntry("a", "F32", (2, 3, 4), 0, 0, 96, (piece,))
    manifest = Manifest("/ckpt", (FileEntry("", 12, "", ""),), (entry,))
    found = LoadRequest().match(manifest)
    assert sum(destination.nbytes for destination in found.destinations) == 12
    loaded = deliver(found, manifest, [data])
    assert torch.equal(loaded["a"], torch.arange(3.0).reshape(1, 3, 1).expand(2, 3, 4))


def test_entries_that_share_bytes_have_them_each() -> None:
    data = bytearray(byte_view(torch.arange(4.0)))
    same = Piece(Box.whole((2, 2)), 0, 0, 16, (1, 2))
    entries = [TensorEntry(name, "F32", (2, 2), 0, 0, 16, (Piece(*same),)) for name in "ab"]
    manifest = Manifest("/ckpt", (FileEntry("", 16, "", ""),), tuple(entries))
    found = LoadRequest().match(manifest)
    loaded = deliver(found, manifest, [data])
    expected = torch.tensor([[0.0, 2.0], [1.0, 3.0]])
    assert all(torch.equal(loaded[name], expected) for name in "ab")


def test_the_digest_tells_pieces_apart() -> None:
    piece = Piece(Box.whole((2, 2)), 0, 0, 16)
    entry = TensorEntry("a", "F32", (2, 2), 0, 0, 16, (piece,))
    other = piece._replace(strides=(1, 2))
    manifests = [
        Manifest("/ckpt", (FileEntry("", 16, "", ""),), (one,))
        for one in (
            entry,
            replace(entry, pieces=(other,)),
            replace(entry, pieces=()),
        )
    ]
    assert len({manifest.digest() for manifest in manifests}) == 3


@pytest.mark.parametrize("strides", [(8, 1), (1, 4), (2, 24), (100, 7)])
def test_strided_runs_are_where_the_elements_are(strides: tuple[int, int]) -> None:
    box = Box((1, 0), (3, 4))
    elements = {(row + 1) * strides[0] + column * strides[1] for row in range(3) for column in range(4)}
    runs = strided_runs(box, strides)
    assert {at + index for at in runs.starts() for index in range(runs.length)} == elements
    assert list(runs.starts()) == sorted(runs.starts())
