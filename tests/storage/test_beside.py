"""What a user keeps beside a checkpoint, on local file systems: it outlives that checkpoint."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import OptionError
from fastload.formats.names import RECORD_NAME
from fastload.storage import folders
from fastload.storage.destination import LocalDestination
from tests.storage.test_local_target import NAME, save

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory another group")


def own(content: bytes) -> dict[str, bytes]:
    return {NAME: content, RECORD_NAME: content[:8]}


def found(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(params=["exchanged", "moved aside", "copied"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the file system exchanges names, and whether it links files."""
    unable = {"moved aside": (folders, "exchange"), "copied": (os, "link")}
    if request.param in unable:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(*unable[request.param], refuse)
    return str(request.param)


def test_files_and_links_of_the_users_stay(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    save(path, b"old")
    (path / "config.json").write_text("{}")
    os.chmod(path / "config.json", 0o640)
    os.utime(path / "config.json", ns=(1, 2_000_000_001))
    (path / "link").symlink_to("../elsewhere")
    (path / ".hidden").touch()
    before = (path / "config.json").stat()
    for number in range(2):
        save(path, b"new%d" % number, overwrite=True)
    assert sorted(os.listdir(path)) == sorted([".hidden", "config.json", "link", NAME, RECORD_NAME])
    after = (path / "config.json").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert after.st_ino == before.st_ino or how == "copied"
    assert os.readlink(path / "link") == "../elsewhere"
    assert (path / NAME).read_bytes() == b"new1"
    assert os.listdir(tmp_path) == ["a"]


@needs_root
@pytest.mark.parametrize("content", [b"old", b""], ids=["replaced", "empty before"])
def test_mode_and_group_of_the_directory_stay(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.mkdir()
    if content:
        save(path, content)
    os.chown(path, 1234, 4321)
    os.chmod(path, 0o2771)
    save(path, b"new", overwrite=True)
    now = path.stat()
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == (1234, 4321, 0o2771)


def at_the_last_instant(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Has something happen just before the new directory takes the place of the old one."""
    real = LocalDestination._exchange

    def late(self: LocalDestination, held: Any) -> str:
        act()
        return real(self, held)

    monkeypatch.setattr(LocalDestination, "_exchange", late)


def test_what_changes_at_the_last_instant_is_kept_too(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    save(path, b"old")
    for name in ("written", "replaced", "deleted"):
        (path / name).write_text("before")

    def change() -> None:
        with open(path / "written", "a") as file:
            file.write(" and after")
        (tmp_path / "other").write_text("other")
        os.rename(tmp_path / "other", path / "replaced")
        (path / "deleted").unlink()
        (path / "added").write_text("added")

    at_the_last_instant(monkeypatch, change)
    save(path, b"new", overwrite=True)
    users = {"written": b"before and after", "replaced": b"other", "added": b"added"}
    assert found(path) == {**own(b"new"), **users}
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["ema.safetensors", "folder"])
def test_what_cannot_be_kept_and_comes_at_the_last_instant_undoes_it(
    tmp_path: Path, how: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    save(path, b"old")
    (path / "config.json").write_bytes(b"{}")
    act = (path / name).mkdir if name == "folder" else (path / name).touch
    at_the_last_instant(monkeypatch, act)
    with pytest.raises(OptionError, match=name):
        save(path, b"new", overwrite=True)
    assert sorted(os.listdir(path)) == sorted([*own(b"old"), "config.json", name])
    assert (path / NAME).read_bytes() == b"old"


def test_a_damaged_record_says_nothing_but_names_do(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"):
        (path / name).write_bytes(b"x")
    (path / RECORD_NAME).write_bytes(b'{"files": 1')
    save(path, b"new", overwrite=True)
    assert found(path) == {**own(b"new"), "config.json": b"x"}


def test_a_record_that_names_everything_takes_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, b"old")
    (tmp_path / "victim").write_bytes(b"x")
    names = [{"name": name} for name in ("../victim", str(tmp_path / "victim"), NAME, "", ".", "..")]
    (path / RECORD_NAME).write_text(json.dumps({"files": names}))
    save(path, b"new", overwrite=True)
    assert found(path) == own(b"new")
    assert (tmp_path / "victim").read_bytes() == b"x"
