"""The checked arguments of a `CheckpointManager`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from fastload.errors import OptionError
from fastload.options import SaveOptions
from fastload.storage import Location
from fastload.training.interval import IntervalPolicy
from fastload.training.retention import Retention


@dataclass(frozen=True)
class Policy:
    """The arguments of a `CheckpointManager`, checked.

    Attributes:
        root: Root of the checkpoints.
        interval: When to save.
        retention: Which checkpoints to keep.
        async_: Whether to save in the background.
        options: How to save.
        max_pending_saves: Most copies of the state at once.
        memory: Directory of the memory tier on each host, or ``auto``; None without a tier.

    Raises:
        OptionError: A value is invalid.
    """

    root: Location
    interval: IntervalPolicy
    retention: Retention
    async_: bool
    options: SaveOptions
    max_pending_saves: int = 1
    memory: str | None = None

    def __post_init__(self) -> None:
        if type(self.max_pending_saves) is not int or self.max_pending_saves < 1:
            raise OptionError(f"max_pending_saves={self.max_pending_saves!r}: must be a number of at least 1")
        if self.max_pending_saves > 1 and not self.async_:
            raise OptionError(
                f"max_pending_saves={self.max_pending_saves}: needs async_=True, since other saves end "
                "before they return"
            )

    def shared_values(self) -> dict[str, Any]:
        """Returns the values that must be the same on all ranks."""
        best = self.retention.best
        return {
            "call": "CheckpointManager",
            "root": self.root.given,
            **asdict(self.interval),
            **asdict(self.retention),
            "best": list(best) if best is not None else None,
            "async_": self.async_,
            "max_pending_saves": self.max_pending_saves,  # not `memory`, which may differ between hosts
            **self.options.shared_values(),
        }


def memory_directory(memory: str | os.PathLike[str] | None) -> str | None:
    """Returns the directory of a memory tier, absolute, or ``auto``; None without one.

    Raises:
        OptionError: It is not a path.
    """
    if memory is None:
        return None
    path = os.fspath(memory)
    if not isinstance(path, str) or not path:
        raise OptionError(f"memory={memory!r}: must be 'auto' or a directory on each host")
    return path if path == "auto" else os.path.abspath(path)
