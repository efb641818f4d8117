"""Files that make much of few bytes: refused by name, within 256 MiB and 5 s of CPU. Large ones open."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import fastload
from fastload.errors import ManifestError
from tests.checkpoints import record_by_hand, write_file
from tests.torch_files import Call, Stored, pickled, tensor, zipped

MIB = 1 << 20
SCALAR = TensorProperties(dtype=torch.float32)


def refused(path: Path, says: str, call: Callable[..., Any] = fastload.inspect, **options: Any) -> None:
    """Asserts that a file is refused, in an error that names it, for little memory and time."""
    text, peak_bytes, cpu_s = in_a_child(call, path, options)
    assert text.startswith(str(path))
    assert re.search(says, text, re.DOTALL), text
    assert len(text) < 5000
    assert peak_bytes < 256 * MIB
    assert cpu_s < 5.0


def in_a_child(call: Callable[..., Any], path: Path, options: dict[str, Any]) -> tuple[str, int, float]:
    """Calls in a process of its own; returns the text of the error, memory and CPU that it took."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        gc.freeze()  # garbage of other tests may crash here: a `TCPStore` would wait for its thread
        found: tuple[str, int, float] = "it was not refused", 0, 0.0
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
            # What this process has, for the threads of other tests, too, counts in the child.
            most_bytes = memory_of_process("VmData") + (4 << 30)
            resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
            Path("/proc/self/clear_refs").write_text("5")
            before, began = memory_of_process("VmRSS"), time.process_time()
            try:
                call(path, **options)
            except ManifestError as error:
                found = str(error), memory_of_process("VmHWM") - before, time.process_time() - began
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"[:1000], 0, 0.0
        finally:
            os.write(writing, json.dumps(found).encode()[:60_000])
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    assert answer, f"it took more than 30 s of CPU, or crashed: {os.waitstatus_to_exitcode(status)}"
    text, peak_bytes, cpu_s = json.loads(answer)
    return text, peak_bytes, cpu_s


def memory_of_process(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def below(key: Any, value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {key: value}
    return value


def doubled(value: Any, times: int) -> Any:
    """Stands for 2 ** times of a value; a pickle says it in a few bytes for each time."""
    for _ in range(times):
        value = (value, value)
    return value


LONG, PARTS = "k" * MIB, (1,) * 97
HOOKS = {f"x{number}": False for number in range(10_000)}
ARGS, REBUILD = (1,) * 500_000, torch._utils._rebuild_tensor_v2


def with_metadata(metadata: Any) -> Call:
    function = torch._utils._rebuild_tensor_v2
    return Call(function, Stored("0", 100), 0, (1,), (1,), False, OrderedDict(), metadata)


def subclass(kind: Any) -> Call:
    return Call(torch._utils._rebuild_wrapper_subclass, kind, torch.float32, (1,), (1,), 0, None, None, False)


REPEATED = "most of them are repeated, or have very long names"
STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "bytes 600 times": (lambda: [b"x" * (MIB + MIB // 4)] * 600, REPEATED),
    "bytes 99,000 times": (lambda: [b"x" * (MIB + MIB // 4)] * 99_000, REPEATED),
    "a text 99,000 times": (lambda: {"a": ["x" * MIB] * 99_000}, REPEATED),
    "a text that JSON escapes": (lambda: ["é" * MIB] * 100, REPEATED),
    "an integer of 1,000 bytes": (lambda: [[1 << 7999] * 100] * 4000, REPEATED),
    "bytes that are made of a text": (
        lambda: [Call(__import__("_codecs").encode, LONG, "latin1") for _ in range(1000)],
        REPEATED,
    ),
    "tensors below long keys": (
        lambda: below(LONG, {n: tensor((1,), (1,), n) for n in range(12)}, 90),
        REPEATED,
    ),
    "containers below long keys": (lambda: below(LONG, [[] for _ in range(12)], 90), REPEATED),
    "tuples of long keys": (
        lambda: {(LONG,) * 90 + (n,): tensor((1,), (1,), n) for n in range(10)},
        REPEATED,
    ),
    "keys of many parts": (lambda: {(PARTS, n): None for n in range(20_000)}, REPEATED),
    "a set of long texts": (lambda: [{LONG, n} for n in range(1000)], REPEATED),
    "lists of lists": (lambda: doubled([1], 40), REPEATED),
    "metadata of many tensors": (lambda: [with_metadata(HOOKS) for _ in range(10_000)], REPEATED),
    "attributes of many dicts": (lambda: [Call(OrderedDict, state=HOOKS) for _ in range(10_000)], REPEATED),
    "very many arguments": (
        lambda: [Call(torch._tensor._rebuild_from_type_v2, REBUILD, torch.Tensor, ARGS, None)] * 3,
        "500000 arguments",
    ),
    "many small containers": (lambda: [[n] for n in range(300_000)], REPEATED),
    "what is refused, repeated": (lambda: [subclass(dict)] * 900_000, REPEATED),
}


LONG_CASES = (
    "keys of many parts",
    "metadata of many tensors",
    "many small containers",
    "what is refused, repeated",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in LONG_CASES)) for case in STATES]
)
def test_values_that_are_repeated(tmp_path: Path, case: str) -> None:
    make, says = STATES[case]
    (tmp_path / "a.pt").write_bytes(zipped(pickled(make(), 4)))
    refused(tmp_path / "a.pt", says)


def test_a_type_that_takes_forever_to_show_is_named_briefly(tmp_path: Path) -> None:
    """What stands where the type of a tensor is expected is shown, not spelled out: it has 2**60 parts."""
    typed = Call(torch._tensor._rebuild_from_type_v2, doubled(1, 60), torch.Tensor, (), None)
    for value in (subclass(doubled(1, 60)), typed):
        (tmp_path / "a.pt").write_bytes(zipped(pickled({"a": value, "b": tensor((1,), (1,))}, 4)))
        assert list(fastload.load(tmp_path / "a.pt", names="b")) == ["b"]
        refused(tmp_path / "a.pt", r"(?s)not all of it can be loaded:.*state\['a'\] is ", fastload.load)


def test_a_dtype_that_takes_forever_to_hash(tmp_path: Path) -> None:
    """Where the dtype of a tensor is expected, there is a tuple of 2**60 parts."""
    untyped = Stored("0", 100, torch.UntypedStorage)
    call = Call(torch._utils._rebuild_tensor_v3, untyped, 0, (1,), (1,), False, OrderedDict(), doubled(1, 60))
    (tmp_path / "a.pt").write_bytes(zipped(pickled({"a": call}, 4)))
    refused(tmp_path / "a.pt", "is no dtype")


def test_the_values_of_many_files_count_together(tmp_path: Path) -> None:
    bomb = doubled([0] * 10, 15)
    for number in range(30):
        (tmp_path / f"{number}.bin").write_bytes(zipped(pickled({f"{number}": bomb}, 4)))
    weight_map = {f"{number}": f"{number}.bin" for number in range(30)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, REPEATED)


ABOUT = b"\x80\x02}q\x00U\rlittle_endianq\x01\x88s."
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03." + ABOUT
FAR = b"".join(b"r" + (1000 + number).to_bytes(4, "little") for number in range(3_000_000))


@pytest.mark.parametrize("code", [b"]", b"(", b"K\x07\x85", b"NQ", b"h\x00)RN]a", FAR])
def test_brackets_of_a_legacy_file(tmp_path: Path, code: bytes) -> None:
    start = b"\x80\x02ccollections\nOrderedDict\nq\x00"
    (tmp_path / "a.pt").write_bytes(LEGACY + start + b"N" + code * (15_000_000 // len(code)))
    refused(tmp_path / "a.pt", "more objects than|open marks|malformed")


def metadata_of(names: dict[str, Any], paths: dict[str, Any] | None) -> Metadata:
    storage = {MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, 0) for name in names}
    return Metadata(names, planner_data=paths, storage_data=storage)


def one_box_in_many_tensors() -> Metadata:
    """Each of 500 tensors has 50,000 times the box of no elements."""
    box = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    what = TensorStorageMetadata(SCALAR, torch.Size([0]), [box] * 50_000)
    names = [f"t{number}" for number in range(500)]
    storage = {MetadataIndex(name, torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 0) for name in names}
    return Metadata(dict.fromkeys(names, what), storage_data=storage)


VALUES = dict.fromkeys(map(str, range(10_000)), BytesStorageMetadata())
METADATA: dict[str, tuple[Callable[[], Metadata], str]] = {
    "paths of a long key": (
        lambda: metadata_of(VALUES, {name: (LONG, int(name), LONG) for name in VALUES}),
        REPEATED,
    ),
    "paths of many keys": (
        lambda: metadata_of(VALUES, dict.fromkeys(VALUES, (1,) * 100_000)),
        "too few for a zip archive",
    ),
    "one box in many tensors": (one_box_in_many_tensors, REPEATED),
    "sizes in very many dimensions": (
        lambda: metadata_of(dict.fromkeys(VALUES, TensorStorageMetadata(SCALAR, (1,) * 100_000, [])), None),  # type: ignore[arg-type]
        "in place of sizes",
    ),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_of_dcp(tmp_path: Path, case: str) -> None:
    make, says = METADATA[case]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(make(), 4))
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    refused(tmp_path, says)


def test_an_index_of_very_many_attributes(tmp_path: Path) -> None:
    """A pickle can refer to one object, with all its attributes, in two bytes."""
    index = b"\x8c\x2ftorch.distributed.checkpoint.metadata\x8c\rMetadataIndex"
    index = index.replace(b"\x2f", bytes([len("torch.distributed.checkpoint.metadata")]))
    state = b"}(" + b"".join(b"\x8c\x06%06dK\x01" % number for number in range(100_000)) + b"u"
    start = b"\x80\x04" + index + b"\x93)\x81" + state + b"bq\x050"
    rest = index.replace(b"\rMetadataIndex", b"\x08Metadata") + b"\x93)\x81}(\x8c\x13state_dict_metadata}"
    rest += b"\x8c\x0cstorage_data}(" + b"h\x05h\x05" * 10_000 + b"uub."
    (tmp_path / ".metadata").write_bytes(start + rest)
    refused(tmp_path, "MetadataIndex of 100000 attributes")


def test_items_of_dcp_count_together(tmp_path: Path) -> None:
    item = zipped(pickled(doubled([0] * 10, 15), 4))
    names = [f"v{number}" for number in range(40)]
    storage = {
        MetadataIndex(name): _StorageInfo("__0_0.distcp", number * len(item), len(item))
        for number, name in enumerate(names)
    }
    metadata = Metadata(dict.fromkeys(names, BytesStorageMetadata()), storage_data=storage)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    (tmp_path / "__0_0.distcp").write_bytes(item * len(names))
    refused(tmp_path, REPEATED)


def test_a_tensor_of_dcp_that_is_something_large(tmp_path: Path) -> None:
    item = zipped(pickled(doubled([0] * 10, 15), 4))
    names = [f"{'x' * (number + 1)}" for number in range(100)]
    box = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    what = TensorStorageMetadata(SCALAR, torch.Size([1]), [box])
    storage = {
        MetadataIndex(name, torch.Size([0])): _StorageInfo("__0_0.distcp", number * len(item), len(item))
        for number, name in enumerate(names)
    }
    metadata = Metadata(dict.fromkeys(names, what), storage_data=storage)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    (tmp_path / "__0_0.distcp").write_bytes(item * len(names))
    refused(tmp_path, REPEATED)


LEAF: dict[str, Any] = {}
KEY = "k" * 2500


def structure(form: str) -> Any:
    """25,000 tensors below 90 keys of 2,500 characters."""
    node: Any = {"dict": [each for number in range(25_000) for each in (number, LEAF)]}
    if form == "lists":
        node = [LEAF] * 25_000
    if form == "one name":
        node = [{"tensor": ["a"]}] * 25_000
    if form == "state_dict":
        node = {"state_dict": [[], {"dict": [each for n in range(25_000) for each in (n, [])]}]}
    if form == "tuple keys":
        return {"dict": [{"tuple": [KEY] * 90}, node]}
    if form == "PerRank":
        return {"PerRank": [KEY * 90, [node]]}
    for _ in range(90):
        node = {"OrderedDict": [KEY, node]}
    return node


@pytest.mark.parametrize("form", ["dicts", "lists", "one name", "state_dict", "tuple keys", "PerRank"])
def test_long_names_in_a_commit_record(tmp_path: Path, form: str) -> None:
    write_file(tmp_path / "model.safetensors", [("a", "F32", (1,))])
    record_by_hand(tmp_path, 1024, state=structure(form))
    assert (tmp_path / "fastload.json").stat().st_size < MIB
    refused(tmp_path, REPEATED, fastload.load, names="*")


@pytest.mark.slow
def test_a_hundred_thousand_tensors_open(tmp_path: Path) -> None:
    """As large trainings have them: names of a depth, and moments of an optimizer."""
    count = 25_000
    names = [f"model.layers.{number // 10}.block.part{number % 10}.weight" for number in range(count)]

    def one(number: int) -> Call:
        return tensor((1,), (1,), number, storage=Stored("0", 4 * count))

    state = {
        "model": {name: one(number) for number, name in enumerate(names)},
        "optimizer": {
            "state": {
                number: {
                    part: one((1 + place) * count + number)
                    for place, part in enumerate(("step", "exp_avg", "v"))
                }
                for number in range(count)
            },
            "param_groups": [{"params": list(range(count)), "lr": 0.1}],
        },
    }
    (tmp_path / "a.pt").write_bytes(zipped(pickled(state), {"data/0": bytes(16 * count)}))
    assert len(fastload.inspect(tmp_path / "a.pt").tensors) == 4 * count
