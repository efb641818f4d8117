"""A parent directory in which another user may make, and plant, what they like."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fastload.errors import StorageError
from fastload.ext.staging.local_copy import LocalCopy
from fastload.formats.names import NAMES, STAGED_NAME
from fastload.storage import folders, pending
from fastload.storage.local import LocalStorage
from fastload.storage.local_target import LocalTarget
from tests.storage.test_local_target import loaded, save

OTHER_UID = 65534
ID = "0123456789abcdef"
PLANTED = f".a.{ID}.saving"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to become another user: NOT TESTED HERE"
)


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Does something in a process of another user's."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            os._exit(0)
        except BaseException:
            logging.getLogger(__name__).exception("in the other user's process")
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory as /dev/shm and /scratch are: everybody's, and sticky."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chmod(root, 0o1777)
    yield root
    shutil.rmtree(root)


@pytest.fixture(params=[(0, OTHER_UID), (OTHER_UID, 0)], ids=["root saves", "root plants"])
def users(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Who saves, and who plants."""
    pair: tuple[int, int] = request.param
    return pair


def home_of(uid: int, shared: Path) -> Path:
    """Makes a directory that only this user can enter, with a file in it."""
    home = shared / f"home{uid}"
    home.mkdir(mode=0o700)
    (home / "file").write_bytes(b"dear")
    for path in (home, home / "file"):
        os.chown(path, uid, uid)
    return home


def old(path: Path) -> None:
    for each in (path, *path.iterdir()):
        os.utime(each, (1, 1), follow_symlinks=False)


def plant(kind: str, place: Path, home: Path) -> None:
    """Leaves something that looks like what a dead save left, or what is to be removed."""
    if kind == "link":
        place.symlink_to(home)
        return
    if kind == "file":
        place.touch()
        return
    place.mkdir(mode=0o777)
    os.chmod(place, 0o777)
    if kind == "owner is a link":
        (place / "owner.json").symlink_to(home / "new")
    elif kind == "owner is a link to a file":
        (place / "owner.json").symlink_to(home / "file")
    elif kind == "owner is a pipe":
        os.mkfifo(place / "owner.json")
    elif kind == "old":
        (place / "old").mkdir()
        (place / "old" / "fastload.json").write_bytes(b"forged")
    elif kind == "data is a link":
        (place / "data").symlink_to(home)
    old(place)


KINDS = [
    "link",
    "file",
    "owner is a link",
    "owner is a link to a file",
    "owner is a pipe",
    "old",
    "data is a link",
]


def copy_whole(path: Path) -> None:
    copy = LocalCopy(str(path), NAMES, io="auto")
    copy.resume([("model.safetensors", 7)], ID, overwrite=False)
    copy.write("model.safetensors", 0, memoryview(b"content"))
    copy.publish([copy.flush()], [(STAGED_NAME, b"{}")])
    copy.close()


@pytest.mark.slow(but=["root saves", "root plants-saving"])
@pytest.mark.parametrize("ending", ["saving", "removed"])
def test_what_another_user_planted_is_left_alone(
    shared: Path, users: tuple[int, int], ending: str, tmp_path: Path
) -> None:
    """A save and a staging in the same directory succeed; nothing is made, changed or deleted elsewhere."""
    saver, planter = users
    home = home_of(saver, shared)
    log = shared / "log"
    log.touch()
    os.chmod(log, 0o666)
    for number, kind in enumerate(KINDS):
        place = shared / f".a.{number:016x}.{ending}"
        as_user(planter, lambda kind=kind, place=place: plant(kind, place, home))
    as_user(planter, lambda: plant("data is a link", shared / f".copy.{ID}.saving", home))
    before = {path: os.lstat(path) for path in shared.rglob("*") if path != log}

    def act() -> None:
        logging.basicConfig(filename=log, force=True)
        for name in ("a", "b"):
            save(shared / name, b"content")
        LocalTarget(str(shared / "b"), NAMES, io="auto").remove()
        copy_whole(shared / "copy")

    as_user(saver, act)
    assert loaded(shared / "a") == b"content"
    assert (shared / "copy" / "model.safetensors").read_bytes() == b"content"
    assert os.listdir(home) == ["file"]
    assert (home / "file").read_bytes() == b"dear"
    for path, was in before.items():
        now = os.lstat(path)
        assert (now.st_ino, now.st_mtime_ns) == (was.st_ino, was.st_mtime_ns), path
    assert sorted(path.name for path in shared.iterdir() if path.name.startswith(".")) == sorted(
        path.name for path in before if path.parent == shared and path.name.startswith(".")
    )
    text = log.read_text()
    for number in range(len(KINDS)):
        lines = [line for line in text.splitlines() if f".a.{number:016x}.{ending}" in line]
        assert len(lines) == 1, text
        assert "is left alone" in lines[0]
    assert f"it belongs to another user (uid {planter})" in text


def test_a_planted_link_at_the_path_itself_is_not_followed(shared: Path, users: tuple[int, int]) -> None:
    """Links of one's own, and of who owns the directory, are."""
    saver, planter = users
    home = home_of(saver, shared)
    os.chown(shared, saver, saver)
    as_user(planter, lambda: (shared / "a").symlink_to(home / "new"))
    as_user(planter, lambda: (shared / "b").symlink_to(home))
    as_user(saver, lambda: (shared / "own").symlink_to(home))

    def act() -> None:
        for path in (shared / "a", shared / "b" / "new"):
            for write in (lambda path=path: save(path, b"content"), lambda path=path: copy_whole(path)):
                with pytest.raises(StorageError, match=rf"link of another user \(uid {planter}\)"):
                    write()
        save(shared / "own" / "new", b"content")

    as_user(saver, act)
    assert sorted(os.listdir(home)) == ["file", "new"]
    assert loaded(home / "new") == b"content"


def test_what_is_ones_own_but_not_of_fastloads_making_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"dear")
    kinds = [kind for kind in KINDS if kind.startswith("owner is")]
    places = [tmp_path / f".a.{number:016x}.saving" for number in range(len(kinds) + 1)]
    for kind, place in zip(kinds, places, strict=False):
        plant(kind, place, tmp_path)
    places[-1].mkdir()
    os.link(victim, places[-1] / "owner.json")
    save(tmp_path / "a", b"content")
    assert loaded(tmp_path / "a") == b"content"
    assert victim.read_bytes() == b"dear"
    assert not (tmp_path / "new").exists()
    assert all(place.exists() for place in places)
    assert len([line for line in caplog.messages if "is left alone" in line]) == len(places)


def test_pending_directories_are_entered_by_their_user_only(shared: Path) -> None:
    old_mask = os.umask(0)
    try:
        target = LocalTarget(str(shared / "a"), NAMES, io="auto")
        target.prepare([("x", 1)], overwrite=False)
        [pending_folder] = shared.glob(".a.*.saving")
        assert stat.S_IMODE(pending_folder.stat().st_mode) == 0o700
        target.write("x", 0, memoryview(b"x"))
        target.publish([target.flush()], [("fastload.json", b"{}")])
        target.close()
        assert stat.S_IMODE((shared / "a").stat().st_mode) == 0o777
    finally:
        os.umask(old_mask)


@pytest.mark.parametrize("ending", ["saving", "removed"])
def test_a_directory_that_turns_into_a_link_while_it_is_deleted(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the parent is not sticky, others can exchange what is in it; as it happens all the time here."""
    victim, place = tmp_path / "victim", tmp_path / f".a.{ID}.{ending}"
    for folder in (victim / "data", place / "data"):
        folder.mkdir(parents=True)
        for number in range(300):
            (folder / f"{number}").touch()
    (victim / "dear").touch()
    (tmp_path / "link").symlink_to(victim)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            with suppress(OSError):  # it is gone
                folders.exchange(str(place), -1, str(tmp_path / "link"), -1)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(20):
            pending.clean_abandoned(str(tmp_path))
    finally:
        ended.set()
        thread.join()
    assert len(os.listdir(victim / "data")) == 300
    assert (victim / "dear").exists()


def test_a_link_to_where_one_may_not_look_is_passed_over_unless_it_is_wanted(shared: Path) -> None:
    home = home_of(0, shared)
    (shared / "a.safetensors").write_bytes(b"x")
    (shared / "notes").symlink_to(home / "file")
    storage = LocalStorage(str(shared))

    def act() -> None:
        assert storage.list() == ["a.safetensors", "notes"]
        assert storage.stat("a.safetensors") is not None
        with pytest.raises(StorageError, match="notes: Permission denied"):
            storage.stat("notes")

    as_user(OTHER_UID, act)
    storage.close()
