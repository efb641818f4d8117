"""How far a rank is in a call that all make."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Course", "LastStep"]


@dataclass(frozen=True, slots=True)
class LastStep:
    """The last step, while this rank has not said that it has heard the verdict."""

    step: int
    num_others: int
    failed: bool


@dataclass(slots=True)
class Course:
    """How far a rank is in the steps that all take.

    Attributes:
        call: What the ranks have met for, which each tells the others in the first step.
        step: Number of the next step.
        last: The step before it, while there is one of which the verdict has not been heard.
        bytes_along: What came along with the last verdict; None if it was read from the store.
        leavings: What this rank has left for others in the store, and takes away once it has heard.
        under_way: Number of the step that this rank waits in, if it does.
        has_left: Whether it has told the others that it takes no more steps.
    """

    call: str
    step: int = 0
    last: LastStep | None = None
    bytes_along: bytes | None = None
    leavings: list[str] = field(default_factory=list)
    under_way: int | None = None
    has_left: bool = False

    def take_step(self) -> int:
        """Returns the number of the next step."""
        step, self.step = self.step, self.step + 1
        return step
