"""Layout and partition: files that any tool opens, shares that cover every byte once, whoever writes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastload.errors import OptionError
from fastload.formats.dtypes import NAMES, safetensors_spec, torch_spec
from fastload.formats.manifest import TensorEntry
from fastload.formats.safetensors.header import parse_header
from fastload.geometry.blocks import num_blocks
from fastload.geometry.ranges import ByteRange
from fastload.saving import layout as layout_module
from fastload.saving.layout import Layout, TensorSpec, lay_out
from fastload.saving.split import split_evenly

METADATA = {"format": "pt"}
SIZES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8, "C64": 8}

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
spec_lists = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6), st.sampled_from(sorted(SIZES)), shapes
    ),
    max_size=12,
    unique_by=lambda row: row[0],
).map(
    lambda rows: [
        TensorSpec(name, dtype, shape, SIZES[dtype] * math.prod(shape)) for name, dtype, shape in rows
    ]
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return lay_out(
        [spec for spec in draw(spec_lists) if spec.name != "__metadata__"],
        max_shard_bytes=draw(st.sampled_from([1, 200, 400, 1000, 10**9])),
        block_bytes=draw(st.sampled_from([1, 3, 64, 1 << 18])),
    )


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]


def data_of(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return bytes(flat.tolist())


def assemble(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """The files of a layout, made of its headers and the bytes of the tensors."""
    files = {}
    for file in layout.files:
        data = bytearray(file.header)
        for entry in file.tensors:
            assert entry.offset == len(data)
            data += data_of(tensors[entry.name])
        assert len(data) == file.nbytes
        files[file.name] = bytes(data)
    return files


def lay_out_small(*specs: TensorSpec, max_shard_bytes: int = 10**9, block_bytes: int | None = None) -> Layout:
    return lay_out(specs, max_shard_bytes=max_shard_bytes, block_bytes=block_bytes)


def u8(name: str, nbytes: int) -> TensorSpec:
    return TensorSpec(name, "U8", (nbytes,), nbytes)


@given(layouts())
def test_a_header_says_what_the_layout_says_and_the_strict_reader_takes_it(layout: Layout) -> None:
    for number, file in enumerate(layout.files):
        assert len(file.header) % 8 == 0
        assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
        tensors, _ = parse_header(file.header[8:], file.nbytes, "mem://", number)
        assert sorted(tensors, key=repr) == sorted(file.tensors, key=repr)
        assert [entry.offset for entry in tensors] == [entry.offset for entry in file.tensors]
        for entry in file.tensors:
            assert entry.offset % SIZES[entry.dtype] == 0, "aligned for whoever maps the file"


@given(spec_lists, st.sampled_from([1, 300, 1000, 10**9]))
def test_files_are_filled_in_order_up_to_the_limit(specs: list[TensorSpec], max_shard_bytes: int) -> None:
    layout = lay_out_small(*specs, max_shard_bytes=max_shard_bytes)
    order = {spec.name: place for place, spec in enumerate(specs)}
    places = [[order[entry.name] for entry in file.tensors] for file in layout.files]
    assert sorted(place for file in places for place in file) == list(range(len(specs)))
    for ours, next_ones in pairwise(places):
        assert max(ours) < min(next_ones)
    for file in layout.files:
        assert file.nbytes <= max_shard_bytes or len(file.tensors) <= 1
        whole = [order[entry.name] for entry in file.tensors if entry.nbytes % 8 == 0]
        assert whole == sorted(whole), "only what is no multiple of 8 bytes leaves its place"
        assert [order[e.name] for e in file.tensors[: len(whole)]] == whole
    if len(layout.files) > 1:  # no file could have taken the first tensor of the next
        slack = 16 + sum(2 * len(str(max_shard_bytes)) for _ in specs)
        for file, after in pairwise(layout.files):
            first = specs[min(order[entry.name] for entry in after.tensors)]
            more = len(json.dumps(first.name, ensure_ascii=False).encode()) + 60 + len(str(first.shape))
            assert file.nbytes + more + slack + first.nbytes > max_shard_bytes


def test_names_and_the_index_are_those_of_hugging_face() -> None:
    one = lay_out_small(u8("a", 3))
    assert [file.name for file in one.files] == ["model.safetensors"]
    assert one.index is None
    three = lay_out_small(u8("b", 100), u8("a", 1000), u8("\u00e9", 100), max_shard_bytes=250)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [file.name for file in three.files] == names
    assert three.index is not None
    weight_map = {"a": names[1], "b": names[0], "\u00e9": names[2]}
    index = {"metadata": {"total_size": 1200}, "weight_map": weight_map}
    assert three.index == (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def test_an_empty_state_is_one_file_without_tensors() -> None:
    layout = lay_out_small()
    assert [(file.name, file.tensors) for file in layout.files] == [("model.safetensors", ())]
    assert safetensors.torch.load(layout.files[0].header) == {}
    assert split_evenly(layout, num_writers=2, align_bytes=4096) == ((), (ByteRange(0, 0, layout.nbytes),))


def all_dtypes() -> dict[str, Tensor]:
    """An odd number of elements of every dtype, one-byte ones first, and other odd shapes between them."""
    tensors: dict[str, Tensor] = {
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "none": torch.empty(3, 0),
    }
    for dtype in sorted(NAMES, key=lambda dtype: (dtype.itemsize, str(dtype))):
        flat = torch.arange(3 * dtype.itemsize, dtype=torch.uint8) % 2
        tensors[str(dtype)] = flat.view(dtype).reshape(3, 1)
    return tensors


@pytest.mark.parametrize("max_shard_bytes", [10**9, 500])
@pytest.mark.parametrize("backend", ["mmap", "bytes"])
def test_the_reference_library_opens_the_files(tmp_path: Path, backend: str, max_shard_bytes: int) -> None:
    tensors = all_dtypes()
    if backend == "bytes":  # its table for bytes has not all dtypes
        tensors = {name: t for name, t in tensors.items() if "e8m0" not in name and "float4" not in name}
        tensors = {name: t for name, t in tensors.items() if "fnuz" not in name}
    layout = lay_out_small(*specs_of(tensors), max_shard_bytes=max_shard_bytes)
    assert (len(layout.files) > 1) == (max_shard_bytes == 500)
    loaded: dict[str, Tensor] = {}
    for name, data in assemble(layout, tensors).items():
        (tmp_path / name).write_bytes(data)
        if backend == "bytes":
            loaded |= safetensors.torch.load(data)
        else:
            with safetensors.safe_open(tmp_path / name, framework="pt") as file:
                assert file.metadata() == METADATA
            loaded |= safetensors.torch.load_file(tmp_path / name)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert data_of(loaded[name]) == data_of(tensor)
        assert loaded[name].data_ptr() % tensor.itemsize == 0


@pytest.mark.parametrize("dtype", sorted(NAMES, key=str), ids=str)
def test_a_spec_is_what_the_reader_makes_of_it(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    name, shape = safetensors_spec(tensor)
    assert torch_spec(TensorEntry("a", name, shape, 0, 0, 0)) == (dtype, tuple(tensor.shape))


def test_what_the_format_cannot_say_has_no_spec() -> None:
    with pytest.raises(ValueError, match=r"has no torch\.complex128"):
        safetensors_spec(torch.zeros(1, dtype=torch.complex128))
    if hasattr(torch, "float4_e2m1fn_x2"):
        with pytest.raises(ValueError, match="without dimensions"):
            safetensors_spec(torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0])


def test_no_header_is_longer_than_the_reference_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "MAX_HEADER_BYTES", 400)
    layout = lay_out_small(*(u8(f"t{number}", 8) for number in range(20)))
    assert len(layout.files) > 1
    assert all(len(file.header) <= 400 for file in layout.files)
    with pytest.raises(OptionError, match=r"tensor 'xxx.*name is too long"):
        lay_out_small(u8("x" * 400, 8))


# Checksum blocks


@given(layouts())
def test_blocks_tile_the_tensors_and_never_span_two(layout: Layout) -> None:
    for index, file in enumerate(layout.files):
        blocks = [block[2:] for block in layout.blocks_of([ByteRange(index, 0, file.nbytes)])]
        assert len(blocks) == sum(num_blocks(entry.nbytes, layout.block_bytes) for entry in file.tensors)
        end, begins = len(file.header), {entry.offset for entry in file.tensors if entry.nbytes}
        for offset, nbytes in blocks:
            assert offset == end
            assert 0 < nbytes <= layout.block_bytes
            end += nbytes
            assert nbytes == layout.block_bytes or end in begins | {file.nbytes}
            begins.discard(offset)
        assert end == file.nbytes
        assert not begins


@pytest.mark.parametrize(
    ("total_bytes", "block_bytes"),
    [
        (0, 256 << 10),
        (1 << 36, 256 << 10),
        ((1 << 36) + 1, 512 << 10),
        (1 << 37, 512 << 10),
        (1 << 40, 4 << 20),
        (1 << 45, 4 << 20),
    ],
)
def test_the_block_length_follows_from_the_size(total_bytes: int, block_bytes: int) -> None:
    assert lay_out_small(u8("a", total_bytes)).block_bytes == block_bytes
    assert lay_out_small(u8("a", total_bytes), block_bytes=12345).block_bytes == 12345


# Partition


def bytes_of(share: tuple[ByteRange, ...]) -> int:
    return sum(range_.nbytes for range_ in share)


@given(layouts(), st.integers(1, 9), st.sampled_from([1, 7, 64, 512, 4096]))
def test_each_writer_has_one_range_and_each_byte_one_writer(
    layout: Layout, num_writers: int, align_bytes: int
) -> None:
    shares = split_evenly(layout, num_writers=num_writers, align_bytes=align_bytes)
    assert len(shares) == num_writers
    file, end = 0, 0
    for share in shares:
        for range_ in share:
            if range_.file != file:
                assert (range_.file, end) == (file + 1, layout.files[file].nbytes)
                file, end = range_.file, 0
            assert range_.offset == end < range_.end
            assert range_.offset % align_bytes == 0
            end = range_.end
        assert num_writers * bytes_of(share) <= layout.nbytes + num_writers * align_bytes
    assert (file, end) == (len(layout.files) - 1, layout.files[-1].nbytes)


@given(layouts(), st.integers(1, 9))
def test_whole_files_are_dealt_evenly(layout: Layout, num_writers: int) -> None:
    shares = split_evenly(layout, num_writers=num_writers, align_bytes=None)
    assert len(shares) == num_writers
    dealt = sorted(range_ for share in shares for range_ in share)
    assert dealt == [ByteRange(number, 0, file.nbytes) for number, file in enumerate(layout.files)]
    loads = [bytes_of(share) for share in shares]
    for share, load in zip(shares, loads, strict=True):
        assert list(share) == sorted(share)
        smallest = min((range_.nbytes for range_ in share), default=0)
        assert load - smallest <= min(loads), "the last file went to whoever had least"


@given(layouts(), st.integers(1, 9), st.sampled_from([1, 7, 64, 4096, None]))
def test_each_block_is_hashed_once_by_who_writes_its_first_byte(
    layout: Layout, num_writers: int, align_bytes: int | None
) -> None:
    hashed = {}
    for share in split_evenly(layout, num_writers=num_writers, align_bytes=align_bytes):
        for number, file, offset, nbytes in layout.blocks_of(share):
            assert any(r.file == file and r.offset <= offset < r.end for r in share)
            assert number not in hashed
            hashed[number] = (file, offset, nbytes)
    everything = [ByteRange(number, 0, file.nbytes) for number, file in enumerate(layout.files)]
    blocks = [block[1:] for block in layout.blocks_of(everything)]
    assert [hashed.pop(number) for number in range(len(blocks))] == blocks
    assert not hashed


@pytest.mark.parametrize(("num_writers", "align_bytes"), [(0, None), (1, 0), (-1, 4096)])
def test_a_partition_needs_sensible_numbers(num_writers: int, align_bytes: int | None) -> None:
    with pytest.raises(OptionError, match="must be at least 1"):
        split_evenly(lay_out_small(), num_writers=num_writers, align_bytes=align_bytes)


# The same everywhere, and in time


def test_the_digest_changes_with_everything_that_matters() -> None:
    layout = lay_out_small(u8("a", 8), u8("b", 8))
    others = [
        lay_out_small(u8("b", 8), u8("a", 8)),
        lay_out_small(u8("a", 8), u8("b", 16)),
        lay_out_small(u8("a", 8), u8("b", 8), max_shard_bytes=1),
        lay_out_small(u8("a", 8), u8("b", 8), block_bytes=8),
        replace(layout, files=(replace(layout.files[0], name="other"),)),
    ]
    assert len({layout.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert layout.digest == lay_out_small(u8("a", 8), u8("b", 8)).digest


def layout_and_shares() -> str:
    layout = lay_out_small(*big(1000), max_shard_bytes=20_000)
    return f"{layout.digest} {split_evenly(layout, num_writers=3, align_bytes=4096)}"


def big(num_tensors: int) -> list[TensorSpec]:
    return [u8(f"model.layers.{number}.weight", number % 97) for number in range(num_tensors)]


def test_very_many_tensors_are_laid_out_in_time() -> None:
    start = time.process_time()
    layout = lay_out_small(*big(50_000), max_shard_bytes=10_000_000)
    shares = split_evenly(layout, num_writers=64, align_bytes=4096)
    assert sum(1 for share in shares for _ in layout.blocks_of(share)) == sum(
        num_blocks(entry.nbytes, layout.block_bytes) for file in layout.files for entry in file.tensors
    )
    assert time.process_time() - start < 3  # 0.3 s
