"""One save at a time, in the background, and what is to be done once it is durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fastload import FastloadError, SaveHandle, SaveOptions, async_save, world

__all__ = ["BackgroundSave"]


class BackgroundSave:
    """The last save of a training.

    Args:
        options: How to save; what is there is replaced, whatever they say.

    Attributes:
        path: Where to, while nobody has waited for it; else empty.
    """

    def __init__(self, options: SaveOptions) -> None:
        self.path = ""
        self._options = replace(options, overwrite=True)
        self._handle: SaveHandle | None = None
        self._work: list[Callable[[], None]] = []

    def begin(self, state: Any, path: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Saves a state, once the save before is durable, and what was to be done after it is done.

        Raises:
            FastloadError: As for `fastload.async_save`; or the save before has failed.
        """
        self.wait()
        self._handle = async_save(state, path, storage_options=storage_options, options=self._options)
        self.path = path

    def afterwards(self, work: Callable[[], None]) -> None:
        """Has rank 0 do something once the last save is durable, in the next `wait`; now, if it is."""
        if world.rank_in(None) == 0:
            self._work.append(work)
            if self._handle is None:
                self._do()

    def wait(self) -> None:
        """Waits for the last save.

        Raises:
            FastloadError: It failed; what was to be done after it is not done.
        """
        handle, self._handle, self.path = self._handle, None, ""
        try:
            if handle is not None:
                handle.wait()
        except FastloadError:
            self._work.clear()
            raise
        self._do()

    def _do(self) -> None:
        work, self._work = self._work, []
        for each in work:
            each()
