"""Where a training goes on: at the newest complete checkpoint, on storage or in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastload import api
from fastload.comm.group import agree
from fastload.comm.world import World
from fastload.errors import (
    CheckpointNotFound,
    FastloadError,
    OptionError,
    PeerError,
    StorageError,
    proves_damage,
)
from fastload.report import LoadReport
from fastload.training.catalog import Catalog, Entry
from fastload.training.retention import Point, branch_for

if TYPE_CHECKING:
    from fastload.memory_tier.restore import InMemoryCheckpoint
    from fastload.memory_tier.tier import MemoryTier

_log = logging.getLogger(__name__)
_RECORDED = ("complete", "damaged")  # what a load can be tried of
_UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Listing:
    """What there was at one time; the same on all ranks.

    Attributes:
        complete: The complete checkpoints, as far as a listing tells, oldest first; where hosts have
            disks of their own, on any of them.
        recorded: Those with a commit record, complete or not.
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

    def is_durable(self, *written: tuple[int, int] | None) -> bool:
        """Whether nothing in memory is newer than the newest of what was written to storage."""
        if self._memory_is_void:
            return True
        points = [point for point in written if point is not None]
        return bool(points) and (self._in_memory is None or self._in_memory <= max(points))

    @property
    def has_memory(self) -> bool:
        """Whether this start of the job has saved to memory, or gone on from there."""
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
        """Notes that nothing in memory is of use: what is on storage is newer, or complete."""
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
class RestoredCheckpoint:
    """A checkpoint that was restored.

    Attributes:
        step: Its step.
        source: ``memory`` or ``storage``.
        why: Why not from the other.
    """

    step: int
    source: str
    why: str


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint that may be restored.

    Attributes:
        point: Where it stands in the history of the run.
        found: The in-memory checkpoint; None if it is on storage.
    """

    point: Point
    found: InMemoryCheckpoint | None = None

    @property
    def step(self) -> int:
        """Its step."""
        return self.point.step

    def is_to_blame(self, error: BaseException) -> bool:
        """Whether an error of its load says that it is bad: then the next candidate is tried."""
        if self.found is None:
            return proves_damage(error)
        if isinstance(error, PeerError):
            return all(map(self.is_to_blame, error.failures.values()))
        return proves_damage(error) or isinstance(error, StorageError)


class CheckpointRestorer:
    """Restores checkpoints for all ranks together.

    Args:
        world: The ranks.
        defaults: Arguments of `fastload.load` that are not given with a restore.
        catalog: The checkpoints on storage.
        history: Lists them, and hears of those in memory.
        tier: The memory tier, or None.

    Attributes:
        restored: What was restored last, or None.
    """

    def __init__(
        self,
        world: World,
        defaults: Mapping[str, Any],
        catalog: Catalog,
        history: History,
        tier: MemoryTier | None,
    ) -> None:
        self.restored: RestoredCheckpoint | None = None
        self._world = world
        self._defaults = defaults
        self._catalog = catalog
        self._history = history
        self._tier = tier
        self._has_noted = False

    def note_memory(self) -> None:
        """Notes what is in memory, unless that was done: what is saved from here on is newer than all of it.

        A call of all ranks, if there is a tier.
        """
        if self._tier is not None and not self._has_noted:
            try:
                self._note(self._tier.survey())
            except FastloadError as error:
                self._warn(f"what is in memory is not known: {error}")

    def _note(self, found: Sequence[InMemoryCheckpoint], restored: InMemoryCheckpoint | None = None) -> None:
        """Notes the newest of some in-memory checkpoints, which is given up unless it was restored."""
        self._has_noted = True
        if found:
            self._history.note(Point(*found[-1].point), given_up=found[-1] is not restored)

    def in_memory(self) -> list[InMemoryCheckpoint]:
        """Returns what is complete in memory, the oldest first; a call of all ranks, if there is a tier."""
        found = self._tier.survey() if self._tier is not None else []
        return [each for each in found if each.is_complete]

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
        in_memory, reason = [], ""
        if self._tier is not None:
            in_memory = self._tier.survey()
            reason = _why_not_from_memory(in_memory)
        tried: list[_Candidate] = []
        while True:
            left = self._candidates(step, listing, in_memory, tried)
            if not left:
                also = f", and {reason}" if reason else ""
                raise CheckpointNotFound(f"{self._catalog.root}: no checkpoint to restore{also}")
            chosen = left[-1]
            try:
                state = self._load(chosen, left, arguments, reason)
            except FastloadError as error:
                if not chosen.is_to_blame(error):
                    raise
                tried.append(chosen)
                if chosen.found is None:
                    listing = self._look_again(chosen.step)
                left = self._candidates(step, listing, in_memory, tried)
                if not left or (step is not None and chosen.found is None):
                    raise
                if chosen.found is not None:
                    reason = f"step {chosen.step} in memory cannot be restored: {error}"
                    self._warn(reason)
                else:
                    self._warn(
                        f"step {chosen.step} cannot be restored, falling back to {left[-1].step}: {error}"
                    )
            else:
                self._settle(step, chosen, in_memory, reason)
                return state

    def _look_again(self, step: int) -> Listing:
        """Lists anew, and notes that a step is damaged, if it is still there.

        It may have been deleted meanwhile, for newer ones that another process saved.
        """
        listing = self._history.look()
        if any(point.step == step for point in listing.recorded):
            self._catalog.damaged.add(step)
        return listing

    def _candidates(
        self,
        step: int | None,
        listing: Listing,
        in_memory: Sequence[InMemoryCheckpoint],
        tried: Collection[_Candidate],
    ) -> list[_Candidate]:
        """Returns the checkpoints to try, the first one last; of equals that is the one in memory.

        Raises:
            UnsupportedVersion: There is one that this fastload cannot read, and that may be the newest.
        """
        unsupported = listing.unsupported
        found = [_Candidate(point) for point in listing.recorded]
        if step is not None:
            unsupported = {step: unsupported[step]} if step in unsupported else {}
            # One that is not listed is tried, too: the load says what is the matter.
            found = [one for one in found if one.step == step] or [_Candidate(Point(-1, step))]
        self._catalog.require_supported(unsupported)
        found += [
            _Candidate(Point(*each.point), each)
            for each in in_memory
            if each.is_complete and step in (None, each.step)
        ]
        left = [one for one in found if one not in tried]
        return sorted(left, key=lambda one: (one.point, one.found is not None))

    def _load(
        self, chosen: _Candidate, left: Sequence[_Candidate], arguments: Mapping[str, Any], reason: str
    ) -> Any:
        given = {**self._defaults, **arguments}
        given["options"] = options = given["options"] or self._defaults["options"]
        if chosen.found is None:
            made = RestoredCheckpoint(chosen.step, "storage", reason)
        else:
            stored = [other.step for other in left if other.found is None]
            why = f"the newest on storage is step {stored[-1]}" if stored else "storage has none"
            made = RestoredCheckpoint(chosen.step, "memory", why)
        if options.on_report is not None:
            given["options"] = replace(options, on_report=partial(_report_source, options.on_report, made))
        if chosen.found is None or self._tier is None:
            state = api.load(os.fspath(self._catalog.path(chosen.step)), **given)
        else:
            state = self._tier.load(chosen.found, given)
        self.restored = made
        return state

    def _settle(
        self,
        step: int | None,
        chosen: _Candidate,
        in_memory: Sequence[InMemoryCheckpoint],
        reason: str,
    ) -> None:
        """Has memory keep what is of use once something was restored."""
        if chosen.found is None and reason:
            self._warn(f"step {chosen.step} is restored from storage: {reason}")
        if self._tier is None:
            return
        if step is not None:  # what is newer stays
            self._note(in_memory, chosen.found)
        elif chosen.found is not None:
            self._tier.keep_only(chosen.found.name)
            self._note([chosen.found], chosen.found)
        else:
            self._tier.keep_only("")  # all of it is older than what was restored, or not complete
            self._history.note_void()
            self._has_noted = True

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            _log.warning("%s", text)


def _why_not_from_memory(found: Sequence[InMemoryCheckpoint]) -> str:
    """Says why nothing newer is restored from memory."""
    if not found:
        return "nothing is in memory"
    return found[-1].lack or f"memory has step {found[-1].step} only"


def _report_source(
    tell: Callable[[LoadReport], None], restored: RestoredCheckpoint, report: LoadReport
) -> None:
    tell(replace(report, source=restored.source, source_why=restored.why))
