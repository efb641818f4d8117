"""Where paths lead while a process changes its directory, and open checkpoints that are dropped or closed."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.base.threads import ProcessLock
from fastload.errors import (
    CheckpointExists,
    CheckpointNotFound,
    FastloadError,
    OptionError,
    PeerError,
    StorageError,
    WorldError,
)
from fastload.storage import single_file
from fastload.storage.descriptors import Descriptor, DescriptorPool
from fastload.storage.single_file import require_writable
from tests.checkpoints import write_file
from tests.dist.harness import ranks
from tests.storage.s3_server import BUCKET

STATE = {"t": torch.arange(1000.0), "step": 3}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint, and one to change to."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    fastload.save(STATE, "saved")
    return tmp_path / "here"


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_relative_path_stays_where_it_was_after_a_chdir(here: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    handle = fastload.async_save(STATE, "later", options=fastload.SaveOptions(trace="save.json"))
    os.chdir(away)
    assert handle.wait().url == str(here / "later")
    os.chdir(here)
    with fastload.open("later", options=fastload.LoadOptions(trace="load.json")) as checkpoint:
        os.chdir(away)
        assert checkpoint.load()["step"] == 3
        assert checkpoint.verify().url == checkpoint.manifest.url == str(here / "later")
    os.chdir(here)
    with fastload.CheckpointManager("runs", keep_last=1) as manager:
        manager.save(1, STATE)
        os.chdir(away)
        manager.save(2, STATE)
        manager.wait()
        assert manager.all_steps() == [2]
        assert manager.restore()["step"] == 3
        assert manager.path(2) == str(here / "runs" / "step_00000002")
    os.chdir(here)
    assert fastload.stage("later", "copy").path == str(here / "copy")
    assert fastload.load("~/copy")["step"] == fastload.load("below/../copy/")["step"] == 3
    assert files_in(away) == set()
    assert {"later", "runs", "copy", "save.json", "load.json", "saved", "below"} == {
        name for name in files_in(here) if "/" not in name
    }


@ranks(2)
def test_ranks_in_different_directories_mean_what_each_of_them_sees(
    rank: int, world: int, tmp_path: Path
) -> None:
    """A relative path is the same request everywhere."""
    folder = tmp_path / f"of-{rank}"
    folder.mkdir()
    write_file(folder / "x.safetensors", [("t", "F32", (100,))])
    os.chdir(folder)
    assert fastload.load("x.safetensors")["t"].shape == (100,)


def test_a_directory_that_is_gone(here: Path, tmp_path: Path) -> None:
    os.chdir(here / "below")
    shutil.rmtree(here / "below")
    calls: list[Callable[[str], Any]] = [
        fastload.load,
        fastload.inspect,
        fastload.verify,
        fastload.CheckpointManager,
        lambda path: fastload.save(STATE, path),
        lambda path: fastload.async_save(STATE, path),
        lambda path: fastload.stage(here / "saved", path),
        lambda path: fastload.stage(path, tmp_path / "copy"),
    ]
    for call in calls:
        with pytest.raises(OptionError, match="'x': the working directory does not exist any more"):
            call("x")
        for odd in ("", "a\0b", b"a", Path("s3://a/b"), None):
            with pytest.raises(OptionError, match="path="):
                call(odd)  # type: ignore[arg-type]
    options = fastload.LoadOptions(trace="t.json")  # nobody fails because of it
    assert fastload.load(here / "saved", options=options)["step"] == 3
    assert fastload.save(STATE, here / "new").num_tensors == 1


def test_names_that_are_too_long_are_named(here: Path) -> None:
    for path in ("x" * 300, ("d" * 200 + "/") * 30):
        with pytest.raises(StorageError, match="File name too long"):
            fastload.save(STATE, path)
        with pytest.raises(FastloadError):
            fastload.load(path)


def test_asking_whether_a_file_could_be_written_leaves_nothing_behind(here: Path) -> None:
    (here / "to-nothing").symlink_to("target")
    (here / "old").write_bytes(b"old")
    (here / "to-old").symlink_to("old")
    (here / "to-nowhere").symlink_to("no/target")
    before = sorted(os.listdir(here))
    for name in ("new", "to-nothing", "old", "to-old", "/dev/null"):
        require_writable(str(here / name))
    for name in ("no/new", "below", "to-nowhere"):
        with pytest.raises(StorageError, match=f"{here / name}: it cannot be written"):
            require_writable(str(here / name))
    assert sorted(os.listdir(here)) == before
    assert (here / "old").read_bytes() == b"old"


def test_a_single_file_where_there_are_no_hard_links(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = here / "new.pt"
    for content in (b"first", b"second"):
        pending = single_file.make_pending(str(path), overwrite=content == b"second")
        with single_file.opened(pending) as descriptor:
            os.write(descriptor, content)
        single_file.publish(pending, str(path), overwrite=content == b"second")
        assert path.read_bytes() == content
    late = f"{path}.pending"
    Path(late).write_bytes(b"third")
    with pytest.raises(CheckpointExists):
        single_file.publish(late, str(path), overwrite=False)
    assert path.read_bytes() == b"second"


def test_what_another_process_makes_is_not_unlinked(here: Path) -> None:
    """It makes a file and renames it away all the time, while it is asked whether that could be written."""
    stop = threading.Event()
    lost: list[int] = []

    def make() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            Path("log").write_text(str(number))
            try:
                os.rename("log", "taken")
            except FileNotFoundError:
                lost.append(number)

    other = threading.Thread(target=make)
    other.start()
    try:
        for _ in range(3000):
            require_writable("log")
    finally:
        stop.set()
        other.join()
    assert not lost


def test_an_empty_bucket_is_no_checkpoint(seaweed: dict[str, Any]) -> None:
    for url in (f"s3://{BUCKET}", f"s3://{BUCKET}/"):
        with pytest.raises(CheckpointNotFound, match=f"s3://{BUCKET}: no such checkpoint"):
            fastload.load(url, storage_options=seaweed)


def test_slashes_of_s3_that_follow_each_other_count_as_one(seaweed: dict[str, Any]) -> None:
    url = f"s3://{BUCKET}//slashes///runs/"
    with fastload.CheckpointManager(url, storage_options=seaweed, async_=False, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
        assert manager.all_steps() == [2]
        assert manager.path(2) == f"s3://{BUCKET}/slashes/runs/step_00000002"
    report = fastload.save(STATE, f"{url}/a//b", storage_options=seaweed)
    assert report.url == f"s3://{BUCKET}/slashes/runs/a/b"
    for same in (report.url, f"S3://{BUCKET}/slashes//runs//a/b//"):
        with fastload.open(same, storage_options=seaweed) as checkpoint:
            assert checkpoint.load()["step"] == 3
            assert checkpoint.manifest.url == report.url


# Open checkpoints


def open_files(folder: Path) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.lexists(link))


def test_a_dropped_checkpoint_leaves_no_descriptors(here: Path) -> None:
    gc.disable()  # it goes with its last reference
    try:
        for io in ("auto", "direct"):
            checkpoint = fastload.open("saved", options=fastload.LoadOptions(io=io))
            checkpoint.load()
            assert open_files(here) >= 2
            del checkpoint
            assert open_files(here) == 0
    finally:
        gc.enable()


def test_a_finalizer_waits_for_no_lock(tmp_path: Path) -> None:
    """The garbage collector may run it in a thread that holds the lock of all descriptors."""

    def opened(name: str) -> Descriptor:
        return Descriptor(pool, lambda: os.open(tmp_path / name, os.O_RDWR | os.O_CREAT))

    lock = ProcessLock()
    pool = DescriptorPool(lock)
    first, second = opened("first"), opened("second")
    for descriptor in (first, second):
        with descriptor.use():
            pass
    with lock:
        first.abandon()
    assert open_files(tmp_path) == 2
    with opened("third").use():
        assert open_files(tmp_path) == 2, "it was closed with the next that was opened"
        second.abandon()
        assert open_files(tmp_path) == 1


def test_a_closed_checkpoint_says_so(here: Path) -> None:
    with fastload.open("saved") as checkpoint:
        checkpoint.load()
    for call in (checkpoint.load, checkpoint.verify, checkpoint.load):
        with pytest.raises(WorldError, match="saved: this checkpoint is closed: open it again"):
            call()
    checkpoint.close()
    assert checkpoint.report is not None
    assert checkpoint.manifest.tensors


@ranks(2)
def test_a_checkpoint_that_one_rank_has_closed(rank: int, world: int, tmp_path: Path) -> None:
    options = fastload.LoadOptions(timeout_s=40)
    fastload.save(STATE, tmp_path / "saved")
    checkpoint = fastload.open(tmp_path / "saved", options=options)
    if rank == 1:
        checkpoint.close()
    with pytest.raises(WorldError, match="this checkpoint is closed") as raised:
        checkpoint.load()
    if rank == 0:
        assert isinstance(raised.value, PeerError)
        assert set(raised.value.failures) == {1}
    checkpoint.close()
    dist.barrier()
    assert fastload.load(tmp_path / "saved", options=options)["step"] == 3


def test_a_file_that_is_closed_while_it_opens_is_not_used(tmp_path: Path) -> None:
    file: Descriptor

    def open_late() -> int:
        file.close()  # as another thread does at the end of a save, whose directory may be another one by now
        return os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)

    file = Descriptor(DescriptorPool(), open_late)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)), file.use():
        pass
    assert len(os.listdir("/proc/self/fd")) == before
