"""Pending directories that outlive their process, and who may go on with one."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastload.errors import CheckpointExists, OptionError, StorageError
from fastload.ext.staging.local_copy import LocalCopy
from fastload.formats.names import NAMES, STAGED_NAME
from fastload.storage import pending
from fastload.storage.local_target import LocalTarget
from fastload.storage.process import Owner
from tests.e2e.forked import forking_python

ID = "0123456789abcdef"
FILES = [("a", 5000), ("b", 0)]

_DIES = """
import os, signal, sys
from fastload.formats.names import NAMES
from fastload.ext.staging.local_copy import LocalCopy
copy = LocalCopy(sys.argv[1], NAMES, io="auto")
copy.resume([("a", 5000), ("b", 0)], "0123456789abcdef", overwrite=False)
copy.write("a", 0, memoryview(bytearray(b"x" * 3000)))
copy.note(b"half of it is there")
print("ready", flush=True)
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def other_process(path: Path, how: str) -> subprocess.Popen[str]:
    python = sys.executable if how == "lives" else forking_python()  # whose pid is that of its program
    process = subprocess.Popen(
        [python, "-c", _DIES, str(path), how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_goes_on_with_what_a_dead_one_left(tmp_path: Path) -> None:
    with other_process(tmp_path / "copy", "dies"):
        pass
    copy = LocalCopy(str(tmp_path / "copy"), NAMES, io="auto")
    assert copy.resume(FILES, ID, overwrite=False) == b"half of it is there"
    copy.note(b", and more")
    copy.write("a", 3000, memoryview(bytearray(b"y" * 2000)))
    receipts = [copy.flush(), {"written": {"a": [(0, 3000)]}}]
    copy.publish(receipts, [(STAGED_NAME, b"{}")])
    copy.close()
    assert (tmp_path / "copy" / "a").read_bytes() == b"x" * 3000 + b"y" * 2000
    assert sorted(os.listdir(tmp_path / "copy")) == [STAGED_NAME, "a", "b"]
    assert os.listdir(tmp_path) == ["copy"]


def test_what_is_missing_is_not_published(tmp_path: Path) -> None:
    copy = LocalCopy(str(tmp_path / "copy"), NAMES, io="auto")
    copy.resume(FILES, ID, overwrite=False)
    with pytest.raises(StorageError, match="no rank wrote it"):
        copy.publish([copy.flush(), {"written": {"a": [(0, 3000)]}}], [(STAGED_NAME, b"{}")])
    copy.close()
    copy = LocalCopy(str(tmp_path / "copy"), NAMES, io="auto")
    assert copy.resume(FILES, ID, overwrite=False) == b""
    copy.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_living_one_is_left_alone(tmp_path: Path) -> None:
    with other_process(tmp_path / "copy", "lives") as process:
        copy = LocalCopy(str(tmp_path / "copy"), NAMES, io="auto")
        with pytest.raises(StorageError, match=f"in use by process {process.pid} on "):
            copy.resume(FILES, ID, overwrite=False)
        assert pending.clean_abandoned(str(tmp_path)) == []
        assert len(list(tmp_path.iterdir())) == 1
        process.kill()


def test_who_saves_next_cleans_it_away(tmp_path: Path) -> None:
    with other_process(tmp_path / "copy", "dies"):
        pass
    target = LocalTarget(str(tmp_path / "other"), NAMES, io="auto")
    target.prepare([("a", 1)], overwrite=False)
    target.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_size_is_made_anew(tmp_path: Path) -> None:
    with other_process(tmp_path / "copy", "dies"):
        pass
    (staged,) = tmp_path.iterdir()
    os.truncate(staged / "data" / "a", 4999)
    (staged / "data" / "b").unlink()
    copy = LocalCopy(str(tmp_path / "copy"), NAMES, io="auto")
    copy.resume(FILES, ID, overwrite=False)
    assert (staged / "data" / "a").read_bytes() == bytes(5000)
    assert (staged / "data" / "b").read_bytes() == b""
    copy.abort()


def test_overwrites_copies_and_checkpoints_only(tmp_path: Path) -> None:
    for name, error in ((STAGED_NAME, None), ("fastload.json", None), ("thesis.tex", OptionError)):
        folder = tmp_path / name.strip(".") / "copy"
        folder.mkdir(parents=True)
        (folder / name).touch()
        with pytest.raises(CheckpointExists):
            LocalCopy(str(folder), NAMES, io="auto").resume(FILES, ID, overwrite=False)
        copy = LocalCopy(str(folder), NAMES, io="auto")
        if error is not None:
            with pytest.raises(error, match=r"has no fastload\.json or \.fastload-stage\.json"):
                copy.resume(FILES, ID, overwrite=True)
        else:
            copy.resume(FILES, ID, overwrite=True)
            copy.abort()
        assert os.listdir(folder) == [name]


def test_one_that_is_just_being_made_is_waited_for(tmp_path: Path) -> None:
    """Between its directory, its owner file, the lock and the name in it, others do not give up."""
    place = tmp_path / f".copy.{ID}.saving"
    place.mkdir(0o700)
    with (place / "owner.json").open("xb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        timer = threading.Timer(0.1, lambda: os.pwrite(owner.fileno(), Owner.here().to_bytes(), 0))
        timer.start()
        with pytest.raises(StorageError, match=f"in use by process {os.getpid()} on "):
            LocalCopy(str(tmp_path / "copy"), NAMES, io="auto").resume(FILES, ID, overwrite=False)
        timer.join()


def test_what_cannot_be_gone_on_with_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_process(tmp_path / "copy", "dies"):
        pass
    real = os.rename

    def broken(source: str, *where: str, **folders: int) -> None:
        if source == "old":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, *where, **folders)

    copy = LocalCopy(str(tmp_path / "copy"), NAMES, io="auto")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", broken)
        with pytest.raises(StorageError, match="EIO"):
            copy.resume(FILES, ID, overwrite=False)
    assert copy.resume(FILES, ID, overwrite=False) == b"half of it is there", "nobody has it"
    copy.abort()
