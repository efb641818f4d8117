"""Files and directories by descriptor, whatever their paths lead to meanwhile.

No function follows a symbolic link. So other users of the same directory cannot make fastload write or delete
elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import islice

from fastload.errors import FastloadError, StorageError

UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of `exchange` where the kernel or the file system does not support it."""
NOT_LINKED = (errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, *UNABLE)
"""Errors of a hard link where the file system does not support it."""

_RENAME_EXCHANGE = 2
_TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO)
_MAX_SMALL_BYTES = 1 << 20
_MIN_RESERVE_BYTES = 1 << 20
_MOST_LISTED = 1000  # to find a similar name
_MAX_LINKS = 40  # as the kernel follows
_libc = ctypes.CDLL(None, use_errno=True)


class os_errors:  # in lower case as `contextlib.suppress`; a generator would slow down small reads
    """Turns errors of the operating system into `StorageError`."""

    def __init__(self, path: str, offset: int | None = None, nbytes: int | None = None) -> None:
        self._place = (path, offset, nbytes)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, FastloadError):
            raise to_storage_error(error, *self._place) from error


def to_storage_error(
    error: OSError, path: str, offset: int | None = None, nbytes: int | None = None
) -> StorageError:
    """Returns an error of the operating system as a `StorageError`."""
    message = f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})"
    return StorageError(message, path, offset, nbytes, transient=error.errno in _TRANSIENT)


def open_folder(name: str, parent: int | None = None) -> int:
    """Opens a directory.

    Raises:
        OSError: ``ENOTDIR`` or ``ELOOP`` if it is a link or no directory.
    """
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def require_trusted_links(path: str) -> None:
    """Refuses a path through a link that another user may have planted, as ``fs.protected_symlinks`` does.

    Raises:
        PermissionError: A link on the way is in a sticky, world-writable directory, and belongs neither to
            this user nor to the owner of that directory.
    """
    place = os.path.abspath(path)
    while place != os.path.dirname(place):
        folder = os.path.dirname(place)
        with suppress(FileNotFoundError, NotADirectoryError):
            link, inside = os.lstat(place), os.stat(folder)
            anybodys = inside.st_mode & stat.S_ISVTX and inside.st_mode & stat.S_IWOTH
            if stat.S_ISLNK(link.st_mode) and anybodys and link.st_uid not in (os.geteuid(), inside.st_uid):
                raise PermissionError(
                    errno.EACCES, f"{place} is a link of another user (uid {link.st_uid})", path
                )
        place = folder


def open_file(name: str, folder: int, flags: int, mode: int = 0o666) -> int:
    """Opens or creates a regular file without other hard links; never blocks on pipes.

    Raises:
        OSError: ``ELOOP``, ``EISDIR``, ``ENXIO`` or ``EINVAL`` if it is something else.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(name, flags, mode, dir_fd=folder)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise OSError(errno.EINVAL, f"{name} is not a regular file without other links")
    return file


def lock(file: int) -> bool | None:
    """Locks a file until its descriptor closes; False if it is locked, None if locks are not supported."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def find(name: str, folder: int) -> os.stat_result | None:
    """Returns the status of a name below a directory; None if there is nothing."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def names(folder: int) -> list[str]:
    """Returns the sorted names of all entries of a directory."""
    return sorted(kinds(folder))


def kinds(folder: int) -> dict[str, bool]:
    """Returns the names of all entries of a directory, and whether each is a directory."""
    # btrfs lists the entries as of when the descriptor was opened or rewound.
    os.lseek(folder, 0, os.SEEK_SET)
    with os.scandir(folder) as entries:
        return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}


def empty(folder: int, *, last: str = "") -> None:
    """Deletes all entries of a directory, which others may delete at the same time.

    Args:
        folder: The directory.
        last: Entry to delete last, and only if all others could be deleted.

    Raises:
        OSError: The first error. All entries that could be deleted are gone.
    """
    failures: list[OSError] = []
    for name, is_folder in sorted(kinds(folder).items(), key=lambda one: one[0] == last):
        if name == last and failures:
            break
        try:
            delete(name, folder) if is_folder else os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def delete(name: str, parent: int, *, last: str = "") -> None:
    """Deletes a directory and its entries; `last` as for `empty`."""
    with closing(open_folder(name, parent)) as folder:
        empty(folder, last=last)
    os.rmdir(name, dir_fd=parent)


def remove_files(path: str, is_own: Callable[[str], bool]) -> None:
    """Deletes files of a directory by their names, and the directory if it has no others; never raises."""
    with suppress(OSError):
        with closing(open_folder(os.path.realpath(path))) as folder:
            for name in filter(is_own, names(folder)):
                os.unlink(name, dir_fd=folder)
        os.rmdir(path)


def is_same(one: str, other: str) -> bool:
    """Whether two paths lead to the same directory, by whatever links and mounts."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # there is none
        return False


def resolve_sibling(path: str) -> str:
    """Follows a link to a directory next to it, such as ``latest``; returns the path of that directory."""
    for _ in range(_MAX_LINKS):
        folder, name = os.path.split(path.rstrip("/"))
        if not os.path.islink(os.path.join(folder, name)):
            break
        target = os.path.join(folder, os.readlink(os.path.join(folder, name)))
        parent, own = os.path.split(target.rstrip("/"))
        if own in (".", "..") or os.path.realpath(parent) != os.path.realpath(folder):
            break
        path = os.path.join(folder, own)
    return path


def exchange(one: str, folder: int, other: str, parent: int) -> None:
    """Exchanges two names, each in its own directory, atomically.

    Raises:
        OSError: One of `UNABLE` where that is not supported.
    """
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.renameat2(folder, os.fsencode(one), parent, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), other)


def create(name: str, nbytes: int, folder: int, *, allocate: bool) -> None:
    """Creates a file of a size; with its blocks, so that a full disk shows before data is written."""
    with closing(open_file(name, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as file:
        os.ftruncate(file, nbytes)
        if allocate:
            reserve_range(file, 0, nbytes)


def reserve_range(file: int, offset: int, nbytes: int) -> None:
    """Allocates the blocks of a range of an open file, where the file system supports that.

    Raises:
        OSError: ``ENOSPC`` if there is no space.
    """
    end, step = offset + nbytes, nbytes
    while offset < end:
        # Not os.posix_fallocate: where there is no such thing, it writes into every block instead.
        length = min(step, end - offset)
        if not _libc.fallocate(file, 0, ctypes.c_int64(offset), ctypes.c_int64(length)):
            offset += length
        elif (number := ctypes.get_errno()) in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        elif number == errno.EINTR:  # a signal, after which tmpfs releases what it had reserved
            step = max(step // 2, _MIN_RESERVE_BYTES)
        else:
            raise OSError(number, os.strerror(number))


def write_all(file: int, offset: int, data: memoryview | bytes) -> None:
    """Writes all bytes at an offset."""
    left = memoryview(data)
    while left:
        count = os.pwrite(file, left, offset)
        offset, left = offset + count, left[count:]


def put(name: str, content: bytes, folder: int, *, mode: int = 0o666, durable: bool = True) -> None:
    """Writes a small file atomically: it never has a part of its content."""
    new = f"{name}.new"
    with closing(open_file(new, folder, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)) as file:
        write_all(file, 0, content)
        if durable:
            os.fsync(file)
    os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)


def read_small(name: str, folder: int) -> bytes:
    """Reads up to 1 MiB of a file; empty if there is none."""
    with suppress(FileNotFoundError), closing(open_file(name, folder, os.O_RDONLY)) as file:
        return os.pread(file, _MAX_SMALL_BYTES, 0)
    return b""


def make_folders(path: str) -> None:
    """Creates a directory and its missing parents, durably."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for one in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(one)
        with closing(os.open(os.path.dirname(one), os.O_RDONLY | os.O_DIRECTORY)) as folder:
            os.fsync(folder)


def require_writable(path: str) -> None:
    """Creates a directory if it is missing, and tries to write there.

    Raises:
        OSError: This process cannot.
    """
    make_folders(path)
    os.rmdir(tempfile.mkdtemp(prefix=".fastload-", dir=path))


def similar_name(path: str) -> str:
    """Returns the name next to a local path that is most like it; empty if none is, or for a URL."""
    folder, name = os.path.split(path)
    found: list[str] = []
    if os.path.isabs(path):
        with suppress(OSError), os.scandir(folder) as entries:
            found = [entry.name for entry in islice(entries, _MOST_LISTED) if not entry.name.startswith(".")]
    return next(iter(get_close_matches(name, found, n=1)), "")


def last_change(folder: int) -> float:
    """Returns the latest modification time in a directory tree, in seconds since 1970."""
    last = os.fstat(folder).st_mtime
    for _, _, files, inside in os.fwalk(".", dir_fd=folder):
        last = max(last, os.fstat(inside).st_mtime)
        for name in files:
            with suppress(OSError):
                last = max(last, os.stat(name, dir_fd=inside, follow_symlinks=False).st_mtime)
    return last


def look_like(old: int, new: int) -> None:
    """Copies the mode of a directory, and its group and owner as far as permitted.

    Raises:
        PermissionError: The group could not be set; the mode is set.
    """
    wanted, found = os.fstat(old), os.fstat(new)
    refused: PermissionError | None = None
    for uid in (wanted.st_uid, -1):
        if (found.st_uid, found.st_gid) != (wanted.st_uid, wanted.st_gid):
            try:
                os.fchown(new, uid, wanted.st_gid)
                break
            except PermissionError as error:
                refused = error if uid == -1 and found.st_gid != wanted.st_gid else None
    os.fchmod(new, stat.S_IMODE(wanted.st_mode))  # after the owner, whose change takes bits away
    if refused is not None:
        raise refused


def carry(names: Iterable[str], source: int, target: int) -> bool:
    """Links files of a directory into another, so that both have them.

    Hard links share later writes to open files. Where they are not supported, files are copied, with mode and
    times. Symbolic links stay links.

    Args:
        names: Names of files and links, not of directories; missing ones are skipped.
        source: Descriptor of the directory that has them.
        target: Descriptor of the directory that gets them; entries of these names are replaced atomically.

    Returns:
        Whether the target changed.
    """
    changed = False
    for name in names:
        wanted, present = find(name, source), find(name, target)
        if wanted is None or (present is not None and _is_same(wanted, present)):
            continue
        to = name if present is None else f".{os.urandom(8).hex()}"
        try:
            os.link(name, to, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NOT_LINKED:
                raise
            to = f".{os.urandom(8).hex()}"
            _copy(name, to, source, target)
        if to != name:
            os.rename(to, name, src_dir_fd=target, dst_dir_fd=target)
        changed = True
    return changed


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    if (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino):
        return True
    values = [(stat.S_IFMT(each.st_mode), each.st_size, each.st_mtime_ns) for each in (one, other)]
    return values[0] == values[1] and stat.S_ISREG(one.st_mode)


def _copy(name: str, to: str, source: int, target: int) -> None:
    found = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), to, dir_fd=target)
        return
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EOPNOTSUPP, "can be neither linked nor copied", name)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with (
        open(os.open(name, flags, dir_fd=source), "rb") as original,
        open(open_file(to, target, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as copy,
    ):
        shutil.copyfileobj(original, copy)
        copy.flush()
        with suppress(PermissionError):
            os.fchown(copy.fileno(), found.st_uid, found.st_gid)
        os.fchmod(copy.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(copy.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        os.fsync(copy.fileno())
