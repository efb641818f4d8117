"""What all ranks know of the checkpoints of a run: which there are, and in which order they were saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastload.comm.world import World, agree
from fastload.errors import OptionError
from fastload.training.catalog import Catalog, Entry
from fastload.training.retention import Point, branch_for

__all__ = ["History", "Listing"]

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
