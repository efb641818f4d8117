"""What jobs have in the memory of a host: nobody else's, and removed once it is dead and old."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from fastload.errors import StorageError
from fastload.ext.memory.folder import RECORD_NAME, JobFolder, find_jobs, find_memory, remove_dead
from fastload.ext.memory.target import HostPart, MemoryTarget
from tests.e2e.forked import forking_python

JOB, OTHER = "0" * 16, "f" * 16
ONE, TWO = "1" * 16, "2" * 16
NBYTES = 3 << 20


def room(plan: str = "p", nbytes: int = NBYTES) -> HostPart:
    return HostPart(plan, {"a": b"head"}, nbytes, [("a", 1 << 20, NBYTES - (1 << 20))])


def make(job: JobFolder, name: str, plan: str = "p", nbytes: int = NBYTES) -> MemoryTarget:
    target = MemoryTarget(job, name, "memory")
    target.expect(room(plan, nbytes))
    target.prepare([("a", NBYTES)], overwrite=True)
    return target


def names(job: JobFolder) -> set[str]:
    return {name for name in os.listdir(job.path) if len(name) == 16}


def test_only_this_user_gets_in(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        job = JobFolder(str(tmp_path), JOB, "root")
        target = make(job, ONE)
        job.record(ONE, [("small", b"x")], b"record")
    finally:
        os.umask(before)
    for folder, folders, files in os.walk(tmp_path):
        modes = {stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) for name in folders}
        assert modes <= {0o700}
        assert {stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) for name in files} <= {0o600}
    target.close()
    job.close()


@pytest.mark.parametrize("how", ["mode", "owner", "link", "place", "place of another"])
def test_what_another_user_could_have_planted_is_refused(tmp_path: Path, how: str) -> None:
    own = tmp_path / f"fastload-{os.geteuid()}"
    if how == "mode":
        own.mkdir(mode=0o750)
    elif how == "owner":
        own.mkdir(mode=0o700)
        os.chown(own, 4242, 4242)
    elif how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif how == "place":
        tmp_path.chmod(0o777)
    else:
        os.chown(tmp_path, 4242, 4242)
    with pytest.raises(StorageError):
        JobFolder(str(tmp_path), JOB, "root")
    if how != "link":
        with pytest.raises(StorageError):
            find_jobs(str(tmp_path)) if how != "place" else JobFolder(str(tmp_path), JOB, "root")


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none: there is no such directory on this host: make it"):
        JobFolder(str(tmp_path / "none"), JOB, "root")


def test_a_sticky_place_of_everybody_will_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    JobFolder(str(tmp_path), JOB, "root").close()
    assert find_memory()  # as /dev/shm is


def test_a_generation_counts_once_it_is_recorded_and_the_one_before_makes_room(tmp_path: Path) -> None:
    job = JobFolder(str(tmp_path), JOB, "root")
    make(job, ONE).close()
    assert job.records() == {}
    job.record(ONE, [], b"first")
    assert job.records() == {ONE: b"first"}
    inode = os.stat(os.path.join(job.place(ONE), "a")).st_ino
    make(job, TWO).close()
    assert names(job) == {ONE, TWO}
    job.record(TWO, [], b"second")
    job.retire(TWO)
    assert job.records() == {TWO: b"second"}
    third = make(job, "3" * 16)
    assert names(job) == {TWO, "3" * 16}
    assert os.stat(os.path.join(job.place("3" * 16), "a")).st_ino == inode, "its memory is used again"
    third.abort()
    assert names(job) == {TWO}
    make(job, "4" * 16, plan="another").close()
    make(job, "5" * 16, plan="yet another").close()
    assert names(job) == {TWO, "5" * 16}, "what is no use for what comes is removed first"
    job.close(remove=True)
    assert not os.path.exists(job.path)


def test_holes_take_no_memory_and_what_is_reserved_does(tmp_path: Path) -> None:
    job = JobFolder(str(tmp_path), JOB, "root")
    target = make(job, ONE)
    found = os.stat(os.path.join(job.place(ONE), "a"))
    assert found.st_size == NBYTES
    assert 2 << 20 <= 512 * found.st_blocks < NBYTES
    with pytest.raises(StorageError, match="an in-memory checkpoint needs"):
        make(job, TWO, plan="large", nbytes=1 << 50)
    assert names(job) == set(), "that would have made room for it, and may have been the trouble"
    target.close()
    job.close()


LIVING = """
import os, sys
from fastload.ext.memory.folder import JobFolder
job = JobFolder(*sys.argv[1:])
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_what_dead_jobs_left_goes_and_never_what_living_ones_have(tmp_path: Path) -> None:
    command = [forking_python(), "-c", LIVING, str(tmp_path), OTHER, "other root"]
    living = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert living.stdout is not None
        pid = int(living.stdout.readline())
        own = JobFolder(str(tmp_path), JOB, "root")
        make(own, ONE).close()
        own.record(ONE, [], b"record")
        own.close()
        [dead, other] = find_jobs(str(tmp_path))
        assert (dead.root, dead.is_alive, dead.records) == ("root", False, ((ONE, b"record"),))
        assert dead.nbytes >= 2 << 20
        assert (other.root, other.is_alive) == ("other root", True)
        assert remove_dead(str(tmp_path), older_s=3600) == [], "it may still be restarted"
        assert remove_dead(str(tmp_path), older_s=0, but=JOB) == []
        os.utime(os.path.join(other.path, "job"), (0, 0))
        assert [left.root for left in remove_dead(str(tmp_path), older_s=0)] == ["root"]
        assert [left.root for left in find_jobs(str(tmp_path))] == ["other root"]
        os.kill(pid, signal.SIGKILL)
        living.wait(60)
        assert [left.root for left in remove_dead(str(tmp_path), older_s=3600)] == ["other root"]
    finally:
        living.kill()
        living.communicate()
    assert find_jobs(str(tmp_path)) == []
    assert find_jobs(str(tmp_path / "nothing")) == []


def test_what_had_the_same_root_before_makes_room(tmp_path: Path) -> None:
    """Its root was deleted, or moved away. As long as there is room it stays for that."""
    elsewhere = "3" * 16
    for name, root in ((JOB, "root"), (elsewhere, "another root")):
        with closing(JobFolder(str(tmp_path), name, root)) as dead:
            make(dead, ONE).close()
            dead.record(ONE, [], b"record")
    with closing(JobFolder(str(tmp_path), OTHER, "root")) as job:
        make(job, TWO).close()
        assert len(find_jobs(str(tmp_path))) == 3
        with pytest.raises(StorageError, match="an in-memory checkpoint needs 1152921504606846976 bytes"):
            make(job, ONE, "q", nbytes=1 << 60)
        assert [left.root for left in find_jobs(str(tmp_path))] == ["another root", "root"]
        assert find_jobs(str(tmp_path))[1].is_alive


def test_the_last_rank_of_a_host_removes_it(tmp_path: Path) -> None:
    first, second = (JobFolder(str(tmp_path), JOB, "root") for _ in range(2))
    make(first, ONE).close()
    second.record(ONE, [], b"record")
    first.close(remove=True)
    assert os.path.exists(os.path.join(second.place(ONE), RECORD_NAME))
    second.close(remove=True)
    assert not os.path.exists(first.path)


@contextmanager
def forked() -> Iterator[None]:
    """Has a child live meanwhile that has all descriptors, such as a worker of a data loader."""
    waits, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    try:
        yield
    finally:
        os.close(ends)
        os.waitpid(child, 0)


@pytest.mark.timeout(20)
def test_what_a_child_has_inherited_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = (JobFolder(str(tmp_path), name, "root") for name in (JOB, OTHER))
    with ExitStack() as children:
        with monkeypatch.context() as patch:
            patch.setattr("fastload.storage.folders.names", lambda _: children.enter_context(forked()) or ())
            job.retire("")  # the child is made meanwhile
        job.retire("")  # which would wait for a lock that the child has
        job.close(remove=True)
        assert not os.path.exists(job.path)
        other.close()
        assert [left.is_alive for left in find_jobs(str(tmp_path))] == [False]


def test_ranks_that_begin_at_once_remove_what_is_left(tmp_path: Path) -> None:
    """All ranks of a host do, and the job that has left it may begin anew meanwhile."""

    def begin(number: int) -> None:
        if number % 4:
            remove_dead(str(tmp_path), older_s=0)
            return
        job = JobFolder(str(tmp_path), JOB, "root")
        there = os.stat(job.path)
        assert job.host_directory.folder == f"{there.st_dev}:{there.st_ino}", "others can find it"
        job.close()

    with ThreadPoolExecutor(8) as ranks:
        for turn in range(20):
            job = JobFolder(str(tmp_path), JOB, "root")
            checkpoint = f"{turn:016x}"  # some come before other files when the folder is deleted, some after
            make(job, checkpoint).close()
            job.record(checkpoint, [(f"small-{number}", b"x") for number in range(50)], b"record")
            job.close()
            list(ranks.map(begin, range(8)))
    remove_dead(str(tmp_path), older_s=0)
    assert find_jobs(str(tmp_path)) == []


def test_a_root_that_is_not_utf8(tmp_path: Path) -> None:
    root = os.fsdecode(b"/runs/\xff")
    with closing(JobFolder(str(tmp_path), JOB, root)):
        (job,) = find_jobs(str(tmp_path))
        assert job.root == root
    assert [job.root for job in remove_dead(str(tmp_path), older_s=0.0, root=root)] == [root]
