"""Order of the checkpoints of a run, and rules of retention.

Steps alone do not give the order: a run may go back to an earlier step, or another run may begin in its
place. So a save below the newest step begins a new *branch*. All checkpoints of a branch are newer than those
of earlier branches. Clocks are not used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple, Protocol

from fastload.errors import OptionError


class Point(NamedTuple):
    """Position of a checkpoint in the history of its run; later ones compare as greater.

    Attributes:
        branch: Number of times that the run had gone back before.
        step: Its step.
    """

    branch: int
    step: int


def branch_for(step: int, newest: Point | None) -> int:
    """Returns the branch of a new checkpoint, given the newest existing one."""
    if newest is None:
        return 0
    return newest.branch + 1 if step < newest.step else newest.branch


class StoredCheckpoint(NamedTuple):
    """A usable checkpoint on storage, as its root lists it.

    Attributes:
        point: Position in the history of the run.
        digest: Digest of its commit record.
        incarnation: Name of the start of the job that saved it; empty if it had no tier.
    """

    point: Point
    digest: str
    incarnation: str


@dataclass(frozen=True)
class Lineage:
    """Which start of the job saved a checkpoint to a tier, and what it knew of storage.

    Attributes:
        incarnation: Name of the start of the job; empty if that is not known.
        origin: Branch, step and digest of the newest checkpoint on storage that another start had saved, as
            this one listed it; None if there was none.
    """

    incarnation: str = ""
    origin: tuple[int, int, str] | None = None

    def overtaken_by(self, stored: Iterable[StoredCheckpoint]) -> StoredCheckpoint | None:
        """Returns the first checkpoint that another start of the job has saved since, or None.

        That start had no tier, or another one, and the run went on without this checkpoint, whatever its
        step.

        Args:
            stored: The usable checkpoints on storage.
        """
        if not self.incarnation:
            return None
        later = filter(self._is_later, stored)
        others = [other for other in later if other.incarnation != self.incarnation]
        return min(others, key=lambda other: other.point, default=None)

    def _is_later(self, stored: StoredCheckpoint) -> bool:
        """Whether the start that saved this one cannot have listed a checkpoint of another start."""
        if self.origin is None or stored.point > self.origin[:2]:
            return True
        return stored.point == self.origin[:2] and stored.digest != self.origin[2]


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint.

    Attributes:
        step: Its step.
        saved_s: When it was saved, in seconds since 1970.
        metrics: Metrics of that step.
        branch: Its branch; see `Point`.
    """

    step: int
    saved_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    branch: int = 0

    @property
    def point(self) -> Point:
        """Position in the history of the run."""
        return Point(self.branch, self.step)


class KeepPolicy(Protocol):
    """Which checkpoints of a run to keep.

    Rank 0 asks in the background, once a new checkpoint is durable; with `SaveOptions(shared=False)` the
    first rank of each host does. An error is logged, and nothing deleted.
    """

    def keep(self, saved: Sequence[SavedCheckpoint]) -> Collection[int]:
        """Returns the steps of the checkpoints to keep; the others are deleted.

        The newest one stays in any case, and so do those that this process has open, and bases of deltas.

        Args:
            saved: The complete checkpoints, oldest first.
        """


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules of retention. Without `keep_last` all checkpoints are kept; with it, those that any rule names.

    It is a `KeepPolicy`.

    Attributes:
        keep_last: Keeps this number of the newest checkpoints.
        keep_every: Keeps those whose step is a multiple of this.
        keep_every_seconds: Keeps the first one, and then each that is this much younger than the last one
            that this rule keeps.
        best: A metric, and ``min`` or ``max``: keeps the best checkpoint; of equals the newest.

    Raises:
        OptionError: A value is invalid.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_every_seconds: float | None = None
    best: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            good = value is None or (type(value) is int and value >= 1)
            _require(good, name, value, "a number of at least 1")
        seconds = self.keep_every_seconds
        good = seconds is None or (type(seconds) in (int, float) and 0 < seconds < math.inf)
        _require(good, "keep_every_seconds", seconds, "a number of seconds above 0")
        good = self.best is None or _is_best(self.best)
        _require(good, "best", self.best, 'a metric and "min" or "max"')

    def requires(self, one: SavedCheckpoint, others: Sequence[SavedCheckpoint]) -> bool:
        """Whether `keep_every` or `best` names a checkpoint, so that a newer one does not replace it.

        Args:
            one: The checkpoint.
            others: The checkpoints that exist or are being saved.
        """
        if self.keep_every is not None and one.step % self.keep_every == 0:
            return True
        return self.best is not None and one.step in _best([*others, one], *self.best)

    def best_of(self, one: SavedCheckpoint, other: SavedCheckpoint | None) -> SavedCheckpoint | None:
        """Returns the better one of two by the rule `best`; None without that rule."""
        if self.best is None:
            return None
        known = [one] if other is None else [other, one]
        best = _best(known, *self.best)
        return next((checkpoint for checkpoint in reversed(known) if checkpoint.step in best), None)

    def keep(self, saved: Sequence[SavedCheckpoint]) -> set[int]:
        """Returns the steps to keep; the same rules keep them after the others have gone."""
        if self.keep_last is None:
            return {checkpoint.step for checkpoint in saved}
        kept = {checkpoint.step for checkpoint in saved[-self.keep_last :]}
        if self.keep_every is not None:
            kept |= {checkpoint.step for checkpoint in saved if checkpoint.step % self.keep_every == 0}
        if self.keep_every_seconds is not None:
            kept |= _spaced(saved, self.keep_every_seconds)
        if self.best is not None:
            kept |= _best(saved, *self.best)
        return kept


def expendable(policy: KeepPolicy, saved: Sequence[SavedCheckpoint], *, needed: Collection[int]) -> list[int]:
    """Returns the steps to delete, oldest first.

    Args:
        policy: Names those to keep.
        saved: All complete checkpoints.
        needed: Steps that are kept in any case. The newest checkpoint is, too.
    """
    if not saved:
        return []
    ordered = tuple(sorted(saved, key=lambda checkpoint: checkpoint.point))
    kept = {*map(index, policy.keep(ordered)), *needed, ordered[-1].step}
    return [checkpoint.step for checkpoint in ordered if checkpoint.step not in kept]


def _spaced(ordered: Sequence[SavedCheckpoint], seconds: float) -> set[int]:
    kept: set[int] = set()
    due_s = -math.inf
    for one in sorted(ordered, key=lambda one: (one.saved_s, one.point)):
        if one.saved_s >= due_s:
            kept.add(one.step)
            due_s = one.saved_s + seconds
    return kept


def _best(ordered: Sequence[SavedCheckpoint], metric: str, direction: str) -> set[int]:
    sign = -1 if direction == "min" else 1
    values = [(sign * saved.metrics[metric], saved.point) for saved in ordered if metric in saved.metrics]
    measured = [(value, point) for value, point in values if not math.isnan(value)]
    return {max(measured)[1].step} if measured else set()


def _is_best(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[1] in ("min", "max")
    )


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={value!r}: must be {wanted}")
