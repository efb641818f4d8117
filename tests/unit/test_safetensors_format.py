"""safetensors headers and indexes: what is refused, with which words, and what is taken."""

from __future__ import annotations

import json
import random
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import CheckpointNotFound, IncompleteCheckpoint, ManifestError, StorageError
from fastload.formats.dtypes import DTYPES, torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.open import read_manifest
from fastload.formats.safetensors.header import MAX_HEADER_BYTES, parse_header
from fastload.formats.safetensors.reader import NEAR_BYTES
from fastload.storage.base import FileStat, Storage
from tests.drawn import draws

URL = "mem://ckpt"


class MemoryStorage(Storage):
    """Files in a dict, and a record of every read. A size may be given that the bytes do not have."""

    probes = False

    def __init__(self, files: dict[str, bytes] | bytes, sizes: dict[str, int] | None = None) -> None:
        super().__init__(URL)
        self.directory = not isinstance(files, bytes)
        self.files = {"": files} if isinstance(files, bytes) else files
        self.sizes = sizes or {}
        self.reads: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def stat(self, name: str) -> FileStat | None:
        if name not in self.files:
            return None
        return FileStat(self.sizes.get(name, len(self.files[name])), f"v-{name}")

    def list(self) -> list[str] | None:
        return sorted(name for name in self.files if "/" not in name) if self.directory else None

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        for buffer in buffers:
            part = self.files[name][offset : offset + len(buffer)]
            with self._lock:
                self.reads.append((name, offset, len(buffer)))
            if len(part) < len(buffer):
                raise StorageError("the file ends early", f"{self.url}/{name}", offset, len(buffer))
            buffer[:] = part
            offset += len(buffer)


def pack(header: Any, data: bytes = b"", padding: bytes = b"") -> bytes:
    """A file of a header (JSON value or literal bytes) and data."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + padding
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "U8", shape: Any = (2,), begin: Any = 0, end: Any = 2) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def manifest_of(files: dict[str, bytes] | bytes) -> Manifest:
    return read_manifest(MemoryStorage(files))


def contents(file: bytes, manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {t.name: (t.dtype, t.shape, file[t.offset : t.offset + t.nbytes]) for t in manifest.tensors}


def reference_contents(file: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (view["dtype"], tuple(view["shape"]), bytes(view["data"]))
        for name, view in safetensors.deserialize(file)  # type: ignore[no-untyped-call]
    }


def test_the_fake_is_a_storage() -> None:
    storage: Storage = MemoryStorage({})
    assert storage.stat("a") is None


# Bad files

ONE = b'{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'

BAD_HEADERS: list[tuple[str, bytes, list[str]]] = [
    ("empty header", pack(b""), ["starts with b''"]),
    ("leading space", pack(b" {}"), ["header starts with b' {}'"]),
    ("byte order mark", pack(b"\xef\xbb\xbf{}"), ["header starts with b'\\xef\\xbb\\xbf{}'"]),
    ("array", pack(b"[]"), ["header starts with b'[]'"]),
    ("not utf-8", pack(b'{"a\xff":' + ONE + b"}", b"xx"), ["header is not valid JSON", "0xff in position 3"]),
    ("not json", pack(b"{]"), ["header is not valid JSON", "column 2"]),
    ("cut json", pack(b'{"a":'), ["header is not valid JSON"]),
    ("text after the object", pack(b"{}{}"), ["not valid JSON: Extra data"]),
    ("nul padding", pack(b"{}", padding=b"\0\0"), ["not valid JSON: Extra data"]),
    ("raw control character", pack(b'{"a\tb":' + ONE + b"}", b"xx"), ["not valid JSON: Invalid control"]),
    ("deep nesting", pack(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), ["nested too deeply"]),
    ("deep objects", pack(b'{"a":' * 200_000 + b"1" + b"}" * 200_000), ["nested too deeply"]),
    ("NaN", pack(b'{"a":NaN}'), ["NaN is not a JSON number"]),
    ("infinity", pack(b'{"a":-Infinity}'), ["-Infinity is not a JSON number"]),
    ("tensor twice", pack(b'{"a":' + ONE + b',"a":' + ONE + b"}", b"xx"), ["key 'a' appears twice"]),
    ("escaped twin", pack(b'{"a":' + ONE + b',"\\u0061":' + ONE + b"}", b"xx"), ["key 'a' appears twice"]),
    (
        "field twice",
        pack(b'{"a":{"dtype":"U8",' + ONE[1:] + b"}", b"xx"),
        ["key 'dtype' appears twice", "'U8'"],
    ),
    ("metadata twice", pack(b'{"__metadata__":{},"__metadata__":{}}'), ["key '__metadata__' appears twice"]),
    ("metadata key twice", pack(b'{"__metadata__":{"k":"1","k":"2"}}'), ["key 'k' appears twice"]),
    ("metadata no object", pack({"__metadata__": ["k"]}), ["__metadata__ is not an object", "['k']"]),
    ("metadata number", pack({"__metadata__": {"k": 1}}), ["__metadata__ 'k' is not a valid text: 1"]),
    ("metadata nested", pack({"__metadata__": {"k": {}}}), ["__metadata__ 'k' is not a valid text: {}"]),
    (
        "metadata surrogate",
        pack(b'{"__metadata__":{"k":"\\ud800"}}'),
        ["__metadata__ 'k' is not a valid text"],
    ),
    ("metadata key surrogate", pack(b'{"__metadata__":{"\\udc00":""}}'), ["'\\udc00' is not a valid text"]),
    ("name surrogate", pack(b'{"\\ud800":' + ONE + b"}", b"xx"), ["tensor '\\ud800': its name is not valid"]),
    ("entry a list", pack({"w": ["U8", [2], [0, 2]]}, b"xx"), ["tensor 'w': needs exactly the keys", "'U8'"]),
    ("entry null", pack({"w": None}), ["tensor 'w': needs exactly the keys", "None"]),
    ("missing key", pack({"w": {"dtype": "U8", "shape": [2]}}, b"xx"), ["tensor 'w': needs exactly"]),
    ("unknown key", pack({"w": {**entry(), "x": 1}}, b"xx"), ["tensor 'w': needs exactly", "'x': 1"]),
    ("unknown dtype", pack({"w": entry("Q7")}, b"xx"), ["tensor 'w': unknown dtype 'Q7'"]),
    ("lower-case dtype", pack({"w": entry("u8")}, b"xx"), ["tensor 'w': unknown dtype 'u8'"]),
    ("dtype number", pack({"w": entry(8)}, b"xx"), ["tensor 'w': unknown dtype 8"]),
    ("dtype list", pack({"w": entry(["U8"])}, b"xx"), ["tensor 'w': unknown dtype ['U8']"]),
    ("shape float", pack({"w": entry(shape=[2.0])}, b"xx"), ["tensor 'w': shape is not", "[2.0]"]),
    ("shape bool", pack({"w": entry(shape=[True], end=1)}, b"x"), ["tensor 'w': shape is not", "[True]"]),
    ("shape text", pack({"w": entry(shape=["2"])}, b"xx"), ["tensor 'w': shape is not", "['2']"]),
    ("shape no list", pack({"w": entry(shape=2)}, b"xx"), ["tensor 'w': shape is not", ": 2"]),
    ("shape null", pack({"w": entry(shape=None)}, b"xx"), ["tensor 'w': shape is not", ": None"]),
    ("shape negative", pack({"w": entry(shape=[-2, -1])}, b"xx"), ["tensor 'w': shape is not", "[-2, -1]"]),
    (
        "shape minus zero",
        pack(b'{"w":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        ["'w': shape is not"],
    ),
    (
        "shape 2**63",
        pack({"w": entry(shape=[2**63])}, b"xx"),
        ["tensor 'w': shape is not a list of integers"],
    ),
    (
        "shape 5000 digits",
        pack(b'{"w":{"shape":[' + b"9" * 5000 + b"]}}"),
        ["tensor 'w': needs exactly the keys"],
    ),
    ("product", pack({"w": entry(shape=[2**40, 2**40])}, b"xx"), ["tensor 'w': U8 of shape", "overflows"]),
    ("wraps to the size", pack({"w": entry(shape=[2**33, 2**31, 2])}, b"xx"), ["tensor 'w'", "overflows"]),
    ("bytes overflow", pack({"w": entry("F64", [2**61])}, b"xx"), ["tensor 'w': F64 of shape", "overflows"]),
    ("hidden by a zero", pack({"w": entry(shape=[0, 2**62, 2**62], end=0)}), ["tensor 'w'", "overflows"]),
    ("huge product", pack({"w": entry(shape=[2**62] * 50_000)}, b"xx"), ["tensor 'w'", "overflows"]),
    ("offsets float", pack({"w": entry(end=2.0)}, b"xx"), ["tensor 'w': data_offsets are not", "[0, 2.0]"]),
    (
        "offsets bool",
        pack({"w": entry(begin=False)}, b"xx"),
        ["tensor 'w': data_offsets are not", "[False, 2]"],
    ),
    (
        "offsets negative",
        pack({"w": entry(begin=-2, end=0)}, b"xx"),
        ["'w': data_offsets are not", "[-2, 0]"],
    ),
    ("offsets reversed", pack({"w": entry(begin=2, end=0)}, b"xx"), ["'w': data_offsets are not", "[2, 0]"]),
    (
        "offsets three",
        pack({"w": {**entry(), "data_offsets": [0, 1, 2]}}, b"xx"),
        ["'w': data_offsets are not"],
    ),
    (
        "offsets one",
        pack({"w": {**entry(), "data_offsets": [2]}}, b"xx"),
        ["'w': data_offsets are not", "[2]"],
    ),
    ("offsets no list", pack({"w": {**entry(), "data_offsets": "02"}}, b"xx"), ["'w': data_offsets are not"]),
    (
        "size too small",
        pack({"w": entry("F32", [3], 0, 11)}, b"x" * 11),
        ["'w': F32 of shape [3] takes 12", "hold 11"],
    ),
    (
        "size too big",
        pack({"w": entry("F32", [], 0, 5)}, b"x" * 5),
        ["'w': F32 of shape [] takes 4", "hold 5"],
    ),
    (
        "half a byte",
        pack({"w": entry("F4", [3], 0, 2)}, b"xx"),
        ["'w': F4 of shape [3] takes 12 bits", "inside a byte"],
    ),
    ("6 bits", pack({"w": entry("F6_E2M3", [2], 0, 2)}, b"xx"), ["'w': F6_E2M3 of shape [2] takes 12 bits"]),
    (
        "overlap",
        pack({"a": entry(), "b": entry(begin=1, end=3)}, b"xxx"),
        ["tensor 'b' overlaps", "begins at data offset 1, not at 2"],
    ),
    ("same bytes", pack({"a": entry(), "b": entry()}, b"xx"), ["tensor 'b' overlaps", "offset 0, not at 2"]),
    (
        "empty inside another",
        pack({"a": entry(), "b": entry(shape=[0], begin=1, end=1)}, b"xx"),
        ["tensor 'b' overlaps", "offset 1, not at 2"],
    ),
    (
        "hole at the start",
        pack({"a": entry(begin=1, end=3)}, b"xxx"),
        ["tensor 'a' leaves a hole", "1, not at 0"],
    ),
    (
        "hole in the middle",
        pack({"b": entry(begin=4, end=6), "a": entry()}, b"x" * 6),
        ["tensor 'b' leaves a hole", "begins at data offset 4, not at 2"],
    ),
    (
        "truncated",
        pack({"a": entry()}, b"x"),
        ["truncated, 1 bytes are missing", "file has 69 bytes", "describes 70"],
    ),
    ("trailing", pack({"a": entry()}, b"xxx"), ["1 trailing bytes", "file has 71 bytes", "describes 70"]),
    ("trailing, no tensors", pack({}, b"xxx"), ["3 trailing bytes", "file has 13 bytes", "describes 10"]),
    ("no bytes", b"", ["the file is empty"]),
    ("seven bytes", b"1234567", ["7 bytes are too few for a safetensors file"]),
    (
        "header longer than the file",
        struct.pack("<Q", 3) + b"{}",
        ["header length of 3", "limit of 2 (file size: 10)"],
    ),
    ("pointer file", b"version https://git-lfs", ["a pointer of git-lfs", "git lfs pull"]),
    ("tar file", b"storages".ljust(257, b"\0") + b"ustar".ljust(999, b"\0"), ["a tar archive"]),
]


@pytest.mark.parametrize(
    ("file", "words"), [case[1:] for case in BAD_HEADERS], ids=[c[0] for c in BAD_HEADERS]
)
def test_bad_file_is_refused(file: bytes, words: list[str]) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifest(MemoryStorage({"model.safetensors": file}))
    message = str(caught.value)
    for word in [f"{URL}/model.safetensors: ", *words]:
        assert word in message
    assert len(message) < 2000


def test_message_stays_short_whatever_the_file_says() -> None:
    with pytest.raises(ManifestError) as caught:
        parse_header(json.dumps({"n" * 10**6: {"k" * 10**6: ["v" * 10**6] * 20}}).encode(), 10**10, "u")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("length", "file_nbytes"),
    [(2**62, 64), (2**62, 2**63 - 1), (2**64 - 1, 64), (MAX_HEADER_BYTES + 1, 2**40), (90_000_000, 64)],
)
@pytest.mark.parametrize("probes", [False, True])
def test_lying_header_length_allocates_nothing(length: int, file_nbytes: int, probes: bool) -> None:
    storage = MemoryStorage(struct.pack("<Q", length) + b"x" * NEAR_BYTES, {"": file_nbytes})
    storage.url += ".safetensors"
    storage.probes = probes
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError, match=f"header length of {length} bytes is over the limit"):
            read_manifest(storage)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert storage.reads == [("", 0, 8 if probes else min(file_nbytes, NEAR_BYTES))]


def test_file_that_shrank_is_a_storage_error() -> None:
    file = pack({"a": entry()}, b"xx")
    with pytest.raises(StorageError, match="ends early"):
        read_manifest(MemoryStorage(file[:20], {"": len(file)}))


# Good oddities


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(pack({}), id="no tensors"),
        pytest.param(pack({"__metadata__": {}}), id="no metadata"),
        pytest.param(pack({"a": entry()}, b"xx", padding=b" " * 13), id="padding"),
        pytest.param(pack({"a": entry()}, b"xx", padding=b"\n\t\r "), id="other white space"),
        pytest.param(pack(b'{ "a" :\n' + ONE + b"\n}", b"xx"), id="pretty printed"),
        pytest.param(pack({"": entry()}, b"xx"), id="empty name"),
        pytest.param(pack({"ü/😀 .\0": entry()}, b"xx"), id="escaped unicode name"),
        pytest.param(pack('{"ü😀":'.encode() + ONE + b"}", b"xx"), id="unicode name"),
        pytest.param(pack({"a": entry("F64", [], 0, 8)}, b"12345678"), id="0-dim"),
        pytest.param(pack({"a": entry("F64", [3, 0, 2], 0, 0)}), id="zero size"),
        pytest.param(pack({"a": entry(shape=[1] * 100, end=1)}, b"x"), id="100 dimensions"),
        pytest.param(pack({"a": entry(shape=[0, 2**58], end=0)}), id="long and empty"),
        pytest.param(
            pack({"a": entry("U8", [1], 0, 1), "b": entry("F32", [1], 1, 5)}, b"abcde"), id="unaligned"
        ),
        pytest.param(pack({"b": entry(begin=2, end=4), "a": entry()}, b"abcd"), id="header in another order"),
        pytest.param(
            pack(
                {n: entry(shape=[0], begin=b, end=b) for n, b in (("z", 0), ("y", 2), ("x", 0))}
                | {"a": entry()},
                b"ab",
            ),
            id="zero size at both ends",
        ),
        pytest.param(pack({"a": entry("F4", [3, 2], 0, 3)}, b"abc"), id="F4"),
        pytest.param(pack({"a": entry("F6_E3M2", [4], 0, 3)}, b"abc"), id="F6"),
    ],
)
def test_good_file_reads_as_the_reference_reads_it(file: bytes) -> None:
    manifest = manifest_of(file)
    assert contents(file, manifest) == reference_contents(file)
    keys = [(t.file, t.offset, t.nbytes, t.name) for t in manifest.tensors]
    assert keys == sorted(keys)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_header_that_is_longer_than_the_first_read() -> None:
    header = {"a": entry(), "__metadata__": {"text": "x" * NEAR_BYTES}}
    storage = MemoryStorage(file := pack(header, b"xx"))
    storage.url += ".safetensors"
    assert contents(file, read_manifest(storage)) == reference_contents(file)
    assert storage.reads == [("", 0, NEAR_BYTES), ("", NEAR_BYTES, len(file) - NEAR_BYTES - 2)]
    storage = MemoryStorage(file := pack({"a": entry()}, b"xx"))
    storage.url += ".safetensors"
    assert contents(file, read_manifest(storage)) == reference_contents(file)
    assert storage.reads == [("", 0, len(file))]


def test_where_requests_take_no_time_it_reads_eight_bytes_then_the_header() -> None:
    file = pack({"a": entry(), "__metadata__": {"format": "pt"}}, b"xx", padding=b"  ")
    storage = MemoryStorage(file)
    storage.url += ".safetensors"
    storage.probes = True
    manifest = read_manifest(storage)
    header = file[8:-2]
    assert storage.reads == [("", 0, 8), ("", 8, len(header))]
    assert manifest.url == storage.url
    assert manifest.metadata == {"format": "pt"}
    [found] = manifest.files
    assert (found.name, found.nbytes, found.version) == ("", len(file), "v-")
    assert found.header_digest == xxhash.xxh3_128_hexdigest(header)
    assert manifest.tensors == (TensorEntry("a", "U8", (2,), 0, 8 + len(header), 2),)


@pytest.mark.slow
def test_header_of_100_000_tensors_is_fast() -> None:
    header = json.dumps(
        {
            f"model.layers.{i}.mlp.down_proj.weight": entry("BF16", [2, 4], 16 * i, 16 * i + 16)
            for i in range(100_000)
        }
    ).encode()
    start_s = time.process_time()
    tensors, _ = parse_header(header, 8 + len(header) + 1_600_000, "u")
    took_s = time.process_time() - start_s
    assert len(tensors) == 100_000
    assert took_s < 30.0  # 1.1 on a slow core; a quadratic step takes minutes


# dtypes


def spec(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    return torch_spec(TensorEntry("w", dtype, shape, 0, 0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_the_reference_one(dtype: str, tmp_path: Any) -> None:
    bits, torch_dtype = DTYPES[dtype]
    nbytes = 8 * bits // 8
    path = tmp_path / "one.safetensors"
    path.write_bytes(pack({"w": entry(dtype, [2, 4], 0, nbytes)}, bytes(nbytes)))
    manifest = manifest_of(path.read_bytes())
    assert manifest.nbytes == nbytes
    if torch_dtype is None:
        with pytest.raises(ManifestError, match=f"tensor 'w': dtype {dtype} has no equivalent in torch"):
            torch_spec(manifest.tensors[0])
        return
    expected = safetensors.torch.load_file(path)["w"]
    assert torch_spec(manifest.tensors[0]) == (expected.dtype, tuple(expected.shape))


def test_table_has_every_dtype_of_the_reference() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(pack({"w": entry("?")}, b"xx"))  # type: ignore[no-untyped-call]
    named = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert {name.strip("` ") for name in named.split(",")} == set(DTYPES)


@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (0, 3)])
def test_f4_that_does_not_pack_is_refused(shape: tuple[int, ...]) -> None:
    if DTYPES["F4"][1] is None:
        pytest.skip("this torch has no F4")
    with pytest.raises(ManifestError, match="tensor 'w': dtype F4 needs an even last dimension"):
        spec("F4", shape)


TORCH_DTYPES = [dtype for _, dtype in DTYPES.values() if dtype is not None]
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@draws(150)
@given(
    st.dictionaries(names, st.tuples(st.sampled_from(TORCH_DTYPES), shapes), max_size=8),
    st.none() | st.dictionaries(names, names, max_size=3),
)
def test_round_trip_with_the_reference_writer(
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None
) -> None:
    state = {}
    for name, (dtype, shape) in wanted.items():
        if dtype == DTYPES["F4"][1]:
            shape = shape or (1,)  # torch cannot pack a scalar
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        state[name] = torch.arange(num_bytes, dtype=torch.uint8).view(dtype).reshape(shape)
    # The reference writes broken JSON for no tensors and empty metadata.
    file = safetensors.torch.save(state, metadata if state else (metadata or None))
    manifest = manifest_of(file)
    assert {t.name: torch_spec(t) for t in manifest.tensors} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()
    }
    assert dict(manifest.metadata) == (metadata or {})
    assert contents(file, manifest) == reference_contents(file)


# Layouts


def shard(*tensors: str, **metadata: str) -> bytes:
    header: dict[str, Any] = {n: entry(begin=2 * i, end=2 * i + 2) for i, n in enumerate(tensors)}
    return pack(header | ({"__metadata__": metadata} if metadata else {}), b"xx" * len(tensors))


def index(weight_map: Any, **more: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 4}, "weight_map": weight_map, **more}).encode()


INDEX = "model.safetensors.index.json"


def where(manifest: Manifest) -> dict[str, str]:
    return {t.name: manifest.files[t.file].name for t in manifest.tensors}


def test_nothing_at_the_root() -> None:
    storage = MemoryStorage(b"")
    storage.files = {}
    with pytest.raises(CheckpointNotFound, match="mem://ckpt: no such checkpoint"):
        read_manifest(storage)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "it has no files"),
        (
            {"config.json": b"", "._a.safetensors": b""},
            r"its 2 files are \['._a.safetensors', 'config.json'\]$",
        ),
        (
            {"config.json": b"", "model.pt": b""},
            r"its 2 files are \['config.json', 'model.pt'\]: to load a file of torch.save, name it",
        ),
    ],
)
def test_directory_without_safetensors(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(CheckpointNotFound, match=words):
        read_manifest(MemoryStorage(files))


def test_several_files_without_an_index() -> None:
    manifest = manifest_of(
        {
            "b.safetensors": shard("b1", "b0", format="np", only_b="1"),
            "a.safetensors": shard("a", format="pt"),
            "config.json": b"{}",
            ".hidden.safetensors": b"junk",
        }
    )
    assert [f.name for f in manifest.files] == ["a.safetensors", "b.safetensors"]
    assert [f.version for f in manifest.files] == ["v-a.safetensors", "v-b.safetensors"]
    assert [(t.file, t.name) for t in manifest.tensors] == [(0, "a"), (1, "b1"), (1, "b0")]
    assert manifest.metadata == {"format": "pt", "only_b": "1"}


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {"x": "a.safetensors", "y": "b.safetensors"},
        {"x": "a.safetensors", "y": "b.safetensors", "w": "c"},
    ],
    ids=["no index", "says nothing of it", "names a third file"],
)
def test_same_tensor_in_two_files_of_which_nothing_says_which_is_meant(weight_map: Any) -> None:
    files = {
        "a.safetensors": shard("x", "w"),
        "b.safetensors": shard("w", "y"),
        "c": shard("z"),
        **({} if weight_map is None else {INDEX: index(weight_map)}),
    }
    with pytest.raises(ManifestError, match=r"'w' is in two files, 'a\.safetensors' and 'b\.safetensors'"):
        read_manifest(MemoryStorage(files))


@pytest.mark.parametrize("meant", ["a.safetensors", "b.safetensors", "c.safetensors"])
def test_same_tensor_in_several_files_is_the_one_that_the_index_names(meant: str) -> None:
    files = {f"{one}.safetensors": shard(one, "w") for one in "abc"}
    names = {one: f"{one}.safetensors" for one in "abc"}
    manifest = manifest_of({**files, INDEX: index({**names, "w": meant})})
    assert where(manifest) == {**names, "w": meant}
    assert len(manifest.tensors) == 4


def test_index_names_the_files_and_they_are_taken_whole() -> None:
    manifest = manifest_of(
        {
            INDEX: index({"b": "sub/b.safetensors", "a": "a.safetensors"}, extra=[1]),
            "a.safetensors": shard("a", "extra"),
            "sub/b.safetensors": shard("b"),
            "other.safetensors": b"junk",
        }
    )
    assert where(manifest) == {"a": "a.safetensors", "extra": "a.safetensors", "b": "sub/b.safetensors"}


def test_which_index() -> None:
    one, two = index({"a": "a.safetensors"}), index({"b": "b.safetensors"})
    files = {"a.safetensors": shard("a"), "b.safetensors": shard("b")}
    assert set(where(manifest_of({**files, "x.safetensors.index.json": two}))) == {"b"}
    assert set(where(manifest_of({**files, "x.safetensors.index.json": two, INDEX: one}))) == {"a"}
    with pytest.raises(ManifestError, match=r"several indexes, none named .*'x.safetensors.index.json'"):
        read_manifest(
            MemoryStorage({**files, "x.safetensors.index.json": two, "y.safetensors.index.json": one})
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "index is not valid JSON"),
        (b"[]", r"index is not a JSON object but \[\]"),
        (b"\xff", "index is not valid JSON: .*0xff"),
        (b"[" * 200_000, "index is nested too deeply"),
        (b"{}", "weight_map is not an object that names files but None"),
        (index({}), r"weight_map is not an object that names files but \{\}"),
        (index(["a"]), r"weight_map is not an object that names files but \['a'\]"),
        (index({"a": 1}), "tensor 'a': not a plain relative file name: 1"),
        (index({"a": None}), "tensor 'a': not a plain relative file name: None"),
        (b'{"weight_map":{"a":"a.safetensors","a":"a.safetensors"}}', "key 'a' appears twice"),
        (b'{"weight_map":{},"weight_map":{}}', "key 'weight_map' appears twice"),
        (
            index({"b": "a.safetensors"}),
            "tensor 'b' is not in 'a.safetensors': no file holds it",
        ),
        (
            index({"a": "b.safetensors", "b": "a.safetensors"}),
            "tensor 'a' is not in 'b.safetensors': it is in 'a.safetensors'",
        ),
    ],
)
def test_bad_index(text: bytes, words: str) -> None:
    files = {INDEX: text, "a.safetensors": shard("a"), "b.safetensors": shard("b")}
    with pytest.raises(ManifestError, match=f"{URL}/{INDEX}: .*{words}"):
        read_manifest(MemoryStorage(files))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../a.safetensors",
        "sub/../../a.safetensors",
        "..",
        ".",
        "./a.safetensors",
        "sub//a.safetensors",
        "sub/",
        "sub\\a.safetensors",
        "C:a.safetensors",
        "c:/a.safetensors",
        "a\0.safetensors",
        "\ud800.safetensors",
        "http://host/a.safetensors",
    ],
)
def test_index_cannot_lead_out_of_the_checkpoint(name: str) -> None:
    storage = MemoryStorage({INDEX: index({"a": name}), name: shard("a")})
    with pytest.raises(ManifestError, match="tensor 'a': not a plain relative file name"):
        read_manifest(storage)
    assert {read[0] for read in storage.reads} == {INDEX}


def test_files_that_the_index_names_and_nobody_has() -> None:
    weight_map = {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}
    storage = MemoryStorage({INDEX: index(weight_map), "b.safetensors": shard("b")})
    with pytest.raises(
        IncompleteCheckpoint, match=r"2 of 3 files missing: \['a.safetensors', 'c.safetensors'\]"
    ):
        read_manifest(storage)


def test_huge_index_is_not_read() -> None:
    storage = MemoryStorage({INDEX: b"{}"}, {INDEX: 2**40})
    with pytest.raises(ManifestError, match=f"index of {2**40} bytes is over the limit"):
        read_manifest(storage)
    assert storage.reads == []


def test_many_files_are_deterministic() -> None:
    files = {f"{i:03}.safetensors": shard(f"t{i}", f"u{i}") for i in range(60)}
    first, again = manifest_of(files), manifest_of(dict(reversed(files.items())))
    assert first == again
    assert first.digest() == again.digest()
    assert [t.name for t in first.tensors] == [f"{c}{i}" for i in range(60) for c in "tu"]
    for bad in ("007", "023", "055"):
        files[f"{bad}.safetensors"] = b"short"
    for _ in range(5):
        with pytest.raises(ManifestError, match=r"007\.safetensors"):
            read_manifest(MemoryStorage(files))


# Fuzzing: nothing but ManifestError escapes, and what is accepted the reference accepts and reads alike.

SEED_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": entry("F32", [2, 3], 0, 24),
    "b": entry("U8", [1], 24, 25),
    "ü": entry("F4", [2], 25, 26),
    "z": entry("I64", [0], 26, 26),
}
SEED_DATA = bytes(range(26))
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 24, 25, 26, 2**31, 2**63, 2**64, 10**30, 1.0, -0.0, 1e300),
    *("", "U8", "F32", "F4", "F6_E2M3", "C64", "nope", "\ud800", "pt", "\0", float("nan"), float("inf")),
    *([], {}, [0, 0], [0, 26], [26, 26], [2**62, 4], [0, 2**62, 2**62], [[0]], {"dtype": "U8"}),
]


TOKENS = [*(bytes([byte]) for byte in b'"{}[],:-0 \xff'), b"9" * 30, b"1e2", b"\\u00", b"NaN"]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def mutate_json(value: Any, rng: random.Random) -> bytes:
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 2])):
        found = list(places(value))
        if not found:
            break
        container, key = rng.choice(found)
        action = rng.randrange(4)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[rng.choice(["a", "b", "x", "", "__metadata__", "dtype", "\ud800"])] = container[key]
        else:
            container[key] = rng.choice(ODD)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass") + b" " * rng.choice([0, 0, 3])


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(mutant) + 1)
        end = at + rng.choice([0, 1, 1, 8])
        mutant[at:end] = rng.choice([b"", rng.randbytes(1), rng.choice(TOKENS), bytes(mutant[at:end]) * 2])
    return bytes(mutant)


def read_or_refuse(files: dict[str, bytes] | bytes) -> Manifest | None:
    try:
        return manifest_of(files)
    except (IncompleteCheckpoint, ManifestError) as error:
        if not str(error).startswith(URL):
            pytest.fail(f"the message does not say where: {error}")
        return None


def mutants(rng: random.Random, count: int) -> Iterator[bytes]:
    seed_file = pack(SEED_HEADER, SEED_DATA)
    seed_text = json.dumps(SEED_HEADER, ensure_ascii=False).encode()
    for _ in range(count):
        yield pack(mutate_json(SEED_HEADER, rng), SEED_DATA)
        yield pack(mutate_bytes(seed_text, rng), SEED_DATA)
        yield mutate_bytes(seed_file, rng)
        yield seed_file[: rng.randrange(len(seed_file))]


def test_fuzzed_files_are_refused_or_read_as_the_reference_does() -> None:
    num_accepted = 0
    for file in mutants(random.Random(20), 1500):
        manifest = read_or_refuse(file)
        if manifest is not None:
            num_accepted += 1
            assert contents(file, manifest) == reference_contents(file)
    assert num_accepted > 100  # otherwise the second promise was not tried


def test_fuzzed_indexes_are_refused_or_read() -> None:
    rng = random.Random(21)
    good = {"metadata": {"total_size": 4}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    num_accepted = 0
    for _ in range(1500):
        text = mutate_json(good, rng) if rng.random() < 0.5 else mutate_bytes(json.dumps(good).encode(), rng)
        files = {INDEX: text, "a.safetensors": shard("a"), "b.safetensors": shard("b")}
        num_accepted += read_or_refuse(files) is not None
    assert num_accepted > 50
