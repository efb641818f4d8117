"""The save that a training made last, which may go on in the background."""

from __future__ import annotations

from collections.abc import Callable

from fastload.saving.handle import SaveHandle
from fastload.training.retention import Point

__all__ = ["LastSave"]


class LastSave:
    """Keeps hold of the last save until somebody has waited for it.

    Attributes:
        number: How many saves have been begun.
        point: Of the newest that has succeeded, or None.
    """

    def __init__(self) -> None:
        self.number = 0
        self.point: Point | None = None
        self._begun: Point | None = None
        self._handle: SaveHandle | None = None

    @property
    def failed(self) -> int:
        """Its number if it has failed, else 0."""
        return self.number if self._handle is not None and self._handle.failed() else 0

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended yet."""
        return self._handle is not None and not self._handle.done()

    def make(self, save: Callable[[], SaveHandle | None], point: Point | None) -> Callable[[], bool]:
        """Makes the next one.

        Args:
            save: Makes it.
            point: Where it stands in the history of the run.

        Returns:
            What waits until it has ended, and says whether its checkpoint exists.
        """
        self.number += 1
        self._begun = None
        self._handle = handle = save()
        self._begun = point

        def has_succeeded() -> bool:
            if handle is not None:
                handle.settle()
            return handle is None or not handle.failed()

        return has_succeeded

    def settle(self) -> None:
        """Waits for it; an error is left for the next save, which tells all ranks."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.settle()
        self._note(handle)

    def _note(self, handle: SaveHandle | None) -> None:
        if handle is None or not handle.failed():
            self.point = self._begun or self.point

    def wait(self) -> None:
        """Waits for it.

        Raises:
            FastloadError: It failed.
        """
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                handle.wait()
            self._note(handle)
        finally:
            del handle  # else error → traceback → frame → handle → error would keep it all alive
