"""How long a manager can be used."""

from __future__ import annotations

import os

from fastload.errors import WorldError

__all__ = ["Life"]


class Life:
    """Whether a manager can be used: until it is closed, and in the process that made it."""

    def __init__(self) -> None:
        self._closed = False
        self._pid = os.getpid()

    def require(self) -> None:
        """Raises `WorldError` if it cannot."""
        if self._pid != os.getpid():
            raise WorldError("this CheckpointManager is that of another process, which has forked this one")
        if self._closed:
            raise WorldError("this CheckpointManager is closed")

    def end(self) -> bool:
        """Ends it; returns whether it was still to be ended, and here."""
        if self._closed or self._pid != os.getpid():
            return False
        self._closed = True
        return True
