"""What goes wrong on local file systems while a checkpoint is written."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import CheckpointExists, OptionError, StorageError
from fastload.formats.names import NAMES, RECORD_NAME
from fastload.storage import folders, pending
from fastload.storage.local_target import LocalTarget
from fastload.storage.process import Owner
from tests.storage.disks import small_disk_in, small_memory_in

NAME = "model.safetensors"


def begin(path: Path, nbytes: int, *, overwrite: bool = False, io: str = "auto") -> LocalTarget:
    target = LocalTarget(str(path), NAMES, io=io)
    target.prepare([(NAME, nbytes)], overwrite=overwrite)
    return target


def save(path: Path, content: bytes, *, overwrite: bool = False) -> None:
    target = begin(path, len(content), overwrite=overwrite)
    target.write(NAME, 0, memoryview(bytearray(content)))
    target.publish([target.flush()], [(RECORD_NAME, content[:8])])
    target.close()


def loaded(path: Path) -> bytes:
    """Returns what is there, after checking that it is whole."""
    content = (path / NAME).read_bytes()
    assert (path / RECORD_NAME).read_bytes() == content[:8]
    assert sorted(os.listdir(path)) == sorted([NAME, RECORD_NAME])
    return content


def test_direct_and_buffered_writes_meet(tmp_path: Path) -> None:
    content = random.Random(1).randbytes((8 << 20) + 1234)
    target = begin(tmp_path / "a", len(content), io="direct")
    source = memoryview(bytearray(b"-" * 77 + content))[77:]  # aligned to nothing
    cuts = [
        0,
        1,
        6000,
        6001,
        4096 * 3,
        3 << 20,
        (3 << 20) + 100,
        (6 << 20) - 1,
        (7 << 20) + 4097,
        len(content),
    ]
    pieces = list(pairwise(cuts))
    random.Random(2).shuffle(pieces)
    for first, last in pieces:
        target.write(NAME, first, source[first:last])
    target.publish([target.flush()], [(RECORD_NAME, content[:8])])
    target.close()
    assert loaded(tmp_path / "a") == content


def test_parents_are_made_and_empty_directories_are_used(tmp_path: Path) -> None:
    save(tmp_path / "x/y/z", b"content")
    assert loaded(tmp_path / "x/y/z") == b"content"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", b"content")
    assert loaded(tmp_path / "empty") == b"content"


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointExists, match="file is a file"):
        save(tmp_path / "file", b"content", overwrite=True)
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("below", ["a", "a/b"])
def test_a_place_below_a_file_is_not_said_to_be_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match=f"{tmp_path}/file/{below}: Not a directory"):
        save(tmp_path / "file" / below, b"content", overwrite=True)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_directories_inside_are_not_deleted(tmp_path: Path) -> None:
    save(tmp_path / "a", b"content")
    save(tmp_path / "a/ema", b"average")
    with pytest.raises(OptionError, match="ema"):
        save(tmp_path / "a", b"new", overwrite=True)
    assert loaded(tmp_path / "a/ema") == b"average"


def test_overwrite_at_no_instant_leaves_nothing(tmp_path: Path) -> None:
    """Another process looks all the time, while the checkpoint is replaced again and again."""
    path = tmp_path / "a"
    save(path, b"0" * 9)
    child = os.fork()
    if child == 0:
        try:
            while not (tmp_path / "stop").exists():
                assert (path / NAME).exists(), "there was no checkpoint"
            os._exit(0)
        except BaseException:
            os._exit(1)
    for number in range(1, 30):
        save(path, b"%09d" % number, overwrite=True)
    (tmp_path / "stop").touch()
    assert os.waitpid(child, 0)[1] == 0
    assert loaded(path) == b"000000029"


def test_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> None:
        raise OSError(errno.EINVAL, "no such flag")

    monkeypatch.setattr(folders, "exchange", unable)
    save(tmp_path / "a", b"old")
    save(tmp_path / "a", b"new", overwrite=True)
    assert loaded(tmp_path / "a") == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_what_was_moved_aside_is_put_back(tmp_path: Path) -> None:
    save(tmp_path / "a", b"old")
    target = begin(tmp_path / "a", 3, overwrite=True)
    [pending_folder] = tmp_path.glob(".*.saving")
    os.rename(tmp_path / "a", pending_folder / "old")
    target.close()  # as if it had been killed here: the lock is gone, the directory is not
    save(tmp_path / "b", b"other")
    assert loaded(tmp_path / "a") == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_publish_that_is_not_durable_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def broken(folder: int) -> None:
        if os.path.samestat(os.fstat(folder), os.stat(tmp_path)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(folder)

    save(tmp_path / "a", b"old")
    for name, overwrite in (("a", True), ("new", False)):
        target = begin(tmp_path / name, 3, overwrite=overwrite)
        target.write(NAME, 0, memoryview(b"new"))
        receipt = target.flush()
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(StorageError, match="EIO"):
            target.publish([receipt], [(RECORD_NAME, b"new")])
        monkeypatch.setattr(os, "fsync", real)
        target.abort()
    assert loaded(tmp_path / "a") == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_old_checkpoint_that_cannot_be_put_back_at_once_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: Any) -> None:
        raise OSError(errno.EINVAL, "no such flag")

    real = os.rename

    def broken(source: str, target: str, **folders: Any) -> None:
        if source in ("data", "old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target, **folders)

    save(tmp_path / "a", b"old")
    target = begin(tmp_path / "a", 3, overwrite=True)
    target.write(NAME, 0, memoryview(b"new"))
    with monkeypatch.context() as patch:
        patch.setattr(folders, "exchange", unable)
        patch.setattr(os, "rename", broken)
        with pytest.raises(StorageError, match="EIO"):
            target.publish([target.flush()], [(RECORD_NAME, b"new")])
        target.abort()
    save(tmp_path / "b", b"other")
    assert loaded(tmp_path / "a") == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_signal_while_memory_is_reserved_is_no_error(tmp_path: Path) -> None:
    """tmpfs ends what it allocates then, and a save is likely to go on while signals come."""
    nbytes = 64 << 20
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        if shutil.disk_usage("/dev/shm").free < 2 * nbytes:
            pytest.skip("no room in /dev/shm: NOT TESTED HERE")
        file.truncate(nbytes)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            folders.reserve_range(file.fileno(), 0, nbytes)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert 512 * os.fstat(file.fileno()).st_blocks == nbytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_in(tmp_path, 16) as folder:
        yield folder


def test_a_full_disk_shows_before_anything_is_written(small_disk: Path) -> None:
    save(small_disk / "a", b"old")
    with pytest.raises(StorageError, match=rf"{NAME} \[bytes 0-{64 << 20}\]: No space left .*ENOSPC"):
        begin(small_disk / "a", 64 << 20, overwrite=True)
    assert loaded(small_disk / "a") == b"old"
    assert os.listdir(small_disk) == ["a"]


def test_files_in_memory_take_their_pages_when_they_are_written(tmp_path: Path) -> None:
    """A save whose pages are not free fails before anything is written all the same."""
    with small_memory_in(tmp_path, 16) as memory:
        save(memory / "a", b"old")
        with pytest.raises(StorageError, match=rf"No space left .*: {64 << 20} bytes needed.*ENOSPC"):
            begin(memory / "a", 64 << 20, overwrite=True)
        assert loaded(memory / "a") == b"old"
        assert os.listdir(memory) == ["a"]
        free = shutil.disk_usage(memory).free
        target = begin(memory / "b", 8 << 20)
        assert free - shutil.disk_usage(memory).free < 1 << 20
        target.abort()
        target.close()


def test_a_disk_that_fills_up_while_small_files_are_written(small_disk: Path) -> None:
    save(small_disk / "a", b"old")
    target = begin(small_disk / "a", 1 << 20, overwrite=True)
    target.write(NAME, 0, memoryview(bytes(1 << 20)))
    with pytest.raises(StorageError, match="ENOSPC"):
        target.publish([target.flush()], [(RECORD_NAME, bytes(20 << 20))])
    target.abort()
    target.close()
    assert loaded(small_disk / "a") == b"old"
    assert os.listdir(small_disk) == ["a"]


def test_a_disk_that_fills_up_under_files_without_blocks(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where nothing can be allocated, or where others fill the space meanwhile."""
    monkeypatch.setattr(folders, "reserve_range", lambda *_: None)
    target = begin(small_disk / "a", 64 << 20)
    with pytest.raises(StorageError, match="ENOSPC"):
        target.write(NAME, 0, memoryview(bytearray(64 << 20)))
    with pytest.raises(StorageError, match="ENOSPC"):
        target.flush()
    target.abort()
    target.close()
    assert os.listdir(small_disk) == []


def test_a_full_disk_does_not_keep_checkpoints_from_being_removed(small_disk: Path) -> None:
    save(small_disk / "a", b"old")
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/filler", "bs=4k"], capture_output=True)
    LocalTarget(str(small_disk / "a"), NAMES, io="auto").remove()
    assert os.listdir(small_disk) == ["filler"]


def test_a_read_only_file_system(small_disk: Path) -> None:
    save(small_disk / "a", b"old")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageError, match=r"Read-only file system \(EROFS\)"):
        begin(small_disk / "b", 10)
    assert loaded(small_disk / "a") == b"old"


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fsync", "pwrite64"])
def test_errors_of_the_disk_stick(tmp_path: Path, call: str) -> None:
    program = (
        "import sys; from tests.storage.test_local_target import *\n"
        "target = begin(Path(sys.argv[1]) / 'a', 5000)\n"
        "for step in (lambda: target.write(NAME, 0, memoryview(bytes(5000))), target.flush, target.flush):\n"
        "    try: step(); print('fine')\n"
        "    except StorageError as error: print(error)\n"
        "target.abort()\n"
    )
    # The first pwrite is that of the owner file; a file's fsync comes before those of the directories.
    inject = {"fsync": "fsync:error=EIO:when=1", "pwrite64": "pwrite64:error=EIO:when=2"}[call]
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        f"trace={call}",
        "-e",
        f"inject={inject}",
    ]
    try:
        found = subprocess.run(
            [*command, sys.executable, "-c", program, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=100,
        )
    except FileNotFoundError:
        pytest.skip("strace is not installed: NOT TESTED HERE")
    lines = found.stdout.splitlines()
    assert len(lines) == 3, found.stderr
    expected = ["fine"] if call == "fsync" else []
    assert lines[: len(expected)] == expected
    for line in lines[len(expected) :]:
        assert line.endswith("Input/output error (EIO)"), lines
        assert NAME in line
    assert os.listdir(tmp_path) == []


def test_killed_at_any_instant_the_old_or_the_new_one_is_whole(tmp_path: Path) -> None:
    path, rng = tmp_path / "a", random.Random(4)
    save(path, b"%09d" % 0)
    killed_early = num_killed = 0
    while num_killed < 40 or (killed_early <= 5 and num_killed < 400):  # a busy machine hits fewer saves
        num_killed += 1
        before = int(loaded(path))
        child = os.fork()
        if child == 0:
            for number in range(before + 1, before + 10_000):
                save(path, b"%09d" % number, overwrite=True)
            os._exit(1)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        killed_early += len(os.listdir(tmp_path)) > 1
        after = int(loaded(path))
        assert after >= before
        save(path, b"%09d" % (after + 1), overwrite=True)
        assert os.listdir(tmp_path) == ["a"]
    assert killed_early > 5, "the kills have to hit saves"


def owned_by(path: Path, owner: Owner | None) -> Path:
    folder = path / f".a.{'0' * 16}.saving"
    (folder / "data").mkdir(parents=True)
    (folder / "owner.json").write_bytes(owner.to_bytes() if owner else b"")
    return folder


ELSEWHERE = Owner("elsewhere", "another-kernel", "pid:[1]", 1, "1")


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("owner", [Owner.here(), ELSEWHERE, None], ids=["here", "elsewhere", "nobody"])
def test_whose_lock_is_free_is_dead_except_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Owner | None, silent: bool, kind: str
) -> None:
    monkeypatch.setattr(pending, "file_system_type", lambda _: kind)
    folder = owned_by(tmp_path, owner)
    if silent:
        for path in (folder / "owner.json", folder / "data", folder):
            os.utime(path, (1, time.time() - 7200))
    dead = kind == "ext4" or silent or (owner is not None and owner.host != "elsewhere")
    assert pending.clean_abandoned(str(tmp_path)) == ([str(folder)] if dead else [])
    assert folder.exists() is not dead


def test_without_locks_the_process_itself_is_looked_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(folders, "lock", lambda _: None)
    folder = owned_by(tmp_path, Owner.here())
    assert pending.clean_abandoned(str(tmp_path)) == []
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = Owner.here()
    gone = Owner(here.host, here.kernel, here.pids, child.pid, "1")
    assert gone.is_gone, "another process has that pid by now"
    child.communicate(b"\n")
    (folder / "owner.json").write_bytes(gone.to_bytes())
    assert pending.clean_abandoned(str(tmp_path)) == [str(folder)]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"pid": "x"}', b"\xff", b"[" * 100_000])
def test_an_owner_that_is_none(text: bytes) -> None:
    assert Owner.parse(text) is None


@pytest.mark.parametrize("name", ["n" * 240, "ü" * 127 + "x"], ids=["letters", "bytes"])
def test_a_name_as_long_as_the_file_system_takes(tmp_path: Path, name: str) -> None:
    """Replaced, put back after a crash, and removed."""
    path = tmp_path / name
    for content in (b"old", b"new"):
        save(path, content, overwrite=True)
    target = begin(path, 3, overwrite=True)
    [pending_folder] = tmp_path.glob(".*.saving")
    os.rename(path, pending_folder / "old")
    target.close()  # as if it had been killed here
    save(tmp_path / "b", b"other")
    assert loaded(path) == b"new"
    LocalTarget(str(path), NAMES, io="auto").remove()
    assert os.listdir(tmp_path) == ["b"]


def test_who_cleans_and_who_removes_do_not_get_in_each_others_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a manager that saves quickly: each save cleans while the one before is deleting old steps."""
    ended = threading.Event()

    def clean() -> None:
        while not ended.is_set():
            pending.clean_abandoned(str(tmp_path))

    threads = [threading.Thread(target=clean) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(60):
            save(tmp_path / str(number), b"content")
            (tmp_path / str(number) / "old").mkdir()  # no checkpoint to be put back
            LocalTarget(str(tmp_path / str(number)), NAMES, io="auto").remove()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    pending.clean_abandoned(str(tmp_path))
    assert os.listdir(tmp_path) == []
