"""Loads where ranks want different bytes: broken readers are healed, and what cannot be is told to all."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastload
from fastload.comm import shared_memory
from fastload.errors import PeerError, StorageError
from fastload.loading import session
from fastload.storage.local import LocalStorage
from fastload.transfer import transport
from fastload.transfer.host_transport import HostTransport
from fastload.transfer.read import ChunkReader
from tests.checkpoints import assert_same_bits
from tests.dist import faults
from tests.dist.faults import PATIENT_S, TOLD_S, Outcome, die, fastload_threads, options, outcome_of
from tests.dist.harness import ranks, run_ranks
from tests.dist.patience import patient
from tests.dist.test_failures_ranks import RAISES, fail, require_named
from tests.dist.test_sharded import emptied, locals_of, placed

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {"rows": Shard(0), "columns": Shard(1), "all": Replicate()},
    "fsdp": {"rows": Shard(0), "columns": Shard(0), "all": Shard(0)},  # nothing has to be exchanged
}


def tensors() -> dict[str, Tensor]:
    """Somewhat more than 1 MB, in which each number tells its place."""
    return {
        "rows": torch.arange(301 * 512, dtype=torch.float32).reshape(301, 512),
        "columns": (torch.arange(256 * 1001) % 32_003).to(torch.int16).reshape(256, 1001),
        "all": (torch.arange(200_003) * 31 >> 3).to(torch.uint8),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def shards(mesh: DeviceMesh, kind: str = "mixed", dtype: torch.dtype | None = None) -> dict[str, DTensor]:
    """What each rank is to hold, in the end."""
    cast = {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in tensors().items()}
    return {name: placed(cast[name], mesh, [placement]) for name, placement in KINDS[kind].items()}


def load(path: Path, mesh: DeviceMesh, kind: str = "mixed", **changes: Any) -> fastload.LoadReport:
    """Loads, and compares with what is to come."""
    dtype = changes.pop("dtype", None)
    into = shards(mesh, kind, dtype)
    expected, reports = locals_of(into), []
    given = options(on_report=reports.append, **changes)
    fastload.load(path, into=emptied(into), dtype=dtype, process_group=mesh.get_group(), options=given)
    assert_same_bits(locals_of(into), expected)
    return reports[0]


def break_reads(patch: pytest.MonkeyPatch, from_read: int | None, error: Any = None) -> None:
    """Lets all reads of chunks fail on this rank but the first ones."""
    numbers = itertools.count()

    def read(*_: Any) -> None:
        if from_read is not None and next(numbers) >= from_read:
            raise error or StorageError(f"the disk of rank {dist.get_rank()} is broken")

    before_reads(patch, read)


def before_reads(patch: pytest.MonkeyPatch, call: Any) -> None:
    honest = ChunkReader._read_range

    def read(self: ChunkReader, span: Any, buffers: Any) -> None:
        call(span)
        honest(self, span, buffers)

    patch.setattr(ChunkReader, "_read_range", read)


# Healing


@ranks(4)
def test_others_read_for_those_whose_storage_breaks(rank: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for kind in KINDS:
        for broken in ({1: 0}, {1: 3, 2: 0}, {0: 1, 1: 2, 3: 3}):
            with pytest.MonkeyPatch.context() as patch:
                break_reads(patch, broken.get(rank))
                shown: list[tuple[int, int]] = []
                report = load(path, mesh, kind, timeout_s=20, progress=lambda *one: shown.append(one))  # noqa: B023
            assert shown == sorted(shown), "it goes back"
            assert shown[-1][0] == shown[-1][1]
            assert [own.rank for own in report.ranks if "stopped reading" in own.note] == list(broken)
            for own in report.ranks:
                assert own.peak_staging_bytes <= fastload.LoadOptions().staging_bytes
    assert fastload_threads(kept=["fastload-host"]) == []


@pytest.mark.parametrize("draws", [range(2), pytest.param(range(2, 12), marks=pytest.mark.slow)], ids=str)
@ranks(5)
def test_readers_break_at_any_moment(rank: int, world: int, path: Path, draws: range) -> None:
    """Several, one after the other, again while the others read for them; one is whole. Elements are cut."""
    mesh = init_device_mesh("cpu", (world,))
    for draw in draws:
        everybodys, own = random.Random(draw), random.Random(f"{draw}/{rank}")
        whole, odds = everybodys.randrange(world), everybodys.choice([0.02, 0.1, 0.5])
        changes: dict[str, Any] = {
            "chunk_bytes": everybodys.choice([4_999, 20_001, 65_536]),
            "dtype": everybodys.choice([None, torch.float64]),
        }

        def read(_: Any, odds: float = odds * (rank != whole)) -> None:
            time.sleep(own.choice([0.0, 0.0, 0.002]))  # noqa: B023
            if own.random() < odds:  # noqa: B023
                raise StorageError("this disk is broken")

        with pytest.MonkeyPatch.context() as patch:
            before_reads(patch, read)
            load(path, mesh, everybodys.choice([*KINDS]), timeout_s=20, **changes)


@ranks(3)
def test_if_all_are_broken_all_raise_with_every_cause(rank: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for kind in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            break_reads(patch, 2 * rank)
            end = outcome_of(lambda: load(path, mesh, kind, timeout_s=PATIENT_S))  # noqa: B023
        assert end.causes == dict.fromkeys(range(world), "StorageError"), end
        assert all(f"the disk of rank {each} is broken" in end.text for each in range(world)), end
        assert end.seconds < TOLD_S
    assert fastload_threads() == []
    load(path, mesh, timeout_s=20)


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@ranks(3)
def test_where_nobody_can_take_over_that_reader_is_named_at_once(
    rank: int, world: int, path: Path, strategy: str
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    broken = {"direct": 1, "broadcast": 0}[strategy]
    rounds_done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        break_reads(patch, 1 if rank == broken else None)
        given = {"strategy": strategy, "timeout_s": PATIENT_S, "read_threads": 1, "chunk_bytes": 4096,
                 "progress": lambda done, _: rounds_done.append(done)}  # fmt: skip
        end = outcome_of(lambda: load(path, mesh, **given))
    assert end.causes == {broken: "StorageError"}, end
    assert end.seconds < TOLD_S
    if rank == broken:
        assert len(rounds_done) < 20, "it goes on although the load has failed"
    assert fastload_threads() == []


# Failures that are told to all


@dataclass(frozen=True)
class Case:
    """What goes wrong in a load: at that stage a rank of its group gets a signal, or raises."""

    stage: str
    victim: int
    what: Any
    kind: str = "mixed"
    strategy: str = "allgather"


def load_and_fail(rank: int, world: int, path: Path, cases: Sequence[Case]) -> Outcome:
    """Every case has a group of ranks of its own; all load at once."""
    mesh = init_device_mesh("cpu", (len(cases), world // len(cases)), mesh_dim_names=("case", "rank"))["rank"]
    case = cases[rank // mesh.size()]
    patch = pytest.MonkeyPatch()
    if case.stage == "rest" and mesh.get_local_rank() == (case.victim + 1) % mesh.size():
        break_reads(patch, 1)
    if mesh.get_local_rank() == case.victim:
        act = (
            (lambda: die(case.what))
            if isinstance(case.what, signal.Signals)
            else lambda: fail(RAISES[case.what]())
        )
        faults.strike(patch, case.stage, act)
    dist.barrier()  # else one may be gone while others still connect
    end = outcome_of(lambda: load(path, mesh, case.kind, strategy=case.strategy))
    # Waits for those that take a group down.
    assert fastload_threads() == []
    return end


SIZE = 3
STAGES = (
    "requests",
    "routes",
    "connect",
    "read",
    "exchange",
    "place",
    "first",
    "middle",
    "last",
    "rest",
    "gather",
)
SIGNALED = [
    Case(stage, number % SIZE, signum, kind, strategy)
    for number, (stage, signum) in enumerate(zip(STAGES, itertools.cycle((KILL, STOP)), strict=False))
    for kind, strategy in [("mixed", "allgather") if number % 3 else ("fsdp", "allgather")]
]
SIGNALED += [Case("middle", 1, KILL, "mixed", "direct"), Case("first", 2, STOP, "mixed", "broadcast")]


@pytest.mark.slow(but=["requests"])
@pytest.mark.parametrize(
    "cases",
    [SIGNALED[at : at + 4] for at in range(0, len(SIGNALED), 4)],
    ids=lambda cases: "-".join(f"{case.stage}.{case.what.name[3:]}" for case in cases),
)
def test_rank_that_is_killed_or_stopped_is_named(path: Path, cases: Sequence[Case]) -> None:
    dies = {number * SIZE + case.victim: case.what for number, case in enumerate(cases)}
    ends = run_ranks(load_and_fail, SIZE * len(cases), dies=dies, path=path, cases=cases)
    for number, case in enumerate(cases):
        require_named(ends[number * SIZE :][:SIZE], {case.victim})


RAISED = [
    Case(stage, number % SIZE, what, kind, strategy)
    for number, (stage, what, kind, strategy) in enumerate(
        [
            ("requests", "key", "mixed", "allgather"), ("routes", "error", "mixed", "allgather"),
            ("routes", "error", "mixed", "direct"), ("middle", "odd", "mixed", "allgather"),
            ("first", "error", "fsdp", "allgather"), ("rest", "error", "mixed", "allgather"),
            ("rest", "huge", "fsdp", "allgather"), ("read", "error", "mixed", "allgather"),
            ("read", "error", "mixed", "direct"), ("pack", "error", "mixed", "broadcast"),
        ]
    )
]  # fmt: skip


@pytest.mark.slow(but=["second"])
@pytest.mark.parametrize("cases", [RAISED[:5], RAISED[5:]], ids=["first", "second"])
def test_any_exception_on_one_rank_is_told_to_all(path: Path, cases: Sequence[Case]) -> None:
    ends = run_ranks(load_and_fail, SIZE * len(cases), path=path, cases=cases)
    for number, case in enumerate(cases):
        for end in ends[number * SIZE :][:SIZE]:
            assert end.kind == "PeerError", (case, end)
            assert set(end.causes) == {case.victim}, (case, end)


@pytest.mark.slow(but=["exit"])
@pytest.mark.parametrize("raises", ["interrupt", "exit"])
@ranks(3)
def test_a_rank_that_leaves_is_named(rank: int, world: int, path: Path, raises: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for stage in ("requests", "routes", "middle"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                faults.strike(patch, stage, lambda: fail(RAISES[raises]()))
            end = outcome_of(lambda: load(path, mesh, timeout_s=PATIENT_S))
        own = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit"}[raises]
        assert end.kind == (own if rank == 1 else "PeerError"), end
        assert rank == 1 or set(end.causes) == {1}, end
        assert end.seconds < TOLD_S
    load(path, mesh, timeout_s=20)


@pytest.mark.slow(but=["allgather-mixed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["allgather", "direct"])
@ranks(3)
def test_storage_that_never_answers_one_rank(
    rank: int, world: int, path: Path, kind: str, strategy: str
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    go_on = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            numbers = itertools.count()
            real = LocalStorage.read_into

            def read(self: LocalStorage, name: str, offset: int, *more: Any) -> None:
                if offset > 4096 and next(numbers) == 2:
                    go_on.wait()
                real(self, name, offset, *more)

            patch.setattr(LocalStorage, "read_into", read)
        end = outcome_of(lambda: load(path, mesh, kind, strategy=strategy))
    assert end.causes == {2: "StorageError"}, end
    assert "storage did not answer" in end.text
    assert end.seconds < faults.TIMEOUT_S + faults.SLACK_S
    go_on.set()
    assert fastload_threads() == []


@ranks(3, ranks_per_host=1, deadline_s=180)
def test_connections_that_are_cut(rank: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            start = HostTransport.start

            def cut(self: HostTransport, work: transport.Round) -> None:
                if work.index == 3:
                    self._relay.wire.cut()
                start(self, work)

            patch.setattr(HostTransport, "start", cut)
        end = outcome_of(lambda: load(path, mesh, timeout_s=PATIENT_S, chunk_bytes=10_000))
    assert end.kind == "PeerError", end
    assert "rank 1" in end.text
    assert end.seconds < TOLD_S
    load(
        path, mesh, timeout_s=PATIENT_S
    )  # while a rank's thread may still wait for a message of the failed one
    assert fastload_threads() == []


# Checkpoints that are damaged


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """With checksums of blocks that several ranks want parts of."""
    fastload.save(tensors(), tmp_path / "c", options=fastload.SaveOptions(block_bytes=8192))
    return tmp_path / "c"


@pytest.mark.slow(but=["allgather"])
@pytest.mark.parametrize("strategy", ["allgather", "broadcast", "direct"])
@ranks(3, same=True)
def test_damage_is_the_same_error_on_all_ranks(rank: int, world: int, saved: Path, strategy: str) -> str:
    mesh = init_device_mesh("cpu", (world,))
    load(saved, mesh, timeout_s=20, strategy=strategy)
    dist.barrier()
    (file,) = saved.glob("*.safetensors")
    with fastload.open(saved) as checkpoint:
        entry = checkpoint.manifest.by_name["columns"]
    if rank == 0:
        with file.open("r+b") as opened:
            opened.seek(entry.offset + 9 * 8192 + 17)
            opened.write(b"!")
    dist.barrier()
    end = outcome_of(lambda: load(saved, mesh, timeout_s=PATIENT_S, strategy=strategy))
    assert end.kind == "ChecksumError", end
    assert f"{file}: block " in end.text
    assert f"[bytes {entry.offset + 9 * 8192}-{entry.offset + 10 * 8192}] of tensor 'columns'" in end.text
    assert end.seconds < TOLD_S
    assert fastload_threads() == []
    return end.text


@ranks(3)
def test_what_is_spoiled_on_the_way_heals(rank: int, world: int, saved: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    honest = ChunkReader._read_range
    for kind in KINDS:
        numbers = itertools.count()

        def read(self: ChunkReader, span: Any, buffers: Sequence[memoryview]) -> None:
            honest(self, span, buffers)
            if next(numbers) == 1:  # noqa: B023
                buffers[0][5] ^= 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChunkReader, "_read_range", read)
            report = load(saved, mesh, kind, timeout_s=20)
        assert [own.retries for own in report.ranks] == [1] * world
        assert all(own.bytes_verified == own.bytes_read - own.retries * 8192 for own in report.ranks)


@ranks(4)
def test_blocks_of_readers_that_break_are_verified_by_others(rank: int, world: int, saved: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for kind in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            break_reads(patch, {0: 1, 3: 0}.get(rank))
            load(saved, mesh, kind, timeout_s=20, chunk_bytes=10_001)


# What is left behind


@pytest.mark.slow
@ranks(3)
def test_loads_leave_nothing_in_the_store(rank: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(2):
        for kind, strategy in [("mixed", "allgather"), ("fsdp", "allgather"), ("mixed", "direct")]:
            load(path, mesh, kind, strategy=strategy, timeout_s=20)
        for stage in ("", "requests", "routes", "middle", "rest"):
            with pytest.MonkeyPatch.context() as patch:
                if stage and rank == 1:
                    faults.strike(patch, stage, lambda: fail(RuntimeError("no")))
                break_reads(patch, 1 if rank == 2 and stage in ("", "rest") else None)
                with contextlib.suppress(PeerError):
                    load(path, mesh, timeout_s=20)
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
        into.pop(["rows", "columns", "all"][rank])
        fastload.load(path, into=into, options=options(timeout_s=20))
        into = {"rows": into["rows"]} if rank == 1 else {}
        with pytest.raises(fastload.MismatchError, match="columns"):
            fastload.load(path, into=into, options=options(timeout_s=20))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert len(set(counts)) == 1, counts


def kept(rank: int, world: int, path: Path, kind: str) -> None:
    """Neither buffers nor descriptors or threads outlive a load, even while no garbage is collected."""
    mesh = init_device_mesh("cpu", (world,))
    gc.collect()
    gc.disable()
    for what in ("nothing", "raise", "heal", "all-break", "rest"):
        with pytest.MonkeyPatch.context() as patch:
            try:
                kept_after(what, rank, path, mesh, kind, patch)
            except BaseException as error:
                error.add_note(what)
                raise


def kept_after(
    what: str, rank: int, path: Path, mesh: DeviceMesh, kind: str, patch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Tensor]] = []
    owners = (transport, "allocate_buffers"), (shared_memory, "_map")
    for owner, name in owners:
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            made.extend(map(weakref.ref, found if isinstance(found, list) else [found]))
            return found

        patch.setattr(owner, name, noted)
    if what == "raise" and rank == 1:
        faults.strike(patch, "middle", lambda: fail(RuntimeError("no")))
    if what == "rest" and rank == 1:
        faults.strike(patch, "rest", lambda: fail(RuntimeError("no")))
    if what == "all-break" or (what in ("heal", "rest") and rank == 2):
        break_reads(patch, 2)
    descriptors: list[int] = []
    for _ in range(4):
        with contextlib.suppress(PeerError):
            load(path, mesh, kind, timeout_s=20)
        dist.barrier()
        fastload_threads(
            kept=["fastload-host"]
        )  # waits for those that take a group down, and its descriptors
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert made
    until = time.monotonic() + 30  # a thread that ends late on a busy machine lets go of them late
    while (alive := sum(ref() is not None for ref in made)) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive == 0, f"{alive} of {len(made)} buffers are alive"
    assert fastload_threads(kept=["fastload-host"]) == []
    assert descriptors[-1] <= descriptors[1], descriptors


@pytest.mark.slow(but=["fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept(path: Path, kind: str) -> None:
    run_ranks(kept, 3, path=path, kind=kind)


@ranks(3)
def test_storage_stays_open_while_a_read_of_the_second_pass_is_under_way(
    rank: int, world: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor may soon stand for another file."""
    answer, is_second, closed = threading.Event(), threading.Event(), threading.Event()
    open_rest, close, read_into = session.open_rest, LocalStorage.close, LocalStorage.read_into

    def prepared(*arguments: Any) -> Any:
        is_second.set()
        return open_rest(*arguments)

    def closing(storage: LocalStorage) -> None:
        closed.set()
        close(storage)

    def read(*arguments: Any, **how: Any) -> None:
        if rank == 0:
            raise StorageError("the disk of rank 0 is broken")
        if rank == 1 and is_second.is_set():
            answer.wait(PATIENT_S)
        read_into(*arguments, **how)

    opened = fastload.open(path, options=options(timeout_s=patient(3.0)))
    monkeypatch.setattr(session, "open_rest", prepared)
    monkeypatch.setattr(LocalStorage, "close", closing)
    monkeypatch.setattr(LocalStorage, "read_into", read)
    with pytest.raises(fastload.FastloadError):
        opened.load(into=emptied(shards(init_device_mesh("cpu", (world,)))))
    opened.close()
    assert closed.is_set() == (rank != 1)
    answer.set()
    assert closed.wait(PATIENT_S)
