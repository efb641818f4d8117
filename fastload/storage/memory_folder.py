"""Recent checkpoints in the memory of this host, or on a disk of its own: where they are, and whose.

Below a place such as ``/dev/shm`` each user has one folder, ``fastload-UID``, that nobody else may enter, and
in it one folder for each job. Whoever works with that holds a lock on the file ``job`` in it, which the
system lets go of when the process ends, however it ends: so what dead jobs left can be told from the rest.

A generation is a folder with the files of a checkpoint. They have holes where this host has no share; once
it counts there is a file ``generation.json``, written last.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from fastload.base.memory import available_bytes
from fastload.errors import StorageError
from fastload.storage import folders
from fastload.storage.folders import open_file, open_folder, opened_folder, os_errors
from fastload.storage.mounts import IN_MEMORY_TYPES, file_system_type, memory_mounts
from fastload.storage.process import Owner

RECORD_NAME = "generation.json"
"""What this host has of a generation: without it, the generation does not count here."""
JOB_NAME = "job"
"""Of which root the checkpoints are; locked by the ranks of the job."""
GENERATION = re.compile(r"[0-9a-f]{16}")
_JOB = re.compile(r"[0-9a-f]{16}")
_PLAN_NAME = "plan"  # which ranges of the files are to be here: a folder with equal ones can be used again
_MAKING_NAME = "making"
_SPARE_PART = 20  # one part of what is free stays free


def find_memory() -> str:
    """Returns where there is most room in memory: ``/dev/shm``, unless another tmpfs is larger.

    Raises:
        StorageError: There is none that this user may write to.
    """
    sizes: dict[str, int] = {}
    for place in ["/dev/shm", *memory_mounts()]:
        with suppress(OSError, StorageError):
            if os.access(place, os.W_OK | os.X_OK):
                os.close(_open_place(place))
                found = os.statvfs(place)
                sizes.setdefault(place, found.f_blocks * found.f_frsize)
    if not sizes:
        raise StorageError("there is no tmpfs that this user may write to: name a directory", url="/dev/shm")
    return max(sizes, key=lambda place: sizes[place])


def _open_place(memory: str) -> int:
    """Opens a directory in which nobody else can put something in the place of what is this user's.

    Raises:
        StorageError: Others could.
        OSError: There is none.
    """
    folders.require_trusted_links(memory)
    place = os.open(memory, os.O_RDONLY | os.O_DIRECTORY)
    found = os.fstat(place)
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if is_open or found.st_uid not in (0, os.geteuid()):
        os.close(place)
        raise StorageError("other users could replace what is in it: it is theirs, or not sticky", url=memory)
    return place


def _open_own(memory: str, *, make: bool) -> int:
    """Opens this user's folder there, which no other user may enter; arguments as for `_open_place`."""
    name = f"fastload-{os.geteuid()}"
    place = _open_place(memory)
    try:
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=place)
        own = open_folder(name, place)
    finally:
        os.close(place)
    found = os.fstat(own)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(own)
        why = "it is not this user's alone: another one may have planted it"
        raise StorageError(why, url=f"{memory}/{name}")
    return own


def _remove_job(name: str, own: int) -> bool:
    """Removes the folder of a job, if no process of it lives."""
    with opened_folder(name, own) as folder:
        held = _lock(folder)
        if held is None:
            return False
        try:
            folders.empty(folder, last=JOB_NAME)
            os.rmdir(name, dir_fd=own)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # else the job has just begun anew, in an empty folder
                raise
        finally:
            _unlock(held)
    return True


def _lock(folder: int) -> int | None:
    """Keeps processes from taking part in a job; None if one that does lives.

    Raises:
        FileNotFoundError: It is being removed.
    """
    job = open_file(JOB_NAME, folder, os.O_RDWR)
    if folders.lock(job):
        return job
    os.close(job)
    return None


def _unlock(file: int) -> None:
    """Lets go of a lock, and of the file: a child that was forked meanwhile has the same lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _records(folder: int) -> Iterator[tuple[str, bytes]]:
    """Yields the name of each generation, and what this host has of it; nothing if it does not count."""
    for name in filter(GENERATION.fullmatch, folders.names(folder)):
        yield name, folders.read_small(f"{name}/{RECORD_NAME}", folder)


class Home(NamedTuple):
    """Where what a rank keeps is, whatever the host is called.

    Attributes:
        machine: What is lost together: all that has the same kernel.
        folder: A folder there.
    """

    machine: str
    folder: str


class JobFolder:
    """What one job has on this host, open for one of its ranks.

    Args:
        memory: The place.
        name: Of its run: 16 hex digits.
        root: Where that has its checkpoints.

    Raises:
        StorageError: It cannot be made, or another user could reach it.
    """

    def __init__(self, memory: str, name: str, root: str) -> None:
        self.memory = memory
        self.path = os.path.join(memory, f"fastload-{os.geteuid()}", name)
        self._name = name
        self._root = root
        self._own, self._folder, self._job = -1, -1, -1
        try:
            with os_errors(self.path):
                self._own = _open_own(memory, make=True)
                while self._job < 0:
                    self._open(root)
        except BaseException:
            self.close()
            raise

    def _open(self, root: str) -> None:
        """Takes part in the job; to be tried again if somebody has just removed what it left."""
        with suppress(FileExistsError):
            os.mkdir(self._name, 0o700, dir_fd=self._own)
        with suppress(FileNotFoundError):
            folder = open_folder(self._name, self._own)
            job = -1
            try:
                job = open_file(JOB_NAME, folder, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(job, fcntl.LOCK_SH)
                now, there = os.fstat(job), os.stat(JOB_NAME, dir_fd=folder, follow_symlinks=False)
                if not os.path.samestat(now, there):
                    return
                os.ftruncate(job, os.pwrite(job, os.fsencode(root), 0))
                self._folder, self._job, folder, job = folder, job, -1, -1
            finally:
                for number in (folder, job):
                    if number >= 0:
                        os.close(number)

    @property
    def home(self) -> Home:
        """Where it is: the same for all ranks that see this very folder."""
        found = os.fstat(self._folder)
        return Home(Owner.here().kernel, f"{found.st_dev}:{found.st_ino}")

    def touch(self) -> None:
        """Notes that the job still uses it."""
        os.utime(self._job)

    def records(self) -> dict[str, bytes]:
        """Returns the record of each generation that counts here, by the generation's name."""
        with os_errors(self.path):
            return {name: text for name, text in _records(self._folder) if text}

    def place(self, name: str) -> str:
        """Returns the path of a generation."""
        return os.path.join(self.path, name)

    def make(self, name: str, plan: str, files: Sequence[tuple[str, int, bytes]], needed_bytes: int) -> None:
        """Makes the folder of a new generation, if no rank of this host has; removes what does not count.

        One of those is used again if the same ranges of the same files are to be in it: its memory need not
        be asked of the system once more.

        Args:
            name: Of the generation.
            plan: Says which ranges of which files are to be here.
            files: Name, size and first bytes of each.
            needed_bytes: Memory that all ranks of this host need for it.

        Raises:
            StorageError: There is no room.
        """
        with os_errors(self.path), self._making():
            if folders.find(name, self._folder) is not None:
                return
            spare = ""
            for other in folders.names(self._folder):
                if not GENERATION.fullmatch(other) or folders.find(f"{other}/{RECORD_NAME}", self._folder):
                    continue
                if not spare and folders.read_small(f"{other}/{_PLAN_NAME}", self._folder) == plan.encode():
                    spare = other
                else:
                    folders.delete(other, self._folder)
            if spare:
                os.rename(spare, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                return
            self._require_room(needed_bytes)
            self._fill(name, plan, files)

    def _fill(self, name: str, plan: str, files: Sequence[tuple[str, int, bytes]]) -> None:
        """Makes the folder of a generation, with files that are holes but for their headers."""
        os.mkdir(name, 0o700, dir_fd=self._folder)
        try:
            with opened_folder(name, self._folder) as folder:
                for file, nbytes, head in files:
                    descriptor = open_file(file, folder, os.O_RDWR | os.O_CREAT, 0o600)
                    try:
                        os.ftruncate(descriptor, nbytes)
                        folders.write_all(descriptor, 0, head)
                    finally:
                        os.close(descriptor)
                folders.put(_PLAN_NAME, plan.encode(), folder, mode=0o600, durable=False)
        except BaseException:
            with suppress(OSError):
                folders.delete(name, self._folder)
            raise

    def _require_room(self, needed_bytes: int) -> None:
        free, what = self._room()
        if needed_bytes > free and remove_dead(self.memory, older_s=0.0, but=self._name, root=self._root):
            free, what = self._room()  # without what the run had that was in this root before
        if needed_bytes > free:
            raise StorageError(
                f"a generation needs {needed_bytes} bytes on this host, of {free} bytes {what}",
                url=self.path,
            )

    def _room(self) -> tuple[int, str]:
        """Returns how many bytes may be taken, and of what."""
        found = os.fstatvfs(self._folder)
        free, what = found.f_bavail * found.f_frsize, f"free in {self.memory}"
        available = available_bytes()
        if file_system_type(self.path) in IN_MEMORY_TYPES and available is not None and available < free:
            free, what = available, "of memory available"
        return free - free // _SPARE_PART, what

    def record(self, name: str, small_files: Sequence[tuple[str, bytes]], record: bytes) -> None:
        """Has a generation count on this host.

        Args:
            name: Of the generation.
            small_files: Name and content of further files of it.
            record: What the host has of it.

        Raises:
            StorageError: It cannot be written.
        """
        with os_errors(self.place(name)):
            with opened_folder(name, self._folder) as folder:
                for file, content in (*small_files, (RECORD_NAME, record)):
                    folders.put(file, content, folder, mode=0o600, durable=False)
            self.touch()

    def retire(self, keep: str) -> None:
        """Has no other generation count on this host; see `make` for what comes of them."""
        with os_errors(self.path), self._making():
            for name in folders.names(self._folder):
                if GENERATION.fullmatch(name) and name != keep:
                    with suppress(FileNotFoundError):
                        os.unlink(f"{name}/{RECORD_NAME}", dir_fd=self._folder)

    def discard(self, name: str) -> None:
        """Removes a generation, if it is there."""
        with os_errors(self.path), self._making(), suppress(FileNotFoundError):
            folders.delete(name, self._folder)

    def open(self, name: str) -> int:
        """Opens the folder of a generation; the caller closes the descriptor."""
        with os_errors(self.place(name)):
            return open_folder(name, self._folder)

    def close(self, *, remove: bool = False) -> None:
        """Lets go of it.

        Args:
            remove: Removes all of it, if this is the last rank of the host to close it.
        """
        if self._job >= 0:
            _unlock(self._job)
        if self._folder >= 0:
            os.close(self._folder)
        self._job = self._folder = -1
        if remove and self._own >= 0:
            with os_errors(self.path), suppress(FileNotFoundError):
                _remove_job(self._name, self._own)
        if self._own >= 0:
            os.close(self._own)
        self._own = -1

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Keeps the other ranks of this host from changing what there is."""
        making = open_file(_MAKING_NAME, self._folder, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(making, fcntl.LOCK_EX)
            yield
        finally:
            _unlock(making)


@dataclass(frozen=True)
class JobUsage:
    """What a job has on this host.

    Attributes:
        path: Its folder.
        root: Of which checkpoints.
        is_alive: Whether a process of the job runs on this host.
        used_s: When it was last used, in seconds since 1970.
        nbytes: Memory that it takes.
        records: Name of each generation, and what its record says; empty while it does not count.
    """

    path: str
    root: str
    is_alive: bool
    used_s: float
    nbytes: int
    records: tuple[tuple[str, bytes], ...]


def find_jobs(memory: str) -> list[JobUsage]:
    """Returns what jobs of this user have there.

    Raises:
        StorageError: It cannot be looked at, or is not this user's alone.
    """
    try:
        with os_errors(memory):
            own = _open_own(memory, make=False)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    found = []
    try:
        for name in filter(_JOB.fullmatch, folders.names(own)):
            path = os.path.join(memory, f"fastload-{os.geteuid()}", name)
            with os_errors(path), suppress(FileNotFoundError, NotADirectoryError):
                found.append(_look(name, own, path))
        return found
    finally:
        os.close(own)


def _look(name: str, own: int, path: str) -> JobUsage:
    with opened_folder(name, own) as folder:
        if (held := _lock(folder)) is not None:
            _unlock(held)
        return JobUsage(
            path,
            root=os.fsdecode(folders.read_small(JOB_NAME, folder)),
            is_alive=held is None,
            used_s=os.stat(JOB_NAME, dir_fd=folder, follow_symlinks=False).st_mtime,
            nbytes=_allocated(folder),
            records=tuple(_records(folder)),
        )


def remove_dead(memory: str, *, older_s: float, but: str = "", root: str | None = None) -> list[JobUsage]:
    """Removes what jobs have left of which no process lives on this host any more; returns what it was.

    Args:
        memory: The place.
        older_s: Only what was last used so many seconds ago, or more.
        but: Name of a job that is left alone.
        root: Only what had its checkpoints there.

    Raises:
        StorageError: As for `find_jobs`.
    """
    removed = []
    for job in find_jobs(memory):
        name = os.path.basename(job.path)
        if job.is_alive or name == but or time.time() - job.used_s < older_s:
            continue
        if root is not None and job.root != root:
            continue
        with os_errors(job.path), suppress(FileNotFoundError):
            own = _open_own(memory, make=False)
            try:
                if _remove_job(name, own):
                    removed.append(job)
            finally:
                os.close(own)
    return removed


def _allocated(folder: int) -> int:
    total = 0
    for _, _, names, inside in os.fwalk(".", dir_fd=folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += 512 * os.stat(name, dir_fd=inside, follow_symlinks=False).st_blocks
    return total
