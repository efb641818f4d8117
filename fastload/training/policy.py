"""How a training is to be saved: where, when, what is kept, and the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastload import api
from fastload.comm.world import agree
from fastload.errors import OptionError
from fastload.options import LoadOptions, SaveOptions
from fastload.saving.call import QueuedSave
from fastload.saving.handle import SaveHandle
from fastload.saving.save import save_in_background
from fastload.storage import Location
from fastload.training.interval import Keepers, Rhythm
from fastload.training.retention import Retention

__all__ = ["Calls", "Policy", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """Where recent checkpoints are kept, and how often.

    Attributes:
        memory: A directory on each host, or ``auto``.
        num_copies: How many hosts are to keep each share.

    Raises:
        OptionError: It cannot be used.
    """

    memory: str
    num_copies: int

    @classmethod
    def of(cls, memory: str | os.PathLike[str] | None, num_copies: int) -> Wanted | None:
        """Returns what was asked for; None if nothing was.

        Raises:
            OptionError: It cannot be used.
        """
        if memory is None:
            return None
        path = os.fspath(memory)
        if not isinstance(path, str) or not path:
            raise OptionError(f"memory={memory!r}: must be 'auto' or a directory on each host")
        return cls(path if path == "auto" else os.path.abspath(path), num_copies)

    def __post_init__(self) -> None:
        if type(self.num_copies) is not int or self.num_copies < 1:
            raise OptionError(f"memory_copies={self.num_copies!r}: must be a number of at least 1")


@dataclass(frozen=True)
class Policy:
    """The arguments of a `CheckpointManager`, checked.

    Attributes:
        root: Where the checkpoints are.
        every_steps: Steps between saves.
        rhythm: Seconds between saves.
        retention: What is kept.
        async_: Whether saves go on in the background.
        options: How to save.
        in_flight: Copies of the state, to be written or being written, that there may be at once.
        memory: Where recent checkpoints are kept in memory; None for nowhere.
        memory_every_steps: Steps between those.
        memory_every_seconds: Seconds between those.

    Raises:
        OptionError: One cannot be used.
    """

    root: Location
    every_steps: int | None
    rhythm: Rhythm
    retention: Retention
    async_: bool
    options: SaveOptions
    in_flight: int = 1
    memory: Wanted | None = None
    memory_every_steps: int | None = None
    memory_every_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("every_steps", "memory_every_steps"):
            steps = getattr(self, name)
            if steps is not None and (type(steps) is not int or steps < 1):
                raise OptionError(f"{name}={steps!r}: must be a number of at least 1")
        seconds = self.memory_every_seconds
        if seconds is not None and not (type(seconds) in (int, float) and seconds > 0):
            raise OptionError(f"memory_every_seconds={seconds!r}: must be a number of seconds above 0")
        if type(self.in_flight) is not int or self.in_flight < 1:
            raise OptionError(f"in_flight={self.in_flight!r}: must be a number of at least 1")
        if self.in_flight > 1 and not self.async_:
            raise OptionError(
                f"in_flight={self.in_flight}: saves with async_=False are over when they return"
            )
        has_interval = (self.memory_every_steps, seconds) != (None, None)
        needs_one = self.memory is not None and self.rhythm.every != "auto"
        if has_interval < needs_one or has_interval > (self.memory is not None):
            raise OptionError(
                "memory= and memory_every_steps= or memory_every_seconds= go together (or memory= and "
                "every='auto'): where to keep recent checkpoints, and how often"
            )

    def keepers(self, num_hosts: int) -> Keepers | None:
        """Returns who keeps recent checkpoints in memory, of so many hosts, and how often."""
        if self.memory is None:
            return None
        is_paced = (self.memory_every_steps, self.memory_every_seconds) == (None, None)
        return Keepers(num_hosts, self.memory.num_copies, self.memory_every_seconds, is_paced)

    @property
    def has_interval(self) -> bool:
        """Whether anything but a signal can make a save due."""
        by_time = (self.rhythm.every, self.rhythm.every_seconds, self.memory) != (None, None, None)
        return by_time or self.every_steps is not None

    def shared_values(self) -> dict[str, Any]:
        """Returns the values that must be the same on every rank."""
        best = self.retention.best
        return {
            "call": "CheckpointManager",
            "root": self.root.given,
            "every_steps": self.every_steps,
            **asdict(self.rhythm),
            **asdict(self.retention),
            "best": list(best) if best is not None else None,
            "async_": self.async_,
            "in_flight": self.in_flight,
            # Where it is may differ between hosts.
            "memory_copies": self.memory.num_copies if self.memory is not None else None,
            "memory_every_steps": self.memory_every_steps,
            "memory_every_seconds": self.memory_every_seconds,
            **self.options.shared_values(),
        }


@dataclass(frozen=True)
class Calls:
    """What all calls of one training have in common.

    Attributes:
        process_group: As for `fastload.load`.
        storage_options: As for `fastload.load`.
        options: How to save.
        async_: Whether saves go on in the background.
    """

    process_group: Any
    storage_options: Mapping[str, Any] | None
    options: SaveOptions
    async_: bool

    def save(
        self, state: Any, path: str, metadata: Mapping[str, str], *, queued: QueuedSave | None
    ) -> SaveHandle | None:
        """Saves; returns what goes on in the background, if anything does.

        Args:
            state: As for `fastload.save`.
            path: Where to.
            metadata: As for `fastload.save`.
            queued: Its place among the pending saves; None to write at once.

        Raises:
            FastloadError: As for `fastload.save`.
        """
        given: dict[str, Any] = {
            "process_group": self.process_group,
            "metadata": metadata,
            "storage_options": self.storage_options,
            "options": self.options,
        }
        if self.async_:
            return save_in_background(state, path, **given, queued=queued)
        api.save(state, path, **given)
        return None

    def load(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Loads.

        Args:
            path: Where from.
            arguments: Further ones of `fastload.load`.

        Raises:
            FastloadError: As for `fastload.load`.
        """
        given = {
            "process_group": self.process_group,
            "storage_options": self.storage_options,
            "options": LoadOptions(timeout_s=self.options.timeout_s, retries=self.options.retries),
        }
        return api.load(path, **{**given, **arguments})

    def agree(self, what: str, work: Callable[[], object]) -> None:
        """Does work on all ranks together; raises on all if it fails on one.

        Raises:
            FastloadError: It failed on some rank.
        """
        agree(self.process_group, what, work, timeout_s=self.options.timeout_s)
