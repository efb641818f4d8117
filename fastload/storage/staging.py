"""Directories where local saves gather their files; how living saves are told from dead ones.

While a save lives, the parent of the checkpoint holds::

    .<name>.<token>.saving/
        owner.json      says which process saves, which holds a lock (flock) on it until it ends
        data/           what becomes the checkpoint by one rename
        old/            what was there before, on file systems that cannot exchange two names
        name            the name of the checkpoint, if it is too long to be a part of another one

`owner.json` is the first to come and the last to go. So whatever instant a process is killed at, the
kernel releases the lock, and the next save in the same parent finds the directory and removes it. What
is to be deleted is renamed to ``.<name>.<token>.removed``, which anybody may finish.

Others may be able to write to the same parent (``/dev/shm``), so nothing is believed of a directory that
belongs to another user: it is left alone. All is done by descriptors, and no link is followed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from fastload.storage import folders
from fastload.storage.folders import open_file, open_folder
from fastload.storage.local import file_system_type, is_network
from fastload.storage.owner import Owner
from fastload.storage.target import new_token, saved_name

__all__ = [
    "NOT_FREE",
    "Staging",
    "clean_abandoned",
    "discard",
    "remove",
    "restore",
    "resume",
    "stage",
]

_log = logging.getLogger(__name__)

NOT_FREE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""How a rename of a directory fails where something stands in its place."""

_OWNER, _DATA, _OLD, _NAME = "owner.json", "data", "old", "name"
_SAVING, _REMOVED = "saving", "removed"
_TO_REMOVE = re.compile(r"\..+\.[0-9a-f]{16}\.removed", re.DOTALL)
_NUM_TRIES = 10
_FIRST_PAUSE_S = 0.002  # doubled from try to try: 2 s in all
_SILENT_S = 3600.0  # no step of a living save takes that long
_MAX_OWNER_BYTES = 4096
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Staging:
    """A staging directory that this process holds.

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

    def close(self) -> None:
        """Lets go of it."""
        os.close(self.folder)
        os.close(self.owner)


def stage(path: str, parent: int) -> Staging:
    """Makes a staging directory for a checkpoint.

    Args:
        path: Where the checkpoint will be.
        parent: Descriptor of the directory that it will be in.
    """
    for _ in _tries():
        if (staging := _make(_hidden(path, new_token(), _SAVING, parent), path, parent)) is not None:
            return staging
    raise OSError(errno.EBUSY, "the staging directory is removed again and again", path)


def resume(path: str, parent: int, token: str) -> Staging:
    """Makes a staging directory with a token of the caller's, or takes over that of a dead process.

    Anybody can guess its name. Where another user was faster, another name is used, which nobody can.

    Returns:
        As `stage`. What is in its `data` is what the predecessor left.

    Raises:
        OSError: ``EBUSY`` if a living process has it.
    """
    place = _hidden(path, token, _SAVING, parent)
    network = _is_on_network(os.path.dirname(path))
    for _ in _tries():
        try:
            staging = _make(place, path, parent)
        except FileExistsError:
            try:
                staging = _take_over(place, parent, network)
            except FileNotFoundError:
                continue
            except OSError as error:
                _leave_alone(place, str(error.strerror))
                return stage(path, parent)
            if staging is None and (other := _owner_of(place, parent)) is not None:
                raise OSError(
                    errno.EBUSY,
                    f"in use by {other}; hosts that share this path cannot each have a copy there",
                    place,
                ) from None
            if staging is not None:
                restore(staging)
                if not _move_in(staging.folder, staging.owner):
                    staging.close()
                    continue
        if staging is not None:
            return staging
    raise OSError(errno.EBUSY, "the staging directory is removed again and again", place)


def _tries() -> Iterator[int]:
    """Yields the numbers of tries, with pauses in which others get on."""
    for number in range(_NUM_TRIES):
        yield number
        time.sleep(_FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.5))  # two are not to keep step


def _hidden(path: str, token: str, kind: str, parent: int) -> str:
    """Returns the path of a directory beside a checkpoint, which tells its name if there is room."""
    folder, name = os.path.split(path)
    end, whole = f".{token}.{kind}", os.fsencode(name)
    room = os.fpathconf(parent, "PC_NAME_MAX") - 1 - len(end)
    if len(whole) > room:
        digest = xxhash.xxh3_64_hexdigest(whole)
        name = f"{whole[: room - 1 - len(digest)].decode(errors='ignore')}~{digest}"
    return os.path.join(folder, f".{name}{end}")


def _make(place: str, path: str, parent: int) -> Staging | None:
    """Makes a staging directory, which no other user can enter; returns None if others took it."""
    name = os.path.basename(place)
    os.mkdir(name, 0o700, dir_fd=parent)
    opened: list[int] = []
    try:
        opened.append(folder := open_folder(name, parent))
        opened.append(owner := open_file(_OWNER, folder, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        if saved_name(name) != os.path.basename(path):
            file = open_file(_NAME, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            opened.append(file)
            os.write(file, os.fsencode(os.path.basename(path)))
            os.close(opened.pop())
        if _lock(owner) is not False and _move_in(folder, owner):
            return Staging(place, parent, folder, owner)
    except (FileNotFoundError, FileExistsError):
        pass  # one that cleans came between two steps: it takes what has no owner for dead
    except BaseException:
        with suppress(OSError):
            folders.delete(name, parent, last=_OWNER)
        _close(opened)  # else its lock would keep everybody from cleaning for as long as we live
        raise
    _close(opened)
    return None


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _move_in(folder: int, owner: int) -> bool:
    """Signs a locked owner file; returns whether it is still there, and not of a directory being removed."""
    os.pwrite(owner, Owner.here().to_bytes().ljust(os.fstat(owner).st_size), 0)
    if not os.fstat(owner).st_nlink:
        return False
    with suppress(FileExistsError):
        os.mkdir(_DATA, dir_fd=folder)
    return True


def _owner_of(place: str, parent: int) -> Owner | None:
    try:
        folder = open_folder(os.path.basename(place), parent)
    except OSError:
        return None
    try:
        owner = open_file(_OWNER, folder, os.O_RDONLY)
    except OSError:
        return None
    finally:
        os.close(folder)
    try:
        return Owner.parse(os.pread(owner, _MAX_OWNER_BYTES, 0))
    finally:
        os.close(owner)


def clean_abandoned(path: str) -> list[str]:
    """Removes the staging directories of dead saves, and what was to be removed; returns their paths.

    What such a save had moved aside but not replaced is put back first.

    Args:
        path: The directory that they are in.
    """
    removed: list[str] = []
    try:
        parent = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return removed  # there is no parent yet, or whoever needs it will say so
    try:
        names = sorted(os.listdir(parent))
        network = _is_on_network(path)
        for name in names:
            place = os.path.join(path, name)
            try:
                if _clean(place, parent, network):
                    removed.append(place)
                    _log.info("removed %s, which a save that died left behind", place)
            except FileNotFoundError:
                continue  # others did it
            except OSError as error:
                _leave_alone(place, str(error.strerror))
    finally:
        os.close(parent)
    return removed


def _clean(place: str, parent: int, network: bool) -> bool:
    name = os.path.basename(place)
    if _TO_REMOVE.fullmatch(name):
        os.close(_open_own(name, parent, network))
        _delete_with_others(name, parent)
        return True
    if saved_name(name) is None or (staging := _take_over(place, parent, network)) is None:
        return False
    try:
        restore(staging)
        discard(staging)
    finally:
        staging.close()
    return True


@lru_cache(256)  # each save looks again, and would say it again
def _leave_alone(place: str, why: str) -> None:
    _log.warning("%s, which looks like what a dead save left behind, is left alone: %s", place, why)


def _open_own(name: str, parent: int, network: bool) -> int:
    """Opens a directory of this user's.

    Raises:
        PermissionError: It is another user's.
    """
    folder = open_folder(name, parent)
    uid = os.fstat(folder).st_uid
    if uid == os.geteuid() or (
        network and (uid, os.geteuid()) == (_NOBODY, 0)
    ):  # as root may be called there
        return folder
    os.close(folder)
    raise PermissionError(errno.EPERM, f"it belongs to another user (uid {uid})", name)


def _take_over(place: str, parent: int, network: bool) -> Staging | None:
    """Locks the owner file of a save that is dead; returns its directory, or None if it may live.

    On one machine the lock is proof: the kernel holds it until the last descriptor of its owner closes.
    Across hosts it may not be: some network file systems carry locks to other hosts and some only seem
    to. So a save of another host is dead only once its lock is free and nothing has been written for
    `_SILENT_S`, which no step of a living one takes.

    Raises:
        FileNotFoundError: It is gone.
        OSError: It is not what fastload makes, or another user's.
    """
    folder = _open_own(os.path.basename(place), parent, network)
    opened = [folder]
    try:
        silent = time.time() - folders.last_change(folder) > _SILENT_S
        # Made if it is missing: nobody dares to use the directory then, see `_make`.
        opened.append(owner := open_file(_OWNER, folder, os.O_RDWR | os.O_CREAT))
        locked = _lock(owner)
        gone = not os.fstat(owner).st_nlink  # whoever held the lock has just removed it all
        if locked is not False and not gone and _is_dead(owner, locked is True, network, silent):
            return Staging(place, parent, *opened)
    except BaseException:
        _close(opened)
        raise
    _close(opened)
    return None


def _is_dead(owner: int, locked: bool, network: bool, silent: bool) -> bool:
    process = Owner.parse(os.pread(owner, _MAX_OWNER_BYTES, 0))
    if locked and (not network or (process is not None and process.is_of_this_kernel)):
        return True
    if not locked and process is not None and process.is_gone is not None:
        return process.is_gone  # no locks at all on this file system
    return silent


def _lock(file: int) -> bool | None:
    """Locks a file until its descriptor closes; False if another holds it, None if there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_on_network(folder: str) -> bool:
    return is_network(file_system_type(os.path.realpath(folder)))


def restore(staging: Staging) -> None:
    """Puts back what was moved aside for a new checkpoint that never came."""
    try:
        os.rename(_OLD, _name_of(staging), src_dir_fd=staging.folder, dst_dir_fd=staging.parent)
        folders.sync(staging.parent)
    except FileNotFoundError:
        pass  # nothing was moved
    except OSError as error:
        if error.errno not in NOT_FREE:
            raise  # a new one that is in place is fine; anything else must not cost the old one


def _name_of(staging: Staging) -> str:
    """Returns the name of the checkpoint that a staging directory is for."""
    try:
        file = open_file(_NAME, staging.folder, os.O_RDONLY)
    except FileNotFoundError:
        return saved_name(staging.name) or ""
    try:
        return os.path.basename(os.fsdecode(os.read(file, _MAX_OWNER_BYTES)))
    finally:
        os.close(file)


def discard(staging: Staging) -> None:
    """Removes a staging directory; what cannot be removed now stays for the next one that cleans."""
    folders.empty(staging.folder, last=_OWNER)
    with _beside_others():
        os.rmdir(staging.name, dir_fd=staging.parent)


def remove(path: str, parent: int) -> None:
    """Deletes a directory, out of sight from the first step on; that needs no room, which may be why.

    What this process cannot finish, any other one may.
    """
    name = os.path.basename(_hidden(path, new_token(), _REMOVED, parent))
    os.rename(os.path.basename(path), name, src_dir_fd=parent, dst_dir_fd=parent)
    folders.sync(parent)
    _delete_with_others(name, parent)


def _delete_with_others(name: str, parent: int) -> None:
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
