"""Files of torch.save: what was saved comes back, nothing in them runs, what is wrong with them is said."""

from __future__ import annotations

import builtins
import json
import os
import struct
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import fastload
from fastload.base.memory import byte_view
from fastload.errors import ManifestError, OptionError
from fastload.ext.formats.torch_save.state import StorageRef
from fastload.ext.formats.torch_save.unpickle import Global
from fastload.ext.formats.torch_save.writer import lay_out_torch
from tests.soak.torch_files import soak
from tests.torch_files import Call, Stored, pickled, tensor, zipped

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int8, torch.uint8,
    torch.int16, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16,
]  # fmt: skip


def assert_same(found: Any, wanted: Any, where: str = "state") -> None:
    """Compares to the bit, with types, the order of keys, and what of containers."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        assert [type(key) for key in found] == [type(key) for key in wanted], where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}[{key!r}]")
        assert getattr(found, "_metadata", None) == getattr(wanted, "_metadata", None)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(wanted, Tensor):
        about = [(each.dtype, each.shape, each.requires_grad) for each in (found, wanted)]
        assert about[0] == about[1], where
        bits = [byte_view(each.detach().contiguous()).tolist() for each in (found, wanted)]
        assert bits[0] == bits[1], where
    else:
        assert found == wanted or (found != found and wanted != wanted), where


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any view of a tensor, with any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    value = bits.view(dtype).reshape(shape)
    if shape and draw(st.booleans()):
        value = value.permute(draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(value.shape):
        if draw(st.integers(0, 4)) == 0:
            value = value[
                (slice(None),) * dim + (slice(draw(st.integers(0, size)), None, draw(st.integers(1, 3))),)
            ]
    if draw(st.integers(0, 4)) == 0:
        value = value.unsqueeze(0).expand(3, *value.shape)
    if draw(st.integers(0, 4)) == 0:
        value = Parameter(value, requires_grad=value.is_floating_point() and draw(st.booleans()))
    return value


KEYS = (
    st.text(max_size=3) | st.integers(-3, 3) | st.tuples(st.integers(), st.text(max_size=2)) | st.booleans()
)
LEAVES = (
    tensors()
    | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers()
    | st.sampled_from([torch.float32, torch.Size((2, 3)), torch.device("cpu"), {1}, bytearray(b"x")])
)  # fmt: skip
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda value: defaultdict(list, value))
        | st.dictionaries(st.text(max_size=2), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.dictionaries(KEYS, STATES, max_size=4), st.booleans())
def test_any_state_comes_back(tmp_path: Path, state: Any, zipped: bool) -> None:
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert_same(fastload.load(tmp_path / "a.pt"), state)
    names = [entry.name for entry in fastload.inspect(tmp_path / "a.pt").tensors]
    if names:
        found = fastload.load(tmp_path / "a.pt", names=names)
        into = {name: torch.empty_like(tensor) for name, tensor in found.items()}
        assert_same(fastload.load(tmp_path / "a.pt", names=names, into=into), found)


def test_results_have_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    torch.save({"": torch.ones(2), "0": torch.zeros(3)}, tmp_path / "a.pt")
    into = {"0": torch.empty(3), "tensor": torch.empty(2)}  # one by its key, the other one by its name
    assert list(fastload.load(tmp_path / "a.pt", names="*", into=into)) == ["tensor", "0"]
    assert list(fastload.load(tmp_path / "a.pt", names="*")) == ["tensor", "0"]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_training_comes_back(tmp_path: Path, zipped: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    tied = torch.arange(6).reshape(2, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tied": [tied, tied.t(), tied]}
    path = tmp_path / "any.name"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    found = fastload.load(path)
    assert_same(found, state)
    assert found["tied"][0] is found["tied"][2]
    again = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    other = torch.optim.AdamW(again.parameters())
    transposed = torch.zeros(3, 2, dtype=torch.int64)
    into = {
        "model": again,
        "optimizer": other,
        "tied": [torch.zeros_like(tied), transposed, torch.zeros_like(tied)],
    }
    fastload.load(path, into=into)
    assert_same(again.state_dict(), model.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())
    assert transposed.tolist() == tied.t().tolist()
    assert fastload.load(path, names="tied.1")["tied.1"].tolist() == tied.t().tolist()
    assert fastload.load(path, dtype="bfloat16")["model"]["0.weight"].dtype is torch.bfloat16
    with fastload.open(path) as checkpoint:
        assert checkpoint.manifest.format == "torch"


def test_opening_reads_no_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 20), "b": [torch.ones(1 << 20)] * 2}, tmp_path / "a.pt")
    with fastload.open(tmp_path / "a.pt") as checkpoint:
        checkpoint.load(names="b.0")
        report = checkpoint.report
        assert report is not None
        assert report.bytes_wanted == 4 << 20
        assert report.ranks[0].header_bytes_read < 150_000


def test_what_stands_before_data_is_checked_as_they_are_read(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.pt", tmp_path / "folder"
    storage = torch.randn(50)
    state = {"a": torch.randn(30), "part": storage[5:25], "b": [torch.randn(30)] * 2, "none": torch.zeros(0)}
    torch.save(state, path)
    folder.mkdir()
    for number in (1, 2):
        torch.save({f"{number}.{key}": state[key] for key in "ab"}, folder / f"pytorch_model-{number}.bin")
    weight_map = {f"{number}.{key}": f"pytorch_model-{number}.bin" for number in (1, 2) for key in "ab"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for place in (path, folder):
        manifest = fastload.inspect(place)
        assert len(manifest.guards) == (3 if place == path else 4)
        for file, offset, head in manifest.guards:
            data = (place / manifest.files[file].name if place == folder else path).read_bytes()
            assert data[:offset].endswith(manifest.heads[head])
    good, entries = path.read_bytes(), fastload.inspect(path).by_name
    with zipfile.ZipFile(path) as archive:
        headers = [record.header_offset for record in archive.infolist()]
    for name in ("a", "part", "b.0"):
        begin = max(header for header in headers if header < entries[name].offset)
        end = entries[name].offset + entries[name].nbytes
        moved = good[: begin - 8] + good[begin - 4 : end] + bytes(4) + good[end:]  # all of this record
        path.write_bytes(moved)
        with pytest.raises(ManifestError, match="where the directory says"):
            fastload.load(path, names=name)
    path.write_bytes(good.replace(b"FB", b"XX"))  # as some other program may fill
    assert_same(fastload.load(path), state)


def records_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def test_a_supplier_that_does_not_cover_other_layouts_is_closed(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(5)}, tmp_path / "a.pt")
    supplier = Mock(covers=Mock(return_value=False))
    with fastload.open(tmp_path / "a.pt") as checkpoint:
        checkpoint._session.supplier = supplier
        checkpoint._session.reopen_exactly()
        supplier.close.assert_called_once()
        assert checkpoint._session.supplier is None


def test_files_of_older_torch_come_back(tmp_path: Path) -> None:
    """torch 1.6 wrote neither byte order nor format version, and called every archive the same."""
    value = torch.arange(30).reshape(5, 6).t()
    torch.save({"a": value}, tmp_path / "new.pt")
    records = records_of(tmp_path / "new.pt")
    storages = {name: data for name, data in records.items() if name.startswith("data/")}
    for name, order in {"old": None, "repacked": b"little"}.items():
        (tmp_path / name).write_bytes(zipped(records["data.pkl"], storages, order=order))
        assert fastload.load(tmp_path / name)["a"].tolist() == value.tolist()
    untyped = tensor((2, 2), (2, 1), storage=Stored("1", 400, torch.UntypedStorage),
                     function=torch._utils._rebuild_tensor_v3, more=(torch.float8_e4m3fn,))  # fmt: skip
    parameter = Call(torch._utils._rebuild_parameter, untyped, False, OrderedDict())
    typed = Call(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, torch.Tensor,
                 (Stored("0", 100), 0, (2,), (1,), False, OrderedDict()), {"extra": 1})  # fmt: skip
    old = Call(torch._utils._rebuild_tensor, Stored("0", 100), 3, (2,), (1,))
    state = {
        "a": untyped,
        "b": parameter,
        "c": typed,
        "d": old,
        "e": Call(set, [1]),
        "f": Call(complex, 1.0, 2.0),
    }
    for protocol in (2, 3, 4, 5):
        (tmp_path / "b").write_bytes(zipped(pickled(state, protocol), {"data/1": bytes(400)}))
        found = fastload.load(tmp_path / "b")
        assert found["a"].dtype is torch.float8_e4m3fn
        assert type(found["b"]) is Parameter
        assert [found["c"].shape, found["d"].shape, found["e"], found["f"]] == [(2,), (2,), {1}, 1 + 2j]


def test_storages_that_were_parts_of_others() -> None:
    """As torch kept them before 0.4: with the key, the offset and the length of the part."""
    kind = Global("torch.cuda", "HalfStorage")
    about = ("storage", kind, "7", "cuda:0", 100)
    assert StorageRef.of(about, "it") == StorageRef("7", torch.float16, 100)
    assert StorageRef.of((*about, None), "it") == StorageRef("7", torch.float16, 100)
    assert StorageRef.of((*about, ("8", 10, 5)), "it") == StorageRef("7", torch.float16, 5, 10)
    for view in (("8", 10, 91), ("8", -1, 5), ("8", 10), 3):
        with pytest.raises(ManifestError, match="is no storage"):
            StorageRef.of((*about, view), "it")


class Unwelcome:
    pass


def test_what_cannot_be_loaded_is_named_unless_it_is_not_wanted(tmp_path: Path) -> None:
    ones = torch.ones(3)
    quantized = Call(
        torch._utils._rebuild_qtensor, Stored("0", 9, torch.QInt8Storage), 0, (3,), (1,), (), False, {}
    )
    state = {
        "good": tensor((3,), (1,)),
        "odd": [1, Unwelcome(), {"deep": deque([1])}],
        "sparse": Call(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, ()),
        "quantized": quantized,
        "meta": Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (3,), (1,), False),
        "unfold": tensor((8, 3), (1, 1)),
        "conj": tensor((3,), (1,), more=({"conj": True},)),
        "bits": tensor((2,), (1,), storage=Stored("1", 9, torch.QUInt8Storage)),
        "class": OrderedDict,
        ("tuple",) * 101: 1,
    }
    path = tmp_path / "a.pt"
    path.write_bytes(zipped(pickled(state)))
    del state[("tuple",) * 101]
    with pytest.raises(ManifestError, match="keyed by a tuple: it has more than 100 parts"):
        fastload.load(path)
    path.write_bytes(zipped(pickled(state)))
    with pytest.raises(ManifestError) as caught:
        fastload.load(path)
    says = str(caught.value)
    for line in (
        f"{path}: not all of it can be loaded:",
        "state['odd'][1] is tests.unit.test_torch_files.Unwelcome: it is not on the list",
        "state['odd'][2]['deep'] is collections.deque: it is not on",
        "state['sparse'] is a sparse tensor: only dense",
        "state['quantized'] is a quantized tensor: only dense",
        "state['meta'] is a tensor on the meta device: only",
        "state['unfold'] is a tensor whose elements share memory",
        "state['conj'] is a lazily conjugated",
        "state['bits'] is a torch.quint8 tensor: fastload has no such dtype",
        "state['class'] is collections.OrderedDict: it is a class or a function",
        "strict=False leaves these out",
    ):
        assert line in says
    found = fastload.load(path, strict=False)
    assert found["good"].tolist() == [0.0] * 3
    assert found["odd"] == [1, None, {"deep": None}]
    assert fastload.load(path, names="good")["good"].tolist() == [0.0] * 3
    fastload.load(path, into={"good": ones, "odd": None}, strict=False)
    assert ones.tolist() == [0.0] * 3
    assert fastload.inspect(path).by_name["good"].shape == (3,)


def overlapping(data: bytes) -> bytes:
    """Has two entries of the directory point at one record."""
    first, second = (data.index(b"PK\1\2", at) for at in (0, data.index(b"PK\1\2") + 1))
    return data[: second + 42] + data[first + 42 : first + 46] + data[second + 46 :]


def patched(find: bytes, at: int, value: bytes) -> Any:
    return lambda data: data[: data.rindex(find) + at] + value + data[data.rindex(find) + at + len(value) :]


GOOD = {"a": Call(torch._utils._rebuild_parameter, tensor((10, 10), (10, 1)), False, OrderedDict())}
BAD_ZIPS = {
    "cut": (lambda data: data[:-30], "has no end record"),
    "cut by one": (lambda data: data[:-1], "has no end record"),
    "empty": (lambda data: data[:4], "too few for a zip archive"),
    "more behind": (lambda data: data + b"x" * 50, "has no end record"),
    "directory elsewhere": (patched(b"PK\5\6", 16, b"\0\0\0\1"), "not where the end record says"),
    "directory longer": (patched(b"PK\5\6", 12, b"\xff\xff\0\0"), "not where the end record says"),
    "more entries": (patched(b"PK\5\6", 8, b"\x09\0\x09\0"), "records where 9 are announced"),
    "several disks": (patched(b"PK\5\6", 4, b"\1\0"), "in several parts"),
    "encrypted": (patched(b"PK\1\2", 8, b"\1\0"), "is encrypted"),
    "compressed": (patched(b"PK\1\2", 10, b"\x08\0"), "is compressed"),
    "bzip2": (patched(b"PK\1\2", 10, b"\x0c\0"), "is compressed"),
    "sizes differ": (patched(b"PK\1\2", 20, b"\xff\xff\0\0"), "takes 65535 bytes"),
    "64 bits that are not there": (patched(b"PK\1\2", 20, b"\xff" * 8), "sizes of 64 bits are missing"),
    "beyond the file": (patched(b"PK\1\2", 42, b"\xff\xff\xff\x7f"), "overlaps"),
    "record longer": (patched(b"PK\1\2", 20, b"\xff\xff\xff\x7f" * 2), "overlaps"),
    "overlapping": (overlapping, "overlaps"),
    "twice": (lambda data: data.replace(b"archive/data/1", b"archive/data/0"), "is in it twice"),
    "no entry": (lambda data: data.replace(b"PK\1\2", b"PK\1\3"), "an entry of its directory is malformed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ZIPS)
def test_archives_that_lie_are_refused(tmp_path: Path, case: str) -> None:
    spoil, says = BAD_ZIPS[case]
    path = tmp_path / "a.pt"
    path.write_bytes(spoil(zipped(pickled(GOOD), {"data/1": b"more"})))
    for call in (fastload.load, fastload.inspect):
        with pytest.raises(ManifestError, match=f"^{path}.*({says})"):
            call(path)


def test_offsets_and_sizes_of_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as every archive of more than 4 GiB has."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    path = tmp_path / "a.pt"
    numbers = torch.arange(100.0)
    path.write_bytes(zipped(pickled(GOOD), {"data/0": numbers.numpy().tobytes()}))
    assert path.read_bytes().count(b"\xff" * 4) > 6  # in both lengths or offsets of several records
    assert torch.equal(torch.load(path)["a"], numbers.reshape(10, 10))
    assert torch.equal(fastload.load(path)["a"], numbers.reshape(10, 10))


BAD_FILES = {
    "big-endian": (zipped(pickled(GOOD), order=b"big"), "byte order b'big'"),
    "deflated": (zipped(pickled(GOOD), method=zipfile.ZIP_DEFLATED), "is compressed"),
    "no pickle": (zipped(b"", prefix=""), "has no data.pkl"),
    "deeper": (zipped(b"", prefix="a/b/"), "has no data.pkl"),
    "script": (
        zipped(pickled(GOOD), {"constants.pkl": b""}, method=zipfile.ZIP_DEFLATED),
        "a TorchScript archive",
    ),
    "no storage": (zipped(pickled({"a": tensor((1,), (1,), storage=Stored("7", 1))})), "no storage '7'"),
    "short": (zipped(pickled(GOOD), {"data/0": bytes(399)}), "beyond its storage of 399 bytes"),
    "beyond": (zipped(pickled({"a": tensor((10, 10), (10, 1), 1)})), "beyond its storage of 100 elements"),
    "strides": (zipped(pickled({"a": tensor((2, 2), (99, 1))})), "beyond its storage of 100 elements"),
    "lying numel": (zipped(pickled({"a": tensor((999,), (1,), storage=Stored("0", 999))})), "of 400 bytes"),
    "negative size": (zipped(pickled({"a": tensor((-1,), (1,))})), r"\(-1,\) in place of sizes"),
    "negative stride": (zipped(pickled({"a": tensor((2,), (-1,), 50)})), r"\(-1,\) in place of sizes"),
    "negative offset": (zipped(pickled({"a": tensor((2,), (1,), -1)})), "not offset, shape and strides"),
    "no strides": (zipped(pickled({"a": tensor((2, 2), (1,))})), "not offset, shape and strides"),
    "huge": (zipped(pickled({"a": tensor((10**9, 10**9), (0, 0))})), "bytes of tensors in"),
    "many dims": (zipped(pickled({"a": tensor((1,) * 100, (1,) * 100)})), "in place of sizes"),
    "huge numbers": (zipped(pickled({"a": tensor((2,), (1 << 2000,))})), "in place of sizes"),
    "texts": (zipped(pickled({"a": tensor("ab", (1,))})), "in place of sizes"),
    "repeated": (
        zipped(pickled({i: tensor((90 + i % 10,), (1,), i // 10) for i in range(10)} | {
            10 + i: tensor((80, 1000), (1, 0), i) for i in range(20)})),
        "they repeat each other",
    ),
    "no tensor": (zipped(pickled({"a": Call(torch._utils._rebuild_tensor_v2, 1, 2)})), "cannot be"),
    "no storage id": (zipped(pickled(tensor((1,), (1,), storage=3))), "3 where a storage is to be"),
    "odd storage id": (zipped(pickled(tensor((1,), (1,), storage=Stored(7, "x")))), "is no storage"),
    "odd storage": (zipped(pickled(tensor((1,), (1,), storage=Stored("0", 9, dict)))), "is no storage"),
    "no dtype": (
        zipped(pickled({"a": tensor((1,), (1,), function=torch._utils._rebuild_tensor_v3, more=("x",))})),
        "is no dtype",
    ),
    "two dtypes": (
        zipped(pickled([tensor((1,), (1,)), tensor((1,), (1,), storage=Stored("0", 50, torch.LongStorage))])),
        "is of torch.float32 and torch.int64",
    ),
    "size of what": (zipped(pickled({"a": Call(torch.Size, "abc")})), "in place of sizes"),
    "device": (zipped(pickled({"a": Call(torch.device, "x" * 99)})), "no device"),
    "repeats": (zipped(b"\x80\x02}q\0" + b"]q\1(" + b"K\1" * 100 + b"e" + b"".join(
        b"]" + b"q" + bytes((i,)) + b"(" + (b"h" + bytes((i - 1,))) * 100 + b"e" for i in range(2, 9)
    ) + b"K\1" * 0 + b"\x85" * 1 + b"."), "most of them are repeated"),
    "attributes": (zipped(pickled({"a": Call(OrderedDict, state=[1])})), r"\[1\] in place of a dict"),
    "garbage": (zipped(b"\x80\x02garbage"), "the pickle is"),
    "cut pickle": (zipped(pickled(GOOD)[:-1]), "the pickle is cut off"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_lie_are_refused(tmp_path: Path, case: str) -> None:
    data, says = BAD_FILES[case]
    path = tmp_path / "a.pt"
    path.write_bytes(data)
    for call in (fastload.load, fastload.inspect):
        tracemalloc.start()
        with pytest.raises(ManifestError, match=f"^{path}.*({says})"):
            call(path)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
        tracemalloc.stop()


def attacks(canary: Path) -> Iterator[Any]:
    touch = f"open({str(canary)!r}, 'w')"
    yield Call(os.system, f"touch {canary}")
    yield Call(builtins.eval, touch)
    yield Call(builtins.exec, touch)
    yield Call(open, str(canary), "w")
    yield Call(getattr, Call(__import__, "os"), "system")
    yield Call(torch.save, 1, str(canary))
    yield Call(OrderedDict, Call(builtins.eval, touch))
    yield Call(torch.Size, Call(builtins.eval, touch))
    yield Call(torch._utils._rebuild_parameter, Call(builtins.eval, touch), True, OrderedDict())
    yield Call(torch._tensor._rebuild_from_type_v2, eval, torch.Tensor, (touch,), None)
    yield tensor(Call(builtins.eval, touch), (1,))
    yield tensor((1,), (1,), storage=Call(builtins.eval, touch))
    yield {Call(builtins.eval, touch): 1}
    yield Call(OrderedDict, state={"_metadata": Call(builtins.eval, touch)})
    yield Call(set, [Call(builtins.eval, touch)])


def test_nothing_in_a_file_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "a.pt"
    for protocol in (2, 4):
        for attack in attacks(canary):
            path.write_bytes(zipped(pickled({"a": attack, "good": tensor((3,), (1,))}, protocol)))
            for strict in (True, False):
                with pytest.raises(ManifestError, match=str(path)) if strict else suppress(ManifestError):
                    fastload.load(path, strict=strict)
    assert not canary.exists()


def test_legacy_files_that_lie_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(9), "b": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    good = path.read_bytes()
    spoiled = {
        "cut": (good[:-1], "storages take"),
        "longer": (good + b"x", "storages take"),
        "cut in the pickles": (good[:200], "the pickle is cut off"),
        "big-endian": (good.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"), "big-endian"),
        "version": (good.replace(struct.pack("<H", 1001), b"\1\0", 1), "of version 1"),
        "length": (
            good.replace(struct.pack("<3q", 9, 0, 1), struct.pack("<3q", 8, 0, 1)),
            "storage '[0-9]+' is not as",
        ),
        "numel": (good.replace(b"K\x09N", b"K\x08N", 1), "beyond its storage|storages take"),
    }
    for case, (data, says) in spoiled.items():
        path.write_bytes(data)
        with pytest.raises(ManifestError, match=f"^{path}.*({says})"):
            fastload.load(path)
        assert data != good, case


@pytest.mark.filterwarnings("ignore")  # of torch, which reads some of them for comparison
def test_mutated_files_are_refused_or_loaded_as_they_are(tmp_path: Path) -> None:
    ends = soak(200, 0, 1, tmp_path)  # many more are in tests/soak
    assert sum(count for (_, end), count in ends.items() if end == "refused") > 100


def test_what_torch_would_not_read_is_not_written(tmp_path: Path) -> None:
    state = {"array": numpy.arange(3), "frozen": frozenset({1}), "good": torch.ones(2)}
    for kept, says in (("array", "1 NumPy arrays.*: array"), ("frozen", "builtins.frozenset"), ("good", "")):
        fastload.save({kept: state[kept]}, tmp_path / kept)
        manifest = fastload.inspect(tmp_path / kept)
        with pytest.raises(OptionError, match=says) if says else nullcontext():
            lay_out_torch(manifest.structure, manifest.tensors, {})
