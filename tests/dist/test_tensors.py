"""`Checkpoint.tensors`: all tensors on all ranks, one by one, in little memory; left early, or broken."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastload
from fastload.errors import MismatchError, PeerError, StorageError
from fastload.storage.local import LocalStorage
from tests.checkpoints import assert_same_bits, load_reference, raw, record_by_hand, write_file, write_sharded
from tests.dist.faults import fastload_threads
from tests.dist.harness import ranks
from tests.dist.patience import patient

MIB = 1 << 20
ROWS = [(f"t{number:02}", "F32", (300 + 7 * number, 5)) for number in range(40)]
ROWS[7:7] = [("empty", "F32", (0, 3)), ("scalar", "BF16", ()), ("odd", "U8", (4097,))]
SMALL: dict[str, Any] = {
    "strategy": "allgather",
    "chunk_bytes": 4 << 10,
    "staging_bytes": 64 << 10,
    "timeout_s": 20,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_sharded(tmp_path / "c", {"a.safetensors": ROWS[:20], "b.safetensors": ROWS[20:]}, index=True)
    return tmp_path / "c"


def names_in_file_order(rows: list[Any]) -> list[str]:
    return [name for name, _, _ in rows]


@ranks(3, ranks_per_host=2)
def test_all_ranks_get_all_tensors_in_file_order(rank: int, world: int, saved: Path) -> None:
    expected = load_reference(saved)
    for given in (
        SMALL,
        {**SMALL, "chunk_bytes": 999},
        {**SMALL, "strategy": "direct"},
        {"chunk_bytes": None},
    ):
        with fastload.open(saved, options=fastload.LoadOptions(**given)) as checkpoint:
            stream = checkpoint.tensors()
            got = [(name, tensor) for name, tensor in stream]
            assert next(stream, None) is None
            order = [name for name, _ in got]
            assert sorted(order, key=names_in_file_order(ROWS).index) == order
            assert_same_bits(dict(got), expected)
            assert checkpoint.report is not None
            assert checkpoint.report.num_tensors == len(ROWS)
            if given.get("strategy") == "allgather":
                assert checkpoint.report.read_amplification == 1
            some = dict(checkpoint.tensors(names=["t1*", "odd"]))
            assert sorted(some) == sorted(name for name in expected if name.startswith("t1") or name == "odd")
            with pytest.raises(MismatchError, match="t77"):
                checkpoint.tensors(names="t77")


@ranks(2)
def test_what_fastload_saved(rank: int, world: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {
        "model": {f"w{n}": torch.randn(50 + n, 40, generator=generator) for n in range(9)}
    }
    state["model"]["tied"] = state["model"]["w3"]
    state["wave"] = torch.randn(30, dtype=torch.complex128, generator=generator)
    state["rng"] = fastload.PerRank(torch.full((5,), rank))
    fastload.save(state, tmp_path / "s", options=fastload.SaveOptions(block_bytes=4096))
    with fastload.open(
        tmp_path / "s", options=fastload.LoadOptions(**{**SMALL, "staging_bytes": 1 << 20})
    ) as saved:
        got = dict(saved.tensors())
        assert saved.report is not None
        assert saved.report.bytes_verified == saved.report.bytes_wanted
    expected = {f"model.{name}": tensor for name, tensor in state["model"].items()} | {"wave": state["wave"]}
    assert_same_bits(
        {name: torch.view_as_real(t) if t.is_complex() else t for name, t in got.items()},
        {name: torch.view_as_real(t) if t.is_complex() else t for name, t in expected.items()},
    )
    assert got["model.tied"] is got["model.w3"]


@pytest.mark.slow(but=["2-ranks"])
@ranks(1, 2)
def test_tensors_that_are_lent(rank: int, world: int, saved: Path, tmp_path: Path) -> None:
    """Views of the files, where each rank takes all from the page cache, and nothing is verified."""
    expected = load_reference(saved)
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with fastload.open(saved) as checkpoint:
        got = dict(checkpoint.tensors(borrow=True))
        assert_same_bits(got, expected)
        assert checkpoint.report is not None
        assert checkpoint.report.bytes_read == 0
        assert checkpoint.report.bytes_wanted == sum(tensor.nbytes for tensor in expected.values())
        assert checkpoint.report.num_tensors == len(ROWS)
        assert checkpoint.report.why.endswith("mapped, not read")
        assert [name for name, _ in checkpoint.tensors("t1*", borrow=True)] == [
            f"t{n}" for n in range(10, 20)
        ]
        got["t00"].zero_()  # in this process only
    torch.distributed.barrier()
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before

    state = {"a": torch.arange(5000.0), "tied": torch.ones(3), "wave": torch.ones(4, dtype=torch.complex128)}
    state["tied too"] = state["tied"]
    fastload.save(state, tmp_path / "s")
    for options, mapped in (
        ({}, False),
        ({"verify": False}, True),
        ({"verify": False, "io": "direct"}, False),
    ):
        with fastload.open(tmp_path / "s", options=fastload.LoadOptions(**options)) as checkpoint:
            again = dict(checkpoint.tensors(borrow=True))
            assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
            assert checkpoint.report is not None
            assert (checkpoint.report.bytes_read == 0) is mapped
            assert (checkpoint.report.bytes_verified > 0) is (not options)
    if world > 1:
        with fastload.open(saved, options=fastload.LoadOptions(strategy="allgather")) as checkpoint:
            assert_same_bits(dict(checkpoint.tensors(borrow=True)), expected)
            assert checkpoint.report is not None
            assert checkpoint.report.read_amplification == 1


@ranks(2)
def test_files_outside_the_page_cache_are_lent(rank: int, world: int, tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    if rank == 0:
        write_file(path, [(f"t{number}", "U8", (4 * MIB,)) for number in range(3)])
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    torch.distributed.barrier()
    with fastload.open(path) as checkpoint:
        got = dict(checkpoint.tensors(borrow=True))
        assert checkpoint.report is not None
        assert checkpoint.report.bytes_read == 0
        assert_same_bits(got, load_reference(path))


@ranks(2)
def test_a_file_that_is_written_to_while_it_is_lent(rank: int, world: int, saved: Path) -> None:
    def take() -> None:
        with fastload.open(saved) as checkpoint:
            for name, _ in checkpoint.tensors(borrow=True):
                if name == "t39" and rank == 1:
                    write_last_byte()

    def write_last_byte() -> None:
        with (saved / "b.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")

    with pytest.raises((StorageError, PeerError), match=r"b\.safetensors.*changed after it was opened"):
        take()


@ranks(2)
def test_tensors_that_lie_in_pieces(rank: int, world: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = {f"w{n}": torch.arange(600.0).reshape(30, 20) + n for n in range(6)}
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(n % 2)])
        for n, (name, tensor) in enumerate(whole.items())
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    strided = torch.arange(5000.0).reshape(50, 100)[:, ::3].t()
    if rank == 0:
        torch.save({"a": strided, "b": torch.ones(3)}, tmp_path / "x.pt")
    torch.distributed.barrier()
    with fastload.open(tmp_path / "dcp", options=fastload.LoadOptions(**SMALL)) as checkpoint:
        assert_same_bits(dict(checkpoint.tensors()), whole)
    with fastload.open(tmp_path / "x.pt", options=fastload.LoadOptions(**SMALL)) as checkpoint:
        assert_same_bits(dict(checkpoint.tensors()), {"a": strided.contiguous(), "b": torch.ones(3)})


@pytest.mark.slow
@ranks(3, ranks_per_host=2)
def test_it_may_be_left_early(rank: int, world: int, saved: Path) -> None:
    expected = load_reference(saved)
    with fastload.open(saved, options=fastload.LoadOptions(**SMALL)) as checkpoint:
        for who in ({1}, {0, 2}):  # the others get all
            got: dict[str, Tensor] = {}
            for name, tensor in checkpoint.tensors():
                got[name] = tensor
                if rank in who and len(got) == 5:
                    break
            assert_same_bits(got, {name: expected[name] for name in got})
            assert len(got) == (5 if rank in who else len(expected))
            if rank in who:
                assert_same_bits(checkpoint.load(names="odd"), {"odd": expected["odd"]})
            else:
                assert_same_bits(checkpoint.load(names="odd"), {"odd": expected["odd"]})
        for stop in (1, 5 + rank, 41 + rank):  # all leave
            for number, _ in enumerate(checkpoint.tensors(), 1):
                if number == stop:
                    break
            unused = checkpoint.tensors()
            del unused
            assert_same_bits(checkpoint.load(), expected)
        stream = checkpoint.tensors()
        next(stream)
        stream.close()
        assert list(stream) == []
    assert checkpoint.report is not None


@ranks(3)
def test_when_all_have_left_no_more_is_read(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 0:
        write_file(tmp_path / "m.safetensors", [(f"t{n}", "U8", (256 << 10,)) for n in range(64)])
    torch.distributed.barrier()
    given = {**SMALL, "chunk_bytes": 16 << 10, "staging_bytes": MIB}
    num_bytes, real = [0], LocalStorage.read_into

    def read_into(self: LocalStorage, name: str, offset: int, buffers: Any, version: str = "") -> None:
        num_bytes[0] += sum(map(len, buffers))
        real(self, name, offset, buffers, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "read_into", read_into)
        with fastload.open(tmp_path, options=fastload.LoadOptions(**given)) as checkpoint:
            for number, _ in enumerate(checkpoint.tensors()):
                if number == 2 + rank:
                    break
            checkpoint.load(names="t0")  # both have ended
    assert 0 < num_bytes[0] < 4 * MIB / world


class BrokenConsumerError(Exception):
    pass


@ranks(3, ranks_per_host=2, deadline_s=40)
def test_what_a_consumer_raises_ends_it_on_all_ranks(rank: int, world: int, saved: Path) -> None:
    options = fastload.LoadOptions(**{**SMALL, "timeout_s": 60})
    for scope in ("checkpoint", "stream"):
        began = time.monotonic()
        with (  # noqa: PT012
            pytest.raises((BrokenConsumerError, PeerError)) as raised,
            fastload.open(saved, options=options) as checkpoint,
        ):
            stream = checkpoint.tensors()
            if scope == "stream":
                with stream:
                    consume(stream, rank)
            else:
                consume(stream, rank)
        if rank == 1:
            assert isinstance(raised.value, BrokenConsumerError)
        else:
            assert re.search(r"rank 1.*BrokenConsumerError: no room for t0", str(raised.value))
        assert time.monotonic() - began < 30
    # Others on the same group are not harmed.
    assert len(fastload.load(saved)) == len(ROWS)
    del stream, checkpoint
    raised = None  # type: ignore[assignment]
    deadline = time.monotonic() + 10
    while fastload_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fastload_threads() == []


def consume(stream: Iterator[tuple[str, Tensor]], rank: int) -> None:
    for name, _ in stream:
        if rank == 1 and name == "t03":
            raise BrokenConsumerError(f"no room for {name}")


@ranks(3, dies={1: signal.SIGKILL})
def test_a_rank_that_is_killed_ends_it_on_all(rank: int, world: int, saved: Path) -> None:
    with fastload.open(
        saved, options=fastload.LoadOptions(**{**SMALL, "timeout_s": patient(3.0)})
    ) as checkpoint:
        with pytest.raises(PeerError, match="rank 1"):  # noqa: PT012
            for name, _ in checkpoint.tensors():
                if rank == 1 and name == "t05":
                    os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(fastload.WorldError, match="open it again"):
            checkpoint.load()


@pytest.mark.slow
@pytest.mark.parametrize("draws", [[0, 1, 2, 5], [3, 4, 6, 7]], ids=["some", "others"])
@ranks(4, ranks_per_host=2)
def test_others_read_for_those_that_cannot(rank: int, world: int, saved: Path, draws: list[int]) -> None:
    expected = load_reference(saved)
    honest = LocalStorage.read_into
    for draw in draws:
        everybodys, own = random.Random(draw), random.Random(f"{draw}/{rank}")
        whole, odds = everybodys.randrange(world), everybodys.choice([0.02, 0.2])

        def read(self: LocalStorage, *args: Any, odds: float = odds * (rank != whole), **how: Any) -> None:
            if own.random() < odds:  # noqa: B023
                raise StorageError("this disk is broken", url=self.url)
            honest(self, *args, **how)

        options = fastload.LoadOptions(**{**SMALL, "retries": 0})
        with fastload.open(saved, options=options) as checkpoint, pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStorage, "read_into", read)
            got: dict[str, Tensor] = {}
            for name, tensor in checkpoint.tensors():
                got[name] = tensor
                if draw % 2 and len(got) == 9 + 5 * rank:
                    break
            assert_same_bits(got, {name: expected[name] for name in got})
            if draw % 2 == 0:
                assert got.keys() == expected.keys()


def peak_bytes() -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("strategy", ["allgather", "direct"])
def test_memory_is_bounded(rank: int, world: int, tmp_path: Path, strategy: str) -> None:
    """With a consumer that keeps nothing: the checkpoint is larger than all that it may use."""
    if rank == 0:
        sizes = [3 * MIB, MIB, 40_000, 7 * MIB, 24 * MIB, 2 * MIB] * 5
        write_file(tmp_path / "m.safetensors", [(f"t{n}", "U8", (size,)) for n, size in enumerate(sizes)])
        record_by_hand(tmp_path, MIB)
    torch.distributed.barrier()
    staging_bytes, largest_bytes = 32 * MIB, 24 * MIB
    options = fastload.LoadOptions(strategy=strategy, staging_bytes=staging_bytes)  # type: ignore[arg-type]
    with fastload.open(tmp_path, options=options) as checkpoint:
        dict(checkpoint.tensors(names="t0"))  # threads, connections, code
        forget_peak()
        before = peak_bytes()
        for _, tensor in checkpoint.tensors():
            last = tensor
            del tensor
        # `last` is held while the next one comes: so one is taken and kept.
        assert peak_bytes() - before < staging_bytes + 2 * largest_bytes + 4 * MIB
        assert last.numel() == 2 * MIB
        assert checkpoint.report is not None
        assert checkpoint.report.bytes_wanted > 4 * staging_bytes


def own_boxes(rank: int, world: int) -> dict[str, Any]:
    """What each rank wants: some rows of most, all of some, a column of one, two boxes of another."""
    boxes: dict[str, Any] = {}
    for number, (name, _, shape) in enumerate(ROWS):
        if number % 5 == rank or len(shape) < 2:
            continue
        share = -(-shape[0] // world)
        begin, end = min(rank * share, shape[0]), min((rank + 1) * share, shape[0])
        boxes[name] = fastload.Box((begin, 0), (end - begin, shape[1]))
        if number % 7 == 0:
            boxes[name] = fastload.Box.whole(shape)
        if number % 7 == 1:
            boxes[name] = [fastload.Box((0, rank), (shape[0], 1)), boxes[name]]
    return boxes


@pytest.mark.slow
@ranks(1, 3, ranks_per_host=2)
def test_boxes_of_each_ranks_own(rank: int, world: int, saved: Path) -> None:
    expected = load_reference(saved)
    wanted = own_boxes(rank, world)
    with fastload.open(
        saved, options=fastload.LoadOptions(**{**SMALL, "staging_bytes": 1 << 18})
    ) as checkpoint:
        got = list(checkpoint.tensors(boxes=wanted))
        assert [name for name, _ in got] == [
            name
            for name, boxes in wanted.items()
            for _ in ([boxes] if isinstance(boxes, fastload.Box) else boxes)
        ]
        for name, boxes in wanted.items():
            for box in [boxes] if isinstance(boxes, fastload.Box) else boxes:
                (begin, left), (height, width) = box
                tensor = got.pop(0)[1]
                assert raw(tensor) == raw(expected[name][begin : begin + height, left : left + width])
        with pytest.raises(MismatchError, match=r"t00: the box at \[0, 0\] of \[1, 6\] is out of bounds"):
            checkpoint.tensors(boxes={"t00": fastload.Box((0, 0), (1, 6))})
    with fastload.open(
        saved, options=fastload.LoadOptions(**{**SMALL, "staging_bytes": 1 << 18})
    ) as checkpoint:
        for who in ({world - 1}, set(range(world))):
            num = 0
            for _ in checkpoint.tensors(boxes=wanted):
                num += 1
                if rank in who and num == 3:
                    break
            assert num == 3 or rank not in who
            assert len(checkpoint.load(names=["odd"])) == 1
    with (  # noqa: PT012
        pytest.raises((BrokenConsumerError, PeerError), match="no room for t10"),
        fastload.open(
            saved, options=fastload.LoadOptions(**{**SMALL, "staging_bytes": 1 << 18})
        ) as checkpoint,
    ):
        for name, _ in checkpoint.tensors(boxes=wanted):
            if rank == world - 1 and name >= "t10":
                raise BrokenConsumerError("no room for t10")
