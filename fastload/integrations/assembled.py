"""A directory of checkpoints and small files that is made in the background, and appears as a whole."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any

from fastload import FastloadError, SaveHandle, SaveOptions, world
from fastload.saving.save import save_all_in_background
from fastload.storage import folders

__all__ = ["Assembly", "clear_pending"]

_PENDING = "pending-"  # no program takes what begins so for a checkpoint of its own
_REPLACED = "replaced"


class Assembly:
    """A directory that is being made by all ranks of a group; rank 0 makes it appear.

    Args:
        path: The directory, on a file system that all ranks see; what is there will be replaced.
        states: Name → state: each becomes a checkpoint below the directory, ``""`` its own one.
        add_files: Called on rank 0, in the background, with a directory: writes small files into it.
        published: Called on rank 0, in the background, once the directory is there.
        process_group: As for `fastload.save`.
        options: How to save.

    Raises:
        FastloadError: As for `fastload.async_save`.
    """

    def __init__(
        self,
        path: str,
        states: Mapping[str, Any],
        *,
        add_files: Callable[[str], object],
        published: Callable[[], object],
        process_group: Any,
        options: SaveOptions,
    ) -> None:
        self.path = path
        self._group, self._options = process_group, options
        self._names = [name for name in states if name]
        self._error: BaseException | None = None
        self._handles = save_all_in_background(
            {_pending(path, name): state for name, state in states.items()},
            process_group=process_group,
            options=options,
        )
        self._thread: threading.Thread | None = None
        if world.rank_in(process_group) == 0:
            work = (add_files, published)
            self._thread = threading.Thread(target=self._publish, args=work, name="fastload-publish")
            self._thread.start()

    def wait(self) -> None:
        """Waits, on all ranks, until the directory is there.

        Raises:
            FastloadError: A save failed, or rank 0 could not make the directory appear.
        """
        failures = [error for handle in self._handles if (error := _failure(handle)) is not None]
        if failures:
            raise failures[0]

        def publish() -> None:
            if self._thread is not None:
                self._thread.join()
            if self._error is not None:
                raise self._error

        timeout_s = self._options.timeout_s
        world.agree(self._group, f"publishing {self.path}", publish, timeout_s=timeout_s)

    @property
    def goes_on(self) -> bool:
        """Whether some of it is still to be done, as far as this rank knows."""
        is_publishing = self._thread is not None and self._thread.is_alive()
        return is_publishing or not all(handle.done() for handle in self._handles)

    def _publish(self, add_files: Callable[[str], object], published: Callable[[], object]) -> None:
        for handle in self._handles:
            handle.settle()
        if any(handle.failed() for handle in self._handles):
            return  # which all ranks hear of
        try:
            whole = _pending(self.path, "")
            add_files(whole)
            for name in self._names:
                os.replace(_pending(self.path, name), os.path.join(whole, name))
            _sync(whole)
            _replace(whole, self.path)
            published()
        except BaseException as error:
            self._error = error


def clear_pending(folder: str, prefix: str) -> None:
    """Deletes what saves that were cut off have left below a directory; puts back what they were to replace.

    Args:
        folder: The directory.
        prefix: How what is assembled there is called: this, a hyphen and a number.
    """
    pending = re.compile(rf"{_PENDING}({re.escape(prefix)}-\d+)(-\w+)?")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if match := pending.fullmatch(name):
            whole = os.path.join(folder, match[1])
            if match[2] == f"-{_REPLACED}" and not os.path.lexists(whole):
                os.replace(os.path.join(folder, name), whole)
            else:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _pending(path: str, name: str) -> str:
    folder, own = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f"{_PENDING}{own}{name and f'-{name}'}")


def _failure(handle: SaveHandle) -> FastloadError | None:
    try:
        handle.wait()
    except FastloadError as error:
        return error
    return None


def _replace(source: str, target: str) -> None:
    """Gives a directory the name of another one, which goes: in one step, where the file system can do it."""
    old = _pending(target, _REPLACED)
    if not os.path.lexists(target):
        os.replace(source, target)
    elif _exchange(source, target):
        old = source
    else:
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
        os.replace(source, target)
    _sync(os.path.dirname(target))
    shutil.rmtree(old, ignore_errors=True)


def _exchange(source: str, target: str) -> bool:
    """Exchanges two names in one directory; returns whether that can be done there."""
    parent = os.open(os.path.dirname(source), os.O_RDONLY | os.O_DIRECTORY)
    try:
        folders.exchange(os.path.basename(source), parent, os.path.basename(target), parent)
    except OSError as error:
        if error.errno not in folders.UNABLE:
            raise
        return False
    finally:
        os.close(parent)
    return True


def _sync(folder: str) -> None:
    """Makes a directory and the files in it durable."""
    for path in [*(entry.path for entry in os.scandir(folder) if entry.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
