"""Restores of the newest complete checkpoint, from storage or a tier."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastload import api
from fastload.comm.observers import notify
from fastload.comm.world import World
from fastload.errors import CheckpointNotFound, FastloadError, OptionError, proves_damage
from fastload.options import LoadOptions, chosen_options
from fastload.report import LoadReport
from fastload.training.catalog import MAX_STEP, Catalog, is_step
from fastload.training.history import History, Listing
from fastload.training.retention import Lineage, Point
from fastload.training.tier import STORAGE, Found, SaveTier

if TYPE_CHECKING:
    from fastload.loading.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A restored checkpoint.

    Attributes:
        step: Its step.
        source: Its `Found.source`.
        why: The reason for the source.
    """

    step: int
    source: str
    why: str


@dataclass(frozen=True)
class FoundOnStorage:
    """A checkpoint on storage; a `Found`.

    Attributes:
        point: Position in the history of the run.
        path: Its path, with credentials.
    """

    point: Point
    path: str
    source = STORAGE
    problem = ""
    lineage = Lineage()

    def load(self, arguments: Mapping[str, Any]) -> Any:
        """Loads it, on all ranks."""
        return api.load(self.path, **arguments)

    def blames(self, error: BaseException) -> bool:
        """Whether an error shows damage."""
        return proves_damage(error)


class CheckpointRestorer:
    """Restores checkpoints, on all ranks.

    Args:
        world: The ranks.
        defaults: Default arguments of `fastload.load`.
        catalog: The checkpoints on storage.
        history: The history of the run.
        tier: The tier, or None.

    Attributes:
        restored: The last restored checkpoint, or None.
    """

    def __init__(
        self,
        world: World,
        defaults: Mapping[str, Any],
        catalog: Catalog,
        history: History,
        tier: SaveTier | None,
    ) -> None:
        self.restored: RestoredCheckpoint | None = None
        self._world = world
        self._defaults = defaults
        self._catalog = catalog
        self._history = history
        self._tier = tier
        self._has_noted = False
        self._prefetched: tuple[Found, Checkpoint] | None = None

    def note_tier(self) -> None:
        """Notes the checkpoints in the tier, once: those saved from here on are newer.

        With a tier, all ranks call it.
        """
        if self._tier is not None and not self._has_noted:
            try:
                listing = self._history.listed()
                self._note(self._current(self._tier.survey(), listing))
            except FastloadError as error:
                self._warn(f"cannot list checkpoints in {self._tier.name}: {error}")

    def _note(self, in_tier: Sequence[Found], restored: Found | None = None) -> None:
        """Notes the newest checkpoint in the tier, which is abandoned unless it was restored."""
        self._has_noted = True
        if in_tier:
            self._history.note_in_tier(in_tier[-1].point, is_abandoned=in_tier[-1] is not restored)

    def choices(self, listing: Listing) -> list[tuple[Found, str]]:
        """Returns what a restore tries until one is intact, in this order, each with why its source is right.

        With a tier, a call of all ranks; raises as `restore`.
        """
        in_tier = self._survey()
        candidates = self._candidates(None, listing, in_tier, ())
        reason = self._why_not_from_tier(in_tier, listing)
        prepared = ((found, self._prepare(found, candidates, {}, reason)) for found in reversed(candidates))
        return [(found, restored.why) for found, (restored, _) in prepared]

    def _survey(self) -> Sequence[Found]:
        return self._tier.survey() if self._tier is not None else ()

    def _current(self, in_tier: Sequence[Found], listing: Listing) -> list[Found]:
        """Returns the checkpoints in the tier that no other start of the job has overtaken."""
        stored = listing.stored(self._catalog.damaged)
        return [candidate for candidate in in_tier if not candidate.lineage.overtaken_by(stored)]

    def prefetch(self, step: int | None, options: LoadOptions | None, listing: Listing) -> None:
        """Begins to read the checkpoint that `restore` would load from storage, if there is one.

        Args:
            step: As for `restore`.
            options: How to load it; None for the defaults.
            listing: As for `restore`.

        Raises:
            FastloadError: As for `fastload.prefetch`, unless the checkpoint is damaged.
        """
        in_tier = self._survey()
        candidates = self._candidates(step, listing, in_tier, ())
        if not candidates or candidates[-1].source != STORAGE:
            return
        chosen, reason = candidates[-1], self._why_not_from_tier(in_tier, listing)
        _, given = self._prepare(chosen, candidates, {"options": options}, reason)
        try:
            checkpoint = api.prefetch(os.fspath(self._catalog.path(chosen.point.step)), **given)
        except FastloadError as error:
            if not chosen.blames(error):
                raise  # `restore` finds the same and takes another one
        else:
            self._prefetched = chosen, checkpoint

    def end_prefetch(self) -> None:
        """Releases the checkpoint that was read ahead."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            prefetched[1].close()

    def restore(self, step: int | None, arguments: Mapping[str, Any], listing: Listing, began: float) -> Any:
        """Loads a checkpoint; see `CheckpointManager.restore`.

        Tries the newest on storage or in the tier first, and the next one only after damage.

        Args:
            step: The step; None for the newest.
            arguments: Arguments of `fastload.load` but for the path.
            listing: The checkpoints on storage.
            began: `time.perf_counter` of the call.

        Raises:
            FastloadError: As for `CheckpointManager.restore`.
        """
        in_tier = self._survey()
        reason = self._why_not_from_tier(in_tier, listing)
        tried: list[Found] = []
        while True:
            candidates = self._candidates(step, listing, in_tier, tried)
            if not candidates:
                also = f", and {reason}" if reason else ""
                raise CheckpointNotFound(f"{self._catalog.root}: no checkpoint to restore{also}")
            chosen = candidates[-1]
            try:
                state = self._load(chosen, candidates, arguments, reason)
            except FastloadError as error:
                if not chosen.blames(error):
                    raise
                tried.append(chosen)
                is_stored, failed = chosen.source == STORAGE, chosen.point.step
                if is_stored:
                    listing = self._look_again(failed)
                candidates = self._candidates(step, listing, in_tier, tried)
                if not candidates or (step is not None and is_stored):
                    raise
                if is_stored:
                    older = candidates[-1].point.step
                    self._warn(f"step {failed} cannot be restored, falling back to {older}: {error}")
                else:
                    reason = f"step {failed} in {chosen.source} cannot be restored: {error}"
                    self._warn(reason)
            else:
                is_passed_over = step is None and any(one.point > chosen.point for one in in_tier)
                if chosen.source == STORAGE and is_passed_over:
                    self._warn(f"step {chosen.point.step} is restored from storage: {reason}")
                self._tell_tier(step, chosen, self._current(in_tier, listing))
                assert self.restored is not None
                notify(self._world, "restore", began, **asdict(self.restored), num_damaged=len(tried))
                return state
            finally:
                self.end_prefetch()

    def _look_again(self, step: int) -> Listing:
        """Lists again, and notes that a step is damaged, unless another process has deleted it meanwhile."""
        listing = self._history.look()
        if any(point.step == step for point in listing.recorded):
            self._catalog.damaged.add(step)
        return listing

    def _candidates(
        self, step: int | None, listing: Listing, in_tier: Sequence[Found], tried: Collection[Found]
    ) -> list[Found]:
        """Returns the checkpoints to try, the best one last.

        At the same point, one in the tier is better than one on storage, unless the run went on without it.

        Raises:
            UnsupportedVersion: This fastload cannot read a checkpoint that may be the newest.
        """
        unsupported, points = listing.unsupported, list(listing.recorded)
        if step is not None:
            unsupported = {step: unsupported[step]} if step in unsupported else {}
            # A step that is not listed is tried, too: its load raises the right error.
            points = [point for point in points if point.step == step] or [Point(-1, step)]
        self._catalog.require_supported(unsupported)
        ordered: list[tuple[Point, int, Found]] = [
            (point, 1, FoundOnStorage(point, os.fspath(self._catalog.path(point.step)))) for point in points
        ]
        stored = listing.stored(self._catalog.damaged)
        for candidate in in_tier:
            if not candidate.problem and step in (None, candidate.point.step):
                other = candidate.lineage.overtaken_by(stored)
                place = (candidate.point, 2) if other is None else (min(candidate.point, other.point), 0)
                ordered.append((*place, candidate))
        ordered.sort(key=lambda candidate: candidate[:2])
        return [candidate for *_, candidate in ordered if candidate not in tried]

    def _load(self, chosen: Found, others: Sequence[Found], arguments: Mapping[str, Any], reason: str) -> Any:
        restored, given = self._prepare(chosen, others, arguments, reason)
        prefetched = self._prefetched
        is_as_prefetched = not arguments.keys() & self._defaults.keys()
        if prefetched is not None and prefetched[0] == chosen and is_as_prefetched:
            state = prefetched[1].load(**arguments)
        else:
            state = chosen.load(given)
        self.restored = restored
        return state

    def _prepare(
        self, chosen: Found, others: Sequence[Found], arguments: Mapping[str, Any], reason: str
    ) -> tuple[RestoredCheckpoint, dict[str, Any]]:
        """Returns the target of a load, and its arguments."""
        given = {**self._defaults, **arguments}
        given["options"] = options = given["options"] or self._defaults["options"]
        if chosen.source != STORAGE:
            stored = [other.point.step for other in others if other.source == STORAGE]
            reason = f"the newest on storage is step {stored[-1]}" if stored else "storage has none"
        restored = RestoredCheckpoint(chosen.point.step, chosen.source, reason)
        if options.on_report is not None:
            on_report = partial(_report_source, options.on_report, restored)
            given["options"] = replace(options, on_report=on_report)
        return restored, given

    def _tell_tier(self, step: int | None, chosen: Found, in_tier: Sequence[Found]) -> None:
        """Tells tier and history what was restored, so that checkpoints that are useless now can go."""
        if self._tier is None:
            return
        if step is not None:  # newer ones stay
            self._note(in_tier, chosen)
        elif chosen.source == STORAGE:
            self._tier.restored(None)  # all are older than the restored one, or incomplete
            self._history.note_void_tier()
            self._has_noted = True
        else:
            self._tier.restored(chosen)
            self._note([chosen], chosen)

    def _why_not_from_tier(self, in_tier: Sequence[Found], listing: Listing) -> str:
        """Returns why nothing newer is restored from the tier; empty without one."""
        if self._tier is None:
            return ""
        if not in_tier:
            return f"nothing is in {self._tier.name}"
        newest = in_tier[-1]
        step, other = newest.point.step, newest.lineage.overtaken_by(listing.stored(self._catalog.damaged))
        if other is not None and other.point <= newest.point:
            since = f"a later one went on without it and saved step {other.point.step}"
            return f"step {step} in {self._tier.name} is of an earlier start of the job; {since}"
        return newest.problem or f"{self._tier.name} has step {step} only"

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            _log.warning("%s", text)


def require_valid(step: Any, arguments: Mapping[str, Any]) -> None:
    """Checks the arguments of a restore on this rank.

    Raises:
        OptionError: It is no step, or the options are of another class.
        TypeError: `fastload.load` has no such argument.
    """
    if step is not None and not is_step(step):
        raise OptionError(f"step={step!r}: must be a whole number from 0 to {MAX_STEP}, or None")
    inspect.signature(api.load).bind("", **arguments)
    chosen_options(arguments.get("options"), LoadOptions)


def _report_source(
    tell: Callable[[LoadReport], None], restored: RestoredCheckpoint, report: LoadReport
) -> None:
    tell(replace(report, source=restored.source, source_why=restored.why))
