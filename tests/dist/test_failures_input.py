"""Bad checkpoints and bad storage: the same error on every rank, nothing half done, and life goes on."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

import fastload
from fastload.comm.world import World
from fastload.storage.local import LocalStorage
from tests.dist import faults
from tests.dist.faults import (
    CHUNK_BYTES,
    PATIENT_S,
    SLACK_S,
    TIMEOUT_S,
    TOLD_S,
    Outcome,
    checkpoint,
    fastload_threads,
    is_intact,
    options,
    outcome_of,
)  # fmt: skip
from tests.dist.harness import ranks, run_ranks
from tests.unit.test_tracebacks import error_of, require_short

BIG = 1 << 40


def packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def indexed(weight_map: Any) -> dict[str, bytes]:
    good = packed({"a": entry(0, 4)}, b"good")
    index = json.dumps({"weight_map": weight_map}).encode()
    return {"model.safetensors": good, "model.safetensors.index.json": index}


BAD_FILES: dict[str, bytes] = {
    "truncated": packed({"a": entry(0, 8)}, b"1234"),
    "trailing": packed({"a": entry(0, 4)}, b"12345"),
    "header-beyond-file": packed({"a": entry(0, 4)}, b"1234", length=4096),
    "header-absurd": packed({"a": entry(0, 4)}, b"1234", length=2**64 - 1),
    "too-short": b"1234",
    "empty": b"",
    "json": packed(b'{"a": '),
    "no-object": packed(b"[1]"),
    "duplicate": packed(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 2)).encode(),) * 2), b"12"),
    "overlap": packed({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"),
    "hole": packed({"a": entry(0, 2), "b": entry(4, 6)}, b"123456"),
    "out-of-range": packed({"a": entry(0, BIG)}, b"1234"),
    "negative": packed({"a": entry(-4, 0, shape=[4])}, b"1234"),
    "dtype": packed({"a": entry(0, 4, dtype="F12")}, b"1234"),
    "size": packed({"a": entry(0, 4, dtype="F32", shape=[1 << 38])}, b"1234"),
    "overflow": packed({"a": entry(0, 4, shape=[1 << 62, 1 << 62])}, b"1234"),
}
BAD_DIRECTORIES: dict[str, dict[str, bytes]] = {
    "missing-file": indexed({"a": "model.safetensors", "b": "gone.safetensors"}),
    "missing-tensor": indexed({"a": "model.safetensors", "b": "model.safetensors"}),
    "parent": indexed({"a": "../outside.safetensors"}),
    "absolute": indexed({"a": "/outside.safetensors"}),
    "no-map": indexed([]),
    "twice": {
        "1.safetensors": packed({"a": entry(0, 1)}, b"1"),
        "2.safetensors": packed({"a": entry(0, 1)}, b"2"),
    },
}  # fmt: skip


def memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def reset_peak_kib() -> int:
    """Lets the peak of resident memory start anew from what is resident now, and returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kib("VmRSS")


def refuse_all(rank: int, world: int, root: Path) -> dict[str, tuple[str, str]]:
    """Each bad checkpoint is refused with nothing touched; a good one loads after every one of them."""
    ends = {}
    mine = {"a": torch.full((4,), 7, dtype=torch.uint8)}
    for bad in sorted((root / "bad").iterdir()):
        before_kib = reset_peak_kib()
        end = outcome_of(lambda bad=bad: fastload.load(bad, into=mine, options=options(timeout_s=20)))
        assert memory_kib("VmHWM") - before_kib < 16 << 10, f"{bad} takes memory"
        ends[bad.name] = (end.kind, end.text)
        assert mine["a"].tolist() == [7] * 4, bad
        assert is_intact(fastload.load(root / "good.safetensors", options=options(timeout_s=20)))
    return ends


@pytest.mark.slow(but=["3"])
@pytest.mark.parametrize("world", [1, 3])
def test_malformed_checkpoint_is_refused_alike_everywhere(tmp_path: Path, world: int) -> None:
    checkpoint(tmp_path / "good.safetensors")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "outside.safetensors").write_bytes(packed({"a": entry(0, 4)}, b"evil"))
    for name, data in BAD_FILES.items():
        (tmp_path / "bad" / f"{name}.safetensors").write_bytes(data)
    for name, files in BAD_DIRECTORIES.items():
        (tmp_path / "bad" / name).mkdir()
        for file, data in files.items():
            (tmp_path / "bad" / name / file).write_bytes(data)
    (tmp_path / "bad" / "outside.safetensors").rename(tmp_path / "outside.safetensors")
    ends = run_ranks(refuse_all, world, same=True, root=tmp_path)
    assert set(ends[0]) == {f"{name}.safetensors" for name in BAD_FILES} | set(BAD_DIRECTORIES)
    for name, (kind, text) in ends[0].items():
        wanted = "IncompleteCheckpoint" if name == "missing-file" else "ManifestError"
        assert kind == wanted, (name, kind, text)
        assert str(tmp_path) in text, "names the file"


def shrink_while_read(rank: int, world: int, path: Path, when: str, strategy: str) -> Outcome:
    def cut(done: int, total: int) -> None:
        if rank == 0 and done < total // 2:
            os.truncate(path, 100_000)

    given = options(progress=cut if when == "progress" else None, strategy=strategy, retries=1)
    with fastload.open(path, options=given) as opened:
        if when == "between" and rank == 0:
            os.truncate(path, 100_000)
        if world > 1:
            dist.barrier()
        return outcome_of(opened.load)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("when", ["between", "progress"])
def test_file_that_shrinks_is_an_error_with_its_place(tmp_path: Path, world: int, when: str) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    ends = run_ranks(shrink_while_read, world, path=path, when=when, strategy="allgather")
    assert len({tuple(end.causes.items()) for end in ends}) == 1
    for end in ends:
        assert end.seconds < TIMEOUT_S + SLACK_S
        assert str(path) in end.text
        assert "shrank" in end.text
        assert "[bytes " in end.text
        assert end.kind == ("StorageError" if world == 1 else "PeerError")
        assert set(end.causes.values()) <= {"StorageError"}


def replace_while_open(rank: int, world: int, path: Path, other: Path) -> None:
    with fastload.open(path, options=options(timeout_s=20)) as opened:
        dist.barrier()
        if rank == 0:
            os.replace(other, path)
        dist.barrier()
        assert is_intact(opened.load())
    assert is_intact(fastload.load(path, options=options(timeout_s=20)), fill=1)


def test_file_replaced_after_open_is_read_as_it_was(tmp_path: Path) -> None:
    path, other = checkpoint(tmp_path / "x.safetensors"), checkpoint(tmp_path / "y.safetensors", fill=1)
    run_ranks(replace_while_open, 3, path=path, other=other)


def denied(rank: int, world: int, path: Path) -> Outcome:
    """Rank 1 has no rights for a load, then it has."""
    if rank == 1:
        os.seteuid(65534)
    end = outcome_of(lambda: fastload.load(path, options=options(timeout_s=PATIENT_S)))
    os.seteuid(0)
    assert is_intact(fastload.load(path, options=options(timeout_s=20)))
    return end


def test_permission_denied_on_one_rank(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to take rights from one rank")
    path = checkpoint(tmp_path / "x.safetensors")
    path.chmod(0o600)
    ends = run_ranks(denied, 3, path=path)
    for end in ends:
        assert (end.kind, end.causes) == ("PeerError", {1: "StorageError"})
        assert "EACCES" in end.text
        assert end.details[1]["url"]
        assert end.seconds < TOLD_S


@ranks(2)
def test_tracebacks_are_short_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    missing = error_of(lambda: fastload.load(tmp_path / "missing", options=options()))
    assert isinstance(missing, fastload.CheckpointNotFound)
    into = {"no such name": torch.zeros(3)} if rank == 1 else None
    differs = error_of(lambda: fastload.load(path, into=into, options=options()))
    assert isinstance(differs, fastload.PeerError)
    assert isinstance(differs.failures[1], fastload.MismatchError)
    for error in (missing, differs):
        require_short(error)


def starve(rank: int, world: int, path: Path, what: str) -> Outcome:
    """Rank 1 may not have as much memory as its tensors, or its slabs, take."""
    target = None
    if what == "slabs":
        sizes = {"a": BIG_BYTES // 3, "b": BIG_BYTES - BIG_BYTES // 3}
        target = {name: torch.zeros(nbytes, dtype=torch.uint8) for name, nbytes in sizes.items()}
    chunk, staging = (32 << 20, 512 << 20) if what == "slabs" else (1 << 20, 16 << 20)
    opts = options(timeout_s=PATIENT_S, chunk_bytes=chunk, staging_bytes=staging)
    with fastload.open(path, options=opts) as opened:
        if rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (80 << 20), -1))
        end = outcome_of(lambda: opened.load(into=target))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert target is None or not target["a"].any()
    assert len(fastload.load(path, options=options(timeout_s=30, chunk_bytes=8 << 20))) == 2
    return end


BIG_BYTES = 120 << 20


@pytest.mark.slow(but=["slabs"])
@pytest.mark.parametrize("what", ["tensors", "slabs"])
def test_memory_of_one_rank_is_not_enough(tmp_path: Path, what: str) -> None:
    path = checkpoint(tmp_path / "x.safetensors", BIG_BYTES)
    ends = run_ranks(starve, 3, path=path, what=what)
    for end in ends:
        assert (end.kind, end.causes) == ("PeerError", {1: "MemoryError"}), end
        assert "allocate" in end.text or "stage" in end.text


def differ(rank: int, world: int, path: Path, other: Path) -> dict[str, tuple[str, str]]:
    odd, patient = rank == 1, functools.partial(options, timeout_s=PATIENT_S)
    asks: dict[str, Any] = {
        "strategy": lambda: fastload.load(path, options=patient(strategy="direct" if odd else "allgather")),
        "chunk_bytes": lambda: fastload.load(path, options=patient(chunk_bytes=4096 if odd else 8192)),
        "names": lambda: fastload.load(path, names="a" if odd else None, options=patient()),
        "dtype": lambda: fastload.load(path, dtype=torch.half if odd else None, options=patient()),
        "path": lambda: fastload.load(other if odd else path, options=patient()),
    }
    ends = {}
    for what, ask in asks.items():
        end = outcome_of(ask)
        assert end.seconds < TOLD_S, end
        ends[what] = (end.kind, end.text)
        assert is_intact(fastload.load(path, options=options(timeout_s=20)))
    return ends


def test_ranks_that_do_not_ask_for_the_same(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    ends = run_ranks(differ, 3, same=True, path=path, other=tmp_path / "nothing.safetensors")
    for what, (kind, text) in ends[0].items():
        assert kind == "PlanMismatch"
        assert f"{what}: rank 0" in text
        assert "rank 1" in text
        assert "rank 2" not in text


def unusable(rank: int, world: int, path: Path) -> list[Outcome]:
    """Rank 1 fails before it can even ask: with a bad environment, path, scheme, or options."""
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("FASTLOAD_RETRIES", "many")
        ends.append(outcome_of(lambda: fastload.load(path)))
    patient = options(timeout_s=PATIENT_S)
    ends.append(outcome_of(lambda: fastload.load(17 if rank == 1 else path, options=patient)))  # type: ignore[arg-type]
    ends.append(outcome_of(lambda: fastload.load("no://x" if rank == 1 else path, options=patient)))
    given: Any = fastload.SaveOptions(timeout_s=PATIENT_S) if rank == 1 else patient
    ends.append(outcome_of(lambda: fastload.load(path, options=given)))
    assert is_intact(fastload.load(path, options=options(timeout_s=20)))
    return ends


def test_rank_that_cannot_begin_tells_the_others(tmp_path: Path) -> None:
    ends = run_ranks(unusable, 3, path=checkpoint(tmp_path / "x.safetensors"))
    for environment, path, scheme, given in ends:
        assert environment.causes == {1: "OptionError"}
        assert "FASTLOAD_RETRIES" in environment.text
        assert path.causes == {1: "OptionError"}
        assert scheme.causes == {1: "OptionError"}
        assert given.causes == {1: "OptionError"}
        assert "options= is a SaveOptions: pass fastload.LoadOptions" in given.text
        assert max(end.seconds for end in (environment, path, scheme, given)) < TOLD_S


def misfit(rank: int, world: int, path: Path) -> Outcome:
    into = {"a": torch.zeros(3, 3), "c": torch.zeros(1)} if rank == 2 else None
    if into is None:
        into = {"a": torch.zeros(faults.NUM_BYTES // 3, dtype=torch.uint8),
                "b": torch.zeros(faults.NUM_BYTES - faults.NUM_BYTES // 3, dtype=torch.uint8)}  # fmt: skip
    end = outcome_of(lambda: fastload.load(path, into=into, options=options()))
    assert not any(tensor.any() for tensor in into.values())
    return end


def test_into_that_fits_on_all_ranks_but_one(tmp_path: Path) -> None:
    for end in run_ranks(misfit, 3, path=checkpoint(tmp_path / "x.safetensors")):
        assert (end.kind, end.causes) == ("PeerError", {2: "MismatchError"})
        assert end.details[2]["missing"] == ("c",)
        assert end.details[2]["unexpected"] == ("b",)
        assert len(end.details[2]["mismatched"]) == 1
        assert all(line in end.text for line in ("missing in the checkpoint: c", "a: shape"))


class Flaky(LocalFileSystem):
    """Local files whose data cannot be read so many times; then it can."""

    protocol = "flaky"
    cachable = False
    failures = 0
    error: type[BaseException] | OSError = OSError(errno.EIO, "input/output error")
    hangs = threading.Event()
    lock = threading.Lock()

    def cat_file(self, path: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
        if start and end - start > 8192:  # data, not a header
            with Flaky.lock:
                Flaky.failures -= 1
                fails = Flaky.failures >= 0
            if fails:
                raise Flaky.error
            Flaky.hangs.wait()
        return bytes(super().cat_file(path, start, end))


@contextlib.contextmanager
def flaky(failures: int = 0, error: OSError | None = None, hangs: bool = False) -> Iterator[None]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures, Flaky.error = failures, error or OSError(errno.EIO, "input/output error")
    (Flaky.hangs.clear if hangs else Flaky.hangs.set)()
    yield


def heal(rank: int, world: int, path: Path) -> int:
    reports: list[Any] = []
    with flaky(failures=2 if rank == world - 1 else 0):
        given = options(timeout_s=20, on_report=reports.append)
        assert is_intact(fastload.load(f"flaky://{path}", options=given))
    assert [r.retries for r in reports[0].ranks] == [0] * (world - 1) + [2]
    return reports[0].bytes_read


@pytest.mark.slow(but=["3"])
@pytest.mark.parametrize("world", [1, 3])
def test_transient_error_heals_and_is_counted(tmp_path: Path, world: int) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    assert run_ranks(heal, world, same=True, path=path)[0] == faults.NUM_BYTES


def stay_broken(rank: int, world: int, path: Path, error: OSError) -> Outcome:
    """The only rank that reads cannot; nobody can take over."""
    given = options(timeout_s=PATIENT_S, retries=2, strategy="broadcast")
    with flaky(failures=10**6 if rank == 0 else 0, error=error):
        end = outcome_of(lambda: fastload.load(f"flaky://{path}", options=given))
    with flaky():
        assert is_intact(fastload.load(f"flaky://{path}", options=options(timeout_s=20)))
    assert fastload_threads(kept=["fastload-host"]) == []
    return end


@pytest.mark.parametrize(
    ("error", "attempts"), [(OSError(errno.EIO, "input/output error"), 3), (PermissionError("no"), 1)]
)
def test_error_that_stays_names_rank_url_range_and_attempts(
    tmp_path: Path, error: OSError, attempts: int
) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    for end in run_ranks(stay_broken, 3, path=path, error=error):
        assert (end.kind, end.causes) == ("PeerError", {0: "StorageError"})
        cause = end.details[0]
        assert cause["url"] == f"flaky://{path}"
        assert cause["attempts"] == attempts
        assert (cause["nbytes"], cause["offset"] % CHUNK_BYTES < 1000) == (CHUNK_BYTES, True)
        assert end.seconds < TOLD_S


def hang(rank: int, world: int, path: Path, strategy: str, patience: float) -> Outcome:
    """Storage never answers one rank; the process ends all the same, through the interpreter's own end."""
    pytest.MonkeyPatch().setattr(os, "_exit", sys.exit)
    hangs, own = rank == world - 1, World.patience_s.fget
    if hangs:
        pytest.MonkeyPatch().setattr(World, "patience_s", property(lambda world: patience * own(world)))
    with flaky(hangs=hangs):
        return outcome_of(lambda: fastload.load(f"flaky://{path}", options=options(strategy=strategy)))


@pytest.mark.slow(but=["3-allgather-1.0"])
@pytest.mark.parametrize(
    ("world", "strategy", "patience"),
    [
        (1, "direct", 1.0),
        (3, "direct", 1.0),
        (3, "allgather", 1.0),
        (3, "allgather", 1.5),  # the others, who wait for its chunk, give up before it does
    ],
)
def test_storage_that_never_answers_one_rank(
    tmp_path: Path, world: int, strategy: str, patience: float
) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    ends = run_ranks(hang, world, path=path, strategy=strategy, patience=patience)
    for end in ends:
        assert end.seconds < TIMEOUT_S + SLACK_S
        assert "storage did not answer" in end.text
        assert f"flaky://{path} [bytes " in end.text
        assert end.kind == ("StorageError" if world == 1 else "PeerError")
        assert world == 1 or end.causes == {2: "StorageError"}


def answer_late(rank: int, world: int, path: Path, other: Path) -> None:
    """A read outlasts its load: what it was for must stay alive, and its descriptor must stay its own."""
    asleep, go_on = threading.Event(), threading.Event()
    real = os.preadv
    written: list[tuple[bool, int]] = []

    def slow(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if offset > 4096 and not flags:
            asleep.set()
            go_on.wait()
        count = real(descriptor, buffers, offset, *flags)
        written.append((offset > 4096, os.fstat(descriptor).st_ino))
        return count

    inode = path.stat().st_ino
    given = options(chunk_bytes=1 << 20, timeout_s=1, io="buffered")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", slow)
        end = outcome_of(lambda: fastload.load(path, options=given))
        assert end.kind == "StorageError"
        assert asleep.is_set()
        with other.open("rb"):  # may get the number of a descriptor that was closed
            filler = [torch.zeros(size, dtype=torch.uint8) for size in (786432, 1572864) * 8]  # freed memory
            go_on.set()
            assert fastload_threads() == []
    assert (True, inode) in written, "its memory was gone, or nothing came late"
    assert {number for _, number in written} == {inode}, "another file was read"
    assert not any(tensor.any() for tensor in filler), "freed memory was written to"
    assert str(path) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_read_that_outlasts_its_load_does_no_harm(tmp_path: Path) -> None:
    path, other = checkpoint(tmp_path / "x.safetensors"), checkpoint(tmp_path / "y.safetensors", fill=1)
    run_ranks(answer_late, 1, path=path, other=other)


def vanish(rank: int, world: int, path: Path) -> Outcome:
    """The file is there when the ranks look, and gone when its header is read."""
    real = LocalStorage.list
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "list", lambda self: path.unlink(missing_ok=True) or real(self))
        return outcome_of(lambda: fastload.load(path.parent, options=options()))


def test_checkpoint_that_vanishes_is_not_found_on_every_rank(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    ends = run_ranks(vanish, 3, path=path)
    assert {end.kind for end in ends} == {"CheckpointNotFound"}
    assert len({end.text for end in ends}) == 1
