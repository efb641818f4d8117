"""Digests of the bits of tensors: what they depend on, what they see, and what they cost."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastload.base.memory import byte_view
from fastload.ext import device_digests as bit_digests
from fastload.ext.device_digests import BitDigester

ROW_BYTES = 32 << 10
CPU = torch.device("cpu")


def digests_of(ranges: Sequence[tuple[Tensor, int, int]], piece_bytes: int | None = None) -> list[int]:
    digester = BitDigester(CPU, [end - begin for _, begin, end in ranges], piece_bytes=piece_bytes)
    digester.begin()
    for tensor, begin, end in ranges:
        digester.add(tensor, begin, end)
    return list(digester.finish().digests())


def digest_of(tensor: Tensor, piece_bytes: int | None = None) -> int:
    [found] = digests_of([(tensor, 0, tensor.nbytes)], piece_bytes)
    return found


@cache
def all_weights() -> list[int]:
    weights: list[int] = bit_digests._weights(pinned=False).tolist()
    return weights


def by_definition(data: bytes) -> int:
    """The digest of some bytes, in numbers without a limit."""
    weights = all_weights()
    words = struct.unpack(f"<{-(-len(data) // 4)}i", data + bytes(-len(data) % 4))
    rows = [words[at : at + len(weights)] for at in range(0, len(words), len(weights))]
    sums = [sum(map(int.__mul__, row, weights)) % (1 << 64) for row in rows]  # type: ignore[arg-type]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}Q", *sums), seed=len(data))


def random_bytes(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def raw(tensor: Tensor) -> bytes:
    return bytes(byte_view(tensor.detach().contiguous()).tolist())


def test_lengths_and_places_in_memory() -> None:
    memory = random_bytes(4 * ROW_BYTES)
    lengths = [
        *range(101),
        *(rows * ROW_BYTES + more for rows in (1, 2, 3) for more in (-5, -4, -1, 0, 1, 4)),
    ]
    for begin in range(5):
        ranges = [(memory[begin : begin + nbytes], 0, nbytes) for nbytes in lengths]
        expected = [by_definition(raw(tensor)) for tensor, *_ in ranges]
        for piece_bytes in (ROW_BYTES, 2 * ROW_BYTES, None):
            assert digests_of(ranges, piece_bytes) == expected
    assert len(set(expected)) == len(expected), "also lengths of zeros differ"
    zeros = [digest_of(torch.zeros(nbytes, dtype=torch.uint8)) for nbytes in lengths]
    assert len(set(zeros)) == len(zeros)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.bfloat16, torch.float16, torch.int16, torch.float32, torch.int32, torch.float64, torch.int64,
    torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_strides_and_ranges(dtype: torch.dtype) -> None:
    data = (
        random_bytes(11 * 13 * 70 * dtype.itemsize) if dtype != torch.bool else random_bytes(11 * 13 * 70) % 2
    )
    dense = data.view(dtype).view(11, 13, 70)
    expected = by_definition(raw(dense))
    wide = torch.zeros(11, 13, 99, dtype=dtype)
    wide[..., 5:75] = dense
    views = [
        dense,
        dense.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        wide[..., 5:75],
        torch.nn.Parameter(dense, requires_grad=dtype.is_floating_point or dtype.is_complex),
    ]
    for view in views:
        assert digest_of(view) == digest_of(view, ROW_BYTES) == expected
    begin, end = 16 * 50, 16 * 500  # in the middle of the rows of the tensor
    expected = by_definition(raw(dense)[begin:end])
    assert digests_of([(view, begin, end) for view in views], ROW_BYTES) == [expected] * len(views)


def test_scalars_and_empty_tensors() -> None:
    assert digest_of(torch.tensor(1.5)) == by_definition(raw(torch.tensor(1.5)))
    assert digest_of(torch.empty(0, 3)) == digest_of(torch.empty(0)) == by_definition(b"")
    assert digest_of(torch.ones(1).expand(100)) == by_definition(raw(torch.ones(100)))


def rolled(tensor: Tensor) -> Tensor:
    return tensor.flatten().roll(1).view(tensor.shape)


def swapped(tensor: Tensor, one: int, other: int) -> Tensor:
    order = torch.arange(len(tensor))
    order[[one, other]] = order[[other, one]]
    return tensor.view(torch.uint8)[order].view(tensor.dtype)


ROWS = torch.arange(256 * 512).view(256, 512).bfloat16()
BITS = torch.tensor([0x7F800001, 0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -1], dtype=torch.int32)
CHANGED = {
    "ones against zeros": (torch.zeros(1 << 16), torch.ones(1 << 16)),
    "one against two": (torch.ones(1 << 16), torch.full((1 << 16,), 2.0)),
    "bool": (torch.zeros(1 << 16, dtype=torch.bool), torch.ones(1 << 16, dtype=torch.bool)),
    "one bool": (torch.eye(256, dtype=torch.bool), torch.eye(256, dtype=torch.bool).fill_diagonal_(False)),
    "permutation matrices": (torch.eye(256), torch.eye(256).roll(1, 0)),
    "adjacent rows": (ROWS, swapped(ROWS, 7, 8)),
    "rows a row of the sums apart": (ROWS, swapped(ROWS, 0, 32)),
    "first and last row": (ROWS, swapped(ROWS, 0, 255)),
    "transposed": (ROWS, ROWS.t()),
    "rolled": (ROWS, rolled(ROWS)),
    "sorted": (rolled(ROWS), rolled(ROWS).flatten().sort().values.view(ROWS.shape)),
    "fp8": (ROWS.to(torch.float8_e4m3fn), rolled(ROWS).to(torch.float8_e4m3fn)),
    **{
        f"-0.0 against 0.0, {dtype}": (torch.zeros(1 << 16).to(dtype), (-torch.zeros(1 << 16)).to(dtype))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2)
    },
    "all signs": (ROWS.double(), -ROWS.double()),
    "two signs": (
        torch.ones(1 << 16).double(),
        torch.ones(1 << 16).double().index_fill_(0, torch.tensor([3, 4]), -1),
    ),
    "conjugates": (torch.ones(1 << 16) * (1 + 1j), torch.ones(1 << 16) * (1 - 1j)),
    "payloads of NaN": (BITS.repeat(999).view(torch.float32), BITS.roll(1).repeat(999).view(torch.float32)),
    "NaN, signalling or not": (BITS[:1].view(torch.float32), BITS[1:2].view(torch.float32)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_differs_is_seen(name: str) -> None:
    one, other = CHANGED[name]
    assert digest_of(one) != digest_of(other)
    assert digest_of(other) == by_definition(raw(other))


def test_no_two_of_many_small_changes_look_alike() -> None:
    """Of the highest bits, of which the least is left in a product, and of everything else."""
    signs = {places for num in (1, 2) for places in itertools.combinations(range(64), num)}
    draw = random.Random(0)
    signs |= {tuple(sorted(draw.sample(range(64), draw.choice([3, 4, 32])))) for _ in range(1000)}
    bits = {(place, exponent) for place in range(64) for exponent in range(63)}
    tensor = torch.zeros(len(signs) + len(bits), 64, dtype=torch.int64)
    for row, places in zip(tensor, signs, strict=False):
        row[list(places)] = -1 << 63
    for row, (place, exponent) in zip(tensor[len(signs) :], bits, strict=True):
        row[place] = 1 << exponent
    assert len(set(digests_of([(row, 0, row.nbytes) for row in tensor]))) == len(tensor)


class Touched(TorchDispatchMode):
    """Counts the bytes that operators read and write: of a tensor, and of all others.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.memory = tensor.untyped_storage().data_ptr()
        self.own = self.others = self.longest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.is_view or "set_" in str(function):
            return result
        for tensor in (*args, *(kwargs or {}).values()):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == self.memory:
                self.own += tensor.nbytes
            elif isinstance(tensor, Tensor):
                self.others += tensor.nbytes
                self.longest = max(self.longest, tensor.nbytes)
        return result


def test_a_tensor_is_read_once_in_pieces() -> None:
    """Everything else that is touched, some bytes for each, is short enough to stay in a cache."""
    for tensor, most in (
        (random_bytes(64 * ROW_BYTES), 4.4),  # products, weights and sums
        (random_bytes(64 * ROW_BYTES).view(128, -1).t(), 6.4),  # and a copy of each piece
    ):
        with Touched(tensor) as touched:
            digest_of(tensor, 8 * ROW_BYTES)
        assert touched.own == tensor.nbytes
        assert touched.others <= most * tensor.nbytes
        assert touched.longest <= 2 * 8 * ROW_BYTES
