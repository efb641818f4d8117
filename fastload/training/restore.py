"""Where a training goes on: at the newest checkpoint that is whole, on storage or in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastload.comm.world import World, agree
from fastload.errors import (
    CheckpointNotFound,
    FastloadError,
    OptionError,
    PeerError,
    StorageError,
    proves_damage,
)
from fastload.options import LoadOptions
from fastload.report import LoadReport
from fastload.training.catalog import Catalog, Entry
from fastload.training.policy import Calls
from fastload.training.retention import Point, branch_for

if TYPE_CHECKING:
    from fastload.memory_tier.restore import Found
    from fastload.memory_tier.tier import Keeper

__all__ = ["History", "Listing", "Restored", "Restorer"]

_log = logging.getLogger(__name__)
_RECORDED = ("complete", "damaged")  # what a load can be tried of
_UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Listing:
    """What there was at one time; the same on all ranks.

    Attributes:
        complete: The checkpoints that are whole as far as a listing tells, oldest first; where hosts have
            disks of their own, on any of them.
        recorded: Those with a commit record, whole or not.
        links: Steps of which the name is a symbolic link.
        unsupported: Why this fastload cannot read a checkpoint, by step.
    """

    complete: tuple[Point, ...]
    recorded: tuple[Point, ...]
    links: frozenset[int]
    unsupported: Mapping[int, str]


class History:
    """Lists the checkpoints of a run for all ranks together, and says where the next one stands among them.

    Args:
        world: The ranks.
        catalog: Where the checkpoints are.
        lists: Whether this rank asks storage; at least one does.
        process_group: That of the ranks, as for `fastload.load`.
    """

    def __init__(self, world: World, catalog: Catalog, *, lists: bool, process_group: Any) -> None:
        self._world = world
        self._group = process_group
        self._catalog = catalog
        self._lists = lists
        self._newest: Point | None = None  # see `newest`
        self._in_memory: Point | None = None
        self._memory_is_void = False
        self._given_up: Point | None = None
        self._listed: Listing | None = None  # the last listing
        self._warned: set[int] = set()

    def look(self, *before: Callable[[], object]) -> Listing:
        """Lists what there is, on all ranks together.

        Args:
            before: What all ranks have to do before any of them lists.

        Raises:
            FastloadError: A rank could not ask storage.
        """

        def look() -> list[tuple[int, int, str, bool, str]]:
            entries = self._catalog.entries() if self._lists else []
            self._warn_of(entries)
            return [
                (
                    one.point.branch,
                    one.step,
                    one.state,
                    one.is_link,
                    one.problem * (one.state == _UNSUPPORTED),
                )
                for one in entries
            ]

        what = f"listing the checkpoints in {self._catalog.root.given}"
        listings = agree(self._group, what, *before, look, timeout_s=self._world.timeout_s)
        found = [one for entries in listings for one in entries]
        listing = Listing(
            complete=_points((branch, step) for branch, step, state, *_ in found if state == "complete"),
            recorded=_points((branch, step) for branch, step, state, *_ in found if state in _RECORDED),
            links=frozenset(step for _, step, _, is_link, _ in found if is_link),
            unsupported={step: problem for _, step, state, _, problem in found if state == _UNSUPPORTED},
        )
        self._newest = max(listing.recorded, default=None)
        if self._in_memory is not None:
            self._newest = max(self._newest or self._in_memory, self._in_memory)
        self._listed = listing
        return listing

    @property
    def newest(self) -> Point | None:
        """The newest of all that was listed, noted, or about to be saved."""
        return self._newest

    def is_durable(self, saved: Point | None, flushed: tuple[int, int] | None) -> bool:
        """Whether nothing in memory is newer than what was saved, or written to storage from memory."""
        if self._memory_is_void:
            return True
        points = [point for point in (saved, Point(*flushed) if flushed is not None else None) if point]
        return bool(points) and (self._in_memory is None or self._in_memory <= max(points))

    @property
    def has_memory(self) -> bool:
        """Whether this life of the job has put something into memory, or gone on from there."""
        return self._in_memory is not None

    def note(self, point: Point, *, given_up: bool = False) -> None:
        """Notes what is in memory, which is none of the checkpoints that can be listed.

        Args:
            point: The newest of it.
            given_up: Whether the run goes on from something older.
        """
        self._in_memory, self._memory_is_void = point, False
        self._given_up = point if given_up else None
        self._newest = point if self._newest is None else max(self._newest, point)

    def note_void(self) -> None:
        """Notes that nothing in memory is of use: what is on storage is newer, or whole."""
        self._in_memory, self._given_up, self._memory_is_void = None, None, True

    def branch_for(self, step: int) -> int:
        """Returns the branch of a checkpoint that is about to be saved; on all ranks together.

        Raises:
            OptionError: There is a link in its place.
            UnsupportedVersion: There is a checkpoint that this fastload cannot read, and that may be newer.
            FastloadError: A rank could not ask storage, which the first save of a manager does.
        """
        listing = self._listed
        if listing is None or listing.unsupported:
            listing = self.look()
        self._catalog.require_supported(listing.unsupported)
        if step in listing.links:
            raise OptionError(
                f"{self._catalog.path(step)} is a link: a save does not replace what it leads to"
            )
        branch, newest = branch_for(step, self._newest), self._newest
        if Point(branch, step) == self._given_up:  # of two that compare as equal, that in memory is taken
            branch += 1
        if newest is not None and branch > newest.branch and self._world.rank == 0:
            _log.warning(
                "step %d is saved after step %d: the run went back, or another one begins in %s. What is "
                "saved from here on counts as newer than all that was there before, whatever the steps: "
                "`latest` and `restore` prefer it, and what was there before is the first to be deleted",
                step, newest.step, self._catalog.root,
            )  # fmt: skip
        self._newest = Point(branch, step)
        return branch

    def _warn_of(self, entries: list[Entry]) -> None:
        for one in entries:
            if one.state in ("unreadable", _UNSUPPORTED) and one.step not in self._warned:
                self._warned.add(one.step)
                _log.warning(
                    "%s cannot be read, and is left out: %s", self._catalog.path(one.step), one.problem
                )


def _points(found: Iterable[tuple[int, int]]) -> tuple[Point, ...]:
    """Returns points in their order; of those of one step, as hosts may have, the newest."""
    branches: dict[int, int] = {}
    for branch, step in found:
        branches[step] = max(branch, branches.get(step, 0))
    return tuple(sorted(Point(branch, step) for step, branch in branches.items()))


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
