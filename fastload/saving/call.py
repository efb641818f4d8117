"""A call to save, as one rank makes it: what every step of the save is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastload.formats.names import NAMES
from fastload.options import SaveOptions
from fastload.ranks.traces import Tracing
from fastload.ranks.world import World
from fastload.report import SaveReport
from fastload.storage import Location, Target, open_target

__all__ = ["Call"]

_MAX_ATTEMPT_S = 30.0  # for one request: what takes longer has stalled


@dataclass(frozen=True)
class Call:
    """A call to save.

    Attributes:
        world: The ranks.
        location: Where to.
        metadata: Text of the user's; that of rank 0 counts.
        storage_options: For the target.
        options: How.
        in_background: Whether the caller waits for the snapshot only.
        raise_earlier: Raises what is left to raise of an earlier save; None if no rank can have anything.
        tracing: Records the save.
        began: `time.perf_counter` of the call.
    """

    world: World
    location: Location
    metadata: Mapping[str, str]
    storage_options: Mapping[str, Any] | None
    options: SaveOptions
    in_background: bool
    raise_earlier: Callable[[], None] | None
    tracing: Tracing
    began: float

    @property
    def url(self) -> str:
        """Where to, as it may be shown."""
        return self.location.url

    @property
    def what(self) -> str:
        """Name of the save, for messages."""
        return f"saving to {self.location}"

    @property
    def folder(self) -> str:
        """What the checkpoints of a training have in common."""
        return self.url.rstrip("/").rpartition("/")[0]

    def open_target(self) -> Target:
        """Opens write access; nothing is asked of the storage yet.

        Raises:
            OptionError: The URL cannot be written to, or what it needs is not installed.
        """
        options, patience_s = self.options, self.world.patience_s
        return open_target(
            self.location,
            NAMES,
            self.storage_options,
            io=options.io,
            timeout_s=patience_s / 2,
            attempt_s=min(_MAX_ATTEMPT_S, patience_s / 6),
            retries=options.retries,
        )

    def tell(self, report: SaveReport) -> None:
        """Hands the report to whoever wants it."""
        if self.options.on_report is not None:
            self.options.on_report(report)
