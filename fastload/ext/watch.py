"""`fastload.watch`: the versions of a model that another job saves, one after the other."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import torch

from fastload import api
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.failures import require_same
from fastload.comm.group import Meeting, separate_call
from fastload.comm.world import World
from fastload.errors import (
    DeadlineExceeded,
    FastloadError,
    OptionError,
    StorageError,
    WorldError,
    may_be_gone,
    proves_damage,
    some_of,
)
from fastload.loading.checkpoint import Checkpoint
from fastload.options import LoadOptions, Patience
from fastload.storage import locate, name_of
from fastload.training.catalog import Catalog, metrics_of
from fastload.training.history import History, Listing, RecordSeen
from fastload.training.retention import Point

__all__ = ["Version", "Watch", "watch"]

_log = logging.getLogger(__name__)
_MAX_PAUSE_S = 5.0  # in one step of the ranks, so that each soon learns that another one has left


@short_tracebacks
def watch(
    root: str | os.PathLike[str],
    *,
    after: int | None = None,
    newest_only: bool = True,
    poll_s: float = 1.0,
    timeout_s: float | None = None,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Watch:
    """Waits for the checkpoints that another job saves below a root, for inference ranks.

    A call of all ranks, which all get the same versions. The jobs share the root only::

        with fastload.watch("/checkpoints/policy") as versions:
            for version in versions:
                version.load(into=model)

    Args:
        root: A directory or URL, such as the root of a `CheckpointManager`; it need not exist yet. Its
            versions are the complete checkpoints ``step_00001234`` and so on.
        after: The step that the ranks already have; only newer versions come. None for all.
        newest_only: Whether only the newest version comes. If not, all come, oldest first, as far as they
            are still there; a warning names those that retention seems to have deleted before.
        poll_s: Least time in seconds between two listings of the root. One rank lists a shared storage.
        timeout_s: Longest wait for a version, in seconds; None for no limit.
        process_group: As for `fastload.load`.
        storage_options: As for `fastload.load`.
        options: As for `fastload.load`. Loads are always `atomic`.

    Raises:
        OptionError: An argument is invalid.
        PlanMismatch: The arguments of the ranks differ.
        FastloadError: A rank did not respond.
    """
    with Meeting(process_group, f"watching {name_of(root)}") as meeting:
        chosen = replace(meeting.choose(options, LoadOptions), atomic=True)
        for name, value in (("poll_s", poll_s), ("timeout_s", timeout_s)):
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise OptionError(f"{name}={value!r}: must be a positive number of seconds")
        if after is not None and (type(after) is not int or after < 0):
            raise OptionError(f"after={after!r}: must be a step, from 0 on")
        location = locate(root)
    world = meeting.world
    patience = Patience(chosen.retries, world.patience_s / 2)
    catalog = Catalog(location, storage_options, patience, checks_bases=chosen.bases is None)
    shared = {
        "root": location.given,
        "after": after,
        "newest_only": newest_only,
        "timeout_s": timeout_s,
        **chosen.shared_values(),
    }
    with world.ending(), world.step() as step:
        step.answer({"shared": catalog.shared, **shared})
    views = step.answers
    require_same(views, *shared)
    lists = world.rank == 0 or not views[world.rank]["shared"]
    history = History(world, catalog, lists=lists, process_group=process_group)
    arguments = {
        "process_group": process_group,
        "storage_options": storage_options,
        "options": chosen,
    }
    terms = WatchTerms(after, newest_only, poll_s, timeout_s, arguments, warns=world.rank == 0)
    return Watch(catalog, history, terms)


@dataclass(frozen=True)
class WatchTerms:
    """The arguments of `watch`, checked.

    Attributes:
        arguments: Those of `fastload.prefetch`.
        warns: Whether this rank logs the warnings, for all ranks.
    """

    after: int | None
    newest_only: bool
    poll_s: float
    timeout_s: float | None
    arguments: Mapping[str, Any]
    warns: bool

    @property
    def options(self) -> LoadOptions:
        """How to load."""
        options: LoadOptions = self.arguments["options"]
        return options


@short_tracebacks
class Version:
    """A complete checkpoint that the ranks have read and verified. Made by `Watch`.

    Attributes:
        step: Its step.
        path: Its path or URL.
        checkpoint: The open checkpoint, which the next call of the `Watch` closes.
    """

    def __init__(
        self, step: int, path: str, checkpoint: Checkpoint, ended: Callable[[BaseException | None], None]
    ) -> None:
        self.step = step
        self.path = path
        self.checkpoint = checkpoint
        self._ended = ended

    @property
    def metadata(self) -> dict[str, str]:
        """Text that the writer attached."""
        return self.checkpoint.metadata

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that `CheckpointManager.save` was given."""
        return metrics_of(self.metadata)

    def load(
        self,
        *,
        into: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        names: Sequence[str] | str | None = None,
        strict: bool = True,
    ) -> Any:
        """Loads it on all ranks; see `fastload.load` for arguments, result and errors.

        No tensor of `into` changes before all ranks have every byte, verified. `Watch.version` then is this
        step. If the load fails while tensors change, `Watch.version` is None. After that, or a failure of
        storage or of a rank, the `Watch` gives this version again, or a newer one.
        """
        try:
            result = self.checkpoint.load(into=into, device=device, dtype=dtype, names=names, strict=strict)
        except BaseException as error:
            self._ended(error)
            raise
        self._ended(None)
        return result

    def __repr__(self) -> str:
        return f"Version(step={self.step}, path={self.path!r})"


class _Reading(NamedTuple):
    """A version that is being read.

    Attributes:
        point: Its position in the history of the run.
        record: Its commit record, as it was listed.
        checkpoint: It.
    """

    point: Point
    record: RecordSeen
    checkpoint: Checkpoint


class _Skips:
    """Finds versions that were deleted before they were given out.

    Some of them were listed earlier. Others came and went between two listings, which is likely if the
    version before them is gone, too; they follow from the least distance between two steps.
    """

    def __init__(self) -> None:
        self._listed: tuple[Point, ...] = ()
        self._distance = math.inf

    def before(self, point: Point, last: Point | None, listing: Listing) -> list[int]:
        """Returns the steps that are missing between the last version and the next one."""
        listed, self._listed = self._listed, listing.complete
        known = sorted({*listing.complete, point if last is None else last})
        same_branch = [b.step - a.step for a, b in pairwise(known) if a.branch == b.branch]
        self._distance = min([self._distance, *same_branch])
        if last is None:
            return []
        missing = {each for each in listed if last < each < point}
        if last not in listing.recorded and last.branch == point.branch:
            steps = range(last.step, point.step, int(self._distance))
            missing.update(Point(point.branch, step) for step in steps)
        return [each.step for each in sorted(missing.difference(listing.recorded, [last]))]


@short_tracebacks
class Watch:
    """An iterator over the versions below a root. Made by `fastload.watch`; use it as a context manager.

    All ranks make the same calls. `next` waits for a version: the ranks list the root, open what is new, and
    read and verify their shares of it into host memory (see `fastload.prefetch`).

    - A version that is deleted while it is read, or before it comes, is left out; with `newest_only=False` a
      warning names it.
    - A version that proves to be damaged is left out, with a warning, until it is saved again.
    - A version that is saved again with another state comes again.
    - A version that a newer fastload saved is an error, `UnsupportedVersion`.
    - After any other error, such as one of storage, the next call tries again.

    Attributes:
        version: Step of the version that the last load has put into place, on all ranks. None before the
            first load, and from a load that failed while tensors changed until the next one that succeeds.
    """

    def __init__(self, catalog: Catalog, history: History, terms: WatchTerms) -> None:
        self.version: int | None = terms.after
        self._catalog = catalog
        self._history = history
        self._terms = terms
        self._skips = _Skips()
        self._next_listing_s = 0.0  # of `time.monotonic`
        self._last: Point | None = None  # of the versions that were given out
        self._last_digest: str | None = None  # of its record, once that was listed
        self._damaged: dict[Point, RecordSeen] = {}
        self._reading: _Reading | None = None
        self._given: Checkpoint | None = None
        self._is_closed = False

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Version:
        """Waits until there is a new version, and all ranks have read it.

        Raises:
            DeadlineExceeded: None came within `timeout_s`; on all ranks. The next call waits again.
            UnsupportedVersion: A newer fastload saved what may be the newest version.
            FastloadError: As for `fastload.prefetch`.
        """
        self._release()
        until_s = math.inf if self._terms.timeout_s is None else time.monotonic() + self._terms.timeout_s
        while True:
            if self._reading is None:
                with self._call() as world, world.step() as pausing:
                    pausing.answer(self._pause(until_s))
                is_due, is_late = pausing.answers[0]
                if is_late:
                    after = self._terms.after if self._last is None else self._last.step
                    newer = "" if after is None else f" newer than step {after}"
                    raise DeadlineExceeded(
                        f"{self._catalog.root}: no version{newer} within {self._terms.timeout_s} s"
                    )
                if is_due:
                    self._begin()
            if (version := self._finish()) is not None:
                return version

    def poll(self) -> Version | None:
        """Returns a new version if all ranks have read it; never waits for one.

        A call of all ranks, for servers that work on between the calls: the first one that finds a version
        begins to read it in the background. Errors are those of `next`.
        """
        self._release()
        if self._reading is None:
            with self._call() as world, world.step() as step:
                step.answer(time.monotonic() >= self._next_listing_s)
            if step.answers[0]:
                self._begin()
            return None
        with self._call() as world, world.step() as step:
            step.answer(self._reading.checkpoint.is_prefetched)
        if not all(step.answers):
            return None
        return self._finish()

    def close(self) -> None:
        """Releases the memory of the versions that were read."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        given, self._given = self._given, None
        reading, self._reading = self._reading, None
        for checkpoint in (given, reading.checkpoint if reading is not None else None):
            if checkpoint is not None:
                checkpoint.__exit__(kind, error, trace)

    def _release(self) -> None:
        """Closes the version that was given out last."""
        if self._is_closed:
            raise WorldError(f"{self._catalog.root}: this watch is closed: call fastload.watch again")
        given, self._given = self._given, None
        if given is not None:
            given.close()

    def _call(self) -> AbstractContextManager[World]:
        group, timeout_s = self._terms.arguments["process_group"], self._terms.options.timeout_s
        return separate_call(group, f"watching {self._catalog.root.given}", timeout_s=timeout_s)

    def _pause(self, until_s: float) -> tuple[bool, bool]:
        """Waits for the next listing; returns whether it is due, and whether it is too late for it.

        The answer of the first rank counts, since clocks differ.
        """
        most_s = min(_MAX_PAUSE_S, self._terms.options.timeout_s / 4)
        end_s = min(self._next_listing_s, until_s)
        time.sleep(max(0.0, min(end_s - time.monotonic(), most_s)))
        now_s = time.monotonic()
        return now_s >= self._next_listing_s, now_s >= until_s

    def _look(self) -> Listing:
        listing = self._history.look()
        self._next_listing_s = time.monotonic() + self._terms.poll_s
        return listing

    def _begin(self) -> None:
        """Lists the root, and begins to read the next version, if there is one.

        Raises:
            FastloadError: As for `__next__`.
        """
        listing = self._look()
        point = self._choose(listing)
        if point is None:
            return
        record = listing.records[point]
        try:
            checkpoint = api.prefetch(os.fspath(self._catalog.path(point.step)), **self._terms.arguments)
        except FastloadError as error:
            if not self._is_left_out(point, record, error):
                raise
        else:
            self._reading = _Reading(point, record, checkpoint)

    def _finish(self) -> Version | None:
        """Waits until the ranks have read the version; returns None if there is none, or if it is left out.

        Raises:
            FastloadError: As for `__next__`.
        """
        if self._reading is None:
            return None
        (point, record, checkpoint), self._reading = self._reading, None
        try:
            checkpoint.wait()
        except BaseException as error:
            checkpoint.close()
            if not (isinstance(error, FastloadError) and self._is_left_out(point, record, error)):
                raise
            return None
        before = self._last, self._last_digest
        self._last, self._last_digest = point, record.digest
        self._given = checkpoint

        def ended(error: BaseException | None) -> None:
            if error is None:
                self.version = point.step
                return
            is_partial = getattr(error, "is_partial", True)  # an interrupt may come at any time
            if is_partial:
                self.version = None
            if is_partial or isinstance(error, StorageError | WorldError):
                self._last, self._last_digest = before

        return Version(point.step, self._catalog.path(point.step).given, checkpoint, ended)

    def _choose(self, listing: Listing) -> Point | None:
        """Returns the next version.

        Raises:
            UnsupportedVersion: This fastload cannot read what may be the newest one.
        """
        if self._last is None and self._terms.after is not None:
            self._last = max(
                (point for point in listing.recorded if point.step == self._terms.after),
                default=Point(0, self._terms.after),
            )
            if self._last in listing.records:
                self._last_digest = listing.records[self._last].digest
        last = self._last
        self._catalog.require_supported(
            {step: why for step, why in listing.unsupported.items() if last is None or step > last.step}
        )
        new = [
            point
            for point in listing.complete
            if (last is None or point > last or self._is_replaced(point, listing))
            and self._damaged.get(point) != listing.records[point]
        ]
        if not new or self._terms.newest_only:
            return max(new, default=None)
        missing = self._skips.before(min(new), last, listing)
        if missing and last is not None and self._terms.warns:
            _log.warning(
                "%s: step %d comes after step %d: retention seems to have deleted %s before this watch took "
                "them; a larger keep_last keeps versions longer, a smaller poll_s finds them earlier",
                *(self._catalog.root, min(new).step, last.step, some_of(f"step {step}" for step in missing)),
            )
        return min(new)

    def _is_replaced(self, point: Point, listing: Listing) -> bool:
        """Whether the last version was saved again, with another state."""
        known = self._last_digest
        return point == self._last and known is not None and listing.records[point].digest != known

    def _is_left_out(self, point: Point, record: RecordSeen, error: FastloadError) -> bool:
        """Whether a version that cannot be read was deleted meanwhile, or is damaged."""
        if not may_be_gone(error):
            return False
        path, listing = self._catalog.path(point.step), self._look()
        if point not in listing.recorded:
            _log.info("%s was deleted while it was read; left out", path)
            return True
        if not proves_damage(error):
            return False
        self._damaged[point] = record
        if self._terms.warns:
            _log.warning("%s is damaged; left out: %s", path, error)
        return True
