"""Where a training goes on: at the newest checkpoint that is whole, on storage or in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastload.comm.world import World
from fastload.errors import CheckpointNotFound, FastloadError, PeerError, StorageError, proves_damage
from fastload.options import LoadOptions
from fastload.report import LoadReport
from fastload.training.calls import Calls
from fastload.training.catalog import Catalog
from fastload.training.history import History, Listing
from fastload.training.retention import Point

if TYPE_CHECKING:  # for those who have a tier
    from fastload.memory_tier.keeper import Keeper
    from fastload.memory_tier.restore import Found

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
class _Place:
    """Where a checkpoint may be restored from.

    Attributes:
        point: Where it stands in the history of the run.
        found: The generation, if it is in memory; None if it is on storage.
    """

    point: Point
    found: Found | None = None

    @property
    def step(self) -> int:
        """Its step."""
        return self.point.step


class Restorer:
    """Restores checkpoints for all ranks together.

    Args:
        world: The ranks.
        calls: How checkpoints are loaded.
        catalog: Where they are.
        history: Lists those on storage, and hears of those in memory.
        keeper: The memory tier, or None.

    Attributes:
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

    def _note(self, generations: list[Found], restored: Found | None = None) -> None:
        """Notes the newest of some generations, which is given up unless it was restored."""
        self._has_noted = True
        if generations:
            newest = generations[-1]
            self._history.note(Point(newest.branch, newest.step), given_up=newest is not restored)

    def in_memory(self) -> list[Found]:
        """Returns what is whole in memory, the oldest first; a call of all ranks, if there is a tier."""
        found = self._keeper.survey() if self._keeper is not None else []
        return [each for each in found if each.is_whole]

    def restore(self, step: int | None, arguments: Mapping[str, Any], finish: Callable[[], object]) -> Any:
        """Loads a checkpoint; see `CheckpointManager.restore`.

        The newest of all that are on storage or in memory comes first; only what proves to be damaged is left
        for the next one.

        Args:
            step: Which; None for the newest.
            arguments: For `fastload.load`, less the path.
            finish: What all ranks have to do before any of them lists what there is.

        Raises:
            FastloadError: As for `CheckpointManager.restore`.
        """
        listing = self._history.look(finish)
        generations = self._keeper.survey() if self._keeper is not None else []
        reason = _reason(generations) if self._keeper is not None else ""
        tried: list[_Place] = []
        while True:
            left = self._left(step, listing, generations, tried)
            if not left:
                raise CheckpointNotFound(f"{self._catalog.root}: no checkpoint to restore{_also(reason)}")
            place = left[-1]
            try:
                state = self._load(place, left, arguments, reason)
            except FastloadError as error:
                if not (_blames_memory(error) if place.found is not None else proves_damage(error)):
                    raise
                tried.append(place)
                if place.found is None:
                    listing = self._look_again(place.step)
                left = self._left(step, listing, generations, tried)
                if not left or (step is not None and place.found is None):
                    raise
                if place.found is not None:
                    reason = f"step {place.step} in memory cannot be restored: {error}"
                    self._warn(reason)
                else:
                    next_step = left[-1].step
                    self._warn(f"step {place.step} cannot be restored, falling back to {next_step}: {error}")
            else:
                self._settle(step, place, generations, reason)
                return state

    def _look_again(self, step: int) -> Listing:
        """Lists anew, and notes that a step is damaged, if it is still there.

        It may have been deleted meanwhile, for newer ones that another process saved.
        """
        listing = self._history.look()
        if any(point.step == step for point in listing.recorded):
            self._catalog.damaged.add(step)
        return listing

    def _left(
        self, step: int | None, listing: Listing, generations: list[Found], tried: Collection[_Place]
    ) -> list[_Place]:
        """Returns where a checkpoint may come from, the one to try first last; of equals that is memory.

        Raises:
            UnsupportedVersion: There is one that this fastload cannot read, and that may be the newest.
        """
        unsupported = listing.unsupported
        places = [_Place(point) for point in listing.recorded]
        if step is not None:
            unsupported = {step: unsupported[step]} if step in unsupported else {}
            # One that is not listed is tried, too: the load says what is the matter.
            places = [place for place in places if place.step == step] or [_Place(Point(-1, step))]
        self._catalog.require_supported(unsupported)
        kept = [_Place(Point(found.branch, found.step), found) for found in generations if found.is_whole]
        places += [place for place in kept if step is None or place.step == step]
        places = [place for place in places if place not in tried]
        return sorted(places, key=lambda place: (place.point, place.found is not None))

    def _load(self, place: _Place, left: list[_Place], arguments: Mapping[str, Any], reason: str) -> Any:
        if place.found is None or self._keeper is None:
            made = Restored(place.step, "storage", reason)
            state = self._calls.load(os.fspath(self._catalog.path(place.step)), _telling(arguments, made))
        else:
            stored = [other.step for other in left if other.found is None]
            why = f"the newest on storage is step {stored[-1]}" if stored else "storage has none"
            made = Restored(place.step, "memory", why)
            state = self._keeper.load(place.found, _telling(arguments, made))
        self.restored = made
        return state

    def _settle(self, step: int | None, place: _Place, generations: list[Found], reason: str) -> None:
        """Has memory keep what is of use once something was restored."""
        if place.found is None and reason:
            self._warn(f"step {place.step} is restored from storage: {reason}")
        if self._keeper is None:
            return
        if step is not None:  # what is newer stays
            self._note(generations, place.found)
        elif place.found is not None:
            self._keeper.keep_only(place.found.name)
            self._note([place.found], place.found)
        else:
            self._keeper.keep_only("")  # all of it is older than what was restored, or not whole
            self._history.note_void()
            self._has_noted = True

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
    return proves_damage(error) or isinstance(error, StorageError)


def _telling(arguments: Mapping[str, Any], made: Restored) -> dict[str, Any]:
    """Returns the arguments of a load whose report says where it is from."""
    options: LoadOptions | None = arguments.get("options")
    tell = options.on_report if options is not None else None
    if options is None or tell is None:
        return dict(arguments)

    def tell_more(report: LoadReport) -> None:
        tell(replace(report, source=made.source, source_why=made.why))

    return {**arguments, "options": replace(options, on_report=tell_more)}
