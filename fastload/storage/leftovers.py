"""What local saves that died left pending: found, told from what living ones hold, removed or gone on with.

Others may be able to write to the same parent (``/dev/shm``), so nothing is believed of a directory that
belongs to another user: it is left alone. All is done by descriptors, and no link is followed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time

from fastload.storage import folders
from fastload.storage.folders import open_file, open_folder
from fastload.storage.mounts import file_system_type, is_network
from fastload.storage.owner import Owner
from fastload.storage.pending import (
    OWNER,
    Pending,
    begin,
    delete_with_others,
    hidden_path,
    insist,
    lock,
    make,
)
from fastload.storage.process import warn_once
from fastload.storage.target import saved_name

__all__ = ["clean_abandoned", "resume"]

_log = logging.getLogger(__name__)

_TO_REMOVE = re.compile(r"\..+\.[0-9a-f]{16}\.removed", re.DOTALL)
_SILENT_S = 3600.0  # no step of a living save takes that long
_MAX_OWNER_BYTES = 4096
_NOBODY = 65534


def clean_abandoned(path: str) -> list[str]:
    """Removes the pending directories of dead saves, and what was to be removed; returns their paths.

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
    pending.restore()
    if pending.move_in():
        return pending
    pending.close()
    return None


def _owner_of(place: str, parent: int) -> Owner | None:
    try:
        folder = open_folder(os.path.basename(place), parent)
    except OSError:
        return None
    try:
        owner = open_file(OWNER, folder, os.O_RDONLY)
    except OSError:
        return None
    finally:
        os.close(folder)
    try:
        return Owner.parse(os.pread(owner, _MAX_OWNER_BYTES, 0))
    finally:
        os.close(owner)


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
    folder = _open_own(os.path.basename(place), parent, network)
    opened = [folder]
    try:
        silent = time.time() - folders.last_change(folder) > _SILENT_S
        # Made if it is missing: nobody dares to use the directory then, see `pending.make`.
        opened.append(owner := open_file(OWNER, folder, os.O_RDWR | os.O_CREAT))
        locked = lock(owner)
        gone = not os.fstat(owner).st_nlink  # whoever held the lock has just removed it all
        if locked is not False and not gone and _is_dead(owner, locked is True, network, silent):
            return Pending(place, parent, folder, owner)
    except BaseException:
        for file in opened:
            os.close(file)
        raise
    for file in opened:
        os.close(file)
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
