"""Where a user has recent checkpoints in memory: nobody else gets in, or puts anything in the place of it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress

from fastload.errors import StorageError
from fastload.storage import folders
from fastload.storage.mounts import memory_mounts

__all__ = [
    "GENERATION",
    "JOB_NAME",
    "NEW_FLAGS",
    "RECORD_NAME",
    "find_memory",
    "lock",
    "open_own",
    "put",
    "read_record",
    "read_small",
    "remove_job",
    "unlock",
    "write",
]

RECORD_NAME = "generation.json"
"""What this host has of a generation: without it, the generation does not count here."""
JOB_NAME = "job"
"""Of which root the checkpoints are; locked by the ranks of the job."""
GENERATION = re.compile(r"[0-9a-f]{16}")
NEW_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_MAX_RECORD_BYTES = 1 << 20


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
    place = os.open(memory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    found = os.fstat(place)
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if is_open or found.st_uid not in (0, os.geteuid()):
        os.close(place)
        raise StorageError("other users could replace what is in it: it is theirs, or not sticky", url=memory)
    return place


def open_own(memory: str, *, make: bool) -> int:
    """Opens this user's folder there, which no other user may enter; arguments as for `_open_place`."""
    name = f"fastload-{os.geteuid()}"
    place = _open_place(memory)
    try:
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=place)
        own = folders.open_folder(name, place)
    finally:
        os.close(place)
    found = os.fstat(own)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(own)
        why = "it is not this user's alone: another one may have planted it"
        raise StorageError(why, url=f"{memory}/{name}")
    return own


def remove_job(name: str, own: int) -> bool:
    """Removes the folder of a job, if no process of it lives."""
    folder = folders.open_folder(name, own)
    try:
        held = lock(folder)
        if held is None:
            return False
        try:
            folders.empty(folder, last=JOB_NAME)
            os.rmdir(name, dir_fd=own)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # else the job has just begun anew, in an empty folder
                raise
        finally:
            unlock(held)
    finally:
        os.close(folder)
    return True


def lock(folder: int) -> int | None:
    """Keeps processes from taking part in a job; None if one that does lives.

    Raises:
        FileNotFoundError: It is being removed.
    """
    job = os.open(JOB_NAME, NEW_FLAGS & ~os.O_CREAT, dir_fd=folder)
    try:
        fcntl.flock(job, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(job)
        return None
    return job


def unlock(file: int) -> None:
    """Lets go of a lock, and of the file: a child that was forked meanwhile has the same lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def read_record(name: str, folder: int) -> bytes:
    """Reads what this host has of a generation; empty if that does not count."""
    return read_small(f"{name}/{RECORD_NAME}", folder)


def read_small(name: str, folder: int) -> bytes:
    """Reads a small file; empty if there is none."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(file, _MAX_RECORD_BYTES, 0)
    finally:
        os.close(file)


def put(name: str, content: bytes, folder: int) -> None:
    """Writes a small file that has all of its content from its first instant."""
    new = f"{name}.new"
    file = os.open(new, NEW_FLAGS | os.O_TRUNC, 0o600, dir_fd=folder)
    try:
        write(file, 0, memoryview(content))
    finally:
        os.close(file)
    os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)


def write(file: int, offset: int, data: memoryview) -> None:
    """Writes all of it to an open file."""
    while len(data):
        count = os.pwrite(file, data, offset)
        offset, data = offset + count, data[count:]
