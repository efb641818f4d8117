"""Which checkpoints of a run are kept, and which make room for newer ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastload.errors import OptionError

__all__ = ["Retention", "Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint that is whole.

    Attributes:
        step: Its step.
        saved_s: When it was saved, in seconds since 1970.
        metrics: What was measured at that step.
    """

    step: int
    saved_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What to keep. Without `keep_last` everything is; with it, that and what another rule names.

    Attributes:
        keep_last: Number of checkpoints of the highest steps.
        keep_every: Those whose step is a multiple of this.
        keep_every_seconds: The first one, and after each that this rule keeps the next one that is so much
            younger.
        best: A metric, and whether ``min`` or ``max`` is best: that checkpoint; of equals the latest.

    Raises:
        OptionError: A value cannot be used.
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

    def expendable(self, saved: Sequence[Saved], *, needed: Collection[int]) -> list[int]:
        """Returns the steps to delete, oldest first.

        To delete them changes nothing of what the rules say of the others.

        Args:
            saved: All checkpoints that are whole.
            needed: Steps that are kept whatever the rules say; the highest step is as well.
        """
        if self.keep_last is None or not saved:
            return []
        ordered = sorted(saved, key=lambda one: one.step)
        kept = {one.step for one in ordered[-self.keep_last :]} | set(needed)
        if self.keep_every is not None:
            kept |= {one.step for one in ordered if one.step % self.keep_every == 0}
        if self.keep_every_seconds is not None:
            kept |= _spaced(ordered, self.keep_every_seconds)
        if self.best is not None:
            kept |= _best(ordered, *self.best)
        return [one.step for one in ordered if one.step not in kept]


def _spaced(ordered: Sequence[Saved], seconds: float) -> set[int]:
    kept: set[int] = set()
    due_s = -math.inf
    for one in sorted(ordered, key=lambda one: (one.saved_s, one.step)):
        if one.saved_s >= due_s:
            kept.add(one.step)
            due_s = one.saved_s + seconds
    return kept


def _best(ordered: Sequence[Saved], metric: str, direction: str) -> set[int]:
    sign = -1 if direction == "min" else 1
    found = [(sign * one.metrics[metric], one.step) for one in ordered if metric in one.metrics]
    measured = [(value, step) for value, step in found if not math.isnan(value)]
    return {max(measured)[1]} if measured else set()


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
