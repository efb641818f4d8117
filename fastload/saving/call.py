"""A call to `save`: its arguments, its ranks and its place in the queue."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastload.comm.group import Meeting
from fastload.comm.observers import Observers, observe
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.names import MODEL_STEM, NAMES
from fastload.formats.untrusted import is_plain_path
from fastload.options import Patience, SaveOptions
from fastload.saving.background import QueuedSave, in_doubt, raise_unseen
from fastload.saving.snapshot import BufferPool, buffer_pool
from fastload.storage import (
    Location,
    PatientStorage,
    Target,
    folders,
    locate,
    name_of,
    open_patiently,
    open_target,
)
from fastload.storage.base import Names


@dataclass(frozen=True)
class SaveCall:
    """A call to save.

    Attributes:
        world: The ranks.
        location: The destination.
        metadata: The user's text; rank 0's is stored.
        storage_options: Options of the target.
        options: How to save.
        raise_earlier: Raises the error of an earlier save, if any; None if no rank can have one.
        observers: Observe the save.
        began: `time.perf_counter` of the call.
        pool: Lends the memory of its snapshot.
        queued: Its place among the saves of a training; None to write at once.
        names: The names of files, and which ones may be replaced.
        find_base: Returns, on rank 0, the base to save a delta of, or None; None to save a complete one.
        stem: First part of the names of the files; of another one than ``model`` there is one file.
        problem: Why this rank cannot save, found by a caller that had to come here all the same. All ranks
            raise it, as any error of the state.
    """

    world: World
    location: Location
    metadata: Mapping[str, str]
    storage_options: Mapping[str, Any] | None
    options: SaveOptions
    raise_earlier: Callable[[], None] | None
    observers: Observers
    began: float
    pool: BufferPool = buffer_pool
    queued: QueuedSave | None = None
    names: Names = NAMES
    find_base: Callable[[], Location | None] | None = None
    stem: str = MODEL_STEM
    problem: Exception | None = None

    @property
    def url(self) -> str:
        """The destination, without credentials."""
        return self.location.url

    @property
    def what(self) -> str:
        """Name of the save, for messages."""
        return f"saving to {self.location}"

    @property
    def occasion(self) -> str:
        """The folder and the name of the checkpoint, the same on all ranks."""
        return self.location.given

    @property
    def _patience(self) -> Patience:
        return Patience(self.options.retries, self.world.patience_s / 2)

    def open_target(self) -> Target:
        """Opens write access, without a request to storage.

        Raises:
            OptionError: The URL cannot be written to, or what it needs is not installed.
        """
        io, patience = self.options.io, self._patience
        return open_target(self.location, self.names, self.storage_options, io=io, patience=patience)

    def open_storage(self, location: Location) -> PatientStorage:
        """Opens read access to another checkpoint, without a request to storage."""
        return open_patiently(location, NAMES, self.storage_options, patience=self._patience)


def make_call(
    path: str | os.PathLike[str],
    process_group: Any,
    metadata: Mapping[str, str] | None,
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions | None,
    *,
    changes: Mapping[str, Any] | None = None,
    problem: Exception | None = None,
    began: float | None = None,
    in_background: bool = False,
    queued: QueuedSave | None = None,
    names: Names = NAMES,
    find_base: Callable[[], Location | None] | None = None,
    stem: str = MODEL_STEM,
) -> SaveCall:
    """Meets the other ranks for a save.

    Arguments are those of `fastload.save`, attributes of the call (`began` is that of the caller's own call,
    if it did something before), options that have other values than the caller's, by name, and whether it
    ends in the background.

    Raises:
        FastloadError: Some rank has a bad argument, or did not come.
    """
    began = time.perf_counter() if began is None else began
    # All ranks raise an error that only some have seen, and in this call, not in the background.
    raise_earlier = raise_unseen if in_doubt() or not in_background else None
    with Meeting(process_group, f"saving to {name_of(path)}") as meeting:
        chosen = replace(meeting.choose(options, SaveOptions), **(changes or {}))
        location, texts = locate(path), dict(metadata or {})
        if chosen.base is not None:
            base_name(locate(chosen.base), location)
    world = meeting.world
    if find_base is None and chosen.base is not None:
        find_base = partial(locate_base, chosen.base)
    return SaveCall(
        world,
        location,
        metadata=texts,
        storage_options=storage_options,
        options=chosen,
        raise_earlier=raise_earlier,
        observers=observe(world, chosen.trace),
        began=began,
        pool=queued.queue.pool if queued is not None else buffer_pool,
        queued=queued,
        names=names,
        find_base=find_base,
        stem=stem,
        problem=problem,
    )


def locate_base(path: str | os.PathLike[str]) -> Location:
    """Returns the location of a base; of a link to a directory next to it, such as ``latest``, its target.

    The link may lead elsewhere by the time of a load.
    """
    found = locate(path)
    return found if found.scheme else locate(folders.resolve_sibling(found.address))


def base_name(base: Location, location: Location) -> str:
    """Returns the name of the directory of a base.

    Raises:
        OptionError: It has none, or is the checkpoint to save.
    """
    folder, _, name = base.url.rstrip("/").rpartition("/")
    if not is_plain_path(name) or folder.endswith(":/"):
        raise OptionError(f"base={base.url!r}: is no directory with a name that a delta can store")
    if base.url.rstrip("/") == location.url.rstrip("/"):
        raise OptionError(f"base={base.url!r}: is the checkpoint to save: save to another path")
    return name
