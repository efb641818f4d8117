"""Bytes of the wanted space, cut anywhere, into tensors of any dtype and layout."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastload.base.memory import host_view
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.loading.targets import Destination, DestinationBuilder, TensorWriter
from tests.checkpoints import raw

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.complex64,
]


def plain(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def transposed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape[::-1], dtype=dtype).permute(list(reversed(range(len(shape)))))


def every_other(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A slice with gaps in every dimension."""
    return torch.zeros([2 * size + 1 for size in shape], dtype=dtype)[
        tuple(slice(1, 2 * size, 2) for size in shape)
    ]


def inside(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Contiguous, but not at the start of its storage."""
    return torch.zeros((3, *shape), dtype=dtype)[1]


def row_of_expanded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype).expand(4, *shape)[2]


LAYOUTS: list[Callable[[tuple[int, ...], torch.dtype], Tensor]] = [
    plain,
    transposed,
    every_other,
    inside,
    row_of_expanded,
]
CASTS = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float64: torch.float16}


def values(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, tuple(shape), generator=generator).to(dtype)


def destination(number: int, stored: torch.dtype, tensor: Tensor) -> Destination:
    nbytes = tensor.numel() * stored.itemsize
    return Destination(TensorEntry(f"t{number}", "", tuple(tensor.shape), 0, 0, nbytes), stored, tensor)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
cases = st.lists(
    st.tuples(shapes, st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(cases=cases, cuts=st.lists(st.floats(0, 1), max_size=12), seed=st.integers(0, 9))
def test_cut_anywhere_into_anything(
    cases: list[tuple[tuple[int, ...], torch.dtype, Callable[..., Tensor], bool]],
    cuts: list[float],
    seed: int,
) -> None:
    destinations, wanted, space = [], [], b""
    for number, (shape, stored, layout, cast) in enumerate(cases):
        source = values(stored, shape, seed + number)
        target = layout(shape, CASTS.get(stored, stored) if cast else stored)
        destinations.append(destination(number, stored, target))
        wanted.append(source.to(target.dtype))
        space += raw(source)
    writer = TensorWriter(destinations)
    edges = sorted({0, len(space), *(round(cut * len(space)) for cut in cuts)})
    pieces = list(pairwise(edges))
    random.Random(seed).shuffle(pieces)
    for begin, end in pieces:
        writer.place(begin, torch.frombuffer(bytearray(space[begin:end]), dtype=torch.uint8))
    assert writer.follow()()
    for found, expected in zip(destinations, wanted, strict=True):
        assert torch.equal(found.tensor, expected)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 64])
def test_channels_last_and_casts_byte_by_byte(step: int) -> None:
    source = values(torch.float32, (2, 3, 4, 5), 1)
    target = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    scalar = torch.zeros((), dtype=torch.float64)
    space = raw(source) + raw(values(torch.float64, (), 2))
    writer = TensorWriter([destination(0, torch.float32, target), destination(1, torch.float64, scalar)])
    for begin in range(0, len(space), step):
        piece = bytearray(space[begin : begin + step])
        writer.place(begin, torch.frombuffer(piece, dtype=torch.uint8))
    assert target.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(target, source.bfloat16())
    assert scalar == values(torch.float64, (), 2)


def test_a_default_device_of_the_callers_does_not_matter() -> None:
    source = values(torch.float32, (5,), 6)
    target = torch.zeros(5, dtype=torch.float64)
    writer = TensorWriter([destination(0, torch.float32, target)])
    with torch.device("meta"):
        for begin in range(0, source.nbytes, 3):
            piece = bytearray(raw(source)[begin : begin + 3])
            writer.place(begin, torch.frombuffer(piece, dtype=torch.uint8))
    assert torch.equal(target, source.double())


def test_what_lies_around_a_slice_is_not_touched() -> None:
    whole = torch.full((5, 7), -1.0)
    target = whole[1:4, 2:6:3]
    source = values(torch.float32, target.shape, 3)
    TensorWriter([destination(0, torch.float32, target)]).place(
        0, torch.frombuffer(bytearray(raw(source)), dtype=torch.uint8)
    )
    assert torch.equal(target, source)
    assert (whole == -1).sum() == whole.numel() - target.numel()


def test_a_lazily_conjugated_tensor_gets_values_not_bytes() -> None:
    source = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    target = torch.zeros(2, dtype=torch.complex64).conj()
    assert target.is_conj()
    TensorWriter([destination(0, torch.complex64, target)]).place(
        0, torch.frombuffer(bytearray(raw(source)), dtype=torch.uint8)
    )
    assert torch.equal(target, source)


def test_parameters_that_require_grad() -> None:
    source = values(torch.float32, (3, 4), 4)
    for parameter in (torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(4, 3).t())):
        data = torch.frombuffer(bytearray(raw(source)), dtype=torch.uint8)
        TensorWriter([destination(0, torch.float32, parameter)]).place(0, data)
        assert torch.equal(parameter, source)
        assert parameter.requires_grad
        assert parameter.grad_fn is None


def test_reading_straight_into_the_tensors() -> None:
    rng = random.Random(5)
    tensors = [torch.zeros(size, dtype=torch.int16) for size in (3, 0, 8, 1)]
    writer = TensorWriter([destination(n, torch.int16, tensor) for n, tensor in enumerate(tensors)])
    space = rng.randbytes(24)
    for begin, end in pairwise([0, 1, 5, 6, 7, 21, 23, 24]):
        targets = writer.targets(begin, end - begin, 4)
        assert targets is not None
        assert sum(map(len, targets)) == end - begin
        for piece in targets:
            host_view(piece)[:] = space[begin : begin + len(piece)]
            begin += len(piece)
    assert b"".join(map(raw, tensors)) == space


def test_strided_and_cast_tensors_cannot_be_read_into() -> None:
    destinations = [
        destination(0, torch.float32, torch.zeros(4)),
        destination(1, torch.float32, torch.zeros(4, 2).t()),
        destination(2, torch.float32, torch.zeros(4, dtype=torch.float64)),
    ]
    writer = TensorWriter(destinations)
    assert writer.targets(0, 16, 2) is not None
    assert writer.targets(0, 17, 2) is None
    assert writer.targets(20, 4, 2) is None
    assert writer.targets(48, 1, 2) is None


def test_tensors_that_share_memory_are_not_read_into() -> None:
    whole = torch.zeros(8, dtype=torch.int16)
    tensors = [whole[:4], torch.zeros(2, dtype=torch.int16), whole[3:6], whole[6:]]
    entries = tuple(destination(n, torch.int16, tensor).entry for n, tensor in enumerate(tensors))
    builder = DestinationBuilder(Manifest("somewhere", (), entries))
    for entry, tensor in zip(entries, tensors, strict=True):
        builder.add(entry, torch.int16, tensor, None)
    writer = TensorWriter(builder.build())
    can_be_read_into = [writer.targets(start, 2, 2) is not None for start in (0, 8, 12, 18)]
    assert can_be_read_into == [False, True, False, True]
