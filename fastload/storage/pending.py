"""Pending directories of local saves, and the orphans that dead saves leave.

While a save runs, the parent of the checkpoint holds::

    .<name>.<token>.saving/
        owner.json      the owner file: names the saving process, which holds a lock (flock) on it
        data/           becomes the checkpoint by one rename
        old/            the old checkpoint, on file systems that cannot exchange two names
        name            the name of the checkpoint, if it is too long to be part of another name

`owner.json` is created first and deleted last. Whenever a process is killed, the kernel releases the lock,
and the next save in the same parent finds the orphan and removes it. A directory that is to be deleted is
renamed to ``.<name>.<token>.removed`` first; any process may finish that.

Other users may be able to write to the same parent (``/dev/shm``). So directories of other users are left
alone, all operations use descriptors, and no link is followed.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import xxhash

from fastload.storage import folders
from fastload.storage.base import new_token, saved_name
from fastload.storage.folders import closing, open_file, open_folder
from fastload.storage.mounts import file_system_type, is_network
from fastload.storage.process import Owner, warn_once

_log = logging.getLogger(__name__)

NOT_FREE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of a rename onto a directory that is not empty."""
OWNER = "owner.json"
"""The owner file in a pending directory."""
DATA = "data"
"""The directory in a pending directory that becomes the checkpoint."""
OLD = "old"
"""The old checkpoint in a pending directory, where two names cannot be exchanged."""

_NAME = "name"
_SAVING, _REMOVED = "saving", "removed"
_NUM_TRIES = 10
_FIRST_PAUSE_S = 0.002  # doubled from try to try: 2 s in all
_TO_REMOVE = re.compile(r"\..+\.[0-9a-f]{16}\.removed", re.DOTALL)
_SILENT_S = 3600.0  # longer than any step of a running save
_MAX_OWNER_BYTES = 4096
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Pending:
    """A pending directory that this process holds.

    Attributes:
        path: Its path.
        parent: Descriptor of the parent directory, owned by the caller.
        folder: Descriptor of the directory itself.
        owner: Descriptor of the owner file; holds the lock.
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
        """Writes its owner file; returns False if another process is removing the directory."""
        os.pwrite(self.owner, Owner.here().to_bytes().ljust(os.fstat(self.owner).st_size), 0)
        if not os.fstat(self.owner).st_nlink:
            return False
        with suppress(FileExistsError):
            os.mkdir(DATA, dir_fd=self.folder)
        return True

    def open_data(self) -> int:
        """Opens the data directory; the caller closes the descriptor."""
        return open_folder(DATA, self.folder)

    def restore(self) -> None:
        """Puts the old checkpoint back, if it was moved aside and no new one took its place."""
        long_name = os.path.basename(os.fsdecode(folders.read_small(_NAME, self.folder)))
        name = long_name or saved_name(self.name) or ""
        try:
            os.rename(OLD, name, src_dir_fd=self.folder, dst_dir_fd=self.parent)
            os.fsync(self.parent)
        except FileNotFoundError:
            pass  # nothing was moved
        except OSError as error:
            if error.errno not in NOT_FREE:
                raise  # a new checkpoint in place is fine; otherwise the old one must not be lost

    def discard(self) -> None:
        """Deletes the directory; the owner file goes last, so what cannot be deleted is an orphan."""
        folders.empty(self.folder, last=OWNER)
        with _tolerate_others():
            os.rmdir(self.name, dir_fd=self.parent)

    def close(self) -> None:
        """Closes its descriptors, which releases the lock."""
        os.close(self.folder)
        os.close(self.owner)


def begin(path: str, parent: int) -> Pending:
    """Creates a pending directory for a checkpoint.

    Args:
        path: Path of the checkpoint.
        parent: Descriptor of its parent directory.
    """
    return insist(lambda: make(hidden_path(path, new_token(), parent), path, parent), path)


def insist(attempt: Callable[[], Pending | None], path: str) -> Pending:
    """Tries to get a pending directory several times, with pauses.

    Raises:
        OSError: ``EBUSY`` if every attempt failed.
    """
    for number in range(_NUM_TRIES):
        if (pending := attempt()) is not None:
            return pending
        time.sleep(_FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.5))  # against lockstep
    raise OSError(errno.EBUSY, "other processes keep removing the pending directory", path)


def hidden_path(path: str, token: str, parent: int, kind: str = _SAVING) -> str:
    """Returns the path of a hidden directory next to a checkpoint; it has the name, if that fits."""
    folder, name = os.path.split(path)
    end, whole = f".{token}.{kind}", os.fsencode(name)
    room = os.fpathconf(parent, "PC_NAME_MAX") - 1 - len(end)
    if len(whole) > room:
        digest = xxhash.xxh3_64_hexdigest(whole)
        name = f"{whole[: room - 1 - len(digest)].decode(errors='ignore')}~{digest}"
    return os.path.join(folder, f".{name}{end}")


def make(place: str, path: str, parent: int) -> Pending | None:
    """Creates a pending directory with mode 0700; returns None if another process cleaned it away meanwhile.

    Args:
        place: Path of the pending directory.
        path: Path of the checkpoint.
        parent: Descriptor of the parent of both.

    Raises:
        FileExistsError: The pending directory exists.
    """
    name, saved = os.path.basename(place), os.path.basename(path)
    os.mkdir(name, 0o700, dir_fd=parent)
    with ExitStack() as opened:  # otherwise the lock would keep others from cleaning while this process runs
        try:
            opened.callback(os.close, folder := open_folder(name, parent))
            opened.callback(os.close, owner := open_file(OWNER, folder, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            if saved_name(name) != saved:
                folders.put(_NAME, os.fsencode(saved), folder)
            pending = Pending(place, parent, folder, owner)
            if folders.lock(owner) is not False and pending.move_in():
                opened.pop_all()
                return pending
        except (FileNotFoundError, FileExistsError):
            pass  # a cleaning process came between two steps: it removes directories without an owner
        except BaseException:
            with suppress(OSError):
                folders.delete(name, parent, last=OWNER)
            raise
    return None


def open_data(path: str) -> int:
    """Opens the data directory of a pending directory that another process holds."""
    with closing(open_folder(path)) as folder:
        return open_folder(DATA, folder)


def remove(path: str, parent: int) -> None:
    """Deletes a directory. A rename hides it first, so any process can finish the deletion."""
    name = os.path.basename(hidden_path(path, new_token(), parent, _REMOVED))
    os.rename(os.path.basename(path), name, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)
    delete_with_others(name, parent)


def delete_with_others(name: str, parent: int) -> None:
    """Deletes a directory that other processes may delete at the same time."""
    with _tolerate_others():
        folders.delete(name, parent)


@contextmanager
def _tolerate_others() -> Iterator[None]:
    """Ignores errors of a deletion that come from other processes at the same directory."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def clean_abandoned(path: str) -> list[str]:
    """Removes the orphans in a directory, and unfinished deletions; returns their paths.

    An old checkpoint that a dead save had moved aside is put back first.

    Args:
        path: The directory that they are in.
    """
    removed: list[str] = []
    try:
        parent = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return removed  # there is no parent yet; other errors show up when it is used
    with closing(parent):
        names = folders.names(parent)
        network = is_on_network(path)
        for name in names:
            place = os.path.join(path, name)
            try:
                if _clean(place, parent, network):
                    removed.append(place)
                    _log.info("removed %s, which a dead save left behind", place)
            except FileNotFoundError:
                continue  # another process did it
            except OSError as error:
                leave_alone(place, str(error.strerror))
    return removed


def _clean(place: str, parent: int, network: bool) -> bool:
    name = os.path.basename(place)
    if _TO_REMOVE.fullmatch(name):
        os.close(_open_own(name, parent, network))
        delete_with_others(name, parent)
        return True
    if saved_name(name) is None or (pending := take_over(place, parent, network)) is None:
        return False
    try:
        pending.restore()
        pending.discard()
    finally:
        pending.close()
    return True


def leave_alone(place: str, why: str) -> None:
    """Warns, once, of a directory that this process cannot take over."""
    message = "%s, which looks like what a dead save left behind, is left alone: %s"
    warn_once(_log, message, place, why)


def _open_own(name: str, parent: int, network: bool) -> int:
    """Opens a directory of this user.

    Raises:
        PermissionError: It belongs to another user.
    """
    folder = open_folder(name, parent)
    uid = os.fstat(folder).st_uid
    as_nobody = network and (uid, os.geteuid()) == (_NOBODY, 0)  # the uid of root there
    if uid == os.geteuid() or as_nobody:
        return folder
    os.close(folder)
    raise PermissionError(errno.EPERM, f"it belongs to another user (uid {uid})", name)


def take_over(place: str, parent: int, network: bool) -> Pending | None:
    """Takes over the pending directory of a dead save; returns None if the save may still run.

    On one machine a free lock is proof: the kernel holds it until the last descriptor of its owner closes.
    Across hosts it is not, since some network file systems do not carry locks to other hosts. So a save of
    another host counts as dead once its lock is free and nothing has been written for `_SILENT_S`, longer
    than any step of a running save takes.

    Raises:
        FileNotFoundError: The directory is gone.
        OSError: It was not created by fastload, or belongs to another user.
    """
    with ExitStack() as opened:
        opened.callback(os.close, folder := _open_own(os.path.basename(place), parent, network))
        silent = time.time() - folders.last_change(folder) > _SILENT_S
        # Created if it is missing: then its owner gives the directory up, see `make`.
        opened.callback(os.close, owner := open_file(OWNER, folder, os.O_RDWR | os.O_CREAT))
        locked = folders.lock(owner)
        gone = not os.fstat(owner).st_nlink  # the holder of the lock has just removed everything
        if locked is not False and not gone and _is_dead(owner, locked is True, network, silent):
            opened.pop_all()
            return Pending(place, parent, folder, owner)
    return None


def _is_dead(owner: int, locked: bool, network: bool, silent: bool) -> bool:
    process = Owner.parse(os.pread(owner, _MAX_OWNER_BYTES, 0))
    if locked and (not network or (process is not None and process.is_of_this_kernel)):
        return True
    if not locked and process is not None and process.is_gone is not None:
        return process.is_gone  # no locks at all on this file system
    return silent


def is_on_network(folder: str) -> bool:
    """Whether a directory is on a network file system."""
    return is_network(file_system_type(os.path.realpath(folder)))
