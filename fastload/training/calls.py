"""How the checkpoints of a training are saved and loaded: the same way each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastload import api
from fastload.comm.world import agree
from fastload.options import LoadOptions, SaveOptions
from fastload.saving.call import Turn
from fastload.saving.handle import SaveHandle
from fastload.saving.save import save_in_background

__all__ = ["Calls"]


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
        self, state: Any, path: str, metadata: Mapping[str, str], *, turn: Turn | None
    ) -> SaveHandle | None:
        """Saves; returns what goes on in the background, if anything does.

        Args:
            state: As for `fastload.save`.
            path: Where to.
            metadata: As for `fastload.save`.
            turn: When what goes on in the background is written; None for at once.

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
            return save_in_background(state, path, **given, turn=turn)
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
