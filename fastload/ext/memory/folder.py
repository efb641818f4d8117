"""Folders of in-memory checkpoints on this host, in tmpfs or on a local disk.

Below a directory such as ``/dev/shm`` each user has a private folder ``fastload-UID``, with one folder for
each job. Every process of a job holds a shared lock on the file ``job`` in it. The kernel releases the lock
when the process ends, so folders of dead jobs can be recognized.

An in-memory checkpoint is a folder with its files, which have holes where this host has no share. It is
complete once it has a file ``manifest.json``, which is written last.
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

from fastload.base.memory import memory_bytes
from fastload.errors import StorageError
from fastload.storage import folders
from fastload.storage.folders import closing, open_file, open_folder, os_errors
from fastload.storage.mounts import IN_MEMORY_TYPES, file_system_type, mounts
from fastload.storage.process import Owner

RECORD_NAME = "manifest.json"
"""The host manifest of a checkpoint: without it, the checkpoint is not complete here."""
JOB_NAME = "job"
"""Holds the root of the checkpoints; locked by the ranks of the job."""
NAME = re.compile(r"[0-9a-f]{16}")
"""The name of a run, of the folder of a job, and of that of a checkpoint."""
_PLAN_NAME = "plan"  # identifies the ranges on this host: a folder with equal ones is reused
_MAKING_NAME = "making"
_OF_THE_SYSTEM = ("/run/", "/var/run/", "/sys/", "/proc/", "/etc/", "/dev/")
_SPARE_PART = 20  # share of free memory to leave free


def find_memory() -> str:
    """Returns the largest tmpfs that this user may write to; ``/dev/shm`` if several are equal.

    Raises:
        StorageError: There is none.
    """
    sizes: dict[str, int] = {}
    for place in ["/dev/shm", *_memory_mounts()]:
        with suppress(OSError, StorageError):
            if os.access(place, os.W_OK | os.X_OK):
                os.close(_open_place(place))
                found = os.statvfs(place)
                sizes.setdefault(place, found.f_blocks * found.f_frsize)
    if not sizes:
        raise StorageError("there is no tmpfs that this user may write to: name a directory", url="/dev/shm")
    return max(sizes, key=lambda place: sizes[place])


def _memory_mounts() -> list[str]:
    """Returns the mount points of tmpfs, without those of the operating system itself."""
    return [
        point for point, kind, _ in mounts() if kind == "tmpfs" and not f"{point}/".startswith(_OF_THE_SYSTEM)
    ]


def _open_place(memory: str) -> int:
    """Opens a directory where no other user can replace files of this one.

    Raises:
        StorageError: Other users could.
        OSError: There is no such directory.
    """
    folders.require_trusted_links(memory)
    place = os.open(memory, os.O_RDONLY | os.O_DIRECTORY)
    found = os.fstat(place)
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if is_open or found.st_uid not in (0, os.geteuid()):
        os.close(place)
        raise StorageError(
            "other users could replace its files: the directory is theirs, or not sticky", url=memory
        )
    return place


def _open_own(memory: str, *, make: bool) -> int:
    """Opens the private folder of this user in such a directory."""
    name = f"fastload-{os.geteuid()}"
    with closing(_open_place(memory)) as place:
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=place)
        own = open_folder(name, place)
    found = os.fstat(own)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(own)
        why = "it is not this user's alone: another one may have planted it"
        raise StorageError(why, url=f"{memory}/{name}")
    return own


def identify(memory: str) -> HostDirectory:
    """Returns the identity of a directory such as ``/dev/shm``: equal for all processes that see it.

    Raises:
        StorageError: There is none, or other users could replace its files.
    """
    with os_errors(memory), closing(_open_place(memory)) as place:
        return _identity(place)


def _identity(folder: int) -> HostDirectory:
    found = os.fstat(folder)
    return HostDirectory(Owner.here().kernel, f"{found.st_dev}:{found.st_ino}")


def _remove_job(name: str, own: int) -> bool:
    """Removes the folder of a job, if no process of it runs."""
    with closing(open_folder(name, own)) as folder:
        held = _lock(folder)
        if held is None:
            return False
        try:
            folders.empty(folder, last=JOB_NAME)
            os.rmdir(name, dir_fd=own)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # otherwise the job has just restarted, with an empty folder
                raise
        finally:
            _unlock(held)
    return True


def _lock(folder: int) -> int | None:
    """Locks the folder of a dead job; None if a process of the job runs.

    Raises:
        FileNotFoundError: The folder is being removed.
    """
    job = open_file(JOB_NAME, folder, os.O_RDWR)
    if folders.lock(job):
        return job
    os.close(job)
    return None


def _unlock(file: int) -> None:
    """Unlocks and closes a file: to close it is not enough if a forked child has it open, too."""
    try:
        fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _records(folder: int) -> Iterator[tuple[str, bytes]]:
    """Yields name and manifest of each checkpoint; the manifest is empty if it is not complete."""
    for name in filter(NAME.fullmatch, folders.names(folder)):
        yield name, folders.read_small(f"{name}/{RECORD_NAME}", folder)


class HostDirectory(NamedTuple):
    """Identity of a folder in the memory of a host, whatever the name of the host.

    Attributes:
        machine: Boot id of the kernel: ranks with the same one fail together.
        folder: Device and inode of the folder.
    """

    machine: str
    folder: str


class JobFolder:
    """The folder of a job on this host, open in one of its ranks.

    Args:
        memory: Directory of the user's folder, such as ``/dev/shm``.
        name: Name of the run: 16 hex digits.
        root: Root of the run's checkpoints.

    Raises:
        StorageError: It cannot be created, or another user could reach it.
    """

    def __init__(self, memory: str, name: str, root: str) -> None:
        self.memory = memory
        self.path = os.path.join(memory, f"fastload-{os.geteuid()}", name)
        self._name = name
        self._root = root
        self._own, self._folder, self._job = -1, -1, -1
        try:
            with os_errors(self.path):
                self._own = self._open_parent()
                while self._job < 0:
                    self._open(root)
        except BaseException:
            self.close()
            raise

    def _open_parent(self) -> int:
        try:
            return _open_own(self.memory, make=True)
        except FileNotFoundError:
            raise StorageError(
                "there is no such directory on this host: make it on each host, or pass memory='auto'",
                url=self.memory,
            ) from None

    def _open(self, root: str) -> None:
        """Creates or joins the folder; leaves it unopened if another process just removed it."""
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
    def host_directory(self) -> HostDirectory:
        """Identity of the folder: equal on all ranks that see it."""
        return _identity(self._folder)

    def touch(self) -> None:
        """Sets the time of last use."""
        os.utime(self._job)

    def records(self) -> dict[str, bytes]:
        """Returns the manifests of complete checkpoints, by name."""
        with os_errors(self.path):
            return {name: text for name, text in _records(self._folder) if text}

    def place(self, name: str) -> str:
        """Returns the path of a checkpoint."""
        return os.path.join(self.path, name)

    def make(self, name: str, plan: str, files: Sequence[tuple[str, int, bytes]], needed_bytes: int) -> None:
        """Creates the folder of a new checkpoint, unless a rank of this host has; removes incomplete ones.

        An incomplete checkpoint with the same plan is renamed instead, which reuses its memory.

        Args:
            name: Name of the checkpoint.
            plan: Text that identifies the ranges on this host.
            files: Name, size in bytes and first bytes of each file.
            needed_bytes: Memory that all ranks of this host need.

        Raises:
            StorageError: There is not enough memory.
        """
        with os_errors(self.path), self._making():
            if folders.find(name, self._folder) is not None:
                return
            spare = ""
            for other in folders.names(self._folder):
                if not NAME.fullmatch(other) or folders.find(f"{other}/{RECORD_NAME}", self._folder):
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
        """Creates the folder of a checkpoint, with sparse files that have only their headers."""
        os.mkdir(name, 0o700, dir_fd=self._folder)
        try:
            with closing(open_folder(name, self._folder)) as folder:
                for file, nbytes, head in files:
                    with closing(open_file(file, folder, os.O_RDWR | os.O_CREAT, 0o600)) as descriptor:
                        os.ftruncate(descriptor, nbytes)
                        folders.write_all(descriptor, 0, head)
                folders.put(_PLAN_NAME, plan.encode(), folder, mode=0o600, durable=False)
        except BaseException:
            with suppress(OSError):
                folders.delete(name, self._folder)
            raise

    def _require_room(self, needed_bytes: int) -> None:
        free, what = self._room()
        if needed_bytes > free and remove_dead(self.memory, older_s=0.0, but=self._name, root=self._root):
            free, what = self._room()  # without the memory of an earlier run in this root
        if needed_bytes > free:
            raise StorageError(
                f"an in-memory checkpoint needs {needed_bytes} bytes on this host, of {free} bytes {what}",
                url=self.path,
            )

    def _room(self) -> tuple[int, str]:
        """Returns the number of bytes available, and a description of their kind."""
        found = os.fstatvfs(self._folder)
        free, what = found.f_bavail * found.f_frsize, f"free in {self.memory}"
        _, available = memory_bytes()
        if file_system_type(self.path) in IN_MEMORY_TYPES and available is not None and available < free:
            free, what = available, "of memory available"
        return free - free // _SPARE_PART, what

    def record(self, name: str, small_files: Sequence[tuple[str, bytes]], record: bytes) -> None:
        """Completes a checkpoint on this host.

        Args:
            name: Name of the checkpoint.
            small_files: Name and content of its small files.
            record: The host manifest.

        Raises:
            StorageError: Storage failed.
        """
        with os_errors(self.place(name)):
            with closing(open_folder(name, self._folder)) as folder:
                for file, content in (*small_files, (RECORD_NAME, record)):
                    folders.put(file, content, folder, mode=0o600, durable=False)
            self.touch()

    def retire(self, keep: str) -> None:
        """Makes all other checkpoints incomplete; `make` reuses or removes them."""
        with os_errors(self.path), self._making():
            for name in folders.names(self._folder):
                if NAME.fullmatch(name) and name != keep:
                    with suppress(FileNotFoundError):
                        os.unlink(f"{name}/{RECORD_NAME}", dir_fd=self._folder)

    def discard(self, name: str) -> None:
        """Removes a checkpoint, if it exists."""
        with os_errors(self.path), self._making(), suppress(FileNotFoundError):
            folders.delete(name, self._folder)

    def open(self, name: str) -> int:
        """Opens the folder of a checkpoint; the caller closes the descriptor."""
        with os_errors(self.place(name)):
            return open_folder(name, self._folder)

    def close(self, *, remove: bool = False) -> None:
        """Closes the folder.

        Args:
            remove: Whether to remove it, on the last rank of the host that closes it.
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
        """Locks the folder against changes by other ranks of this host."""
        making = open_file(_MAKING_NAME, self._folder, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(making, fcntl.LOCK_EX)
            yield
        finally:
            _unlock(making)


@dataclass(frozen=True)
class JobUsage:
    """The memory use of a job on this host.

    Attributes:
        path: Path of its folder.
        root: Root of its checkpoints.
        is_alive: Whether a process of the job runs on this host.
        used_s: Time of last use, in seconds since 1970.
        nbytes: Allocated memory in bytes.
        records: Name and manifest of each checkpoint; the manifest is empty if it is not complete.
    """

    path: str
    root: str
    is_alive: bool
    used_s: float
    nbytes: int
    records: tuple[tuple[str, bytes], ...]


def find_jobs(memory: str) -> list[JobUsage]:
    """Returns the jobs of this user in a directory such as ``/dev/shm``.

    Raises:
        StorageError: The folder cannot be read, or other users could write to it.
    """
    try:
        with os_errors(memory):
            own = _open_own(memory, make=False)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    found = []
    with closing(own):
        for name in filter(NAME.fullmatch, folders.names(own)):
            path = os.path.join(memory, f"fastload-{os.geteuid()}", name)
            with os_errors(path), suppress(FileNotFoundError, NotADirectoryError):
                found.append(_look(name, own, path))
    return found


def _look(name: str, own: int, path: str) -> JobUsage:
    with closing(open_folder(name, own)) as folder:
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
    """Removes the folders of dead jobs of this user; returns these jobs.

    Args:
        memory: Directory of the user's folder, such as ``/dev/shm``.
        older_s: Removes only folders last used at least this many seconds ago.
        but: Name of a job to keep.
        root: Removes only folders of this root, if given.

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
        with (
            os_errors(job.path),
            suppress(FileNotFoundError),
            closing(_open_own(memory, make=False)) as own,
        ):
            if _remove_job(name, own):
                removed.append(job)
    return removed


def _allocated(folder: int) -> int:
    total = 0
    for _, _, names, inside in os.fwalk(".", dir_fd=folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += 512 * os.stat(name, dir_fd=inside, follow_symlinks=False).st_blocks
    return total
