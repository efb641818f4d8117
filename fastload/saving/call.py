"""One call to `save`: its arguments, its ranks and its place in the queue."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastload.comm.group import meet
from fastload.comm.traces import Tracing
from fastload.comm.world import World
from fastload.formats.names import NAMES
from fastload.options import SAVE_SETTINGS, SaveOptions
from fastload.report import SaveReport
from fastload.saving.snapshot import BufferPool, buffer_pool
from fastload.storage import Location, Target, locate, name_of, open_target
from fastload.storage.base import Names

_MAX_ATTEMPT_S = 30.0  # for one request: what takes longer has stalled


class QueuedSave(Protocol):
    """One of several saves that are written one after the other, on all ranks in the same order.

    All ranks hear from rank 0 whether it is written, when its turn has come there.

    Attributes:
        pool: Lends the memory of its snapshot.
    """

    @property
    def pool(self) -> BufferPool:
        """See above."""
        ...

    def hold(self, release: Callable[[], None]) -> None:
        """Takes a callback that frees the snapshot, should the save never be written."""
        ...

    def run(self, work: Callable[[], SaveReport | None]) -> SaveReport | None:
        """Does all that is left to do of the save."""
        ...

    def await_turn(self) -> bool:
        """Waits until it is to be written or not, as far as this rank can tell; returns which."""
        ...

    def give_up(self) -> None:
        """Notes that it is not written."""
        ...

    def came_instead_of(self) -> tuple[str, ...]:
        """Returns the URLs of the earlier saves that were not written, in favour of this one; once."""
        ...


@dataclass(frozen=True)
class SaveCall:
    """A call to save.

    Attributes:
        world: The ranks.
        location: Where to.
        metadata: Text of the user's; that of rank 0 counts.
        storage_options: For the target.
        options: How.
        raise_earlier: Raises what is left to raise of an earlier save; None if no rank can have anything.
        tracing: Records the save.
        began: `time.perf_counter` of the call.
        pool: Lends the memory of its snapshot.
        queued: Its place among the saves of a training; None to write at once.
        names: What files are called, and what may be replaced.
    """

    world: World
    location: Location
    metadata: Mapping[str, str]
    storage_options: Mapping[str, Any] | None
    options: SaveOptions
    raise_earlier: Callable[[], None] | None
    tracing: Tracing
    began: float
    pool: BufferPool = buffer_pool
    queued: QueuedSave | None = None
    names: Names = NAMES

    @property
    def url(self) -> str:
        """Where to, as it may be shown."""
        return self.location.url

    @property
    def what(self) -> str:
        """Name of the save, for messages."""
        return f"saving to {self.location}"

    def open_target(self) -> Target:
        """Opens write access; nothing is asked of the storage yet.

        Raises:
            OptionError: The URL cannot be written to, or what it needs is not installed.
        """
        options, patience_s = self.options, self.world.patience_s
        return open_target(
            self.location,
            self.names,
            self.storage_options,
            io=options.io,
            timeout_s=patience_s / 2,
            attempt_s=min(_MAX_ATTEMPT_S, patience_s / 6),
            retries=options.retries,
        )

    def tell(self, report: SaveReport) -> None:
        """Calls `on_report`."""
        if self.options.on_report is not None:
            self.options.on_report(report)


def make_call(
    path: str | os.PathLike[str],
    process_group: Any,
    metadata: Mapping[str, str] | None,
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions | None,
    *,
    raise_earlier: Callable[[], None] | None,
    queued: QueuedSave | None = None,
    names: Names = NAMES,
) -> SaveCall:
    """Has all ranks meet for a save; args are those of `fastload.save`, or attributes of the call.

    Raises:
        FastloadError: An argument cannot be used, on some rank, or a rank did not come.
    """
    began = time.perf_counter()

    def ready() -> tuple[Location, dict[str, str], SaveOptions]:
        return locate(path), dict(metadata or {}), options if options is not None else SaveOptions()

    world, (location, texts, chosen) = meet(
        process_group,
        f"saving to {name_of(path)}",
        ready,
        timeout_s=lambda ready: ready[2].timeout_s,
        default_s=getattr(options, "timeout_s", SAVE_SETTINGS["timeout_s"].default),
    )
    return SaveCall(
        world,
        location,
        metadata=texts,
        storage_options=storage_options,
        options=chosen,
        raise_earlier=raise_earlier,
        tracing=Tracing(world, chosen.trace),
        began=began,
        pool=queued.pool if queued is not None else buffer_pool,
        queued=queued,
        names=names,
    )
