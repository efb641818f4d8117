"""What jobs have in the memory of this host, and what is left of those that are dead."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass

from fastload.errors import StorageError
from fastload.storage import folders
from fastload.storage.local_files import os_errors
from fastload.storage.tier_place import (
    GENERATION,
    JOB_NAME,
    lock,
    open_own,
    read_record,
    read_small,
    remove_job,
    unlock,
)

__all__ = ["Leftover", "find_jobs", "remove_dead"]

_JOB = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Leftover:
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


def find_jobs(memory: str) -> list[Leftover]:
    """Returns what jobs of this user have there.

    Raises:
        StorageError: It cannot be looked at, or is not this user's alone.
    """
    try:
        with os_errors(memory):
            own = open_own(memory, make=False)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    try:
        names = [name for name in folders.names(own) if _JOB.fullmatch(name)]
        found = []
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError):
                found.append(_look(name, own, os.path.join(memory, f"fastload-{os.geteuid()}", name)))
        return found
    finally:
        os.close(own)


def _look(name: str, own: int, path: str) -> Leftover:
    folder = folders.open_folder(name, own)
    try:
        held = lock(folder)
        is_alive = held is None
        if held is not None:
            unlock(held)
        found = os.stat(JOB_NAME, dir_fd=folder, follow_symlinks=False)
        root = read_small(JOB_NAME, folder).decode(errors="replace")
        names = [each for each in folders.names(folder) if GENERATION.fullmatch(each)]
        records = tuple((each, read_record(each, folder)) for each in names)
        return Leftover(path, root, is_alive, found.st_mtime, _allocated(folder), records)
    finally:
        os.close(folder)


def remove_dead(memory: str, *, older_s: float, but: str = "", root: str | None = None) -> list[Leftover]:
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
            own = open_own(memory, make=False)
            try:
                if remove_job(name, own):
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
