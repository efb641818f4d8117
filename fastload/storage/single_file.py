"""Single local files, written by several ranks and then published, and small files such as traces."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastload.errors import CheckpointExists, StorageError
from fastload.storage.folders import NOT_LINKED, closing, os_errors, write_all


def make_pending(path: str, *, overwrite: bool) -> str:
    """Creates the file under a temporary name, which it returns.

    Raises:
        CheckpointExists: The path exists, and `overwrite` is off or it is no file.
        StorageError: The file cannot be created.
    """
    _require_free(path, overwrite=overwrite)
    pending = f"{path}.fastload-{secrets.token_hex(4)}"
    with os_errors(pending):
        os.close(os.open(pending, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return pending


@contextmanager
def opened(pending: str) -> Iterator[int]:
    """Yields a descriptor for writes, which are durable after the block.

    Raises:
        StorageError: Storage failed.
    """
    with os_errors(pending), closing(os.open(pending, os.O_WRONLY)) as descriptor:
        yield descriptor
        os.fsync(descriptor)


def publish(pending: str, path: str, *, overwrite: bool) -> None:
    """Renames the file to its path, atomically.

    Raises:
        CheckpointExists: The path exists by now.
        StorageError: Storage failed.
    """
    with os_errors(path):
        if overwrite:
            _require_free(path, overwrite=True)
            os.replace(pending, path)
        else:
            try:
                os.link(pending, path)  # which, unlike a rename, replaces nothing
            except FileExistsError:
                raise _taken(path) from None
            except OSError as error:
                if error.errno not in NOT_LINKED:
                    raise
                _require_free(path, overwrite=False)
                os.rename(pending, path)
            else:
                os.remove(pending)
        with closing(os.open(os.path.dirname(path) or ".", os.O_RDONLY)) as folder:
            os.fsync(folder)


def replace(path: str, content: bytes) -> None:
    """Writes or replaces a small file, atomically.

    Raises:
        CheckpointExists: The path is no file.
        StorageError: The file cannot be written.
    """
    pending = make_pending(path, overwrite=True)
    try:
        with opened(pending) as descriptor:
            write_all(descriptor, 0, content)
        publish(pending, path, overwrite=True)
    finally:
        remove(pending)


def remove(pending: str) -> None:
    """Deletes a file that will not be published."""
    with suppress(OSError):
        os.remove(pending)


def _require_free(path: str, *, overwrite: bool) -> None:
    if os.path.lexists(path) and not (overwrite and os.path.isfile(path)):
        raise CheckpointExists(f"{path} exists, and is no file") if overwrite else _taken(path)


def _taken(path: str) -> CheckpointExists:
    return CheckpointExists(f"{path} exists: pass overwrite=True to replace it")


def require_writable(path: str) -> None:
    """Checks that a file can be written, without a trace.

    Raises:
        StorageError: The file cannot be written.
    """
    try:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except FileNotFoundError:
            # Without a name, since another process may create the file meanwhile.
            tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise StorageError(f"it cannot be written: {error.strerror}", url=path) from error
