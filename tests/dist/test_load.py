"""Collective loads, compared bit for bit with what the reference library reads."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import fastload
from fastload.formats.state import state_digest
from fastload.loading.targets import TensorWriter
from fastload.storage.local import LocalStorage
from tests.checkpoints import (
    BITS,
    Row,
    assert_own_storage,
    assert_same_bits,
    load_reference,
    raw,
    write_file,
    write_hub_cache,
    write_sharded,
)
from tests.dist.harness import ranks

STRATEGIES = ["auto", "allgather", "broadcast", "direct"]
EXCHANGES = ["allgather", "broadcast"]


def load(
    path: Any, *, strategy: str = "allgather", **arguments: Any
) -> tuple[dict[str, torch.Tensor], fastload.LoadReport]:
    """Loads, and returns the report too."""
    knobs = {
        name: arguments.pop(name)
        for name in ("chunk_bytes", "staging_bytes", "read_threads", "progress")
        if name in arguments
    }
    reports: list[fastload.LoadReport] = []
    options = fastload.LoadOptions(strategy=strategy, timeout_s=20, on_report=reports.append, **knobs)
    tensors = fastload.load(path, options=options, **arguments)
    (report,) = reports
    return tensors, report


def check(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Compares with the reference, and returns a digest for comparison between ranks."""
    assert_same_bits(tensors, load_reference(path))
    assert_own_storage(tensors)
    return state_digest(tensors)


def rows(*names: str) -> list[Row]:
    return [(name, "F32", (17 + 3 * number, 11)) for number, name in enumerate(names)]


SHARDS = {
    "model-00001-of-00003.safetensors": rows("a", "b", "c"),
    "model-00002-of-00003.safetensors": rows("d"),
    "model-00003-of-00003.safetensors": rows("e", "f"),
}


# Where checkpoints lie


def single_file(folder: Path) -> Path:
    write_file(folder / "model.safetensors", rows("a", "b", "c"))
    return folder / "model.safetensors"


def with_index(folder: Path) -> Path:
    write_sharded(folder, SHARDS, index=True)
    return folder


def without_index(folder: Path) -> Path:
    write_sharded(folder, SHARDS, index=False)
    (folder / "config.json").write_text("{}")
    return folder


def hub_cache(folder: Path) -> Path:
    return write_hub_cache(folder, SHARDS)


def linked_folder(folder: Path) -> Path:
    write_sharded(folder / "real", SHARDS, index=True)
    (folder / "link").symlink_to("real")
    return folder / "link"


# What may be in a file


def every_dtype(folder: Path) -> Path:
    write_file(folder / "m.safetensors", [(f"x.{dtype}", dtype, (3, 6)) for dtype in BITS])
    return folder / "m.safetensors"


def odd_offsets(folder: Path) -> Path:
    rows: list[Row] = [("u", "U8", (1,))]
    for number, dtype in enumerate(("F64", "C64", "BF16", "I64", "F32", "F16")):
        rows += [(f"t{number}", dtype, (5, 3)), (f"odd{number}", "U8", (2 * number + 1,))]
    write_file(folder / "m.safetensors", rows, padding=3)
    return folder / "m.safetensors"


def nothing_in_it(folder: Path) -> Path:
    rows: list[Row] = [
        ("zero", "F32", (0,)),
        ("scalar", "F64", ()),
        ("zeros", "BF16", (3, 0, 5)),
        ("one", "I8", (1, 1, 1)),
        ("last", "F32", (4, 0)),
    ]
    write_file(folder / "m.safetensors", rows)
    return folder / "m.safetensors"


def only_empty_tensors(folder: Path) -> Path:
    write_file(folder / "m.safetensors", [("a", "F32", (0,)), ("b", "I64", (2, 0))])
    return folder / "m.safetensors"


def no_tensors(folder: Path) -> Path:
    write_file(folder / "m.safetensors", [], metadata={"k": "v"})
    return folder / "m.safetensors"


def one_file_of_several_empty(folder: Path) -> Path:
    write_sharded(
        folder, {"a.safetensors": rows("a"), "b.safetensors": [], "c.safetensors": rows("c")}, index=False
    )
    return folder


def strange_names(folder: Path) -> Path:
    names = ["ünïcodé.重み", "", " ", "a/b\\c", "💾" * 40, "__metadata", "a\nb", '"quoted"', "a.b", "a.b.c"]
    write_file(folder / "m.safetensors", [(name, "I16", (3,)) for name in names])
    return folder / "m.safetensors"


def thousands(folder: Path) -> Path:
    rows: list[Row] = [(f"t{n}", ("F32", "U8", "F16")[n % 3], (n % 5, 1 + n % 3)) for n in range(2000)]
    write_file(folder / "m.safetensors", rows)
    return folder / "m.safetensors"


def one_giant(folder: Path) -> Path:
    small: list[Row] = [(f"t{n}", "F32", (2,)) for n in range(5)]
    write_file(folder / "m.safetensors", [*small, ("giant", "BF16", (1_000_003,)), ("tail", "U8", (3,))])
    return folder / "m.safetensors"


def fewer_bytes_than_ranks(folder: Path) -> Path:
    write_file(folder / "m.safetensors", [("t", "U8", (3,))])
    return folder / "m.safetensors"


LAYOUTS = [single_file, with_index, without_index, hub_cache, linked_folder]
CONTENTS = [
    every_dtype,
    odd_offsets,
    nothing_in_it,
    only_empty_tensors,
    no_tensors,
    one_file_of_several_empty,
    strange_names,
    thousands,
    one_giant,
    fewer_bytes_than_ranks,
]
Make = Callable[[Path], Path]


def prepared(make: list[Make]) -> Any:
    """Parametrizes a test with checkpoints that the pytest process makes."""
    return pytest.mark.parametrize("path", make, indirect=True, ids=lambda make: make.__name__)


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Make = getattr(request, "param", single_file)
    return make(tmp_path)


@pytest.fixture
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return [make(tmp_path / make.__name__) for make in request.param]


def all_prepared(make: list[Make]) -> Any:
    """Gives a test the paths of several checkpoints, for one world."""
    return pytest.mark.parametrize("paths", [make], indirect=True, ids=[""])


@all_prepared(LAYOUTS)
@ranks(3, same=True)
def test_layouts(rank: int, world: int, paths: list[Path]) -> list[str]:
    digests = []
    for path, strategy in itertools.product(paths, STRATEGIES):
        tensors, report = load(path, strategy=strategy)
        assert report.bytes_wanted == sum(tensor.nbytes for tensor in tensors.values()), path
        digests.append(check(path, tensors))
    return digests


@all_prepared(CONTENTS)
@ranks(5, same=True)
def test_contents(rank: int, world: int, paths: list[Path]) -> list[str]:
    digests = []
    for path, strategy in itertools.product(paths, EXCHANGES):
        tensors, report = load(path, strategy=strategy)
        assert report.num_tensors == len(tensors), path
        assert report.strategy == strategy, path
        digests.append(check(path, tensors))
    return digests


@pytest.mark.slow(but=["8-ranks"])
@all_prepared([odd_offsets, every_dtype])
@ranks(1, 2, 8, same=True)
def test_world_sizes(rank: int, world: int, paths: list[Path]) -> list[str]:
    digests = []
    for path, strategy in itertools.product(paths, STRATEGIES):
        tensors, report = load(path, strategy=strategy)
        if world > 1 and strategy != "auto":
            assert report.strategy == strategy, path
        assert len(report.ranks) == world, path
        digests.append(check(path, tensors))
    return digests


@pytest.mark.slow(but=["-7", "1048576"])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 4097, 1 << 20])
@ranks(3, same=True)
def test_chunk_sizes(rank: int, world: int, tmp_path: Path, chunk_bytes: int) -> str:
    path = tmp_path / "m.safetensors"
    if rank == 0:
        size = 150 if chunk_bytes < 8 else 3_000_000
        write_file(path, [("a", "U8", (1,)), ("b", "F32", (size // 8,)), ("c", "C64", (3, size // 48))])
    dist.barrier()
    tensors, report = load(path, chunk_bytes=chunk_bytes)
    assert report.chunk_bytes == min(chunk_bytes, -(-report.bytes_wanted // world))
    assert report.num_rounds == -(-report.bytes_wanted // (world * report.chunk_bytes))
    return check(path, tensors)


@pytest.mark.slow(but=["8-ranks-allgather", "2-ranks-broadcast"])
@prepared([one_giant])
@pytest.mark.parametrize("strategy", EXCHANGES)
@ranks(2, 8, same=True)
def test_tiny_staging(rank: int, world: int, path: Path, strategy: str) -> str:
    tensors, report = load(path, strategy=strategy, staging_bytes=65536)
    for own in report.ranks:
        assert 0 < own.peak_staging_bytes <= 65536
    assert report.num_rounds < 600
    return check(path, tensors)


# Bytes


@pytest.mark.slow(but=["names1-allgather", "None-broadcast"])
@prepared([with_index])
@pytest.mark.parametrize("strategy", EXCHANGES)
@pytest.mark.parametrize("names", [None, ["b", "e"], ["[cdf]"]])
@ranks(4)
def test_every_wanted_byte_is_read_once(rank: int, world: int, path: Path, strategy: str, names: Any) -> None:
    tensors, report = load(path, strategy=strategy, names=names, chunk_bytes=100)
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    assert report.bytes_wanted == report.bytes_read == wanted
    assert report.read_amplification == 1.0
    read = [own.bytes_read for own in report.ranks]
    received = [own.bytes_received for own in report.ranks]
    assert [a + b for a, b in zip(read, received, strict=True)] == [wanted] * world
    if strategy == "broadcast":
        assert read == [wanted, 0, 0, 0]
    else:
        assert max(read) - min(read) <= 100
    headers = [own.header_bytes_read for own in report.ranks]
    assert headers[0] > 0
    assert headers[1:] == [0, 0, 0]
    reference = load_reference(path)
    assert_same_bits(tensors, {name: reference[name] for name in tensors})
    assert set(tensors) == {None: set("abcdef"), 1: set("cdf"), 2: {"b", "e"}}[names and len(names)]


@prepared([with_index])
@ranks(3)
def test_storage_itself_sees_every_byte_once(rank: int, world: int, path: Path) -> None:
    """Counts at the system call, not in the counters that the report is made of."""
    calls: list[tuple[int, int, int]] = []
    whole = os.preadv

    def spy(fd: int, buffers: Any, offset: int) -> int:
        count = whole(fd, buffers, offset)
        calls.append((os.fstat(fd).st_ino, offset, count))
        return count

    os.preadv = spy
    _, report = load(path, chunk_bytes=1000)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, calls)
    seen = sorted((ino, at) for own in everyone for ino, offset, n in own for at in range(offset, offset + n))
    assert len(seen) == len(set(seen)), "a byte was read twice"
    assert len(seen) == report.bytes_read + sum(own.header_bytes_read for own in report.ranks)
    index = path / "model.safetensors.index.json"
    assert len(seen) == sum(file.stat().st_size for file in path.glob("*.safetensors")) + index.stat().st_size


@prepared([with_index])
@ranks(2)
def test_direct_reads_all_on_every_rank(rank: int, world: int, path: Path) -> None:
    _, report = load(path, strategy="direct")
    assert report.bytes_read == 2 * report.bytes_wanted
    assert report.transport == "none"
    assert [own.bytes_received for own in report.ranks] == [0, 0]
    # One host and a local file system: that is what auto does here.
    assert load(path, strategy="auto")[1].strategy == "direct"


class FarAway(LocalStorage):
    """Files that one rank asks for, as those of an object store."""

    shared, probes = True, False  # type: ignore[assignment]

    def __init__(self, url: str) -> None:
        super().__init__(url.removeprefix("faraway://"))


@prepared([with_index])
@ranks(3, same=True)
def test_remote_storage_is_asked_by_rank_0_only_and_read_once(rank: int, world: int, path: Path) -> str:
    fastload.register_storage("faraway", FarAway)
    tensors, report = load(f"faraway://{path}", strategy="auto")
    assert report.strategy == "allgather"
    assert report.bytes_read == report.bytes_wanted
    assert [own.header_bytes_read > 0 for own in report.ranks] == [True, False, False]
    return check(path, tensors)


@prepared([thousands])
@ranks(2)
def test_tensors_own_their_memory_and_save_small(rank: int, world: int, path: Path) -> None:
    tensors, _ = load(path)
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    buffer = io.BytesIO()
    torch.save(tensors[name], buffer)
    assert len(buffer.getvalue()) < 4096
    before = {name: raw(tensor) for name, tensor in tensors.items()}
    tensors[name].fill_(7)
    assert all(raw(tensor) == before[other] for other, tensor in tensors.items() if other != name)


# Destinations


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def model_file(folder: Path) -> Path:
    torch.manual_seed(3)
    safetensors.torch.save_model(Model(), str(folder / "model.safetensors"))
    return folder / "model.safetensors"


@prepared([model_file])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(3, same=True)
def test_into_a_module(rank: int, world: int, path: Path, strategy: str) -> str:
    torch.manual_seed(rank)
    model = Model()
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    loaded, _ = load(path, strategy=strategy, into=model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == pointers
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.requires_grad
    assert model.cache.tolist() == [0, 0]
    assert_same_bits(loaded, load_reference(path))
    wanted = Model()
    safetensors.torch.load_model(wanted, str(path))
    assert_same_bits(model.state_dict(), wanted.state_dict())
    return state_digest(model.state_dict())


def watch_placing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns what grows by the length of each range that is copied out of a slab."""
    placed: list[int] = []
    place = TensorWriter.place

    def spy(writer: TensorWriter, start: int, data: torch.Tensor) -> None:
        placed.append(data.numel())
        place(writer, start, data)

    monkeypatch.setattr(TensorWriter, "place", spy)
    return placed


@prepared([one_giant])
@ranks(3, ranks_per_host=1)
def test_what_lies_within_one_tensor_is_never_copied(
    rank: int, world: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = watch_placing(monkeypatch)
    tensors, report = load(path, chunk_bytes=10_000)
    check(path, tensors)
    assert report.num_rounds > 50
    assert 1 <= len(placed) <= 2  # the chunks at both ends of the giant


@prepared([model_file])
@pytest.mark.parametrize("strategy", ["allgather", "direct"])
@ranks(2, same=True)
def test_into_a_meta_module_with_tied_weights(rank: int, world: int, path: Path, strategy: str) -> str:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(fastload.MismatchError, match="cache is on the meta device"):
        load(path, strategy=strategy, into=model)
    model.cache = torch.zeros(2)  # no checkpoint holds it
    load(path, strategy=strategy, into=model)
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, nn.Parameter)
    wanted = Model()
    safetensors.torch.load_model(wanted, str(path))
    assert_same_bits(model.state_dict(), wanted.state_dict())
    assert_own_storage(dict(model.named_parameters()))
    inputs = torch.arange(5)
    model.head(model.layers[0](model.embed(inputs))).sum().backward()
    return state_digest(model.state_dict())


@prepared([model_file])
@ranks(2)
def test_into_a_strided_state_dict_with_a_cast(rank: int, world: int, path: Path) -> None:
    reference = load_reference(path)
    into = {
        name: torch.full(tensor.shape[::-1], 9, dtype=torch.bfloat16).permute(*reversed(range(tensor.dim())))
        for name, tensor in reference.items()
    }
    load(path, into=into, dtype=torch.bfloat16, chunk_bytes=13)
    for name, tensor in reference.items():
        assert torch.equal(into[name], tensor.bfloat16()), name


@ranks(2)
def test_into_an_optimizer(rank: int, world: int, tmp_path: Path) -> None:
    def optimizer(seed: int) -> Any:
        torch.manual_seed(seed)
        parameters = [nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(5))]
        made = torch.optim.AdamW(parameters)
        sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        made.step()
        return made

    saved = {
        f"state.{index}.{key}": tensor
        for index, state in optimizer(99).state_dict()["state"].items()
        for key, tensor in state.items()
    }
    if rank == 0:
        safetensors.torch.save_file(saved, tmp_path / "optimizer.safetensors")
    dist.barrier()
    mine = optimizer(rank)
    state = mine.state_dict()
    loaded, _ = load(tmp_path / "optimizer.safetensors", into=state)
    assert_same_bits(loaded, saved)
    mine.load_state_dict(state)
    assert torch.equal(mine.state_dict()["state"][1]["exp_avg"], saved["state.1.exp_avg"])


@prepared([every_dtype])
@ranks(2, same=True)
def test_dtype_casts_what_is_floating_point(rank: int, world: int, path: Path) -> str:
    names = [f"x.{dtype}" for dtype in BITS if dtype not in ("F4", "F8_E8M0")]
    tensors, report = load(path, dtype=torch.float32, names=names, chunk_bytes=5)
    reference = load_reference(path)
    for name, tensor in tensors.items():
        wanted = reference[name]
        if wanted.dtype.is_floating_point:
            wanted = wanted.to(torch.float32)
        assert tensor.dtype == wanted.dtype
        assert raw(tensor.nan_to_num() if tensor.is_floating_point() else tensor) == raw(
            wanted.nan_to_num() if wanted.is_floating_point() else wanted
        ), name
    assert report.bytes_read == sum(reference[name].nbytes for name in names), "stored bytes, not cast ones"
    return ""


@prepared([model_file])
@ranks(2)
def test_strict_and_not(rank: int, world: int, path: Path) -> None:
    into = {"scale": torch.zeros(16), "lacking": torch.full((2,), 5.0)}
    with pytest.raises(fastload.MismatchError) as raised:
        load(path, into=into)
    assert raised.value.missing == ("lacking",)
    assert "embed.weight" in raised.value.unexpected or "head.weight" in raised.value.unexpected
    assert into["scale"].tolist() == [0] * 16, "nothing was loaded"
    loaded, report = load(path, into=into, strict=False)
    assert set(loaded) == {"scale"}
    assert loaded["scale"] is into["scale"]
    assert into["scale"].tolist() == [1] * 16
    assert into["lacking"].tolist() == [5, 5]
    assert report.bytes_read == 64, "what has no destination is not read"


# Open checkpoints, options, progress


def with_metadata(folder: Path) -> Path:
    write_file(folder / "m.safetensors", rows("a", "b", "c"), metadata={"format": "pt", "step": "7"})
    return folder / "m.safetensors"


@prepared([with_metadata])
@ranks(2)
def test_an_open_checkpoint_loads_again_and_again(rank: int, world: int, path: Path) -> None:
    reference = load_reference(path)
    with fastload.open(path, options=fastload.LoadOptions(strategy="allgather")) as checkpoint:
        assert checkpoint.metadata == {"format": "pt", "step": "7"}
        assert [entry.name for entry in checkpoint.manifest.tensors] == ["a", "b", "c"]
        assert checkpoint.manifest.nbytes == sum(tensor.nbytes for tensor in reference.values())
        assert checkpoint.report is None
        for names in (["b"], ["a", "c"], None, ["b"]):
            tensors = checkpoint.load(names=names)
            assert_same_bits(tensors, {name: reference[name] for name in names or reference})
            assert checkpoint.report is not None
            wanted = sum(tensor.nbytes for tensor in tensors.values())
            assert checkpoint.report.bytes_read == wanted
    assert not [fd for fd in os.listdir("/proc/self/fd") if _link(fd) == str(path)]


@prepared([with_index])
@ranks(2)
def test_a_retry_counts_in_the_load_it_happened_in(rank: int, world: int, path: Path) -> None:
    whole, failures = os.preadv, [OSError(5, "Input/output error")] if rank == 1 else []

    def flaky(fd: int, buffers: Any, offset: int) -> int:
        if failures:
            raise failures.pop()
        return whole(fd, buffers, offset)

    retries = []
    with fastload.open(path, options=fastload.LoadOptions(strategy="allgather")) as checkpoint:
        os.preadv = flaky
        for _ in range(2):
            assert_same_bits(checkpoint.load(), load_reference(path))
            assert checkpoint.report is not None
            retries.append([own.retries for own in checkpoint.report.ranks])
    assert retries == [[0, 1], [0, 0]]


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.slow(but=["3-ranks"])
@prepared([with_index])
@pytest.mark.parametrize("strategy", ["allgather", "broadcast", "direct"])
@ranks(1, 3)
def test_progress_never_goes_back_and_ends_complete(rank: int, world: int, path: Path, strategy: str) -> None:
    seen: list[tuple[int, int]] = []
    _, report = load(path, strategy=strategy, chunk_bytes=501, progress=lambda *now: seen.append(now))
    done = [now[0] for now in seen]
    assert {total for _, total in seen} == {report.bytes_wanted}
    assert done == sorted(set(done))
    assert done[-1] == report.bytes_wanted
    assert len(seen) == report.num_rounds > 3


@prepared([with_index])
@ranks(3, same=True)
def test_the_report_is_the_same_on_every_rank(rank: int, world: int, path: Path) -> dict[str, Any]:
    _, report = load(path, chunk_bytes=1000)
    assert (report.url, report.strategy, report.why) == (str(path), "allgather", "asked for")
    assert [own.rank for own in report.ranks] == [0, 1, 2]
    for own in report.ranks:
        assert own.reader
        assert own.note == ""
        assert own.retries == 0
        assert 0 < own.total_s < 60
        for seconds in (own.read_s, own.exchange_s, own.place_s, own.exposed_s, own.overlapped_s):
            assert seconds >= 0
        assert 0 < own.peak_staging_bytes <= 256 << 20
    return report.to_dict()


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLOAD_STRATEGY", "broadcast")
    monkeypatch.setenv("FASTLOAD_CHUNK_BYTES", "2KiB")


@prepared([with_index])
@pytest.mark.usefixtures("_environment")
@ranks(2)
def test_the_environment_gives_defaults(rank: int, world: int, path: Path) -> None:
    with fastload.open(path) as checkpoint:
        checkpoint.load()
        assert checkpoint.report is not None
        assert (checkpoint.report.strategy, checkpoint.report.chunk_bytes) == ("broadcast", 2048)
    with fastload.open(path, options=fastload.LoadOptions(strategy="allgather")) as checkpoint:
        checkpoint.load()
        assert checkpoint.report is not None
        assert (checkpoint.report.strategy, checkpoint.report.chunk_bytes) == ("allgather", 2048)


# Without a process group


@prepared([with_index])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_alone(path: Path, strategy: str) -> None:
    assert not dist.is_initialized()
    tensors, report = load(path, strategy=strategy)
    assert report.strategy == "direct"
    assert len(report.ranks) == 1
    assert report.bytes_read == report.bytes_wanted
    check(path, tensors)


@prepared([with_index])
def test_one_process_needs_no_torch_distributed_set_up(path: Path) -> None:
    script = (
        "import sys, torch.distributed as dist, fastload\n"
        "from fastload.formats.state import state_digest\n"
        "print(state_digest(fastload.load(sys.argv[1])), dist.is_initialized())\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(path)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == [state_digest(load_reference(path)), "False"], done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("closing", [(0,), (0, 1)], ids=str)
@ranks(2)
def test_a_checkpoint_that_is_closed_during_a_load(
    rank: int, world: int, tmp_path: Path, closing: tuple[int, ...]
) -> None:
    """By another thread, or a callback: no rank has failed, and the error does not say so."""
    state = {f"t{number}": torch.zeros(1_000_000) for number in range(5)}  # far more than is staged
    fastload.save(state, tmp_path / "a")
    opened: list[fastload.Checkpoint] = []

    def progress(done: int, wanted: int) -> None:
        if rank in closing:
            opened[0].close()

    options = fastload.LoadOptions(
        timeout_s=20, chunk_bytes=1 << 16, staging_bytes=1 << 20, progress=progress
    )
    opened.append(fastload.open(tmp_path / "a", options=options))
    with pytest.raises(fastload.WorldError) as raised:
        opened[0].load(dtype=torch.float16)  # so that reads wait for staging, which a tensor's memory spares
    assert "closed during a load" in str(raised.value), raised.value
    fastload.load(tmp_path / "a")
