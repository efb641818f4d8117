"""Recent checkpoints in the memory of this host, or on a disk of its own: where they are, and whose.

Below a place such as ``/dev/shm`` each user has one folder, ``fastload-UID``, that nobody else may enter, and
in it one folder for each job. Whoever works with that holds a lock on the file ``job`` in it, which the
system lets go of when the process ends, however it ends: so what dead jobs left can be told from the rest.

A generation is a folder with the files of a checkpoint. They have holes where this host has no share; once
it counts there is a file ``generation.json``, written last.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fastload.base.memory import available_bytes
from fastload.errors import StorageError
from fastload.storage import folders
from fastload.storage.local_files import os_errors
from fastload.storage.mounts import IN_MEMORY_TYPES, file_system_type
from fastload.storage.owner import Owner
from fastload.storage.tier_leftovers import remove_dead
from fastload.storage.tier_place import (
    GENERATION,
    JOB_NAME,
    NEW_FLAGS,
    RECORD_NAME,
    open_own,
    put,
    read_record,
    read_small,
    remove_job,
    unlock,
    write,
)

__all__ = ["Home", "JobFolder"]

_PLAN_NAME = "plan"  # which ranges of the files are to be here: a folder with equal ones can be used again
_MAKING_NAME = "making"
_SPARE_PART = 20  # one part of what is free stays free


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
                self._own = open_own(memory, make=True)
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
            folder = folders.open_folder(self._name, self._own)
            job = -1
            try:
                job = os.open(JOB_NAME, NEW_FLAGS, 0o600, dir_fd=folder)
                fcntl.flock(job, fcntl.LOCK_SH)
                now, there = os.fstat(job), os.stat(JOB_NAME, dir_fd=folder, follow_symlinks=False)
                if not os.path.samestat(now, there):
                    return
                os.pwrite(job, root.encode(), 0)
                os.ftruncate(job, len(root.encode()))
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
            names = [name for name in folders.names(self._folder) if GENERATION.fullmatch(name)]
            found = {name: read_record(name, self._folder) for name in names}
        return {name: text for name, text in found.items() if text}

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
            if _exists(name, self._folder):
                return
            spare = ""
            for other in folders.names(self._folder):
                if not GENERATION.fullmatch(other) or _exists(f"{other}/{RECORD_NAME}", self._folder):
                    continue
                if not spare and read_small(f"{other}/{_PLAN_NAME}", self._folder) == plan.encode():
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
        folder = folders.open_folder(name, self._folder)
        try:
            for file, nbytes, head in files:
                descriptor = os.open(file, NEW_FLAGS, 0o600, dir_fd=folder)
                try:
                    os.ftruncate(descriptor, nbytes)
                    write(descriptor, 0, memoryview(head))
                finally:
                    os.close(descriptor)
            put(_PLAN_NAME, plan.encode(), folder)
        except BaseException:
            with suppress(OSError):
                folders.delete(name, self._folder)
            raise
        finally:
            os.close(folder)

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
            folder = folders.open_folder(name, self._folder)
            try:
                for file, content in (*small_files, (RECORD_NAME, record)):
                    put(file, content, folder)
            finally:
                os.close(folder)
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
            return folders.open_folder(name, self._folder)

    def close(self, *, remove: bool = False) -> None:
        """Lets go of it.

        Args:
            remove: Removes all of it, if this is the last rank of the host to close it.
        """
        if self._job >= 0:
            unlock(self._job)
        if self._folder >= 0:
            os.close(self._folder)
        self._job = self._folder = -1
        if remove and self._own >= 0:
            with os_errors(self.path), suppress(FileNotFoundError):
                remove_job(self._name, self._own)
        if self._own >= 0:
            os.close(self._own)
        self._own = -1

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Keeps the other ranks of this host from changing what there is."""
        lock = os.open(_MAKING_NAME, NEW_FLAGS, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            unlock(lock)


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
