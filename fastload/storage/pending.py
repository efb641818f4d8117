"""Pending directories of local saves, and the orphans that dead saves leave.

While a save lives, the parent of the checkpoint holds::

    .<name>.<token>.saving/
        owner.json      says which process saves, which holds a lock (flock) on it until it ends
        data/           what becomes the checkpoint by one rename
        old/            what was there before, on file systems that cannot exchange two names
        name            the name of the checkpoint, if it is too long to be a part of another one

`owner.json` is the first to come and the last to go. So whatever instant a process is killed at, the
kernel releases the lock, and the next save in the same parent finds the orphan and removes it. What is
to be deleted is renamed to ``.<name>.<token>.removed``, which anybody may finish.

Others may be able to write to the same parent (``/dev/shm``). So a directory of another user's is left
alone, everything is done by descriptors, and no link is followed.
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
from fastload.storage.folders import open_file, open_folder, opened_folder
from fastload.storage.mounts import file_system_type, is_network
from fastload.storage.process import Owner, warn_once

_log = logging.getLogger(__name__)

NOT_FREE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""How a rename of a directory fails where something stands in its place."""
OWNER = "owner.json"
"""The file in a pending directory that says whose it is."""
DATA = "data"
"""The directory in it that becomes the checkpoint."""
OLD = "old"
"""The directory in it with the checkpoint that was there before, where two names cannot be exchanged."""

_NAME = "name"
_SAVING, _REMOVED = "saving", "removed"
_NUM_TRIES = 10
_FIRST_PAUSE_S = 0.002  # doubled from try to try: 2 s in all
_TO_REMOVE = re.compile(r"\..+\.[0-9a-f]{16}\.removed", re.DOTALL)
_SILENT_S = 3600.0  # no step of a living save takes that long
_MAX_OWNER_BYTES = 4096
_NOBODY = 65534


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
        long_name = os.path.basename(os.fsdecode(folders.read_small(_NAME, self.folder)))
        name = long_name or saved_name(self.name) or ""
        try:
            os.rename(OLD, name, src_dir_fd=self.folder, dst_dir_fd=self.parent)
            folders.sync(self.parent)
        except FileNotFoundError:
            pass  # nothing was moved
        except OSError as error:
            if error.errno not in NOT_FREE:
                raise  # a new one that is in place is fine; anything else must not cost the old one

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
    name, saved = os.path.basename(place), os.path.basename(path)
    os.mkdir(name, 0o700, dir_fd=parent)
    with ExitStack() as opened:  # else the lock would keep everybody from cleaning for as long as we live
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
            pass  # one that cleans came between two steps: it takes what has no owner for dead
        except BaseException:
            with suppress(OSError):
                folders.delete(name, parent, last=OWNER)
            raise
    return None


def open_data(path: str) -> int:
    """Opens the directory that becomes the checkpoint in a pending one that another process holds."""
    with opened_folder(path) as folder:
        return open_folder(DATA, folder)


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


def clean_abandoned(path: str) -> list[str]:
    """Removes the pending directories of dead saves, and what was to be removed; returns their paths.

    What such a save had moved aside but not replaced is put back first.

    Args:
        path: The directory that they are in.
    """
    removed: list[str] = []
    try:
        parent = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return removed  # there is no parent yet, or whoever needs it will say so
    try:
        names = folders.names(parent)
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
        delete_with_others(name, parent)
        return True
    if saved_name(name) is None or (pending := _take_over(place, parent, network)) is None:
        return False
    try:
        pending.restore()
        pending.discard()
    finally:
        pending.close()
    return True


def resume(path: str, parent: int, token: str) -> Pending:
    """Makes a pending directory with a token of the caller's, or takes over that of a dead process.

    Anybody can guess its name. Where another user was faster, another name is used, which nobody can.

    Args:
        path: Where the checkpoint will be.
        parent: Descriptor of the directory that it will be in.
        token: 16 hex digits.

    Returns:
        As `begin`. What is in its `data` is what the predecessor left.

    Raises:
        OSError: ``EBUSY`` if a living process has it.
    """
    place = hidden_path(path, token, parent)
    network = _is_on_network(os.path.dirname(path))
    return insist(lambda: _make_or_take_over(place, path, parent, network), place)


def _make_or_take_over(place: str, path: str, parent: int, network: bool) -> Pending | None:
    try:
        return make(place, path, parent)
    except FileExistsError:
        pass
    try:
        pending = _take_over(place, parent, network)
    except FileNotFoundError:
        return None
    except OSError as error:
        _leave_alone(place, str(error.strerror))
        return begin(path, parent)
    if pending is None:
        if (other := _owner_of(place, parent)) is not None:
            why = f"in use by {other}; hosts that share this path cannot each have a copy there"
            raise OSError(errno.EBUSY, why, place)
        return None
    with ExitStack() as closing:
        closing.callback(pending.close)
        pending.restore()
        if pending.move_in():
            closing.pop_all()
            return pending
    return None


def _owner_of(place: str, parent: int) -> Owner | None:
    with suppress(OSError), opened_folder(os.path.basename(place), parent) as folder:
        return Owner.parse(folders.read_small(OWNER, folder))
    return None


def _leave_alone(place: str, why: str) -> None:
    message = "%s, which looks like what a dead save left behind, is left alone: %s"
    warn_once(_log, message, place, why)


def _open_own(name: str, parent: int, network: bool) -> int:
    """Opens a directory of this user's.

    Raises:
        PermissionError: It is another user's.
    """
    folder = open_folder(name, parent)
    uid = os.fstat(folder).st_uid
    as_nobody = network and (uid, os.geteuid()) == (_NOBODY, 0)  # as root may be called there
    if uid == os.geteuid() or as_nobody:
        return folder
    os.close(folder)
    raise PermissionError(errno.EPERM, f"it belongs to another user (uid {uid})", name)


def _take_over(place: str, parent: int, network: bool) -> Pending | None:
    """Locks the owner file of a save that is dead; returns its directory, or None if it may live.

    On one machine the lock is proof: the kernel holds it until the last descriptor of its owner closes.
    Across hosts it may not be: some network file systems carry locks to other hosts and some only seem
    to. So a save of another host is dead only once its lock is free and nothing has been written for
    `_SILENT_S`, which no step of a living one takes.

    Raises:
        FileNotFoundError: It is gone.
        OSError: It is not what fastload makes, or another user's.
    """
    with ExitStack() as opened:
        opened.callback(os.close, folder := _open_own(os.path.basename(place), parent, network))
        silent = time.time() - folders.last_change(folder) > _SILENT_S
        # Made if it is missing: nobody dares to use the directory then, see `make`.
        opened.callback(os.close, owner := open_file(OWNER, folder, os.O_RDWR | os.O_CREAT))
        locked = folders.lock(owner)
        gone = not os.fstat(owner).st_nlink  # whoever held the lock has just removed it all
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


def _is_on_network(folder: str) -> bool:
    return is_network(file_system_type(os.path.realpath(folder)))
