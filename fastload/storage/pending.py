"""Directories where local saves gather what is pending, until it becomes the checkpoint.

While a save lives, the parent of the checkpoint holds::

    .<name>.<token>.saving/
        owner.json      says which process saves, which holds a lock (flock) on it until it ends
        data/           what becomes the checkpoint by one rename
        old/            what was there before, on file systems that cannot exchange two names
        name            the name of the checkpoint, if it is too long to be a part of another one

`owner.json` is the first to come and the last to go. So whatever instant a process is killed at, the
kernel releases the lock, and the next save in the same parent finds the directory and removes it
(`fastload.storage.leftovers`). What is to be deleted is renamed to ``.<name>.<token>.removed``, which
anybody may finish.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import xxhash

from fastload.storage import folders
from fastload.storage.folders import open_file, open_folder
from fastload.storage.owner import Owner
from fastload.storage.target import new_token, saved_name

__all__ = [
    "DATA",
    "NOT_FREE",
    "OWNER",
    "Pending",
    "begin",
    "delete_with_others",
    "hidden_path",
    "insist",
    "lock",
    "make",
    "open_data",
    "remove",
]

NOT_FREE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""How a rename of a directory fails where something stands in its place."""
OWNER = "owner.json"
"""The file in a pending directory that says whose it is."""
DATA = "data"
"""The directory in it that becomes the checkpoint."""

_OLD, _NAME = "old", "name"
_SAVING, _REMOVED = "saving", "removed"
_NUM_TRIES = 10
_FIRST_PAUSE_S = 0.002  # doubled from try to try: 2 s in all
_MAX_NAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Pending:
    """A pending directory that this process holds.

    Attributes:
        path: Where it is.
        parent: Descriptor of the directory that it is in, which is the caller's.
        folder: Descriptor of the directory itself.
        owner: Descriptor that holds the lock on its owner file.
    """

    path: str
    parent: int
    folder: int
    owner: int

    @property
    def name(self) -> str:
        """Its name in the parent."""
        return os.path.basename(self.path)

    def move_in(self) -> bool:
        """Signs its owner file; returns whether that is still there, and the directory not being removed."""
        os.pwrite(self.owner, Owner.here().to_bytes().ljust(os.fstat(self.owner).st_size), 0)
        if not os.fstat(self.owner).st_nlink:
            return False
        with suppress(FileExistsError):
            os.mkdir(DATA, dir_fd=self.folder)
        return True

    def open_data(self) -> int:
        """Opens the directory in it that becomes the checkpoint; the descriptor is the caller's."""
        return open_folder(DATA, self.folder)

    def restore(self) -> None:
        """Puts back what was moved aside for a new checkpoint that never came."""
        try:
            os.rename(_OLD, self._saved_name(), src_dir_fd=self.folder, dst_dir_fd=self.parent)
            folders.sync(self.parent)
        except FileNotFoundError:
            pass  # nothing was moved
        except OSError as error:
            if error.errno not in NOT_FREE:
                raise  # a new one that is in place is fine; anything else must not cost the old one

    def _saved_name(self) -> str:
        """Returns the name of the checkpoint that it is for."""
        try:
            file = open_file(_NAME, self.folder, os.O_RDONLY)
        except FileNotFoundError:
            return saved_name(self.name) or ""
        try:
            return os.path.basename(os.fsdecode(os.read(file, _MAX_NAME_BYTES)))
        finally:
            os.close(file)

    def discard(self) -> None:
        """Removes it; what cannot be removed now stays for the next one that cleans."""
        folders.empty(self.folder, last=OWNER)
        with _beside_others():
            os.rmdir(self.name, dir_fd=self.parent)

    def close(self) -> None:
        """Lets go of it."""
        os.close(self.folder)
        os.close(self.owner)


def begin(path: str, parent: int) -> Pending:
    """Makes a pending directory for a checkpoint.

    Args:
        path: Where the checkpoint will be.
        parent: Descriptor of the directory that it will be in.
    """
    return insist(lambda: make(hidden_path(path, new_token(), parent), path, parent), path)


def insist(attempt: Callable[[], Pending | None], path: str) -> Pending:
    """Makes attempts at a pending directory, with pauses in which others get on.

    Raises:
        OSError: ``EBUSY`` if none of them got one.
    """
    for number in range(_NUM_TRIES):
        if (pending := attempt()) is not None:
            return pending
        time.sleep(_FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.5))  # two are not to keep step
    raise OSError(errno.EBUSY, "the pending directory is removed again and again", path)


def hidden_path(path: str, token: str, parent: int, kind: str = _SAVING) -> str:
    """Returns the path of a directory beside a checkpoint, which tells its name if there is room."""
    folder, name = os.path.split(path)
    end, whole = f".{token}.{kind}", os.fsencode(name)
    room = os.fpathconf(parent, "PC_NAME_MAX") - 1 - len(end)
    if len(whole) > room:
        digest = xxhash.xxh3_64_hexdigest(whole)
        name = f"{whole[: room - 1 - len(digest)].decode(errors='ignore')}~{digest}"
    return os.path.join(folder, f".{name}{end}")


def make(place: str, path: str, parent: int) -> Pending | None:
    """Makes a pending directory, which no other user can enter; returns None if others took it.

    Args:
        place: Its path.
        path: Where the checkpoint will be.
        parent: Descriptor of the directory that both are in.

    Raises:
        FileExistsError: There is one.
    """
    name = os.path.basename(place)
    os.mkdir(name, 0o700, dir_fd=parent)
    opened: list[int] = []
    try:
        opened.append(folder := open_folder(name, parent))
        opened.append(owner := open_file(OWNER, folder, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        if saved_name(name) != os.path.basename(path):
            file = open_file(_NAME, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            opened.append(file)
            os.write(file, os.fsencode(os.path.basename(path)))
            os.close(opened.pop())
        pending = Pending(place, parent, folder, owner)
        if lock(owner) is not False and pending.move_in():
            return pending
    except (FileNotFoundError, FileExistsError):
        pass  # one that cleans came between two steps: it takes what has no owner for dead
    except BaseException:
        with suppress(OSError):
            folders.delete(name, parent, last=OWNER)
        _close(opened)  # else its lock would keep everybody from cleaning for as long as we live
        raise
    _close(opened)
    return None


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def open_data(path: str) -> int:
    """Opens the directory that becomes the checkpoint in a pending one that another process holds."""
    folder = open_folder(path)
    try:
        return open_folder(DATA, folder)
    finally:
        os.close(folder)


def lock(file: int) -> bool | None:
    """Locks a file until its descriptor closes; False if another holds it, None if there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove(path: str, parent: int) -> None:
    """Deletes a directory, out of sight from the first step on; that needs no room, which may be why.

    What this process cannot finish, any other one may.
    """
    name = os.path.basename(hidden_path(path, new_token(), parent, _REMOVED))
    os.rename(os.path.basename(path), name, src_dir_fd=parent, dst_dir_fd=parent)
    folders.sync(parent)
    delete_with_others(name, parent)


def delete_with_others(name: str, parent: int) -> None:
    """Deletes a directory that others may be deleting, too."""
    with _beside_others():
        folders.delete(name, parent)


@contextmanager
def _beside_others() -> Iterator[None]:
    """Passes over how a deletion fails where somebody else deletes the same, or goes on with it."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
