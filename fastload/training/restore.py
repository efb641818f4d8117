"""Restores of the newest complete checkpoint, from storage or memory."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastload import api
from fastload.comm.world import World
from fastload.errors import CheckpointNotFound, FastloadError, OptionError, may_be_gone, proves_damage
from fastload.options import LoadOptions, chosen_options
from fastload.report import LoadReport
from fastload.training.catalog import MAX_STEP, Catalog, is_step
from fastload.training.history import History, Listing
from fastload.training.retention import Point

if TYPE_CHECKING:
    from fastload.loading.checkpoint import Checkpoint
    from fastload.memory_tier.restore import InMemoryCheckpoint
    from fastload.memory_tier.tier import MemoryTier

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A restored checkpoint.

    Attributes:
        step: Its step.
        source: ``memory`` or ``storage``.
        why: The reason for the source.
    """

    step: int
    source: str
    why: str


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint that may be restored.

    Attributes:
        point: Position in the history of the run.
        found: The in-memory checkpoint; None if it is on storage.
        overtaken_at: Where the run went on without the in-memory checkpoint, if it did.
    """

    point: Point
    found: InMemoryCheckpoint | None = None
    overtaken_at: Point | None = field(default=None, compare=False)

    @property
    def order(self) -> tuple[Point, int]:
        """Position in which it is tried. Of equal ones, memory comes first, unless it was overtaken."""
        if self.overtaken_at is not None:
            return min(self.point, self.overtaken_at), 0
        return self.point, 1 if self.found is None else 2

    @property
    def step(self) -> int:
        """Its step."""
        return self.point.step

    def is_to_blame(self, error: BaseException) -> bool:
        """Whether an error of its load shows damage, so that the next candidate is tried."""
        return proves_damage(error) if self.found is None else may_be_gone(error)


class CheckpointRestorer:
    """Restores checkpoints, on all ranks.

    Args:
        world: The ranks.
        defaults: Default arguments of `fastload.load`.
        catalog: The checkpoints on storage.
        history: The history of the run.
        tier: The memory tier, or None.

    Attributes:
        restored: The last restored checkpoint, or None.
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
        self._prefetched: tuple[_Candidate, Checkpoint] | None = None

    def note_memory(self) -> None:
        """Notes the in-memory checkpoints, once: those saved from here on are newer.

        With a tier, all ranks call it.
        """
        if self._tier is not None and not self._has_noted:
            try:
                listing = self._history.listed()
                self._note(self._current(self._tier.survey(), listing))
            except FastloadError as error:
                self._warn(f"cannot list in-memory checkpoints: {error}")

    def _note(self, found: Sequence[InMemoryCheckpoint], restored: InMemoryCheckpoint | None = None) -> None:
        """Notes the newest in-memory checkpoint, which is abandoned unless it was restored."""
        self._has_noted = True
        if found:
            self._history.note_memory(Point(*found[-1].point), is_abandoned=found[-1] is not restored)

    def in_memory(self, listing: Listing) -> list[InMemoryCheckpoint]:
        """Returns the complete in-memory checkpoints that the run goes on from, oldest first.

        With a tier, a call of all ranks.

        Args:
            listing: The checkpoints on storage.
        """
        found = self._tier.survey() if self._tier is not None else []
        return [each for each in self._current(found, listing) if each.is_complete]

    def _current(self, found: Sequence[InMemoryCheckpoint], listing: Listing) -> list[InMemoryCheckpoint]:
        """Returns the in-memory checkpoints that no other start of the job has overtaken."""
        stored = listing.stored(self._catalog.damaged)
        return [each for each in found if not each.manifest.overtaken_by(stored)]

    def prefetch(self, step: int | None, options: LoadOptions | None, listing: Listing) -> None:
        """Begins to read the checkpoint that `restore` would load from storage, if there is one.

        Args:
            step: As for `restore`.
            options: How to load it; None for the defaults.
            listing: As for `restore`.

        Raises:
            FastloadError: As for `fastload.prefetch`, unless the checkpoint is damaged.
        """
        in_memory = self._tier.survey() if self._tier is not None else []
        candidates = self._candidates(step, listing, in_memory, ())
        if not candidates or candidates[-1].found is not None:
            return
        chosen = candidates[-1]
        reason = self._why_not_from_memory(in_memory, listing) if self._tier is not None else ""
        _, given = self._prepare(chosen, candidates, {"options": options}, reason)
        try:
            checkpoint = api.prefetch(os.fspath(self._catalog.path(chosen.step)), **given)
        except FastloadError as error:
            if not chosen.is_to_blame(error):
                raise  # `restore` finds the same and takes another one
        else:
            self._prefetched = chosen, checkpoint

    def end_prefetch(self) -> None:
        """Releases the checkpoint that was read ahead."""
        found, self._prefetched = self._prefetched, None
        if found is not None:
            found[1].close()

    def restore(self, step: int | None, arguments: Mapping[str, Any], listing: Listing) -> Any:
        """Loads a checkpoint; see `CheckpointManager.restore`.

        Tries the newest on storage or in memory first, and the next one only after damage.

        Args:
            step: The step; None for the newest.
            arguments: Arguments of `fastload.load` but for the path.
            listing: The checkpoints on storage.

        Raises:
            FastloadError: As for `CheckpointManager.restore`.
        """
        in_memory, reason = [], ""
        if self._tier is not None:
            in_memory = self._tier.survey()
            reason = self._why_not_from_memory(in_memory, listing)
        tried: list[_Candidate] = []
        while True:
            candidates = self._candidates(step, listing, in_memory, tried)
            if not candidates:
                also = f", and {reason}" if reason else ""
                raise CheckpointNotFound(f"{self._catalog.root}: no checkpoint to restore{also}")
            chosen = candidates[-1]
            try:
                state = self._load(chosen, candidates, arguments, reason)
            except FastloadError as error:
                if not chosen.is_to_blame(error):
                    raise
                tried.append(chosen)
                if chosen.found is None:
                    listing = self._look_again(chosen.step)
                candidates = self._candidates(step, listing, in_memory, tried)
                if not candidates or (step is not None and chosen.found is None):
                    raise
                if chosen.found is not None:
                    reason = f"step {chosen.step} in memory cannot be restored: {error}"
                    self._warn(reason)
                else:
                    older = candidates[-1].step
                    self._warn(f"step {chosen.step} cannot be restored, falling back to {older}: {error}")
            else:
                self._settle(step, chosen, self._current(in_memory, listing), reason)
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
        self,
        step: int | None,
        listing: Listing,
        in_memory: Sequence[InMemoryCheckpoint],
        tried: Collection[_Candidate],
    ) -> list[_Candidate]:
        """Returns the checkpoints to try, the best one last; of equals, memory is the better one.

        Raises:
            UnsupportedVersion: This fastload cannot read a checkpoint that may be the newest.
        """
        unsupported = listing.unsupported
        found = [_Candidate(point) for point in listing.recorded]
        if step is not None:
            unsupported = {step: unsupported[step]} if step in unsupported else {}
            # A step that is not listed is tried, too: its load raises the right error.
            found = [one for one in found if one.step == step] or [_Candidate(Point(-1, step))]
        self._catalog.require_supported(unsupported)
        stored = listing.stored(self._catalog.damaged)
        for each in in_memory:
            if each.is_complete and step in (None, each.step):
                other = each.manifest.overtaken_by(stored)
                found.append(
                    _Candidate(Point(*each.point), each, Point(*other.point) if other is not None else None)
                )
        return sorted((one for one in found if one not in tried), key=lambda one: one.order)

    def _load(
        self, chosen: _Candidate, others: Sequence[_Candidate], arguments: Mapping[str, Any], reason: str
    ) -> Any:
        restored, given = self._prepare(chosen, others, arguments, reason)
        if chosen.found is not None and self._tier is not None:
            state = self._tier.load(chosen.found, given)
        elif self._is_prefetched(chosen, arguments):
            assert self._prefetched is not None
            state = self._prefetched[1].load(**arguments)
        else:
            state = api.load(os.fspath(self._catalog.path(chosen.step)), **given)
        self.restored = restored
        return state

    def _is_prefetched(self, chosen: _Candidate, arguments: Mapping[str, Any]) -> bool:
        """Whether a checkpoint was read ahead in the way in which it is to be loaded."""
        is_same = self._prefetched is not None and self._prefetched[0] == chosen
        return is_same and not arguments.keys() & self._defaults.keys()

    def _prepare(
        self, chosen: _Candidate, others: Sequence[_Candidate], arguments: Mapping[str, Any], reason: str
    ) -> tuple[RestoredCheckpoint, dict[str, Any]]:
        """Returns the target of a load, and its arguments."""
        given = {**self._defaults, **arguments}
        given["options"] = options = given["options"] or self._defaults["options"]
        if chosen.found is None:
            restored = RestoredCheckpoint(chosen.step, "storage", reason)
        else:
            stored = [other.step for other in others if other.found is None]
            why = f"the newest on storage is step {stored[-1]}" if stored else "storage has none"
            restored = RestoredCheckpoint(chosen.step, "memory", why)
        if options.on_report is not None:
            on_report = partial(_report_source, options.on_report, restored)
            given["options"] = replace(options, on_report=on_report)
        return restored, given

    def _settle(
        self,
        step: int | None,
        chosen: _Candidate,
        in_memory: Sequence[InMemoryCheckpoint],
        reason: str,
    ) -> None:
        """Drops in-memory checkpoints that are useless after a restore."""
        if chosen.found is None and reason:
            self._warn(f"step {chosen.step} is restored from storage: {reason}")
        if self._tier is None:
            return
        if step is not None:  # newer ones stay
            self._note(in_memory, chosen.found)
        elif chosen.found is not None:
            self._tier.keep_only(chosen.found.name)
            self._note([chosen.found], chosen.found)
        else:
            self._tier.keep_only("")  # all are older than the restored one, or incomplete
            self._history.note_void_memory()
            self._has_noted = True

    def _why_not_from_memory(self, found: Sequence[InMemoryCheckpoint], listing: Listing) -> str:
        """Returns why nothing newer is restored from memory."""
        if not found:
            return "nothing is in memory"
        newest = found[-1]
        other = newest.manifest.overtaken_by(listing.stored(self._catalog.damaged))
        if other is not None and other.point <= newest.point:
            since = f"a later one went on without it and saved step {other.step}"
            return f"step {newest.step} in memory is of an earlier start of the job; {since}"
        return newest.problem or f"memory has step {newest.step} only"

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
