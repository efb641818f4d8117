"""A directory of checkpoints and small files, made in the background and published in one step."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from fastload import FastloadError, SaveHandle, SaveOptions, world
from fastload.formats.names import ADAPTER_STEM, MODEL_STEM
from fastload.integrations.frameworks import step_of_all
from fastload.saving.background import await_end
from fastload.saving.call import SaveCall, make_call
from fastload.saving.save import BegunSave, begin, finish
from fastload.storage import folders

_PENDING = "pending-"  # a prefix that other programs do not use for checkpoints
REPLACED = "replaced"
"""The name of no state: below it, the directory that is being replaced waits for its deletion."""


def save_all_in_background(
    states: Mapping[str, Any],
    *,
    stems: Mapping[str, str],
    process_group: Any,
    options: SaveOptions | None,
    changes: Mapping[str, Any] | None = None,
) -> list[SaveHandle]:
    """Copies the bytes that this rank contributes to several saves, and saves them in the background.

    All are copied before the first is written, since writes would slow down the copies. The caller waits for
    all of them, on all ranks.

    Args:
        states: Path → state.
        stems: Path → `SaveCall.stem`, if it is another one.
        process_group: As for `fastload.save`.
        options: As for `fastload.save`.
        changes: As for `make_call`.

    Returns:
        A handle for each.

    Raises:
        FastloadError: As for `fastload.async_save`.
    """
    begun: list[tuple[SaveCall, BegunSave]] = []
    handles: list[SaveHandle] = []
    try:
        for path, state in states.items():
            stem = stems.get(path, MODEL_STEM)
            call = make_call(
                path,
                process_group,
                None,
                None,
                options,
                changes=changes,
                in_background=True,
                stem=stem,
            )
            begun.append((call, begin(call, state)))
    finally:  # also after an error: the other ranks may write the saves before it
        for call, each in begun:
            work = partial(finish, call, each)
            handles.append(SaveHandle(call.url, work, snapshot=each.snapshot, caller_raises=True))
    return handles


class DirectorySave:
    """A save of several checkpoints into one directory by all ranks of a group; rank 0 publishes it.

    Args:
        path: The directory, on a file system that all ranks see. An existing one is replaced.
        states: Name below the directory → state of a checkpoint; ``""`` for the directory itself.
        adapters: The names of those whose file is to be called as PEFT's.
        add_files: Called on rank 0 in the background, with a directory; writes small files into it, or into
            those of `states`.
        on_publish: Called on rank 0 in the background, once the directory exists.
        process_group: As for `fastload.save`.
        options: How to save; None for the defaults.

    Raises:
        FastloadError: As for `fastload.async_save`.
    """

    def __init__(
        self,
        path: str,
        states: Mapping[str, Any],
        *,
        adapters: Collection[str] = (),
        add_files: Callable[[str], object],
        on_publish: Callable[[], object] = lambda: None,
        process_group: Any,
        options: SaveOptions | None,
    ) -> None:
        self.path = path
        self._group, self._options = process_group, options
        self._names = [name for name in states if name]
        self._error: BaseException | None = None
        self._handles = save_all_in_background(
            {_pending(path, name): state for name, state in states.items()},
            stems={_pending(path, name): ADAPTER_STEM for name in adapters},
            process_group=process_group,
            options=options,
            changes={"overwrite": True},
        )
        self._thread: threading.Thread | None = None
        if world.get_rank(process_group) == 0:
            arguments = (add_files, on_publish)
            self._thread = threading.Thread(target=self._publish, args=arguments, name="fastload-publish")
            self._thread.start()

    def wait(self) -> None:
        """Waits on all ranks until the directory exists.

        Raises:
            FastloadError: A save failed, or rank 0 could not publish the directory.
        """
        if self._thread is not None:
            self._thread.join()  # it deletes what is left of a failed save
        failures = [error for handle in self._handles if (error := _failure(handle)) is not None]
        if failures:
            raise failures[0]
        what = f"publishing {self.path}"
        with step_of_all(what, process_group=self._group, options=self._options):
            if self._error is not None:
                raise self._error

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as this rank knows."""
        is_publishing = self._thread is not None and self._thread.is_alive()
        return is_publishing or not all(handle.done() for handle in self._handles)

    def _publish(self, add_files: Callable[[str], object], on_publish: Callable[[], object]) -> None:
        for handle in self._handles:
            await_end(handle)
        pending = _pending(self.path, "")
        try:
            if any(handle.failed() for handle in self._handles):
                return  # all ranks learn of it
            for name in self._names:
                os.replace(_pending(self.path, name), os.path.join(pending, name))
            add_files(pending)
            for name in (*self._names, ""):
                _sync(os.path.join(pending, name))
            replace(pending, self.path)
            on_publish()
        except BaseException as error:
            self._error = error
        finally:
            for name in ("", *self._names):  # left of a failed save
                shutil.rmtree(_pending(self.path, name), ignore_errors=True)


def clear_pending(folder: str, prefix: str) -> None:
    """Deletes pending directories of interrupted saves, and restores directories that these moved away.

    Args:
        folder: The parent directory.
        prefix: Names of the saved directories begin with it, followed by a hyphen and a number.
    """
    pending = re.compile(rf"{_PENDING}({re.escape(prefix)}-\d+)(-.+)?")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if match := pending.fullmatch(name):
            path = os.path.join(folder, match[1])
            if match[2] == f"-{REPLACED}" and not os.path.lexists(path):
                os.replace(os.path.join(folder, name), path)
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


def replace(source: str, target: str) -> None:
    """Replaces a directory, in one step if the file system can exchange names."""
    old = _pending(target, REPLACED)
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
    """Exchanges two names in one directory; returns False if the file system does not support it."""
    with folders.closing(os.open(os.path.dirname(source), os.O_RDONLY | os.O_DIRECTORY)) as parent:
        try:
            folders.exchange(os.path.basename(source), parent, os.path.basename(target), parent)
        except OSError as error:
            if error.errno not in folders.UNABLE:
                raise
            return False
    return True


def _sync(folder: str) -> None:
    """Makes a directory and the files in it durable."""
    for path in [*(entry.path for entry in os.scandir(folder) if entry.is_file()), folder]:
        with folders.closing(os.open(path, os.O_RDONLY)) as descriptor:
            os.fsync(descriptor)
