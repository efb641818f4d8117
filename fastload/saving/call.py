"""A call to `save`: its arguments, its ranks and its place in the queue."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastload.base.registry import extension
from fastload.comm.group import Meeting
from fastload.comm.observers import Observers, notifying_of_failure, observe
from fastload.comm.world import World
from fastload.formats.names import MODEL_STEM, NAMES
from fastload.options import Patience, SaveOptions
from fastload.saving.background import QueuedSave, in_doubt, raise_unseen
from fastload.saving.snapshot import BufferPool, buffer_pool
from fastload.storage import (
    Location,
    PatientStorage,
    Target,
    locate,
    name_of,
    open_patiently,
    open_target,
)
from fastload.storage.base import Names

if TYPE_CHECKING:
    from fastload.saving.plan import PlanTransform


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
        transform: Plans what is written in place of the complete state; None to write that.
        stem: First part of the names of the files; of another one than ``model`` there is one file.
        small_files: Names and contents of files of the caller that are published with the checkpoint.
        problem: Why this rank cannot save, found by a caller that had to come here all the same. All ranks
            raise it, as any error of the state.
        step: Its step in a training; None if it is not of one.
        tier: ``storage``, or the name of a tier.
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
    transform: PlanTransform | None = None
    stem: str = MODEL_STEM
    small_files: Sequence[tuple[str, bytes]] = ()
    problem: Exception | None = None
    step: int | None = None
    tier: str = "storage"

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

    @contextmanager
    def together(self) -> Iterator[None]:
        """As `World.together`; also notifies if the block raises."""
        with (
            notifying_of_failure(self.world, "save", self.began, tier=self.tier, step=self.step),
            self.world.together(),
        ):
            yield

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
    small_files: Sequence[tuple[str, bytes]] = (),
    step: int | None = None,
) -> SaveCall:
    """Meets the other ranks for a save.

    Arguments are those of `fastload.save`, attributes of the call (`began` is that of the caller's own call,
    if it did something before), options that have other values than the caller's, by name, whether it ends
    in the background, and what returns, on rank 0, the base to save the changes of, or None.

    Raises:
        FastloadError: Some rank has a bad argument, or did not come.
    """
    began = time.perf_counter() if began is None else began
    # All ranks raise an error that only some have seen, and in this call, not in the background.
    raise_earlier = raise_unseen if in_doubt() or not in_background else None
    with Meeting(process_group, f"saving to {name_of(path)}") as meeting:
        chosen = replace(meeting.choose(options, SaveOptions), **(changes or {}))
        location, texts = locate(path), dict(metadata or {})
        transform: PlanTransform | None = None
        if find_base is not None or chosen.base is not None:
            save_changes = extension("plan_transforms", "delta", "saving a delta")
            transform = save_changes(location, chosen.base, find_base)
    world = meeting.world
    return SaveCall(
        world,
        location,
        metadata=texts,
        storage_options=storage_options,
        options=chosen,
        raise_earlier=raise_earlier,
        observers=observe(world, chosen.trace, of=os.path.basename(path) if step is not None else ""),
        began=began,
        pool=queued.queue.pool if queued is not None else buffer_pool,
        queued=queued,
        names=names,
        transform=transform,
        stem=stem,
        small_files=small_files,
        problem=problem,
        step=step,
    )
