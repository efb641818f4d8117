"""Directories where local saves gather their files; how living saves are told from dead ones.

While a save lives, the parent of the checkpoint holds::

    .<name>.<token>.saving/
        owner.json      says which process saves, which holds a lock (flock) on it until it ends
        data/           what becomes the checkpoint by one rename
        old/            what was there before, on file systems that cannot exchange two names

`owner.json` is the first to come and the last to go. So whatever instant a process is killed at, the
kernel releases the lock, and the next save in the same parent finds the directory and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import time
from contextlib import suppress

from fastload.storage.local import file_system_type, is_network
from fastload.storage.owner import Owner
from fastload.storage.target import new_token, saved_name, staging_name

__all__ = [
    "NOT_FREE",
    "clean_abandoned",
    "discard",
    "exchange",
    "make_folders",
    "remove",
    "reserve",
    "restore",
    "resume",
    "stage",
    "sync",
]

_log = logging.getLogger(__name__)

NOT_FREE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""How a rename of a directory fails where something stands in its place."""

_OWNER = "owner.json"
_NUM_TRIES = 10
_SILENT_S = 3600.0  # no step of a living save takes that long
_MAX_OWNER_BYTES = 4096
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def stage(parent: str, name: str) -> tuple[str, int]:
    """Makes a staging directory for a checkpoint of that name.

    Returns:
        Its path, and the descriptor that holds the lock on its owner file.
    """
    for _ in range(_NUM_TRIES):
        staging = os.path.join(parent, staging_name(name, new_token()))
        if (owner := _found(staging)) is not None:
            return staging, owner
    raise OSError(errno.EBUSY, "the staging directory is removed again and again", parent)


def resume(parent: str, name: str, token: str) -> tuple[str, int]:
    """Makes a staging directory with a token of the caller's, or takes over that of a dead process.

    Returns:
        As `stage`. What is in its `data` is what the predecessor left.

    Raises:
        OSError: ``EBUSY`` if a living process has it.
    """
    staging = os.path.join(parent, staging_name(name, token))
    network = is_network(file_system_type(os.path.realpath(parent)))
    for _ in range(_NUM_TRIES):
        try:
            owner = _found(staging)
        except FileExistsError:
            owner = _take_over(staging, network)
            if owner is None and (other := _owner_of(staging)) is not None:
                raise OSError(
                    errno.EBUSY,
                    f"in use by {other}; hosts that share this path cannot each have a copy there",
                    staging,
                ) from None
            if owner is not None:
                restore(staging)
                if not _move_in(staging, owner):
                    os.close(owner)
                    continue
        if owner is not None:
            return staging, owner
    raise OSError(errno.EBUSY, "the staging directory is removed again and again", staging)


def _found(staging: str) -> int | None:
    """Makes a staging directory; returns the descriptor of its owner file, or None if others took it."""
    os.mkdir(staging)
    owner = None
    try:
        owner = os.open(os.path.join(staging, _OWNER), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        if _lock(owner) is not False and _move_in(staging, owner):
            return owner
    except (FileNotFoundError, FileExistsError):
        pass  # one that cleans came between two steps: it takes what has no owner for dead
    except BaseException:
        with suppress(OSError):
            discard(staging)
        if owner is not None:
            os.close(owner)  # else its lock would keep everybody from cleaning for as long as we live
        raise
    if owner is not None:
        os.close(owner)
    return None


def _move_in(staging: str, owner: int) -> bool:
    """Signs a locked owner file; returns whether it is still there, and not of a directory being removed."""
    os.pwrite(owner, Owner.here().to_bytes().ljust(os.fstat(owner).st_size), 0)
    if not os.fstat(owner).st_nlink:
        return False
    with suppress(FileExistsError):
        os.mkdir(os.path.join(staging, "data"))
    return True


def _owner_of(staging: str) -> Owner | None:
    try:
        with open(os.path.join(staging, _OWNER), "rb") as file:
            return Owner.parse(file.read(_MAX_OWNER_BYTES))
    except OSError:
        return None


def clean_abandoned(parent: str) -> list[str]:
    """Removes the staging directories of dead saves; returns their paths.

    What such a save had moved aside but not replaced is put back first.
    """
    removed: list[str] = []
    try:
        names = sorted(entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return removed  # there is no parent yet, or whoever needs it will say so
    network = is_network(file_system_type(os.path.realpath(parent)))
    for name in names:
        staging = os.path.join(parent, name)
        if saved_name(name) is None or (owner := _take_over(staging, network)) is None:
            continue
        try:
            restore(staging)
            discard(staging)
            removed.append(staging)
            _log.info("removed %s, which a save that died left behind", staging)
        except OSError as error:
            _log.warning("cannot remove %s, which a save that died left behind: %s", staging, error)
        finally:
            os.close(owner)
    return removed


def _take_over(staging: str, network: bool) -> int | None:
    """Locks the owner file of a save that is dead; returns its descriptor, or None if it may live.

    On one machine the lock is proof: the kernel holds it until the last descriptor of its owner closes.
    Across hosts it may not be: some network file systems carry locks to other hosts and some only seem
    to. So a save of another host is dead only once its lock is free and nothing has been written for
    `_SILENT_S`, which no step of a living one takes.
    """
    try:
        silent = time.time() - _last_sign(staging) > _SILENT_S
        # Made if it is missing: nobody dares to use the directory then, see `stage`.
        owner = os.open(os.path.join(staging, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        return None  # gone by now, or somebody else's
    locked = _lock(owner)
    if locked is False or not _is_dead(owner, locked is True, network, silent):
        os.close(owner)
        return None
    return owner


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


def _last_sign(staging: str) -> float:
    """Returns when something in a staging directory last changed."""
    last = os.stat(staging).st_mtime
    for folder, _, files in os.walk(staging):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with suppress(OSError):
                last = max(last, os.stat(path).st_mtime)
    return last


def restore(staging: str) -> None:
    """Puts back what was moved aside for a new checkpoint that never came."""
    parent, name = os.path.split(staging)
    try:
        os.rename(os.path.join(staging, "old"), os.path.join(parent, saved_name(name) or ""))
        sync(parent)
    except FileNotFoundError:
        pass  # nothing was moved
    except OSError as error:
        if error.errno not in NOT_FREE:
            raise  # a new one that is in place is fine; anything else must not cost the old one


def discard(staging: str) -> None:
    """Removes a staging directory; what cannot be removed now stays for the next one that cleans."""
    for entry in list(os.scandir(staging)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != _OWNER:
            os.unlink(entry.path)
    if set(os.listdir(staging)) <= {_OWNER}:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(staging, _OWNER))
        os.rmdir(staging)


def remove(path: str) -> None:
    """Deletes a directory, out of sight from the first step on; that needs no room, which may be why.

    It becomes a staging directory that nobody owns, so another process finishes what this one cannot.
    """
    parent, name = os.path.split(path)
    staging = os.path.join(parent, staging_name(name, new_token()))
    os.rename(path, staging)
    sync(parent)
    with suppress(FileNotFoundError):  # one that cleans helped
        discard(staging)


def exchange(one: str, other: str) -> None:
    """Exchanges two names in one step.

    Raises:
        OSError: ``EINVAL`` or ``ENOSYS`` where the file system or the system cannot do that.
    """
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), other)


def reserve(path: str, nbytes: int) -> None:
    """Makes a file of that size, with its blocks: a full disk shows before anything is written."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # Not os.posix_fallocate: where there is no such thing, it writes into every block instead.
        if nbytes and _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(number, os.strerror(number), path)
            os.ftruncate(file, nbytes)
    finally:
        os.close(file)


def make_folders(path: str) -> None:
    """Makes a directory and its parents, durably, where they are missing."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder)
        sync(os.path.dirname(folder))


def sync(path: str) -> None:
    """Makes the entries of a directory durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
