"""Where a training goes on: at the newest checkpoint that is whole, on storage or in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastload.errors import CheckpointNotFound, FastloadError, PeerError, StorageError, blames_checkpoint
from fastload.options import LoadOptions
from fastload.ranks.world import World
from fastload.report import LoadReport
from fastload.training.calls import Calls
from fastload.training.catalog import Catalog
from fastload.training.history import History
from fastload.training.retention import Point

if TYPE_CHECKING:  # for those who have a tier
    from fastload.tier.keeper import Keeper
    from fastload.tier.restore import Found

__all__ = ["Restored", "Restorer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What was restored.

    Attributes:
        step: Its step.
        source: ``memory`` or ``storage``.
        why: Why not from the other.
    """

    step: int
    source: str
    why: str


@dataclass(frozen=True)
class _Made:
    """What a load returned."""

    state: Any


class Restorer:
    """Restores checkpoints for all ranks together.

    Args:
        world: The ranks.
        calls: How checkpoints are loaded.
        catalog: Where they are.
        history: Lists those on storage, and hears of those in memory.
        keeper: The memory tier, or None.

    Attributes:
        damaged: Steps of checkpoints on storage that turned out not to be whole.
        restored: What was restored last, or None.
    """

    def __init__(
        self,
        world: World,
        calls: Calls,
        catalog: Catalog,
        history: History,
        keeper: Keeper | None,
    ) -> None:
        self.damaged: set[int] = set()
        self.restored: Restored | None = None
        self._world = world
        self._calls = calls
        self._catalog = catalog
        self._history = history
        self._keeper = keeper
        self._has_noted = False

    def note_memory(self) -> None:
        """Notes what is in memory, unless that was done: what is saved from here on is newer than all of it.

        A call of all ranks, if there is a tier.
        """
        if self._keeper is not None and not self._has_noted:
            try:
                self._note(self._keeper.survey())
            except FastloadError as error:
                self._warn(f"what is in memory is not known: {error}")

    def _note(self, generations: list[Found]) -> None:
        self._has_noted = True
        if generations:
            self._history.note(Point(generations[-1].branch, generations[-1].step))

    def in_memory(self) -> list[Found]:
        """Returns what is whole in memory, the oldest first; a call of all ranks, if there is a tier."""
        found = self._keeper.survey() if self._keeper is not None else []
        return [each for each in found if each.is_whole]

    def restore(self, step: int | None, arguments: Mapping[str, Any], finish: Callable[[], object]) -> Any:
        """Loads a checkpoint; see `CheckpointManager.restore`.

        Args:
            step: Which; None for the newest.
            arguments: For `fastload.load`, less the path.
            finish: What all ranks have to do before any of them lists what there is.

        Raises:
            FastloadError: As for `CheckpointManager.restore`.
        """
        recorded = self._history.look(finish).recorded
        reason = ""
        if self._keeper is not None:
            newest = recorded[-1] if recorded else None
            made = self._restore_from_memory(self._keeper, step, arguments, newest)
            if isinstance(made, _Made):
                return made.state
            reason = made
        state = self._restore_from_storage(step, arguments, [point.step for point in recorded], reason)
        if self._keeper is not None and step is None:
            self._keeper.keep_only("")  # all of it is older than what was restored, or not whole
            self._history.note_void()
            self._has_noted = True
        return state

    def _restore_from_memory(
        self, keeper: Keeper, step: int | None, arguments: Mapping[str, Any], newest: Point | None
    ) -> _Made | str:
        """Loads the newest generation that is whole; says why not, if nothing in memory is to be restored.

        Args:
            keeper: The memory tier.
            step: Which; None for the newest.
            arguments: For `fastload.load`, less the path.
            newest: The newest on storage.
        """
        generations = keeper.survey()
        if step is not None:  # what is newer stays
            self._note(generations)
        reason = _reason(generations)
        has = f"the newest on storage is step {newest.step}" if newest is not None else "storage has none"
        for found in reversed(generations):
            point = Point(found.branch, found.step)
            is_chosen = newest is None or point >= newest if step is None else found.step == step
            if not found.is_whole or not is_chosen:
                continue
            restored = Restored(found.step, "memory", has)
            try:
                state = keeper.load(found, _telling(arguments, restored))
            except FastloadError as error:
                if not _blames_memory(error):
                    raise
                reason = f"step {found.step} in memory cannot be restored: {error}"
                self._warn(reason)
                continue
            if step is None:
                keeper.keep_only(found.name)
                self._note([found])
            self.restored = restored
            return _Made(state)
        return reason

    def _restore_from_storage(
        self, step: int | None, arguments: Mapping[str, Any], listed: list[int], reason: str
    ) -> Any:
        is_given, left = step is not None, listed if step is None else [step]
        if not left:
            raise CheckpointNotFound(f"{self._catalog.root}: no checkpoint to restore{_also(reason)}")
        tried: set[int] = set()
        while True:
            step = left.pop()
            made = Restored(step, "storage", reason)
            try:
                state = self._calls.load(os.fspath(self._catalog.path(step)), _telling(arguments, made))
            except FastloadError as error:
                if not blames_checkpoint(error):
                    raise
                tried.add(step)
                # Listed anew: it may have been deleted meanwhile, for newer ones that another process saved.
                listed = [point.step for point in self._history.look().recorded]
                if step in listed:
                    self.damaged.add(step)
                left = [other for other in listed if other not in tried]
                if is_given or not left:
                    raise
                self._warn(f"step {step} cannot be restored, falling back to {left[-1]}: {error}")
            else:
                if reason:
                    self._warn(f"step {step} is restored from storage: {reason}")
                self.restored = made
                return state

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            _log.warning("%s", text)


def _reason(found: list[Found]) -> str:
    """Says why nothing newer is restored from memory."""
    if not found:
        return "nothing is in memory"
    return found[-1].lack or f"memory has step {found[-1].step} only"


def _also(reason: str) -> str:
    return f", and {reason}" if reason else ""


def _blames_memory(error: BaseException) -> bool:
    """Whether an error says that what is in memory is bad, or cannot be read: then storage has something."""
    if isinstance(error, PeerError):
        return all(map(_blames_memory, error.failures.values()))
    return blames_checkpoint(error) or isinstance(error, StorageError)


def _telling(arguments: Mapping[str, Any], made: Restored) -> dict[str, Any]:
    """Returns the arguments of a load whose report says where it is from."""
    options: LoadOptions | None = arguments.get("options")
    tell = options.on_report if options is not None else None
    if options is None or tell is None:
        return dict(arguments)

    def tell_more(report: LoadReport) -> None:
        tell(replace(report, source=made.source, source_why=made.why))

    return {**arguments, "options": replace(options, on_report=tell_more)}
