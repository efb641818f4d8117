"""The history of a run: its checkpoints on all ranks, and the position of the next one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.comm.group import separate_call
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.training.catalog import Catalog, Entry
from fastload.training.retention import Lineage, Point, StoredCheckpoint, branch_for

_log = logging.getLogger(__name__)
_RECORDED = ("complete", "damaged")  # states of checkpoints with a commit record
_UNSUPPORTED = "unsupported"
_FIRST = Point(0, 0)


@dataclass(frozen=True)
class Listing:
    """The checkpoints at one time; the same on all ranks.

    Attributes:
        complete: The checkpoints that are complete by their listing, oldest first; on any host, if each has
            its own disk.
        recorded: The checkpoints with a commit record, complete or not.
        links: Steps whose names are symbolic links.
        unsupported: Step → why this fastload cannot read it.
        records: Recorded point → its commit record.
    """

    complete: tuple[Point, ...]
    recorded: tuple[Point, ...]
    links: frozenset[int]
    unsupported: Mapping[int, str]
    records: Mapping[Point, RecordSeen]

    def stored(self, damaged: Collection[int]) -> list[StoredCheckpoint]:
        """Returns the complete checkpoints, but for steps that are known to be damaged."""
        return [
            StoredCheckpoint(point, self.records[point].digest, self.records[point].incarnation)
            for point in self.complete
            if point.step not in damaged
        ]


class RecordSeen(NamedTuple):
    """A commit record, as it was listed. A checkpoint that is saved again at its point has another one.

    Attributes:
        digest: Its digest; empty if it is damaged.
        saved_s: Its time, in seconds since 1970.
        incarnation: Name of the start of the job that saved it; empty if it had no tier.
    """

    digest: str
    saved_s: float
    incarnation: str = ""


class History:
    """The history of a run: lists checkpoints on all ranks, and gives the position of the next one.

    Args:
        world: The ranks.
        catalog: The checkpoints.
        lists: Whether this rank lists storage; at least one rank does.
        process_group: Their group, as for `fastload.load`.
        incarnation: Name of this start of the job, if it has a tier.

    Attributes:
        incarnation: As given.
    """

    def __init__(
        self, world: World, catalog: Catalog, *, lists: bool, process_group: Any, incarnation: str = ""
    ) -> None:
        self.incarnation = incarnation
        self._world = world
        self._group = process_group
        self._catalog = catalog
        self._lists = lists
        self._newest: Point | None = None  # that was listed, noted, or is about to be saved
        self._in_tier: Point | None = None
        self._tier_is_void = False
        self._abandoned: Point | None = None
        self._listing: Listing | None = None  # the last one
        self._warned: set[int] = set()

    def call(self) -> AbstractContextManager[World]:
        """Returns the block of a call that lists the checkpoints; see `separate_call`."""
        what = f"listing the checkpoints in {self._catalog.root.given}"
        return separate_call(self._group, what, timeout_s=self._world.timeout_s)

    def look(self, world: World | None = None) -> Listing:
        """Lists the checkpoints, on all ranks.

        Args:
            world: The ranks, in a block of `call`; None to list in a call of its own.

        Raises:
            FastloadError: A rank could not list storage.
        """
        if world is None:
            with self.call() as world:
                return self.look(world)
        with world.step() as step:
            step.answer(self._list_here())
        rows = [row for listed in step.answers for row in listed]
        listing = Listing(
            complete=_points((branch, step) for branch, step, state, *_ in rows if state == "complete"),
            recorded=_points((branch, step) for branch, step, state, *_ in rows if state in _RECORDED),
            links=frozenset(step for _, step, _, is_link, *_ in rows if is_link),
            unsupported={step: problem for _, step, state, _, problem, *_ in rows if state == _UNSUPPORTED},
            records={
                Point(branch, step): RecordSeen(digest, saved_s, incarnation)
                for wanted in ("damaged", "complete")  # that of the first host where it is complete counts
                for branch, step, state, _, _, digest, saved_s, incarnation in reversed(rows)
                if state == wanted
            },
        )
        self._newest = max(listing.recorded, default=None)
        if self._in_tier is not None:
            self._newest = max(self._newest or self._in_tier, self._in_tier)
        self._listing = listing
        return listing

    def _list_here(self) -> list[tuple[int, int, str, bool, str, str, float, str]]:
        """Lists the checkpoints on this rank, if it lists; returns a row for each."""
        entries = self._catalog.entries() if self._lists else []
        self._warn_of(entries)
        return [
            (
                entry.point.branch,
                entry.step,
                entry.state,
                entry.is_link,
                entry.problem * (entry.state == _UNSUPPORTED),
                entry.summary.digest if entry.summary is not None else "",
                entry.saved_s,
                entry.summary.incarnation if entry.summary is not None else "",
            )
            for entry in entries
        ]

    @property
    def lineage(self) -> Lineage:
        """What this start of the job knows of storage, for the checkpoints that it saves to a tier."""
        if self._listing is None:
            return Lineage(self.incarnation)
        records = self._listing.records
        others = [
            point
            for point in self._listing.recorded
            if records[point].digest and records[point].incarnation != self.incarnation
        ]
        newest = max(others, default=None)
        origin = (*newest, records[newest].digest) if newest is not None else None
        return Lineage(self.incarnation, origin)

    def listed(self) -> Listing:
        """Returns the last listing, or lists; a call of all ranks.

        Raises:
            FastloadError: As for `look`.
        """
        return self._listing if self._listing is not None else self.look()

    def lacking(self, saved: Point | None) -> Point | None:
        """Returns the newest position in the tier, unless storage has it or a newer one.

        Without a save to storage, what earlier starts have left in the tier may be newer than all.

        Args:
            saved: The newest checkpoint that this start has saved to storage, or None.
        """
        if self._tier_is_void or (saved is not None and saved >= (self._in_tier or saved)):
            return None
        return self._in_tier or _FIRST

    @property
    def uses_tier(self) -> bool:
        """Whether this start of the job has saved to the tier, or restored from it."""
        return self._in_tier is not None

    def note_in_tier(self, point: Point, *, is_abandoned: bool = False) -> None:
        """Notes the newest checkpoint in the tier, which storage does not list.

        Args:
            point: Its position.
            is_abandoned: Whether the run continues from an older checkpoint.
        """
        self._in_tier, self._tier_is_void = point, False
        self._abandoned = point if is_abandoned else None
        self._newest = point if self._newest is None else max(self._newest, point)

    def note_void_tier(self) -> None:
        """Notes that all in the tier is useless: older than what is on storage, or incomplete."""
        self._in_tier, self._abandoned, self._tier_is_void = None, None, True

    def branch_for(self, step: int, *, is_void: bool = False) -> int:
        """Returns the branch of the next checkpoint. A call of all ranks.

        Args:
            step: Its step.
            is_void: Whether this rank cannot save it, and has no step of its own.

        Raises:
            OptionError: Its path is a link.
            UnsupportedVersion: This fastload cannot read a checkpoint that may be newer.
            FastloadError: A rank could not list storage, which the first save of a manager does.
        """
        listing = self._listing
        if listing is None or listing.unsupported:
            listing = self.look()
        self._catalog.require_supported(listing.unsupported)
        if step in listing.links:
            raise OptionError(f"{self._catalog.path(step)} is a link: a save does not replace its target")
        newest = self._newest
        if is_void and newest is not None:
            step = max(step, newest.step)  # so that the run does not go back on this rank alone
        branch = branch_for(step, newest)
        if Point(branch, step) == self._abandoned:  # of equal points, a restore prefers the tier
            branch += 1
        if newest is not None and branch > newest.branch and self._world.rank == 0:
            _log.warning(
                "step %d is saved after step %d: the run went back, or another one begins in %s. Checkpoints "
                "saved from here on count as newer than all earlier ones, whatever their steps: `latest` and "
                "`restore` prefer them, and the earlier ones are deleted first",
                step, newest.step, self._catalog.root,
            )  # fmt: skip
        self._newest = Point(branch, step)
        return branch

    def _warn_of(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.state in ("unreadable", _UNSUPPORTED) and entry.step not in self._warned:
                self._warned.add(entry.step)
                _log.warning("%s cannot be read; ignored: %s", self._catalog.path(entry.step), entry.problem)


def _points(positions: Iterable[tuple[int, int]]) -> tuple[Point, ...]:
    """Returns sorted points; the newest of each step, of which hosts may have different ones."""
    branches: dict[int, int] = {}
    for branch, step in positions:
        branches[step] = max(branch, branches.get(step, 0))
    return tuple(sorted(Point(branch, step) for step, branch in branches.items()))
