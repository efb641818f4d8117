"""The seam to a tier: a place to save to that is faster than storage, and that survives less.

Storage has the history of the run, and decides what is newest. `SaveTier` and `Found` are all that a training
knows of a tier, such as the memory of the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastload.comm.world import World
from fastload.options import SaveOptions
from fastload.report import SaveReport
from fastload.training.catalog import Catalog
from fastload.training.retention import Lineage, Point

STORAGE = "storage"
"""The `Found.source` of checkpoints on storage, and its name for policies."""


class Found(Protocol):
    """A checkpoint that a restore could take, from storage or from a tier; the same on all ranks."""

    @property
    def point(self) -> Point:
        """Position in the history of the run."""

    @property
    def source(self) -> str:
        """``storage``, or the name of the tier."""

    @property
    def problem(self) -> str:
        """Why it cannot be restored, as far as that is known; empty if it can."""

    @property
    def lineage(self) -> Lineage:
        """As given to `SaveTier.save`: shows whether the run went on without it. Empty for one on storage."""

    def load(self, arguments: Mapping[str, Any]) -> Any:
        """Loads it; all ranks call this for the same checkpoint, in a restore.

        Args:
            arguments: All of `fastload.load` but for the path.

        Raises:
            FastloadError: As for `fastload.load`.
        """

    def blames(self, error: BaseException) -> bool:
        """Whether an error of `load` is due to this checkpoint, so that the restore tries another one.

        All ranks have to answer alike.
        """


class RunningSave(Protocol):
    """A save in the background, to a tier or to storage."""

    @property
    def report(self) -> SaveReport | None:
        """Its report once it has succeeded; otherwise None."""

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""


class SaveTier(Protocol):
    """A tier of a job, on one rank. All ranks have it, or none."""

    @property
    def name(self) -> str:
        """One word for messages and policies, such as ``memory``."""

    @property
    def num_hosts(self) -> int:
        """Number of machines that can be lost one by one; for intervals that are computed."""

    def admits(self, step: int) -> bool:
        """Whether a save can begin at a step: rank 0's decision, the same on all ranks.

        All ranks call it at the steps at which a save to the tier is due, perhaps several times a step. The
        answer for a step stays. If it is no, the training goes on without the save.
        """

    def save(
        self,
        point: Point,
        lineage: Lineage,
        state: Any,
        metadata: Mapping[str, str],
        *,
        problem: Exception | None = None,
    ) -> RunningSave:
        """Copies this rank's part of a state, which may change afterwards; saves it in the background.

        All ranks call it at a step that `admits` has admitted. It raises no `FastloadError`, since the
        others would not hear of it: errors, those of the state included, are warnings.

        Args:
            point: Its position in the history of the run.
            lineage: Stored with it, for `Found.lineage`.
            state: As for `fastload.save`.
            metadata: Text to store with it.
            problem: Why this rank cannot save; None if it can.
        """

    def wait(self) -> None:
        """Waits until the last save has ended. No call of all ranks."""

    def survey(self) -> Sequence[Found]:
        """Returns the checkpoints in the tier, complete or not, oldest first.

        All ranks call it: before the first save, before each restore and prefetch, and in `latest`.

        Raises:
            FastloadError: Some rank could not look; on all ranks.
        """

    def restored(self, found: Found | None) -> None:
        """Drops all other checkpoints, since the run continues from this one; no call of all ranks.

        Every rank calls it after a restore of the newest checkpoint.

        Args:
            found: One of the last `survey`; None if the run continues from storage.
        """

    def arm(self) -> None:
        """Prepares for the end of the process: a rank got a signal to stop.

        The thread of the signal calls it, on the ranks that got one: it neither waits nor meets other ranks.
        """

    def yield_to_training(self) -> None:
        """Ends what `arm` has begun, since the training saves to storage by itself.

        Every rank calls it before the save that follows a signal.
        """

    def close(self, *, goes_well: bool, lacking: Point | None, flushes: bool) -> None:
        """Closes the tier; every rank calls it once, after its last save.

        Checkpoints stay for the next start of the job unless storage has as new ones.

        Args:
            goes_well: Whether the training has ended by itself. If not, other ranks may be gone: the tier
                does not wait for them.
            lacking: The position from which on storage has no checkpoint that is in the tier, perhaps;
                None if it has all. The same on all ranks.
            flushes: Whether to write what storage lacks there. The same on all ranks.
        """


@dataclass(frozen=True, kw_only=True)
class TierJob:
    """The job that a tier belongs to.

    Attributes:
        world: The ranks of the training.
        group: Their process group, as for `fastload.load`.
        catalog: The checkpoints on storage, and access to them.
        num_copies: Number of hosts that are to have each byte.
        options: How to save to storage.
    """

    world: World
    group: Any
    catalog: Catalog
    num_copies: int
    options: SaveOptions


OpenTier = Callable[[TierJob], SaveTier]
"""Opens a tier, on all ranks. Raises a `FastloadError` on all of them if one cannot open it."""
